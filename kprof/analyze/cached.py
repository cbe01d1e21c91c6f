"""What the cache before the memory served or kept, so that the memory did not move it."""

from __future__ import annotations

import numpy as np

from kprof.device import Device

LEFT_SHARE = 0.5
"""Of the cache, what one launch leaves in it for the next at most.

The second-level cache of recent NVIDIA GPUs stands in two halves, each before its own SMs, and a
line that both use stands in both. Launches on an H200 with more to write than that left 9 to 27 MB
of its 60 MiB unwritten as they ended (benchmarks/results/classify_vs_ncu_h200_*.json).
"""


def copy_ns(device: Device, num_bytes: np.ndarray) -> np.ndarray:
    """Return the time of a copy that moves so many bytes and stays in the cache.

    Straight lines through the measured copies; NaN beyond the cache, or where none was measured.
    """
    copies = np.array(device.cached_copies, dtype=float).reshape(-1, 2)
    if len(copies) < 2 or device.cache_bytes is None:
        return np.full(len(num_bytes), np.nan)
    size, time_ns = copies.T
    piece = np.clip(np.searchsorted(size, num_bytes) - 1, 0, len(size) - 2)
    slope = np.diff(time_ns) / np.diff(size)
    found = time_ns[piece] + (num_bytes - size[piece]) * slope[piece]
    return np.where(num_bytes <= device.cache_bytes, found, np.nan)


def is_served(
    device: Device, read: np.ndarray, moved: np.ndarray, time_ns: np.ndarray, share: float
) -> np.ndarray:
    """Tell what came out of the cache: it fits, and reached `share` of a copy within the cache."""
    if device.cache_bytes is None:
        return np.zeros(len(moved), dtype=bool)
    fits = read <= LEFT_SHARE * device.cache_bytes
    return np.asarray(fits & (moved > 0) & (copy_ns(device, moved) >= share * time_ns))


def least_from_memory(device: Device, read: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return what of the bytes moved cannot have been in the cache when the launch began."""
    return np.asarray(moved - np.minimum(read, LEFT_SHARE * (device.cache_bytes or 0)))


def kept_bytes(device: Device, written: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Return what a launch had not yet written to the memory when it ended, of what it wrote.

    The cache then holds what was touched last, read or written alike.
    """
    touched_last = np.minimum(moved, LEFT_SHARE * (device.cache_bytes or 0))
    return np.asarray(touched_last * written / np.maximum(moved, 1))
