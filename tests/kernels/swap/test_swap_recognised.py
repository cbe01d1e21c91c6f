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
from tests.kernels.kernel_checks import INTERPRETED
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


@INTERPRETED
@pytest.mark.parametrize("provider", ["kprof", "eager"])
@pytest.mark.parametrize(
    "order",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2].transpose(1, 2),
        lambda x: x.permute(2, 0, 1, 3)[:, :1],
    ],
)
def test_a_result_lies_as_the_originals_where_rows_lie_in_another_order(order, provider):
    norm, x = Norm(8), torch.randn(2, 3, 4, 8)
    mine, others = (x.clone().requires_grad_() for _ in range(2))
    wanted = norm(order(mine))
    wanted.sin().sum().backward()
    with swapped(norm, f"rmsnorm={provider}") as swap:
        result = norm(order(others))
    result.sin().sum().backward()
    assert result.stride() == wanted.stride()
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(others.grad, mine.grad)
    assert [one.provider for one in swap.sites[0].calls] == [provider]


@pytest.mark.parametrize(
    "order", [lambda x: x.transpose(1, 3), lambda x: x[:1].expand(2, -1, -1, -1)]
)
def test_rows_that_are_not_in_one_piece_or_lie_on_one_another_have_the_same_result(order):
    norm, x = Norm(8), torch.randn(2, 8, 4, 8)
    wanted = norm(order(x))
    with swapped(norm, "rmsnorm=eager"):
        result = norm(order(x))
    torch.testing.assert_close(result, wanted)


class Contiguous(Norm):
    """Its result is contiguous, whatever its input."""

    def forward(self, x):
        return super().forward(x).contiguous()


def test_a_norm_that_lays_its_rows_out_anew_is_left_to_do_so():
    norm, x = Contiguous(8), torch.randn(2, 3, 4, 8).transpose(1, 2)
    with swapped(norm, "rmsnorm=eager") as swap:
        assert norm(x).is_contiguous()
        norm(x.contiguous())
        norm(x=x)
    assert [one.provider for one in swap.sites[0].calls] == [None, "eager", None]


class Scaled(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.rand(columns)) for _ in range(2))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class ScaledLayerNorm(Scaled):
    pass


class ShiftedLayerNorm(Scaled):
    def __init__(self, columns):
        super().__init__(columns)
        self._parameters = dict(reversed(self._parameters.items()))


class GainRMSNorm(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.g = nn.Parameter(torch.rand(columns))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class ScaleNorm(nn.Module):
    """One gain for all columns."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.rand(1)))

    def forward(self, x):
        gain = self._parameters[self.name]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


@INTERPRETED
@pytest.mark.parametrize("made", [ScaledLayerNorm, ShiftedLayerNorm, GainRMSNorm])
def test_a_norm_may_call_its_parameters_as_it_likes(made):
    norm, x = made(8), torch.randn(3, 8, requires_grad=True)
    parameters = [x, *norm.parameters()]
    wanted = norm(x)
    gradients = torch.autograd.grad(wanted.square().sum(), parameters)
    with swapped(norm, "rmsnorm", "layernorm") as swap:
        found = norm(x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), parameters), gradients)
        assert [one.num_replaced for one in swap.sites] == [1]
        # Another one in its place is the norm's own from here on; a plain tensor is not.
        name = next(iter(norm._parameters))
        setattr(norm, name, nn.Parameter(torch.rand(8)))
        moved = norm(x)
        value = norm._parameters.pop(name).detach()
        setattr(norm, name, value)
        torch.testing.assert_close(norm(x), moved)
        assert [one.num_replaced for one in swap.sites] == [2]


@INTERPRETED
@pytest.mark.parametrize("name", ["g", "weight"])
def test_a_norm_with_one_gain_for_all_columns_runs_its_own_code(name):
    norm, x = ScaleNorm(name), torch.randn(3, 8)
    wanted = norm(x)
    with swapped(norm, "rmsnorm", "layernorm") as swap:
        assert torch.equal(norm(x), wanted)
    assert [one.num_replaced for one in swap.sites] == [0]
