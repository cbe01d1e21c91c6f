"""L0: does the new code do what every function must do?

Every check is made of the replaced code, too: its own faults are noted, and not held against the
new code. Checks: single calls, repeats, batch invariance, unwritten memory, streams and CUDA
graphs, and cheats, which look faster than they are. Timing code uses `find_patched_timers` and
`find_wrong_outputs` itself, on the very outputs that it timed.
"""

from __future__ import annotations

import re
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.correctness.broken import GpuBrokenError, blaming
from kprof.kernels.correctness.inputs import are_other_bits, bytes_of, empty_shape, read, same_bits
from kprof.kernels.correctness.isolation import (
    are_threads_tried,
    find_kept_memory,
    find_order_faults,
    find_other_forms,
    find_shared_results,
    find_side_effects,
    find_thread_faults,
    is_plain,
)
from kprof.kernels.correctness.levels import Level, Measure, judge, not_run
from kprof.kernels.correctness.memory import LARGE_BYTE, poison_freed
from kprof.kernels.correctness.numerics import find_wrong
from kprof.kernels.correctness.observe import (
    ModesKept,
    Observed,
    argument_names,
    call_plainly,
    copy_of,
    draw,
    gives_all,
    observe,
    observe_truth,
    snapshot,
    tensors_in,
)
from kprof.kernels.correctness.subject import Case, Function, Subject, Timing


@dataclass(frozen=True)
class VariantRows:
    """How many rows got other bits when they stood alone, of how many."""

    new: int
    replaced: int
    num_rows: int
    is_claimed: bool

    def measures(self) -> Iterator[Measure]:
        """Yield a measure where invariance is claimed; else it is only reported."""
        if self.is_claimed:
            yield Measure(
                "rows that depend on their neighbours", self.new, 0, self.replaced, "rows"
            )

    def sentence(self) -> str:
        """Say what was measured."""
        return (
            f"batch invariance: {self.new} of {self.num_rows} rows get other bits in a smaller "
            f"batch, {self.replaced} in the replaced code"
        )


def count_variant_rows(subject: Subject, cases: Sequence[Case]) -> VariantRows | None:
    """Compare each of the first rows in the full batch, in half of it, and alone.

    None where the subject does not say which arguments have rows.
    """
    if not subject.rows:
        return None
    plain = [c for c in cases if c.layout == "contiguous" and c.distribution != "nonfinite"]
    counts = {"new": 0, "replaced": 0}
    num_rows = 0
    for case in (case for case in plain if case.shape[0] > 1):
        sizes = (case.shape[0] // 2, 1)
        num_rows += sum(sizes)
        for arm, function in (("new", subject.new), ("replaced", subject.replaced)):
            counts[arm] += sum(_rows_count(subject, function, case, size) for size in sizes)
    return VariantRows(counts["new"], counts["replaced"], num_rows, subject.is_batch_invariant)


def _rows_count(subject: Subject, function: Function, case: Case, size: int) -> int:
    """Return how many of the first `size` rows differ when only they are given."""
    forward = replace(subject, differentiable=())
    arguments = draw(subject, case)
    cut = tuple(a[:size].clone() if i in subject.rows else a for i, a in enumerate(arguments))
    whole = observe(function, forward, case, arguments).results
    part = observe(function, forward, case, cut).results
    differing = torch.zeros(size, dtype=torch.bool)
    for name, result in part.items():
        if result.dim() and result.shape[0] == size:
            other = whole.get(name)
            if not result.numel():
                continue
            if other is None or other.dtype != result.dtype:
                differing[:] = True
                continue
            one, two = (bytes_of(each).view(size, -1) for each in (result, other[:size]))
            differing |= (one != two).any(1).cpu()
    return int(differing.sum())


SLEEP_CYCLES = 20_000_000
"""About ten milliseconds: code that does not wait for the stream is far ahead of it."""
NUM_WARM_UPS = 3


def find_stream_faults(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that are wrong on a stream of one's own, or in a replayed graph."""
    is_plain = case.distribution == "normal" and case.layout == "contiguous"
    if not subject.device.startswith("cuda") or not is_plain or 0 in case.shape:
        return
    right = draw(subject, case)
    forward = replace(subject, differentiable=())
    runs = {"on a stream of its own": _on_a_stream, "in a replayed CUDA graph": _in_a_graph}
    for where, run in runs.items():
        try:
            with blaming(function, subject, f"{case}, {where}"):
                new = run(function, subject, case)
        except RuntimeError as error:
            yield f"{where} raises: {error}"
            continue
        replaced = call_plainly(subject.replaced, subject, right)
        truth = observe_truth(forward, case, right)
        fault = find_wrong(subject, new, replaced, truth)
        if fault:
            yield f"{fault} {where}"


def _stale(subject: Subject, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of the arguments that hold zeros, but for those that stay what they are."""
    return tuple(
        a.clone() if i in subject.constant else torch.zeros_like(a) if isinstance(a, Tensor) else a
        for i, a in enumerate(arguments)
    )


def _fill(buffers: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if isinstance(buffer, Tensor):
            buffer.copy_(value)


def _on_a_stream(function: Function, subject: Subject, case: Case) -> Observed:
    """Run on a new stream, on which the inputs are made just before, late."""
    values = draw(subject, case)
    given = _stale(subject, values)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        _fill(given, values)
        # What is copied here, in the stream's order, is what a next kernel would see.
        observed = snapshot(function(*given), given, subject)
    torch.cuda.synchronize()
    return observed


def _in_a_graph(function: Function, subject: Subject, case: Case) -> Observed:
    """Capture a call on other inputs, then replay it on these."""
    values = draw(subject, case)
    given = _stale(subject, values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            function(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = function(*given)
    _fill(given, values)
    graph.replay()
    torch.cuda.synchronize()
    return snapshot(returned, given, subject)


NUM_CALLS = 100
MIN_CALLS = 10
LONG_NS = 2_000_000_000
"""Slow code (a kernel in an interpreter) is called less often than NUM_CALLS."""
LATE_S = 0.02
NUDGED_FROM = 5
CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns")
EVENT_METHODS = ("record", "synchronize", "elapsed_time", "query", "wait")


def find_dishonesty(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find all that the functions below find, on the plain cases."""
    is_plain = case.distribution == "normal" and case.layout == "contiguous"
    if not is_plain or 0 in case.shape:
        return
    forward = replace(subject, differentiable=())
    arguments = draw(subject, case)
    fault = find_wrong_outputs(subject, case, arguments, function(*copy_of(arguments)))
    if fault:
        # What is wrong at once tells nothing about what follows.
        yield fault
        return
    for look in (_find_late, _find_shared, _find_remembered, _find_tired, _find_accumulated):
        # Accumulation needs the gradients; the others look at outputs alone.
        yield from look(subject if look is _find_accumulated else forward, function, case)


def find_patched_timers() -> list[str]:
    """Return the clocks and events that are not those of Python and torch."""
    patched = [f"time.{name}" for name in CLOCKS if not _is_clock(getattr(time, name), name)]
    if torch.cuda.Event.__module__ != "torch.cuda.streams":
        return [*patched, "torch.cuda.Event"]
    for name in EVENT_METHODS:
        if not _is_of_torch(getattr(torch.cuda.Event, name)):
            patched.append(f"torch.cuda.Event.{name}")
    if not _is_of_torch(torch.cuda.synchronize):
        patched.append("torch.cuda.synchronize")
    return [f"replaces {name}" for name in patched]


def _is_clock(function: object, name: str) -> bool:
    return (
        isinstance(function, types.BuiltinFunctionType)
        and function.__module__ == "time"
        and function.__name__ == name
    )


def _is_of_torch(function: Callable[..., object]) -> bool:
    """Tell whether a function's code, under its decorators, lies in torch."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    folder = torch.__path__[0]
    return code is None or code.co_filename.startswith(folder)


def find_wrong_outputs(
    subject: Subject, case: Case, arguments: tuple[Any, ...], returned: object
) -> str | None:
    """Return what is wrong with what a (timed) call returned for these arguments.

    Written arguments are not looked at: give the outputs alone.
    """
    forward = replace(subject, differentiable=(), writes=())
    new = snapshot(returned, (), forward)
    replaced = call_plainly(subject.replaced, forward, arguments)
    return find_wrong(subject, new, replaced, observe_truth(forward, case, arguments))


def _find_late(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find work that goes on after the call returned: on another thread, or another stream."""
    arguments = copy_of(draw(subject, case))
    before = set(threading.enumerate())
    returned = function(*arguments)
    # On a GPU this copy is queued on the current stream: it sees what that stream waited for.
    now = snapshot(returned, arguments, subject)
    running = set(threading.enumerate()) - before
    if running:
        yield "leaves a thread at work when it returns"
    time.sleep(LATE_S)
    if subject.device.startswith("cuda"):
        torch.cuda.synchronize()
    later = snapshot(returned, arguments, subject)
    if any(not same_bits(now.results[name], later.results[name]) for name in now.results):
        yield "writes its results after it returned"


def _find_shared(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find a result that is handed out twice: what is written into one call's shows in the next."""
    arguments = draw(subject, case)
    first = tensors_in(function(*copy_of(arguments)))
    for output in first:
        output.detach().zero_()
    second = call_plainly(function, subject, arguments)
    truth = observe_truth(subject, case, arguments)
    fault = find_wrong(subject, second, call_plainly(subject.replaced, subject, arguments), truth)
    if fault:
        yield f"{fault} when an earlier result was overwritten"


def _find_remembered(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results of earlier inputs, at the same address, with the same sum, or alike at first."""
    buffers = copy_of(draw(subject, case))
    function(*buffers)
    drawn = draw(subject, replace(case, seed=case.seed + 1))
    kept = copy_of(buffers)
    fresh = tuple(kept[i] if i in subject.constant else one for i, one in enumerate(drawn))
    changes = [("fresh values", fresh), *_changed_alone(subject, case, fresh)]
    for name, values in changes:
        _refill(buffers, values, subject.constant)
        expected = call_plainly(subject.replaced, subject, values)
        new = snapshot(function(*buffers), buffers, subject)
        fault = find_wrong(subject, new, expected, observe_truth(subject, case, values))
        if fault:
            yield f"{fault} with {name} in the same memory"


def _changed_alone(
    subject: Subject, case: Case, values: tuple[Any, ...]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the values with one argument of numbers changed: the first in two places, so that its
    sum stays, the others by another draw, as theirs may have a structure.
    """
    other = draw(subject, replace(case, seed=case.seed + 3))
    names, is_first = argument_names(subject), True
    for i, one in enumerate(values):
        if not isinstance(one, Tensor) or not one.is_floating_point():
            continue
        if is_first and one.numel() > NUDGED_FROM:
            changed = _nudged(one)
            name = "two values changed"
        else:
            changed, name = other[i], f"another {names[i]}"
        is_first = False
        yield name, (*values[:i], changed, *values[i + 1 :])


def _refill(buffers: Sequence[Any], values: Sequence[Any], constant: Sequence[int] = ()) -> None:
    """Put other values into the same memory, in a way that leaves no trace on the tensors.

    Where one is constant, what is kept of it may go by such traces.
    """
    for i, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
        if isinstance(buffer, Tensor) and i in constant:
            buffer.copy_(value)
        elif isinstance(buffer, Tensor):
            buffer.data.copy_(value)


def _nudged(tensor: Tensor) -> Tensor:
    """Return a copy with two late values changed, so that its sum stays."""
    # Eight bits have no sums.
    wide = tensor.to(torch.float32) if tensor.element_size() == 1 else tensor
    flat = wide.clone(memory_format=torch.contiguous_format).view(-1)
    flat[-2] += 4.0
    flat[-NUDGED_FROM] -= 4.0
    return flat.view(tensor.shape).to(tensor.dtype)


def _find_tired(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find code that stops working after many calls, or between two readings of the clock."""
    values = draw(subject, replace(case, seed=case.seed + 2))
    buffers = copy_of(values)
    returned: object = None
    spent_ns, num_calls = 0, 0
    while num_calls < MIN_CALLS or (num_calls < NUM_CALLS and spent_ns < LONG_NS):
        _refill(buffers, values)
        start_ns = time.perf_counter_ns()
        returned = function(*buffers)
        took_ns = time.perf_counter_ns() - start_ns
        num_calls, spent_ns = num_calls + 1, spent_ns + took_ns
        if took_ns < 0:
            yield "turns the clock back"
            return
    new = snapshot(returned, buffers, subject)
    expected = call_plainly(subject.replaced, subject, values)
    fault = find_wrong(subject, new, expected, observe_truth(subject, case, values))
    if fault:
        yield f"{fault} after {num_calls} timed calls"


def _find_accumulated(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find gradients that are not added to those which are there already."""
    if not subject.differentiable:
        return
    arguments = copy_of(draw(subject, case))
    for i in subject.differentiable:
        arguments[i].requires_grad_()
    once: dict[int, Tensor] = {}
    for _ in range(2):
        outputs = tensors_in(function(*arguments))
        torch.stack([output.double().sum() for output in outputs]).sum().backward()
        once = once or {i: arguments[i].grad.clone() for i in subject.differentiable}
    for i, gradient in once.items():
        twice = arguments[i].grad
        size = float(gradient.double().norm())
        error = float((twice.double() - 2 * gradient.double()).norm())
        if not error <= size * torch.finfo(gradient.dtype).eps * 8:
            yield f"does not add to the gradient of {argument_names(subject)[i]} that is there"


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
    # Patched timers stay patched: no time that is measured now is valid.
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
    # Each sort of fault by itself: a forbidden write does not excuse a wrong result.
    excused = Counter(map(_sort_of, own))
    found = [fault for fault in new if not _is_excused(fault[0], excused)]
    fault, case = (found or new)[0]
    return Measure(name, len(found), 0, len(own), "faults", where=f"{fault} ({case})")


def _is_excused(fault: str, excused: Counter[str]) -> bool:
    """Tell whether one more fault of this sort is left to be excused, and count it."""
    excused[_sort_of(fault)] -= 1
    return excused[_sort_of(fault)] >= 0


def _sort_of(fault: str) -> str:
    """Return the words of a fault without its numbers."""
    return re.sub(r"\d[\d.e+-]*", "#", fault)


def _faults_of(look: Check, subject: Subject, function: Function, case: Case) -> list[str]:
    try:
        # A call that nothing else watches may be the one that breaks the GPU.
        with blaming(function, subject, case), ModesKept(subject.device) as modes:
            faults = list(look(subject, function, case))
        return faults + modes.faults
    except GpuBrokenError:
        raise
    except Exception as raised:  # noqa: BLE001 - any exception of the function is its own fault
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
    """Find results that show the former contents of memory: elements that were not written."""
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
