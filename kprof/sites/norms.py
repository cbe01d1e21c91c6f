"""Norms of rows: modules that compute an RMSNorm or a LayerNorm, whatever they are called.

The order in which a norm rounds, and where its epsilon is, are found by trying: what agrees with
the module's own code on random rows, some of them tiny, is what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.sites import Family
from kprof.sites._patches import why_foreign
from kprof.sites._probe import (
    CANNOT,
    DTYPES,
    Setting,
    are_alike,
    autocast_of,
    distance,
    kind_of,
    place_of,
    probing,
    set_mode,
    settings_where,
    stand_in,
)
from kprof.sites._site import Request, Site, Skip, Switch, bound
from kprof.sites._ways import Ways, key_of

RMSNORM, LAYERNORM = "rmsnorm", "layernorm"
FORMS = ("llama", "torch", "gemma")
USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
# Rows of which the epsilon is a small part, about half, and most.
SCALES = (1.0, 30.0, 1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 1.0)


@dataclass(frozen=True)
class Recognised:
    """What a norm computes."""

    kernel: str
    form: str | None
    """Of an RMSNorm: the order in which it rounds."""
    eps: float
    eps_name: str | None
    """The attribute that holds it; None: it is in the code."""
    settings: frozenset[Setting]


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the norms below a module."""
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        found = norm_of(module, request)
        if found is None:
            continue
        asked = [one for one in (RMSNORM, LAYERNORM) if one in request.kernels]
        kernel = found.kernel if isinstance(found, Recognised) else asked[0] if asked else ""
        if kernel not in request.kernels:
            continue
        label = name or type(module).__name__
        why = why_foreign(module) or (found if isinstance(found, str) else None)
        if why is None:
            why = request.once((*kind_of(module), kernel), _check, module, found, request)
        if why is not None:
            yield Skip(label, kernel, type(module).__name__, why)
        elif isinstance(found, Recognised):
            yield _site(label, module, found, request)


def norm_of(module: Module, request: Request) -> Recognised | str | None:
    """Return what a norm computes, or why it is none that is known; None: it looks like none."""
    if not _looks_like_a_norm(module):
        return None
    found: Recognised | str = request.once(kind_of(module), _recognise, module)
    return found


def _looks_like_a_norm(module: Module) -> bool:
    """Tell whether it has no children, no state, and one row of weights, if any, and an epsilon."""
    if module._modules or module._buffers or set(module._parameters) - {"weight", "bias"}:
        return False
    rows = [one for one in module._parameters.values() if one is not None]
    if not rows or any(one.dim() != 1 or one.shape != rows[0].shape for one in rows):
        return False
    return "norm" in type(module).__name__.lower() or bool(_eps_names(module))


def _eps_names(module: Module) -> list[str]:
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(value, float) and 0 <= value <= 1e-2
    ]


def _recognise(module: Module) -> Recognised | str:
    """Find out what a norm computes; a sentence says why it is none that is known."""
    device = place_of(module)
    with probing(device) as generator:
        probe = _Probe(module, device, generator)
        weight = next(one for one in module._parameters.values() if one is not None)
        dtype = weight.dtype
        if dtype not in DTYPES:
            return f"its weights are {str(dtype).removeprefix('torch.')}"
        try:
            original = probe.original((dtype, None))
        except CANNOT as error:
            return f"its own code failed on random rows ({type(error).__name__}: {error})"
        best = min(
            _candidates(module, dtype),
            key=lambda one: distance(probe.replaced((dtype, None), one), original),
        )
        if not are_alike(probe.replaced((dtype, None), best), original):
            return "it computes something else than an RMSNorm or a LayerNorm of rows"
        settings = settings_where(
            lambda setting: all(
                are_alike(probe.replaced(setting, best), probe.original(setting, is_training))
                for is_training in (False, True)
            )
        )
    if (dtype, None) not in settings:
        return "it computes something else when it trains"
    kernel, form, eps, eps_name = best
    return Recognised(kernel, form, eps, eps_name, settings)


Candidate = tuple[str, str | None, float, str | None]


def _candidates(module: Module, dtype: torch.dtype) -> Iterator[Candidate]:
    named = [(module.__dict__[name], name) for name in _eps_names(module)]
    usual = [(eps, None) for eps in (*USUAL_EPS, torch.finfo(dtype).eps)]
    for eps, name in (*named, *usual):
        if module._parameters.get("bias") is None:
            for form in FORMS:
                yield RMSNORM, form, eps, name
        yield LAYERNORM, None, eps, name


class _Probe:
    """Runs a norm's own code and its replacements on the same rows."""

    def __init__(self, module: Module, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        own = module._parameters
        columns = next(one.shape[0] for one in own.values() if one is not None)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self._parameters = {
            name: None if one is None else (0.5 + 0.2 * draw(columns)).to(one.dtype)
            for name, one in own.items()
        }
        self._module = stand_in(module, self._parameters, {})
        scales = torch.tensor(SCALES, device=device)[:, None]
        self._rows = draw(len(SCALES), columns) * scales + 0.1 * scales

    def original(self, setting: Setting, is_training: bool = False) -> object:
        """Return what the module's code computes."""
        dtype, cast = setting
        set_mode(self._module, is_training)
        with autocast_of(self._device, cast):
            return type(self._module).forward(self._module, self._rows.to(dtype))

    def replaced(
        self, setting: Setting, one: Candidate, function: Callable[..., Any] | None = None
    ) -> object:
        """Return what a candidate computes, by the reference or by another function."""
        kernel, form, eps, _ = one
        rows, weight = self._rows.to(setting[0]), self._parameters.get("weight")
        if kernel == RMSNORM:
            from kprof.kernels.rmsnorm import KERNEL

            options = () if form == FORMS[0] else (form,)
            return (function or KERNEL.reference)(rows, weight, eps, *options)
        from kprof.kernels.layernorm import KERNEL as LAYER

        bias = self._parameters.get("bias")
        return (function or LAYER.reference)(rows, weight, bias, eps)


def _check(module: Module, found: Recognised, request: Request) -> str | None:
    """Let the kernel itself run on the rows; a sentence says what is wrong with it."""
    device = place_of(module)
    kernel = request.kernels[found.kernel]
    with probing(device) as generator:
        probe = _Probe(module, device, generator)
        dtype = next(one.dtype for one in module._parameters.values() if one is not None)
        rows = probe._rows.to(dtype)
        function, provider, _ = request.providers.choose(
            kernel, rows, tuple(rows.shape), is_default=is_default(found)
        )
        if function is None:
            # Calls may come from another device, and are looked at one by one.
            return None
        new = probe.replaced((dtype, None), (found.kernel, found.form, found.eps, None), function)
        if not are_alike(new, probe.original((dtype, None))):
            return f"the kernel of {provider} does not agree with it on random rows"
    return None


def is_default(found: Recognised) -> bool:
    """Tell whether it rounds as every provider does."""
    return found.form in (None, FORMS[0])


def _site(name: str, module: Module, found: Recognised, request: Request) -> Site:
    kernel = request.kernels[found.kernel]
    maker, settings = request.new_maker(), found.settings
    ways = Ways(kernel, request.providers, settings, is_default=is_default(found), maker=maker)
    switch = Switch()
    original = type(module).forward
    make = _rmsnorm if found.kernel == RMSNORM else _layernorm
    put = bound(make(original, found, ways, switch), original, switch)
    return Site(name, module, put, ways, switch=switch)


def _rmsnorm(
    original: Callable[..., Any], found: Recognised, ways: Ways, switch: Switch
) -> Callable[..., Any]:
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    constant, eps_name = found.eps, found.eps_name
    options = () if is_default(found) else (found.form,)

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or x is None:
            return original(self, *(() if x is None else (x,)), *args, **kwargs)
        weight = self._parameters["weight"]
        eps = constant if eps_name is None else getattr(self, eps_name)
        if is_compiling():
            function = trace(x, weight, eps, *options)
        else:
            key = key_of(x, weight)
            way = known.get(key) or decide(key, (x, weight, eps, *options))
            way.num_calls += 1
            function = way.function
        if function is None:
            return original(self, x)
        return function(x, weight, eps, *options)

    return forward


def _layernorm(
    original: Callable[..., Any], found: Recognised, ways: Ways, switch: Switch
) -> Callable[..., Any]:
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    constant, eps_name = found.eps, found.eps_name

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or x is None:
            return original(self, *(() if x is None else (x,)), *args, **kwargs)
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        eps = constant if eps_name is None else getattr(self, eps_name)
        if is_compiling():
            function = trace(x, weight, bias, eps)
        else:
            key = key_of(x, weight)
            way = known.get(key) or decide(key, (x, weight, bias, eps))
            way.num_calls += 1
            function = way.function
        if function is None:
            return original(self, x)
        return function(x, weight, bias, eps)

    return forward


FAMILY = Family(kernels=(RMSNORM, LAYERNORM), find=find)
