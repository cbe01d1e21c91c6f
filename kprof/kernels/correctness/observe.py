"""Call a function on one case as the gate does: poisoned, guarded, with its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kprof.kernels.correctness.broken import blaming, is_sticky
from kprof.kernels.correctness.inputs import Draw, Placed, place, read
from kprof.kernels.correctness.memory import NAN_BYTE, Guarded
from kprof.kernels.correctness.subject import Case, Function, Subject

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
    arguments = subject.inputs(case.shape, Draw(case, subject))
    if case.layout == "expanded":
        arguments = tuple(
            _with_equal_rows(a) if i in expandable(subject, arguments) else a
            for i, a in enumerate(arguments)
        )
    if case.leading is None:
        return arguments
    return tuple(
        a.reshape(*case.leading, *a.shape[1:]) if i in subject.rows else a
        for i, a in enumerate(arguments)
    )


def expandable(subject: Subject, arguments: Sequence[Any]) -> tuple[int, ...]:
    """Return the arguments that may be one row expanded: matrices of numbers, never written."""
    # Of some shapes there are fewer arguments than `rows` names.
    rows = subject.rows or range(len(arguments))
    return tuple(
        i
        for i, a in enumerate(arguments)
        if i in rows
        and i not in subject.writes
        and isinstance(a, Tensor)
        and a.is_floating_point()
        and a.dim() > 1
    )


def _with_equal_rows(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor).clone(memory_format=torch.contiguous_format)


@contextmanager
def in_context(case: Case, device: str) -> Iterator[None]:
    """Switch on the mode of torch that the case is called in."""
    kind = torch.device(device).type
    with ExitStack() as stack:
        if case.context == "no_grad":
            stack.enter_context(torch.no_grad())
        elif case.context == "inference_mode":
            stack.enter_context(torch.inference_mode())
        elif case.context == "autocast":
            stack.enter_context(torch.autocast(kind, cast_of(case)))
        yield


class ModesKept:
    """While this is on, modes of torch may change; at its end they are as they were before."""

    def __init__(self, device: str) -> None:
        self._kind = torch.device(device).type
        self.faults: list[str] = []
        """What was changed in between."""

    def __enter__(self) -> ModesKept:
        self._before = self._modes()
        return self

    def __exit__(self, *raised: object) -> None:
        after = self._modes()
        if after == self._before:
            return
        self.faults = [
            f"changes torch's {n}" for n, mode in after.items() if mode != self._before[n]
        ]
        torch.set_grad_enabled(self._before["gradient mode"])
        torch.set_default_dtype(self._before["default dtype"])
        torch.set_autocast_enabled(self._kind, self._before["autocast"])
        torch.use_deterministic_algorithms(self._before["deterministic mode"])
        torch.set_float32_matmul_precision(self._before["precision of GEMMs in float32"])

    def _modes(self) -> dict[str, Any]:
        return {
            "gradient mode": torch.is_grad_enabled(),
            "default dtype": torch.get_default_dtype(),
            "autocast": torch.is_autocast_enabled(self._kind),
            "deterministic mode": torch.are_deterministic_algorithms_enabled(),
            "precision of GEMMs in float32": torch.get_float32_matmul_precision(),
        }


def cast_of(case: Case) -> torch.dtype:
    """Return the dtype that autocast computes in: the case's own, or bfloat16 where it is wider."""
    return torch.float16 if case.dtype == "float16" else torch.bfloat16


def has_gradients(case: Case) -> bool:
    """Tell whether gradients are computed in the case's context."""
    return case.context not in ("no_grad", "inference_mode")


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
    with blaming(function, subject, case):
        return _observe(function, subject, case, arguments, byte)


def _observe(
    function: Function, subject: Subject, case: Case, arguments: tuple[Any, ...], byte: int
) -> Observed:
    with torch.inference_mode(case.context == "inference_mode"):
        placed = place_all(subject, case, arguments)
    given = [placed[i].view if i in placed else a for i, a in enumerate(arguments)]
    require_gradients(given, subject)
    if not has_gradients(case):
        subject = replace(subject, differentiable=())
    arriving: list[Placed] = []
    with Guarded(byte) as guarded:
        try:
            with in_context(case, subject.device), ModesKept(subject.device) as modes:
                outputs = tensors_in(function(*given))
            faults = find_odd_outputs(outputs) + modes.faults
            results = name_outputs(outputs)
            if not faults and subject.differentiable:
                arriving = draw_arriving(outputs, case)
                results |= gradients_of(outputs, given, subject, case, arriving)
        except Exception as raised:
            if is_sticky(raised):
                raise
            return Observed(raised=raised)
    results |= name_written(given, subject)
    faults += _find_damage(placed, arriving, subject, guarded)
    plain = {name: result.detach().clone() for name, result in results.items() if not faults}
    return Observed(plain, tuple(faults))


def place_all(subject: Subject, case: Case, arguments: Sequence[Any]) -> dict[int, Placed]:
    """Return every argument that is a tensor, laid out as the case says."""
    expanded = expandable(subject, arguments) if case.layout == "expanded" else ()
    return {
        i: place(a, case.layout if case.layout != "expanded" or i in expanded else "contiguous")
        for i, a in enumerate(arguments)
        if isinstance(a, Tensor)
    }


def snapshot(returned: object, given: Sequence[Any], subject: Subject) -> Observed:
    """Return copies of the outputs of a call, and of the arguments that it may write, as of now."""
    outputs = tensors_in(returned)
    odd = find_odd_outputs(outputs)
    results = {} if odd else name_outputs(outputs) | name_written(given, subject)
    return Observed({name: one.detach().clone() for name, one in results.items()}, tuple(odd))


def gives_all(observed: Observed, truth: Results) -> bool:
    """Tell whether a call gave every result of the mathematics.

    Code that returns None where there is nothing to compute, as torch's attention by cuDNN does of
    an empty batch, does not take such a call.
    """
    return observed.raised is None and truth.keys() <= observed.results.keys()


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
    if not has_gradients(case):
        subject = replace(subject, differentiable=())
    given = [_in_float64(a) if isinstance(a, Tensor) else a for a in arguments]
    require_gradients(given, subject)
    outputs = tensors_in(subject.truth(*given))
    results = name_outputs(outputs)
    results |= gradients_of(outputs, given, subject, case, draw_arriving(outputs, case))
    results |= name_written(given, subject)
    return {name: result.detach() for name, result in results.items()}


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def require_gradients(given: Sequence[Any], subject: Subject) -> None:
    """Let the differentiable arguments ask for gradients, as far as inference mode has them do."""
    for i in subject.differentiable:
        if not given[i].is_inference():
            given[i].requires_grad_()


def gradients_of(
    outputs: Sequence[Tensor],
    given: Sequence[Any],
    subject: Subject,
    case: Case,
    arriving: Sequence[Placed],
    *,
    keeps_graph: bool = False,
) -> Results:
    """Return the gradients of the differentiable arguments for these gradients of the outputs.

    For a double backward pass, those of the gradients' sum with random weights.
    """
    if not subject.differentiable:
        return {}
    leaves = [given[i] for i in subject.differentiable]
    # Where some arguments alone ask for gradients, not every result has one.
    has_any = any(output.requires_grad for output in outputs)
    pairs = [
        (output, one.view.expand(output.shape))
        for output, one in zip(outputs, arriving, strict=True)
        if output.requires_grad or not has_any
    ]
    outputs, gradients = zip(*pairs, strict=True)
    is_double = case.context == "double_backward"
    found = torch.autograd.grad(
        outputs, leaves, gradients, create_graph=is_double, retain_graph=is_double or keeps_graph
    )
    if is_double:
        found = _second_gradients(found, leaves, case)
    names = argument_names(subject)
    which = [f"{GRADIENT} {names[i]}" for i in subject.differentiable]
    return dict(zip(which, found, strict=True))


def _second_gradients(
    first: Sequence[Tensor], leaves: Sequence[Tensor], case: Case
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(case.seed + 2)
    dtype: torch.dtype = getattr(torch, case.dtype)
    weights = [torch.randn(one.shape, generator=generator).to(dtype).to(one) for one in first]
    second = torch.autograd.grad(first, leaves, weights, allow_unused=True)
    pairs = zip(second, leaves, strict=True)
    return tuple(torch.zeros_like(leaf) if one is None else one for one, leaf in pairs)


def draw_arriving(outputs: Sequence[Tensor], case: Case) -> list[Placed]:
    """Return gradients for outputs, the same for every implementation of one case.

    Padded cases get one row for all, and shifted ones one number, as the gradient of a sum does:
    with strides of zero.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    dtype = cast_of(case) if case.context == "autocast" else getattr(torch, case.dtype)
    arriving = []
    for output in outputs:
        is_expanded = case.layout == "padded" and output.dim() > 1
        shape = (1, *output.shape[1:]) if is_expanded else tuple(output.shape)
        if case.layout == "shifted":
            shape = (1,) * output.dim()
        # Rounded to the case's dtype first: the truth is to see the very same numbers.
        values = torch.randn(shape, generator=generator).to(dtype)
        layout = case.layout if case.layout in ("transposed", "permuted") else "contiguous"
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


def _find_damage(
    placed: dict[int, Placed], arriving: Sequence[Placed], subject: Subject, guarded: Guarded
) -> list[str]:
    names = argument_names(subject)
    looks: list[tuple[str, Tensor]] = []
    for i, one in placed.items():
        looks.append((f"writes outside {names[i]}", one.was_overrun()))
        if i not in subject.writes:
            looks.append((f"changes its input {names[i]}", one.was_changed()))
    past = "writes past the end of what it allocated"
    looks += [(past, is_overrun) for is_overrun in guarded.was_overrun()]
    given = "changes the gradient that it is given"
    looks += [(given, look()) for one in arriving for look in (one.was_changed, one.was_overrun)]
    is_found = read([look for _, look in looks])
    found = (fault for (fault, _), is_so in zip(looks, is_found, strict=True) if is_so)
    return list(dict.fromkeys(found))


def argument_names(subject: Subject) -> list[str]:
    """Return the names of the arguments, as the truth calls them."""
    return list(inspect.signature(subject.truth).parameters)
