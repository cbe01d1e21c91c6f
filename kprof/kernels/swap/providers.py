"""Choice of the provider for a call: the one asked for, else the fastest measured, else ours."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, kernel_named
from kprof.kernels.bench.choice import (
    FALLBACK,
    Choice,
    bucket_of,
    find_choice,
    passes_of,
    why_beyond,
)
from kprof.kernels.runtime import IS_INTERPRETED
from kprof.kernels.swap.sites import FAMILIES
from kprof.kernels.swap.swap_report import AUTO, NEEDS_GPU, UNMEASURED

# Providers that run on every device of torch; the others need a GPU.
ANYWHERE = ("aten", "eager", "inductor")
# It compiles for each shape.
INDUCTOR = "inductor"
# Our kernel in a site that saves less memory for gradients: not measured, but may be asked for.
LEAN = "kprof-lean"
LEAN_SITES = ("swiglu", "geglu")
# Providers that are the replaced code itself, eager and compiled.
ORIGINAL = (FALLBACK, INDUCTOR)
AS_FAST = "no provider was measured to be faster than the original"

Chosen = tuple[Callable[..., Any] | None, str | None, str | None]


class Providers:
    """Chooses a function for calls of a kernel: function and provider, or the reason for none."""

    launches = True
    """Whether functions are called that launch kernels."""

    def __init__(self, kernels: Mapping[str, Kernel], forced: Mapping[str, str]) -> None:
        self._forced = forced
        self._unmeasured = {name: kernel.unmeasured for name, kernel in kernels.items()}
        self._chosen: dict[Hashable, Choice | None] = {}
        self._loaded: dict[tuple[str, str], Callable[..., Any] | str] = {}
        for kernel in kernels.values():
            self._check(kernel)

    def _check(self, kernel: Kernel) -> None:
        name = self._forced.get(kernel.name, OURS)
        function = self._load(kernel, name)
        if isinstance(function, str):
            raise KprofError(
                f"{kernel.name} by {name} cannot be loaded: {function}",
                fix="install it, or name another provider: kprof kernels list",
            )

    def choose(
        self,
        kernel: Kernel,
        x: Tensor,
        shape: tuple[int, ...],
        *,
        is_default: bool,
        arguments: tuple[Any, ...] | None = None,
    ) -> Chosen:
        """Choose a provider for calls with such a first argument.

        Without measurements it is the kernel's `unmeasured`, ours by default: otherwise a swap on a
        new machine would do nothing. Where another provider is faster, `kprof kernels bench` finds
        it, and calls go there.

        Args:
            kernel: Of these calls.
            x: Its first tensor.
            shape: As the kernel's bench counts shapes.
            is_default: Whether the options are those that were measured; else ours alone has them.
            arguments: Of the call; a provider that was asked for may have fewer options.
        """
        name = self._forced.get(kernel.name)
        if name is None:
            fastest = self._fastest(kernel, x, shape)
            name = fastest or kernel.unmeasured
            if name == FALLBACK:
                return None, None, UNMEASURED if fastest is None else AS_FAST
            name = name if is_default else OURS
        if not self._runs(name, x.device.type):
            return None, None, NEEDS_GPU
        choice = self._choice(kernel, x, shape)
        scope = choice.scope if choice is not None and choice.provider == name else None
        why = why_beyond(kernel, x, shape, scope)
        if why is not None:
            return None, None, why
        function = self._load(kernel, name)
        if isinstance(function, str):
            return None, None, f"{name} cannot be loaded: {function}"
        if arguments is not None and not _takes(function, arguments):
            return None, None, f"{name} has no such options"
        return function, name, None

    def compiled(self, kernel: Kernel) -> dict[str, Callable[..., Any]]:
        """Return the function of calls under torch.compile, by device type; none: the original."""
        name = self.name(kernel.name)
        function = self._load(kernel, name)
        # In a compiled graph, Inductor compiles the original anyway.
        is_left = name == INDUCTOR or (name in ORIGINAL and kernel.name not in self._forced)
        if isinstance(function, str) or is_left:
            return {}
        return {one: function for one in ("cuda", "cpu") if self._runs(name, one)}

    def name(self, kernel: str) -> str:
        """Return the provider of a kernel without measurements."""
        return self._forced.get(kernel, self._unmeasured[kernel])

    def _runs(self, name: str, device: str) -> bool:
        return device == "cuda" or (device == "cpu" and (name in ANYWHERE or IS_INTERPRETED))

    def _load(self, kernel: Kernel, name: str) -> Callable[..., Any] | str:
        if (kernel.name, name) not in self._loaded:
            try:
                self._loaded[kernel.name, name] = _provider_of(kernel, name).load()
            except ImportError as error:
                self._loaded[kernel.name, name] = str(error)
        return self._loaded[kernel.name, name]

    def _fastest(self, kernel: Kernel, x: Tensor, shape: tuple[int, ...]) -> str | None:
        choice = self._choice(kernel, x, shape)
        return None if choice is None or _compiles_anew(choice, shape) else choice.provider

    def _choice(self, kernel: Kernel, x: Tensor, shape: tuple[int, ...]) -> Choice | None:
        if x.device.type != "cuda":
            return None
        direction = passes_of(kernel)[-1 if torch.is_grad_enabled() else 0]
        bucket = bucket_of(kernel, shape)
        key = (kernel.name, x.device, x.dtype, bucket, direction)
        if key not in self._chosen:
            gpu = torch.cuda.get_device_name(x.device)
            dtype = str(x.dtype).removeprefix("torch.")
            self._chosen[key] = find_choice(kernel, gpu, dtype, shape, direction)
        return self._chosen[key]


class DryProviders(Providers):
    """Chooses as `Providers` does, for a dry run: every call runs the original.

    Nothing is launched: a kernel is not compared with the original on random rows either.
    """

    launches = False

    def _check(self, kernel: Kernel) -> None:
        """Let each call have the reason why a kernel cannot be loaded."""

    def choose(
        self,
        kernel: Kernel,
        x: Tensor,
        shape: tuple[int, ...],
        *,
        is_default: bool,
        arguments: tuple[Any, ...] | None = None,
    ) -> Chosen:
        """Return the provider without its function, or the reason for none."""
        _, provider, why = super().choose(
            kernel, x, shape, is_default=is_default, arguments=arguments
        )
        return None, provider, why

    def compiled(self, kernel: Kernel) -> dict[str, Callable[..., Any]]:
        """Return no function: compiled code stays as it is."""
        return {}


def _takes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    """Return whether a function accepts so many arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        # A builtin without a signature.
        return True
    return True


def _compiles_anew(choice: Choice, shape: tuple[int, ...]) -> bool:
    """Return whether a call of this bucket would be compiled for a shape that was not measured."""
    measured = choice.measured[0].shape
    return choice.provider == INDUCTOR and math.prod(shape) != math.prod(measured)


WITH_SITES = frozenset(name for kernels in FAMILIES.values() for name in kernels)
"""Kernels that a swap can put into models."""


def kernels_named(names: Mapping[str, str | None]) -> dict[str, Kernel]:
    """Return the kernels of these names.

    Raises:
        KprofError: no such kernel or provider, or no call site in any model takes the kernel.
    """
    if AUTO in names:
        raise KprofError(
            f"{AUTO} stands for all kernels, and has no others beside it",
            fix=f"give {AUTO} alone, or name kernels",
        )
    found = {name: kernel_named(name) for name in names}
    for name, provider in names.items():
        if name not in WITH_SITES:
            raise KprofError(
                f"no swap puts {name} into a model",
                fix=f"call it yourself; these have call sites: {', '.join(sorted(WITH_SITES))}",
            )
        if provider is not None:
            _provider_of(found[name], provider)
    return found


def _provider_of(kernel: Kernel, name: str) -> Provider:
    """Return the provider of this name.

    Raises:
        KprofError: the kernel has no such provider.
    """
    return kernel.provider(OURS if name == LEAN and kernel.name in LEAN_SITES else name)
