"""Norms whose weights move while a swap is on."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Norm

EAGER = ("rmsnorm=eager", "layernorm=aten", "add_rmsnorm=eager", "add_layernorm=eager")
MOVED = "its weights are no parameters of its own any more"


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.part, self.norm = nn.Linear(8, 8), norm

    def forward(self, x):
        x = x + self.part(x)
        return x + self.norm(x)


class Triple(nn.Module):
    def forward(self, weight):
        return 3 * weight


def plain(norm):
    weight = norm.weight
    del norm.weight
    norm.weight = 2 * weight.detach()


def shadowed(norm):
    norm.__dict__["weight"] = 2 * norm.weight.detach()


def normed(by):
    def move(norm):
        # These want a matrix.
        norm.weight.data = norm.weight.data[None]
        by(norm)
        norm.register_forward_pre_hook(lambda m, _: setattr(m, "weight", m.weight.view(-1)))

    return move


MOVES = {
    "prune": lambda norm: prune.l1_unstructured(norm, "weight", 0.5),
    "parametrize": lambda norm: parametrize.register_parametrization(norm, "weight", Triple()),
    "plain": plain,
    "shadowed": shadowed,
    "weight_norm": normed(weight_norm),
    "spectral_norm": normed(spectral_norm),
}
NORMS = {"rmsnorm": Norm, "layernorm": nn.LayerNorm}


@pytest.fixture(params=NORMS)
def layer(request):
    torch.manual_seed(0)
    layer = Layer(NORMS[request.param](8, eps=1e-6))
    nn.init.normal_(layer.norm.weight, 2.0)
    return layer


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "alone"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:.*is deprecated")
def test_a_norm_whose_weight_moves_runs_the_original(layer, move, joined):
    x = torch.randn(4, 8)
    other = copy.deepcopy(layer)
    with swapped(layer, *(EAGER if joined else EAGER[:2])) as swap:
        layer(x)
        torch.manual_seed(1)
        MOVES[move](layer.norm)
        found = layer(x)
    torch.manual_seed(1)
    MOVES[move](other.norm)
    assert torch.equal(found, other(x))
    assert sum(site.num_replaced for site in swap.sites) == 1
    assert swap.sites[0].num_fallen_back == 1


CHANGES = {
    "dtype": lambda norm: norm.double(),
    "data": lambda norm: setattr(norm.weight, "data", 2 * norm.weight.data),
    "shape": lambda norm: setattr(norm, "weight", nn.Parameter(torch.full((1,), 3.0))),
    "swapped tensors": lambda norm: torch.utils.swap_tensors(
        norm.weight, nn.Parameter(torch.full((8,), 3.0))
    ),
    "device": lambda norm: norm.to("meta"),
}


def result_or_error(layer, x):
    try:
        return layer(x).detach()
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("norm", [Norm, nn.RMSNorm])
def test_weights_of_another_dtype_shape_or_device_give_what_they_gave(norm, change):
    torch.manual_seed(0)
    layer = Layer(norm(8, eps=1e-6))
    x, other = torch.randn(4, 8), copy.deepcopy(layer)
    with swapped(layer, *EAGER):
        layer(x)
        CHANGES[change](layer.norm)
        found = result_or_error(layer, x)
    CHANGES[change](other.norm)
    wanted = result_or_error(other, x)
    assert type(found) is type(wanted)
    assert found == wanted if isinstance(wanted, str) else torch.equal(found, wanted)
