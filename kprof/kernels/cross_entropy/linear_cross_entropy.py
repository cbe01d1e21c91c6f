"""The last linear layer with its cross-entropy as one operation, without float32 logits in memory.

    loss = cross_entropy(shaped(hidden @ weight.T + bias), targets)

Logits may be shaped: times a scale, and then softly capped, cap * tanh(x / cap). hidden is (M, H),
weight (V, H), targets (M,). By rows, which saves time: a block of rows of logits at a time is
computed, and overwritten with its gradient, for an arriving gradient of 1. By chunks of rows and
vocabulary, which saves memory: each logit is computed in the forward and again in the backward
pass, and the memory beside the gradients is at most a twentieth of the logits (a tenth where they
are capped). GEMMs are torch's; the kernels over logits are those of `_rows.py`, beside one that
shapes them.

Entered by `linear_cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.cross_entropy._rows import (
    Options,
    merge_chunk,
    scale_once,
    write_gradients,
    write_losses,
)
from kprof.kernels.cross_entropy.cross_entropy import IGNORE_INDEX, Reduction
from kprof.kernels.runtime import Launcher, alignments, applied, define
from kprof.kernels.tiles.exact import divide, exp

ROWS_PER_BLOCK, ROWS_OF_TILE = 2_048, 128
# Blocks of rows over which a gradient in 16 bits is accumulated: one more rounding, whose error is
# far below that of rounding the logits.
MOST_ROUNDED = 2
# Share of the logits' memory for one chunk of them and a float32 gradient of the hidden rows.
SHARE_OF_LOGITS = 1 / 20.5
LEAST_ROWS = 1_024
# With a power of two of rows, this many columns give GEMM tiles that fill whole waves of SMs.
MULTIPLE_OF_COLUMNS = 1_024

# Of a load by a GEMM, and of a line of the L2 cache, to which rows of odd sizes are padded.
BYTES_OF_LOAD, BYTES_OF_ROW = 16, 128

# Elements of a CTA that shapes logits: two loads of 16 bytes per thread in 16 bits.
ELEMENTS_OF_SHAPE, WARPS_OF_SHAPE = 2_048, 4


class Shape(NamedTuple):
    """The form of the logits before the loss."""

    scale: float = 1.0
    cap: float = 0.0
    """Of their size; 0: none."""


PLAIN = Shape()


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of hidden, weight and bias; empty if not needed."""


def run_by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    wanted: tuple[bool, bool, bool],
    shape: Shape = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of hidden, weight and bias that are wanted."""
    divisor = find_divisor(targets, divisor, options)
    sums = _Sums(hidden, weight, bias, wanted)
    losses = _sweep_rows(hidden, weight, bias, targets, divisor, options, sums, shape)
    return reduce_losses(losses, divisor, options), *sums.finish()


def _sweep_rows(hidden, weight, bias, targets, divisor, options, sums, shape) -> Tensor:
    """Return the loss of each row, and accumulate the gradients; one buffer serves all blocks.

    Capped logits take a second one: the gradient of the cap needs them.
    """
    losses, state = empty_rows(hidden)
    targets, summed = targets.contiguous(), options._replace(reduction="sum")
    columns = slice(0, weight.shape[0])
    # Logits are shaped as if they were one row.
    stride = _aligned(hidden, columns.stop) if shape == PLAIN else columns.stop
    buffer = hidden.new_empty(min(sums.rows_per_block, hidden.shape[0]) * stride)
    second = torch.empty_like(buffer) if shape.cap else buffer
    for rows in _slices(hidden.shape[0], sums.rows_per_block):
        logits = _logits(hidden, weight, bias, rows, columns, buffer, stride)
        part = state[: 2 * logits.shape[0] + 1]
        _shape_logits(logits, shape)
        dlogits = _matrix_in(second, logits.shape, stride) if sums.is_wanted else None
        write_losses(logits, targets[rows], divisor, summed, losses[rows], part, dlogits)
        if dlogits is not None:
            _shape_gradients(dlogits, logits, shape)
            sums.add(dlogits, rows)
    return losses


class _Sums:
    """Accumulates the gradients; over more than two blocks of rows, in float32."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self.rows_per_block = _rows_per_block(hidden, weight)
        self.is_wanted = any(wanted)
        self._hidden, self._weight, self._wanted = hidden, weight, wanted
        self._dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
        self._dweight = weight.new_empty(0)
        if wanted[1]:
            is_rounded = len(hidden) <= MOST_ROUNDED * self.rows_per_block
            dtype = weight.dtype if is_rounded else torch.float32
            make = torch.empty if len(hidden) else torch.zeros
            self._dweight = make(weight.shape, dtype=dtype, device=weight.device)
        self._dbias = hidden.new_empty(0, dtype=torch.float32)
        if bias is not None and wanted[2]:
            self._dbias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def add(self, dlogits: Tensor, rows: slice) -> None:
        """Add the gradients of a block of rows."""
        if self._wanted[0]:
            torch.mm(dlogits, self._weight, out=self._dhidden[rows])
        if self._wanted[1]:
            add_product(self._dweight, dlogits.t(), self._hidden[rows], is_first=rows.start == 0)
        if self._dbias.numel():
            self._dbias += dlogits.sum(0, dtype=torch.float32)

    def finish(self) -> Gradients:
        """Return the gradients in the dtypes of their inputs."""
        dtype = self._weight.dtype
        return self._dhidden, self._dweight.to(dtype), self._dbias.to(dtype)


def add_product(sums: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add left @ right to `sums`, which may be float32 if the factors have 16 bits."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right, beta=0 if is_first else 1)
    elif left.device.type != "cuda":
        product = torch.mm(left.float(), right.float())
        sums.copy_(product if is_first else sums + product)
    elif is_first:
        torch.mm(left, right, out_dtype=sums.dtype, out=sums)
    else:
        torch.addmm(sums, left, right, out_dtype=sums.dtype, out=sums)


def _rows_per_block(hidden: Tensor, weight: Tensor) -> int:
    """Return the rows of a block: half of all, if their logits take no more than a float32 sum."""
    num_rows = max(hidden.shape[0], 1)
    if num_rows <= ROWS_PER_BLOCK:
        return num_rows
    half = -(-num_rows // (MOST_ROUNDED * ROWS_OF_TILE)) * ROWS_OF_TILE
    is_small = half * hidden.element_size() <= 4 * weight.shape[1]
    return half if is_small else ROWS_PER_BLOCK


def find_losses_by_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    shape: Shape = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the state: maximum and sum of each row, and the divisor (2 M + 1,)."""
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    divisor, targets = find_divisor(targets, divisor, options), targets.contiguous()
    parts = torch.empty(4, num_rows, dtype=torch.float32, device=hidden.device)
    rows_each, columns_each = _chunk_shape(hidden, weight)
    buffer = hidden.new_empty(rows_each * columns_each)
    for rows in _slices(num_rows, rows_each):
        part = parts.new_zeros(4, rows.stop - rows.start)
        for columns in _slices(vocabulary, columns_each):
            logits = _logits(hidden, weight, bias, rows, columns, buffer)
            _shape_logits(logits, shape)
            merge_chunk(logits, targets[rows], part, columns.start, options.smoothing != 0)
        parts[:, rows] = part
    losses = _losses_of(parts, targets, options, vocabulary)
    state = torch.cat([parts[:2].reshape(-1), divisor.reshape(1)])
    return reduce_losses(losses, divisor, options), state


def _losses_of(parts: Tensor, targets: Tensor, options: Options, vocabulary: int) -> Tensor:
    """Return the loss of each row; a target outside the vocabulary makes it NaN."""
    about, log_total = parts[0], parts[1].log()
    losses = log_total - (parts[2] - about)
    if options.smoothing:
        smooth = log_total - (parts[3] / vocabulary - about)
        losses = losses * (1 - options.smoothing) + smooth * options.smoothing
    if options.z_loss:
        losses = losses + options.z_loss * (about + log_total) ** 2
    losses = losses.masked_fill((targets < 0) | (targets >= vocabulary), math.nan)
    return losses.masked_fill(targets == options.ignore_index, 0.0)


def find_gradients_by_chunks(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    state: Tensor,
    options: Options,
    wanted: tuple[bool, bool, bool],
    shape: Shape = PLAIN,
) -> Gradients:
    """Return the wanted gradients of hidden, weight and bias; the logits are computed again."""
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    rows_each, columns_each = _chunk_shape(hidden, weight)
    buffer = hidden.new_empty(rows_each * columns_each)
    second = torch.empty_like(buffer) if shape.cap else buffer
    sums = hidden.new_empty(rows_each if wanted[0] else 0, hidden.shape[1], dtype=torch.float32)
    dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    dweight = torch.empty_like(weight) if wanted[1] else weight.new_empty(0)
    dbias = hidden.new_zeros(vocabulary if wanted[2] else 0, dtype=torch.float32)
    targets = targets.contiguous()
    for rows in _slices(num_rows, rows_each):
        count = rows.stop - rows.start
        part = torch.cat([state[rows], state[num_rows:][rows], state[2 * num_rows :]])
        arriving = dloss[rows] if dloss.dim() else dloss
        for columns in _slices(vocabulary, columns_each):
            logits = _logits(hidden, weight, bias, rows, columns, buffer)
            _shape_logits(logits, shape)
            chunk, dlogits = (columns.start, vocabulary), second[: logits.numel()]
            dlogits = dlogits.view(logits.shape)
            write_gradients(arriving, logits, targets[rows], options, part, dlogits, chunk)
            _shape_gradients(dlogits, logits, shape)
            if wanted[0]:
                add_product(sums[:count], dlogits, weight[columns], is_first=columns.start == 0)
            if wanted[1]:
                is_first = rows.start == 0
                add_product(dweight[columns], dlogits.t(), hidden[rows], is_first=is_first)
            if wanted[2]:
                dbias[columns] += dlogits.sum(0, dtype=torch.float32)
        if wanted[0]:
            dhidden[rows] = sums[:count]
    return dhidden, dweight if num_rows else dweight.zero_(), dbias.to(weight.dtype)


def _aligned(hidden: Tensor, num_columns: int) -> int:
    """Return the elements between rows of logits, so that GEMMs can load 16 bytes at once.

    Vocabularies of odd sizes (BERT, GPT-2) would have rows that begin anywhere.
    """
    if num_columns * hidden.element_size() % BYTES_OF_LOAD == 0:
        return num_columns
    multiple = BYTES_OF_ROW // hidden.element_size()
    return -(-num_columns // multiple) * multiple


def _matrix_in(buffer: Tensor, shape: tuple[int, ...], stride: int) -> Tensor:
    """Return a matrix at the beginning of a buffer, whose rows are so many elements apart."""
    return buffer[: shape[0] * stride].view(shape[0], stride)[:, : shape[1]]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: slice,
    columns: slice,
    buffer: Tensor,
    stride: int | None = None,
) -> Tensor:
    """Compute the logits of these rows and columns in the buffer."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    logits = _matrix_in(buffer, shape, shape[1] if stride is None else stride)
    if bias is None:
        return torch.mm(hidden[rows], weight[columns].t(), out=logits)
    return torch.addmm(bias[columns], hidden[rows], weight[columns].t(), out=logits)


def _shape_logits(logits: Tensor, shape: Shape) -> None:
    """Scale and cap the logits in place."""
    if shape != PLAIN and logits.numel():
        _launch_shape(_key_of(logits), *_launch_of(logits.numel(), (logits, logits), shape, False))


def _shape_gradients(dlogits: Tensor, shaped: Tensor, shape: Shape) -> None:
    """Turn the gradients of shaped logits into those of the logits, in place."""
    if shape != PLAIN and shaped.numel():
        given = (dlogits, shaped)
        _launch_shape(_key_of(dlogits, shaped), *_launch_of(shaped.numel(), given, shape, True))


def _key_of(*tensors: Tensor) -> tuple[Any, ...]:
    first = tensors[0]
    return first.device, first.dtype, len(tensors), alignments(tensors, first.numel())


def _launch_of(size: int, tensors: tuple[Tensor, ...], shape: Shape, is_backward: bool) -> Any:
    """Return the grid, the arguments and the options of a launch over all elements."""
    arguments = (*tensors, shape.scale, shape.cap, size, is_backward, ELEMENTS_OF_SHAPE)
    return -(-size // ELEMENTS_OF_SHAPE), arguments, {"num_warps": WARPS_OF_SHAPE}


@triton.jit(do_not_specialize=["scale", "cap"])
def shape_logits(
    x_N, shaped_N, scale, cap, size: tl.int64, IS_BACKWARD: tl.constexpr, BLOCK: tl.constexpr
):
    """Scale and cap logits x; backward, x is a gradient of what `shaped` holds."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    x = tl.load(x_N + places, mask, other=0.0)
    is_exact: tl.constexpr = x.dtype == tl.float32
    y = x.to(tl.float32) * scale
    if cap != 0.0:
        if IS_BACKWARD:
            share = tl.load(shaped_N + places, mask, other=0.0).to(tl.float32) / cap
            y *= 1.0 - share * share
        else:
            # tanh by a power that cannot overflow.
            power = exp(-2.0 * tl.abs(y / cap), is_exact)
            size_of = cap * divide(1.0 - power, 1.0 + power, is_exact)
            y = tl.where(y < 0, -size_of, size_of)
    tl.store(x_N + places, y.to(x.dtype), mask)


_launch_shape = Launcher(shape_logits)


def _chunk_shape(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return rows and columns of a chunk of the logits.

    Fewer blocks of rows mean fewer roundings of the weight's gradient. So there are as few as leave
    a quarter of the memory to the logits, beside the float32 gradient of the hidden rows.
    """
    num_rows, num_columns, size = hidden.shape[0], weight.shape[0], hidden.element_size()
    allowed = SHARE_OF_LOGITS * num_rows * num_columns * size
    rows = max(num_rows, 1)
    while rows > LEAST_ROWS and rows * 4 * hidden.shape[1] > allowed * 3 / 4:
        rows = -(-rows // 2)
    columns = int((allowed - rows * 4 * hidden.shape[1]) / (rows * size))
    columns -= columns % MULTIPLE_OF_COLUMNS
    return rows, min(max(columns, MULTIPLE_OF_COLUMNS), num_columns)


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, total)) for first in range(0, total, step))


def find_divisor(targets: Tensor, divisor: Tensor | None, options: Options) -> Tensor:
    """Return the divisor of the sum of the losses, in float32."""
    if divisor is not None:
        return divisor.float()
    if options.reduction == "mean":
        return (targets != options.ignore_index).sum().float()
    return torch.ones((), dtype=torch.float32, device=targets.device)


def empty_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the losses, and for the state of the rows."""
    num_rows = hidden.shape[0]
    losses = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    return losses, torch.empty(2 * num_rows + 1, dtype=torch.float32, device=hidden.device)


def reduce_losses(losses: Tensor, divisor: Tensor, options: Options) -> Tensor:
    """Return the losses, or their sum over the divisor."""
    if options.reduction == "none":
        return losses
    return losses.sum() / divisor


def _run_by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    wanted: tuple[bool, bool, bool],
    scale: float,
    cap: float,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = hidden, weight, bias, targets, divisor, Options(*options), wanted
    return run_by_rows(*given, Shape(scale, cap))


def _run_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    scale: float,
    cap: float,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    given = hidden, weight, bias, targets, divisor, Options(*options)
    return find_losses_by_chunks(*given, Shape(scale, cap))


def _run_gradients(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    state: Tensor,
    wanted: tuple[bool, bool, bool],
    scale: float,
    cap: float,
    *options: Any,
) -> Gradients:
    given = dloss, hidden, weight, bias, targets, state, Options(*options), wanted
    return find_gradients_by_chunks(*given, Shape(scale, cap))


def _empty_loss(hidden: Tensor, reduction: str) -> Tensor:
    shape = (hidden.shape[0],) if reduction == "none" else ()
    return torch.empty(shape, dtype=torch.float32, device=hidden.device)


def _empty_gradients(hidden: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
    return (
        torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0),
        torch.empty_like(weight) if wanted[1] else weight.new_empty(0),
        weight.new_empty(weight.shape[0] if wanted[2] else 0),
    )


_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets"
_OPTIONS = (
    "float scale, float cap, int ignore_index, float label_smoothing, float z_loss, str reduction"
)
operator_by_rows = define(
    f"linear_cross_entropy_with_gradients({_INPUTS}, Tensor? divisor, bool[3] wanted, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run_by_rows,
    lambda hidden, weight, bias, targets, divisor, wanted, *options: (
        _empty_loss(hidden, options[-1]),
        *_empty_gradients(hidden, weight, wanted),
    ),
)
operator_loss = define(
    f"linear_cross_entropy({_INPUTS}, Tensor? divisor, {_OPTIONS}) -> (Tensor, Tensor)",
    _run_loss,
    lambda hidden, weight, bias, targets, divisor, *options: (
        _empty_loss(hidden, options[-1]),
        hidden.new_empty(2 * hidden.shape[0] + 1, dtype=torch.float32),
    ),
)
operator_gradients = define(
    f"linear_cross_entropy_backward(Tensor dloss, {_INPUTS}, Tensor state, bool[3] wanted,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _run_gradients,
    lambda dloss, hidden, weight, bias, targets, state, wanted, *options: _empty_gradients(
        hidden, weight, wanted
    ),
)

Saves = Literal["time", "memory"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    cap: float = 0.0,
    *,
    z_loss: float = 0.0,
    divisor: Tensor | float | None = None,
    saves: Saves = "time",
) -> Tensor:
    """Return the cross-entropy, in float32, of hidden @ weight.T + bias, scaled and capped.

    Logits are rounded to the dtype of `hidden`, as the layer rounds them. For float16 and a loss
    per row the factor of the gradients has to be known first: these calls save memory, not time.

    Args:
        hidden: (M, H); float32, float16 or bfloat16.
        weight: (V, H), of the same dtype; under autocast both are cast.
        targets: (M,) int64.
        bias: (V,).
        ignore_index: A target that does not count.
        label_smoothing: The share of each target that is spread over the vocabulary.
        reduction: As in torch.
        scale: Factor of the logits.
        cap: Logits x, after the scale, become cap * tanh(x / cap); 0: they stay.
        z_loss: As of `cross_entropy`.
        divisor: As of `cross_entropy`.
        saves: "time": 6 M H V FLOPs, and half of the logits in memory beside gradients (for many
            rows, the logits of 2,048 rows and a float32 gradient). "memory": 8 M H V FLOPs, and a
            twentieth of the logits.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    options = Options(ignore_index, float(label_smoothing), float(z_loss), reduction)
    shape = Shape(float(scale), float(cap))
    if divisor is not None and not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float32, device=hidden.device)
    leaves = [one for one in (hidden, weight, bias) if one is not None]
    if not (torch.is_grad_enabled() and any(one.requires_grad for one in leaves)):
        return operator_loss(hidden, weight, bias, targets, divisor, *shape, *options)[0]
    is_known = reduction != "none" and hidden.dtype != torch.float16
    compute = _by_rows if is_known and saves == "time" else _by_chunks
    loss: Tensor = compute(hidden, weight, bias, targets, divisor, options, shape)
    return loss


class _ByRows(torch.autograd.Function):
    """The gradients are computed with the loss, for an arriving gradient of 1."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, divisor, options, shape) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        loss, *gradients = operator_by_rows(
            hidden, weight, bias, targets, divisor, wanted, *shape, *options
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = [
            (scale_once(gradient, dloss) if is_needed else None)
            for gradient, is_needed in zip(ctx.saved_tensors, needs, strict=False)
        ]
        return *found, None, None, None, None


class _ByChunks(torch.autograd.Function):
    """The gradients are computed in the backward pass, when their factor is known."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, divisor, options, shape) -> Tensor:
        loss, state = operator_loss(hidden, weight, bias, targets, divisor, *shape, *options)
        ctx.save_for_backward(hidden, weight, bias, targets, state)
        ctx.options = (*shape, *options)
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        found = operator_gradients(dloss, *ctx.saved_tensors, needs, *ctx.options)
        pairs = zip(found, needs, strict=True)
        return *(one if is_needed else None for one, is_needed in pairs), None, None, None, None


_by_rows, _by_chunks = applied(_ByRows), applied(_ByChunks)


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the inputs as autocast does for a linear layer."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    scale: float = 1.0,
    cap: float = 0.0,
) -> Tensor:
    """Compute what a language model of Hugging Face does: layer, cast to float32, loss."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits if scale == 1.0 else logits * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _refuses(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *options: Any
) -> str | None:
    tensors = [one for one in (hidden, weight, targets, bias) if one is not None]
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a {type(tensor).__name__} is no plain tensor"
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{hidden.dtype} is none of float32, float16 and bfloat16"
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        return f"the weight is {weight.dtype}, the input {hidden.dtype}"
    if targets.dtype != torch.int64:
        return f"targets of {targets.dtype}: they have to be indices in int64"
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        return f"rows of shape {tuple(hidden.shape)} for targets of {tuple(targets.shape)}"
    return None


def _work(hidden: Tensor, weight: Tensor, *others: Any) -> Work:
    """Count one GEMM; hidden and weight are read."""
    flops = 2 * hidden.numel() * weight.shape[0]
    return Work(flops, hidden.element_size() * (hidden.numel() + weight.numel()))


def _backward_work(hidden: Tensor, weight: Tensor, *others: Any) -> Work:
    """Count two GEMMs; hidden and weight are read, their gradients written."""
    flops = 4 * hidden.numel() * weight.shape[0]
    return Work(flops, 2 * hidden.element_size() * (hidden.numel() + weight.numel()))


def _saving_memory() -> Any:
    return lambda *inputs: linear_cross_entropy(*inputs, saves="memory")


def _inductor() -> Any:
    return torch.compile(_reference, dynamic=False)


def _liger() -> Any:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, targets, bias=None: LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, bias
    )[0]


def _quack() -> Any:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, targets: chunked_linear_cross_entropy(hidden, weight, targets)


KERNEL = Kernel(
    name="linear_cross_entropy",
    replaces="the last linear layer of a language model of Hugging Face, and its loss",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: linear_cross_entropy, "kprof"),
        Provider("kprof-lean", _saving_memory, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", _inductor),
        Provider("liger", _liger, "liger-kernel"),
        Provider("quack", _quack, "quack-kernels"),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        draw(shape[0], shape[1]),
        draw.plain(shape[2], shape[1], scale=shape[1] ** -0.5),
        draw.integers(shape[2], shape[0]),
    ),
    work=_work,
    shapes=((8_192, 4_096, 128_256), (8_192, 2_048, 128_256), (16_384, 4_096, 32_000)),
    edges=((5, 33, 127), (70, 16, 1_000)),
    reach=(2**19,),
    differentiable=(0, 1),
    backward_work=_backward_work,
    sources=(
        "Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867",
        "Wijmans and others, Cut your losses in large-vocabulary language models, arXiv 2411.09009",
    ),
)
