"""GEMMs with FP8 weights in Triton: y = activation(x w' + bias), with scales; kernels to operator.

M rows of x, N columns of y, which are rows of the weights, K the summed dimension. Weights are the
left operand, so an instruction's 64 rows are filled however few rows x has. There are two kernels:
for few rows, whose warps split K; and tiled, with K whole or split among CTAs, of which the last
one sums. Hopper's tensor cores sum FP8 products in about 14 bits, so every 128 elements of K are
added to float32 sums.

With programmatic dependent launch, a GEMM begins while the cast of x ahead of it still runs
(`allow_dependent_launch` of `quantize_fp8`). It prefetches weights into L2, and waits for the cast
and all that ran before it ahead of its first load or store.

Order: dependent launch, epilogue, kernels, schedules, launch, operator.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from kprof.kernels.fp8.quantize_fp8 import FP8, SIDE, has_dependent_launch, rows_of_program
from kprof.kernels.runtime import (
    MOST_CALLS,
    Launcher,
    alignments,
    define,
    kind_of,
    next_power_of_two,
    num_sms,
)
from kprof.kernels.tiles.splits import counters, is_last_to_arrive, part_length

# Bytes of each row of weights that a CTA prefetches; a power of two.
PREFETCHED = 512
# Bytes that all CTAs prefetch: more takes longer than the cast, and delays the first loads.
MAX_PREFETCHED = 6 << 20


def gains_from_overlap(num_ctas: int, num_casting: int, fit: int, sms: int) -> bool:
    """Tell whether a GEMM gains from being launched before the cast ends, as measured on an H200.

    Its CTAs go to the SMs with most room, which are not those of the cast. Where these take more
    than an even share, they end last, and more is lost than gained.

    Args:
        num_ctas: CTAs of the GEMM.
        num_casting: CTAs of the cast.
        fit: CTAs of the GEMM that fit one SM.
        sms: SMs of the GPU.
    """
    evenly, besides = -(-num_ctas // sms), -(-num_ctas // max(1, sms - num_casting))
    return min(besides, fit) <= evenly


# Bytes of a DRAM access.
LINE = tl.constexpr(64)


@triton.jit
def prefetch_and_wait(
    w_NK, row, num_rows, depth, first, end, N: tl.constexpr, FETCHED: tl.constexpr
):
    """Prefetch at most FETCHED bytes of N rows of weights from `first`, then wait for the cast.

    FETCHED is a power of two, or 0.
    """
    if FETCHED > 0:
        rows = tl.minimum(row + tl.arange(0, N), num_rows - 1).to(tl.int64)
        k_L = first + tl.arange(0, FETCHED // LINE) * LINE
        _prefetch(w_NK + rows[:, None] * depth + tl.minimum(k_L, end - 1)[None, :])
    tl.extra.cuda.gdc_wait()


@triton.jit
def _prefetch(at):
    """Prefetch these addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


_SIDE = tl.constexpr(128)


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "relu":
        y = tl.where(y <= 0, 0.0, y)
    elif ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "none")
    return y


@triton.jit
def finish(
    sum_NM,
    n_N,
    m_M,
    into,
    HAS_X_SCALE: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Store the result: row scales, bias and activation applied, cast and transposed.

    `into` is the result, the scales of x and of the weights, the bias, and the result's size.
    """
    y_MN, x_scale, w_scale, bias_N, num_rows, num_columns = into
    is_n_N, is_m_M = n_N < num_columns, m_M < num_rows
    if not IS_BLOCKED:
        sum_NM *= tl.load(w_scale + n_N, is_n_N, other=0.0)[:, None]
        if HAS_X_SCALE:
            sum_NM *= tl.load(x_scale + m_M, is_m_M, other=0.0)[None, :]
    if bias_N is not None:
        sum_NM += tl.load(bias_N + n_N, is_n_N, other=0.0).to(tl.float32)[:, None]
    y = _activated(sum_NM.T, ACTIVATION).to(y_MN.dtype.element_ty)
    at_MN = m_M[:, None].to(tl.int64) * num_columns + n_N[None, :]
    tl.store(y_MN + at_MN, y, is_m_M[:, None] & is_n_N[None, :])


@triton.jit(do_not_specialize=["num_rows", "x_scale_step"])
def fp8_gemm_few_rows_kernel(
    x_MK,
    w_NK,
    y_MN,
    x_scale,
    w_scale,
    bias_N,
    num_rows,
    num_columns,
    depth,
    x_step: tl.int64,
    x_scale_step: tl.int64,
    HAS_X_SCALE: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FETCHED: tl.constexpr,
) -> None:
    """Multiply few rows of x by N rows of the weights; each of W warps sums a part of K.

    For x in 16 bits, weights are converted in registers. No CTA waits for another, so the time is
    that of reading the weights.
    """
    m_M, n_N = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    part_W = tl.arange(0, W) * K
    k_WK = part_W[:, None] + tl.arange(0, K)[None, :]
    row_N = tl.minimum(n_N, num_columns - 1).to(tl.int64)
    w_at = w_NK + row_N[None, :, None] * depth + k_WK[:, None, :]
    x_at = x_MK + m_M[None, None, :].to(tl.int64) * x_step + k_WK[:, :, None]
    is_m_M = m_M < num_rows
    if OVERLAPS:
        prefetch_and_wait(w_NK, tl.program_id(0) * N, num_columns, depth, 0, depth, N, FETCHED)
    sum_WNM = tl.zeros([W, N, M], tl.float32)
    for start in tl.range(0, depth, W * K, num_stages=STAGES):
        if IS_EVEN:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start, is_m_M[None, None, :], other=0.0)
        else:
            is_k = k_WK < depth - start
            w = tl.load(w_at + start, is_k[:, None, :], other=0.0)
            x = tl.load(x_at + start, is_k[:, :, None] & is_m_M[None, None, :], other=0.0)
        if IS_BLOCKED:
            group_W = (start + part_W) // _SIDE
            is_group_W = start + part_W < depth
            groups = tl.cdiv(depth, _SIDE)
            w_at_W = w_scale + (tl.program_id(0) * N // _SIDE) * groups + group_W
            scale_WM = tl.load(w_at_W, is_group_W, other=0.0)[:, None]
            if HAS_X_SCALE:
                at_WM = group_W[:, None].to(tl.int64) * x_scale_step + m_M[None, :]
                is_WM = is_group_W[:, None] & is_m_M[None, :]
                scale_WM *= tl.load(x_scale + at_WM, is_WM, other=0.0)
            sum_WNM += tl.dot(w.to(x.dtype), x) * scale_WM[:, None, :]
        else:
            sum_WNM = tl.dot(w.to(x.dtype), x, sum_WNM)
    sum_NM = tl.sum(sum_WNM, axis=0)
    into = (y_MN, x_scale, w_scale, bias_N, num_rows, num_columns)
    finish(sum_NM, n_N, m_M, into, HAS_X_SCALE, IS_BLOCKED, ACTIVATION)


# Most FP8 products that are summed in the tensor cores.
MOST_IMPRECISE = tl.constexpr(128)


@triton.jit
def _sum_splits(sum_NM, parts, counter, part, SPLITS: tl.constexpr) -> tuple[tl.tensor, bool]:
    """Return the sum of a tile's splits, and whether this CTA has it: the last one to arrive."""
    is_mine = True
    if SPLITS > 1:
        N: tl.constexpr = sum_NM.shape[0]
        M: tl.constexpr = sum_NM.shape[1]
        at_NM = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        tl.store(parts + part * (N * M) + at_NM, sum_NM)
        is_mine = is_last_to_arrive(counter, SPLITS)
        if is_mine:
            sum_NM = tl.zeros([N, M], tl.float32)
            for other in tl.range(SPLITS):
                sum_NM += tl.load(parts + other * (N * M) + at_NM)
    return sum_NM, is_mine


@triton.jit
def _place_of(tile, num_rows, num_columns, M: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """Return row and column index of a tile, so that consecutive tiles share operands in L2."""
    strips, tiles_n = tl.cdiv(num_rows, M), tl.cdiv(num_columns, N)
    # Columns of tiles in a band.
    TOGETHER: tl.constexpr = 8
    band = tile // (TOGETHER * strips)
    width = tl.minimum(tiles_n - band * TOGETHER, TOGETHER)
    within = tile - band * TOGETHER * strips
    return within // width, band * TOGETHER + within % width


@triton.jit(do_not_specialize=["num_rows", "x_scale_step"])
def fp8_gemm_tiled_kernel(
    x_MK,
    w_NK,
    y_MN,
    x_scale,
    w_scale,
    bias_N,
    partial,
    counter,
    num_rows,
    num_columns,
    depth,
    x_step: tl.int64,
    x_scale_step: tl.int64,
    HAS_X_SCALE: tl.constexpr,
    IS_BLOCKED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
    FETCHED: tl.constexpr,
) -> None:
    """Multiply M rows of x by N of the weights over one split of K; the last split sums."""
    tile, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    strip, band = _place_of(tile, num_rows, num_columns, M, N)
    m_M, n_N = strip * M + tl.arange(0, M), band * N + tl.arange(0, N)
    each = part_length(depth, SPLITS, K, K)
    first = part * each
    end = tl.minimum(first + each, depth)
    w_at = w_NK + tl.minimum(n_N, num_columns - 1)[:, None].to(tl.int64) * depth
    x_at = x_MK + m_M[:, None].to(tl.int64) * x_step
    is_m_M = m_M < num_rows
    if OVERLAPS:
        prefetch_and_wait(w_NK, band * N, num_columns, depth, first, end, N, FETCHED)
    sum_NM = tl.zeros([N, M], tl.float32)
    for start in tl.range(first, end, K, num_stages=STAGES):
        k_K = start + tl.arange(0, K)
        if IS_EVEN:
            w = tl.load(w_at + k_K[None, :])
            x = tl.load(x_at + k_K[None, :], is_m_M[:, None], other=0.0)
        else:
            is_k_K = k_K < end
            w = tl.load(w_at + k_K[None, :], is_k_K[None, :], other=0.0)
            x = tl.load(x_at + k_K[None, :], is_m_M[:, None] & is_k_K[None, :], other=0.0)
        if IS_BLOCKED:
            tl.static_assert(K == _SIDE and _SIDE % N == 0)
            group = start // _SIDE
            at = w_scale + (band * N // _SIDE) * tl.cdiv(depth, _SIDE) + group
            scale_M = tl.full([M], 1.0, tl.float32) * tl.load(at)
            if HAS_X_SCALE:
                scale_M *= tl.load(x_scale + group * x_scale_step + m_M, is_m_M, other=0.0)
            sum_NM += tl.dot(w.to(x.dtype), x.T) * scale_M[None, :]
        elif x.dtype == tl.float8e4nv:
            # The tensor cores keep 14 bits of a sum: each step is added in float32.
            tl.static_assert(K <= MOST_IMPRECISE)
            sum_NM += tl.dot(w, x.T)
        else:
            sum_NM = tl.dot(w.to(x.dtype), x.T, sum_NM)
    parts = partial + tile.to(tl.int64) * (SPLITS * N * M)
    sum_NM, is_mine = _sum_splits(sum_NM, parts, counter + tile, part, SPLITS)
    if is_mine:
        into = (y_MN, x_scale, w_scale, bias_N, num_rows, num_columns)
        finish(sum_NM, n_N, m_M, into, HAS_X_SCALE, IS_BLOCKED, ACTIVATION)


# Least rows of x in a tile.
LEAST_ROWS = 8
# With more rows, the many CTAs of few columns read x too often.
MAX_FEW_ROWS = 16
# Alignment of strides in elements, as for cuBLASLt.
MULTIPLE = 16
# Tiles an SM from which on K is not split.
MANY_TILES = 2.0
MOST_ROWS_OF_A_TILE, MANY_ROWS = 128, 512
# Shared memory in bytes: most of a CTA on Hopper, and what is reserved in each.
ROOM_OF_HOPPER, RESERVED = 232_448, 1_024


@dataclass(frozen=True)
class FewRows:
    """Few rows: N columns for a CTA, K of a warp's tile, and tiles in flight."""

    n: int = 16
    k: int = 128
    warps: int = 4
    stages: int = 6

    def stage_bytes(self, num_rows: int) -> int:
        """Return the shared memory of the tiles in flight, for FP8 operands."""
        m = max(LEAST_ROWS, next_power_of_two(num_rows))
        # One stage is in registers.
        return (self.stages - 1) * self.warps * self.k * (self.n + m)


@dataclass(frozen=True)
class Tiled:
    """A tile of M rows and N columns, K of a step, and CTAs that split the sum."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1

    def stage_bytes(self, num_rows: int) -> int:
        """Return the shared memory of the tiles in flight, for FP8 operands."""
        return self.stages * self.k * (self.n + self.m)


Schedule = FewRows | Tiled


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
    """Return the schedule of a GEMM, as measured on an H200 up to 512 rows.

    Args:
        num_rows: Of x.
        num_columns: Of the result.
        depth: Of the sum, K.
        is_wide: Whether x has 16 bits.
        is_blocked: Whether weights have a scale for each square of 128.
        sms: SMs of the GPU.
        room: Bytes of shared memory that a CTA may have.
    """
    # Tiles of 64 columns for each SM.
    tiles = -(-num_columns // 64) / sms
    if num_rows > MOST_ROWS_OF_A_TILE:
        if num_rows <= MANY_ROWS:
            return Tiled(64, 128, SIDE, 4, 4)
        # With a second accumulator for block scales, 256 columns would spill.
        columns, stages = (256, 3) if is_wide and not is_blocked else (128, 4)
        return Tiled(128, columns, SIDE, 8, stages)
    is_large = tiles > MANY_TILES and not is_wide
    if num_rows <= (MAX_FEW_ROWS if is_wide else LEAST_ROWS) and not is_large:
        return FewRows(stages=4 if is_wide else 6)
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
    """Return the schedule for 33 to 64 rows where each SM has one CTA at most.

    Its stages take most of the shared memory, so no two CTAs share an SM.
    """
    splits = 2 if tiles <= 0.5 and depth >= 8 * SIDE else 1
    one = Tiled(64, 64, SIDE, 4, 12 if splits == 1 else 10, splits)
    most = room * one.stages // one.stage_bytes(64)
    return replace(one, stages=min(one.stages, most))


_launch_few_rows, _launch_tiled = (
    Launcher(fp8_gemm_few_rows_kernel),
    Launcher(fp8_gemm_tiled_kernel),
)

# x, w, both scales, and the bias.
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
    """Return activation(x w' + bias); without a schedule, on the fastest one that is known.

    With `is_behind_cast`, the last launch was the cast of x by rows, and may still run.
    """
    operands: Operands = (x, w, x_scale, w_scale, bias)
    fit = _plans.get((kind_of(*operands), activation, schedule, is_behind_cast))
    if fit is None:
        if not (x.shape[0] and w.shape[0]):
            return _empty(x, w)
        operands = _as_kernels_read(*operands)
        # Without rows to cast, or after a copy of the weights, the last launch is another one.
        is_behind_cast &= operands[1] is w and x.numel() > 0
        fit = _plan_of(operands, activation, schedule, is_behind_cast)
    return fit(*operands)


def _as_kernels_read(
    x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, bias: Tensor | None
) -> Operands:
    """Return operands in the layouts that the kernels read: themselves, or copies."""
    x = x if x.stride(1) == 1 and x.stride(0) % MULTIPLE == 0 else x.contiguous()
    if x_scale is not None and x_scale.stride(0) != 1:
        # Column-major, as `quantize_fp8` stores them.
        x_scale = x_scale.t().contiguous().t()
    bias = None if bias is None else bias.contiguous()
    return x, w.contiguous(), x_scale, w_scale.contiguous(), bias


class _Plan:
    """The launch of one kind of GEMM, computed once for all operands of that kind."""

    def __init__(
        self, operands: Operands, activation: str, schedule: Schedule, is_behind_cast: bool
    ) -> None:
        x, w, x_scale, w_scale, _ = operands
        (num_rows, depth), num_columns = x.shape, w.shape[0]
        self._launch, num_ctas = _launch_few_rows, -(-num_columns // schedule.n)
        # Sizes of the partial sums and of their counters; None without splits.
        self._parts: tuple[int, int] | None = None
        self._is_tiled = isinstance(schedule, Tiled)
        if isinstance(schedule, Tiled):
            tiles = num_ctas * -(-num_rows // schedule.m)
            self._launch, num_ctas = _launch_tiled, tiles * schedule.splits
            if schedule.splits > 1:
                self._parts = num_ctas * schedule.m * schedule.n, tiles
        cut, step = _cut_of(schedule, num_rows)
        is_early = (
            is_behind_cast
            and has_dependent_launch(x.device)
            and _overlap_gains(schedule, num_ctas, x)
        )
        is_fetched = is_early and num_ctas * schedule.n * PREFETCHED <= MAX_PREFETCHED
        is_blocked, is_even = tuple(w_scale.shape) != (num_columns, 1), depth % step == 0
        overlap = (is_early, PREFETCHED if is_fetched else 0)
        x_scale_step = num_rows if x_scale is None else x_scale.stride(1)
        self._sizes = (num_rows, num_columns, depth, x.stride(0), x_scale_step)
        self._constants = (x_scale is not None, is_blocked, is_even, activation, *cut, *overlap)
        self._options = {"num_warps": schedule.warps, **({"launch_pdl": True} if is_early else {})}
        self._num_ctas = num_ctas

    def __call__(
        self, x: Tensor, w: Tensor, x_scale: Tensor | None, w_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Launch it, and return the result."""
        y = _empty(x, w)
        tensors: tuple[Tensor | None, ...] = (x, w, y, x_scale, w_scale, bias)
        if self._parts is not None:
            size, tiles = self._parts
            parts = torch.empty(size, dtype=torch.float32, device=x.device)
            tensors = (*tensors, parts, counters(tiles, x.device))
        elif self._is_tiled:
            # Without splits, the kernel reads neither.
            tensors = (*tensors, w_scale, w_scale)
        if not self._launch.again(self, tensors):
            key = _key_of(tensors, self._sizes, self._constants)
            arguments = (*tensors, *self._sizes, *self._constants)
            self._launch(key, self._num_ctas, arguments, self._options, call=self, tensors=tensors)
        return y


_plans: dict[Hashable, _Plan] = {}


def _plan_of(
    operands: Operands, activation: str, schedule: Schedule | None, is_behind_cast: bool
) -> _Plan:
    """Return the plan for GEMMs of this kind, and keep it."""
    kind = kind_of(*operands), activation, schedule, is_behind_cast
    known = _plans.get(kind)
    if known is not None:
        return known
    x, w, x_scale, w_scale, _ = operands
    if schedule is None:
        is_blocked = tuple(w_scale.shape) != (w.shape[0], 1)
        limits = num_sms(x.device), _room_of(x.device)
        sizes = x.shape[0], w.shape[0], x.shape[1]
        schedule = schedule_of(*sizes, x_scale is None, is_blocked, *limits)
    if len(_plans) >= MOST_CALLS:
        _plans.clear()
    _plans[kind] = fit = _Plan(operands, activation, schedule, is_behind_cast)
    return fit


def _cut_of(schedule: Schedule, num_rows: int) -> tuple[tuple[int, ...], int]:
    """Return the kernel's constants of a schedule, and K of one step."""
    n, k, stages = schedule.n, schedule.k, schedule.stages
    if isinstance(schedule, Tiled):
        return (schedule.m, n, k, schedule.splits, stages), k
    m = max(LEAST_ROWS, next_power_of_two(num_rows))
    return (m, n, k, schedule.warps, stages), k * schedule.warps


def _overlap_gains(schedule: Schedule, num_ctas: int, x: Tensor) -> bool:
    """Tell whether a GEMM gains from being launched before the cast of x has ended."""
    num_rows, depth = x.shape
    rows_each, _, _ = rows_of_program(depth)
    room = _room_of(x.device) + RESERVED
    fit = room // (schedule.stage_bytes(num_rows) + RESERVED)
    return gains_from_overlap(num_ctas, -(-num_rows // rows_each), fit, num_sms(x.device))


@cache
def _room_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have; Hopper's without a GPU."""
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


gemm_operator = define(
    "fp8_gemm(Tensor x, Tensor w, Tensor? x_scale, Tensor w_scale, Tensor? bias, str activation) "
    "-> Tensor",
    multiply,
    lambda x, w, *others: _empty(x, w),
)
