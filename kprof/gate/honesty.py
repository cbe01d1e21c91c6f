"""Against cheats: does the code compute when it is called, on what it is given, in the open?

Each function here finds one way to look faster than one is. Timing code uses `find_patched_timers`
and `find_wrong_outputs` itself, on the very outputs that it timed.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kprof.gate.inputs import same_bits
from kprof.gate.numerics import find_wrong
from kprof.gate.observe import (
    argument_names,
    call_plainly,
    copy_of,
    draw,
    observe_truth,
    snapshot,
    tensors_in,
)
from kprof.gate.subject import Case, Function, Subject

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
    """Find code that stops working after many calls, or while somebody looks at the clock."""
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
