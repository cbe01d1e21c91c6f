"""Norms of rows: modules that compute an RMSNorm or a LayerNorm, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels.swap.dispatch import OTHERWISE, Ways, key_of
from kprof.kernels.swap.norm_probes import (
    FORMS,
    LAYERNORM,
    RMSNORM,
    TAKEN,
    Probe,
    Recognised,
    looks_like_a_norm,
    recognise,
    why_no_weights,
)
from kprof.kernels.swap.patches import python_modules, why_foreign
from kprof.kernels.swap.probes import are_alike, kind_of, place_of, probing
from kprof.kernels.swap.reads import CHANGED, Reads, reads_of_module
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_as_ever
from kprof.kernels.swap.sites import Family

PERMUTED = "its rows lie in another order, which the original's result keeps"
MOVED = "its weights are no parameters of its own any more"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the norms below a module."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        found = norm_of(module, request)
        if found is None:
            continue
        kernel = found.kernel if isinstance(found, Recognised) else _kernel_of(module, request)
        if kernel not in request.kernels:
            continue
        label = name or type(module).__name__
        why = why_foreign(module) or (found if isinstance(found, str) else None)
        if why is None:
            why = request.once((*kind_of(module), kernel), _check, module, found, request)
        reads = reads_of(module)
        if isinstance(found, str) or isinstance(reads, str) or why is not None:
            yield Skip(label, kernel, type(module).__name__, why or str(reads))
        else:
            yield _site(label, module, found, compared(module, found, reads), request)


def _kernel_of(module: Module, request: Request) -> str:
    """Return the kernel that was asked for and would be expected for a norm that is not known."""
    asked = [one for one in (RMSNORM, LAYERNORM) if one in request.kernels]
    is_layer = "layer" in type(module).__name__.lower() and LAYERNORM in asked
    return LAYERNORM if is_layer else asked[0] if asked else ""


def compared(module: Module, found: Recognised, reads: Reads) -> Reads:
    """Return what has to stay as it is: all but what the kernel reads anew at each call."""
    taken = ("weight",) if found.kernel == RMSNORM else TAKEN
    empty = [name for name, one in module._parameters.items() if one is None and name not in taken]
    return replace(
        reads,
        own=[one for one in reads.own if one[0] != found.eps_name],
        empty=[*reads.empty, *(name for name in empty if name not in reads.empty)],
    )


def norm_of(module: Module, request: Request) -> Recognised | str | None:
    """Return what a norm computes, or why it is none that is known; None: it looks like none."""
    if not looks_like_a_norm(module):
        return None
    why = why_no_weights(module)
    if why is not None:
        return why
    return request.once(kind_of(module), _recognised, module)


def reads_of(module: Module) -> Reads | str:
    """Return what the code of a norm reads; a sentence says why that is not known."""
    return reads_of_module(module, taken=TAKEN)


def _recognised(module: Module) -> Recognised | str:
    reads = reads_of(module)
    return reads if isinstance(reads, str) else recognise(module, reads)


def _check(module: Module, found: Recognised, request: Request) -> str | None:
    """Let the kernel itself run on the rows; a sentence says what is wrong with it."""
    device = place_of(module)
    kernel = request.kernels[found.kernel]
    with probing(device) as generator:
        probe = Probe(module, device, generator)
        dtype = module._parameters["weight"].dtype
        rows = probe.rows.to(dtype)
        options = () if is_default(found) else (found.form,)
        function, provider, _ = request.providers.choose(
            kernel,
            rows,
            tuple(rows.shape),
            is_default=is_default(found),
            arguments=(rows, rows, found.eps, *options),
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


def _site(name: str, module: Module, found: Recognised, reads: Reads, request: Request) -> Site:
    kernel = request.kernels[found.kernel]
    maker, settings = request.new_maker(), found.settings
    ways = Ways(kernel, request.providers, settings, is_default=is_default(found), maker=maker)
    switch = Switch()
    original = type(module).forward
    make = _rmsnorm if found.kernel == RMSNORM else _layernorm
    names = names_of_weights(module)
    put = bound(make(original, found, names, reads, ways, switch), original, switch)
    return Site(name, module, put, ways, switch=switch, why_changed=reads.why_changed)


def _rmsnorm(
    original: Callable[..., Any],
    found: Recognised,
    names: tuple[bool, bool],
    reads: Reads,
    ways: Ways,
    switch: Switch,
) -> Callable[..., Any]:
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    as_ever, is_changed = running_as_ever(original, ways, switch), reads.changes()
    constant, eps_name = found.eps, found.eps_name
    options = () if is_default(found) else (found.form,)

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or x is None:
            return as_ever(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        if not x.is_contiguous() and is_permuted(x):
            return as_ever(self, PERMUTED, x)
        if have_moved(self, names):
            return as_ever(self, MOVED, x)
        if is_changed is not None and is_changed(self):
            return as_ever(self, CHANGED, x)
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
    original: Callable[..., Any],
    found: Recognised,
    names: tuple[bool, bool],
    reads: Reads,
    ways: Ways,
    switch: Switch,
) -> Callable[..., Any]:
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    as_ever, is_changed = running_as_ever(original, ways, switch), reads.changes()
    constant, eps_name = found.eps, found.eps_name

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or x is None:
            return as_ever(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        if not x.is_contiguous() and is_permuted(x):
            return as_ever(self, PERMUTED, x)
        if have_moved(self, names):
            return as_ever(self, MOVED, x)
        if is_changed is not None and is_changed(self):
            return as_ever(self, CHANGED, x)
        parameters = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        eps = constant if eps_name is None else getattr(self, eps_name)
        if is_compiling():
            function = trace(x, weight, bias, eps)
        else:
            key = key_of(x, weight, bias)
            way = known.get(key) or decide(key, (x, weight, bias, eps))
            way.num_calls += 1
            function = way.function
        if function is None:
            return original(self, x)
        return function(x, weight, bias, eps)

    return forward


def names_of_weights(norm: Module) -> tuple[bool, bool]:
    """Tell whether a norm has a weight, and whether it has a bias."""
    own = norm._parameters
    return own.get("weight") is not None, own.get("bias") is not None


def have_moved(norm: Module, names: tuple[bool, bool]) -> bool:
    """Tell whether a norm's weight or bias is no longer the parameter that it was.

    Pruning, parametrizing and FullyShardedDataParallel make a plain attribute of it.
    """
    own, parameters = norm.__dict__, norm._parameters
    return (
        (parameters.get("weight") is not None) is not names[0]
        or (parameters.get("bias") is not None) is not names[1]
        or own.get("weight") is not None
        or own.get("bias") is not None
    )


def is_permuted(x: Tensor) -> bool:
    """Tell whether elements lie in memory in another order than that of the dimensions."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if step and size > 1]
    return steps != sorted(steps, reverse=True)


FAMILY = Family(kernels=(RMSNORM, LAYERNORM), find=find)
