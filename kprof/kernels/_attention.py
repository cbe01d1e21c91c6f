"""Attention of many queries on the host: how the work is cut, and the operator that launches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kprof.kernels._attention_device import attend
from kprof.kernels._launch import Launcher, alignments, kind_of
from kprof.kernels._operator import define

LOG2_E = 1.4426950408889634


class Options(NamedTuple):
    """What a call is given beside its tensors."""

    scale: float
    is_causal: bool
    window: int
    most_queries: int
    """Of a sequence, where they lie one after another."""

    def bounds(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        """Return how many keys before and after its own a row sees; None: all there are."""
        side = self.window - 1 if 0 < self.window < max(num_queries, num_keys) else None
        return side, 0 if self.is_causal else side

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Tell whether every row sees every key."""
        return self.bounds(num_queries, num_keys) == (None, None)


@dataclass(frozen=True)
class Tiled:
    """How plain Triton cuts a call: queries of a tile, keys of a block, warps, blocks in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiled_for(dim: int, num_queries: int) -> Tiled:
    """Return the schedule that was the fastest on an H200; of few queries none was measured."""
    if num_queries <= 64:
        return Tiled(64, 64, 4, 3) if dim <= 128 else Tiled(64, 32, 8, 2)
    if dim <= 64:
        return Tiled(64, 128, 4, 3)
    return Tiled(128, 128, 8, 2) if dim <= 128 else Tiled(128, 64, 8, 2)


_launch = Launcher(attend)


def run_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Attend with plain Triton."""
    y, lse = empty_results(q)
    if not y.numel():
        return y, lse
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    call, tensors = (kind_of(q, k, v, q_starts, k_starts), options), (q, k, v, y, lse)
    given = (*tensors, q_starts, k_starts)
    if not _launch.again(call, given):
        _launch_first(call, given, options)
    return y, lse


def _launch_first(call: object, tensors: tuple[Tensor | None, ...], options: Options) -> None:
    q, k, v, y, _, q_starts, k_starts = tensors
    assert q is not None and k is not None and v is not None and y is not None
    batch, heads, num_queries, dim = q.shape
    num_sequences, most = batch, num_queries
    if q_starts is not None:
        num_sequences, most = q_starts.numel() - 1, options.most_queries
    schedule = tiled_for(dim, most)
    left, right = options.bounds(num_queries, k.shape[2])
    constants = (
        *(heads // k.shape[1], q_starts is not None, left is not None, right is not None),
        *(dim, schedule.rows, schedule.keys, schedule.stages),
    )
    steps = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], y.stride(0), y.stride(2))
    types = tuple(None if one is None else one.dtype for one in tensors)
    inputs = (q, k, v, q_starts, k_starts)
    key = (q.device, types, constants, schedule.warps, alignments(inputs, *steps))
    numbers = (num_queries, k.shape[2], left or 0, right or 0)
    arguments = (*tensors, *steps, options.scale * LOG2_E, *numbers, *constants)
    grid = (-(-most // schedule.rows), heads, num_sequences)
    _launch(key, grid, arguments, {"num_warps": schedule.warps}, call=call, tensors=tensors)


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return places for the results: tokens before heads in memory, as what comes next wants."""
    batch, heads, tokens, dim = q.shape
    y = q.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    return y, q.new_empty((batch, heads, tokens), dtype=torch.float32)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    *given: float,
) -> tuple[Tensor, Tensor]:
    return run_tiled(q, k, v, q_starts, k_starts, Options(*given))  # type: ignore[arg-type]


run_attention = define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? q_starts, Tensor? k_starts, "
    "float scale, bool is_causal, int window, int most_queries) -> (Tensor, Tensor)",
    _run,
    lambda q, *others: empty_results(q),
)
