"""Activations: modules that compute a GELU or a squared ReLU of each element, under any name.

A probe runs the module's own code on random rows. The candidate that agrees tells which kernel
computes the same. Under autocast, code that writes a GELU out has a float32 result; where only a
linear layer reads it, the kernel writes it rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels import kernel_named
from kprof.kernels.swap.dispatch import OTHERWISE, Dispatcher, cast_of, changes_of, key_of
from kprof.kernels.swap.patches import python_modules, why_foreign
from kprof.kernels.swap.probes import (
    ARITHMETIC,
    ARRANGING,
    CANNOT,
    CannotCopyError,
    Operators,
    Setting,
    are_alike,
    autocast_of,
    distance,
    have_same_gradients,
    is_another,
    is_more_exact,
    kind_of,
    probing,
    set_mode,
    set_number,
    settings_where,
    stand_in,
)
from kprof.kernels.swap.reads import CHANGED, Number, Reads, reads_of_module
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.uses import Narrowing

GELU, RELU_SQUARED = "gelu", "relu_squared"
# Kernel and options.
CANDIDATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (GELU, ("tanh",)),
    (GELU, ("none",)),
    (GELU, ("sigmoid",)),
    (RELU_SQUARED, ()),
)
# float32 distinguishes candidates that agree in fewer bits.
IN_FULL: Setting = (torch.float32, None)
# Scales of rows: the last ones show clamps of large numbers.
SCALES = (1.0, 1e-2, 3.0, 3.0, 3.0, 10.0, 50.0, 3e3)
COLUMNS = 64
LEADS = ((8,), (2, 4), (2, 2, 2), (1, 1), (1, 130))
OPERATORS = ARRANGING | ARITHMETIC
OPERATORS |= {"clamp_min", "erf", "exp", "gelu", "relu", "sigmoid", "tanh"}
# Operators that compute such an activation alone.
ALONE = {"gelu"}
NAMES = ("gelu", "relu2", "relusquared", "squaredrelu")
ONE_OPERATOR = "torch computes it by one operator"
SPREAD = "its elements are not contiguous, which the original's result keeps"
# The square of a value must be finite.
LARGEST_OF = {torch.float16: 150.0}


@dataclass(frozen=True)
class Recognised:
    """A recognised activation."""

    kernel: str
    options: tuple[str, ...]
    is_one_operator: bool
    settings: frozenset[Setting]
    made: Mapping[Setting, torch.dtype]
    """The dtype of its results, where it is not that of its input."""

    def dtype_for(self, x: Tensor, readers: Narrowing | None = None) -> torch.dtype | None:
        """Return the dtype of the result of a call; None: x's.

        `readers`: linear layers that alone read the result, and round it.
        """
        made = self.made.get((x.dtype, cast_of(x)), x.dtype) if self.made else x.dtype
        made = (None if readers is None else readers.dtype_for(x, made)) or made
        return None if made == x.dtype else made


def looks_like_one(module: Module) -> bool:
    """Return whether a module may be an activation: it has no weights and no children."""
    cls = type(module)
    has_own = module._parameters or module._buffers or module._modules
    return not (has_own or _is_other(cls) or isinstance(module, torch.jit.ScriptModule))


def _is_other(cls: type) -> bool:
    return cls.__module__.startswith("torch.") and cls is not torch.nn.GELU


def activation_of(module: Module, request: Request) -> Recognised | str | None:
    """Return a recognised activation, or why it was not recognised; None: it is none."""
    if not looks_like_one(module):
        return None
    found: Recognised | str | None = request.once(
        ("activation", *kind_of(module)), _recognised, module
    )
    return found


def reads_of(module: Module) -> Reads | str:
    """Return what the code of an activation reads, or why this is not known."""
    return reads_of_module(module)


def _recognised(module: Module) -> Recognised | str | None:
    is_named = any(name in type(module).__name__.lower() for name in NAMES)
    reads = reads_of(module)
    found = reads if isinstance(reads, str) else recognise(module, reads)
    return found if isinstance(found, Recognised) or is_named else None


def recognise(module: Module, reads: Reads) -> Recognised | str:
    """Recognise an activation; a sentence says why it is not known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with probing(device) as generator:
        try:
            probe = Probe(module, device, generator)
            original = probe.original(IN_FULL)
        except CannotCopyError as error:
            return str(error)
        except CANNOT as error:
            return f"its own code failed on random rows ({type(error).__name__}: {error})"
        best = min(CANDIDATES, key=lambda one: distance(probe.replaced(one), original))
        if not are_alike(probe.replaced(best), original):
            return "it computes neither a GELU nor a squared ReLU"
        settings = settings_where(lambda setting: probe.agrees(setting, best))
        if IN_FULL not in settings:
            return "it computes something else when it trains"
        why = probe.why_another(best)
        if why is not None:
            return why
        for number in reads.numbers:
            if probe.is_read(number):
                return f"it reads {number.title}, which the kernel does not take"
        made = {one: probe.dtype_of(one) for one in settings}
        made = {one: dtype for one, dtype in made.items() if dtype != one[0]}
        return Recognised(*best, probe.names <= ALONE, settings, made)


class Probe:
    """Runs an activation's own code and candidates on the same rows."""

    def __init__(self, module: Module, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        self._module = stand_in(module, {}, {})
        scales = torch.tensor(SCALES)[:, None]
        self.rows = (scales * torch.randn(len(SCALES), COLUMNS, generator=generator)).to(device)
        self.names: set[str] = set()
        """Of the operators that ran."""

    def original(
        self, setting: Setting, is_training: bool = False, lead: tuple[int, ...] = LEADS[0]
    ) -> Any:
        """Return the result of the module's code."""
        dtype, cast = setting
        set_mode(self._module, is_training)
        with autocast_of(self._device, cast):
            return type(self._module).forward(self._module, self._rows_in(lead, dtype))

    def _rows_in(self, lead: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        num_rows, largest = math.prod(lead), LARGEST_OF.get(dtype, math.inf)
        rows = self.rows.repeat(-(-num_rows // len(self.rows)), 1)[:num_rows]
        return rows.unflatten(0, lead).clamp(-largest, largest).to(dtype)

    def replaced(self, one: tuple[str, tuple[str, ...]]) -> object:
        """Return the float32 result of a candidate's reference."""
        return kernel_named(one[0]).reference(self.rows, *one[1])

    def dtype_of(self, setting: Setting) -> torch.dtype:
        """Return the dtype of a result."""
        dtype: torch.dtype = self.original(setting).dtype
        return dtype

    def agrees(self, setting: Setting, one: tuple[str, tuple[str, ...]]) -> bool:
        """Return whether a candidate's result is the original's, or has fewer roundings."""
        x, (name, options) = self._rows_in(LEADS[0], setting[0]), one
        kernel = kernel_named(name)
        truth = kernel.truth(x.double(), *options)
        for is_training in (False, True):
            original = self.original(setting, is_training)
            if name != GELU and original.dtype != x.dtype:
                return False
            wide = kernel.truth(x.float(), *options).to(original.dtype)
            is_known = are_alike(wide, original)
            if not (is_known or is_more_exact(wide, original, truth, setting[0])):
                return False
        return True

    def why_another(self, one: tuple[str, tuple[str, ...]]) -> str | None:
        """Return which gradient, operator or shape it has that a candidate has not."""
        name, options = one
        reference = kernel_named(name).reference

        def compute(rows: Tensor) -> object:
            return type(self._module).forward(self._module, rows)

        # Without the largest values, whose slopes are 0 or 1.
        if not have_same_gradients(lambda x: reference(x, *options), compute, self.rows[:6]):
            return "its gradients are those of something else"
        x = self.rows.clone()
        version = x._version
        for is_training in (False, True):
            set_mode(self._module, is_training)
            with Operators(x) as operators:
                compute(x)
            why = operators.why_not(OPERATORS)
            if why is not None:
                return why
            self.names |= operators.names
        if x._version != version:
            return "it writes to its input"
        for lead in LEADS:
            expected = reference(self._rows_in(lead), *options)
            if not are_alike(expected, self.original(IN_FULL, lead=lead)):
                return f"it computes something else for inputs of {lead} rows"
        return None

    def is_read(self, number: Number) -> bool:
        """Return whether the result depends on this number."""
        return is_another(
            lambda: [self.original(IN_FULL, one) for one in (False, True)],
            set_number(self._module, number),
        )


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the activations below a module."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        label, what = name or type(module).__name__, type(module).__name__
        found = activation_of(module, request)
        kernel = GELU if isinstance(found, str) else found.kernel if found is not None else ""
        if found is not None and kernel in request.kernels:
            why = why_foreign(module) or (found if isinstance(found, str) else None)
            reads = reads_of(module)
            if isinstance(found, str) or isinstance(reads, str) or why is not None:
                yield Skip(label, kernel, what, why or str(reads))
            elif found.is_one_operator:
                yield Skip(label, kernel, what, ONE_OPERATOR)
            else:
                yield _site(label, module, found, reads, request)


def _site(name: str, module: Module, found: Recognised, reads: Reads, request: Request) -> Site:
    dispatcher = Dispatcher(
        request.kernels[found.kernel],
        request.providers,
        found.settings,
        is_default=found.options in (CANDIDATES[0][1], ()),
    )
    switch, original = Switch(), type(module).forward
    put = bound(_activating(original, found, reads, dispatcher, switch), original, switch)
    return Site(name, module, put, dispatcher, switch=switch, why_changed=reads.why_changed)


def _activating(
    original: Callable[..., Any],
    found: Recognised,
    reads: Reads,
    dispatcher: Dispatcher,
    switch: Switch,
) -> Callable[..., Any]:
    """Return the forward of a swapped activation. A compiler fuses the original by itself."""
    known, decide, note = dispatcher.known, dispatcher.decide, dispatcher.noting()
    run_original, is_changed = running_original(original, dispatcher, switch), changes_of(reads)

    def forward(
        self: Any,
        x: Any = None,
        /,
        *args: Any,
        kprof_readers: Narrowing | None = None,
        **kwargs: Any,
    ) -> Any:
        if switch.owner is not self or args or kwargs or not isinstance(x, Tensor):
            return run_original(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        if is_compiling():
            note(False)
            return original(self, x)
        if is_changed is not None and is_changed(self):
            return run_original(self, CHANGED, x)
        if not x.is_contiguous():
            return run_original(self, SPREAD, x)
        dtype = found.dtype_for(x, kprof_readers)
        arguments = (x, *found.options) if dtype is None else (x, *found.options, dtype)
        key = key_of(x), dtype
        decision = known.get(key) or decide(key, arguments)
        decision.num_calls += 1
        function = decision.function
        return original(self, x) if function is None else function(*arguments)

    return forward


FAMILY = Family(kernels=(GELU, RELU_SQUARED), find=find)
