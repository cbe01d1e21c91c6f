"""Gluon of Triton 3.6: its imports in one place, with the PTX that it does not offer.

Named barriers, semaphores between CTAs, TMA reductions, bank-conflict-free stores, and weights
packed in registers. Gluon has no interpreter; it compiles ahead of time like other kernels.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kprof.kernels.runtime import MOST_CALLS

__all__ = [
    "add_shared_to_global",
    "describe",
    "fence_async_shared",
    "gl",
    "gluon",
    "hold",
    "mbarrier",
    "named_barrier_arrive",
    "named_barrier_sync",
    "pack",
    "pack_fp8",
    "product",
    "semaphore_release",
    "semaphore_wait",
    "store_permuted",
    "tma",
    "unpack",
    "unpack_fp8",
    "warp",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


# Row and column of each address bit in `store_permuted`.
PERMUTED = gl.constexpr(
    gl.SharedLinearLayout(
        [
            *([0, 1], [0, 2], [0, 8], [0, 16], [0, 4]),
            *([1, 8], [2, 16], [4, 4], [8, 0], [16, 0], [32, 0], [0, 32]),
        ],
        alignment=1024,
    )
)


DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}
# The fields of descriptors without their tensor, by kind.
_described: dict[Hashable, dict[str, Any]] = {}


def describe(
    x: Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    is_swizzled: bool = True,
) -> TensorDescriptor:
    """Return the TMA descriptor of a tensor, for boxes of so many elements a dimension.

    Layout and checks depend on the kind of tensor alone, and take longer than many kernels run.

    Args:
        x: The tensor; begins at a multiple of 16 bytes.
        shape: Sizes that TMA sees.
        strides: In elements, of these sizes.
        box: Elements of one copy.
        is_swizzled: Whether shared memory has the swizzle of matrix products.
    """
    kind = x.dtype, shape, strides, box, is_swizzled
    known = _described.get(kind)
    if known is not None:
        again = object.__new__(TensorDescriptor)
        again.__dict__.update(known, base=x)
        return again
    layout = gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[x.dtype])
    if not is_swizzled:
        layout = replace(layout, swizzle_byte_width=0)
    first = TensorDescriptor(x, list(shape), list(strides), list(box), layout)
    if len(_described) >= MOST_CALLS:
        _described.clear()
    _described[kind] = {name: one for name, one in vars(first).items() if name != "base"}
    return first


@builtin
def add_shared_to_global(tensor_desc, coord, src, _semantic=None) -> None:
    """Begin a TMA reduction: add a block of shared memory to a tensor, in any order.

    Waited for like a TMA store. Gluon has no function for it.
    """
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, at, src.handle)


@gluon.jit
def warp():
    """Return a thread's warp, as a number that the compiler takes for uniform.

    It restricts instructions such as copies to one warp. Code under it may have no barrier.
    """
    code: gl.constexpr = "{ .reg .b32 thread; mov.u32 thread, %tid.x; shr.u32 $0, thread, 5; }"
    return gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def named_barrier_sync(barrier: gl.constexpr, THREADS: gl.constexpr) -> None:
    """Wait at a named barrier (`bar.sync`) until THREADS have come, with those that only arrive."""
    code: gl.constexpr = f"bar.sync {barrier}, {THREADS}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(barrier: gl.constexpr, THREADS: gl.constexpr) -> None:
    """Arrive at a named barrier (`bar.arrive`) without waiting."""
    code: gl.constexpr = f"bar.arrive {barrier}, {THREADS}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_wait(at, number) -> None:
    """Wait until a semaphore has this value; reductions before its release are visible then."""
    code: gl.constexpr = (
        "{ .reg .pred is_other; .reg .b32 told; "
        "AGAIN: ld.acquire.gpu.global.b32 told, [$1]; setp.ne.b32 is_other, told, $2; "
        "@is_other bra AGAIN; fence.proxy.async.global; mov.u32 $0, 0; }"
    )
    gl.inline_asm_elementwise(code, "=r,l,r", [at, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def semaphore_release(at, number) -> None:
    """Set a semaphore, once all reductions that this warp has begun are in memory.

    One of its threads has begun them, and the others wait for it. Called by one warp alone.
    """
    code: gl.constexpr = (
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; "
        "st.release.gpu.global.b32 [$1], $2; mov.u32 $0, 0;"
    )
    gl.inline_asm_elementwise(code, "=r,l,r", [at, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_permuted(smem, x_MN):
    """Store a 64 x 64 float32 GEMM result with permuted columns, without bank conflicts.

    A thread has columns 2t and 2t + 1 of every eight; 16 threads store one eight of four rows at a
    time. In TMA's swizzled layout these would share half of the banks. With bits 4 3 2 1 0 of a
    column in the order 2 4 3 1 0 they share none.
    """
    smem._reinterpret(gl.float32, [64, 64], PERMUTED).store(x_MN)


@gluon.jit
def hold(x_M) -> None:
    """Keep the computation of numbers >= 0 ahead of the waits that follow.

    ptxas moves a wait for GEMMs ahead of all code that does not need them, so nothing would overlap
    with them. It does not move a wait past a store to shared memory. This store is predicated off,
    which ptxas cannot know.
    """
    code: gl.constexpr = (
        "{ .reg .pred is_below; .reg .b32 place; mov.b32 place, 0; "
        "setp.lt.f32 is_below, $1, 0f00000000; @is_below st.shared.f32 [place], $1; "
        "mov.u32 $0, 0; }"
    )
    gl.inline_asm_elementwise(code, "=r,f", [x_M], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product(x_M, y_M):
    """Multiply float32 and round, without fusion into an FMA.

    In an FMA one of two products is not rounded: lanes that add the same two products, each its own
    first, would differ in the last bit.
    """
    code: gl.constexpr = "mul.rn.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(
        code, "=f,f,f", [x_M, y_M], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pack(x_MN, DTYPE: gl.constexpr):
    """Round to 16 bits, two columns packed into one 32-bit number.

    A loop that carries 16-bit numbers would unpack and pack them in every step.
    """
    M: gl.constexpr = x_MN.shape[0]
    N: gl.constexpr = x_MN.shape[1]
    low_MN, high_MN = gl.split(x_MN.reshape([M, N // 2, 2]))
    kind: gl.constexpr = "bf16" if gl.bfloat16 == DTYPE else "f16"
    code: gl.constexpr = "cvt.rn." + kind + "x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        code, "=r,f,f", [low_MN, high_MN], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(pair_MN, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return packed numbers in this layout."""
    M: gl.constexpr = pair_MN.shape[0]
    N: gl.constexpr = pair_MN.shape[1]
    BOTH: gl.constexpr = (
        (gl.bfloat16, gl.bfloat16) if gl.bfloat16 == DTYPE else (gl.float16, gl.float16)
    )
    low_MN, high_MN = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair_MN], dtype=BOTH, is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(low_MN, high_MN).reshape([M, 2 * N]), LAYOUT)


@gluon.jit
def pack_fp8(x_MN):
    """Round to e4m3, four columns packed into one 32-bit number, columns permuted.

    Of 16 columns of a GEMM result, a thread has two of the first eight and the same two of the
    others; of 16 columns of an FP8 operand, it has four neighbours. So that nothing moves between
    threads, the order becomes 0 1 8 9, 2 3 10 11 and so on. The other operand needs its rows in the
    same order.
    """
    M: gl.constexpr = x_MN.shape[0]
    N: gl.constexpr = x_MN.shape[1]
    ordered = x_MN.reshape([M, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    even, odd = gl.split(ordered)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    code: gl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    of_four = [first, second, third, fourth]
    four = gl.inline_asm_elementwise(
        code, "=r,f,f,f,f", of_four, dtype=gl.int32, is_pure=True, pack=1
    )
    return four.reshape([M, N // 4])


@gluon.jit
def unpack_fp8(four_MN, LAYOUT: gl.constexpr):
    """Return numbers packed by `pack_fp8` in this layout, in registers of their own.

    ptxas makes every GEMM wait for the one before if its operand registers may be written while it
    runs, as loop-carried registers are.
    """
    M: gl.constexpr = four_MN.shape[0]
    N: gl.constexpr = four_MN.shape[1]
    four_MN = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {low, high}; }",
        "=r,r",
        [four_MN],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    low = gl.join(four_MN.to(gl.int8), (four_MN >> 8).to(gl.int8))
    high = gl.join((four_MN >> 16).to(gl.int8), (four_MN >> 24).to(gl.int8))
    ordered = gl.join(low, high).permute([0, 1, 3, 2]).reshape([M, 4 * N])
    return gl.convert_layout(ordered.to(gl.float8e4nv, bitcast=True), LAYOUT)
