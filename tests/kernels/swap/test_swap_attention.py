"""Decode attention in the place of torch's, as scripts and Hugging Face's models call it."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch.nn import functional

from kprof.kernels.swap.translate import MANY_TOKENS
from tests.kernels.swap.reasons import MASK, OPTIONS, OWN_ATTENTION
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap import attention_calls as calls
from tests.kernels.swap.attention_calls import Attention
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
KERNEL = "decode_attention"


def call_of(tokens=1, keys=20, **more):
    return calls.call_of(tokens, keys, **more)


def ways_of(swap):
    return [(one.num_calls, one.provider, one.why) for site in swap.sites for one in site.calls]


def test_a_module_that_calls_torchs_attention_decodes_with_the_kernel():
    module, call = Attention(), call_of()
    wanted = module(*call)
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        torch.testing.assert_close(module(*call), wanted, rtol=1e-3, atol=1e-3)
        module(*call_of(keys=21))
    assert ways_of(swap) == [(2, "kprof", None)]
    assert torch.equal(module(*call), wanted)


def test_every_call_of_a_process_is_replaced_and_given_back():
    original, call = functional.scaled_dot_product_attention, call_of(heads=4)
    wanted = original(*call)
    with torch.no_grad(), swapped(None, KERNEL) as swap:
        found = functional.scaled_dot_product_attention(*call)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert functional.scaled_dot_product_attention is original
    assert [site.name for site in swap.replaced if site.num_replaced] == ["torch.nn.functional"]


def test_many_tokens_go_to_torch_for_that_reason():
    module, call = Attention(), call_of(tokens=20)
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        module(*call)
    assert ways_of(swap) == [(1, None, MANY_TOKENS)]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"attn_mask": torch.ones(1, 20, dtype=torch.bool)}, {}),
        ({"dropout_p": 0.5}, {}),
        ({"scale": 0.3}, {}),
        # Its first token would see the first key alone.
        ({"is_causal": True}, {}),
        ({}, {"tokens": 2}),
    ],
)
def test_calls_with_what_the_kernel_does_not_have_go_to_torch(options, shape):
    module, call = Attention(**options), call_of(**shape)
    torch.manual_seed(3)
    wanted = module(*call)
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        torch.manual_seed(3)
        assert torch.equal(module(*call), wanted)
    assert ways_of(swap) == [(1, None, OPTIONS)]


def test_calls_that_the_kernel_refuses_go_to_torch_with_the_reason():
    module = Attention()
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        module(*call_of(dim=48))
    ((_, provider, why),) = ways_of(swap)
    assert provider is None
    assert "heads of 48" in why


def test_gradients_are_torchs():
    module, (q, k, v) = Attention(), call_of()
    with swapped(module, KERNEL) as swap:
        module(q.requires_grad_(), k, v).float().sum().backward()
    assert "gradients" in ways_of(swap)[0][2]


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
REPLACED = [(1, None, "more than 8 tokens"), (1, "kprof", None)]


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def made(transformers, kind="llama", **options):
    torch.manual_seed(6)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).half().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.dim() < 2 else 6)
    return model


def decoded(transformers, model, cache="dynamic", tokens=3, padding=None):
    """Return the logits of the last tokens, which see nine others in a cache."""
    if cache == "dynamic":
        kept = transformers.DynamicCache(config=model.config)
    else:
        kept = transformers.StaticCache(config=model.config, max_cache_len=20)
    parts = [IDS[:, :9], IDS[:, 9 : 9 + tokens]]
    with torch.no_grad():
        for part in parts:
            end = kept.get_seq_length() + part.shape[1]
            mask = None if padding is None else padding[:, : int(end)]
            logits = model(part, past_key_values=kept, attention_mask=mask).logits
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_model_decodes_with_the_kernel_from_every_cache(transformers, kind, cache, tokens):
    model = made(transformers, kind)
    wanted = decoded(transformers, model, cache, tokens)
    for padding in (None, torch.ones(2, 12, dtype=torch.long)):
        with swapped(model, KERNEL) as swap:
            found = decoded(transformers, model, cache, tokens, padding)
        assert ways_of(swap) == 2 * REPLACED
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.03)
    assert torch.equal(decoded(transformers, model, cache, tokens), wanted)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_padded_batch_goes_to_the_original(transformers, cache):
    model, padding = made(transformers), torch.ones(2, 12, dtype=torch.long)
    padding[0, :3] = 0
    wanted = decoded(transformers, model, cache, padding=padding)
    with swapped(model, KERNEL) as swap:
        assert torch.equal(decoded(transformers, model, cache, padding=padding), wanted)
    assert ways_of(swap)[1] == (1, None, MASK)


@pytest.mark.parametrize("window", [4, 10, 30])
def test_a_sliding_window_is_kept(transformers, window):
    model = made(transformers, "mistral", sliding_window=window)
    wanted = decoded(transformers, model, "static")
    with swapped(model, KERNEL):
        found = decoded(transformers, model, "static")
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.03)


def test_a_mask_that_was_written_to_is_odd(transformers):
    model = made(transformers)

    def hide_a_key(module, args, kwargs):
        if kwargs["attention_mask"] is not None:
            kwargs["attention_mask"][:1, :, :, 2] = False

    wanted = decoded(transformers, model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(hide_a_key, with_kwargs=True)
    with swapped(model, KERNEL) as swap:
        found = decoded(transformers, model)
    assert not torch.allclose(found, wanted, rtol=0.01, atol=0.03)
    assert ways_of(swap)[1] == (1, None, MASK)


@pytest.mark.parametrize(
    ("cache", "way"),
    [("dynamic", (1, "kprof", None)), ("static", (1, None, MASK))],
)
def test_masks_of_inference_mode_go_to_the_original(transformers, cache, way):
    model = made(transformers)
    with torch.inference_mode(), swapped(model, KERNEL) as swap:
        decoded(transformers, model, cache, tokens=1)
    assert ways_of(swap)[1] == way


def test_a_model_that_attends_otherwise_is_left_to_it(transformers):
    model = made(transformers, attn_implementation="eager")
    wanted = decoded(transformers, model)
    with swapped(model, KERNEL) as swap:
        assert torch.equal(decoded(transformers, model), wanted)
    assert ways_of(swap)[0] == (2, None, OWN_ATTENTION)


def test_rotations_and_attention_of_one_module_are_swapped_together(transformers):
    model = made(transformers)
    with swapped(model, KERNEL, "rope=eager") as swap:
        decoded(transformers, model)
    assert {site.kernel: site.num_replaced for site in swap.sites} == {KERNEL: 1, "rope": 2}


def generated(model, static="static", **options):
    """Return tokens and logits of `generate`, with a cache of this kind."""
    kept = {"cache_implementation": static, "max_new_tokens": 4, "do_sample": False}
    found = model.generate(
        IDS + 1, **kept, **options, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences, torch.stack(found.logits)


def eager_or_compiled(transformers, is_compiled):
    """Return options of `generate`: torch.compile on this machine, too, or not at all."""
    if not is_compiled:
        return {"disable_compile": True}
    config = transformers.CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


UNENDING = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_generating_with_a_static_cache_decodes_with_the_kernel(transformers, is_compiled):
    torch.compiler.reset()
    model = made(transformers, **UNENDING)
    options = eager_or_compiled(transformers, is_compiled)
    wanted = generated(model, **options)
    with swapped(model, KERNEL) as swap:
        found = generated(model, **options)
    ours = [one for site in swap.sites for one in site.calls if one.provider == "kprof"]
    # A graph is counted when it is compiled, its runs are not.
    assert [(one.num_calls, one.is_compiled) for one in ours] == (
        2 * [(1, True)] if is_compiled else 2 * [(3, False)]
    )
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=0.01, atol=0.05)
    assert "create_masks_for_generate" not in model.__dict__
    assert torch.equal(generated(model, **options)[1], wanted[1])


def test_generating_with_padding_goes_to_the_original(transformers):
    model, padding = made(transformers, **UNENDING), torch.ones(2, 12, dtype=torch.long)
    padding[0, :3] = 0
    wanted = generated(model, attention_mask=padding, disable_compile=True)
    with swapped(model, KERNEL) as swap:
        found = generated(model, attention_mask=padding, disable_compile=True)
    assert torch.equal(found[1], wanted[1])
    assert ways_of(swap)[1] == (3, None, MASK)


@pytest.mark.parametrize("window", [8, 12, 14])
def test_generating_past_a_window_decodes_with_the_kernel(transformers, window):
    model = made(transformers, "mistral", **UNENDING, sliding_window=window)
    wanted = generated(model, disable_compile=True)
    with swapped(model, KERNEL) as swap:
        found = generated(model, disable_compile=True)
    assert ways_of(swap)[1] == (3, "kprof", None)
    torch.testing.assert_close(found[1], wanted[1], rtol=0.01, atol=0.05)
