"""Norms whose results only linear layers read, which are rounded under autocast."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

import kprof
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
WIDTH = 16


class Feed(nn.Module):
    """A linear layer that reads the input; its shape is read, too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH)

    def forward(self, x):
        batch, length, width = x.size()
        return self.down(gelu(self.up(x))).view(batch, length, width)


class Gated(Feed):
    """Two that read the input."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 24)

    def forward(self, x):
        return self.down(gelu(self.up(x)) * self.gate(x))


class Looping(Feed):
    """One that reads it twice."""

    def forward(self, x):
        y = 0
        for _ in range(2):
            y = y + self.down(gelu(self.up(x)))
        return y


class Keeping(Feed):
    def forward(self, x):
        self.kept = x
        return self.down(gelu(self.up(x)))


class Adding(Feed):
    def forward(self, x):
        return x + self.down(gelu(self.up(x)))


class AskingDtype(Feed):
    def forward(self, x):
        return self.down(gelu(self.up(x)).to(x.dtype))


class WithoutAutocast(Feed):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.down(gelu(self.up(x)))


def without_autocast(forward):
    def run(self, x):
        with torch.autocast("cpu", enabled=False):
            return forward(self, x.float())

    run.__wrapped__ = forward
    return run


class Decorated(Feed):
    @without_autocast
    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Closing(Feed):
    def forward(self, x):
        return (lambda: self.down(gelu(self.up(x))) + 0 * x.abs())()


class Doubling(nn.Linear):
    def forward(self, x):
        return super().forward(x * 1.001)


class OtherLinear(Feed):
    def __init__(self):
        super().__init__()
        self.up = Doubling(WIDTH, 24)


class Splatting(Feed):
    def forward(self, *xs):
        return self.down(gelu(self.up(*xs)))


class Guarding(Feed):
    def forward(self, x):
        match x.dim():
            case _ if (total := x.sum()) is not None:
                return self.down(gelu(self.up(x))) + total


class Defaulting(Feed):
    def forward(self, x):
        def total(y=x):
            return y.sum()

        return self.down(gelu(self.up(x))) + total()


class Decorating(Feed):
    def forward(self, x):
        @x.sum().__mul__
        @lambda _: 1.0
        def total():
            pass

        return self.down(gelu(self.up(x))) + total


class Called(Feed):
    def __call__(self, x):
        return super().__call__(x) + x.sum()


class Hiding(Feed):
    def __init__(self):
        super().__init__()
        up = self.up
        object.__setattr__(self, "up", lambda x: up(x) + x.sum())


class LookingUp(Feed):
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return (lambda x: value(x) + x.sum()) if name == "up" else value


class TurningAutocastOff(Feed):
    def forward(self, x):
        torch.set_autocast_enabled("cpu", False)
        try:
            return self.down(gelu(self.up(x)))
        finally:
            torch.set_autocast_enabled("cpu", True)


KEEPING = (
    Guarding,
    Defaulting,
    Decorating,
    Called,
    Hiding,
    LookingUp,
    TurningAutocastOff,
    Keeping,
    Adding,
    AskingDtype,
    WithoutAutocast,
    Decorated,
    Closing,
    OtherLinear,
    Splatting,
)


class Block(nn.Module):
    """A norm alone, then a sum and its norm, as in a transformer."""

    def __init__(self, feed, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.attn, self.mlp = feed(), feed()

    def forward(self, x):
        x = x + self.attn(self.first(x))
        normed = self.second(x)
        return x + self.mlp(normed)


class Returning(Block):
    def forward(self, x):
        normed = self.first(x)
        return normed + self.attn(normed)


class Casts(TorchDispatchMode):
    """Counts casts of activations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.dim() == 3:
            self.count += result.dtype == torch.float16
        return result


def run(model, x):
    """Return the result, the gradients, and the number of activations that were rounded."""
    leaf = x.clone().requires_grad_()
    with Casts() as casts, torch.autocast("cpu", torch.float16):
        y = model(leaf)
    tensors = [one for one in (leaf, *model.parameters()) if one.requires_grad]
    gradients = torch.autograd.grad(y.float().pow(2).sum(), tensors, allow_unused=True)
    return [y, *(one for one in gradients if one is not None)], casts.count


def made(block, feed=Feed, **options):
    torch.manual_seed(3)
    return block(feed, **options), torch.randn(2, 5, WIDTH)


def both(model, x, *kernels):
    """Return what a model computes unswapped, swapped, and swapped where a hook watches it."""
    original = run(model, x)
    with kprof.swapped(model, *kernels):
        rounded = run(model, x)
    hooks = [
        one.register_forward_pre_hook(lambda *_: None)
        for one in model.modules()
        if isinstance(one, nn.Linear)
    ]
    with kprof.swapped(model, *kernels):
        watched = run(model, x)
    for one in hooks:
        one.remove()
    return original, rounded, watched


def are_same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_norm_that_linear_layers_read_is_rounded_once_with_the_same_bits(norm, is_fused):
    name = "layernorm" if norm is nn.LayerNorm else "rmsnorm"
    model, x = made(Block, norm=norm)

    original, rounded, watched = both(model, x, name, *([f"add_{name}"] if is_fused else []))

    assert are_same(rounded, watched)
    assert (original[1], watched[1], rounded[1]) == (2, 2, 0)


@pytest.mark.parametrize("feed", KEEPING)
def test_a_norm_that_other_code_reads_stays_as_it_is(feed):
    model, x = made(Block, feed)

    original, rounded, watched = both(model, x, "layernorm", "add_layernorm")

    assert are_same(rounded, watched)
    assert rounded[1] == original[1]


def test_without_gradients_several_linear_layers_may_read_a_norm():
    model, x = made(Block, Gated)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = model(x)
        with kprof.swapped(model, "layernorm", "add_layernorm"), Casts() as casts:
            y = model(x)

    torch.testing.assert_close(y, expected)
    assert casts.count == 0


def test_a_norm_that_the_layer_itself_reads_stays_as_it_is():
    model, x = made(Returning)

    original, rounded, watched = both(model, x, "layernorm")

    assert are_same(rounded, watched)
    assert rounded[1] == original[1]


@pytest.mark.parametrize("where", ["attn", "first", "attn.up"])
def test_a_hook_sees_a_norm_as_it_is(where):
    model, x = made(Block)
    seen = []
    with kprof.swapped(model, "layernorm"):
        hook = model.get_submodule(where).register_forward_hook(
            lambda _, inputs, output: seen.extend((*inputs, output))
        )
        run(model, x)
        hook.remove()

    assert seen[0 if where != "first" else 1].dtype == torch.float32


def test_a_reader_that_is_exchanged_gets_the_norm_as_it_is(monkeypatch):
    model, x = made(Block)
    seen = []
    with kprof.swapped(model, "layernorm"):
        monkeypatch.setattr(
            Feed, "forward", lambda self, x: seen.append(x.dtype) or self.up(x)[..., :WIDTH]
        )
        run(model, x)

    assert seen == [torch.float32, torch.float32]


def test_without_autocast_nothing_is_rounded():
    model, x = made(Block)
    expected = model(x)

    with kprof.swapped(model, "layernorm", "add_layernorm"):
        y = model(x)

    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected)
