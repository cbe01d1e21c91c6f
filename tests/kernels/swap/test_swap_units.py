"""Gated units whose halves have any order, or whose layers are in other modules."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kprof.kernels.swap.dispatch import OTHERWISE
from kprof.kernels.swap.reads import CHANGED
from kprof.kernels.swap.sites.mlps import NO_UNIT, NOT_AS_FOUND, SPREAD
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, INTERPRETED
from tests.kernels.swap.reasons import OTHER_GRADIENTS

pytestmark = INTERPRETED
SIZE, INNER = 8, 12
NAMES = ("swiglu", "geglu")


class Unit(nn.Module):
    """One layer makes both halves, and another module has the layer behind the product."""

    def __init__(self, act=None, factor=1.0):
        super().__init__()
        self.proj, self.act = nn.Linear(SIZE, 2 * INNER), act or nn.GELU()
        self.factor = factor

    def forward(self, x):
        up, gate = self.proj(x).chunk(2, dim=-1)
        return self.combined(up, gate) * self.factor

    def combined(self, up, gate):
        return up * self.act(gate)


class SwigluAlone(nn.Module):
    """Splits what another layer has made."""

    def forward(self, x):
        half = x.shape[-1] // 2
        return functional.silu(x[..., half:]) * x[..., :half]


class Pair(nn.Module):
    """Two layers, and none behind the product."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(SIZE, INNER), nn.Linear(SIZE, INNER)

    def forward(self, x):
        return functional.silu(self.w1(x)) * self.w2(x)


class Around(nn.Module):
    """A layer, a unit, and a layer."""

    def __init__(self, unit):
        super().__init__()
        self.before, self.unit, self.norm = nn.Linear(SIZE, SIZE), unit, nn.LayerNorm(SIZE)

    def forward(self, x):
        return self.unit(self.norm(self.before(x)))


def moonshine():
    transformers = pytest.importorskip("transformers")
    from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderMLP

    config = transformers.MoonshineConfig(hidden_size=SIZE, intermediate_size=INNER)
    return MoonshineDecoderMLP(config, "silu")


def clvp():
    transformers = pytest.importorskip("transformers")
    from transformers.models.clvp.modeling_clvp import ClvpGatedLinearUnit

    config = transformers.ClvpEncoderConfig(hidden_size=SIZE, intermediate_size=INNER)
    return ClvpGatedLinearUnit(config)


UNITS = {
    "GELU": Unit,
    "approximate": lambda: Unit(nn.GELU("tanh")),
    "SiLU": lambda: Unit(nn.SiLU()),
    "without weights": SwigluAlone,
    "two layers": Pair,
    "Moonshine": moonshine,
    "CLVP": clvp,
}
KINDS = pytest.mark.parametrize("kind", UNITS)


def made(kind, dtype=torch.float32):
    torch.manual_seed(1)
    return Around(UNITS[kind]()).to(dtype)


def given(*lead, dtype=torch.float32):
    return torch.randn(*lead, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)


def trained(model, x, run=None):
    """Return the result, the gradients of all parameters and of the input."""
    x = x.clone().requires_grad_()
    result = model(x) if run is None else run(x)
    weights = torch.linspace(-1, 2, result.numel()).view(result.shape)
    gradients = torch.autograd.grad((result * weights).sum(), [x, *model.parameters()])
    return [result.detach(), *gradients]


def replaced(swap):
    return [(site.num_replaced, site.num_fallen_back) for site in swap.sites]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@KINDS
def test_a_unit_is_replaced_with_the_same_results_gradients_and_layout(kind, dtype):
    model, x = made(kind, dtype), given(2, 5, dtype=dtype)
    wanted, before = trained(model, x), dict(vars(model.unit))
    with swapped(model, *NAMES) as swap:
        found = trained(model, x)
    assert replaced(swap) == [(1, 0)]
    assert [(one.dtype, one.stride()) for one in found] == [
        (one.dtype, one.stride()) for one in wanted
    ]
    rounding = {"rtol": 5e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, wanted, **rounding)
    assert vars(model.unit) == before


@KINDS
def test_autocast_checkpoints_inference_and_no_rows_have_the_originals_results(kind):
    model, x, nothing = made(kind), given(2, 5), given(0, 5)

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def again(x):
        return checkpoint(model, x, use_reentrant=False)

    wanted = [trained(model, x, cast), trained(model, x, again), trained(model, nothing)]
    with swapped(model, *NAMES) as swap:
        found = [trained(model, x, cast), trained(model, x, again), trained(model, nothing)]
        with torch.inference_mode():
            inferred = model(x)
    assert replaced(swap) == [(5, 0)]
    torch.testing.assert_close(found[0], wanted[0], rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(found[1:], wanted[1:])
    torch.testing.assert_close(inferred, wanted[1][0])


@COMPILED
@KINDS
def test_compiled_it_is_one_graph_with_the_same_gradients(kind):
    torch.compiler.reset()
    model, x = made(kind), given(2, 5)
    wanted = trained(model, x)
    with swapped(model, *NAMES) as swap:
        found = trained(model, x, torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, wanted)
    assert [(one.provider, one.is_compiled) for one in swap.sites[0].calls] == [("kprof", True)]


@KINDS
def test_hooks_of_a_unit_and_its_layers_see_what_they_saw(kind):
    model, seen = made(kind), []
    for module in model.unit.modules():
        is_layer = isinstance(module, nn.Linear) or module is model.unit
        if is_layer:
            module.register_forward_hook(lambda *given: seen.append(given[2].detach().clone()))
    model(given(2, 5))
    wanted = list(seen)
    seen.clear()
    with swapped(model, *NAMES) as swap:
        model(given(2, 5))
    assert replaced(swap) == [(1, 0)]
    torch.testing.assert_close(seen, wanted)


def test_a_hook_of_an_activation_brings_the_original_back():
    model = made("GELU")
    model.unit.act.register_forward_hook(lambda *given: given[2] * 2)
    wanted = model(given(3))
    with swapped(model, *NAMES) as swap:
        assert torch.equal(model(given(3)), wanted)
    assert [one.why for one in swap.sites[0].calls] == [NOT_AS_FOUND]


def test_a_factor_that_is_no_longer_one_brings_the_original_back():
    model = made("GELU")
    with swapped(model, *NAMES) as swap:
        model(given(3))
        model.unit.factor = 0.5
        changed = model(given(3))
    assert replaced(swap) == [(1, 1)]
    assert torch.equal(changed, model(given(3)))
    assert CHANGED in [one.why for one in swap.sites[0].calls]


def test_rows_in_another_order_run_the_original_whose_result_keeps_it():
    unit, x = SwigluAlone(), torch.randn(3, 4, 6).transpose(0, 1)
    wanted = unit(x)
    with swapped(unit, *NAMES) as swap:
        found = unit(x)
    assert [one.why for one in swap.sites[0].calls] == [SPREAD]
    assert found.stride() == wanted.stride()
    assert torch.equal(found, wanted)


def test_a_call_with_more_arguments_runs_the_original():
    class Optional(SwigluAlone):
        def forward(self, x, scale=None):
            x = x if scale is None else x * scale
            return super().forward(x)

    unit, x = Optional(), torch.randn(3, 6)
    wanted = unit(x, 2.0)
    with swapped(unit, *NAMES) as swap:
        assert torch.equal(unit(x, 2.0), wanted)
        unit(x)
    assert [one.why for one in swap.sites[0].calls] == [OTHERWISE, None]


class ByNeighbours(SwigluAlone):
    def forward(self, x):
        return functional.silu(x[..., ::2]) * x[..., 1::2]


class ByTokens(SwigluAlone):
    def forward(self, x):
        first, second = x.chunk(2, dim=1)
        return functional.silu(first) * second


class Overlapping(SwigluAlone):
    def forward(self, x):
        half = x.shape[-1] // 2
        return functional.silu(x[..., half:]) * x[..., half:]


class SigmoidGlu(SwigluAlone):
    def forward(self, x):
        return functional.glu(x)


class BothActivated(SwigluAlone):
    def forward(self, x):
        first, second = x.chunk(2, dim=-1)
        return functional.silu(first) * functional.silu(second)


class CutOffGlu(SwigluAlone):
    def forward(self, x):
        return super().forward(x.clamp(-7, 7))


class DetachedGlu(SwigluAlone):
    def forward(self, x):
        first, second = x.chunk(2, dim=-1)
        return functional.silu(first) * second.detach()


class HalvedGlu(SwigluAlone):
    def __init__(self):
        super().__init__()
        self.factor = 0.5

    def forward(self, x):
        return super().forward(x) * self.factor


class WritingGlu(SwigluAlone):
    def forward(self, x):
        first, second = x.chunk(2, dim=-1)
        return first.mul_(functional.silu(second))


class DroppingGlu(SwigluAlone):
    def forward(self, x):
        return functional.dropout(super().forward(x), 0.5, self.training)


class NamedGlu(SwigluAlone):
    """Chooses by the number of rows."""

    def forward(self, x):
        return super().forward(x) if x.shape[0] > 1 else super().forward(-x)


class GluOnTheWay(Unit):
    def forward(self, x):
        return super().forward(2 * x)


class LearnedGlu(Unit):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(INNER))

    def forward(self, x):
        return super().forward(x) * self.gain


OTHERS = {
    ByNeighbours: None,
    ByTokens: None,
    Overlapping: None,
    SigmoidGlu: NO_UNIT,
    BothActivated: None,
    CutOffGlu: NO_UNIT,
    DetachedGlu: OTHER_GRADIENTS,
    HalvedGlu: NO_UNIT,
    WritingGlu: "it writes to its input, or to what its layers return",
    DroppingGlu: "it computes something else when it trains",
    NamedGlu: "its code compares sizes: it may compute something else for others",
    GluOnTheWay: "its first layers do not get its input as it is",
    LearnedGlu: "it reads gain, a parameter that the kernel does not take",
}


@pytest.mark.parametrize("cls", OTHERS)
def test_a_unit_that_computes_something_else_is_left_alone_with_the_reason(cls):
    with swapped(cls(), *NAMES) as swap:
        pass
    assert [site.skipped for site in swap.sites] == [OTHERS[cls]] * (OTHERS[cls] is not None)


def test_two_layers_that_add_are_no_unit():
    class Sum(Pair):
        def forward(self, x):
            return self.w1(x) + self.w2(x)

    with swapped(Sum(), *NAMES) as swap:
        pass
    assert not swap.sites
