"""Norms, gated MLPs and FP8 layers swapped in together: what is cast once, and by whom."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn

from kprof.kernels.fp8 import fp8_linear, _copies
from kprof.kernels.swap.sites import linears
from kprof.kernels.swap.swapping import swapped
from tests.kernels.fp8_layers import nothing_kept  # noqa: F401
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    compiled,
)
from tests.kernels.swap_models import Mlp, Norm

pytestmark = INTERPRETED
SIZE = 32
TOGETHER = ("rmsnorm", "add_rmsnorm", "swiglu", "fp8_linear")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, f"{name}_proj", nn.Linear(SIZE, SIZE, bias=False))

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + torch.tanh(self.k_proj(x)) * self.v_proj(x))


class Layer(nn.Module):
    """As in Llama."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(SIZE), Norm(SIZE)
        self.self_attn, self.mlp = Attention(), Mlp(SIZE)

    def forward(self, x):
        residual = x
        x = self.input_layernorm(x)
        x = self.self_attn(x)
        x = residual + x
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return residual + x


@pytest.fixture
def route(monkeypatch):
    """Let layers quantise their input, as bfloat16 on a GPU is; and another where it is set."""
    way = {"route": "tiles"}
    monkeypatch.setattr(linears, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(fp8_linear, "route_of", lambda *sizes: way["route"])
    return way


@pytest.fixture
def model(route):
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).half()


@pytest.fixture
def casts(monkeypatch):
    """Note how many rows of activations layers quantise themselves."""
    counted = []
    cast = fp8_linear.quantize_fp8

    def count(x):
        counted.append(x.shape[0])
        return cast(x)

    monkeypatch.setattr(fp8_linear, "quantize_fp8", count)
    return counted


def given(num_rows=5, seed=3):
    return torch.randn(1, num_rows, SIZE, generator=torch.Generator().manual_seed(seed)).half()


def joined(swap):
    counted = {site.name: sum(one.num_joined for one in site.calls) for site in swap.sites}
    return {name: number for name, number in counted.items() if number}


def alone(model, x):
    """Return what the same kernels give where each layer casts what it is given."""
    with torch.no_grad(), swapped(model, *TOGETHER[:-1]), swapped(model, TOGETHER[-1]) as swap:
        results = [model(x) for _ in range(2)]
    assert not joined(swap)
    assert torch.equal(*results)
    return results[0]


JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.slow
def test_from_the_second_call_on_each_activation_is_cast_by_what_made_it(model, casts):
    x = given()
    expected = alone(model, x)
    casts.clear()
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        found = [model(x) for _ in range(3)]
    assert all(torch.equal(one, expected) for one in found)
    # The first call casts for each of seven layers, the others for what attention gives to o_proj.
    assert len(casts) == 2 * (7 + 1 + 1)
    assert len(joined(swap)) == 12
    assert set(joined(swap).values()) == {2}
    assert {name.rpartition(".")[2] for name in joined(swap)} == set(JOINED)
    assert [site.num_replaced for site in swap.replaced if "proj" in site.name] == [3] * 14


def test_without_fp8_layers_no_copy_is_kept(model):
    with torch.no_grad(), swapped(model, *TOGETHER[:-1]):
        model(given())
        assert not _copies._activations
    with torch.no_grad(), swapped(model, "fp8_linear") as swap:
        model(given())
        assert not _copies._activations
    assert not joined(swap)


def test_where_layers_do_not_cast_nothing_is_made_for_them(model, route):
    route["route"] = "wide"
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        for _ in range(3):
            model(given())
    assert not joined(swap)


def test_peers_that_cast_otherwise_are_left_to_themselves(model, monkeypatch):
    monkeypatch.delitem(linears.BY_ROWS, "kprof")
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        model(given())
        model(given())
    assert not joined(swap)


def test_an_activation_that_a_hook_changed_is_cast_anew(model, casts):
    def add(module, args, y):
        y.add_(0.5)

    model[0].input_layernorm.register_forward_hook(add)
    x = given()
    expected = alone(model, x)
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        found = [model(x) for _ in range(2)]
    assert all(torch.equal(one, expected) for one in found)
    names = {name for name in joined(swap) if name.startswith("0.self_attn")}
    assert not names
    assert "1.self_attn.q_proj" in joined(swap)


@pytest.mark.slow
def test_an_activation_that_a_hook_replaced_is_cast_anew(model):
    model[0].mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    x = given()
    expected = alone(model, x)
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        found = [model(x) for _ in range(2)]
    assert all(torch.equal(one, expected) for one in found)
    assert "0.mlp.gate_proj" not in joined(swap)
    assert "0.mlp.up_proj" in joined(swap)


@pytest.mark.slow
def test_training_casts_as_ever_in_between(model):
    x = given()
    with swapped(model, *TOGETHER) as swap:
        with torch.no_grad():
            model(x)
            expected = model(x)
        before = joined(swap)
        trained = model(x)
        trained.float().sum().backward()
        assert joined(swap) == before
        with torch.no_grad():
            found = model(x)
    assert torch.equal(trained, expected)
    assert torch.equal(found, expected)
    assert all(one.grad is not None for one in model.parameters())


def test_another_capture_reads_nothing_of_the_last(model, monkeypatch):
    capture = {"number": 1}
    monkeypatch.setattr(_copies, "_stream_of", lambda x: (0, capture["number"]))

    def begin_another(module, args):
        capture["number"] += 1

    layer = model[0].mlp.up_proj
    layer.register_forward_pre_hook(begin_another)
    x = given()
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        model(x)
        found = model(x)
    assert "0.mlp.up_proj" not in joined(swap)
    assert joined(swap)["0.mlp.gate_proj"] == 1
    layer._forward_pre_hooks.clear()
    assert torch.equal(found, alone(model, x))


@pytest.mark.slow
def test_rows_of_another_number_are_other_rows(model):
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        found = [model(given(n, seed=n)) for n in (5, 1, 8, 5)]
    assert joined(swap)["0.mlp.down_proj"] == 3
    for one, n in zip(found, (5, 1, 8, 5), strict=True):
        assert torch.equal(one, alone(model, given(n, seed=n)))


def test_a_module_that_norms_in_between_takes_nothing_away(route):
    """As Qwen's norms of queries and keys do."""

    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.q_norm = Norm(SIZE)

        def forward(self, x):
            return self.o_proj(self.q_norm(self.q_proj(x)) + self.k_proj(x) + self.v_proj(x))

    torch.manual_seed(0)
    model = nn.Sequential(Norm(SIZE), Normed()).half()
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        model(given())
        model(given())
    assert set(joined(swap)) == {"1.q_proj", "1.k_proj", "1.v_proj"}


@pytest.mark.slow
@COMPILED
def test_compiled_graphs_hold_the_cast_and_neither_make_nor_read_copies(model):
    x = given()
    expected = alone(model, x)
    with torch.no_grad(), swapped(model, *TOGETHER) as swap:
        run = compiled(model)
        found = [run(x) for _ in range(2)]
        assert not _copies._activations
    assert all(torch.equal(one, expected) for one in found)
    assert not joined(swap)


def test_after_the_swap_nothing_is_remembered(model):
    with torch.no_grad(), swapped(model, *TOGETHER):
        model(given())
        model(given())
    assert not _copies._activations
