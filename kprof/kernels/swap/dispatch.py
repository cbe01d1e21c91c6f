"""Dispatch of each call at a site: to a provider's function, or to the original with the reason.

A site's original, and others' code that runs there, calls functions of torch's that a swap of the
whole process dispatches, too. One decision of a swap about a call is enough, and is counted once
(the re-entrancy guard); another swap decides for itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C._functorch import maybe_current_level

from kprof.analyze.kernel_times import is_ours
from kprof.kernels import Kernel
from kprof.kernels.runtime import is_forward_mode
from kprof.kernels.swap.patches import content_of
from kprof.kernels.swap.probes import Setting
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.reads import ABSENT, Reads
from kprof.kernels.swap.report import Calls

if TYPE_CHECKING:
    from kprof.kernels.fp8._copies import CopyMaker


class _Decided(threading.local):
    """Which swaps have decided about what runs now in this thread; each by what is its own."""

    by: tuple[object, ...] = ()


_decided = _Decided()


def has_decided(swap: object) -> bool:
    """Tell whether this swap has decided about what runs now."""
    return any(one is swap for one in _decided.by)


def guarded(function: Callable[..., Any], swap: object) -> Callable[..., Any]:
    """Return a function about whose calls of torch's functions a swap does not decide again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _decided.by
        _decided.by = (*before, swap)
        try:
            return function(*args, **kwargs)
        finally:
            _decided.by = before

    return call


PLAIN = (Tensor, torch.nn.Parameter)
OTHERWISE = "it is called in another way than with one tensor"
UNWANTED = "it is not among those that were asked for"
# Beyond, what was found out is found out again: shapes that never come back must not pile up.
MOST_KEYS = 512


class Decision:
    """Where calls of one sort go, and how many went there."""

    __slots__ = ("function", "num_calls", "num_joined", "provider", "why")

    def __init__(
        self, function: Callable[..., Any] | None, provider: str | None, why: str | None
    ) -> None:
        self.function = function
        self.provider = provider
        self.why = why
        self.num_calls = 0
        self.num_joined = 0
        """Of these: layers in FP8 whose input came with its rows in FP8."""


class Dispatcher:
    """The ways of the calls at one site, found once for each sort of call."""

    def __init__(
        self,
        kernel: Kernel,
        providers: Providers,
        settings: frozenset[Setting],
        *,
        is_default: bool = True,
        maker: CopyMaker | None = None,
    ) -> None:
        """Let calls in these `settings` go to a kernel.

        `is_default`: any provider knows how. `maker`: remembers what the kernel makes.
        """
        self.kernel = kernel
        self.known: dict[Hashable, Decision] = {}
        self.settings = settings
        self._providers = providers
        self._is_default = is_default
        self._maker = maker
        self._all: dict[tuple[str | None, str | None], Decision] = {}
        self._num_traced = [0, 0]
        self._is_open = True

    def decide(
        self,
        key: Hashable,
        arguments: tuple[Any, ...],
        shape: tuple[int, ...] | None = None,
        *,
        is_default: bool = True,
    ) -> Decision:
        """Find the way of a call with these arguments of the kernel; remember it for the key.

        `shape`: as the kernel's bench counts shapes [that of the first argument]. `is_default`:
        whether any provider knows these options.
        """
        shape = arguments[0].shape if shape is None else shape
        why = self._why_not(arguments)
        return self.settle(key, why, arguments[0], shape, is_default, arguments)

    def settle(
        self,
        key: Hashable,
        why: str | None,
        x: Tensor,
        shape: tuple[int, ...],
        is_default: bool,
        arguments: tuple[Any, ...] | None = None,
    ) -> Decision:
        """Find the way of calls that the kernel takes, unless there is a reason why it does not."""
        function, provider = None, None
        if why is None:
            is_default = is_default and self._is_default
            function, provider, why = self._providers.choose(
                self.kernel, x, shape, is_default=is_default, arguments=arguments
            )
        decision = self._decision(function, provider, why)
        if len(self.known) >= MOST_KEYS:
            self.known.clear()
        self.known[key] = decision
        return decision

    def leave_out(self, why: str) -> None:
        """Count a call that goes to the original."""
        self._decision(None, None, why).num_calls += 1

    def close(self) -> None:
        """Leave all calls to the original: nobody wants the kernel here."""
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether the kernel is wanted here."""
        return self._is_open

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function during whose calls this swap decides about none of torch's."""
        return guarded(function, self._providers)

    def tracing(self) -> Callable[..., Callable[..., Any] | None]:
        """Return the decision for calls that are being compiled, as a compiler can read it."""
        settings, refuses = self.settings, self.kernel.refuses
        # Only where a call's rows can be counted without branches: a compiler reads this.
        counts_rows = len(self.kernel.shapes[0]) == 2 and bool(self.kernel.reach)
        most_rows = self.kernel.reach[0] if counts_rows else 0
        functions = self._providers.compiled(self.kernel)
        note = self.noting()

        @_as_constant
        def _is_closed() -> bool:
            return not self._is_open

        def trace(*arguments: Any) -> Callable[..., Any] | None:
            x = arguments[0]
            if _is_exporting() or is_forward_mode() or type(x) not in PLAIN:
                return None
            if _is_closed() or _is_in_transform():
                return None
            device = x.device.type
            cast = None
            if torch.is_autocast_enabled(device):
                cast = torch.get_autocast_dtype(device)
            function = functions.get(device)
            is_taken = function is not None and (x.dtype, cast) in settings
            is_taken = is_taken and refuses(*arguments) is None
            if most_rows:
                is_taken = is_taken and x.numel() <= most_rows * x.shape[-1]
            note(is_taken)
            return function if is_taken else None

        return trace

    def noting(self) -> Callable[[bool], bool]:
        """Return what counts a call that is being compiled: replaced or not."""
        num_traced = self._num_traced

        @_as_constant
        def note(is_replaced: bool) -> bool:
            num_traced[is_replaced] += 1
            return is_replaced

        return note

    def calls(self) -> tuple[Calls, ...]:
        """Return how many calls went each way so far."""
        counted = [
            Calls(w.num_calls, w.provider, w.why, num_joined=w.num_joined)
            for w in self._all.values()
        ]
        away, replaced = self._num_traced
        provider = self._providers.name(self.kernel.name)
        traced = (
            Calls(replaced, provider, None, True),
            Calls(away, None, "refused while it was compiled", True),
        )
        return tuple(one for one in (*counted, *traced) if one.num_calls)

    def _why_not(self, arguments: tuple[Any, ...]) -> str | None:
        if not self._is_open:
            return UNWANTED
        if maybe_current_level() is not None:
            return "inside a transform of torch.func"
        if is_forward_mode():
            return "derivatives are computed in forward mode"
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        for one in tensors:
            if type(one) not in PLAIN:
                return f"a {type(one).__name__} is no plain tensor"
        if len({one.device for one in tensors if one.dim()}) > 1:
            return "its tensors are on several devices"
        dtype, cast = tensors[0].dtype, cast_of(tensors[0])
        if (dtype, cast) not in self.settings:
            under = f" under autocast to {_short(cast)}" if cast else ""
            return f"with {_short(dtype)}{under}, the original computes something else"
        return self.kernel.refuses(*arguments)

    def _decision(
        self, function: Callable[..., Any] | None, provider: str | None, why: str | None
    ) -> Decision:
        if (provider, why) not in self._all:
            if function is not None and not is_ours(provider or ""):
                function = self.guarded(function)
            if function is not None and self._maker is not None:
                function = self._maker.wrap(function)
            self._all[provider, why] = Decision(function, provider, why)
        return self._all[provider, why]


def changes_of(reads: Reads) -> Callable[[Any], bool] | None:
    """Return a test at each call whether a value that code reads has changed; None: none can.

    It is cheap, and a compiler can read it. It takes the module; a function has None.
    """
    others = _changes_elsewhere(reads) if reads.others or reads.cells else None
    if not (reads.own or reads.empty):
        return others
    own, empty = tuple(reads.own), tuple(reads.empty)

    def is_changed(owner: Any) -> bool:
        namespace = owner.__dict__
        for name, value in own:
            now = namespace.get(name, ABSENT)
            if now is not value and now != value:
                return True
        for name in empty:
            if getattr(owner, name, None) is not None:
                return True
        return others is not None and others(owner)

    return is_changed


def _changes_elsewhere(reads: Reads) -> Callable[[object], bool]:
    """Return the test for values that are no attributes of the module."""
    # Plain tuples: a compiler, and a call, take longer to read the fields of named ones.
    found = tuple(tuple(one) for one in reads.others)
    enclosed = tuple((cell, value) for _, cell, value in reads.cells)

    def is_changed(owner: object) -> bool:
        for namespace, name, value in found:
            now = namespace.get(name, ABSENT)
            # Compilers know plain values by what they equal.
            if now is not value and now != value:
                return True
        return any(content_of(cell) is not value for cell, value in enclosed)

    return is_changed


def key_of(x: Tensor, other: Tensor | None = None, third: Tensor | None = None) -> Hashable:
    """Return what the way of a call depends on, as far as these tensors and torch's modes tell."""
    return (
        x.shape,
        x.dtype,
        x.get_device(),
        type(x),
        other is not None and (other.shape, other.dtype, other.get_device(), type(other)),
        third is not None and (third.shape, third.dtype, third.get_device(), type(third)),
        is_grad_enabled(),
        is_any_autocast_enabled() and cast_of(x),
        maybe_current_level(),
        is_forward_mode(),
    )


def cast_of(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the autocast that is on for this tensor's device, None where none is."""
    device = x.device.type
    # On what has no autocast, such as meta, torch raises.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def _as_constant(function: Callable[..., bool]) -> Callable[..., bool]:
    """Mark a function that the compiler calls once, while it traces.

    As `torch.compiler.assume_constant_result` does, which imports the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_as_constant
def _is_in_transform() -> bool:
    """Tell whether a transform of torch.func is being compiled, of which kernels know nothing."""
    return maybe_current_level() is not None


@_as_constant
def _is_exporting() -> bool:
    """Tell whether a graph is made to be exported; inside graphs, torch 2.11 says so of all."""
    return torch.compiler.is_exporting()


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
