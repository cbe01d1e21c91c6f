"""Split reductions in one launch: several CTAs sum a part each, the last to arrive merges them.

No second launch is needed. Which CTA is the last differs from run to run; its result does not.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl

from kprof.kernels.runtime import IS_INTERPRETED

# Of four bytes each, for all captured calls.
NUM_COUNTERS = 1 << 20
# A call's counters begin at a multiple of 16 bytes, which Triton assumes.
STEP = 4


@triton.jit
def part_length(length, most, BLOCK: tl.constexpr, LEAST: tl.constexpr) -> tl.tensor:
    """Return the length of each of at most `most` parts: whole blocks, and at least LEAST.

    With a fixed `most` it depends on the length alone, so the order of sums does, too.
    """
    blocks = tl.cdiv(tl.cdiv(length, most), BLOCK)
    return tl.maximum(blocks * BLOCK, LEAST)


@triton.jit
def is_last_to_arrive(counter, count) -> tl.tensor:
    """Tell whether this is the last of `count` CTAs to arrive; the counter is 0 again then.

    The last CTA sees what the others stored before they arrived.
    """
    # All threads store before one of them counts, and load after it has counted.
    tl.debug_barrier()
    num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = num_before == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


class Counters:
    """Arrival counters on one device, 0 between launches.

    Launches that may run at the same time have counters of their own: each stream has some, and so
    has every captured call, whose graph may be replayed on any stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # While Inductor warms up a CUDA graph, this thread allocates in the graph's pool, which is
        # freed later.
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
    """Return zeros that are visible to every stream."""
    zeros = torch.zeros(count, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return zeros


def _nodes_zeros(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros that a captured graph clears in each replay."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


_counters: dict[torch.device, Counters] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """Return a counter for each of `count` groups of CTAs of one launch."""
    known = _counters.get(device)
    if known is None and device.type == "cuda" and _is_capturing():
        return _nodes_zeros(count, device)
    if known is None:
        known = _counters[device] = Counters(device)
    return known.take(count)
