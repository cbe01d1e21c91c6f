"""FP8 products on the host: how the work is cut, and the operator that launches it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeAlias

import torch
from torch import Tensor
from triton.runtime import driver

from kprof.kernels.fp8._gemm_kernel import FETCHED, MOST_FETCHED, gains, narrow, overlaps, tiled
from kprof.kernels.fp8._quantize_rows import FP8, SIDE, rows_of_program
from kprof.kernels.runtime.launcher import (
    MOST_CALLS,
    Launcher,
    alignments,
    kind_of,
    next_power_of_two,
)
from kprof.kernels.runtime.operator import define
from kprof.kernels.runtime.rows import num_sms
from kprof.kernels.tiles.splits import counters

# The least tile of a product on tensor cores: rows of x.
LEAST_ROWS = 8
# More rows are read too often by programs that each have few columns.
MOST_NARROW_ROWS = 16
# What cuBLASLt asks for, too.
MULTIPLE = 16
# Beyond, they fill the GPU without being cut.
MANY_TILES = 2.0
MOST_ROWS_OF_A_TILE, MANY_ROWS = 128, 512
# Shared memory in bytes: what a program may have on Hopper, and what each has taken from it.
ROOM_OF_HOPPER, RESERVED = 232_448, 1_024


@dataclass(frozen=True)
class Narrow:
    """Few rows: N columns for a program, whose warps share out K; tiles in flight."""

    n: int = 16
    k: int = 128
    warps: int = 4
    stages: int = 6

    def ring_bytes(self, num_rows: int) -> int:
        """Return what tiles in flight take of shared memory, of operands in FP8."""
        m = max(LEAST_ROWS, next_power_of_two(num_rows))
        # The tile that is multiplied is in registers.
        return (self.stages - 1) * self.warps * self.k * (self.n + m)


@dataclass(frozen=True)
class Tiled:
    """A tile of M rows and N columns, K at a time, by so many programs that each sum a part."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1

    def ring_bytes(self, num_rows: int) -> int:
        """Return what tiles in flight take of shared memory, of operands in FP8."""
        return self.stages * self.k * (self.n + self.m)


Schedule = Narrow | Tiled


@lru_cache(MOST_CALLS)
def schedule_of(
    num_rows: int,
    num_columns: int,
    depth: int,
    is_wide: bool,
    is_blocked: bool,
    sms: int,
    room: int = ROOM_OF_HOPPER,
) -> Schedule:
    """Return how a product is cut, as measured on an H200 up to 512 rows.

    Args:
        num_rows: Of x.
        num_columns: Of the result.
        depth: What is summed over.
        is_wide: Whether x has 16 bits.
        is_blocked: Whether squares of weights have scales of their own.
        sms: Multiprocessors of the GPU.
        room: Bytes of shared memory that a program may have.
    """
    # Of 64 columns, for each multiprocessor.
    tiles = -(-num_columns // 64) / sms
    if num_rows > MOST_ROWS_OF_A_TILE:
        if num_rows <= MANY_ROWS:
            return Tiled(64, 128, SIDE, 4, 4)
        # With sums beside each step's products, 256 columns would spill.
        columns, stages = (256, 3) if is_wide and not is_blocked else (128, 4)
        return Tiled(128, columns, SIDE, 8, stages)
    is_large = tiles > MANY_TILES and not is_wide
    if num_rows <= (MOST_NARROW_ROWS if is_wide else LEAST_ROWS) and not is_large:
        return Narrow(stages=4 if is_wide else 6)
    m = max(16, next_power_of_two(num_rows))
    if is_large and m <= 64:
        return Tiled(m, 128, SIDE, 8, 4)
    if m == 64 and tiles <= 1 and not is_wide:
        return _one_for_each(tiles, depth, room)
    splits = 1 if tiles > MANY_TILES else 4 if m <= 32 and tiles < 0.6 else 2
    splits = max(1, min(splits, depth // (4 * SIDE)))
    if is_wide:
        return Tiled(m, 64, SIDE, 4 if m <= 64 else 8, 4 if m <= 64 else 3, splits)
    return Tiled(m, 64, SIDE, 4, 6 if m <= 64 else 4, splits)


def _one_for_each(tiles: float, depth: int, room: int) -> Tiled:
    """Return how 33 to 64 rows are cut where each multiprocessor has one program at most.

    Its ring then has most of the shared memory, so that no two programs meet on one, either.
    """
    splits = 2 if tiles <= 0.5 and depth >= 8 * SIDE else 1
    one = Tiled(64, 64, SIDE, 4, 12 if splits == 1 else 10, splits)
    most = room * one.stages // one.ring_bytes(64)
    return replace(one, stages=min(one.stages, most))


_launch_narrow, _launch_tiled = Launcher(narrow), Launcher(tiled)

# x, w, the scales of both, and the bias.
Operands: TypeAlias = "tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]"


def multiply(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    schedule: Schedule | None = None,
    is_behind_cast: bool = False,
) -> Tensor:
    """Return activation(x w' + bias) on a schedule; left out, on the one that is known as best.

    Where the last launch was the cast of x by rows, as is then said, it need not have ended.
    """
    operands: Operands = (x, w, x_scale, w_scale, bias)
    fit = _fits.get((kind_of(*operands), activation, schedule, is_behind_cast))
    if fit is None:
        if not (x.shape[0] and w.shape[0]):
            return _empty(x, w)
        operands = _placed(*operands)
        # The last launch is another one where there was nothing to cast, or weights are copied.
        is_behind_cast &= operands[1] is w and x.numel() > 0
        fit = _fit_of(operands, activation, schedule, is_behind_cast)
    return fit(*operands)


def _placed(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, bias: Tensor | None
) -> Operands:
    """Return operands that lie as the kernels read them: themselves, or copies."""
    x = x if x.stride(1) == 1 and x.stride(0) % MULTIPLE == 0 else x.contiguous()
    if x_scale is not None and x_scale.stride(0) != 1:
        # Side by side for a group of columns, as the quantising kernels leave them.
        x_scale = x_scale.t().contiguous().t()
    bias = None if bias is None else bias.contiguous()
    return x, w.contiguous(), x_scale, w_scale.contiguous(), bias


class _Fit:
    """How products of one kind are launched: worked out once, for all operands of that kind."""

    def __init__(
        self, operands: Operands, activation: str, schedule: Schedule, is_behind_cast: bool
    ) -> None:
        x, w, x_scale, w_scale, _ = operands
        (num_rows, depth), num_columns = x.shape, w.shape[0]
        self._launch, programs = _launch_narrow, -(-num_columns // schedule.n)
        # Of parts of sums, and of what counts them; None: the kernel asks for neither.
        self._parts: tuple[int, int] | None = None
        self._is_tiled = isinstance(schedule, Tiled)
        if isinstance(schedule, Tiled):
            tiles = programs * -(-num_rows // schedule.m)
            self._launch, programs = _launch_tiled, tiles * schedule.splits
            if schedule.splits > 1:
                self._parts = programs * schedule.m * schedule.n, tiles
        cut, step = _cut_of(schedule, num_rows)
        is_early = is_behind_cast and overlaps(x.device) and _gains(schedule, programs, x)
        is_fetched = is_early and programs * schedule.n * FETCHED <= MOST_FETCHED
        is_blocked, is_even = tuple(w_scale.shape) != (num_columns, 1), depth % step == 0
        overlap = (is_early, FETCHED if is_fetched else 0)
        x_scale_step = num_rows if x_scale is None else x_scale.stride(1)
        self._sizes = (num_rows, num_columns, depth, x.stride(0), x_scale_step)
        self._constants = (x_scale is not None, is_blocked, is_even, activation, *cut, *overlap)
        self._options = {"num_warps": schedule.warps, **({"launch_pdl": True} if is_early else {})}
        self._programs = programs

    def __call__(
        self, x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the product."""
        y = _empty(x, w)
        tensors: tuple[Tensor | None, ...] = (x, w, y, x_scale, w_scale, bias)
        if self._parts is not None:
            size, tiles = self._parts
            parts = torch.empty(size, dtype=torch.float32, device=x.device)
            tensors = (*tensors, parts, counters(tiles, x.device))
        elif self._is_tiled:
            # One part alone looks at neither.
            tensors = (*tensors, w_scale, w_scale)
        if not self._launch.again(self, tensors):
            key = _key_of(tensors, self._sizes, self._constants)
            arguments = (*tensors, *self._sizes, *self._constants)
            self._launch(key, self._programs, arguments, self._options, call=self, tensors=tensors)
        return y


_fits: dict[Hashable, _Fit] = {}


def _fit_of(
    operands: Operands, activation: str, schedule: Schedule | None, is_behind_cast: bool
) -> _Fit:
    """Return how products like this are launched, and remember it."""
    kind = kind_of(*operands), activation, schedule, is_behind_cast
    known = _fits.get(kind)
    if known is not None:
        return known
    x, w, x_scale, w_scale, _ = operands
    if schedule is None:
        is_blocked = tuple(w_scale.shape) != (w.shape[0], 1)
        limits = num_sms(x.device), _room_of(x.device)
        sizes = x.shape[0], w.shape[0], x.shape[1]
        schedule = schedule_of(*sizes, x_scale is None, is_blocked, *limits)
    if len(_fits) >= MOST_CALLS:
        _fits.clear()
    _fits[kind] = fit = _Fit(operands, activation, schedule, is_behind_cast)
    return fit


def _cut_of(schedule: Schedule, num_rows: int) -> tuple[tuple[int, ...], int]:
    """Return the kernel's constants of a schedule, and how much of K it takes in one step."""
    n, k, stages = schedule.n, schedule.k, schedule.stages
    if isinstance(schedule, Tiled):
        return (schedule.m, n, k, schedule.splits, stages), k
    m = max(LEAST_ROWS, next_power_of_two(num_rows))
    return (m, n, k, schedule.warps, stages), k * schedule.warps


def _gains(schedule: Schedule, programs: int, x: Tensor) -> bool:
    """Tell whether a product is faster for being launched before the cast of x has ended."""
    num_rows, depth = x.shape
    rows_each, _, _ = rows_of_program(depth)
    room = _room_of(x.device) + RESERVED
    fit = room // (schedule.ring_bytes(num_rows) + RESERVED)
    return gains(programs, -(-num_rows // rows_each), fit, num_sms(x.device))


@cache
def _room_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; Hopper's without a GPU."""
    if device.type != "cuda":
        return ROOM_OF_HOPPER
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def _key_of(
    tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], constants: tuple[object, ...]
) -> Hashable:
    dtypes = tuple(None if one is None else one.dtype for one in tensors)
    _, num_columns, depth, x_step, _ = sizes
    steps = alignments(tensors, num_columns, depth, x_step)
    device = None if tensors[0] is None else tensors[0].device
    return device, dtypes, steps, constants


def _empty(x: Tensor, w: Tensor) -> Tensor:
    dtype = torch.bfloat16 if x.dtype == FP8 else x.dtype
    return torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)


operator = define(
    "fp8_gemm(Tensor x, Tensor w, Tensor? x_scale, Tensor w_scale, Tensor? bias, str activation) "
    "-> Tensor",
    multiply,
    lambda x, w, *others: _empty(x, w),
)
