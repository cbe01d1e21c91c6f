"""Norms whose input goes on beside them: their backward adds both gradients."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kprof
from kprof.kernels.swap.providers import DryProviders
from kprof.kernels.swap.sites import norms
from kprof.kernels.swap.swapping import Swap
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
WIDTH = 16
NORMS = ("layernorm", "rmsnorm")


class Nano(nn.Module):
    """As in nanoGPT."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.first(x))
        return x + self.mlp(self.second(x))


class HuggingFace(Nano):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.first(hidden_states)
        hidden_states = self.attn(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.second(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Looping(Nano):
    def forward(self, x):
        for _ in range(2):
            residual = x
            x = self.first(x)
            x = residual + self.attn(x)
        return x


class Branching(Nano):
    def forward(self, x):
        if self.training:
            y = self.first(x)
            x = x + self.attn(y)
        return x + 0 * self.second(x)


class Llama(Nano):
    def __init__(self):
        super().__init__(nn.RMSNorm)


class Alone(Nano):
    """The input of its norm goes nowhere else."""

    def forward(self, x):
        return self.attn(self.first(x))


class Returning(Nano):
    def forward(self, x):
        y = self.first(x)
        return x, x + self.attn(y)


class Passing(Nano):
    """Another module gets the input."""

    def forward(self, x):
        y = self.first(x)
        return x + self.attn(y) + self.mlp(x)


class Keeping(Nano):
    def forward(self, x):
        y = self.first(x)
        self.kept = x
        return x + self.attn(y)


class Closing(Nano):
    def forward(self, x):
        y = self.first(x)
        return (lambda: x + self.attn(y))()


class Adds(TorchDispatchMode):
    """Counts sums of activations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_sum = function.overloadpacket.__name__ in ("add", "add_")
        self.count += is_sum and result.dim() == 3
        return result


def made(block):
    torch.manual_seed(3)
    return block(), torch.randn(2, 3, WIDTH)


def trained(model, x, dtype=torch.float32):
    """Return the result and the gradients, and the number of sums in the backward pass."""
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
        y = model(1.0 * leaf)
    y = y[-1] if isinstance(y, tuple) else y
    parameters = [one for one in model.parameters() if one.requires_grad]
    with Adds() as adds:
        found = torch.autograd.grad(
            y.float().square().sum(), [leaf, *parameters], allow_unused=True
        )
    return [y.detach(), *(one for one in found if one is not None)], adds.count


def both(model, x, *names):
    expected, before = trained(model, x)
    with kprof.swapped(model, *names):
        found, after = trained(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return before - after


@pytest.mark.parametrize("block", [Nano, HuggingFace, Looping, Branching])
def test_gradients_of_an_input_that_goes_on_are_added_by_the_norm(block):
    assert both(*made(block), *NORMS) == 2


def test_rmsnorms_do_so_too():
    # Two of four sums are inside of torch's own norms.
    assert both(*made(Llama), *NORMS) > 2


@pytest.mark.parametrize("block", [Nano, HuggingFace])
def test_the_first_norm_of_a_layer_does_so_beside_a_fused_sum(block):
    assert both(*made(block), "layernorm", "add_layernorm") == 2


@pytest.mark.parametrize("block", [Alone, Returning, Passing, Keeping, Closing])
def test_an_input_with_another_use_is_left_alone(block):
    assert both(*made(block), *NORMS) == 0


def test_hooks_of_the_norm_see_what_they_saw():
    model, x = made(Nano)
    seen = []
    with kprof.swapped(model, "layernorm"):
        model.first.register_forward_hook(lambda *given: seen.append(given))
        before = trained(model, x)
    assert len(seen) == 1
    torch.testing.assert_close(before[0], trained(model, x)[0], rtol=1e-4, atol=1e-5)


def test_a_hook_of_the_input_gets_the_whole_gradient():
    model, x = made(Nano)
    seen = []

    def run():
        leaf = x.clone().requires_grad_()
        given = 1.0 * leaf
        given.register_hook(seen.append)
        model(given).square().sum().backward()

    run()
    with kprof.swapped(model, "layernorm", "add_layernorm"):
        run()
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


def test_an_input_without_a_gradient_keeps_none():
    model, x = made(Nano)
    expected = model(x)
    with kprof.swapped(model, "layernorm"):
        y = model(x)
        y.sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(y, expected)
    assert not x.requires_grad


def test_under_autocast_the_norm_is_still_written_rounded():
    model, x = made(Nano)
    seen = []
    with kprof.swapped(model, "layernorm"):
        original = nn.functional.linear
        nn.modules.linear.F.linear = lambda x, *w: seen.append(x.dtype) or original(x, *w)
        try:
            trained(model, x, torch.bfloat16)
        finally:
            nn.modules.linear.F.linear = original
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_recompute_forks(is_reentrant):
    model, x = made(Nano)
    expected, _ = trained(model, x)
    parameters = list(model.parameters())
    with kprof.swapped(model, "layernorm", "add_layernorm"):
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, 1.0 * leaf, use_reentrant=is_reentrant)
        y.square().sum().backward()
    found = [y.detach(), leaf.grad, *(one.grad for one in parameters)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_dry_run_launches_nothing(monkeypatch):
    model, x = made(Nano)
    expected, _ = trained(model, x)
    monkeypatch.setattr(norms, "forked_norm", None)
    with Swap([model], ["layernorm"], providers=DryProviders):
        found, _ = trained(model, x)
    torch.testing.assert_close(found, expected)


class OwnNorm(nn.Module):
    """As nanoGPT's: it calls torch's function."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


def test_a_norm_of_which_the_function_alone_is_replaced_is_no_fork(monkeypatch):
    # As where the kernel and the module do not agree on random rows.
    monkeypatch.setattr(norms, "are_alike", lambda *results: False)
    model, x = Nano(OwnNorm), torch.randn(5, WIDTH)
    expected, _ = trained(model, x)
    with kprof.swapped(model, "layernorm") as swap:
        found, _ = trained(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {one.what for one in swap.replaced} == {"OwnNorm: nn.functional.layer_norm"}
