"""The kernels of one decode step in Triton: matrix-vector products, attention, the next token.

A step is memory-bound: it reads every weight once. So each kernel loads its first weights before it
waits for the kernel before it (programmatic dependent launch), and the loads of one kernel overlap
the end of another. CTAs are small, so those of the next kernel start as soon as one ends, and a
grid that is no multiple of the SMs costs nothing.

The residual stream is in float32, with a copy in the dtype of the model as the input of norms.
A norm scales the sums at the end: mean square and products are summed over the same loads.

B batch, N outputs, K inputs, R rows of weights in a tile, H key heads, M query heads of a key head,
L slots of the cache, D columns of a head, S splits of a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kprof.kernels.tiles.online_softmax import finish, merge, store_part, weigh
from kprof.kernels.tiles.splits import is_last_to_arrive, part_length

# Entries of a sequence's state, int32.
SLOT = tl.constexpr(0)
STEP = tl.constexpr(1)
IS_FINISHED = tl.constexpr(2)
START = tl.constexpr(3)
PADDING = tl.constexpr(4)
CALL = tl.constexpr(5)
STATE_SIZE = tl.constexpr(8)
# Rows of sequences of an instruction of tensor cores.
ROWS_OF_DOT = tl.constexpr(8)
LOG2_E = tl.constexpr(1.4426950408889634)
# Inputs that a thread loads together, 16 bytes of them in 16 bits.
VECTOR = tl.constexpr(8)


@triton.jit
def _none() -> tl.tensor:
    """Return no parts: in registers, numbered at compile time."""
    return ()


@triton.jit
def _with(parts, part) -> tl.tensor:
    """Return parts with one more."""
    return parts + (part,)  # noqa: RUF005


@triton.jit
def _weights(w, row_R, K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return a tile of weights; they are read once, so they leave the caches first."""
    column_K = CHUNK * BLOCK + tl.arange(0, BLOCK)
    at_RK = row_R[:, None] * K + column_K[None, :]
    if (CHUNK + 1) * BLOCK <= K:
        tile_RK = tl.load(w + at_RK, eviction_policy="evict_first")
    else:
        is_there_RK = (column_K < K)[None, :]
        tile_RK = tl.load(w + at_RK, is_there_RK, other=0.0, eviction_policy="evict_first")
    return tile_RK


@triton.jit
def _inputs(x, K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return a chunk of a vector, (1, BLOCK), in the layout of a tile of weights.

    Other CTAs have written it: the load bypasses L1.
    """
    column_1K = CHUNK * BLOCK + tl.arange(0, BLOCK)[None, :]
    if (CHUNK + 1) * BLOCK <= K:
        chunk_1K = tl.load(x + column_1K, cache_modifier=".cg")
    else:
        chunk_1K = tl.load(x + column_1K, column_1K < K, other=0.0, cache_modifier=".cg")
    return chunk_1K.to(tl.float32)


@triton.jit
def _gain(
    gain, K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ADD_ONE: tl.constexpr
) -> tl.tensor:
    """Return a chunk of the weight of a norm."""
    chunk_1K = _inputs(gain, K, BLOCK, CHUNK)
    return chunk_1K + 1.0 if ADD_ONE else chunk_1K


@triton.jit
def _sums(product_RK) -> tl.tensor:
    """Return the sums that each thread can take alone: over its own vector of inputs."""
    R: tl.constexpr = product_RK.shape[0]
    K: tl.constexpr = product_RK.shape[1]
    return tl.sum(product_RK.reshape([R, K // VECTOR, VECTOR]), axis=2)


@triton.constexpr_function
def sequences(batch) -> int:
    """Return the least power of two that is no less than the batch."""
    return 1 << (batch - 1).bit_length()


@triton.jit
def _stacked(parts, BATCH: tl.constexpr) -> tl.tensor:
    """Return parts (R, K) of each sequence as one (R, K, B), B a power of two, without exchange."""
    R: tl.constexpr = parts[0].shape[0]
    K: tl.constexpr = parts[0].shape[1]
    if BATCH == 1:
        stack = parts[0][:, :, None]
    elif BATCH == 2:
        stack = tl.join(parts[0], parts[1])
    elif BATCH <= 4:
        stack = _four(parts[0], parts[1], parts[2], parts[3 % BATCH])
    else:
        even = _four(parts[0], parts[2], parts[4], parts[6 % BATCH])
        odd = _four(parts[1], parts[3], parts[5 % BATCH], parts[7 % BATCH])
        stack = tl.reshape(tl.join(even, odd), [R, K, 8])
    return stack


@triton.jit
def _four(a, b, c, d) -> tl.tensor:
    R: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [R, K, 4])


@triton.jit
def _totals(sum_RK, square_1K) -> tl.tensor:
    """Return the sums of rows and the sum of squares, for each row, in one exchange of threads."""
    both_RK2 = tl.join(sum_RK, tl.broadcast_to(square_1K, sum_RK.shape))
    return tl.split(tl.sum(both_RK2, axis=1))


@triton.jit
def _inverse_rms(square, eps, K: tl.constexpr) -> tl.tensor:
    return tl.rsqrt(square / K + eps)


@triton.jit
def _input_rows(
    x_BK, K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr
) -> tl.tensor:
    """Return a chunk of the inputs of all sequences, zeros behind the last."""
    row_B = tl.arange(0, ROWS_OF_DOT)
    column_K = CHUNK * BLOCK + tl.arange(0, BLOCK)
    is_there_BK = (row_B < BATCH)[:, None] & (column_K < K)[None, :]
    at_BK = row_B[:, None] * K + column_K[None, :]
    return tl.load(x_BK + at_BK, is_there_BK, other=0.0, cache_modifier=".cg")


@triton.jit
def _by_warps(tile_RK, PARTS: tl.constexpr) -> tl.tensor:
    """Return a tile with its columns in PARTS parts, (PARTS, R, K / PARTS): one for each warp."""
    R: tl.constexpr = tile_RK.shape[0]
    K: tl.constexpr = tile_RK.shape[1]
    return tl.permute(tl.reshape(tile_RK, [R, PARTS, K // PARTS]), (1, 0, 2))


@triton.jit
def _dotted(x_BK, w_RK, sum_PBR, PARTS: tl.constexpr) -> tl.tensor:
    """Add the sums over each part of the columns to (PARTS, B, R), by tensor cores."""
    x_PBK = _by_warps(x_BK.to(w_RK.dtype), PARTS)
    w_PKR = tl.permute(_by_warps(w_RK, PARTS), (0, 2, 1))
    return tl.dot(x_PBK, w_PKR, sum_PBR, input_precision="ieee")


@triton.jit
def linear_kernel(  # noqa: C901, PLR0915
    x_BK,
    gain_K,
    w0_NK,
    w1_NK,
    w2_NK,
    bias0_N,
    bias1_N,
    bias2_N,
    y_BN,
    copy_BN,
    n0,
    n1,
    n2,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    BATCH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADD_ONE: tl.constexpr,
    IS_STACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Multiply x, normalised or not, by up to three weights; store the result, or add it to y.

    A CTA has ROWS outputs. AHEAD: tiles that are loaded before the wait. IS_FIRST: kernels behind
    this one may start only when the step before has ended, as they read the state of sequences at
    once. PARTS: of the columns of a tile, which tensor cores multiply; 0: without tensor cores.
    """
    if PDL and not IS_FIRST:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    SEQUENCES: tl.constexpr = sequences(BATCH) if PARTS == 0 else ROWS_OF_DOT
    block = tl.program_id(0)
    w, bias, n, offset = w0_NK, bias0_N, n0, n0 * 0
    if IS_STACKED:
        num0, num1 = tl.cdiv(n0, ROWS), tl.cdiv(n1, ROWS)
        if block >= num0 + num1:
            w, bias, n, offset = w2_NK, bias2_N, n2, n0 + n1
            block -= num0 + num1
        elif block >= num0:
            w, bias, n, offset = w1_NK, bias1_N, n1, n0
            block -= num0
    first = block * ROWS
    base = w + first.to(tl.int64) * K
    # Rows behind the end repeat the last one, and are not stored.
    row_R = tl.minimum(tl.arange(0, ROWS), n - 1 - first)
    is_row_R = tl.arange(0, ROWS) + first < n
    tiles = _none()
    for chunk in tl.static_range(CHUNKS):
        if chunk < AHEAD:
            tiles = _with(tiles, _weights(base, row_R, K, BLOCK, chunk))
    if HAS_BIAS:
        bias_R = tl.load(bias + first + row_R).to(tl.float32)
    if PDL:
        gdc_wait()
    if PDL and IS_FIRST:
        gdc_launch_dependents()
    sequence_B = tl.arange(0, SEQUENCES)
    at_R = offset + first + tl.arange(0, ROWS)
    at_RB = at_R[:, None] + (sequence_B * (n0 + n1 + n2))[None, :]
    is_there_RB = is_row_R[:, None] & (sequence_B < BATCH)[None, :]
    if IS_ADDED:
        # Before the sums, whose exchange of threads no load passes.
        before_RB = tl.load(y_BN + at_RB, is_there_RB, other=0.0, cache_modifier=".cg")
    if PARTS > 0:
        sum_PBR = tl.zeros([PARTS, ROWS_OF_DOT, ROWS], tl.float32)
        square_B = tl.zeros([ROWS_OF_DOT], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if chunk + AHEAD < CHUNKS:
                tiles = _with(tiles, _weights(base, row_R, K, BLOCK, chunk + AHEAD))
            x_rows_BK = _input_rows(x_BK, K, BLOCK, chunk, BATCH).to(tl.float32)
            if HAS_NORM:
                square_B += tl.sum(x_rows_BK * x_rows_BK, axis=1)
                x_rows_BK *= _gain(gain_K, K, BLOCK, chunk, ADD_ONE)
            sum_PBR = _dotted(x_rows_BK, tiles[chunk], sum_PBR, PARTS)
        value_RB = tl.trans(tl.sum(sum_PBR, axis=0))
        if HAS_NORM:
            value_RB *= _inverse_rms(square_B, eps, K)[None, :]
    else:
        sums = _none()
        squares = _none()
        for b in tl.static_range(BATCH):
            x = x_BK + b * K
            inputs = _none()
            for chunk in tl.static_range(CHUNKS):
                inputs = _with(inputs, _inputs(x, K, BLOCK, chunk))
            sum_RK = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
            square_1K = tl.zeros([1, BLOCK // VECTOR], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                if b == 0 and chunk + AHEAD < CHUNKS:
                    tiles = _with(tiles, _weights(base, row_R, K, BLOCK, chunk + AHEAD))
                x_1K = inputs[chunk]
                if HAS_NORM:
                    square_1K += _sums(x_1K * x_1K)
                    x_1K *= _gain(gain_K, K, BLOCK, chunk, ADD_ONE)
                sum_RK += _sums(tiles[chunk].to(tl.float32) * x_1K)
            sums = _with(sums, sum_RK)
            squares = _with(squares, square_1K)
        if HAS_NORM and BATCH == 1:
            value_R, square_R = _totals(sums[0], squares[0])
            value_RB = (value_R * _inverse_rms(square_R, eps, K))[:, None]
        else:
            value_RB = tl.sum(_stacked(sums, BATCH), axis=1)
            if HAS_NORM:
                square_1B = tl.sum(_stacked(squares, BATCH), axis=1)
                value_RB *= _inverse_rms(square_1B, eps, K)
    if HAS_BIAS:
        value_RB += bias_R[:, None]
    if IS_ADDED:
        value_RB += before_RB
        tl.store(copy_BN + at_RB, value_RB.to(copy_BN.dtype.element_ty), is_there_RB)
    tl.store(y_BN + at_RB, value_RB, is_there_RB)


@triton.jit
def add_normed_kernel(
    added_BK,
    gain_K,
    residual_BK,
    copy_BK,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD_ONE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Add normalised rows to the residual stream, and copy it; a CTA has one sequence."""
    if PDL:
        gdc_launch_dependents()
    column_K = tl.arange(0, BLOCK)
    is_there_K = column_K < K
    gain = tl.load(gain_K + column_K, is_there_K, other=0.0).to(tl.float32)
    if ADD_ONE:
        gain += 1.0
    if PDL:
        gdc_wait()
    at_K = tl.program_id(0) * K + column_K
    x_K = tl.load(added_BK + at_K, is_there_K, other=0.0, cache_modifier=".cg")
    y_K = tl.load(residual_BK + at_K, is_there_K, other=0.0, cache_modifier=".cg")
    y_K += x_K * _inverse_rms(tl.sum(x_K * x_K, axis=0), eps, K) * gain
    tl.store(residual_BK + at_K, y_K, is_there_K)
    tl.store(copy_BK + at_K, y_K.to(copy_BK.dtype.element_ty), is_there_K)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # tanh(u) = 2 sigmoid(2 u) - 1, of the approximation of GELU by tanh.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def gated_kernel(  # noqa: C901, PLR0915
    x_BK,
    gain_K,
    gate_NK,
    up_NK,
    gate_bias_N,
    up_bias_N,
    y_BN,
    n,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    BATCH: tl.constexpr,
    ADD_ONE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Store act(gate(norm(x))) * up(norm(x)); a CTA has ROWS outputs, as in `linear_kernel`."""
    if PDL:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    first = tl.program_id(0) * ROWS
    start = first.to(tl.int64) * K
    row_R = tl.minimum(tl.arange(0, ROWS), n - 1 - first)
    is_row_R = tl.arange(0, ROWS) + first < n
    gates = _none()
    ups = _none()
    for chunk in tl.static_range(CHUNKS):
        if chunk < AHEAD:
            gates = _with(gates, _weights(gate_NK + start, row_R, K, BLOCK, chunk))
            ups = _with(ups, _weights(up_NK + start, row_R, K, BLOCK, chunk))
    if HAS_BIAS:
        gate_bias_R = tl.load(gate_bias_N + first + row_R).to(tl.float32)
        up_bias_R = tl.load(up_bias_N + first + row_R).to(tl.float32)
    if PDL:
        gdc_wait()
    if PARTS > 0:
        gate_PBR = tl.zeros([PARTS, ROWS_OF_DOT, ROWS], tl.float32)
        up_PBR = tl.zeros([PARTS, ROWS_OF_DOT, ROWS], tl.float32)
        square_B = tl.zeros([ROWS_OF_DOT], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            if chunk + AHEAD < CHUNKS:
                gates = _with(gates, _weights(gate_NK + start, row_R, K, BLOCK, chunk + AHEAD))
                ups = _with(ups, _weights(up_NK + start, row_R, K, BLOCK, chunk + AHEAD))
            x_rows_BK = _input_rows(x_BK, K, BLOCK, chunk, BATCH).to(tl.float32)
            square_B += tl.sum(x_rows_BK * x_rows_BK, axis=1)
            x_rows_BK *= _gain(gain_K, K, BLOCK, chunk, ADD_ONE)
            gate_PBR = _dotted(x_rows_BK, gates[chunk], gate_PBR, PARTS)
            up_PBR = _dotted(x_rows_BK, ups[chunk], up_PBR, PARTS)
        scale_1B = _inverse_rms(square_B, eps, K)[None, :]
        gate_RB = tl.trans(tl.sum(gate_PBR, axis=0)) * scale_1B
        up_RB = tl.trans(tl.sum(up_PBR, axis=0)) * scale_1B
    else:
        gate_sums = _none()
        up_sums = _none()
        squares = _none()
        for b in tl.static_range(BATCH):
            x = x_BK + b * K
            inputs = _none()
            for chunk in tl.static_range(CHUNKS):
                inputs = _with(inputs, _inputs(x, K, BLOCK, chunk))
            gate_RK = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
            up_RK = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
            square_1K = tl.zeros([1, BLOCK // VECTOR], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                if b == 0 and chunk + AHEAD < CHUNKS:
                    gates = _with(gates, _weights(gate_NK + start, row_R, K, BLOCK, chunk + AHEAD))
                    ups = _with(ups, _weights(up_NK + start, row_R, K, BLOCK, chunk + AHEAD))
                x_1K = inputs[chunk]
                square_1K += _sums(x_1K * x_1K)
                x_1K *= _gain(gain_K, K, BLOCK, chunk, ADD_ONE)
                gate_RK += _sums(gates[chunk].to(tl.float32) * x_1K)
                up_RK += _sums(ups[chunk].to(tl.float32) * x_1K)
            gate_sums = _with(gate_sums, gate_RK)
            up_sums = _with(up_sums, up_RK)
            squares = _with(squares, square_1K)
        if BATCH == 1:
            # Twice the squares: there is no exchange of three.
            product_RK2 = tl.join(gate_sums[0], up_sums[0])
            square_RK2 = tl.broadcast_to(squares[0], gate_sums[0].shape)[:, :, None]
            both_RK22 = tl.join(product_RK2, tl.broadcast_to(square_RK2, product_RK2.shape))
            product_R2, square_R2 = tl.split(tl.sum(both_RK22, axis=1))
            gate_R, up_R = tl.split(product_R2 * _inverse_rms(square_R2, eps, K))
            gate_RB, up_RB = gate_R[:, None], up_R[:, None]
        else:
            both_RKB2 = tl.join(_stacked(gate_sums, BATCH), _stacked(up_sums, BATCH))
            gate_RB, up_RB = tl.split(tl.sum(both_RKB2, axis=1))
            scale_1B = _inverse_rms(tl.sum(_stacked(squares, BATCH), axis=1), eps, K)
            gate_RB *= scale_1B
            up_RB *= scale_1B
    if HAS_BIAS:
        gate_RB += gate_bias_R[:, None]
        up_RB += up_bias_R[:, None]
    y_RB = _activated(gate_RB, ACTIVATION) * up_RB
    sequence_B = tl.arange(0, y_RB.shape[1])
    at_RB = (first + tl.arange(0, ROWS))[:, None] + (sequence_B * n)[None, :]
    is_there_RB = is_row_R[:, None] & (sequence_B < BATCH)[None, :]
    tl.store(y_BN + at_RB, y_RB.to(y_BN.dtype.element_ty), is_there_RB)


@triton.jit
def _numbered(
    w, row_R, last, K: tl.constexpr, BLOCK: tl.constexpr, NUMBER: tl.constexpr
) -> tl.tensor:
    """Return one of several tiles: all chunks of some rows come before the next rows."""
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    ROWS: tl.constexpr = row_R.shape[0]
    at_R = tl.minimum(row_R + (NUMBER // CHUNKS) * ROWS, last)
    return _weights(w, at_R, K, BLOCK, NUMBER % CHUNKS)


@triton.jit
def head_kernel(  # noqa: C901, PLR0915
    x_BK,
    gain_K,
    w_NK,
    logits_BN,
    best_BG,
    token_BG,
    n,
    eps,
    cap,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    BATCH: tl.constexpr,
    ADD_ONE: tl.constexpr,
    KEEPS_LOGITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute logits, TILES tiles a CTA, and store the largest of the CTA and its token."""
    if PDL:
        gdc_launch_dependents()
    CHUNKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    group = tl.program_id(0)
    start = group * (ROWS * TILES)
    base = w_NK + start.to(tl.int64) * K
    row_R = tl.arange(0, ROWS)
    last = n - 1 - start
    tiles = _none()
    for step in tl.static_range(TILES * CHUNKS):
        if step < AHEAD:
            tiles = _with(tiles, _numbered(base, row_R, last, K, BLOCK, step))
    if PDL:
        gdc_wait()
    if PARTS > 0:
        inputs = _none()
        square_B = tl.zeros([ROWS_OF_DOT], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            x_rows_BK = _input_rows(x_BK, K, BLOCK, chunk, BATCH).to(tl.float32)
            square_B += tl.sum(x_rows_BK * x_rows_BK, axis=1)
            x_rows_BK *= _gain(gain_K, K, BLOCK, chunk, ADD_ONE)
            inputs = _with(inputs, x_rows_BK.to(w_NK.dtype.element_ty))
        scale_1B = _inverse_rms(square_B, eps, K)[None, :]
    else:
        # Of all sequences, each with its chunks.
        inputs = _none()
        squares = _none()
        for b in tl.static_range(BATCH):
            square_1K = tl.zeros([1, BLOCK // VECTOR], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                x_1K = _inputs(x_BK + b * K, K, BLOCK, chunk)
                square_1K += _sums(x_1K * x_1K)
                inputs = _with(inputs, x_1K * _gain(gain_K, K, BLOCK, chunk, ADD_ONE))
            squares = _with(squares, square_1K)
        scale_1B = _inverse_rms(tl.sum(_stacked(squares, BATCH), axis=1), eps, K)
    best_B = tl.full([scale_1B.shape[1]], float("-inf"), tl.float32)
    token_B = tl.zeros([scale_1B.shape[1]], tl.int32) + start
    sequence_B = tl.arange(0, scale_1B.shape[1])
    for tile in tl.static_range(TILES):
        for chunk in tl.static_range(CHUNKS):
            if tile * CHUNKS + chunk + AHEAD < TILES * CHUNKS:
                tiles = _with(
                    tiles, _numbered(base, row_R, last, K, BLOCK, tile * CHUNKS + chunk + AHEAD)
                )
        if PARTS > 0:
            sum_PBR = tl.zeros([PARTS, ROWS_OF_DOT, ROWS], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                sum_PBR = _dotted(inputs[chunk], tiles[tile * CHUNKS + chunk], sum_PBR, PARTS)
            logit_RB = tl.trans(tl.sum(sum_PBR, axis=0)) * scale_1B
        else:
            sums = _none()
            for b in tl.static_range(BATCH):
                sum_RK = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    weights_RK = tiles[tile * CHUNKS + chunk].to(tl.float32)
                    sum_RK += _sums(weights_RK * inputs[b * CHUNKS + chunk])
                sums = _with(sums, sum_RK)
            logit_RB = tl.sum(_stacked(sums, BATCH), axis=1) * scale_1B
        logit_RB = _capped(logit_RB, cap, HAS_CAP)
        at_R = row_R + (start + tile * ROWS)
        if KEEPS_LOGITS:
            at_RB = at_R[:, None] + (sequence_B * n)[None, :]
            is_there_RB = (at_R < n)[:, None] & (sequence_B < BATCH)[None, :]
            tl.store(logits_BN + at_RB, logit_RB, is_there_RB)
        logit_RB = tl.where((at_R < n)[:, None], logit_RB, float("-inf"))
        largest_B, place_B = tl.max(logit_RB, axis=0, return_indices=True)
        token_B = tl.where(largest_B > best_B, start + tile * ROWS + place_B, token_B)
        best_B = tl.maximum(largest_B, best_B)
    at_B = sequence_B * tl.num_programs(0) + group
    tl.store(best_BG + at_B, best_B, sequence_B < BATCH)
    tl.store(token_BG + at_B, tl.minimum(token_B, n - 1), sequence_B < BATCH)


@triton.jit
def _rotated(
    x, gain_D, cos_D, sin_D, row_M, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr, ADD_ONE
) -> tl.tensor:
    """Return rows of D columns at x with their positions in them, normalised before if asked."""
    column_D = tl.arange(0, DIM)
    # The other of each pair of columns that are rotated together.
    other_D = (column_D + DIM // 2) % DIM
    x_MD = tl.load(x + row_M[:, None] * DIM + column_D[None, :], cache_modifier=".cg")
    other_MD = tl.load(x + row_M[:, None] * DIM + other_D[None, :], cache_modifier=".cg")
    if HAS_NORM:
        scale_M = tl.rsqrt(tl.sum(x_MD * x_MD, axis=1) / DIM + eps)
        gain = tl.load(gain_D + column_D).to(tl.float32)
        other_gain = tl.load(gain_D + other_D).to(tl.float32)
        if ADD_ONE:
            gain += 1.0
            other_gain += 1.0
        x_MD *= scale_M[:, None] * gain[None, :]
        other_MD *= scale_M[:, None] * other_gain[None, :]
    signed_D = tl.where(column_D < DIM // 2, -sin_D, sin_D)
    return x_MD * cos_D[None, :] + other_MD * signed_D[None, :]


@triton.jit
def _capped(x, cap, HAS_CAP: tl.constexpr) -> tl.tensor:
    """Return c tanh(x / c): tanh(u) = 2 sigmoid(2 u) - 1."""
    if HAS_CAP:
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)
    return x


@triton.jit
def _scored(score, scale, cap, HAS_CAP: tl.constexpr) -> tl.tensor:
    """Return scores as powers of 2 take them; the scale has the factor log2(e), the cap not."""
    if HAS_CAP:
        score = _capped(score * (scale / LOG2_E), cap, HAS_CAP) * LOG2_E
    else:
        score *= scale
    return score


@triton.jit
def _seen(score_MN, is_key_N, scale, cap, HAS_CAP: tl.constexpr) -> tl.tensor:
    return tl.where(is_key_N[None, :], _scored(score_MN, scale, cap, HAS_CAP), float("-inf"))


@triton.jit
def attend_kernel(  # noqa: PLR0915
    qkv_BN,
    cos_LD,
    sin_LD,
    q_gain_D,
    k_gain_D,
    k_BHLD,
    v_BHLD,
    y_BHMD,
    partial,
    counter,
    state_BS,
    length,
    scale,
    eps,
    window,
    cap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADD_ONE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Rotate a token's query and key, append key and value to the cache, and attend.

    A CTA has a split of the keys of one key head, of at least LEAST keys; the split with the last
    keys has the new one. The first EARLY keys are from earlier steps and are loaded before the
    wait; the others follow in blocks. The scale contains log2(e).
    """
    if PDL:
        gdc_launch_dependents()
    split, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    state = state_BS + b * STATE_SIZE
    slot = tl.load(state + SLOT, cache_modifier=".cg")
    start = tl.load(state + START, cache_modifier=".cg")
    oldest = tl.maximum(start, slot + 1 - window) if HAS_WINDOW else start
    count = slot - oldest
    each = part_length(count, tl.num_programs(0), BLOCK, LEAST)
    num_used = tl.maximum(tl.cdiv(count, each), 1)
    # Splits without keys make room at once.
    if split >= num_used:
        return
    column_D = tl.arange(0, DIM)
    position = slot - start
    cos_D = tl.load(cos_LD + position * DIM + column_D)
    sin_D = tl.load(sin_LD + position * DIM + column_D)
    first = oldest + split * each
    end = tl.minimum(first + each, slot)
    cache = (b * HEADS + head).to(tl.int64) * length * DIM
    early_E = first + tl.arange(0, EARLY)
    is_early_E = early_E < end
    at_ED = cache + early_E[:, None] * DIM + column_D[None, :]
    k_ED = tl.load(k_BHLD + at_ED, is_early_E[:, None], other=0.0, cache_modifier=".cg")
    v_ED = tl.load(v_BHLD + at_ED, is_early_E[:, None], other=0.0, cache_modifier=".cg")
    if PDL:
        gdc_wait()
    row_M = tl.arange(0, ROWS)
    qkv = qkv_BN + b * ((GROUP + 2) * HEADS * DIM)
    # Rows behind the last query head repeat it, and are not stored.
    q_row_M = head * GROUP + tl.minimum(row_M, GROUP - 1)
    q_MD = _rotated(qkv, q_gain_D, cos_D, sin_D, q_row_M, eps, DIM, HAS_NORM, ADD_ONE)
    q_MD = q_MD.to(k_BHLD.dtype.element_ty)
    new_row = tl.full([1], GROUP * HEADS, tl.int32) + head
    k_1D = _rotated(qkv, k_gain_D, cos_D, sin_D, new_row, eps, DIM, HAS_NORM, ADD_ONE)
    v_at_1D = (new_row + HEADS)[:, None] * DIM + column_D[None, :]
    v_1D = tl.load(qkv + v_at_1D, cache_modifier=".cg")
    k_1D = k_1D.to(k_BHLD.dtype.element_ty)
    v_1D = v_1D.to(v_BHLD.dtype.element_ty)
    is_last = split == num_used - 1
    at_1D = cache + slot * DIM + column_D[None, :]
    tl.store(k_BHLD + at_1D, k_1D, is_last)
    tl.store(v_BHLD + at_1D, v_1D, is_last)
    new_M = tl.sum(q_MD.to(tl.float32) * k_1D.to(tl.float32), axis=1)
    new_M = _scored(new_M, scale, cap, HAS_CAP)
    new_M = tl.where(is_last, new_M, float("-inf"))
    score_ME = tl.dot(q_MD, k_ED.T, input_precision="ieee")
    score_ME = _seen(score_ME, is_early_E, scale, cap, HAS_CAP)
    # A split has keys, or the new one.
    largest_M = tl.maximum(new_M, tl.max(score_ME, axis=1))
    new_M = tl.exp2(new_M - largest_M)
    weight_ME = tl.exp2(score_ME - largest_M[:, None])
    early_M = tl.sum(weight_ME, axis=1) + new_M
    sum_MD = new_M[:, None] * v_1D.to(tl.float32)
    sum_MD = tl.dot(weight_ME.to(v_ED.dtype), v_ED, sum_MD, input_precision="ieee")
    is_column_0 = tl.arange(0, BLOCK) == 0
    total_MN = tl.where(is_column_0[None, :], early_M[:, None], 0.0)
    for at in tl.range(first + EARLY, end, BLOCK):
        key_N = at + tl.arange(0, BLOCK)
        is_key_N = key_N < end
        at_ND = cache + key_N[:, None] * DIM + column_D[None, :]
        k_ND = tl.load(k_BHLD + at_ND, is_key_N[:, None], other=0.0)
        v_ND = tl.load(v_BHLD + at_ND, is_key_N[:, None], other=0.0)
        score_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        score_MN = _seen(score_MN, is_key_N, scale, cap, HAS_CAP)
        weight_MN, shrink_M, largest_M, total_MN = weigh(score_MN, largest_M, total_MN)
        sum_MD = sum_MD * shrink_M[:, None]
        weight_MN = weight_MN.to(v_ND.dtype)
        sum_MD = tl.dot(weight_MN, v_ND, sum_MD, input_precision="ieee")
    mean_MD, lse_M = finish(sum_MD, largest_M, tl.sum(total_MN, axis=1))
    place = b * HEADS + head
    y = y_BHMD + place * (GROUP * DIM)
    if num_used == 1:
        _store_rows(y, mean_MD, GROUP)
    else:
        num_places = tl.num_programs(2) * HEADS
        means = partial + place * tl.num_programs(0) * (GROUP * DIM)
        # Log-sum-exps lie behind all means.
        lses = partial + (num_places * DIM + place) * tl.num_programs(0) * GROUP
        store_part(mean_MD, lse_M, means, lses, split, GROUP)
        if is_last_to_arrive(counter + place, num_used):
            mean_RD, _ = merge(means, lses, num_used, GROUP, DIM, MERGED_ROWS, MERGED)
            _store_rows(y, mean_RD, GROUP)


@triton.jit
def _store_rows(y, mean_MD, GROUP: tl.constexpr) -> None:
    row_M, column_D = tl.arange(0, mean_MD.shape[0]), tl.arange(0, mean_MD.shape[1])
    at_MD = row_M[:, None] * mean_MD.shape[1] + column_D[None, :]
    tl.store(y + at_MD, mean_MD.to(y.dtype.element_ty), (row_M < GROUP)[:, None])


@triton.jit
def _ordered(x) -> tl.tensor:
    """Return integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _largest_reached(x_N, weight_N, least) -> tl.tensor:
    """Return the largest integer t for which the weights of all x >= t add up to `least`, by bits.

    That is the k-th largest x for weights of 1 and a sum of k.
    """
    found = tl.full([], -2147483648, tl.int64)
    for step in tl.range(32):
        tried = found + (tl.full([], 2147483648, tl.int64) >> step)
        reached = tl.sum(tl.where(x_N >= tried, weight_N, 0.0), axis=0)
        found = tl.where(reached >= least, tried, found)
    return found


@triton.jit
def sample_kernel(
    logits_BN,
    best_BG,
    chosen_B,
    groups_BM,
    state_BS,
    seed_1,
    n,
    num_groups,
    top_k,
    top_p,
    temperature,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Choose a random token of the top_k likeliest, and of those of the share top_p.

    A CTA has one sequence. The top_k largest logits lie in the top_k groups, of SIZE logits each,
    with the largest maxima. The largest of p / e, with e exponentially distributed, is distributed
    as p.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    group_G = tl.arange(0, GROUPS)
    is_group_G = group_G < num_groups
    at_G = best_BG + b * num_groups + group_G
    best_G = tl.load(at_G, is_group_G, other=float("-inf"), cache_modifier=".cg")
    best_G = _ordered(best_G)
    one_G = is_group_G.to(tl.float32)
    is_chosen_G = is_group_G & (best_G >= _largest_reached(best_G, one_G, top_k))
    place_G = tl.cumsum(is_chosen_G.to(tl.int32), axis=0) - 1
    num_chosen = tl.minimum(tl.sum(is_chosen_G.to(tl.int32), axis=0), MOST)
    groups = groups_BM + b * MOST
    tl.store(groups + place_G, group_G, is_chosen_G & (place_G < MOST))
    tl.debug_barrier()
    place_N = tl.arange(0, MOST * SIZE)
    is_there_N = place_N // SIZE < num_chosen
    group_N = tl.load(groups + place_N // SIZE, is_there_N, other=0, cache_modifier=".cg")
    token_N = group_N * SIZE + place_N % SIZE
    is_there_N = is_there_N & (token_N < n)
    at_N = logits_BN + b * n + token_N
    score_N = tl.load(at_N, is_there_N, other=float("-inf"), cache_modifier=".cg") / temperature
    order_N = _ordered(score_N)
    one_N = is_there_N.to(tl.float32)
    is_kept_N = is_there_N & (order_N >= _largest_reached(order_N, one_N, top_k))
    share_N = tl.where(is_kept_N, tl.exp(score_N - tl.max(score_N, axis=0)), 0.0)
    # A token is kept while those before it are less than top_p; the first one always is.
    least = tl.maximum(top_p * tl.sum(share_N, axis=0), 1e-30)
    share_N = tl.where(order_N >= _largest_reached(order_N, share_N, least), share_N, 0.0)
    step = tl.load(state_BS + b * STATE_SIZE + STEP, cache_modifier=".cg")
    offset = (step * tl.num_programs(0) + b) * (MOST * SIZE)
    uniform_N = tl.rand(tl.load(seed_1), offset + place_N)
    noise_N = -tl.log(tl.maximum(uniform_N, 1e-10))
    _, place = tl.max(share_N / tl.maximum(noise_N, 1e-10), axis=0, return_indices=True)
    token = tl.sum(tl.where(place_N == place, token_N, 0), axis=0)
    tl.store(chosen_B + b, token)


@triton.jit
def next_token_kernel(
    best_BG,
    token_BG,
    tokens_BL,
    embedding_VK,
    residual_BK,
    copy_BK,
    state_BS,
    stops_E,
    num_groups,
    length,
    num_kept,
    embedding_scale,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Choose the token of the largest logit, test whether it stops, and read its embedding.

    A CTA has one sequence. A finished sequence gets the padding token.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    group_G = tl.arange(0, GROUPS)
    best_G = tl.load(
        best_BG + b * num_groups + group_G,
        group_G < num_groups,
        other=float("-inf"),
        cache_modifier=".cg",
    )
    _, group = tl.max(best_G, axis=0, return_indices=True)
    # Logits that are NaN may have any place.
    group = tl.minimum(group, num_groups - 1)
    token = tl.load(token_BG + b * num_groups + group, cache_modifier=".cg")
    state = state_BS + b * STATE_SIZE
    slot = tl.load(state + SLOT, cache_modifier=".cg")
    step = tl.load(state + STEP, cache_modifier=".cg")
    is_finished = tl.load(state + IS_FINISHED, cache_modifier=".cg")
    token = tl.where(is_finished != 0, tl.load(state + PADDING), token)
    stop_E = tl.load(stops_E + tl.arange(0, STOPS))
    is_stop = tl.max((stop_E == token).to(tl.int32), axis=0)
    # The host tells tokens of this call from those of an earlier one by the upper half.
    call = tl.load(state + CALL, cache_modifier=".cg").to(tl.int64)
    tl.store(tokens_BL + b * num_kept + step, call << 32 | token.to(tl.int64))
    # A step behind the end of the cache repeats the last slot; its token is not read.
    tl.store(state + SLOT, tl.minimum(slot + 1, length - 1))
    tl.store(state + STEP, tl.minimum(step + 1, num_kept - 1))
    tl.store(state + IS_FINISHED, is_finished | is_stop)
    embedding = embedding_VK + token.to(tl.int64) * K
    for start in tl.static_range(0, K, BLOCK):
        column_K = start + tl.arange(0, BLOCK)
        is_there_K = column_K < K
        x_K = tl.load(embedding + column_K, is_there_K, other=0.0)
        x_K = (x_K.to(tl.float32) * embedding_scale).to(copy_BK.dtype.element_ty)
        tl.store(copy_BK + b * K + column_K, x_K, is_there_K)
        tl.store(residual_BK + b * K + column_K, x_K.to(tl.float32), is_there_K)
