"""Attention with queries, keys and values in FP8: heads get scales, then Hopper's kernel runs.

The largest number of each head is found, and everything rounded, in one launch. Values are turned
over meanwhile, as tensor cores take 8 bits with what is summed over side by side: block after block
of keys, columns first, keys in the order of `pack_narrow` of `_gluon`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kprof.kernels._attention import Options, empty_results
from kprof.kernels._attention_ring import Ring, attend_in_ring, deals
from kprof.kernels._attention_rounding import narrow
from kprof.kernels._fp8 import FP8, LARGEST, LEAST
from kprof.kernels._launch import Launcher, alignments
from kprof.kernels._operator import define

ROWS, WARPS = 128, 8
# With them nothing is spilled, and programs for three tiles fit a multiprocessor.
REGISTERS = 80
# So many tiles behind a whole head it is rounded: as many as a GPU looks through in the 3 us that
# one of them may take.
APART = 192

_launch_narrow = Launcher(narrow)


def narrowed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values turned over, and the largest magnitude of each head.

    Args:
        q: (B, H, T, D); float16 or bfloat16, D a power of two.
        k: (B, heads, N, D).
        v: As k. Of the results it has (B, heads, blocks of 128 keys times D, 128).
    """
    batch, heads, num_queries, dim = q.shape
    key_heads, num_keys = k.shape[1:3]
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    units = batch * (heads + 2 * key_heads)
    # The largest numbers, and how many tiles of each head have been looked through.
    found = q.new_zeros((2, batch, heads + 2 * key_heads), dtype=torch.int32)
    in_blocks = (batch, key_heads, -(-num_keys // ROWS) * dim, ROWS)
    made = tuple(torch.empty(s, dtype=FP8, device=q.device) for s in (q.shape, k.shape, in_blocks))
    steps = tuple(step for one in (q, k, v) for step in one.stride()[:3])
    numbers = (*steps, num_queries, num_keys, units, heads, key_heads, dim, ROWS)
    blocks = -(-max(num_queries, num_keys) // ROWS)
    dtypes = (q.dtype, k.dtype, v.dtype)
    key = (q.device, *dtypes, heads, key_heads, dim, alignments((q, k, v), *steps))
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    arguments = (found, q, k, v, *made, *numbers, LARGEST, LEAST, APART)
    # As many look as round.
    _launch_narrow(key, 2 * (units * blocks + blocks + APART), arguments, options)
    return *made, found[0].view(torch.float32)


def run_narrow(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Attend in FP8."""
    y, lse = empty_results(q)
    if not q.numel() or not k.numel():
        return y.zero_(), lse.fill_(-math.inf)
    attend_to(narrowed(q, k, v), y, lse, options)
    return y, lse


def attend_to(made: tuple[Tensor, ...], y: Tensor, lse: Tensor, options: Options) -> None:
    """Attend to what `narrowed` made, in blocks as its values lie in, and store results."""
    q, k, v, largest = made
    sees_all = options.sees_all(q.shape[2], k.shape[2])
    ring = Ring(ROWS, 4, is_dealt=deals(q.shape[3], q.shape[2], sees_all))
    attend_in_ring(q, k, v, largest, y, lse, options, ring)


def _run(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    return run_narrow(q, k, v, Options(scale, is_causal, window, q.shape[2]))


attend_narrow = define(
    "attention_fp8(Tensor q, Tensor k, Tensor v, float scale, bool is_causal, int window) "
    "-> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)
