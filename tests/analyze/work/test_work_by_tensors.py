"""Work models against torch: it runs each operator on small tensors of random shapes.

The bytes are those of the tensors that it takes and returns, the FLOPs those that it counts itself.
"""

import math
import random

import pytest

from tests.analyze.calls import inputs, tensor
from tests.analyze.work.test_work_models import MODELS

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.complex64: "complex64",
}
SEEDS = range(3)


def argument(value):
    """Return an argument as a recorder writes it."""
    if not isinstance(value, torch.Tensor):
        return value
    return tensor(NAMES[value.dtype], *value.shape, strides=value.stride())


def stored_bytes(value):
    """Return the bytes of a tensor's memory: an expanded dimension repeats one element."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * math.prod(n if step else min(n, 1) for n, step in sizes)


def called(name, *arguments):
    """Return the modelled work of a call, and the bytes that it takes and gives."""
    work = MODELS[f"aten::{name}"](inputs(*map(argument, arguments)))
    taken = sum(map(stored_bytes, arguments))
    result = getattr(torch.ops.aten, name)(*arguments)
    results = result if isinstance(result, tuple | list) else [result]
    given = sum(r.numel() * r.element_size() for r in results if isinstance(r, torch.Tensor))
    return work, taken + given


def counted_flops(name, *arguments):
    """Return the FLOPs of a call as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.aten, name)(*arguments)
    return counter.get_total_flops()


# Of float32 and 64-bit integers, also broadcast, expanded and without elements.
def elementwise_arguments(draw):
    shape = [draw.choice([1, 2, 3, 5]) for _ in range(draw.randrange(1, 4))]
    shape[draw.randrange(len(shape))] = draw.choice([0, 2, 7])
    partial = [n if draw.random() < 0.6 else 1 for n in shape][draw.randrange(2) :]
    numbers = torch.rand(shape) if draw.random() < 0.6 else torch.randint(1, 9, shape)
    other = torch.rand(partial) if numbers.is_floating_point() else torch.randint(1, 9, partial)
    other = other.expand(shape) if draw.random() < 0.3 else other
    return draw.choice([(numbers,), (numbers, other), (numbers, other, numbers + 1)])


NO_ELEMENTS = {
    # The CPU keeps a buffer that a GPU recomputes.
    "log_sigmoid_forward",
    # With one argument it returns places.
    "where",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_elementwise_operators_move_what_they_take_and_give(seed):
    draw, others, seen = random.Random(seed), {}, set()
    torch.manual_seed(seed)
    elementwise = [n for n, model in MODELS.items() if "_elementwise" in str(model)]
    for name in (one.removeprefix("aten::") for one in elementwise for _ in range(3)):
        given = elementwise_arguments(draw)
        try:
            work, moved = called(
                name, *(one.clone() if one.is_contiguous() else one for one in given)
            )
        except (RuntimeError, AttributeError):
            # It takes other arguments.
            continue
        seen.add(name)
        if name not in NO_ELEMENTS and work.bytes != moved:
            others[name] = (work.bytes, moved, [tuple(one.shape) for one in given])
    assert others == {}
    assert len(seen) > 120


def some(draw):
    """Return a tensor of three dimensions, of one of two types."""
    shape = [draw.randint(1, 5) for _ in range(2)]
    return torch.rand(*shape, draw.randint(3, 6), dtype=draw.choice([torch.float32, torch.float64]))


def matrices(draw, *batch):
    """Return two matrices that can be multiplied, and their product."""
    rows, inner, columns = (draw.randint(1, 7) for _ in range(3))
    left, right = torch.rand(*batch, rows, inner), torch.rand(*batch, inner, columns)
    return left, right, left @ right


def image(draw, num_dims=2):
    """Return some samples of some channels."""
    extents = (draw.randint(7, 12) for _ in range(num_dims))
    return torch.rand(draw.randint(1, 3), draw.randint(1, 4), *extents)


def window(draw):
    """Return the extents of a window in two dimensions, their strides, and a padding."""
    kernel = [draw.randint(2, 4) for _ in range(2)]
    return kernel, [draw.randint(1, 3) for _ in range(2)], [draw.randint(0, 1) for _ in range(2)]


def dim(draw):
    return draw.randint(-3, 2)


def reduced(draw):
    """Return the arguments of a reduction over some dimensions."""
    return some(draw), draw.sample(range(3), draw.randint(1, 2)), False


def along(*rest):
    """Return what makes the arguments of an operator along one dimension."""
    return lambda draw: (some(draw), dim(draw), *rest)


def twice(draw):
    one = some(draw)
    return one, torch.rand_like(one)


def layer_norm(draw):
    one = some(draw).float()
    width = list(one.shape[draw.randint(1, 2) :])
    weight = torch.rand(width)
    return one, width, weight, draw.choice([weight, None])


def group_norm(draw):
    one = torch.rand(draw.randint(1, 3), 6, 5)
    weight, bias = draw.choice([(torch.rand(6), torch.rand(6)), (None, None)])
    return one, weight, bias, one.shape[0], 6, 5, draw.choice([1, 2, 3])


def pooled(draw):
    return image(draw), *window(draw)


def loss(*rest):
    """Return what makes the arguments of a loss, of each kind of reduction."""
    return lambda draw: (*twice(draw), *rest[:-1], draw.randint(0, 2), *rest[-1])


def loss_backward(*rest):
    def make(draw):
        one, target = twice(draw)
        return (torch.rand_like(one), one, target, *rest[:-1], 0, *rest[-1])

    return make


def resampled(num_dims, *rest):
    return lambda draw: (
        image(draw, num_dims),
        [draw.randint(2, 20) for _ in range(num_dims)],
        *rest,
        *[None] * num_dims,
    )


def padded(num_dims):
    return lambda draw: (
        image(draw, num_dims),
        [draw.randint(0, 3) for _ in range(2 * num_dims)],
    )


def convolved(draw):
    """Return the arguments of a convolution that touches all of its input."""
    groups, dims = draw.choice([1, 2]), draw.choice([1, 2, 3])
    kernel = [draw.randint(1, 3) for _ in range(dims)]
    one = torch.rand(draw.randint(1, 3), 4, *(draw.randint(6, 9) for _ in range(dims)))
    weight = torch.rand(6, 4 // groups, *kernel)
    bias = draw.choice([None, torch.rand(6)])
    padding = [draw.randint(0, 1) for _ in range(dims)]
    return one, weight, bias, [1] * dims, padding, [1] * dims, False, [0] * dims, groups


def sampled(num_dims):
    def make(draw):
        one = image(draw, num_dims)
        places = [draw.randint(1, 5) for _ in range(num_dims)]
        return one, torch.rand(one.shape[0], *places, num_dims), 0, 0, False

    return make


def transformed(draw):
    one = some(draw).float()
    return one, draw.sample(range(3), draw.randint(1, 3)), 0


CALLS = [
    *((name, reduced) for name in ("sum", "mean", "nansum", "amax", "amin", "logsumexp")),
    *((name, lambda draw: (some(draw), [dim(draw)], True, False)) for name in ("var", "std")),
    *((name, lambda d: (some(d), [dim(d)], True, False)) for name in ("var_mean", "std_mean")),
    ("prod", along(False)),
    ("linalg_vector_norm", lambda draw: (some(draw), 2, [dim(draw)], False)),
    ("norm", lambda draw: (some(draw), 2, [dim(draw)], False)),
    *((name, along(False)) for name in ("all", "any", "argmax", "argmin", "max", "min")),
    *((name, along(False)) for name in ("sort", "argsort", "median", "nanmedian", "mode")),
    *((name, twice) for name in ("max", "min")),
    *((name, lambda draw: (some(draw),)) for name in ("max", "min", "median", "sum")),
    *((name, along()) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")),
    ("count_nonzero", lambda draw: (some(draw), [dim(draw)])),
    ("topk", lambda draw: (some(draw), draw.randint(1, 3), -1, True, True)),
    ("kthvalue", lambda draw: (some(draw), 2, -1, False)),
    ("searchsorted", lambda draw: (torch.rand(9), some(draw).float())),
    ("bucketize", lambda draw: (some(draw).float(), torch.rand(9))),
    ("trace", lambda draw: (torch.rand(1, 1),)),
    ("multinomial", lambda draw: (torch.rand(draw.randint(1, 4), 7), draw.randint(1, 5), True)),
    *((name, along(False)) for name in ("_softmax", "_log_softmax")),
    *(
        (name, lambda draw: (*(one.float() for one in twice(draw)), -1, 6))
        for name in ("_softmax_backward_data", "_log_softmax_backward_data")
    ),
    ("native_layer_norm", lambda draw: (*layer_norm(draw), 1e-5)),
    ("native_group_norm", lambda draw: (*group_norm(draw), 1e-5)),
    ("max_pool2d_with_indices", lambda d: (*pooled(d), [1, 1])),
    ("avg_pool2d", lambda draw: (*pooled(draw), False, True, None)),
    ("_adaptive_avg_pool2d", lambda draw: (image(draw), [draw.randint(1, 5), 3])),
    ("adaptive_max_pool2d", lambda draw: (image(draw), [draw.randint(1, 5), 3])),
    ("upsample_nearest1d", resampled(1)),
    ("upsample_nearest2d", resampled(2)),
    ("upsample_nearest3d", resampled(3)),
    ("upsample_bilinear2d", resampled(2, False)),
    ("upsample_bicubic2d", resampled(2, False)),
    *((f"{how}_pad{n}d", padded(n)) for how in ("reflection", "replication") for n in (1, 2, 3)),
    *((f"grid_sampler_{n}d", sampled(n)) for n in (2, 3)),
    ("im2col", lambda d: (image(d), [2, 3], [1, d.randint(1, 2)], [1, 0], [d.randint(1, 2), 1])),
    *((name, loss([])) for name in ("mse_loss", "soft_margin_loss")),
    *((name, loss([1.0])) for name in ("smooth_l1_loss", "huber_loss")),
    ("binary_cross_entropy", loss(None, [])),
    ("mse_loss_backward", loss_backward([])),
    *((f"{name}_loss_backward", loss_backward([1.0])) for name in ("smooth_l1", "huber")),
    ("binary_cross_entropy_backward", loss_backward(None, [])),
    ("flip", lambda draw: (some(draw), [dim(draw)])),
    ("roll", lambda draw: (some(draw), [2], [dim(draw)])),
    ("pixel_shuffle", lambda draw: (torch.rand(draw.randint(1, 3), 8, 5, 7), 2)),
    ("native_dropout", lambda draw: (some(draw), 0.5, True)),
    ("native_dropout_backward", lambda draw: (some(draw), torch.ones(1, 1, 1) > 0, 1.0)),
    (
        "_fft_c2c",
        lambda draw: (torch.complex(*[some(draw).float()] * 2), [draw.randint(0, 2)], 0, True),
    ),
    ("_fft_r2c", lambda draw: (*transformed(draw), True)),
    ("_cdist_forward", lambda d: (torch.rand(2, 5, 3), torch.rand(2, d.randint(1, 4), 3), 2, None)),
    ("mm", lambda draw: matrices(draw)[:2]),
    ("bmm", lambda draw: matrices(draw, 3)[:2]),
    ("addmm", lambda draw: (lambda a, b, c: (c, a, b))(*matrices(draw))),
    ("baddbmm", lambda draw: (lambda a, b, c: (c, a, b))(*matrices(draw, 2))),
    ("convolution", convolved),
]
# Operators whose FLOPs torch counts as well.
COUNTED = ("mm", "bmm", "addmm", "baddbmm", "convolution")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_other_operators_move_what_they_take_and_give_too(seed):
    draw, others = random.Random(seed), []
    torch.manual_seed(seed)
    for name, make in CALLS:
        given = make(draw)
        work, moved = called(name, *given)
        shapes = [tuple(getattr(one, "shape", (one,))) for one in given]
        if (work.bytes, work.bound) != (moved, None):
            others.append((name, work, moved, shapes))
        if name in COUNTED and work.flops != (flops := counted_flops(name, *given)):
            others.append((name, work, flops, shapes))
    assert others == []
