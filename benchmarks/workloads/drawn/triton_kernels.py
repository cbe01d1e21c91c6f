"""Hand-written Triton kernels that stream, compute, gather, add atomically, or fill few SMs."""

import math

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def stream(x_ptr, y_ptr, out_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a function of two inputs; more rounds cost more instructions for the same bytes."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n).to(tl.float32)
    y = tl.load(y_ptr + place, mask=place < n).to(tl.float32)
    for _ in range(ROUNDS):
        x = tl.exp(-x * x) + y
    tl.store(out_ptr + place, x, mask=place < n)


@triton.jit
def row_norm(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Normalise each row by its root mean square."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + place, mask=place < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + 1e-6)
    tl.store(out_ptr + row * width + place, x * scale, mask=place < width)


@triton.jit
def shift_bits(x_ptr, out_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Mix bits of integers, as random numbers are made."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n).to(tl.int32, bitcast=True)
    for _ in range(ROUNDS):
        x = (x ^ (x << 13)) ^ (x >> 7)
        x = x * 1664525 + 1013904223
    tl.store(out_ptr + place, x.to(tl.float32, bitcast=True), mask=place < n)


@triton.jit
def gather(x_ptr, out_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Read elements that lie a constant number apart, around the end."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (place * STEP) % n, mask=place < n)
    tl.store(out_ptr + place, x, mask=place < n)


@triton.jit
def add_up(x_ptr, out_ptr, n, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum a tensor with one atomic addition of each of few CTAs."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, BLOCKS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr, tl.sum(total, 0))


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, N, K, TILE: tl.constexpr):
    """Multiply matrices of rows by columns; sizes are multiples of the tile."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, TILE):
        a = tl.load(a_ptr + rows[:, None] * K + (start + inner)[None, :])
        b = tl.load(b_ptr + (start + inner)[:, None] * N + columns[None, :])
        total += tl.dot(a, b)
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], total)


def drawn_kernel(chosen, size):
    """Return a name, a call of a list of inputs, their shapes and their type."""
    wanted = math.exp(chosen.uniform(*map(math.log, size)))
    dtype, kind = chosen.choice(DTYPES), chosen.choice(list(KERNELS))
    block, warps = chosen.choice((256, 512, 1024, 2048)), chosen.choice((1, 2, 4, 8))
    return KERNELS[kind](kind, chosen, wanted, (dtype, block, warps))


def _stream(kind, chosen, wanted, form):
    dtype, block, warps = form
    rounds, n = chosen.choice((0, 1, 2, 8, 32, 100)), max(block, int(wanted / 3 / dtype.itemsize))

    def call(inputs):
        out = torch.empty_like(inputs[0])
        grid = (triton.cdiv(n, block),)
        stream[grid](*inputs, out, n, ROUNDS=rounds, BLOCK=block, num_warps=warps)

    return f"{kind} {dtype} {n} rounds {rounds}", call, [(n,), (n,)], dtype


def _row_norm(kind, chosen, wanted, form):
    dtype, _, warps = form
    width = chosen.choice((96, 256, 1000, 4096, 8192))
    rows = max(1, int(wanted / 2 / dtype.itemsize / width))

    def call(inputs):
        out, block = torch.empty_like(inputs[0]), triton.next_power_of_2(width)
        row_norm[(rows,)](*inputs, out, width, BLOCK=block, num_warps=warps)

    return f"{kind} {dtype} {rows}x{width}", call, [(rows, width)], dtype


def _shift_bits(kind, chosen, wanted, form):
    _, block, warps = form
    rounds, n = chosen.choice((1, 4, 16, 64)), max(block, int(wanted / 8))

    def call(inputs):
        out = torch.empty_like(inputs[0])
        grid = (triton.cdiv(n, block),)
        shift_bits[grid](*inputs, out, n, ROUNDS=rounds, BLOCK=block, num_warps=warps)

    return f"{kind} {n} rounds {rounds}", call, [(n,)], torch.float32


def _gather(kind, chosen, wanted, form):
    dtype, block, warps = form
    step, n = chosen.choice((1, 2, 7, 33, 1001)), max(block, int(wanted / 2 / dtype.itemsize))

    def call(inputs):
        out = torch.empty_like(inputs[0])
        grid = (triton.cdiv(n, block),)
        gather[grid](*inputs, out, n, STEP=step, BLOCK=block, num_warps=warps)

    return f"{kind} {dtype} {n} step {step}", call, [(n,)], dtype


def _add_up(kind, chosen, wanted, form):
    dtype, block, warps = form
    blocks, n = chosen.choice((4, 32, 132, 264, 1056)), max(block, int(wanted / dtype.itemsize))

    def call(inputs):
        out = torch.zeros(1, device=inputs[0].device)
        add_up[(blocks,)](*inputs, out, n, BLOCKS=blocks, BLOCK=block, num_warps=warps)

    return f"{kind} {dtype} {n} blocks {blocks}", call, [(n,)], dtype


def _multiply(kind, chosen, _wanted, form):
    dtype, _, warps = form[0], form[1], max(form[2], 4)
    tile = chosen.choice((32, 64, 128))
    m, n, k = (128 * chosen.choice((1, 2, 8, 16, 32)) for _ in range(3))

    def call(inputs):
        out = torch.empty(m, n, device=inputs[0].device, dtype=dtype)
        grid = (m // tile, n // tile)
        multiply[grid](*inputs, out, n, k, TILE=tile, num_warps=warps)

    return f"{kind} {dtype} {m}x{n}x{k} tile {tile}", call, [(m, k), (k, n)], dtype


KERNELS = {
    "stream": _stream,
    "row_norm": _row_norm,
    "shift_bits": _shift_bits,
    "gather": _gather,
    "add_up": _add_up,
    "multiply": _multiply,
}
