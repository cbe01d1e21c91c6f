"""Operators of torch, registered the cheap way: define and impl, with a fake for the compiler.

`torch.library.custom_op` costs several microseconds a call; this costs the dispatcher alone, and
not even that where it would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from kprof.errors import KprofError

NAMESPACE = "kprof"
PLAIN = frozenset((Tensor, torch.nn.Parameter))
_library = torch.library.Library(NAMESPACE, "DEF")


class DifferentiationError(KprofError):
    """A derivative that the operators do not have, and that would be 0 if nobody said so."""


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator and return a function that calls it, or directly what it runs.

    Args:
        schema: As torch writes it, such as "silu(Tensor x) -> Tensor".
        run: Does it, on CUDA; on a CPU it runs in Triton's interpreter, or not at all.
        fake: Makes outputs of the right shape, from inputs that hold no data.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    num_tensors = _count_tensors(operator)
    if num_tensors is None:
        return cast("Callable[..., Any]", operator)

    def call(*arguments: Any) -> Any:
        if is_compiling():
            _refuse_forward_mode()
            return operator(*arguments)
        if _is_dispatched(arguments[:num_tensors]):
            return operator(*arguments)
        return run(*arguments)

    return call


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies an autograd function; torch's way there costs a call several checks.

    Its gradients have none themselves: to ask for a graph of them raises DifferentiationError.
    """
    function.backward = staticmethod(_last(function.backward))
    run = super(torch.autograd.Function, function).apply

    def call(*arguments: Any) -> Any:
        if is_compiling() or peek_interpreter_stack() is not None:
            return function.apply(*arguments)
        return run(*arguments)

    return call


def _last(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that raises where it is to be differentiated itself."""

    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if is_grad_enabled() and not is_compiling():
            raise DifferentiationError(
                "this kernel has no gradient of its gradient",
                fix="leave out create_graph=True, or leave the original in its place",
            )
        return backward(ctx, *gradients)

    return run


def is_forward_mode() -> bool:
    """Tell whether derivatives are computed forwards, along with what they are of."""
    return forward_ad._current_level >= 0


def _refuse_forward_mode() -> None:
    if is_forward_mode():
        raise DifferentiationError(
            "this kernel has no derivative in forward mode",
            fix="differentiate backwards, or leave the original in its place",
        )


def _has_derivative(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _count_tensors(operator: Any) -> int | None:
    """Return how many tensors the arguments begin with; None where one is elsewhere, or a list."""
    types = [str(one.type) for one in operator._schema.arguments]
    count = next((i for i, one in enumerate(types) if "Tensor" not in one), len(types))
    if any("Tensor" in one for one in types[count:]) or any("List" in one for one in types[:count]):
        return None
    return count


def _is_dispatched(tensors: tuple[Tensor | None, ...]) -> bool:
    """Tell whether the dispatcher would do anything but call the implementation.

    It would record gradients, tell a mode, a transform, a tracer or a profiler, or know better
    what to do with a tensor.

    Raises:
        DifferentiationError: a tensor has a derivative with it, which the results would lack.
    """
    if is_forward_mode() and any(_has_derivative(one) for one in tensors):
        _refuse_forward_mode()
    if (
        _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or _profiler_enabled()
    ):
        return True
    wants_gradients = is_grad_enabled()
    for one in tensors:
        if one is not None and (
            type(one) not in PLAIN
            or (wants_gradients and one.requires_grad)
            or one.is_meta
            or one.is_neg()
        ):
            return True
    return False
