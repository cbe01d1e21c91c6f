"""Splitting one sum among programs in one launch: who does what, and who of them is the last.

The last to arrive finds everything that the others stored and puts it together, so that no
second launch is needed. Who is last differs from run to run; what it computes does not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl

from kprof.kernels.runtime import IS_INTERPRETED

# Of four bytes each, for all calls that were ever captured.
NUM_COUNTERS = 1 << 20
# A call's counters begin at a multiple of 16 bytes, as Triton takes for granted.
STEP = 4


@triton.jit
def part_length(length, most, BLOCK: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return how much each of at most `most` parts gets: whole blocks, and at least LEAST.

    Which part computes what depends on this alone: where `most` is fixed, on nothing but length.
    """
    blocks = tl.cdiv(tl.cdiv(length, most), BLOCK)
    return tl.maximum(blocks * BLOCK, LEAST)


@triton.jit
def is_last_to_arrive(counter, count) -> tl.tensor:
    """Tell whether `count` programs have been here with this one; the counter is 0 again then.

    What the other programs stored before they came is visible to the last one after this.
    """
    # Every thread has stored before one of them counts; and counted, before any of them loads.
    tl.debug_barrier()
    num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = num_before == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


class Counters:
    """Zeros on one device that programs count in, and leave as zeros.

    Launches that may run at the same time have counters of their own: a stream's are its own, and
    so are those of every captured call, whose graph may be replayed anywhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # While Inductor warms a CUDA graph up, what this thread allocates lies in the graph's pool,
        # which may hold nothing that stays.
        with ThreadPoolExecutor(1) as other:
            self._arena = other.submit(_zeros, NUM_COUNTERS, device).result()
        self._num_given = 0
        self._of_stream: dict[int, torch.Tensor] = {}

    def take(self, count: int) -> torch.Tensor:
        """Return counters for one launch on the current stream."""
        if IS_INTERPRETED or self._device.type != "cuda":
            return self._arena
        if _is_capturing():
            return self._give(count)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        kept = self._of_stream.get(stream)
        if kept is None or kept.numel() < count:
            self._of_stream[stream] = kept = self._give(max(count, 2_048))
        return kept

    def _give(self, count: int) -> torch.Tensor:
        first = self._num_given
        if first + count > NUM_COUNTERS:
            return _nodes_zeros(count, self._device)
        self._num_given += -(-count // STEP) * STEP
        return self._arena[first : first + count]


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros that every stream finds to be zeros."""
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return zeros


def _nodes_zeros(count: int, device: torch.device) -> torch.Tensor:
    """Return what in a capture becomes a node of the graph, and zeroes them in each replay."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


_counters: dict[torch.device, Counters] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros for `count` groups of programs of one launch to count in."""
    known = _counters.get(device)
    if known is None and device.type == "cuda" and _is_capturing():
        return _nodes_zeros(count, device)
    if known is None:
        known = _counters[device] = Counters(device)
    return known.take(count)
