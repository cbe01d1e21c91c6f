"""Call a function on one case as the gate does: poisoned, guarded, with its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kprof.gate.broken import blaming, is_sticky
from kprof.gate.inputs import Draw, Placed, place
from kprof.gate.memory import NAN_BYTE, Guarded
from kprof.gate.subject import Case, Function, Subject

Results = dict[str, Tensor]

GRADIENT = "gradient of"


@dataclass(frozen=True)
class Observed:
    """What a call gave, and what it did that it should not have done."""

    results: Results = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    raised: Exception | None = None


def draw(subject: Subject, case: Case) -> tuple[Any, ...]:
    """Return the arguments of a case."""
    return subject.inputs(case.shape, Draw(case, subject))


def observe(
    function: Function,
    subject: Subject,
    case: Case,
    arguments: tuple[Any, ...],
    *,
    byte: int = NAN_BYTE,
) -> Observed:
    """Call `function` on copies of the arguments, laid out as the case says; then its gradients.

    Raises:
        GpuBrokenError: the call left a GPU on which nothing runs any more.
    """
    with blaming(function, subject, str(case)):
        return _observe(function, subject, case, arguments, byte)


def _observe(
    function: Function, subject: Subject, case: Case, arguments: tuple[Any, ...], byte: int
) -> Observed:
    placed = {i: place(a, case.layout) for i, a in enumerate(arguments) if isinstance(a, Tensor)}
    given = [placed[i].view if i in placed else a for i, a in enumerate(arguments)]
    _require_gradients(given, subject)
    with Guarded(byte) as guarded:
        try:
            outputs = tensors_in(function(*given))
            faults = find_odd_outputs(outputs)
            results = name_outputs(outputs)
            arriving = draw_arriving(outputs, case)
            if not faults:
                results |= _gradients(outputs, given, subject, arriving)
        except Exception as raised:
            if is_sticky(raised):
                raise
            return Observed(raised=raised)
    results |= name_written(given, subject)
    faults += _find_damage(placed, subject, guarded)
    if any(one.was_changed() or one.was_overrun() for one in arriving):
        faults.append("changes the gradient that it is given")
    plain = {name: result.detach().clone() for name, result in results.items() if not faults}
    return Observed(plain, tuple(faults))


def snapshot(returned: object, given: Sequence[Any], subject: Subject) -> Observed:
    """Return copies of the outputs of a call, and of the arguments that it may write, as of now."""
    outputs = tensors_in(returned)
    odd = find_odd_outputs(outputs)
    results = {} if odd else name_outputs(outputs) | name_written(given, subject)
    return Observed({name: one.detach().clone() for name, one in results.items()}, tuple(odd))


def call_plainly(function: Function, subject: Subject, arguments: Sequence[Any]) -> Observed:
    """Call `function` on copies of the arguments, without guards, poison or gradients."""
    given = copy_of(arguments)
    with blaming(function, subject, "plainly called"):
        return snapshot(function(*given), given, subject)


def copy_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with every tensor copied."""
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def observe_truth(subject: Subject, case: Case, arguments: tuple[Any, ...]) -> Results:
    """Return what the truth gives on the same values in float64, with its gradients."""
    given = [_in_float64(a) if isinstance(a, Tensor) else a for a in arguments]
    _require_gradients(given, subject)
    outputs = tensors_in(subject.truth(*given))
    results = name_outputs(outputs)
    results |= _gradients(outputs, given, subject, draw_arriving(outputs, case))
    results |= name_written(given, subject)
    return {name: result.detach() for name, result in results.items()}


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _require_gradients(given: Sequence[Any], subject: Subject) -> None:
    for i in subject.differentiable:
        given[i].requires_grad_()


def _gradients(
    outputs: Sequence[Tensor], given: Sequence[Any], subject: Subject, arriving: Sequence[Placed]
) -> Results:
    """Return the gradients of the differentiable arguments for these gradients of the outputs."""
    if not subject.differentiable:
        return {}
    leaves = [given[i] for i in subject.differentiable]
    pairs = zip(outputs, arriving, strict=True)
    gradients = [one.view.expand(output.shape) for output, one in pairs]
    found = torch.autograd.grad(outputs, leaves, gradients)
    names = argument_names(subject)
    which = [f"{GRADIENT} {names[i]}" for i in subject.differentiable]
    return dict(zip(which, found, strict=True))


def draw_arriving(outputs: Sequence[Tensor], case: Case) -> list[Placed]:
    """Return gradients for outputs, the same for every implementation of one case.

    Padded cases get one row for all, as the gradient of a sum does: with a stride of zero.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    dtype: torch.dtype = getattr(torch, case.dtype)
    arriving = []
    for output in outputs:
        is_expanded = case.layout == "padded" and output.dim() > 1
        shape = (1, *output.shape[1:]) if is_expanded else tuple(output.shape)
        # Rounded to the case's dtype first: the truth is to see the very same numbers.
        values = torch.randn(shape, generator=generator).to(dtype)
        layout = case.layout if case.layout == "transposed" else "contiguous"
        arriving.append(place(values.to(output.dtype).to(output.device), layout))
    return arriving


def tensors_in(returned: object) -> list[Tensor]:
    """Return the tensors that a function returned, in their order."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, (tuple, list)):
        return [tensor for part in returned for tensor in tensors_in(part)]
    return []


def name_outputs(outputs: Sequence[Tensor]) -> Results:
    """Return the outputs by the names under which they are judged."""
    return {f"output {i}" if i else "output": output for i, output in enumerate(outputs)}


def name_written(given: Sequence[Any], subject: Subject) -> Results:
    """Return the arguments that the subject may write, which are results, too."""
    names = argument_names(subject)
    return {f"{names[i]} after": given[i] for i in subject.writes}


def find_odd_outputs(outputs: Sequence[Tensor]) -> list[str]:
    """Return what is wrong with outputs that are no plain tensors: work may hide in them."""
    odd = {type(output).__name__ for output in outputs if type(output) is not Tensor}
    return [f"returns a {name}, which is no plain tensor" for name in sorted(odd)]


def _find_damage(placed: dict[int, Placed], subject: Subject, guarded: Guarded) -> list[str]:
    names = argument_names(subject)
    faults = []
    for i, one in placed.items():
        if one.was_overrun():
            faults.append(f"writes outside {names[i]}")
        if i not in subject.writes and one.was_changed():
            faults.append(f"changes its input {names[i]}")
    if guarded.was_overrun():
        faults.append("writes past the end of what it allocated")
    return faults


def argument_names(subject: Subject) -> list[str]:
    """Return the names of the arguments, as the truth calls them."""
    return list(inspect.signature(subject.truth).parameters)
