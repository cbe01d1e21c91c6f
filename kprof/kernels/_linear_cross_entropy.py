"""The two ways through a linear layer and its cross-entropy that never hold float32 logits.

By rows: each logit is computed once and becomes its own gradient, for an arriving gradient of one.
By pieces of the vocabulary: each logit is computed twice, in the forward and in the backward pass,
and what is held beside the gradients is a twentieth of the logits, or less. M is rows, H the
hidden size, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kprof.kernels._cross_entropy import (
    Options,
    merge_piece,
    write_gradients,
    write_losses,
)

ROWS_PER_BLOCK, ROWS_OF_TILE = 2_048, 128
# Blocks of rows that a gradient in 16 bits is added up over: one more rounding than in one go, and
# far less than what rounding the logits costs.
MOST_ROUNDED = 2
# Of the logits, for one piece of them and a float32 gradient of the hidden rows.
SHARE_OF_LOGITS = 1 / 20.5
LEAST_ROWS = 1_024
# With rows that are a power of two, so many columns make tiles that fill whole waves of SMs.
MULTIPLE_OF_COLUMNS = 1_024

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of hidden, weight and bias; empty where nobody asked."""


def run_by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of hidden, weight and bias that are wanted."""
    divisor = find_divisor(targets, divisor, options)
    sums = _Sums(hidden, weight, bias, wanted)
    losses = _sweep_rows(hidden, weight, bias, targets, divisor, options, sums)
    return reduce_losses(losses, divisor, options), *sums.finish()


def _sweep_rows(hidden, weight, bias, targets, divisor, options, sums) -> Tensor:
    """Return the loss of each row, and add up the gradients; all logits pass through one buffer."""
    losses, state = empty_rows(hidden)
    targets, summed = targets.contiguous(), options._replace(reduction="sum")
    columns = slice(0, weight.shape[0])
    buffer = hidden.new_empty(min(sums.rows_per_block, hidden.shape[0]) * weight.shape[0])
    for rows in _slices(hidden.shape[0], sums.rows_per_block):
        logits = _logits(hidden, weight, bias, rows, columns, buffer)
        part = state[: 2 * logits.shape[0] + 1]
        dlogits = logits if sums.is_wanted else None
        write_losses(logits, targets[rows], divisor, summed, losses[rows], part, dlogits)
        if dlogits is not None:
            sums.add(dlogits, rows)
    return losses


class _Sums:
    """The gradients as they come together; over more than two blocks, added up in float32."""

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
        """Add what the logits of these rows give."""
        if self._wanted[0]:
            torch.mm(dlogits, self._weight, out=self._dhidden[rows])
        if self._wanted[1]:
            add_product(self._dweight, dlogits.t(), self._hidden[rows], is_first=rows.start == 0)
        if self._dbias.numel():
            self._dbias += dlogits.sum(0, dtype=torch.float32)

    def finish(self) -> Gradients:
        """Return the gradients in the dtypes of what they are of."""
        dtype = self._weight.dtype
        return self._dhidden, self._dweight.to(dtype), self._dbias.to(dtype)


def add_product(sums: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add a matrix product to `sums`, which may be of float32 where the factors have 16 bits."""
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
    """Return half of many rows, where their logits take no more than a sum in float32 would."""
    num_rows = max(hidden.shape[0], 1)
    if num_rows <= ROWS_PER_BLOCK:
        return num_rows
    half = -(-num_rows // (MOST_ROUNDED * ROWS_OF_TILE)) * ROWS_OF_TILE
    is_small = half * hidden.element_size() <= 4 * weight.shape[1]
    return half if is_small else ROWS_PER_BLOCK


def find_losses_by_pieces(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    divisor: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and of each row the maximum and the sum, and the divisor: (2 M + 1,)."""
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    divisor, targets = find_divisor(targets, divisor, options), targets.contiguous()
    parts = torch.empty(4, num_rows, dtype=torch.float32, device=hidden.device)
    rows_each, columns_each = _piece(hidden, weight)
    buffer = hidden.new_empty(rows_each * columns_each)
    for rows in _slices(num_rows, rows_each):
        part = parts.new_zeros(4, rows.stop - rows.start)
        for columns in _slices(vocabulary, columns_each):
            logits = _logits(hidden, weight, bias, rows, columns, buffer)
            merge_piece(logits, targets[rows], part, columns.start, options.smoothing != 0)
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


def find_gradients_by_pieces(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    state: Tensor,
    options: Options,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """Return the gradients of hidden, weight and bias that are wanted, computing logits anew."""
    num_rows, vocabulary = hidden.shape[0], weight.shape[0]
    rows_each, columns_each = _piece(hidden, weight)
    buffer = hidden.new_empty(rows_each * columns_each)
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
            piece = columns.start, vocabulary
            write_gradients(arriving, logits, targets[rows], options, part, logits, piece)
            if wanted[0]:
                add_product(sums[:count], logits, weight[columns], is_first=columns.start == 0)
            if wanted[1]:
                is_first = rows.start == 0
                add_product(dweight[columns], logits.t(), hidden[rows], is_first=is_first)
            if wanted[2]:
                dbias[columns] += logits.sum(0, dtype=torch.float32)
        if wanted[0]:
            dhidden[rows] = sums[:count]
    return dhidden, dweight if num_rows else dweight.zero_(), dbias.to(weight.dtype)


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice, buffer: Tensor
) -> Tensor:
    """Compute the logits of these rows and columns in the buffer."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    logits = buffer[: shape[0] * shape[1]].view(shape)
    if bias is None:
        return torch.mm(hidden[rows], weight[columns].t(), out=logits)
    return torch.addmm(bias[columns], hidden[rows], weight[columns].t(), out=logits)


def _piece(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return how many rows and columns a piece of the logits has.

    Fewer blocks of rows mean fewer roundings of the weight's gradient, so there are as few as
    leave a quarter of the memory to the logits beside the hidden rows' gradient in float32.
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
    """Return what the sum of the losses is divided by, in float32."""
    if divisor is not None:
        return divisor.float()
    if options.reduction == "mean":
        return (targets != options.ignore_index).sum().float()
    return torch.ones((), dtype=torch.float32, device=targets.device)


def empty_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return places for each row's loss, and for what else is known of it."""
    num_rows = hidden.shape[0]
    losses = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    return losses, torch.empty(2 * num_rows + 1, dtype=torch.float32, device=hidden.device)


def reduce_losses(losses: Tensor, divisor: Tensor, options: Options) -> Tensor:
    """Return the losses, or their sum over the divisor."""
    if options.reduction == "none":
        return losses
    return losses.sum() / divisor
