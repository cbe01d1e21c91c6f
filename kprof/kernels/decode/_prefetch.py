"""The plan by which CTAs prefetch weights into L2: the same distance ahead in the whole step.

The weights of a step are one stream: kernel by kernel, CTA by CTA. A CTA prefetches as many bytes
as it reads, a fixed distance later in the stream, of whichever kernel they are. Behind the end
comes the next step. So memory has work while a kernel waits for the one before it, and no kernel
ends with its weights in L2 and memory idle, as it would with a distance within each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Contiguous ranges that a CTA prefetches; further ones are left out.
PIECES = 4
# Distances that are tried, as shares of L2: beside them, L2 holds the loads in flight.
SHARES_OF_L2 = (0.0, 0.1, 0.2, 0.3)

# Of addresses and lengths, in bytes.
ALIGNMENT = 16

Tile = tuple[int, int]
"""Address and bytes."""


def tiles_of(weights: Sequence[Tensor], rows: int) -> list[list[Tile]]:
    """Return what each CTA reads of one weight after another, `rows` rows a CTA."""
    found: list[list[Tile]] = []
    for weight in weights:
        row = weight.shape[1] * weight.element_size()
        end = weight.data_ptr() + weight.shape[0] * row
        starts = range(weight.data_ptr(), end, rows * row)
        found += [[(start, min(rows * row, end - start))] for start in starts]
    return found


def paired(first: list[list[Tile]], second: list[list[Tile]]) -> list[list[Tile]]:
    """Return the tiles of CTAs that read two weights at once."""
    return [one + other for one, other in zip(first, second, strict=True)]


def plan_of(kernels: Sequence[list[list[Tile]]], distance: int) -> Tensor:
    """Return addresses and bytes of what each CTA of a step prefetches, (CTAs, 2 * PIECES).

    Args:
        kernels: What each CTA of each kernel reads, in the order in which they run.
        distance: Bytes.
    """
    ctas = [cta for kernel in kernels for cta in kernel]
    tiles = [tile for cta in ctas for tile in cta]
    ends = np.cumsum([size for _, size in tiles])
    total = int(ends[-1])
    # Tiles by where they begin, the next step's behind them.
    begins = np.concatenate([[0], ends[:-1]])
    begins = np.concatenate([begins, begins + total])
    sizes = np.array([sum(size for _, size in cta) for cta in ctas])
    edges = np.concatenate([[0], np.cumsum(sizes)]) + distance % total
    places = np.searchsorted(begins, edges)
    plan = np.zeros((len(ctas), PIECES, 2), dtype=np.int64)
    for number, (first, last) in enumerate(pairwise(places)):
        ranges = _merged([tiles[place % len(tiles)] for place in range(first, last)])
        plan[number, : len(ranges)] = ranges
    return torch.from_numpy(plan.reshape(len(ctas), 2 * PIECES))


def _merged(tiles: list[Tile]) -> list[Tile]:
    """Return contiguous ranges of tiles, at most PIECES, none for no tiles."""
    ends: dict[int, int] = {}
    found: list[list[int]] = []
    for address, size in tiles:
        place = ends.pop(address, None)
        if place is None:
            place = len(found)
            found.append([address, 0])
        found[place][1] += size
        ends[found[place][0] + found[place][1]] = place
    kept = [(address, size) for address, size in found[:PIECES]]
    return kept if kept else [(0, 0)]
