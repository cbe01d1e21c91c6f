"""Builds recordings of ranks that take part in collectives, each on a clock of its own."""

import random
from dataclasses import replace

from tests.traces import trace_of

US = 1_000
MS = 1_000_000


def recordings(groups, offsets_ns, *, number=40, seed=0, numbered=True, **how):
    """Return a trace for each rank; rank r's clock reads `offsets_ns[r]` more than the true time.

    `groups` lists the ranks of each process group. Ranks reach a collective within `apart_ns` of
    each other, the last one at random; it ends on all within `skew_ns` of each other.
    """
    rng = random.Random(seed)
    rows = {rank: [] for rank in range(len(offsets_ns))}
    now = 10**12
    for sequence in range(number):
        for name, ranks in enumerate(groups):
            now += rng.randint(500 * US, how.get("pause_ns", 3 * MS))
            begun = {rank: now + rng.randint(0, how.get("apart_ns", 200 * US)) for rank in ranks}
            ended = max(begun.values()) + how.get("takes_ns", 30 * US)
            for rank, start in begun.items():
                end = ended + rng.randint(0, how.get("skew_ns", 8 * US))
                rows[rank].append(
                    {
                        "rank": rank,
                        "start_ns": start + offsets_ns[rank],
                        "duration_ns": end - start,
                        "collective": how.get("collective", "allreduce"),
                        "group": f"{name} {ranks}",
                        "group_sequence": sequence if numbered else None,
                    }
                )
            now = ended
    return [trace_of(*rows[rank]) for rank in rows]


def without(trace, rows):
    """Return a trace without the kernels at these places."""
    return replace(trace, kernels=trace.kernels.drop(index=rows).reset_index(drop=True))
