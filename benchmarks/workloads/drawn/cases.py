"""Cases drawn from a seed: operators of torch's own test samples, models, compiled and Triton code.

An operator's samples have at most some thousand
elements, so their sizes are scaled: equal sizes by equal factors, and elements repeated, so that
indices stay in range and probabilities stay such. Types and memory layouts are drawn, too.
"""

import itertools
import math
import random
import sys
import types
import unittest
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

# The samples of torch's tests import it for assertions that no sample makes.
try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stub

from chains import compiled_chain
from models import drawn_model

PARTS = ("operators", "models", "compiled", "triton")
# Cases of each part for one seed; a tiny set only tries the way.
NUM_CASES = {"operators": 26, "models": 1, "compiled": 1, "triton": 3}
NUM_TINY = {"operators": 6, "models": 3, "compiled": 0, "triton": 0}
# Bytes of all inputs, drawn evenly on a logarithmic scale: launch-sized, in a cache, above it.
SIZES = (((1 << 10, 1 << 16), 0.15), ((1 << 19, 20 << 20), 0.4), ((80 << 20, 200 << 20), 0.45))
MOST_OUTPUT_BYTES = 1 << 28
MOST_FLOPS = 2e12
NUM_SAMPLES = 12
DTYPES = {
    torch.float32: 35,
    torch.bfloat16: 25,
    torch.float16: 15,
    torch.int64: 6,
    torch.int32: 4,
    torch.bool: 4,
    torch.float64: 4,
    torch.complex64: 3,
    torch.uint8: 3,
    torch.int8: 1,
}
BACKWARD, PERMUTED, SLICED = 0.4, 0.35, 0.1
# Hundreds of launches each, in libraries of their own; and what only a CPU has.
LEFT_OUT = (
    *("linalg.", "cholesky", "svd", "lu", "qr", "geqrf", "ormqr", "pinverse", "pca_", "logdet"),
    *("triangular_solve", "matrix_exp", "sparse.", "to_sparse", "jiterator", "histogram"),
    *("equal", "item", "allclose", "resize_", "empty", "new_empty", "hash_tensor"),
    # Offsets and lengths, which do not repeat like indices: a wrong one ends the process.
    *("nn.functional.embedding_bag", "_segment_reduce", "nn.functional.ctc_loss", "multinomial"),
    # One view for each of millions of elements.
    *("unbind", "split", "unsafe_split", "tensor_split", "hsplit", "vsplit", "dsplit", "chunk"),
)
# Views launch nothing.
VIEWS = {
    *("H", "T", "mH", "mT", "t", "transpose", "permute", "movedim", "view", "view_as", "reshape"),
    *("reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("broadcast_to", "broadcast_tensors", "narrow", "select", "slice", "diagonal", "unfold"),
    *("as_strided", "real", "imag", "view_as_real", "view_as_complex", "atleast_1d", "atleast_2d"),
    *("atleast_3d", "linalg.diagonal", "positive", "contiguous", "broadcast_shapes"),
    *("resolve_conj", "resolve_neg", "conj", "swapaxes", "to", "meshgrid", "unsafe_chunk"),
}


@dataclass(frozen=True)
class Stored:
    """A tensor that repeats a small one's elements, in some layout; made on the host at need."""

    small: torch.Tensor
    size: tuple[int, ...]
    order: tuple[int, ...]
    """Its dimensions as they lie in memory, the outermost first."""
    step: int = 1
    """Elements between neighbours in memory."""

    @cached_property
    def base(self):
        tensor = self.small
        for dim, length in enumerate(self.size):
            if length != tensor.shape[dim]:
                places = torch.arange(length) % tensor.shape[dim]
                tensor = tensor.index_select(dim, places)
        flat = tensor.permute(self.order).reshape(-1)
        return flat.repeat_interleave(self.step) if self.step > 1 else flat.contiguous()

    @property
    def num_bytes(self):
        return math.prod(self.size) * self.small.element_size() * self.step

    def on(self, device):
        stride = [0] * len(self.size)
        for place, dim in enumerate(self.order):
            inner = self.order[place + 1 :]
            stride[dim] = self.step * math.prod(self.size[one] for one in inner)
        return self.base.to(device).as_strided(self.size, stride)


@dataclass
class Case:
    """One call of something, with its inputs on the host."""

    name: str
    part: str
    call: object
    inputs: list[Stored] = field(default_factory=list)

    def __call__(self, device):
        return self.call([one.on(device) for one in self.inputs])


def draw(seed, device, *, tiny):
    """Yield the cases of a seed; those that cannot be built are left out."""
    number = NUM_TINY if tiny else NUM_CASES
    chosen = random.Random(seed)
    makers = {
        "operators": operator_cases(chosen.random(), tiny=tiny),
        "models": model_cases(chosen.random(), device, tiny=tiny),
        "compiled": compiled_cases(chosen.random()),
        "triton": triton_cases(chosen.random()),
    }
    order = [part for part in PARTS for _ in range(number[part])]
    chosen.shuffle(order)
    for part in order:
        yield next(makers[part])


def operator_cases(seed, *, tiny):
    """Yield operators of torch's test samples, over types, sizes and layouts."""
    from torch.testing._internal.common_methods_invocations import op_db

    known = [op for op in op_db if not (op.name.startswith(LEFT_OUT) or op.name in VIEWS)]
    known.sort(key=_full_name)
    for turn in itertools.count():
        chosen = random.Random(f"{seed} {turn}")
        torch.manual_seed(chosen.getrandbits(32))
        case = _operator_case(chosen.choice(known), chosen, tiny)
        if case is not None:
            yield case


def _full_name(op):
    return f"{op.name}.{op.variant_test_name}"


def _operator_case(op, chosen, tiny):
    """Return one form of an operator at a drawn size, None where none fits."""
    allowed = [d for d in DTYPES if d in op.supported_dtypes("cuda")]
    if not allowed:
        return None
    dtype = chosen.choices(allowed, [DTYPES[d] for d in allowed])[0]
    try:
        samples = list(itertools.islice(op.sample_inputs("cpu", dtype), NUM_SAMPLES))
    except Exception:  # noqa: BLE001 a sample of somebody else's that cannot be made is left out
        return None
    if not samples:
        return None
    sample = chosen.choice(samples)
    leaves, tree = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if any(one.layout != torch.strided for one in tensors):
        return None
    differentiable = op.supports_autograd and dtype.is_floating_point
    backward = differentiable and chosen.random() < BACKWARD

    def call(inputs):
        found = iter(inputs)
        full = [next(found) if isinstance(one, torch.Tensor) else one for one in leaves]
        return _call(op.op, tree_unflatten(full, tree), inputs, backward)

    low, high = (1 << 8, 1 << 12) if tiny else _drawn_size(chosen)
    for _ in range(4):
        wanted = math.exp(chosen.uniform(math.log(low), math.log(high)))
        sizes = scaled_sizes([tuple(one.shape) for one in tensors], tensors, wanted, chosen)
        if sizes is not None and _fits(call, tensors, sizes):
            stored = [_stored(t, size, chosen) for t, size in zip(tensors, sizes, strict=True)]
            way = "backward" if backward else "forward"
            name = f"{op.name} {str(dtype)[6:]} {way} {'x'.join(map(str, sizes[0]))}"
            return Case(name, "operators", call, stored)
    return None


def _drawn_size(chosen):
    ranges, weights = zip(*SIZES, strict=True)
    return chosen.choices(ranges, weights)[0]


def _call(op, arguments, inputs, backward):
    first, args, kwargs = arguments
    if not backward:
        return op(first, *args, **kwargs)
    wanted = [one.requires_grad_() for one in inputs if one.is_floating_point()]
    outputs = [
        one
        for one in tree_flatten(op(first, *args, **kwargs))[0]
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    ones = [torch.ones_like(one) for one in outputs]
    return torch.autograd.grad(outputs, wanted, ones, allow_unused=True)


def scaled_sizes(shapes, tensors, wanted, chosen):
    """Return shapes whose tensors have about `wanted` bytes; None where nothing can be scaled."""
    lengths = sorted({n for shape in shapes for n in shape if n > 1})
    if not lengths or any(0 in shape for shape in shapes):
        return None
    weights = {n: chosen.choice((0.0, 0.3, 1.0, 1.0)) for n in lengths}
    if not any(weights.values()):
        weights[chosen.choice(lengths)] = 1.0

    def at(power):
        factor = {n: max(1, round(math.exp(power * weights[n]))) for n in lengths}
        return [tuple(n * factor.get(n, 1) for n in shape) for shape in shapes]

    def num_bytes(found):
        sized = zip(found, tensors, strict=True)
        return sum(math.prod(shape) * t.element_size() for shape, t in sized)

    low, high = 0.0, 80.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if num_bytes(at(middle)) <= wanted else (low, middle)
    found = at(low)
    return found if num_bytes(found) >= wanted / 4 else None


def _fits(call, tensors, sizes):
    """Tell whether a call takes these sizes, and makes neither too much work nor too much data."""
    inputs = [
        torch.empty(size, dtype=one.dtype, device="meta")
        for one, size in zip(tensors, sizes, strict=True)
    ]
    try:
        with FlopCounterMode(display=False) as counter:
            made = call(inputs)
    except NotImplementedError:
        # The size of its result depends on data, or has no description.
        return True
    except Exception:  # noqa: BLE001 any of hundreds of operators may refuse a size in its way
        return False
    outputs = [one for one in tree_flatten(made)[0] if isinstance(one, torch.Tensor)]
    num_bytes = sum(one.numel() * one.element_size() for one in outputs)
    return num_bytes <= MOST_OUTPUT_BYTES and counter.get_total_flops() <= MOST_FLOPS


def _stored(tensor, size, chosen):
    """Return a tensor of a larger size that repeats another's elements, in a drawn layout."""
    order = list(range(tensor.ndim))
    if tensor.ndim > 1 and chosen.random() < PERMUTED:
        chosen.shuffle(order)
    step = 2 if tensor.ndim and chosen.random() < SLICED else 1
    return Stored(tensor.detach(), tuple(size), tuple(order), step)


def model_cases(seed, device, *, tiny):
    """Yield blocks of Hugging Face models by drawn configurations, forward or with backward."""
    for turn in itertools.count():
        chosen = random.Random(f"{seed} {turn}")
        torch.manual_seed(chosen.getrandbits(32))
        found = drawn_model(chosen, device, tiny=tiny)
        if found is not None:
            name, call = found
            yield Case(name, "models", lambda _inputs, call=call: call())


def compiled_cases(seed):
    """Yield chains of operators that Inductor compiles."""
    for turn in itertools.count():
        chosen = random.Random(f"{seed} {turn}")
        name, call, shapes, dtype = compiled_chain(chosen, _drawn_size(chosen))
        stored = [_random(shape, dtype) for shape in shapes]
        yield Case(name, "compiled", call, stored)


def triton_cases(seed):
    """Yield hand-written Triton kernels at drawn sizes and blocks."""
    from triton_kernels import drawn_kernel

    for turn in itertools.count():
        chosen = random.Random(f"{seed} {turn}")
        name, call, shapes, dtype = drawn_kernel(chosen, _drawn_size(chosen))
        yield Case(name, "triton", call, [_random(shape, dtype) for shape in shapes])


def _random(shape, dtype):
    small = torch.randn([min(n, 1 << 8) for n in shape]).to(dtype)
    return Stored(small, tuple(shape), tuple(range(len(shape))))
