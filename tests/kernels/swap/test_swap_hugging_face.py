"""The models of Hugging Face themselves, where transformers is installed."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

from collections import Counter

import pytest
import torch

from tests.kernels.swap.reasons import TRAINS_OTHERWISE
from kprof.kernels.swap.swapping import swapped

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = (
    *("rmsnorm=eager", "layernorm=aten", "swiglu=eager", "geglu=eager"),
    *("rope=eager", "cross_entropy=eager"),
)
IDS = torch.arange(18).reshape(2, 9)


def made(kind, **options):
    torch.manual_seed(6)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "options", "sites"),
    [
        ("llama", {}, {"rmsnorm": 5, "swiglu": 2, "rope": 2}),
        ("qwen2", {}, {"rmsnorm": 5, "swiglu": 2, "rope": 2}),
        ("qwen3", {"head_dim": 16}, {"rmsnorm": 9, "swiglu": 2, "rope": 2}),
        ("mistral", {}, {"rmsnorm": 5, "swiglu": 2, "rope": 2}),
        ("gemma", {"head_dim": 16}, {"rmsnorm": 5, "geglu": 2, "rope": 2}),
        ("gemma2", {"head_dim": 16}, {"rmsnorm": 9, "geglu": 2, "rope": 2}),
        ("phi", {}, {"layernorm": 3, "rope": 2}),
        ("gpt_neox", {}, {"layernorm": 5, "rope": 2}),
        ("nemotron", {}, {"layernorm": 5, "rope": 2}),
        ("phi3", {}, {"rmsnorm": 5, "swiglu": 2, "rope": 2}),
        ("mixtral", {"num_local_experts": 4}, {"rmsnorm": 5, "rope": 2}),
        # Its angles are in float32, beside heads in bfloat16.
        ("olmo2", {}, {"rmsnorm": 9, "swiglu": 2, "rope": 2}),
        # Neighbouring pairs; of GLM, in a part of each head.
        ("cohere", {}, {"layernorm": 3, "swiglu": 2, "rope": 2}),
        ("glm", {"head_dim": 16}, {"rmsnorm": 5, "swiglu": 2, "rope": 2}),
        (
            *("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8}),
            {"layernorm": 3, "rope": 2},
        ),
        # One angle for each pair.
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 16}, {"rmsnorm": 5, "rope": 2}),
        # Complex numbers.
        (
            *("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 64}),
            {"rmsnorm": 5, "swiglu": 2, "rope": 2},
        ),
    ],
)
def test_the_sites_of_a_model_give_the_same_bits(kind, options, sites):
    model = made(kind, **options)
    with torch.no_grad():
        wanted = model(IDS).logits
        with swapped(model, *NAMES) as swap:
            got = model(IDS).logits
    assert torch.equal(got, wanted)
    assert Counter(site.kernel for site in swap.replaced) == {**sites, "cross_entropy": 1}


@pytest.mark.parametrize("kernel", ["cross_entropy=eager", "linear_cross_entropy=eager"])
def test_a_llama_trains_with_the_same_loss(kernel):
    model = made("llama").train()
    wanted = model(IDS, labels=IDS).loss
    with swapped(model, kernel) as swap:
        torch.testing.assert_close(model(IDS, labels=IDS).loss, wanted)
    assert [site.num_replaced for site in swap.replaced] == [1]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.5}),
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_a_model_that_shapes_its_logits_trains_with_the_same_loss(kind, sizes):
    model = made(kind, **sizes).train()
    wanted = model(IDS, labels=IDS).loss
    with swapped(model, "linear_cross_entropy=eager") as swap:
        torch.testing.assert_close(model(IDS, labels=IDS).loss, wanted)
    assert [site.num_replaced for site in swap.replaced] == [1]


def test_a_llama_generates_the_same_tokens():
    model = made("llama")
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    wanted = model.generate(IDS, **options)
    with swapped(model, *NAMES):
        assert torch.equal(model.generate(IDS, **options), wanted)


def test_a_llama_compiles_whole():
    torch.compiler.reset()
    model = made("llama")
    with swapped(model, *NAMES):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        loss = compiled(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, model(IDS, labels=IDS).loss)


@pytest.mark.parametrize(
    ("kind", "options", "kernel"),
    [
        ("llama", {}, "add_rmsnorm"),
        ("qwen2", {}, "add_rmsnorm"),
        ("qwen3", {"head_dim": 16}, "add_rmsnorm"),
        ("mistral", {}, "add_rmsnorm"),
        ("gemma", {"head_dim": 16}, "add_rmsnorm"),
        ("gemma2", {"head_dim": 16}, "add_rmsnorm"),
        ("mixtral", {"num_local_experts": 4}, "add_rmsnorm"),
        ("phi3", {}, "add_rmsnorm"),
        ("granite", {"residual_multiplier": 0.5}, "add_rmsnorm"),
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2}, "add_layernorm"),
    ],
)
def test_the_sum_in_front_of_a_norm_is_one_with_it(kind, options, kernel):
    model = made(kind, **options).train()
    wanted = _loss_and_gradients(model)
    with swapped(model, "add_rmsnorm=eager", "add_layernorm=eager") as swap:
        got = _loss_and_gradients(model)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert [(site.kernel, site.num_replaced) for site in swap.replaced] == [(kernel, 1)] * 2


@pytest.mark.parametrize("kind", ["phi", "olmo2"])
def test_layers_that_norm_no_sum_are_no_sites(kind):
    with swapped(made(kind), "add_rmsnorm=eager", "add_layernorm=eager") as swap:
        pass
    assert swap.replaced == ()


def test_a_checkpointed_llama_trains_the_same_with_its_sums_swapped():
    model = made("llama").train()
    model.gradient_checkpointing_enable()
    wanted = _loss_and_gradients(model)
    with swapped(model, "add_rmsnorm=eager", "rmsnorm=eager", "swiglu=eager") as swap:
        got = _loss_and_gradients(model)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    sums = [site for site in swap.replaced if site.kernel == "add_rmsnorm"]
    assert [site.num_replaced for site in sums] == [2, 2]


def _loss_and_gradients(model):
    # Dropout has to drop the same.
    torch.manual_seed(3)
    loss = model(IDS, labels=IDS).loss
    parameters = [one for one in model.parameters() if one.requires_grad]
    return [loss, *torch.autograd.grad(loss, parameters)]


EXPERTS = "its experts share one module, which multiplies inside a loop over them"
NO_ATTENTION = "its forward calls neither torch's attention nor one of Hugging Face's registry"
LEFT_ALONE = {
    "gptj": (
        {"n_embd": 64, "n_head": 4, "n_layer": 1, "rotary_dim": 8},
        {
            ("attention_forward", NO_ATTENTION),
        },
    ),
    "bloom": ({"n_head": 4, "n_layer": 1}, {("attention_forward", NO_ATTENTION)}),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        {
            ("swiglu", EXPERTS),
        },
    ),
    "llama4_text": (
        {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 64},
        {
            ("swiglu", EXPERTS),
            ("rmsnorm", "it has no weight"),
        },
    ),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_a_place_where_a_kernel_is_expected_has_a_row_with_its_reason(kind):
    options, rows = LEFT_ALONE[kind]
    model = made(kind, num_hidden_layers=1, **options)
    with swapped(model, *NAMES, "attention_forward=eager") as swap:
        pass
    assert {(site.kernel, site.skipped) for site in swap.skipped} == rows


def test_a_t5_has_rows_for_its_gated_mlps():
    config = transformers.T5Config(
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_heads=4,
        num_layers=1,
        vocab_size=100,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with swapped(model, *NAMES) as swap:
        pass
    assert Counter((site.kernel, site.skipped) for site in swap.skipped) == {
        ("swiglu", TRAINS_OTHERWISE): 2,
    }


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_a_mixture_keeps_the_loss_of_its_router_without_logits(kind, sizes):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "head_dim": 16}
    model = made(kind, **sizes, **options).float().train()
    router = model.model.layers[0].mlp.gate.weight

    def results():
        model.zero_grad()
        output = model(IDS, labels=IDS)
        output.loss.backward()
        return [output.loss.detach(), output.aux_loss.detach(), router.grad.clone()]

    expected = results()
    with swapped(model, "linear_cross_entropy=eager") as swap:
        found = results()
    assert swap.replaced[0].num_replaced == 1
    assert expected[1] > 0
    torch.testing.assert_close(found, expected)
