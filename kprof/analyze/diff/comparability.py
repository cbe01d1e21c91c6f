"""The reasons why two runs cannot be compared, or only with doubt."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import numpy as np

from kprof.analyze.attribution.overlap import allot_busy_time
from kprof.analyze.attribution.steps import (
    denominator,
    find_steps,
    outside_steps,
    rule_of,
    time_steps,
)
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.energy import around, devices_in, readings
from kprof.analyze.roofline.utilisation import ENOUGH_KNOWN, measure_known_work
from kprof.trace import Caveat, Trace

# The doubt that comes before every percentage.
DEVICES_DIFFER = "devices_differ"
# Clocks, or work, that differ by more than this are named.
DIFFERENT_CLOCK = 0.02
DIFFERENT_WORK = 0.02
# Shares of time that differ by more than this are named.
MUCH = 0.05
# How many steps there are stands beside their spread.
SHOWN_ANYWAY = ("Steps", "GPU activity")
COMPUTING = ("gemm", "attention", "convolution")


def find_obstacle(a: Trace, b: Trace) -> tuple[str, str] | None:
    """Return why nothing sensible can be said of two analyzed traces, and the fix."""
    if a.is_host_only != b.is_host_only:
        first, second = (
            ("host operators", "a GPU") if a.is_host_only else ("a GPU", "host operators")
        )
        return (
            f"A is about {first} and B about {second}: their times are not of the same thing",
            "record both on a machine with a GPU, or both without",
        )
    if a.has_timeline != b.has_timeline:
        untimed, other = ("A", "B") if b.has_timeline else ("B", "A")
        why = a.meta.untimed or b.meta.untimed
        return (
            f"{untimed} has no timeline and {other} has one: {why}",
            "record both in the same way",
        )
    marked = bool(find_steps(a)), bool(find_steps(b))
    if marked[0] != marked[1]:
        lacking, other = ("B", "A") if marked[0] else ("A", "B")
        return (
            f"{other} has steps and {lacking} has none, so it is unknown how much of {lacking}'s "
            f"window is one step of {other}",
            'record both with `kprof run`, or name the steps: kprof.range("step")',
        )
    return None


def find_doubts(a: Trace, b: Trace) -> list[Caveat]:
    """Return what sets the runs apart besides what was changed on purpose, as sentences."""
    return [*_machines(a, b), *_clocks(a, b), *_steps(a, b), *_work(a, b), *_audits(a, b)]


def _both(a: Trace, b: Trace) -> tuple[tuple[str, Trace], tuple[str, Trace]]:
    return ("A", a), ("B", b)


def _machines(a: Trace, b: Trace) -> Iterator[Caveat]:
    gpus = [", ".join(dict.fromkeys(gpu.name for gpu in trace.gpus)) for trace in (a, b)]
    if gpus[0] != gpus[1]:
        names = [name or "a device that the trace does not name" for name in gpus]
        yield Caveat(DEVICES_DIFFER, f"The devices differ: {names[0]} in A, {names[1]} in B.")
    numbers = a.meta.num_all_ranks, b.meta.num_all_ranks
    if numbers[0] != numbers[1]:
        yield Caveat(
            "ranks_differ",
            f"A has {numbers[0]:,} and B {numbers[1]:,} ranks: a step is that of the slowest, and "
            "a rank's part of the work need not be the same.",
        )
    if a.meta.tool != b.meta.tool:
        yield Caveat(
            "tools_differ",
            f"A was recorded by {a.meta.tool} and B by {b.meta.tool}, which name operators "
            "differently and cost the host differently.",
        )


def _clocks(a: Trace, b: Trace) -> Iterator[Caveat]:
    if a.is_host_only:
        return
    means = [_mean_clock(trace) for trace in (a, b)]
    unknown = [name for (name, _), mean in zip(_both(a, b), means, strict=True) if mean is None]
    if unknown:
        yield Caveat(
            "clock_unknown",
            f"The GPU's clock is not known of {' and '.join(unknown)}: part of the difference may "
            "be the clock's. `kprof run` samples it.",
        )
    elif means[0] and means[1] and abs(means[1] / means[0] - 1) > DIFFERENT_CLOCK:
        yield Caveat(
            "clocks_differ",
            f"The GPU ran at {means[0]:,.0f} MHz in A and at {means[1]:,.0f} MHz in B, which "
            "changes the time of whatever computes.",
        )


def _mean_clock(trace: Trace) -> float | None:
    """Return the mean SM clock around the window over the GPUs sampled; None where unknown."""
    start = trace.kernels["start_ns"]
    bounds = int(start.min()), int((start + trace.kernels["duration_ns"]).max())
    values = [
        around(readings(trace.samples, "nvml", "sm_clock_mhz", device), *bounds).value
        for device in devices_in(trace.samples, "nvml")
    ]
    known = np.concatenate(values) if values else np.array([])
    return float(known.mean()) if len(known) else None


def _steps(a: Trace, b: Trace) -> Iterator[Caveat]:
    if not a.has_timeline:
        yield Caveat(
            "no_timeline",
            "Neither has a timeline: the comparison is of sums of device time, without idle time.",
        )
    rules = [
        trace.meta.recording.step_rule if trace.meta.recording else rule_of(trace.ranges)
        for trace in (a, b)
    ]
    if not find_steps(a):
        yield Caveat(
            "no_steps",
            "No step is marked: whole windows are compared, which tells something only if both "
            "did the same work.",
        )
    elif rules[0] != rules[1]:
        told = [rule.rstrip(".") for rule in rules]
        yield Caveat(
            "step_rules_differ", f"A step is not told by the same rule. A: {told[0]}. B: {told[1]}."
        )
    yield from _apart(a, b)
    spans = [(min(t), max(t)) for t in (time_steps(x).recorded_ns for x in (a, b)) if t]
    if len(set(spans)) == 2 and max(spans)[0] <= min(spans)[1]:
        yield Caveat(
            "steps_overlap",
            "Some steps of the slower run are as short as some of the faster one: the difference "
            "is within what the steps of one run differ by.",
        )


def _apart(a: Trace, b: Trace) -> Iterator[Caveat]:
    """Tell where the tables split much less, or more, time than the steps took."""
    for name, trace in _both(a, b):
        took, step_ns = time_steps(trace), denominator(trace).step_ns
        if not any(took.recorded_ns):
            continue
        apart = step_ns / fmean(took.recorded_ns) - 1
        if abs(apart) > MUCH:
            yield Caveat(
                "tables_and_steps",
                f"{name}'s tables split {100 * abs(apart):.1f} % "
                f"{'more' if apart > 0 else 'less'} time than its steps took by {took.clock}: part "
                f"of {'it is of no step' if apart > 0 else 'these is in no table'}.",
            )


def _work(a: Trace, b: Trace) -> Iterator[Caveat]:
    types = [_types(trace) for trace in (a, b)]
    names = sorted(types[0].keys() | types[1].keys())
    if types[0] and types[1]:
        apart = max(abs(types[0].get(name, 0) - types[1].get(name, 0)) for name in names)
        if apart > MUCH:
            told = [
                ", ".join(
                    f"{100 * share:.0f} % {kind}" for kind, share in of.items() if share > 0.01
                )
                for of in types
            ]
            yield Caveat(
                "types_differ",
                f"Products are computed in other types: {told[0]} in A, {told[1]} in B, by time.",
            )
    flops = [_flops_of_step(trace) for trace in (a, b)]
    if flops[0] and flops[1] and abs(flops[1] / flops[0] - 1) > DIFFERENT_WORK:
        yield Caveat(
            "work_differs",
            f"A step of B does {flops[1] / flops[0]:.2f} times the floating-point operations of "
            "one of A: the two do not do the same work, or not by the same method.",
        )


def _types(trace: Trace) -> dict[str, float]:
    """Return the share of the matrix multiplications' time by their type, largest first."""
    kernels = trace.kernels.assign(duration_ns=allot_busy_time(trace.kernels))
    rows = kernels[(kernels["kind"].isin(COMPUTING) & kernels["dtype"].notna()).to_numpy()]
    sums = rows.groupby("dtype", observed=True)["duration_ns"].sum().sort_values(ascending=False)
    return {str(name): float(time_ns / sums.sum()) for name, time_ns in sums.items() if time_ns}


def _flops_of_step(trace: Trace) -> float | None:
    """Return the operations of a step; None where the work of too much is not known."""
    if measure_known_work(trace).unknown > 1 - ENOUGH_KNOWN:
        return None
    flops = trace.kernels["flops"].to_numpy(np.float64, na_value=0.0)[~outside_steps(trace)]
    return float(flops.sum()) / max(len(find_steps(trace)), 1)


def _audits(a: Trace, b: Trace) -> Iterator[Caveat]:
    """Tell in one sentence a run what its audit found harmful."""
    for name, trace in _both(a, b):
        harmful = [
            check
            for check in audit(trace)
            if check.verdict in ("limited", "bad") and check.name not in SHOWN_ANYWAY
        ]
        told = "; ".join(f"{check.name}, {check.verdict}: {check.evidence}" for check in harmful)
        if told:
            yield Caveat("capture", f"The capture of {name} is not beyond doubt. {told}.")
