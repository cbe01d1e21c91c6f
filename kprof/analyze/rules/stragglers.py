"""stragglers: one rank comes last to the collectives, and all others wait for it."""

from __future__ import annotations

import numpy as np

from kprof.analyze.claims import in_words, percent
from kprof.analyze.evidence import count_steps, share_of_whole, whole_of, why_no_device
from kprof.analyze.idle.summary import find_exposed_waits
from kprof.analyze.trust.unanswered import Unanswered, why_no_timeline
from kprof.finding import Finding, Remedy
from kprof.trace import Trace

# Ranks are never quite alike: a few percent of a step pass until the last has come.
LEAST_SHARE = 0.03
# The rank that others wait for waits at most this part of what the others do.
MOST_OF_OTHERS = 0.5


def why_no_ranks(trace: Trace) -> Unanswered | None:
    """Say why nobody can tell which rank others wait for."""
    if trace.kernels["rank"].nunique() > 1 and find_exposed_waits(trace) is not None:
        return None
    return Unanswered(
        "Which rank do the others wait for?",
        "the collectives of several ranks were not recorded together",
        "record all ranks of the run, as `kprof run -- torchrun …` does",
    )


NEEDS = (why_no_device, why_no_timeline, why_no_ranks)


def check(trace: Trace) -> list[Finding]:
    """Find a rank that waits much less than the others: it is the one that they wait for."""
    waits = find_exposed_waits(trace) or []
    if len(waits) < 2:
        return []
    exposed = np.array([wait.exposed_ns for wait in waits], dtype=np.int64)
    last = int(exposed.argmin())
    # Were it in time, the others would still wait for the next to last.
    next_ns = float(np.delete(exposed, last).min())
    lost_ns = next_ns - float(exposed[last])
    share = share_of_whole(trace, lost_ns * trace.kernels["rank"].nunique())
    if share < LEAST_SHARE or exposed[last] > MOST_OF_OTHERS * next_ns:
        return []
    steps = max(count_steps(trace) // len(waits), 1)
    kernels = trace.kernels
    is_waiting = kernels["collective"].notna() & (kernels["rank"] != waits[last].rank)
    rows = np.flatnonzero(is_waiting.to_numpy(bool))
    took_ns = int(kernels["duration_ns"].to_numpy(np.int64)[rows].sum())
    claim = (
        f"Rank {waits[last].rank} comes last to the collectives: the other {len(waits) - 1} wait "
        f"at least {in_words(lost_ns / steps)} longer than it in {whole_of(trace)} "
        f"({percent(share)} of {whole_of(trace)}), with nothing else to do"
    )
    lost_in_all = round(lost_ns * (len(waits) - 1))
    return [
        Finding(
            rule="stragglers",
            claim=claim,
            confidence="medium",
            effort="medium",
            rows=tuple(rows.tolist()),
            details=tuple(
                f"rank {wait.rank} waits {in_words(wait.exposed_ns / steps)} in "
                f"{wait.num_collectives / steps:,.0f} collectives"
                for wait in waits
            ),
            remedy=Remedy(
                best_ns=max(took_ns - lost_in_all, 0), modest_ns=max(took_ns - lost_in_all // 2, 0)
            ),
        )
    ]
