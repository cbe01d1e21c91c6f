"""Attention of many queries in FP8, for prefill on Hopper: tensor cores at twice the rate.

y = softmax(scale * q k') v with the arguments of `attention_forward`, without gradients. Each head
of q, k and v is rounded to e4m3 with one scale, and weights are rounded on their way to the values.
Scores, softmax and sums stay in float32. `attention_fp8` is the public function.

Two launches: a kernel here quantises, then the kernel of `_hopper_kernel` attends. The first finds
the largest magnitude of each head and rounds, so it reads all inputs twice. Even CTAs search and
odd CTAs round, so a head is rounded once it has been searched and while it is still in L2. A CTA
waits for lower indices only, which have begun before. Values are transposed meanwhile, as FP8
tensor cores want the summed dimension contiguous: block after block of keys, columns first, keys in
the order of `pack_fp8` of `tiles.gluon`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.attention._hopper import (
    HopperSchedule,
    launch_forward,
    uses_tile_table,
    why_unavailable,
)
from kprof.kernels.attention._triton import Options, empty_results
from kprof.kernels.attention.attention_forward import KERNEL as FORWARD
from kprof.kernels.attention.attention_forward import MOST_PLACES
from kprof.kernels.fp8.quantize_fp8 import FP8, LARGEST, LEAST
from kprof.kernels.runtime import Launcher, alignments, define, needs_gradient, refuse_gradients


class Config(NamedTuple):
    """Constants of the quantising kernel."""

    HEADS: tl.constexpr
    """Query heads."""
    KEY_HEADS: tl.constexpr
    D: tl.constexpr
    """Columns of a head."""
    M: tl.constexpr
    """Rows of a tile."""
    LARGEST: tl.constexpr
    """The largest e4m3 number."""
    LEAST: tl.constexpr
    """The least magnitude that a head is scaled by."""


@triton.jit
def _packed(x_MD) -> tl.tensor:
    """Return two columns of 16 bits as one number; otherwise each takes a register."""
    if x_MD.dtype.primitive_bitwidth == 16:
        M: tl.constexpr = x_MD.shape[0]
        N: tl.constexpr = x_MD.shape[1] // 2
        low_MN, high_MN = tl.split(x_MD.to(tl.uint16, bitcast=True).reshape([M, N, 2]))
        return low_MN.to(tl.uint32) | high_MN.to(tl.uint32) << 16
    else:  # noqa: RET505
        return x_MD


@triton.jit
def _unpacked(x_MN, DTYPE: tl.constexpr) -> tl.tensor:
    """Return packed numbers in float32."""
    if DTYPE.primitive_bitwidth == 16:
        x_MN2 = tl.join(x_MN.to(tl.uint16), (x_MN >> 16).to(tl.uint16))
        x_MD = x_MN2.reshape([x_MN.shape[0], 2 * x_MN.shape[1]])
        return x_MD.to(DTYPE, bitcast=True).to(tl.float32)
    else:  # noqa: RET505
        return x_MN.to(tl.float32)


@triton.jit
def _tile(x, batch, head, row_M, num_rows, D: tl.constexpr, POLICY: tl.constexpr) -> tl.tensor:
    """Return rows of one head, packed, with zeros where there are none."""
    x_BHTD, step_B, step_H, step_T = x
    at = x_BHTD + batch * step_B + head * step_H
    at_MD = at + row_M.to(tl.int64)[:, None] * step_T + tl.arange(0, D)[None, :]
    return _packed(tl.load(at_MD, (row_M < num_rows)[:, None], other=0.0, eviction_policy=POLICY))


@triton.jit
def _halves(x, batch, head, row_M, num_rows, D: tl.constexpr, POLICY: tl.constexpr):
    """Return two tiles that follow one another; in float32, registers hold one of them."""
    first_MD = _tile(x, batch, head, row_M, num_rows, D, POLICY)
    return first_MD, _tile(x, batch, head, row_M + row_M.shape[0], num_rows, D, POLICY)


@triton.jit
def _magnitudes(x, DTYPE: tl.constexpr) -> tl.tensor:
    """Return magnitudes as integers, NaN the largest; of packed pairs, the larger one's."""
    if DTYPE.primitive_bitwidth == 16:
        # The low bits, which belong to the other column, never decide.
        return tl.maximum(x << 1, x << 17)
    else:  # noqa: RET505
        return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _raise_amax(largest_at, x, DTYPE: tl.constexpr) -> None:
    """Raise a head's largest magnitude, float32 bits as an integer, by those of two tiles."""
    largest = tl.max(tl.maximum(_magnitudes(x[0], DTYPE), _magnitudes(x[1], DTYPE)))
    if DTYPE.primitive_bitwidth == 16:
        largest = (largest >> 17).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        largest = largest.to(tl.int32, bitcast=True)
    tl.atomic_max(largest_at, largest, sem="relaxed")


@triton.jit
def _find_amax(largest_U, inputs, place, sizes, CONFIG: tl.constexpr) -> None:
    """Raise the largest magnitude of a head by that of M rows."""
    HEADS: tl.constexpr = CONFIG.HEADS
    KEY_HEADS: tl.constexpr = CONFIG.KEY_HEADS
    D: tl.constexpr = CONFIG.D
    M: tl.constexpr = CONFIG.M
    q, k, v = inputs
    unit, block = place
    largest_at = largest_U + unit
    batch, head = unit // (HEADS + 2 * KEY_HEADS), unit % (HEADS + 2 * KEY_HEADS)
    row_M = block * M + tl.arange(0, M // 2)
    if head < HEADS:
        x = _halves(q, batch, head, row_M, sizes[0], D, "")
        _raise_amax(largest_at, x, q[0].dtype.element_ty)
    elif head < HEADS + KEY_HEADS:
        x = _halves(k, batch, head - HEADS, row_M, sizes[1], D, "")
        _raise_amax(largest_at, x, k[0].dtype.element_ty)
    else:
        x = _halves(v, batch, head - HEADS - KEY_HEADS, row_M, sizes[1], D, "")
        _raise_amax(largest_at, x, v[0].dtype.element_ty)


@triton.jit
def _factor(largest_at, found_at, count, LARGEST: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return the factor of a head, once `count` CTAs have searched it."""
    while tl.atomic_add(found_at, 0, sem="acquire", scope="gpu") < count:
        pass
    # Bypasses L1, which may hold an earlier value.
    largest = tl.load(largest_at, cache_modifier=".cg").to(tl.float32, bitcast=True)
    return tl.div_rn(LARGEST, tl.where(largest < LEAST, LEAST, largest))


@triton.jit
def _to_fp8(x, factor, DTYPE: tl.constexpr) -> tl.tensor:
    return (_unpacked(x, DTYPE) * factor).to(tl.float8e4nv)


@triton.jit
def _store_rows(
    y_BHTD, x, factor, head, row_M, num_rows, D: tl.constexpr, DTYPE: tl.constexpr
) -> None:
    """Round two tiles and store them."""
    for half in tl.static_range(2):
        own_M = row_M + half * row_M.shape[0]
        at_MD = (head.to(tl.int64) * num_rows + own_M)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(y_BHTD + at_MD, _to_fp8(x[half], factor, DTYPE), (own_M < num_rows)[:, None])


@triton.jit
def _store_transposed(
    y_BHDM, x, factor, block, D: tl.constexpr, M: tl.constexpr, DTYPE: tl.constexpr
) -> None:
    """Round two tiles and store them as one block, columns first."""
    HALF: tl.constexpr = M // 2
    at_DM = tl.arange(0, D)[:, None] * M + tl.arange(0, HALF)[None, :]
    at_DM += block.to(tl.int64) * (D * M)
    for half in tl.static_range(2):
        tl.store(y_BHDM + at_DM + half * HALF, tl.trans(_to_fp8(x[half], factor, DTYPE)))


@triton.jit
def _round(
    largest_U, found_U, count, inputs, quantized, place, sizes, CONFIG: tl.constexpr
) -> None:
    """Round M rows; transpose those of values."""
    HEADS: tl.constexpr = CONFIG.HEADS
    KEY_HEADS: tl.constexpr = CONFIG.KEY_HEADS
    D: tl.constexpr = CONFIG.D
    M: tl.constexpr = CONFIG.M
    LARGEST: tl.constexpr = CONFIG.LARGEST
    LEAST: tl.constexpr = CONFIG.LEAST
    q, k, v = inputs
    unit, block = place
    num_queries, num_keys = sizes
    # This is the last read.
    LAST: tl.constexpr = "evict_first"
    batch, head = unit // (HEADS + 2 * KEY_HEADS), unit % (HEADS + 2 * KEY_HEADS)
    largest_at, found_at = largest_U + unit, found_U + unit
    place_M = tl.arange(0, M // 2)
    row_M = block * M + place_M
    # The load overlaps with the wait for the largest magnitude.
    if head < HEADS:
        x = _halves(q, batch, head, row_M, num_queries, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        _store_rows(
            quantized[0],
            x,
            factor,
            batch * HEADS + head,
            row_M,
            num_queries,
            D,
            q[0].dtype.element_ty,
        )
    elif head < HEADS + KEY_HEADS:
        head -= HEADS
        x = _halves(k, batch, head, row_M, num_keys, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        _store_rows(
            quantized[1],
            x,
            factor,
            batch * KEY_HEADS + head,
            row_M,
            num_keys,
            D,
            k[0].dtype.element_ty,
        )
    elif block * M < num_keys:
        head -= HEADS + KEY_HEADS
        key_M = place_M // 16 * 16 + place_M % 4 // 2 * 8 + place_M % 16 // 4 * 2 + place_M % 2
        x = _halves(v, batch, head, block * M + key_M, num_keys, D, LAST)
        factor = _factor(largest_at, found_at, count, LARGEST, LEAST)
        at = (batch * KEY_HEADS + head) * tl.cdiv(num_keys, M) + block
        _store_transposed(quantized[2], x, factor, at, D, M, v[0].dtype.element_ty)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_heads"])
def attention_fp8_quantize_kernel(
    found_U,
    q_BHTD,
    k_BHND,
    v_BHND,
    into_q,
    into_k,
    into_v,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    num_queries,
    num_keys,
    num_heads,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    TILES_BEHIND: tl.constexpr,
) -> None:
    """Round all heads to FP8; values transposed, in blocks of M keys.

    Even CTAs search a tile for the largest magnitude of its head. Odd CTAs round a tile that is one
    head and TILES_BEHIND tiles behind. `found_U` has the largest magnitude of each head, then the
    number of CTAs that have searched it.
    """
    of_q, of_k = (q_BHTD, q_batch, q_head, q_row), (k_BHND, k_batch, k_head, k_row)
    inputs = (of_q, of_k, (v_BHND, v_batch, v_head, v_row))
    quantized, sizes = (into_q, into_k, into_v), (num_queries, num_keys)
    CONFIG: tl.constexpr = Config(HEADS, KEY_HEADS, D, M, LARGEST, LEAST)
    blocks = tl.cdiv(tl.maximum(num_queries, num_keys), M)
    counts_U, tile = found_U + num_heads, tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        place = (tile // blocks, tile % blocks)
        if tile < num_heads * blocks:
            _find_amax(found_U, inputs, place, sizes, CONFIG)
            # The thread that counts is the thread that raised the magnitude.
            tl.atomic_add(counts_U + place[0], 1, sem="release", scope="gpu")
    else:
        tile -= blocks + TILES_BEHIND
        place = (tile // blocks, tile % blocks)
        if tile >= 0:
            _round(found_U, counts_U, blocks, inputs, quantized, place, sizes, CONFIG)


ROWS, WARPS = 128, 8
# Of a thread: nothing spills, and three CTAs fit an SM.
REGISTERS = 80
# Tiles between searching a whole head and rounding it: what a GPU searches in the 3 us of one tile.
TILES_BEHIND = 192

_launch_quantize = Launcher(attention_fp8_quantize_kernel)


def quantize_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, transposed v, and the largest magnitude of each head.

    Args:
        q: (B, H, T, D); float16 or bfloat16, D a power of two.
        k: (B, heads, N, D).
        v: As k. Its result is (B, heads, blocks of 128 keys times D, 128).
    """
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    num_heads = batch * (heads + 2 * key_heads)
    # Largest magnitudes, and how many tiles of each head have been searched.
    found = q.new_zeros((2, batch, heads + 2 * key_heads), dtype=torch.int32)
    in_blocks = (batch, key_heads, -(-num_keys // ROWS) * dim, ROWS)
    quantized = tuple(
        torch.empty(s, dtype=FP8, device=q.device) for s in (q.shape, k.shape, in_blocks)
    )
    strides = tuple(step for one in (q, k, v) for step in one.stride()[:3])
    numbers = (*strides, num_queries, num_keys, num_heads, heads, key_heads, dim, ROWS)
    blocks = -(-max(num_queries, num_keys) // ROWS)
    dtypes = (q.dtype, k.dtype, v.dtype)
    key = (q.device, *dtypes, heads, key_heads, dim, alignments((q, k, v), *strides))
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    arguments = (found, q, k, v, *quantized, *numbers, LARGEST, LEAST, TILES_BEHIND)
    # Half of the CTAs search, half round.
    _launch_quantize(key, 2 * (num_heads * blocks + blocks + TILES_BEHIND), arguments, options)
    return *quantized, found[0].view(torch.float32)


def run_fp8(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return y and the log-sum-exp."""
    y, lse = empty_results(q)
    if not q.numel() or not k.numel():
        return y.zero_(), lse.fill_(-math.inf)
    attend_quantized(quantize_heads(q, k, v), y, lse, options)
    return y, lse


def attend_quantized(
    quantized: tuple[Tensor, ...], y: Tensor, lse: Tensor, options: Options
) -> None:
    """Attend to the results of `quantize_heads`, and store y and the log-sum-exp."""
    q, k, v, largest = quantized
    sees_all = options.sees_all(q.shape[2], k.shape[2])
    schedule = HopperSchedule(ROWS, 4, uses_table=uses_tile_table(q.shape[3], q.shape[2], sees_all))
    launch_forward(q, k, v, largest, y, lse, options, schedule)


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    return run_fp8(q, k, v, Options(scale, is_causal, window, q.shape[2]))


forward_fp8 = define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, float scale, bool is_causal, int window) "
    "-> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)

DIMS = (64, 128)
# Relative error of y for normal queries and keys: see `_inputs`.
STATED_ERROR = 0.08


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return y, the weighted mean of the values for each query, and the log-sum-exp of its scores.

    As `attention_forward`, with q, k and v rounded to float8_e4m3fn, the largest magnitude of each
    head to 448. An infinity or NaN makes its whole head NaN. Errors of weights grow with scores, as
    scores are sums of rounded products.

    Args:
        q: (B, query heads, T, D) in float16 or bfloat16, D 64 or 128.
        k: (B, heads, N, D), as q.
        v: As k.
        scale: Of the scores, above 0; None: 1 / sqrt(D).
        is_causal: Whether a query sees no later key.
        window: Keys that a query sees before its own, and after it unless causal, its own counted;
            0: no bound.

    Raises:
        DifferentiationError: gradients are recorded; there are none.
    """
    refuse_gradients("attention in FP8", q, k, v)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    results: tuple[Tensor, Tensor] = forward_fp8(q, k, v, scale, is_causal, window)
    return results


def _ours() -> Any:
    why = why_unavailable()
    if why:
        raise ImportError(why)

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Tensor:
        return attention_fp8(q, k, v, is_causal=is_causal, window=window)[0]

    return call


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0
) -> str | None:
    if q.dim() == 4 and q.shape[-1] not in DIMS:
        return f"heads of {q.shape[-1]}, not of {' or '.join(map(str, DIMS))}"
    if needs_gradient(q, k, v):
        return "gradients are asked for"
    why = FORWARD.refuses(q, k, v, is_causal, window)
    if why is None and q.shape[1] + 2 * k.shape[1] > MOST_PLACES:
        why = f"{q.shape[1]} heads and twice {k.shape[1]}: more than a grid has room for"
    return why


def _work(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, window: int = 0) -> Work:
    """Count as `attention_forward`: quantised copies are no compulsory traffic."""
    return FORWARD.work(q, k, v, is_causal, window)


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    """Make a call as of `attention_forward`, with queries and keys of the size of normal ones.

    The stated error is for such scores, as errors grow with scores. A NaN makes a whole head NaN
    here, unlike in torch.
    """
    q, k, v, *others = FORWARD.inputs(shape, draw)
    q, k, v = (one.where(one.isfinite(), 0) for one in (q, k, v))
    q, k = (
        one / one.float().square().mean().sqrt().clamp(min=1e-3).to(one.dtype) for one in (q, k)
    )
    return q, k, v, *others


KERNEL = Kernel(
    name="attention_fp8",
    replaces="torch's scaled_dot_product_attention, of many queries, in less precision: in FP8",
    reference=FORWARD.reference,
    truth=FORWARD.truth,
    providers=(
        Provider(OURS, _ours, "kprof"),
        Provider("eager", lambda: FORWARD.reference, is_varying=True, repeats=False),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=(
        *((16_384 // n, 16, 16, n, n, 1, 128) for n in (2_048, 8_192, 16_384)),
        *((2, 16, 16, 8_192, 8_192, 0, 128), (2, 32, 32, 8_192, 8_192, 1, 64)),
        (1, 32, 8, 8_192, 8_192, 1, 128),
    ),
    edges=tuple(shape for shape in FORWARD.edges if shape[-1] in DIMS),
    reach=(2**13,),
    dtypes=("bfloat16", "float16"),
    stated_error=STATED_ERROR,
    rows=(0, 1, 2),
    # Hugging Face's function puts the tokens before the heads, contiguous, and so does the swap.
    has_free_strides=True,
    exact=2,
    unmeasured="eager",
    needs_gpu="Gluon has no interpreter",
    sources=(
        "Shah and others, FlashAttention-3, arXiv 2407.08608: values turned over, weights in FP8",
        "DeepSeek-AI, DeepSeek-V3 technical report, arXiv 2412.19437: sums promoted to float32",
    ),
)
