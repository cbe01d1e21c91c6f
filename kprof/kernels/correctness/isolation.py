"""Independence: a call changes its results alone, from its arguments alone.

A result belongs to the caller: no later call may write to it, and it shares no memory with an
argument or with another result, unless the replaced code does the same.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kprof.kernels.correctness.inputs import are_other_bits, edge_shapes, read
from kprof.kernels.correctness.numerics import find_wrong
from kprof.kernels.correctness.observe import (
    ModesKept,
    Observed,
    Results,
    argument_names,
    copy_of,
    draw,
    draw_arriving,
    gradients_of,
    has_gradients,
    in_context,
    name_outputs,
    name_written,
    observe_truth,
    require_gradients,
    tensors_in,
)
from kprof.kernels.correctness.subject import Case, Function, Shape, Subject

Told = dict[int, dict[str, object]]
"""For every argument that is a tensor, what a call must leave as it is."""

MOST_KEPT, LEAST_KEPT = 64, 4
"""Calls whose results are kept side by side: a pool of fewer buffers is found."""
KEPT_BYTES = 2**26
KEPT_NS = 1_000_000_000
NUM_DRAWN = 3
TURN_S = 0.05
"""A thread that waits longer for the other one goes on: the other one waits for it, too."""


def is_plain(case: Case) -> bool:
    """Tell whether a case is a normal one, on which what takes many calls is looked at."""
    is_normal = case.distribution == "normal" and case.layout == "contiguous"
    return is_normal and 0 not in case.shape


def find_side_effects(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find what a call does besides making its results, and results that others can write to."""
    yield from _in_every_way(_find_side_effects, subject, function, case)


def find_other_forms(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results of another form than the replaced code's, with any values."""
    if function is not subject.replaced:
        yield from _in_every_way(_find_other_form, subject, function, case)


def _in_every_way(
    look: Callable[[Subject, Function, Case], Iterator[str]],
    subject: Subject,
    function: Function,
    case: Case,
) -> Iterator[str]:
    """Look at a call with gradients and without; at a plain one in every mode and edge shape."""
    without = replace(subject, differentiable=())
    yield from look(subject, function, case)
    yield from (f"{fault} without gradients" for fault in look(without, function, case))
    if not is_plain(case):
        return
    for context in _contexts(subject)[1:]:
        for fault in look(subject, function, replace(case, context=context)):
            yield f"{fault} under {context}"
    for shape in edge_shapes(subject):
        other = replace(case, shape=shape)
        if not _takes(subject, other):
            continue
        yield from (f"{fault} with {other}" for fault in look(without, function, other))


def _takes(subject: Subject, case: Case) -> bool:
    """Tell whether the replaced code takes a case."""
    try:
        subject.replaced(*copy_of(draw(subject, case)))
    except Exception:  # noqa: BLE001 - after any exception the new code is not called
        return False
    return True


def _contexts(subject: Subject) -> tuple[str, ...]:
    """Return the modes in which gradients are as ever, or none; the plain one comes first."""
    others = [one for one in ("no_grad", "inference_mode") if one in subject.contexts]
    return ("gradient", *others)


def _find_side_effects(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    given = _given(subject, case, draw(subject, case))
    before, random = _tell_all(given), _random_state(subject.device)
    with in_context(case, subject.device), ModesKept(subject.device) as modes:
        returned = function(*given)
    yield from modes.faults
    for name, value in _random_state(subject.device).items():
        if not torch.equal(value, random[name]):
            yield f"draws from {name}"
    yield from _find_changed_inputs(subject, before, _tell_all(given))
    yield from _find_aliases(subject, given, tensors_in(returned))


def _find_changed_inputs(subject: Subject, before: Told, after: Told) -> Iterator[str]:
    names = argument_names(subject)
    for i, what in before.items():
        for name, value in what.items():
            is_allowed = i in subject.writes and name == "version"
            if not is_allowed and after[i].get(name) != value:
                yield f"changes the {name} of its input {names[i]}"


def _find_aliases(
    subject: Subject, given: Sequence[Any], outputs: Sequence[Tensor]
) -> Iterator[str]:
    names = argument_names(subject)
    for name, output in name_outputs(outputs).items():
        for i, argument in enumerate(given):
            is_own = i in subject.writes or not isinstance(argument, Tensor)
            if not is_own and overlap(output, argument):
                yield f"returns an {name} in the memory of its input {names[i]}"
    if any(overlap(one, other) for one, other in combinations(outputs, 2)):
        yield "returns two outputs in the same memory"


def _find_other_form(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    values = draw(subject, case)
    returned, standard = (
        _called(one, subject, case, values) for one in (function, subject.replaced)
    )
    if _form_of(returned) != _form_of(standard):
        if len(tensors_in(standard)) >= _num_outputs(subject, case, values):
            yield f"returns {_form_of(returned)}, not {_form_of(standard)}"
        return
    yield from _find_other_tensors(subject, case, returned, standard)
    made, own = (_results_of(f, subject, case, values) for f in (function, subject.replaced))
    for name, one in made.items():
        if name in own and _overlaps_itself(one) and not _overlaps_itself(own[name]):
            yield f"{name} has several elements in one place, where the replaced code's has none"


def _num_outputs(subject: Subject, case: Case, values: tuple[Any, ...]) -> int:
    """Return how many outputs there are: code that returns fewer does not take the call."""
    truth = observe_truth(replace(subject, differentiable=(), writes=()), case, values)
    return len(truth)


def _find_other_tensors(
    subject: Subject, case: Case, returned: object, standard: object
) -> Iterator[str]:
    """Find outputs on another device, with or without a gradient, or not contiguous."""
    is_dense = case.layout == "contiguous" and not subject.has_free_strides
    pairs = zip(tensors_in(returned), tensors_in(standard), strict=True)
    for (one, other), name in zip(pairs, name_outputs(tensors_in(returned)), strict=True):
        if one.device != other.device:
            yield f"{name} is on {one.device}, not {other.device}"
        if one.requires_grad != other.requires_grad:
            has = "requires a gradient" if one.requires_grad else "has lost its gradient"
            yield f"{name} {has}, unlike the replaced code's"
        if is_dense and other.is_contiguous() and not one.is_contiguous():
            yield f"{name} is not contiguous, where the replaced code's is"


def _overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether a tensor is an expanded one, into which nothing can be written in place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(n > 1 and not step for n, step in sizes)


def _called(function: Function, subject: Subject, case: Case, values: Sequence[Any]) -> object:
    given = _given(subject, case, values)
    return _called_with(function, subject, case, given)


def _given(subject: Subject, case: Case, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return copies of the values that ask for gradients; in inference mode, tensors of that."""
    with torch.inference_mode(case.context == "inference_mode"):
        given = copy_of(values)
    require_gradients(given, subject)
    return given


def _called_with(function: Function, subject: Subject, case: Case, given: Sequence[Any]) -> object:
    with in_context(case, subject.device), ModesKept(subject.device):
        return function(*given)


def _form_of(returned: object) -> str:
    """Return what a function returned, but for the values of tensors; a list is like a tuple."""
    if isinstance(returned, Tensor):
        return "a tensor"
    if isinstance(returned, (tuple, list)):
        return f"({', '.join(map(_form_of, returned))})"
    return repr(returned)


def _tell_all(arguments: Sequence[Any]) -> Told:
    """Return what a call must leave as it is of every tensor; `Placed` watches the values."""
    return {
        i: {
            "version": None if a.is_inference() else a._version,
            "shape": tuple(a.shape),
            "strides": a.stride(),
            "memory": a.data_ptr(),
            "requires_grad": a.requires_grad,
            "gradient": None if a.grad is None else id(a.grad),
        }
        for i, a in enumerate(arguments)
        if isinstance(a, Tensor)
    }


def _random_state(device: str) -> dict[str, Tensor]:
    state = {"torch's random numbers": torch.get_rng_state()}
    if device.startswith("cuda"):
        state["the GPU's random numbers"] = torch.cuda.get_rng_state()
    return state


def overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors lie in the same memory, even in part."""
    (first, end), (other_first, other_end) = _span(one), _span(other)
    if not (first < other_end and other_first < end):
        return False
    storage = one.untyped_storage()
    if one.dtype != other.dtype or storage.data_ptr() != other.untyped_storage().data_ptr():
        return True
    # Halves of the columns of one matrix lie between each other.
    is_taken = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool)
    is_taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(is_taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor and the one behind its last."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((n - 1) * step for n, step in steps)
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def find_shared_results(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results in memory that later calls use: one buffer, a pool of them, a memo."""
    if not is_plain(case):
        return
    without = replace(subject, differentiable=())
    ways = [(subject, context, f" under {context}") for context in _contexts(subject)]
    ways.append((without, "gradient", " without gradients"))
    for way, context, where in ways:
        for shape in _shapes_to_keep(subject, case):
            fault = _find_shared(way, function, replace(case, shape=shape, context=context))
            if fault:
                yield fault if way is subject and context == "gradient" else fault + where
                return


def _shapes_to_keep(subject: Subject, case: Case) -> Iterator[Shape]:
    """Yield the shape of a case, and a small one where few of its results fit the memory."""
    yield case.shape
    num_bytes = sum(a.nbytes for a in draw(subject, case) if isinstance(a, Tensor))
    small = min(edge_shapes(subject), key=math.prod, default=case.shape)
    if MOST_KEPT * num_bytes > KEPT_BYTES and _takes(subject, replace(case, shape=small)):
        yield small


def _find_shared(subject: Subject, function: Function, case: Case) -> str | None:
    drawn = [draw(subject, replace(case, seed=case.seed + i)) for i in range(NUM_DRAWN)]
    kept: list[tuple[Results, Results]] = []
    places: dict[int, str] = {}
    start_ns, num_bytes = time.perf_counter_ns(), 0
    while len(kept) < MOST_KEPT:
        is_late = time.perf_counter_ns() - start_ns > KEPT_NS
        if len(kept) >= LEAST_KEPT and (is_late or num_bytes > KEPT_BYTES):
            break
        results = _results_of(function, subject, case, drawn[len(kept) % NUM_DRAWN])
        kept.append((results, {name: one.clone() for name, one in results.items()}))
        num_bytes += 2 * sum(one.numel() * one.element_size() for one in results.values())
        # Two gradients of one call may be one tensor, as those of an addition are.
        found = {_span(one)[0]: name for name, one in results.items()}
        for at in found.keys() & places.keys() - {0}:
            return f"the {found[at]} of call {len(kept)} lies where {places[at]} is"
        places |= {at: f"the {name} of call {len(kept)}" for at, name in found.items()}
    pairs = [(name, one, copies[name]) for results, copies in kept for name, one in results.items()]
    is_changed = read([are_other_bits(one, copy) for _, one, copy in pairs])
    changed = next((name for (name, *_), is_so in zip(pairs, is_changed, strict=True) if is_so), "")
    return f"a later call changes the {changed} of an earlier one" if changed else None


def _results_of(function: Function, subject: Subject, case: Case, values: Sequence[Any]) -> Results:
    """Call plainly; return the results themselves, detached, with the gradients."""
    results, finish = _begin(function, subject, case, values)
    return results | finish()


def _begin(
    function: Function, subject: Subject, case: Case, values: Sequence[Any]
) -> tuple[Results, Callable[..., Results]]:
    """Call plainly; return the outputs and written arguments, and what goes back to gradients."""
    given = _given(subject, case, values)
    outputs = tensors_in(_called_with(function, subject, case, given))
    made = name_outputs(outputs) | name_written(given, subject)
    results = {name: one.detach() for name, one in made.items()}

    def finish(*, keeps_graph: bool = False) -> Results:
        if not has_gradients(case) or not subject.differentiable:
            return {}
        arriving = draw_arriving(outputs, case)
        found = gradients_of(outputs, given, subject, case, arriving, keeps_graph=keeps_graph)
        return {name: one.detach() for name, one in found.items()}

    return results, finish


def _named(subject: Subject, given: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call with their names; options that it leaves out have none."""
    return zip(argument_names(subject), given, strict=False)


def find_kept_memory(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find arguments and results that are kept after the caller has let them go: a leak."""
    if not is_plain(case):
        return
    kept: list[tuple[str, StorageWeakRef]] = []
    for number in range(NUM_DRAWN):
        given = _given(subject, case, draw(subject, replace(case, seed=case.seed + number)))
        outputs = tensors_in(_called_with(function, subject, case, given))
        found = {f"input {n}": a for n, a in _named(subject, given)}
        found |= name_outputs(outputs)
        if subject.differentiable:
            found |= gradients_of(outputs, given, subject, case, draw_arriving(outputs, case))
        if number == 0:
            # The last call may be remembered, and no more.
            tensors = ((name, one) for name, one in found.items() if isinstance(one, Tensor))
            kept = [(name, StorageWeakRef(one.untyped_storage())) for name, one in tensors]
            del tensors
    del given, outputs, found
    gc.collect()
    for name, storage in kept:
        if not storage.expired():
            yield f"keeps the memory of the {name} after {NUM_DRAWN - 1} further calls"
            return


def find_order_faults(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that depend on which calls were made before, or between forward and backward."""
    if not is_plain(case):
        return
    first, second = (draw(subject, replace(case, seed=case.seed + i)) for i in (0, 1))
    judge = _Judge(subject, case, (first, second), function)
    fault = judge.find(0, _after_other_shapes(subject, function, case, first))
    if fault:
        yield f"{fault} after calls of other shapes"
    if not subject.differentiable:
        return
    one, finish_one = _begin(function, subject, case, first)
    other, finish_other = _begin(function, subject, case, second)
    for number, results in ((0, one | finish_one()), (1, other | finish_other())):
        fault = judge.find(number, results)
        if fault:
            yield f"{fault} when two calls go forward before one goes back"
    results, finish = _begin(function, subject, case, first)
    finish(keeps_graph=True)
    fault = judge.find(0, results | finish())
    if fault:
        yield f"{fault} when it goes back a second time through a retained graph"
    yield from _find_unseen_writes(subject, function, case, first, judge)
    yield from _find_unlike_in_models(subject, function, case, (first, second), judge)


def _find_unlike_in_models(
    subject: Subject,
    function: Function,
    case: Case,
    values: Sequence[tuple[Any, ...]],
    judge: _Judge,
) -> Iterator[str]:
    """Find other results for what models pass: computed tensors, and parameters with updates."""

    def fault_of(number: int, leaves: tuple[Any, ...], given: Sequence[Any]) -> str | None:
        outputs = tensors_in(_called_with(function, subject, case, given))
        arriving = draw_arriving(outputs, case)
        found = name_outputs(outputs) | gradients_of(outputs, leaves, subject, case, arriving)
        plain = {name: one.detach() for name, one in found.items()}
        return judge.find(number, judge.alone(number) | plain)

    asked = set(subject.differentiable)
    leaves = _given(subject, case, values[0])
    fault = fault_of(0, leaves, [a.clone() if i in asked else a for i, a in enumerate(leaves)])
    if fault:
        yield f"{fault} for tensors that other operators computed"
    weights = tuple(
        torch.nn.Parameter(a) if i in asked else a for i, a in enumerate(copy_of(values[0]))
    )
    fault = fault_of(0, weights, weights)
    with torch.no_grad():
        for i in asked:
            weights[i].copy_(values[1][i])
    others = tuple(w if i in asked else values[1][i] for i, w in enumerate(weights))
    fault = fault or fault_of(1, others, others)
    if fault:
        yield f"{fault} for parameters, the second time with other values"


def _find_unseen_writes(
    subject: Subject,
    function: Function,
    case: Case,
    values: Sequence[Any],
    judge: _Judge,
) -> Iterator[str]:
    """Find gradients of what was written after the call: right ones, or an error, are all there is.

    Torch raises where a tensor that `save_for_backward` keeps was written to in between.
    """
    for name in _names_of_writable(subject, function, case, values):
        given = _given(subject, case, values)
        outputs = tensors_in(_called_with(function, subject, case, given))
        places = dict(_named(subject, given)) | name_outputs(outputs)
        try:
            with torch.no_grad():
                places[name].add_(1)
            arriving = draw_arriving(outputs, case)
            found = gradients_of(outputs, given, subject, case, arriving)
        except RuntimeError:
            continue
        fault = judge.find(0, judge.alone(0) | {n: one.detach() for n, one in found.items()})
        if fault:
            yield f"{fault} when the {name} is written to before it goes back, without an error"
            return


def _names_of_writable(
    subject: Subject, function: Function, case: Case, values: Sequence[Any]
) -> list[str]:
    """Return the names of arguments and outputs that a caller may write to after a call."""
    given = _given(subject, case, values)
    outputs = name_outputs(tensors_in(_called_with(function, subject, case, given)))
    pairs = enumerate(_named(subject, given))
    places = [*(pair for i, pair in pairs if i not in subject.writes), *outputs.items()]
    return [n for n, one in places if isinstance(one, Tensor) and one.is_floating_point()]


def _after_other_shapes(
    subject: Subject, function: Function, case: Case, values: Sequence[Any]
) -> Results:
    """Call with the edge shapes, larger and smaller ones, then with these values."""
    for shape in (*edge_shapes(subject), *subject.shapes):
        other = replace(case, shape=shape)
        arguments = draw(subject, other)
        try:
            _results_of(subject.replaced, subject, other, arguments)
        except Exception:  # noqa: BLE001 - a call that the replaced code refuses is not asked for
            continue
        _results_of(function, subject, other, arguments)
    return _results_of(function, subject, case, values)


class _Judge:
    """Compares results with those of calls that nothing stood between."""

    def __init__(
        self,
        subject: Subject,
        case: Case,
        values: Sequence[tuple[Any, ...]],
        function: Function,
    ) -> None:
        self._subject = subject
        self._case = case
        self._values = values
        self._alone = [_results_of(function, subject, case, one) for one in values]

    def alone(self, number: int) -> Results:
        """Return the results for the values of this number that nothing stood between."""
        return self._alone[number]

    def find(self, number: int, results: Results) -> str | None:
        """Return what is wrong with results for the values of this number."""
        alone = self._alone[number]
        if self._subject.is_deterministic:
            is_other = read([are_other_bits(one, results[n]) for n, one in alone.items()])
            name = next((n for n, is_so in zip(alone, is_other, strict=True) if is_so), None)
            return None if name is None else f"{name} is another one"
        values = self._values[number]
        truth = observe_truth(self._subject, self._case, values)
        return find_wrong(self._subject, Observed(results), Observed(alone), truth)


def are_threads_tried(subject: Subject) -> bool:
    """Tell whether calls are made on two threads: Triton's interpreter runs one at a time."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules
    return not is_interpreted


def find_thread_faults(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that another thread's call spoils, when both advance operator by operator."""
    if not is_plain(case) or not are_threads_tried(subject):
        return
    ways = [replace(subject, differentiable=()), *([subject] if subject.differentiable else [])]
    for way in ways:
        yield from _find_thread_faults(way, function, case)


def _find_thread_faults(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    values = [draw(subject, replace(case, seed=case.seed + i)) for i in (0, 1)]
    judge = _Judge(subject, case, values, function)
    turns = _Turns()
    found: list[Results | Exception] = [{}, {}]

    def work(me: int) -> None:
        try:
            with _Alternating(turns, me):
                found[me] = _results_of(function, subject, case, values[me])
        except Exception as raised:  # noqa: BLE001 - told below, on the caller's thread
            found[me] = raised
        finally:
            turns.finish(me)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for number, results in enumerate(found):
        if isinstance(results, Exception):
            yield f"raises {type(results).__name__} when two threads call at the same time"
            return
        fault = judge.find(number, results)
        if fault:
            yield f"{fault} when two threads call at the same time"
            return


class _Turns:
    """Lets two threads go on by turns."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._is_over = False

    def pass_on(self, me: int) -> None:
        """Let the other thread do its next operator, and wait for one's own turn."""
        with self._condition:
            self._turn = 1 - me
            self._condition.notify_all()
            is_met = self._condition.wait_for(lambda: self._turn == me or self._is_over, TURN_S)
            # The other one waits for a lock that this one holds: both go on as they like.
            self._is_over |= not is_met

    def finish(self, me: int) -> None:
        """Let the other thread go on by itself."""
        with self._condition:
            self._is_over = True
            self._condition.notify_all()


class _Alternating(TorchDispatchMode):
    """While this is on, every operator of torch waits for this thread's turn."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()
        self._turns = turns
        self._me = me

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Do what was asked for, in turn."""
        self._turns.pass_on(self._me)
        return func(*args, **(kwargs or {}))
