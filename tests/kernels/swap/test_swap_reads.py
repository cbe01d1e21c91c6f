"""Modules whose code reads more than a kernel takes: they compute what they computed."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import copy
import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.swap.reasons import UNKNOWN_BETWEEN
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import GemmaNorm, Mlp, Norm

NAMES = ("rmsnorm=eager", "layernorm=aten", "swiglu=eager", "geglu=eager", "rope=eager")
NAMES += ("cross_entropy=eager",)
SIZE = 8
SCALE = 1.0
SCALES = [1.0]
TENSOR = torch.ones(())
SEEN = []
COUNT = {"calls": 0}


def results(module, *inputs):
    """Return output and gradients of all parameters and inputs."""
    given = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
    torch.manual_seed(1)
    module.zero_grad()
    out = module(*given)
    out.square().sum().backward()
    found = [*given, *module.parameters()]
    return [out.detach(), *(None if one.grad is None else one.grad.clone() for one in found)]


def assert_same(module, swap, *inputs):
    wanted = results(module, *inputs)
    with swap:
        got = results(module, *inputs)
    assert_equal(got, wanted)


def assert_equal(got, wanted):
    for new, old in zip(got, wanted, strict=True):
        assert (new is None) == (old is None)
        if old is not None:
            torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


class Swish(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class BufferSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.ones(()))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class LayerScaled(Mlp):
    def __init__(self):
        super().__init__(SIZE)
        self.gamma = nn.Parameter(torch.ones(2 * SIZE))

    def forward(self, x):
        return self.down_proj(self.gamma * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GlobalScaled(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * SCALE)


class ListScaled(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * SCALES[0])


class TensorScaled(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * TENSOR)


class ClassScaled(Mlp):
    scale = 1.0

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.scale)


class Chosen(Mlp):
    """Does what a private attribute says."""

    def __init__(self, mode=None):
        super().__init__(SIZE)
        self._mode = mode

    def forward(self, x):
        gate = self.gate_proj(x)
        if self._mode is not None:
            gate = getattr(torch, self._mode)(gate)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Configured(Mlp):
    def __init__(self, **config):
        super().__init__(SIZE)
        self.config = SimpleNamespace(limit=None, **config)

    def forward(self, x):
        gate = self.gate_proj(x)
        if self.config.limit is not None:
            gate = gate.clamp(max=self.config.limit)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class ByProperty(Mlp):
    @property
    def factor(self):
        return self._factor

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factor)


class Dropping(Mlp):
    def __init__(self, p=0.0):
        super().__init__(SIZE)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class UpFirst(nn.Module):
    """As in the first Llama; its layers drop inputs, as LoRA's do."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = Noisy(SIZE, 16), Noisy(16, SIZE), Noisy(SIZE, 16)

    def forward(self, x):
        return self.w2(self.w3(x) * functional.silu(self.w1(x)))


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(functional.dropout(x, 0.3, self.training))


class ByFunction(nn.Module):
    """Its activation is an attribute that is no module."""

    def __init__(self, function):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.gate_up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, self.dim)
        return self.down(functional.silu(gate) * up)


class Long(Mlp):
    def forward(self, x):
        gate = self.gate_proj(x)
        if x.shape[-2] > 9:
            gate = gate.clamp(max=0.1)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Huge(Mlp):
    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-1e30, 1e30))


class Branching(Mlp):
    def forward(self, x):
        gate = self.gate_proj(x)
        if gate.abs().max() < 1e-3:
            gate = gate * 2
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Upcasting(Mlp):
    def forward(self, x):
        x = x.to(self.gate_proj.weight.dtype)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Casting(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class WithoutGradient(Mlp):
    def forward(self, x):
        with torch.no_grad():
            gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class OfClass(Mlp):
    scale = 1.0

    @classmethod
    def factor(cls):
        return cls.scale

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.factor())


class Residual(Mlp):
    def __init__(self):
        super().__init__(SIZE)
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.alpha * super().forward(x)


class Recomputed(Mlp):
    def forward(self, x):
        return self.down_proj(checkpoint(self.inner, x, use_reentrant=False))

    def inner(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


class ScaledNorm(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * super().forward(x)


class BufferedNorm(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.register_buffer("offset", torch.zeros(SIZE))

    def forward(self, x):
        return super().forward(x) + self.offset


class TensorEpsNorm(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.variance_epsilon = torch.tensor(1e-6)


class OffsetNorm(Norm):
    def __init__(self, offset):
        super().__init__(SIZE)
        self._offset = offset

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * rms * (self._offset + self.weight)


class DimensionNorm(Norm):
    """Names the dimension of its rows by an attribute, as LitGPT does."""

    def __init__(self):
        super().__init__(SIZE)
        self.dim = -1

    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + self.variance_epsilon)
        return self.weight * (x * rms)


class SignNorm(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.sign = -1

    def forward(self, x):
        return super().forward(x) * self.sign * self.sign


class TokensNorm(Norm):
    """Norms over tokens where there are three dimensions, by counting from the front."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.variance_epsilon)


class PartialNorm(Norm):
    def forward(self, x):
        rms = torch.rsqrt(x[..., :4].pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x * rms


class DepthNorm(Norm):
    def __init__(self, layer_idx):
        super().__init__(SIZE)
        self.layer_idx = layer_idx

    def forward(self, x):
        return super().forward(x) / (self.layer_idx + 1)


class BiasedLater(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.register_parameter("bias", None)

    def forward(self, x):
        x = super().forward(x)
        return x if self.bias is None else x + self.bias


class InPlaceNorm(Norm):
    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        y = torch.empty_like(x).copy_(x)
        return self.weight * y.mul_(rms)


def with_attribute(module, name, value):
    setattr(module, name, value)
    return module


def leaky(factor):
    return lambda x: functional.silu(x) * factor


REPLACED = {
    "dimension": lambda: DimensionNorm(),
    "plain": lambda: Mlp(SIZE),
    "private mode": Chosen,
    "config": Configured,
    "up first": UpFirst,
    "sequential": lambda: Mlp(SIZE, nn.Sequential(nn.SiLU())),
    "gelu by partial": lambda: ByFunction(functools.partial(functional.gelu, approximate="tanh")),
    "silu by function": lambda: ByFunction(functional.silu),
    "lambda": lambda: ByFunction(lambda x: x * torch.sigmoid(x)),
    "packed": lambda: Packed(-1),
    "global": GlobalScaled,
    "beta of 1": lambda: Mlp(SIZE, Swish(1.0)),
    "factor of 1 of its class": lambda: ClassScaled(SIZE),
    "factor of 1 by a property": lambda: with_attribute(ByProperty(SIZE), "_factor", 1.0),
    "norm": lambda: Norm(SIZE),
    "gemma": lambda: GemmaNorm(SIZE),
    "subclass": type("Sub", (Norm,), {}),
    "bias later": BiasedLater,
    "in place on its own": lambda: InPlaceNorm(SIZE),
}
LEFT = {
    "learnable beta": (
        lambda: Mlp(SIZE, Swish(nn.Parameter(torch.ones(1)))),
        "it reads act_fn.beta, a parameter that the kernel does not take",
    ),
    "buffer beta": (
        lambda: Mlp(SIZE, BufferSwish()),
        "it reads act_fn.beta, a buffer that the kernel does not take",
    ),
    "layer scale": (LayerScaled, "it reads gamma, a parameter that the kernel does not take"),
    "list": (lambda: ListScaled(SIZE), "it reads SCALES, a list, which may change"),
    "tensor": (
        lambda: TensorScaled(SIZE),
        "it reads TENSOR, a tensor, which the kernel does not take",
    ),
    "dropout on": (lambda: Dropping(0.5), "it computes something else when it trains"),
    "closure over a list": (
        lambda: ByFunction(leaky(torch.ones(()))),
        "it reads factor, a tensor, which the kernel does not take",
    ),
    "packed by tokens": (lambda: Packed(1), "what it computes between its layers is not known"),
    "long": (
        lambda: Long(SIZE),
        "its code compares sizes: it may compute something else for others",
    ),
    "huge": (lambda: Huge(SIZE), "its code runs clamp, which the kernel does not"),
    "branching": (
        lambda: Branching(SIZE),
        "its code runs _local_scalar_dense, which the kernel does not",
    ),
    "autocast": (
        lambda: Casting(SIZE),
        "it runs its layers in another mode of autocast or of gradients",
    ),
    "no gradient": (
        lambda: WithoutGradient(SIZE),
        "its gradients are those of something else",
    ),
    "class method": (lambda: OfClass(SIZE), "its code calls factor, a method of its class"),
    "in place": (
        lambda: Mlp(SIZE, nn.SiLU(inplace=True)),
        "it writes to its input, or to what its layers return",
    ),
    "residual": (Residual, "it reads alpha, a parameter that the kernel does not take"),
    "norm with scale": (ScaledNorm, "it reads scale, a parameter that the kernel does not take"),
    "norm with buffer": (BufferedNorm, "it reads offset, a buffer that the kernel does not take"),
    "eps as tensor": (
        TensorEpsNorm,
        "it reads variance_epsilon, a tensor, which the kernel does not take",
    ),
    "offset 0": (lambda: OffsetNorm(0.0), "it reads _offset, which the kernel does not take"),
    "sign": (lambda: SignNorm(), "it reads sign, which the kernel does not take"),
    "depth": (lambda: DepthNorm(0), "it reads layer_idx, which the kernel does not take"),
    "over tokens": (
        lambda: TokensNorm(SIZE),
        "it computes something else than an RMSNorm or a LayerNorm of rows",
    ),
    "partial": (
        lambda: PartialNorm(SIZE),
        "it computes something else than an RMSNorm or a LayerNorm of rows",
    ),
}


def made(make):
    torch.manual_seed(0)
    # Classes of the models for tests take a size.
    is_sized = getattr(make, "__init__", None) in (Norm.__init__, Mlp.__init__)
    return make(SIZE) if is_sized else make()


def test_a_norm_of_another_dimension_since_it_was_recognised_runs_itself():
    module, x = DimensionNorm(), torch.randn(2, 5, SIZE)
    with swapped(module, *NAMES) as swap:
        module.dim = 1
        found = module(x)
    assert torch.equal(found, module(x))
    assert [site.num_fallen_back for site in swap.sites] == [1]


@pytest.mark.parametrize("name", REPLACED)
def test_what_reads_nothing_else_is_replaced_and_computes_the_same(name):
    module = made(REPLACED[name])
    swap = swapped(module, *NAMES)
    for shape in ((3, SIZE), (2, 5, SIZE), (1, 2, 11, SIZE)):
        assert_same(module, swap, torch.randn(shape))
    assert [site.num_fallen_back for site in swap.replaced] == [0]
    assert swap.replaced[0].num_replaced == 3


@pytest.mark.parametrize("name", LEFT)
def test_what_reads_more_is_left_alone_with_the_reason(name):
    make, why = LEFT[name]
    module = made(make)
    swap = swapped(module, *NAMES)
    assert_same(module, swap, torch.randn(3, SIZE))
    assert [site.skipped for site in swap.sites] == [why]


def put_global(value):
    def put(module):
        globals()["SCALE"] = value

    return put


def enclosing(factor):
    def activate(x):
        return functional.silu(x) * factor

    def put(value):
        nonlocal factor
        factor = value

    activate.put = put
    return activate


def put_code(module):
    module.function.__code__ = (lambda x: x * torch.sigmoid(2 * x)).__code__


CHANGES = {
    "private mode": (Chosen, lambda m: setattr(m, "_mode", "tanh")),
    "config": (Configured, lambda m: setattr(m.config, "limit", 0.1)),
    "config exchanged": (Configured, lambda m: setattr(m, "config", SimpleNamespace(limit=0.1))),
    "global": (GlobalScaled, put_global(3.0)),
    "function": (lambda: ByFunction(functional.silu), lambda m: setattr(m, "function", torch.tanh)),
    "activation": (lambda: Mlp(SIZE), lambda m: setattr(m, "act_fn", nn.ReLU())),
    "its attribute": (
        lambda: Mlp(SIZE, nn.GELU()),
        lambda m: setattr(m.act_fn, "approximate", "tanh"),
    ),
    "enclosing": (lambda: ByFunction(enclosing(1.0)), lambda m: m.function.put(2.0)),
    "bias": (BiasedLater, lambda m: setattr(m, "bias", nn.Parameter(torch.ones(SIZE)))),
    "epsilon": (lambda: Norm(SIZE), lambda m: setattr(m, "variance_epsilon", 0.5)),
    "size": (lambda: Packed(-1), lambda m: setattr(m, "dim", 1)),
    "beta": (lambda: Mlp(SIZE, Swish(1.0)), lambda m: setattr(m.act_fn, "beta", 2.0)),
    "factor": (
        lambda: with_attribute(ByProperty(SIZE), "_factor", 1.0),
        lambda m: setattr(m, "_factor", 3.0),
    ),
}
BETWEEN = {
    **CHANGES,
    "code": (lambda: ByFunction(lambda x: x * torch.sigmoid(x)), put_code),
    "class": (lambda: Chosen(), lambda m: setattr(m, "forward", lambda x: x * 2)),
    "layer": (lambda: Mlp(SIZE), lambda m: setattr(m, "up_proj", nn.Linear(SIZE, 2 * SIZE))),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_changes_between_two_entries_counts(name, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    make, change = BETWEEN[name]
    module, x = made(make), torch.randn(2, SIZE)
    swap = swapped(module, *NAMES)
    assert_same(module, swap, x)
    change(module)
    assert_same(module, swap, x)
    assert swap.sites[0].num_replaced >= 1


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_while_a_swap_is_on_counts(name, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    make, change = CHANGES[name]
    module, x = made(make), torch.randn(2, SIZE)
    other = copy.deepcopy(module)
    with swapped(module, *NAMES) as swap:
        module(x)
        change(module)
        got = results(module, x)
    change(other)
    assert_equal(got, results(other, x))
    assert swap.sites[0].num_replaced >= 1


def test_a_change_that_is_taken_back_is_none():
    module = Chosen()
    swap = swapped(module, *NAMES)
    with swap:
        pass
    module._mode = "tanh"
    with swap:
        assert [site.skipped.split()[:3] for site in swap.sites] == [["_mode", "has", "changed"]]
    module._mode = None
    with swap:
        module(torch.ones(2, SIZE))
    assert swap.sites[0].num_replaced == 1


def test_modules_of_a_class_that_differ_in_a_private_attribute_are_told_apart():
    model = nn.Sequential(Chosen(), Chosen("tanh"), Chosen())
    with swapped(model, *NAMES) as swap:
        pass
    assert [site.skipped for site in swap.sites] == [None, UNKNOWN_BETWEEN, None]


def test_layers_run_in_the_order_of_the_original():
    module, seen = UpFirst(), []
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: seen.append(name))
    with swapped(module, *NAMES):
        module(torch.randn(2, SIZE))
    assert seen == ["w3", "w1", "w2"]


class Noting(Norm):
    def forward(self, x):
        SEEN.append(x)
        return super().forward(x)


class Counting(Norm):
    def forward(self, x):
        COUNT["calls"] += 1
        return super().forward(x)


class Printing(Norm):
    def forward(self, x):
        print("called")  # noqa: T201
        return super().forward(x)


class Opening(Norm):
    def forward(self, x):
        with open("log", "a") as file:  # noqa: PTH123
            file.write("called")
        return super().forward(x)


class Drawing(Norm):
    def forward(self, x):
        return super().forward(x) + 0 * random.random()


class Listing(Norm):
    def __init__(self):
        super().__init__(SIZE)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape)
        return super().forward(x)


class Hooking(Norm):
    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(SEEN.append)
        return x


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Noting, "reads SEEN, a list,"),
        (Counting, "reads COUNT, a dict,"),
        (Printing, "calls print"),
        (Opening, "calls open"),
        (Drawing, "calls random.random, a builtin_function_or_method"),
        (Listing, "reads seen, a list,"),
        (Hooking, "calls register_hook"),
    ],
)
def test_code_with_effects_is_not_run_to_recognise_it(make, why, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, state = made(make), random.getstate()
    with swapped(module, *NAMES) as swap:
        assert (SEEN, COUNT, getattr(module, "seen", [])) == ([], {"calls": 0}, [])
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])
    assert random.getstate() == state
    (site,) = swap.sites
    assert why in site.skipped


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(SIZE, SIZE)

    def forward(self, q, k):
        cos = torch.linspace(-1, 1, q.shape[2] * SIZE).view(1, -1, SIZE)
        sin = cos.flip(1)
        q, k = apply_rotary(self.proj(q), self.proj(k), cos, sin)
        return q + k


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def plain(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def long(q, k, cos, sin):
    q, k = plain(q, k, cos, sin)
    return (q * 2, k) if q.shape[2] > 1000 else (q, k)


def longer(q, k, cos, sin):
    q, k = plain(q, k, cos, sin)
    return q * (1 + q.shape[2] // 1_000), k


def scaled(q, k, cos, sin):
    q, k = plain(q, k, cos, sin)
    return q * SCALE, k


def by_table(q, k, cos, sin):
    q, k = plain(q, k, cos, sin)
    return q * TENSOR, k


def detached(q, k, cos, sin):
    q, k = plain(q, k, cos, sin)
    return q, k.detach()


def noting(q, k, cos, sin):
    SEEN.append(q)
    return plain(q, k, cos, sin)


def of_sections(q, k, cos, sin, sections):
    return plain(q, k, cos, sin)


ROTATIONS = {
    plain: None,
    scaled: None,
    long: "apply_rotary: its code compares sizes: it may compute something else for others",
    longer: "apply_rotary: it computes something else for 1030 tokens",
    by_table: "apply_rotary: it reads TENSOR, a tensor, which the kernel does not take",
    detached: "apply_rotary: its gradients are those of something else",
    noting: "apply_rotary: it reads SEEN, a list, which may change",
    of_sections: "apply_rotary: it takes sections besides q, k, cos and sin",
}


@pytest.mark.parametrize("function", ROTATIONS)
def test_rotations_are_known_by_their_code_and_for_many_lengths(function, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary", function)
    with swapped(Rotating(), "rope=eager") as swap:
        assert SEEN == []
    assert [site.skipped for site in swap.sites] == [ROTATIONS[function]]


def test_a_rotation_that_is_exchanged_or_reads_another_global_counts(monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary", scaled)
    module, given = Rotating(), torch.randn(2, 1, 2, 4, SIZE)
    swap = swapped(module, "rope=eager")
    assert_same(module, swap, *given)
    assert swap.sites[0].num_replaced == 1
    with swap:
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        got = results(module, *given)
    assert_equal(got, results(module, *given))
    monkeypatch.setitem(globals(), "apply_rotary", longer)
    assert_same(module, swap, *given)
    (site,) = swap.sites
    assert (site.skipped.split()[0], "another function" in site.skipped) == ("apply_rotary", True)


class Stepping(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return functional.cross_entropy(self.head(x) * SCALE, torch.zeros(len(x)).long())


def test_a_global_that_changes_while_a_swap_is_on_is_read_anew(monkeypatch):
    module, x = Stepping(), torch.randn(3, SIZE)
    with swapped(module, "cross_entropy=eager") as swap:
        module(x)
        monkeypatch.setitem(globals(), "SCALE", 4.0)
        got = results(module, x)
    assert_equal(got, results(module, x))
    assert swap.sites[0].num_replaced == 2


def test_a_dropout_of_nothing_is_left_out_until_it_drops():
    module, x = Dropping(0.0), torch.randn(4, SIZE)
    expected = results(module, x)
    with swapped(module, "swiglu=eager") as swap:
        torch.testing.assert_close(results(module, x), expected)
        assert swap.replaced[0].num_replaced == 1
        module.drop.p = 0.5
        found = results(module, x)
        assert swap.replaced[0].num_replaced == 1
    torch.testing.assert_close(found, results(module, x))
