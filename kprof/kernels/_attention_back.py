"""Gradients of attention of many queries on the host: how the work is cut, and the operator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kprof.kernels._attention import Options, Tiled
from kprof.kernels._attention_back_keys import attend_back_to_keys
from kprof.kernels._attention_back_queries import attend_back_to_queries
from kprof.kernels._launch import Launcher, alignments, kind_of
from kprof.kernels._operator import define


class Given(NamedTuple):
    """What a backward pass begins with: gradients that arrive, and what the forward pass kept."""

    dy: Tensor
    dlse: Tensor | None
    """Of the log-sum-exps; None: nobody used them."""
    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    lse: Tensor
    q_starts: Tensor | None
    k_starts: Tensor | None


def queries_tiled_for(dim: int) -> Tiled:
    """Return the schedule for the queries' gradient, the fastest on an H200; not so of 256."""
    if dim <= 64:
        return Tiled(64, 64, 4, 3)
    return Tiled(64, 64, 4, 2) if dim <= 128 else Tiled(64, 32, 8, 2)


def keys_tiled_for(dim: int) -> Tiled:
    """Return the schedule for the gradients of keys and values, as for queries."""
    if dim <= 64:
        return Tiled(64, 64, 4, 2)
    # That of 64 is up to 15 % faster here, too, but spills.
    return Tiled(64, 128, 8, 2) if dim <= 128 else Tiled(16, 64, 8, 3)


_launch_queries = Launcher(attend_back_to_queries)
_launch_keys = Launcher(attend_back_to_keys)


def run_tiled_back(given: Given, options: Options, most_keys: int) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, by plain Triton."""
    dq, dk, dv = empty_gradients(given)
    rows = ("dy", "q", "k", "v", "y")
    found = given._replace(**{one: _side_by_side(getattr(given, one)) for one in rows})
    dlse = None if given.dlse is None else given.dlse.contiguous()
    found = found._replace(dlse=dlse, lse=given.lse.contiguous())
    # What the gradients of a query's scores are reduced by: its weights' mean of them.
    share = torch.empty_like(found.lse)
    if dq.numel():
        _back_to_queries(found, options, dq, share)
    if dk.numel():
        _back_to_keys(found, options, dk, dv, share, most_keys)
    return dq, dk, dv


def _back_to_queries(given: Given, options: Options, dq: Tensor, share: Tensor) -> None:
    dy, dlse, q, k, v, y, lse, q_starts, k_starts = given
    tensors = (q, k, v, y, dy, lse, dlse, q_starts, k_starts, dq, share)
    steps = [step for one in (q, k, v, y, dy, dq) for step in one.stride()[:3]]
    most = options.most_queries if q_starts is not None else q.shape[2]
    schedule = queries_tiled_for(q.shape[3])
    tiles = -(-most // schedule.rows), q.shape[1]
    _launch(_launch_queries, given, options, schedule, tensors, steps, tiles)


def _back_to_keys(
    given: Given, options: Options, dk: Tensor, dv: Tensor, share: Tensor, most_keys: int
) -> None:
    dy, _, q, k, v, _, lse, q_starts, k_starts = given
    tensors = (q, k, v, dy, lse, share, q_starts, k_starts, dk, dv)
    steps = [step for one in (q, k, v, dy, dk, dv) for step in one.stride()[:3]]
    most = most_keys if k_starts is not None else k.shape[2]
    schedule = keys_tiled_for(q.shape[3])
    tiles = -(-most // schedule.keys), k.shape[1]
    _launch(_launch_keys, given, options, schedule, tensors, steps, tiles)


def _launch(
    launcher: Launcher,
    given: Given,
    options: Options,
    schedule: Tiled,
    tensors: tuple[Tensor | None, ...],
    steps: list[int],
    tiles: tuple[int, int],
) -> None:
    call = (kind_of(*tensors), options, schedule, tiles)
    if launcher.again(call, tensors):
        return
    q, k, q_starts = given.q, given.k, given.q_starts
    num_sequences = q.shape[0] if q_starts is None else q_starts.numel() - 1
    left, right = options.bounds(q.shape[2], k.shape[2])
    constants = (
        *(q.shape[1] // k.shape[1], q_starts is not None, left is not None, right is not None),
        *(q.shape[3], schedule.rows, schedule.keys, schedule.stages),
    )
    types = tuple(None if one is None else one.dtype for one in tensors)
    key = (q.device, types, constants, schedule.warps, alignments(tensors, *steps))
    numbers = (q.shape[2], k.shape[2], left or 0, right or 0)
    arguments = (*tensors, *steps, options.scale, *numbers, *constants)
    grid = (*tiles, num_sequences)
    launcher(key, grid, arguments, {"num_warps": schedule.warps}, call=call, tensors=tensors)


def empty_gradients(given: Given) -> tuple[Tensor, ...]:
    """Return places for the gradients, in the order in memory of what they are gradients of.

    Between sequences there may be tokens of none, whose gradient is 0.
    """
    make = torch.empty_like if given.q_starts is None else torch.zeros_like
    found = (make(one) for one in (given.q, given.k, given.v))
    return tuple(
        one if one.stride(-1) == 1 else make(one, memory_format=torch.contiguous_format)
        for one in found
    )


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(
    dy: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    *options: float,
) -> tuple[Tensor, ...]:
    given = Given(dy, dlse, q, k, v, y, lse, q_starts, k_starts)
    *others, most_keys = options
    return run_tiled_back(given, Options(*others), int(most_keys))  # type: ignore[arg-type]


def _empty(*arguments: Tensor) -> tuple[Tensor, ...]:
    return empty_gradients(Given(*arguments[: len(Given._fields)]))


SCHEMA = (
    "(Tensor dy, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, "
    "Tensor? q_starts, Tensor? k_starts, float scale, bool is_causal, int window, "
    "int most_queries, int most_keys) -> (Tensor, Tensor, Tensor)"
)
run_attention_back = define(f"attention_backward{SCHEMA}", _run, _empty)
