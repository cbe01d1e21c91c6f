"""GELUs that are written out, and the gradient of the bias before a GELU."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import kprof
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
WIDTH, HIDDEN = 16, 24


class New(nn.Module):
    """As in GPT-2."""

    def forward(self, x):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class Exact(nn.Module):
    """As in older BERTs."""

    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Quick(nn.Module):
    """As in CLIP."""

    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)


class Squared(nn.Module):
    """As in Nemotron."""

    def forward(self, x):
        return functional.relu(x).square()


class Wide(New):
    """Its result is float32, as it is of any written-out GELU under autocast on a GPU."""

    def forward(self, x):
        return super().forward(x.float())


class Steep(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.6 * x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return self.factor * (x * torch.sigmoid(1.702 * x))


class Kept(nn.Module):
    """A GELU that keeps its input."""

    def forward(self, x):
        self.kept = x
        return x * torch.sigmoid(1.702 * x)


class Feed(nn.Module):
    def __init__(self, act=New):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), act(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = self.up(x)
        x = self.act(x)
        return self.down(x)


class Nested(Feed):
    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Twice(Feed):
    """Adds what the linear layer makes to the activation."""

    def forward(self, x):
        x = self.up(x)
        return self.down(self.act(x) + x)


class Between(Feed):
    def forward(self, x):
        return self.down(self.act(2 * self.up(x)))


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def trained(model, cast=None):
    """Return the result, and the gradients of input and parameters."""
    model.zero_grad()
    x = rows(3, 5, WIDTH).requires_grad_()
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(one.grad for one in model.parameters())]


def kinds(swap):
    return {site.kernel for site in swap.replaced if site.calls}


def close(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(
    ("act", "kernel"),
    [(New, "gelu"), (Exact, "gelu"), (Quick, "gelu"), (Squared, "relu_squared"), (Wide, "gelu")],
)
def test_an_activation_that_is_written_out_becomes_one_kernel(act, kernel):
    model = Feed(act)
    expected = trained(model)
    with kprof.swapped(model, "gelu", "relu_squared") as swap:
        found = trained(model)
    assert kinds(swap) == {kernel}
    close(found, expected, rtol=1e-4, atol=1e-5)
    assert type(model.act).forward is act.forward
    assert "forward" not in model.act.__dict__


@pytest.mark.parametrize("act", [Steep, Kept, nn.GELU, nn.SiLU, nn.Dropout, nn.Identity])
def test_what_is_no_gelu_or_is_one_operator_is_left_alone(act):
    with kprof.swapped(Feed(act), "gelu", "relu_squared") as swap:
        assert not swap.replaced


def test_a_number_in_an_attribute_is_a_reason_to_skip():
    with kprof.swapped(Feed(Scaled), "gelu") as swap:
        assert not swap.replaced


def test_the_result_is_float32_where_the_originals_is():
    act, x = Wide(), rows(4, 8).bfloat16()
    with kprof.swapped(act, "gelu") as swap:
        y = act(x)
    assert swap.replaced
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, act(x))


def test_a_result_that_only_a_linear_layer_reads_is_written_rounded():
    model, seen = Feed(Wide), []
    expected = trained(model, torch.bfloat16)
    with kprof.swapped(model, "gelu"):
        original = functional.linear

        def linear(x, *others):
            seen.append(x.dtype)
            return original(x, *others)

        nn.modules.linear.F.linear, found = linear, None
        try:
            found = trained(model, torch.bfloat16)
        finally:
            nn.modules.linear.F.linear = original
    assert seen == [torch.float32, torch.bfloat16]
    close(found[1:], expected[1:], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("feed", [Feed, Nested])
@pytest.mark.parametrize("act", [New, nn.GELU, Quick])
@pytest.mark.parametrize("names", [("bias_gelu",), ("gelu", "bias_gelu")])
def test_the_gradient_of_the_bias_comes_with_that_of_the_gelu(feed, act, names):
    model = feed(act)
    expected = trained(copy.deepcopy(model).double().float())
    with kprof.swapped(model, *names) as swap:
        found = trained(model)
    assert "bias_gelu" in kinds(swap)
    close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_bias_under_autocast_has_a_float32_gradient_as_before():
    model = Feed(nn.GELU)
    expected = trained(model, torch.bfloat16)
    with kprof.swapped(model, "bias_gelu") as swap:
        found = trained(model, torch.bfloat16)
    assert kinds(swap) == {"bias_gelu"}
    close(found, expected, rtol=0.05, atol=0.05)


def test_conv1d_of_hugging_face_is_a_linear_layer():
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = Feed()
    model.up = conv(HIDDEN, WIDTH)
    expected = trained(model)
    with kprof.swapped(model, "bias_gelu") as swap:
        found = trained(model)
    assert kinds(swap) == {"bias_gelu"}
    close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feed", [Twice, Between])
def test_a_linear_layer_that_more_than_the_gelu_reads_keeps_its_bias(feed):
    with kprof.swapped(feed(nn.GELU), "bias_gelu") as swap:
        assert not swap.replaced


def test_hooks_run_as_before_and_the_bias_has_its_gradient():
    model, seen = Feed(), []
    expected = trained(model)
    with kprof.swapped(model, "bias_gelu") as swap:
        handles = [
            model.up.register_forward_hook(lambda *_: seen.append("up")),
            model.act.register_forward_pre_hook(lambda _, x: seen.append("act")),
        ]
        found = trained(model)
        assert seen == ["up", "act"]
        assert not kinds(swap)
        handles[0].remove()
        again = trained(model)
        assert seen == ["up", "act", "act"]
    close(found, expected)
    close(again, expected)


def test_without_gradients_the_layer_adds_its_bias_itself():
    model = Feed(nn.GELU)
    x = rows(4, WIDTH)
    with kprof.swapped(model, "bias_gelu") as swap, torch.no_grad():
        hidden = functional.gelu(model.up(x))
        assert torch.equal(model(x), model.down(hidden))
    assert not kinds(swap)


def test_a_frozen_bias_stays_without_a_gradient():
    model = Feed(nn.GELU)
    model.up.bias.requires_grad_(False)
    with kprof.swapped(model, "bias_gelu") as swap:
        model(rows(4, WIDTH)).sum().backward()
    assert model.up.bias.grad is None
    assert not kinds(swap)


def test_a_call_that_the_kernel_refuses_has_the_gradient_of_its_bias():
    model = Feed(nn.GELU).double()
    x = rows(4, WIDTH).double()
    expected = torch.autograd.grad(model(x).sum(), model.up.bias)
    with kprof.swapped(model, "bias_gelu") as swap:
        for _ in range(2):
            assert torch.equal(*torch.autograd.grad(model(x).sum(), model.up.bias), *expected)
    assert swap.fallen_back


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_recomputes_it(is_reentrant):
    model = Feed()
    expected = trained(model)
    with kprof.swapped(model, "gelu", "bias_gelu"):
        found = trained(Checkpointed(model, is_reentrant))
    close(found, expected, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, inner, is_reentrant):
        super().__init__()
        self.inner, self.is_reentrant = inner, is_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant)


def test_a_compiled_model_is_one_graph_and_runs_the_original():
    model = Feed()
    x = rows(4, WIDTH)
    expected = model(x)
    with kprof.swapped(model, "gelu", "bias_gelu") as swap:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
    assert not kinds(swap)
