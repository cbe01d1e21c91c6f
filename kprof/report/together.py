"""Whose times are added up, in words."""

from __future__ import annotations

from kprof.analyze.summary import count_gpus
from kprof.trace import Trace


def of_all(trace: Trace) -> str:
    """Return that times are of all GPUs, or ranks, together; nothing where there is one of them."""
    if has_several_gpus_a_rank(trace):
        return " of all GPUs together"
    return " of all ranks together" if trace.meta.num_ranks > 1 else ""


def has_several_gpus_a_rank(trace: Trace) -> bool:
    """Tell whether one process drove several GPUs."""
    return count_gpus(trace.kernels) > max(int(trace.kernels["rank"].nunique()), 1)
