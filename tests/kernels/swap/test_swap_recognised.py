"""What a module computes where numbers are large, rows have neighbours, or gradients are wanted."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.kernels.swap.reasons import OTHER_GRADIENTS
from kprof.kernels.swap.reads import WRITES
from kprof.kernels.swap.sites.norms import OTHER
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Mlp, Norm

NORMS = ("rmsnorm=eager", "layernorm=aten")


class CutOff(Mlp):
    """As in mixtures of experts: what is large is cut off."""

    def __init__(self, size, largest):
        super().__init__(size)
        self.largest = largest

    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=self.largest)
        up = self.up_proj(x).clamp(-self.largest, self.largest)
        return self.down_proj(self.act_fn(gate) * up)


class Detached(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).detach()) * self.up_proj(x))


class Noting(Mlp):
    def forward(self, x):
        self.seen = x.abs().max()
        return super().forward(x)


class DetachedNorm(Norm):
    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rms.detach())


class NormOfAll(Norm):
    """Norms all of a batch's entry, which is its row where there are two dimensions."""

    def forward(self, x):
        squares = x.pow(2).mean(tuple(range(1, x.dim())), keepdim=True)
        return self.weight * (x * torch.rsqrt(squares + self.variance_epsilon))


class CountingNorm(Norm):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


def reason_for(module, *names):
    with swapped(module, *names) as swap:
        pass
    (site,) = swap.sites
    return site.skipped


@pytest.mark.parametrize("largest", [7.0, 10.0, 16.0, 100.0, 1_000.0])
def test_an_mlp_that_cuts_large_numbers_off_is_another_one(largest):
    assert "is not known" in reason_for(CutOff(8, largest), "swiglu=eager")


@pytest.mark.parametrize(
    ("module", "names", "why"),
    [
        (Detached(8), ("swiglu=eager",), OTHER_GRADIENTS),
        (DetachedNorm(8), NORMS, OTHER_GRADIENTS),
        (Noting(8), ("swiglu=eager",), WRITES),
        (CountingNorm(8), NORMS, WRITES),
        (NormOfAll(8), NORMS, OTHER),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_only_looks_the_same_is_left_alone(module, names, why):
    assert reason_for(module, *names) == why


def test_a_norm_of_groups_is_no_norm_of_rows():
    norm, x = nn.GroupNorm(1, 8), torch.randn(2, 8, 8)
    wanted = norm(x)
    with swapped(norm, *NORMS) as swap:
        assert torch.equal(norm(x), wanted)
    assert "random rows" in swap.sites[0].skipped


def test_an_activation_that_is_exchanged_or_patched_is_called():
    mlp, x = Mlp(8), torch.randn(3, 8)
    with swapped(mlp, "swiglu=eager") as swap:
        mlp(x)
        mlp.act_fn.forward = torch.tanh
        patched = mlp(x)
        mlp.act_fn = nn.ReLU()
        exchanged = mlp(x)
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    assert torch.equal(patched, mlp.down_proj(torch.tanh(gate) * up))
    assert torch.equal(exchanged, mlp.down_proj(functional.relu(gate) * up))
    assert [(one.num_calls, one.provider) for one in swap.sites[0].calls] == [
        (1, "eager"),
        (2, None),
    ]


def test_hooks_of_all_modules_see_an_activation():
    mlp, seen = Mlp(8), []
    hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    with swapped(mlp, "swiglu=eager"):
        mlp(torch.randn(3, 8))
    hook.remove()
    assert nn.SiLU in seen


def test_a_result_lies_as_the_originals_where_rows_lie_in_another_order():
    norm, x = Norm(8), torch.randn(2, 3, 4, 8).transpose(1, 2)
    wanted = norm(x)
    with swapped(norm, "rmsnorm=eager") as swap:
        assert norm(x).stride() == wanted.stride()
        norm(x.contiguous())
        norm(x=x)
    assert [one.provider for one in swap.sites[0].calls] == [None, "eager", None]
