"""Dispatch of each call at a site: to a provider's function, or to the original with the reason.

The original, and peers' code, may call functions of torch that a swap of the whole process
dispatches, too. A swap decides about a call once (the re-entrancy guard); another swap decides for
itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._C import _is_tracing as is_tracing
from torch._C._functorch import maybe_current_level

from kprof.analyze.kernel_times import is_ours
from kprof.kernels import Kernel
from kprof.kernels.runtime import is_forward_mode
from kprof.kernels.swap.patches import content_of
from kprof.kernels.swap.probes import Setting
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.reads import ABSENT, Reads
from kprof.kernels.swap.swap_report import Calls

if TYPE_CHECKING:
    from kprof.kernels.fp8._copies import CopyMaker


class _Decided(threading.local):
    """The swaps that have decided about the call that runs in this thread, by their providers."""

    by: tuple[object, ...] = ()


_decided = _Decided()


def has_decided(swap: object) -> bool:
    """Return whether this swap has decided about the call that runs now."""
    return any(one is swap for one in _decided.by)


def guarded(function: Callable[..., Any], swap: object) -> Callable[..., Any]:
    """Return a function during which a swap does not dispatch calls of torch's functions again."""

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
# Decisions that a site caches: shapes that never recur must not fill the memory.
MOST_KEYS = 512


class Decision:
    """The function that calls of one sort go to, and their count."""

    __slots__ = ("function", "num_calls", "num_joined", "provider", "why")

    def __init__(
        self, function: Callable[..., Any] | None, provider: str | None, why: str | None
    ) -> None:
        self.function = function
        self.provider = provider
        self.why = why
        self.num_calls = 0
        self.num_joined = 0
        """Of these, calls of FP8 layers whose input had an FP8 copy."""


class Dispatcher:
    """Decides about the calls at one site, once for each sort of call."""

    def __init__(
        self,
        kernel: Kernel,
        providers: Providers,
        settings: frozenset[Setting],
        *,
        is_default: bool = True,
        maker: CopyMaker | None = None,
    ) -> None:
        """Dispatch calls in these `settings` to a kernel.

        `is_default`: every provider supports its options. `maker`: records its FP8 copies.
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
        """Decide about a call with these arguments of the kernel, and cache the decision.

        `shape`: as the kernel's bench counts shapes [that of the first argument]. `is_default`:
        whether every provider supports these options.
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
        """Choose a provider, unless `why` says why the kernel is not used; cache the decision."""
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

    def forget(self) -> None:
        """Choose a function anew for every sort of calls; counts stay."""
        self.known.clear()
        for one in self._all.values():
            one.function = None

    def close(self) -> None:
        """Leave all calls to the original: filters exclude this site."""
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether filters select this site."""
        return self._is_open

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function during which this swap does not dispatch torch's functions."""
        return guarded(function, self._providers)

    def tracing(self) -> Callable[..., Callable[..., Any] | None]:
        """Return a function that decides about calls under torch.compile, which can trace it."""
        settings, refuses = self.settings, self.kernel.refuses
        # Only if rows can be counted without branches, for torch.compile.
        counts_rows = len(self.kernel.shapes[0]) == 2 and bool(self.kernel.reach)
        most_rows = self.kernel.reach[0] if counts_rows else 0
        functions = self._providers.compiled(self.kernel)
        note = self.noting()

        def trace(*arguments: Any) -> Callable[..., Any] | None:
            x = arguments[0]
            if _is_exporting() or is_forward_mode() or type(x) not in PLAIN:
                return None
            # No constant: layers that are compiled one by one share graphs.
            if not self._is_open or _is_in_transform():
                return None
            device = x.device.type
            cast = None
            if torch.is_autocast_enabled(device):
                cast = torch.get_autocast_dtype(device)
            function = functions.get(device)
            is_taken = function is not None and (x.dtype, cast) in settings
            is_taken = is_taken and refuses(*arguments) is None
            if is_taken and most_rows:
                is_taken = _is_surely(x.numel() <= most_rows * x.shape[-1])
            note(is_taken)
            return function if is_taken else None

        return trace

    def noting(self) -> Callable[[bool], bool]:
        """Return a function that counts a compiled call, replaced or not."""
        num_traced = self._num_traced

        @_as_constant
        def note(is_replaced: bool) -> bool:
            num_traced[is_replaced] += 1
            return is_replaced

        return note

    def calls(self) -> tuple[Calls, ...]:
        """Return the counts of all decisions so far."""
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
        why = _why_not_now()
        if why is not None:
            return why
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
        decision = self._all.get((provider, why))
        if decision is None:
            decision = self._all[provider, why] = Decision(None, provider, why)
        if decision.function is None and function is not None:
            if not is_ours(provider or ""):
                function = self.guarded(function)
            if self._maker is not None:
                function = self._maker.wrap(function)
            decision.function = function
        return decision


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


def _why_not_now() -> str | None:
    """Return which mode of torch kernels do not support."""
    if maybe_current_level() is not None:
        return "inside a transform of torch.func"
    if is_tracing():
        # A kernel would be a call of Python, which a traced graph cannot be saved with.
        return "torch.jit traces it"
    return "derivatives are computed in forward mode" if is_forward_mode() else None


def key_of(x: Tensor, other: Tensor | None = None, third: Tensor | None = None) -> Hashable:
    """Return the key of a call's decision: its tensors, and torch's modes."""
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
        is_tracing(),
    )


def cast_of(x: Tensor) -> torch.dtype | None:
    """Return the autocast dtype of this tensor's device; None without autocast."""
    device = x.device.type
    # Torch raises on devices without autocast, such as meta.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def _as_constant(function: Callable[..., bool]) -> Callable[..., bool]:
    """Mark a function that the compiler calls once, during tracing.

    `torch.compiler.assume_constant_result` does the same, but imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _is_surely(claim: Any) -> bool:
    """Return whether a claim about sizes holds; of sizes that data decides, whether it always does.

    A compiler that traces this guards sizes that it knows, and breaks no graph for others.
    """
    # Imported where compilers have imported it: it takes seconds.
    from torch.fx.experimental import symbolic_shapes

    # Before torch 2.8, a graph breaks at sizes that data decides.
    return bool(getattr(symbolic_shapes, "guard_or_false", bool)(claim))


@_as_constant
def _is_in_transform() -> bool:
    """Return whether a transform of torch.func is active, which kernels do not support."""
    return maybe_current_level() is not None


@_as_constant
def _is_exporting() -> bool:
    """Return whether a graph is exported; torch 2.11 says so of all graphs inside of them."""
    return torch.compiler.is_exporting()


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
