"""GroupNorm and the SiLU after it: modules that hold both, as residual blocks of U-Nets do.

The norm returns a `LazyNorm`, a tensor that is computed when it is used. If the next use is the
SiLU of the same module, the kernel computes both at once; any other use gets the result of torch's
norm. The norm's input must not be written to before: modules whose forward writes in place, or
calls a function or a layer that does, are left alone.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import GroupNorm, Module, SiLU
from torch.utils._pytree import tree_map_only

from kprof.errors import KprofError
from kprof.kernels.swap.dispatch import OTHERWISE, Dispatcher, key_of
from kprof.kernels.swap.patches import (
    functions_reached,
    innermost,
    is_passed_over,
    python_modules,
    why_foreign,
)
from kprof.kernels.swap.probes import DTYPES, Setting
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family

GROUP_NORM_SILU = "group_norm_silu"
SETTINGS: frozenset[Setting] = frozenset((dtype, None) for dtype in DTYPES)
WATCHED = "it has hooks"
UNCOUNTED = "torch counts no writes to tensors of its inference mode"
ELSEWHERE = "its result goes elsewhere than to the SiLU"
MOVED = "its weights are no parameters of its own any more"
IN_PLACE = "the forward around it, or a function that it calls, writes in place"


class LazyNorm(Tensor):
    """The result of a norm, computed when it is used; of torch's shape, dtype and device."""

    _x: Tensor
    _version_of_x: int
    _compute: Callable[[Tensor], Tensor]
    _activate: Callable[[Tensor], Tensor]
    _value: Tensor | None

    @staticmethod
    def of(
        x: Tensor, compute: Callable[[Tensor], Tensor], activate: Callable[[Tensor], Tensor]
    ) -> LazyNorm:
        """Return the norm of x, which `compute` computes, or `activate` with its activation."""
        made: LazyNorm = Tensor._make_wrapper_subclass(
            LazyNorm, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        made._x, made._version_of_x, made._value = x, x._version, None
        made._compute, made._activate = compute, activate
        return made

    def activated(self) -> Tensor:
        """Return the activation of the norm, from the kernel if nothing has used the norm yet."""
        if self._value is not None:
            return torch.nn.functional.silu(self._value)
        return self._activate(self._input())

    def value(self) -> Tensor:
        """Return the norm as torch computes it."""
        if self._value is None:
            self._value = self._compute(self._input())
        return self._value

    def _input(self) -> Tensor:
        if self._x._version != self._version_of_x:
            raise KprofError(
                "the input of a GroupNorm was written to before the norm's result was used",
                fix=f"leave {GROUP_NORM_SILU} out of the swap",
            )
        return self._x

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch on the value."""
        with torch._C.DisableTorchFunctionSubclass():
            given = tree_map_only(LazyNorm, LazyNorm.value, (args, kwargs or {}))
            return function(*given[0], **given[1])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of torch on the value."""
        given = tree_map_only(LazyNorm, LazyNorm.value, (args, kwargs or {}))
        return function(*given[0], **given[1])


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the norms, and the activations, of modules that hold both."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        children = {key: one for key, one in module._modules.items() if one is not None}
        norms = {key: one for key, one in children.items() if type(one) is GroupNorm}
        activations = {key: one for key, one in children.items() if _is_silu(one)}
        if not (norms and activations):
            continue
        why_around = IN_PLACE if _writes_in_place(module) else None
        for key, norm in norms.items():
            label = f"{name}.{key}" if name else key
            why = why_foreign(norm) or why_around
            why = why or (None if _has_weights(norm) else "it has no weights")
            yield (
                Skip(label, GROUP_NORM_SILU, "GroupNorm", why)
                if why
                else _norm_site(label, norm, request)
            )
        for key, activation in activations.items():
            if why_foreign(activation) is None:
                yield _activation_site(f"{name}.{key}" if name else key, activation)


def _is_silu(module: Module) -> bool:
    return type(module) is SiLU and not module.inplace


def _writes_in_place(module: Module) -> bool:
    """Return whether the forward of a module, a function that it calls, or a child may write.

    To a tensor that it is given. Code that cannot be read may.
    """
    if any(getattr(one, "inplace", False) for one in module.children()):
        return True
    inner = innermost(type(module).forward)
    called = [] if inner is None else [*functions_reached(inner, module)]
    return inner is None or any(one is None or _may_write(one) for one in (inner, *called))


def _may_write(function: FunctionType) -> bool:
    """Return whether the code of a function writes to anything but variables of its own."""
    found = [one for one in dis.get_instructions(function) if one.opname != "CACHE"]
    added = {
        after.argval
        for one, after in pairwise(found)
        if one.opname.startswith("INPLACE_")
        or (one.opname == "BINARY_OP" and one.argrepr.endswith("="))
    }
    # A sum of numbers or of tuples begins as a constant.
    begun = {after.argval for one, after in pairwise(found) if one.opname == "LOAD_CONST"}
    given = {*function.__code__.co_varnames[: _count_arguments(function)]}
    return (
        bool(added - begun)
        or bool(added & given)
        or any(
            one.opname == "STORE_SUBSCR"
            or (isinstance(one.argval, str) and _is_in_place(one.argval))
            for one in found
        )
    )


def _count_arguments(function: FunctionType) -> int:
    code = function.__code__
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    variadic = sum(bool(code.co_flags & flag) for flag in flags)
    return code.co_argcount + code.co_kwonlyargcount + variadic


def _is_in_place(name: str) -> bool:
    """Return whether a name is one of torch's operations in place, as `add_`, or `out`."""
    return name == "out" or (name.endswith("_") and not name.endswith("__"))


def _has_weights(norm: Any) -> bool:
    own = norm._parameters
    return own.get("weight") is not None and own.get("bias") is not None


def _norm_site(name: str, norm: Module, request: Request) -> Site:
    dispatcher = Dispatcher(request.kernels[GROUP_NORM_SILU], request.providers, SETTINGS)
    original, switch = type(norm).forward, Switch()
    run_original = running_original(original, dispatcher, switch)
    note = dispatcher.noting()

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        given = () if x is None else (x, *args)
        if is_compiling():
            # A compiler fuses both by itself.
            note(False)
            return original(self, *given, **kwargs)
        is_alone = len(given) == 1 and not kwargs and isinstance(x, Tensor)
        why = _why_not(self, x) if is_alone else OTHERWISE
        if switch.owner is not self or why is not None:
            return run_original(self, str(why), *given, **kwargs)
        return _lazily(self, x, original, dispatcher)

    return Site(name, norm, bound(forward, original, switch), dispatcher, switch=switch)


def _why_not(norm: Any, x: Tensor) -> str | None:
    """Return why a call of a norm runs the original, whatever the kernel takes."""
    if not is_passed_over(norm):
        return WATCHED
    if not _has_weights(norm) or "weight" in norm.__dict__ or "bias" in norm.__dict__:
        return MOVED
    return UNCOUNTED if x.is_inference() else None


def _lazily(norm: Any, x: Tensor, original: Callable[..., Any], dispatcher: Dispatcher) -> Tensor:
    """Return the norm of x, computed with its activation if the kernel takes such a call."""
    options = norm.num_groups, norm.weight, norm.bias, norm.eps
    key = (key_of(x, norm.weight, norm.bias), norm.num_groups, x.is_contiguous())
    decision = dispatcher.known.get(key)
    if decision is None:
        spatial = x[0, 0].numel() if x.numel() else 0
        shape = (*x.shape[:2], spatial, norm.num_groups)
        decision = dispatcher.decide(key, (x, *options), shape)
    found = decision
    function = found.function
    if function is None:
        found.num_calls += 1
        result: Tensor = original(norm, x)
        return result

    def compute(x: Tensor) -> Tensor:
        dispatcher.leave_out(ELSEWHERE)
        result: Tensor = original(norm, x)
        return result

    def activate(x: Tensor) -> Tensor:
        found.num_calls += 1
        result: Tensor = function(x, *options)
        return result

    return LazyNorm.of(x, compute, activate)


def _activation_site(name: str, activation: Module) -> Site:
    """Return the site of an activation; it has no kernel of its own."""
    original, switch = type(activation).forward, Switch()

    def forward(self: Any, input: Any) -> Any:
        if type(input) is LazyNorm and switch.owner is self:
            return input.activated()
        return original(self, input)

    return Site(name, activation, bound(forward, original, switch), {}, switch=switch)


FAMILY = Family(kernels=(GROUP_NORM_SILU,), find=find)
