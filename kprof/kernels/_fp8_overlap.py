"""Products launched before the cast of x ahead of them has ended: what they do meanwhile.

The cast lets them in as it begins (`let_in`). They fetch weights into L2, which is no read: what is
written until they wait is what they find. Then they wait until the cast has ended, and all that ran
before it, which nothing had let in; only then do they read or write anything.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Tell whether a launch may begin before the one that it depends on has ended: from Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


# Of each row of weights that a program reads, in bytes; a power of two.
FETCHED = 512
# Of all programs: fetching more takes longer than the cast, and what is read first waits for it.
MOST_FETCHED = 6 << 20


def gains(programs: int, num_casting: int, fit: int, sms: int) -> bool:
    """Tell whether a product gains by being launched before the cast ends, as seen on an H200.

    Its programs go where there is most room: to other multiprocessors than the cast's. Where these
    have room for more than an even share, they get more and end last, by more than is gained.

    Args:
        programs: Of the product.
        num_casting: Programs of the cast.
        fit: Programs of the product that one multiprocessor has room for.
        sms: Multiprocessors of the GPU.
    """
    evenly, besides = -(-programs // sms), -(-programs // max(1, sms - num_casting))
    return min(besides, fit) <= evenly


@triton.jit
def let_in(OVERLAPS: tl.constexpr):
    """Let programs of the next launch come, and wait, as soon as there is room for them."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


# What DRAM is read by where nothing else is asked for.
LINE = tl.constexpr(64)


@triton.jit
def fetch_and_wait(w_NK, row, num_rows, depth, first, end, N: tl.constexpr, FETCHED: tl.constexpr):
    """Fetch N rows' weights from `first` into L2, FETCHED of each at most, then wait for the cast.

    FETCHED is a power of two, or 0.
    """
    if FETCHED > 0:
        rows = tl.minimum(row + tl.arange(0, N), num_rows - 1).to(tl.int64)
        k_L = first + tl.arange(0, FETCHED // LINE) * LINE
        _fetch(w_NK + rows[:, None] * depth + tl.minimum(k_L, end - 1)[None, :])
    tl.extra.cuda.gdc_wait()


@triton.jit
def _fetch(at):
    """Ask for what lies there to be brought to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
