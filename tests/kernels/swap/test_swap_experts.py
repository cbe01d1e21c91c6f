"""Experts of mixtures of Hugging Face, by the kernel in Triton's interpreter."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch

from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import INTERPRETED

transformers = pytest.importorskip("transformers")
pytestmark = INTERPRETED

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def model_of(kind, **sizes):
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **sizes})
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()


def loss_and_gradients(model):
    ids = torch.arange(12).view(1, 12) + 5
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4}),
        ("granitemoe", {"num_local_experts": 4}),
        ("olmoe", {"num_experts": 4}),
    ],
)
def test_a_step_is_that_of_the_model_but_for_rounding(kind, sizes):
    model = model_of(kind, **sizes)
    loss, gradients = loss_and_gradients(model)
    with swapped(model, "moe_experts") as swap:
        ours, swapped_gradients = loss_and_gradients(model)
    assert [site.num_replaced for site in swap.sites] == [1]
    assert ours == pytest.approx(loss, rel=1e-2)
    for name, one in gradients.items():
        apart = (swapped_gradients[name] - one).float().norm()
        assert apart <= 0.05 * one.float().norm() + 1e-6, name


def test_after_the_swap_its_forward_is_that_of_its_class():
    model = model_of("mixtral", num_local_experts=4)
    experts = model.model.layers[0].mlp.experts
    with swapped(model, "moe_experts"):
        assert "forward" in experts.__dict__
    assert "forward" not in experts.__dict__


def test_experts_with_biases_are_left_alone():
    model = model_of("gpt_oss", num_local_experts=4)
    with swapped(model, "moe_experts") as swap:
        loss_and_gradients(model)
    assert [site.skipped for site in swap.sites] == ["its experts have biases"]


def test_weights_in_another_dtype_run_the_original():
    model = model_of("mixtral", num_local_experts=4).float()
    with swapped(model, "moe_experts") as swap:
        loss_and_gradients(model)
    assert [site.has_fallen_back for site in swap.sites] == [True]


def test_a_function_that_the_user_registered_for_the_experts_runs():
    model = model_of("mixtral", num_local_experts=4)
    interface = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    seen = []

    def experts(module, hidden_states, top_k_index, top_k_weights):
        seen.append(module)
        return hidden_states

    interface["grouped_mm"] = experts
    try:
        with swapped(model, "moe_experts") as swap:
            model(input_ids=torch.arange(4).view(1, 4))
    finally:
        del interface["grouped_mm"]
    assert len(seen) == 1
    assert [site.num_fallen_back for site in swap.sites] == [1]
