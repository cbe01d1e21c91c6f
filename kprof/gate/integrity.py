"""L0: does the new code do what any function must, whatever it computes?

Every check is made of the replaced code, too: what the customer's own code does as well is noted,
and not held against the new one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from kprof.gate.broken import GpuBrokenError, blaming
from kprof.gate.honesty import find_dishonesty, find_patched_timers
from kprof.gate.independence import (
    are_threads_tried,
    find_kept_memory,
    find_order_faults,
    find_other_forms,
    find_shared_results,
    find_side_effects,
    find_thread_faults,
    is_plain,
)
from kprof.gate.inputs import are_other_bits, empty_shape, read
from kprof.gate.memory import LARGE_BYTE, poison_freed
from kprof.gate.numerics import find_wrong
from kprof.gate.observe import ModesKept, Observed, draw, gives_all, observe, observe_truth
from kprof.gate.result import Level, Measure, judge, not_run
from kprof.gate.rows import count_variant_rows
from kprof.gate.streams import find_stream_faults
from kprof.gate.subject import Case, Function, Subject, Timing

NUM_REPEATS = 4

Check = Callable[[Subject, Function, Case], Iterator[str]]


def check_integrity(subject: Subject, timing: Timing | None = None) -> Level:
    """Look for everything that makes a result untrustworthy before its accuracy counts (L0)."""
    cases = [case for case in integrity_cases(subject) if _is_accepted(subject, case)]
    if not cases:
        return not_run("L0", "the replaced code takes none of the cases")
    notes: list[str] = []
    measures = [_count(name, look, subject, cases, notes) for name, look in CHECKS.items()]
    if all(one.is_met for one in measures):
        # Of code that is wrong at once, many calls tell nothing more.
        measures += [_count(name, look, subject, cases, notes) for name, look in BEYOND.items()]
    # What was patched stays so, whoever did it: no time that is measured now is one.
    patched = find_patched_timers()
    measures.append(
        Measure("clocks are genuine", len(patched), 0, None, "faults", where=", ".join(patched))
    )
    variant = count_variant_rows(subject, cases)
    if variant is not None:
        measures += variant.measures()
        notes.append(variant.sentence())
    notes += _unseen(subject, timing)
    if timing is not None:
        floor = Measure(
            "time against its floor", timing.measured_ns, timing.floor_ns, None, "ns", "higher"
        )
        measures.append(floor)
    return judge("L0", measures, f"{len(cases)} cases", notes=notes)


def integrity_cases(subject: Subject) -> list[Case]:
    """Return the cases: every distribution, every layout, and no row at all, in every dtype."""
    shape, empty = subject.shapes[0], empty_shape(subject)
    cases = []
    for dtype in subject.dtypes:
        start = Case(shape, dtype, seed=17)
        cases += [replace(start, distribution=name) for name in subject.distributions]
        cases += [replace(start, layout=name) for name in subject.layouts if name != "far"]
        cases += [replace(start, shape=empty)] if empty else []
    return list(dict.fromkeys(cases))


def _is_accepted(subject: Subject, case: Case) -> bool:
    """Tell whether the replaced code takes a case; results that it spoils are judged below."""
    arguments = draw(subject, case)
    observed = observe(subject.replaced, subject, case, arguments)
    if observed.raised is not None or observed.faults:
        return observed.raised is None
    return gives_all(observed, observe_truth(subject, case, arguments))


def _count(
    name: str, look: Check, subject: Subject, cases: list[Case], notes: list[str]
) -> Measure:
    """Return on how many cases the new code fails a check, beside the replaced code."""
    new = [
        (fault, case) for case in cases for fault in _faults_of(look, subject, subject.new, case)
    ]
    if not new:
        return Measure(name, 0, 0, None, "faults")
    own = [fault for case in cases for fault in _faults_of(look, subject, subject.replaced, case)]
    if own:
        notes.append(f"{name}: the replaced code does so, too: {own[0]}")
    # Each sort of fault by itself: to write where it must not excuses nobody who is wrong.
    excused = Counter(map(_sort_of, own))
    found = [fault for fault in new if not _is_excused(fault[0], excused)]
    fault, case = (found or new)[0]
    return Measure(name, len(found), 0, len(own), "faults", where=f"{fault} ({case})")


def _is_excused(fault: str, excused: Counter[str]) -> bool:
    """Tell whether one more fault of this sort is left to be excused, and count it."""
    excused[_sort_of(fault)] -= 1
    return excused[_sort_of(fault)] >= 0


def _sort_of(fault: str) -> str:
    """Return what a fault says, whatever its numbers."""
    return re.sub(r"\d[\d.e+-]*", "#", fault)


def _faults_of(look: Check, subject: Subject, function: Function, case: Case) -> list[str]:
    try:
        # A call that nothing else watches may be the one that breaks the GPU.
        with blaming(function, subject, str(case)), ModesKept(subject.device) as modes:
            faults = list(look(subject, function, case))
        return faults + modes.faults
    except GpuBrokenError:
        raise
    except Exception as raised:  # noqa: BLE001 - whatever the function raises is a fault of its own
        return [f"raises {type(raised).__name__}: {str(raised).splitlines()[0]}"]


def _look_at_calls(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that are wrong beyond any rounding, writes that are not allowed, and raising."""
    arguments = draw(subject, case)
    # Code for inference is often another path than that which keeps what a gradient needs.
    ways = [replace(subject, differentiable=()), *([subject] if subject.differentiable else [])]
    if is_plain(case) and len(subject.differentiable) > 1:
        ways += [replace(subject, differentiable=(i,)) for i in subject.differentiable]
    for way in ways:
        observed = observe(function, way, case, arguments)
        replaced = observe(subject.replaced, way, case, arguments)
        fault = find_wrong(subject, observed, replaced, observe_truth(way, case, arguments))
        if fault:
            yield fault
            return


def _look_at_repeats(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that are not the same every time."""
    if not subject.is_deterministic:
        return
    arguments = draw(subject, case)
    first = observe(function, subject, case, arguments)
    for _ in range(NUM_REPEATS - 1):
        other = _differing(first, observe(function, subject, case, arguments))
        if other:
            yield f"{other} differs from run to run"
            return


def _look_at_poison(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that show what memory held before: elements that nobody wrote."""
    arguments = draw(subject, case)
    first = observe(function, subject, case, arguments)
    poison_freed(first.results.values(), LARGE_BYTE)
    other = observe(function, subject, case, arguments, byte=LARGE_BYTE)
    if not subject.is_deterministic:
        # Bits differ anyway; values beyond any rounding do not.
        replaced = observe(subject.replaced, subject, case, arguments)
        fault = find_wrong(subject, other, replaced, observe_truth(subject, case, arguments))
        if fault:
            yield f"{fault} in memory that held other values"
        return
    differing = _differing(first, other)
    if differing and _differing(first, observe(function, subject, case, arguments)) is None:
        yield f"{differing} shows uninitialised memory"


def _differing(one: Observed, other: Observed) -> str | None:
    """Return the first result whose bits differ, None where all are the same."""
    missing = next((name for name in one.results if name not in other.results), None)
    if missing:
        return missing
    is_other = read([are_other_bits(r, other.results[name]) for name, r in one.results.items()])
    return next((name for name, is_so in zip(one.results, is_other, strict=True) if is_so), None)


CHECKS: dict[str, Check] = {
    "right, and nothing else written": _look_at_calls,
    "the same every time": _look_at_repeats,
    "every element written": _look_at_poison,
    "computes when called, on what it is given": find_dishonesty,
    "streams and graphs": find_stream_faults,
}
BEYOND: dict[str, Check] = {
    "results belong to the caller": find_shared_results,
    "nothing else changed": find_side_effects,
    "in the form of the replaced code's": find_other_forms,
    "whatever was called before": find_order_faults,
    "nothing kept": find_kept_memory,
    "on two threads": find_thread_faults,
}
"""Of more than one call, or of what stands beside the values; made where single calls are right."""


def _unseen(subject: Subject, timing: Timing | None) -> Iterator[str]:
    """Say what could not be looked at."""
    if subject.device == "cpu":
        yield "streams and CUDA graphs were not looked at: they need a CUDA device"
    if not are_threads_tried(subject):
        yield "calls on two threads were not looked at: Triton's interpreter runs one at a time"
    if timing is None:
        yield "time was not held against its floor: none was given"
    if not subject.is_deterministic:
        yield "declared: results may differ from run to run"
    if subject.has_free_strides:
        yield "declared: the caller makes results contiguous, so their strides were not compared"
