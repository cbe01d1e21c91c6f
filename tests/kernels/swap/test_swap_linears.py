"""The swap of linear layers to FP8: which are taken, which are spared, and how to say so."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from kprof.kernels.swap.sites import linears
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import (
    INTERPRETED,
    compiled,
)
from tests.kernels.swap_models import snapshot

pytestmark = INTERPRETED


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(linears, "LEAST_WEIGHTS", 1)
    torch.manual_seed(0)
    return Model().half()


TOKENS = torch.arange(6).view(2, 3)


def names(sites):
    return [site.name for site in sites]


def why(swap, name):
    return next(site.skipped for site in swap.skipped if site.name == name)


def test_all_layers_but_the_head_are_replaced_and_counted(model):
    before = snapshot(model)
    plain = model(TOKENS).detach()
    with swapped(model, "fp8_linear") as swap, torch.no_grad():
        found = model(TOKENS)
    assert names(swap.replaced) == ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert [site.num_replaced for site in swap.replaced] == [1] * 4
    assert "heads stay" in why(swap, "lm_head")
    error = float((found - plain).norm() / plain.norm())
    assert 1e-4 < error < 0.05
    assert snapshot(model) == before
    assert torch.equal(model(TOKENS), plain)


def test_a_filter_takes_and_leaves_layers_by_their_names(model):
    with swapped(model, "fp8_linear@blocks.*;!*.down") as swap:
        pass
    assert names(swap.replaced) == ["blocks.0.up", "blocks.1.up"]
    assert "not among" in why(swap, "blocks.0.down")


@pytest.mark.parametrize(
    ("patterns", "taken"),
    [
        ("64x*", ["blocks.0.up", "blocks.1.up"]),
        ("*x64", ["blocks.0.down", "blocks.1.down"]),
        ("!64x32", ["blocks.0.down", "blocks.1.down"]),
        ("blocks.1.*;!32x*", ["blocks.1.up"]),
        ("6?x32;blocks.0.*", ["blocks.0.up", "blocks.0.down", "blocks.1.up"]),
        ("128x*", []),
    ],
)
def test_a_filter_takes_and_leaves_layers_by_their_shapes(model, patterns, taken):
    with swapped(model, f"fp8_linear@{patterns}") as swap:
        pass
    assert names(swap.replaced) == taken


def test_a_pattern_of_names_may_contain_an_x(model):
    model.blocks[0].x2 = nn.Linear(32, 64).half()
    with swapped(model, "fp8_linear@*x2") as swap:
        pass
    assert names(swap.replaced) == []
    with swapped(model, "fp8_linear@*.x2") as swap:
        pass
    assert names(swap.replaced) == ["blocks.0.x2"]


def test_a_head_that_is_named_in_full_is_taken(model):
    with swapped(model, "fp8_linear@lm_head") as swap:
        pass
    assert names(swap.replaced) == ["lm_head"]


def test_a_router_stays_as_precise_as_it_is(model):
    model.blocks[0].gate = nn.Linear(32, 16).half()
    model.blocks[1].gate_proj = nn.Linear(32, 16).half()
    with swapped(model, "fp8_linear") as swap:
        pass
    assert "routers stay" in why(swap, "blocks.0.gate")
    assert "blocks.1.gate_proj" in names(swap.replaced)


def test_weights_shared_with_an_embedding_are_spared(model):
    model.last = nn.Linear(32, 16, bias=False)
    model.last.weight = model.embed.weight
    with swapped(model, "fp8_linear") as swap:
        pass
    assert "embedding" in why(swap, "last")


def test_small_layers_odd_shapes_and_other_dtypes_are_spared(model, monkeypatch):
    model.blocks[0].up = nn.Linear(32, 63).half()
    model.blocks[0].down = nn.Linear(64, 32).float()
    monkeypatch.setattr(linears, "LEAST_WEIGHTS", 2_048)
    model.blocks[1].down = nn.Linear(63, 32).half()
    with swapped(model, "fp8_linear") as swap:
        pass
    assert names(swap.replaced) == ["blocks.1.up"]
    assert "multiples of 16" in why(swap, "blocks.0.up")
    assert "float32" in why(swap, "blocks.0.down")
    assert "too few" in why(swap, "blocks.1.down")


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_that_are_more_than_linear_are_left_alone(model):
    model.blocks[0].up = Scaled(32, 64).half()
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    with swapped(model, "fp8_linear") as swap:
        pass
    assert names(swap.replaced) == ["blocks.0.down", "blocks.1.down"]
    assert "plain Linear" in why(swap, "blocks.0.up")
    assert "plain Linear" in why(swap, "blocks.1.up")


class Elsewhere(torch.Tensor):
    pass


def test_weights_that_are_no_plain_tensors_are_left_alone(model):
    weight = model.blocks[0].up.weight.detach().as_subclass(Elsewhere)
    model.blocks[0].up.weight = nn.Parameter(weight, requires_grad=False)
    with swapped(model, "fp8_linear") as swap:
        pass
    assert "Elsewhere" in why(swap, "blocks.0.up")


def test_a_layer_that_is_pruned_while_it_is_swapped_runs_the_original(model):
    layer, x = model.blocks[0].up, torch.randn(3, 32).half()
    with swapped(model, "fp8_linear@blocks.0.up") as swap, torch.no_grad():
        prune.l1_unstructured(layer, "bias", 8)
        found = layer(x)
    assert torch.equal(found, nn.functional.linear(x, layer.weight, layer.bias))
    (site,) = swap.fallen_back
    assert "no parameters" in site.calls[0].why


def test_weights_written_past_torchs_counting_are_seen_by_the_next_swap(model):
    layer, x = model.blocks[0].down, torch.randn(3, 64).half()
    with torch.no_grad():
        with swapped(model, "fp8_linear"):
            assert layer(x).any()
        layer.weight.data.zero_()
        with swapped(model, "fp8_linear"):
            assert not layer(x).any()


def test_new_weights_of_another_shape_raise_as_they_do_without_it(model):
    layer, x = model.blocks[0].down, torch.randn(3, 64).half()
    with swapped(model, "fp8_linear"), torch.no_grad():
        layer(x)
        layer.weight = nn.Parameter(torch.randn(32, 48).half())
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(x)


def test_a_copy_of_a_swapped_model_computes_as_before_and_can_be_swapped_itself(model):
    plain = model(TOKENS)
    with swapped(model, "fp8_linear"):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for one in copies:
            assert torch.equal(one(TOKENS), plain)
    for one in copies:
        with swapped(one, "fp8_linear") as swap, torch.no_grad():
            assert not torch.equal(one(TOKENS), plain)
        assert [site.num_replaced for site in swap.replaced] == [1] * 4


def test_on_a_device_without_autocast_the_original_runs(model):
    with swapped(model.to("meta"), "fp8_linear") as swap:
        assert model(TOKENS.to("meta")).shape == (2, 3, 16)
    assert [site.num_fallen_back for site in swap.fallen_back] == [1] * 4


def test_training_goes_through_it_and_gradients_arrive(model):
    other = copy.deepcopy(model)
    other(TOKENS).float().sum().backward()
    with swapped(model, "fp8_linear"):
        model(TOKENS).float().sum().backward()
    for one, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert float((one.grad - wanted.grad).norm() / wanted.grad.norm()) < 0.2


def test_what_it_cannot_take_goes_to_the_original_and_is_counted(model):
    layer = model.blocks[0].up
    x = torch.randn(2, 32)
    with swapped(model, "fp8_linear@blocks.0.up") as swap, torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(found, expected)
    (site,) = swap.fallen_back
    assert site.num_fallen_back == 1


def test_it_compiles_in_one_graph(model):
    block = model.blocks[0]
    x = torch.randn(3, 32).half()
    with swapped(block, "fp8_linear") as swap, torch.no_grad():
        expected = block(x)
        assert torch.equal(compiled(lambda x: block(x))(x), expected)
    assert [site.num_replaced for site in swap.replaced] == [1, 1]
    assert any(calls.is_compiled for site in swap.replaced for calls in site.calls)
