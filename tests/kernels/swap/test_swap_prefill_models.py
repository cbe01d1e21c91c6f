"""Attention of many queries in models of Hugging Face."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import functools

import pytest
import torch

from kprof.kernels.swap.translate import FEW_TOKENS, MANY_TOKENS
from tests.kernels.swap.reasons import MASK, ROOM_IN_CACHE
from kprof.kernels.swap.providers import UNMEASURED
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import INTERPRETED
from tests.kernels.swap.attention_calls import KERNEL, NAME, drawn, ways_of

pytestmark = INTERPRETED
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
IDS = torch.arange(24).reshape(2, 12)
OURS = 2 * [(1, "kprof", None)]


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def made(transformers, kind="llama", **options):
    torch.manual_seed(6)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    model = transformers.AutoModel.from_config(config).half().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.dim() < 2 else 6)
    return model


def states(model, parts=(IDS,), **options):
    """Return the hidden states of the last of some parts, one after another."""
    with torch.no_grad():
        for part in parts:
            found = model(part, **options).last_hidden_state
    return found


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.03)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "bert"])
def test_a_model_reads_its_prompt_with_the_kernel(transformers, kind):
    model = made(transformers, kind)
    wanted = states(model)
    with swapped(model, KERNEL) as swap:
        close(states(model), wanted)
        close(states(model, attention_mask=torch.ones_like(IDS)), wanted)
    assert ways_of(swap) == 2 * [(2, "kprof", None)]
    assert torch.equal(states(model), wanted)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("granite", {"attention_multiplier": 1 / 128}),
        ("gemma3_text", {"query_pre_attn_scalar": 144}),
    ],
)
def test_a_model_with_a_scale_of_its_own_reads_its_prompt_with_the_kernel(
    transformers, kind, options
):
    model = made(transformers, kind, **options)
    wanted = states(model)
    with swapped(model, KERNEL) as swap:
        close(states(model), wanted)
    assert ways_of(swap) == OURS
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1 / 8
    assert not torch.allclose(states(model), wanted, rtol=0.01, atol=0.03)


def test_a_static_cache_is_read_as_far_as_it_is_filled(transformers):
    model, found = made(transformers), []
    with swapped(model, KERNEL) as swap:
        for _ in range(2):
            cache = transformers.StaticCache(config=model.config, max_cache_len=20)
            found.append(states(model, past_key_values=cache))
    assert ways_of(swap) == 2 * [(2, "kprof", None)]
    close(found[0], states(model))


def test_a_static_cache_that_holds_earlier_tokens_goes_to_the_original(transformers):
    model, parts = made(transformers), (IDS[:, :2], IDS[:, 2:])
    with swapped(model, KERNEL) as swap:
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        found = states(model, parts, past_key_values=cache)
    assert ways_of(swap)[1] == (1, None, ROOM_IN_CACHE)
    close(found, states(model)[:, 2:])


def test_a_model_reads_with_one_kernel_and_decodes_with_the_other(transformers):
    model, parts = made(transformers), (IDS[:, :11], IDS[:, 11:])
    with swapped(model, KERNEL, "decode_attention") as swap:
        cache = transformers.DynamicCache(config=model.config)
        found = states(model, parts, past_key_values=cache)
    assert ways_of(swap) == OURS
    assert ways_of(swap, "decode_attention") == 2 * [(1, None, MANY_TOKENS), OURS[0]]
    close(found, states(model)[:, 11:])


def test_a_later_part_of_a_prompt_sees_the_earlier_ones(transformers):
    model, parts, found = made(transformers), (IDS[:, :2], IDS[:, 2:]), []
    with swapped(model, KERNEL) as swap:
        cache = transformers.DynamicCache(config=model.config)
        found = states(model, parts, past_key_values=cache)
    assert ways_of(swap) == 2 * [(1, None, FEW_TOKENS), (1, "kprof", None)]
    close(found, states(model)[:, 2:])


@pytest.mark.parametrize("window", [4, 10, 30])
def test_a_sliding_window_is_kept(transformers, window):
    model = made(transformers, "mistral", sliding_window=window)
    wanted = states(model)
    with swapped(model, KERNEL) as swap:
        close(states(model), wanted)
    assert ways_of(swap) == OURS


def test_a_padded_batch_goes_to_the_original(transformers):
    model, padding = made(transformers), torch.ones_like(IDS)
    padding[0, :3] = 0
    wanted = states(model, attention_mask=padding)
    with swapped(model, KERNEL) as swap:
        assert torch.equal(states(model, attention_mask=padding), wanted)
    assert ways_of(swap) == 2 * [(1, None, MASK)]


def test_sequences_in_one_row_go_to_the_original(transformers):
    model, places = made(transformers), torch.arange(12).remainder(5)[None].expand(2, -1)
    options = {"position_ids": places, "use_cache": False}
    wanted = states(model, **options)
    with swapped(model, KERNEL) as swap:
        assert torch.equal(states(model, **options), wanted)
    assert ways_of(swap) == 2 * [(1, None, MASK)]


@pytest.mark.parametrize(
    ("asked", "provider", "why"),
    [(NAME, None, UNMEASURED), (f"{NAME}=eager", "eager", None)],
)
def test_a_call_is_counted_once_where_torchs_attention_is_replaced_too(
    transformers, asked, provider, why
):
    model = made(transformers)
    wanted = states(model)
    with swapped(None, asked) as swap:
        assert torch.equal(states(model), wanted)
    called = {site.name: site.calls for site in swap.sites if site.calls}
    assert [
        (one.num_calls, one.provider, one.why) for calls in called.values() for one in calls
    ] == 2 * [(1, provider, why)]
    assert "torch.nn.functional" not in called


def test_another_swap_decides_about_what_one_leaves(transformers):
    with swapped(None, f"{NAME}=eager") as outer:
        model = made(transformers)
        with swapped(model, "decode_attention") as inner:
            states(model)
    assert ways_of(inner, "decode_attention") == 2 * [(1, None, MANY_TOKENS)]
    assert sum(site.num_replaced for site in outer.sites) == 2


def test_a_model_compiles_whole_with_its_masks(transformers):
    model = made(transformers)
    wanted = states(model)
    with torch.no_grad(), swapped(model, f"{NAME}=eager"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(IDS).last_hidden_state, wanted)
    torch.compiler.reset()


def test_under_autocast_what_goes_back_has_the_originals_gradients(transformers):
    model, padding = made(transformers).float(), torch.ones_like(IDS)
    padding[0, :3] = 0
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients_of(model, attention_mask=padding)
        with swapped(model, NAME):
            found = gradients_of(model, attention_mask=padding)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_an_attention_that_wraps_torchs_is_another_one(transformers):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, torchs = made(transformers), ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(torchs)
    def twice(*args, **kwargs):
        y, weights = torchs(*args, **kwargs)
        return 2 * y, weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = twice
    try:
        wanted = states(model)
        with swapped(model, f"{NAME}=eager"):
            assert torch.equal(states(model), wanted)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = torchs


def gradients_of(model, **options):
    model.zero_grad()
    hidden = model(IDS, **options).last_hidden_state.float()
    # The squares would add up to the same whatever the weights are: hidden states are normalised.
    (hidden * drawn(*hidden.shape).float()).sum().backward()
    return [one.grad for one in model.parameters()]


def test_training_is_ours_and_counted(transformers):
    model = made(transformers)
    wanted = gradients_of(model)
    with swapped(model, KERNEL) as swap:
        found = gradients_of(model)
    assert ways_of(swap) == 2 * [(1, "kprof", None)]
    for ours, torchs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-2, atol=1e-2 * float(torchs.abs().max()))


def test_unmeasured_training_is_torchs(transformers):
    model = made(transformers)
    wanted = gradients_of(model)
    with swapped(model, "attention_forward") as swap:
        found = gradients_of(model)
    assert ways_of(swap) == 2 * [(1, None, UNMEASURED)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_training_under_autocast_is_ours(transformers):
    model = made(transformers).float()
    with torch.autocast("cpu", torch.float16):
        wanted = gradients_of(model)
        with swapped(model, KERNEL) as swap:
            found = gradients_of(model)
    assert ways_of(swap) == OURS
    for ours, torchs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-2, atol=1e-2 * float(torchs.abs().max()))
