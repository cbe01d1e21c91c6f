"""Comparable: which conditions keep two results from being held against one another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kprof.analyze.sla.judge import PER_REQUEST
from kprof.comparison import Comparison
from kprof.engagement import ServiceLevelAdded

# How many calls or steps make a sample follows from how long they take.
_COUNTED = re.compile(r"\d[\d,.]*( \w+)?")
_OF_REQUESTS = ("attainment", "goodput")


def differing_comparisons(baseline: Comparison, candidate: Comparison) -> str:
    """Say what keeps two comparisons from being of one GPU, timed alike; empty: nothing."""
    # In small letters as `kprof.ab_test` once wrote it.
    gpus = [one.facts.get("GPU") or one.facts.get("gpu", "none") for one in (baseline, candidate)]
    if gpus[0] != gpus[1]:
        return f"the GPU differs: {gpus[0]} and {gpus[1]}"
    timed = [one.protocol for one in (baseline, candidate)]
    if _COUNTED.sub("", timed[0]) != _COUNTED.sub("", timed[1]):
        return f"how it was timed differs: {timed[0]} and {timed[1]}"
    return ""


def differing_services(baseline: ServiceLevelAdded, candidate: ServiceLevelAdded) -> str:
    """Say what keeps two service levels from being of the same load and GPUs; empty: nothing."""
    loads = [_loads(one.said) for one in (baseline, candidate)]
    if loads[0] != loads[1]:
        return f"the load differs: {'; '.join(loads[0])} and {'; '.join(loads[1])}"
    if any(run.get("loop") == "unknown" for run in _runs(baseline.said)):
        return "under which load they were measured is not known"
    gpus = [one.said.get("gpus") for one in (baseline, candidate)]
    if gpus[0] != gpus[1]:
        before, now = (one or "not told" for one in gpus)
        return f"the number of GPUs differs: {before} and {now}"
    return ""


def _loads(said: Mapping[str, Any]) -> list[str]:
    told = {f"{run.get('load')} ({run.get('tool')}, {run.get('loop')} loop)" for run in _runs(said)}
    return sorted(told) or ["no requests"]


def _runs(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return said.get("runs") or []


def differing_limits(baseline: ServiceLevelAdded, candidate: ServiceLevelAdded, target: str) -> str:
    """Say in which limits a target differs that counts requests within the others; empty: none."""
    if not target.startswith(_OF_REQUESTS):
        return ""
    before, now = (_limits(one.said) for one in (baseline, candidate))
    if before == now:
        return ""
    return f"the limits that it counts requests by differ: {before or 'none'} and {now or 'none'}"


def _limits(said: Mapping[str, Any]) -> str:
    found = {one["target"] for one in said["targets"] if one.get("metric") in PER_REQUEST}
    return ", ".join(sorted(found))
