"""Gated MLPs: modules that compute down(activation(gate(x)) * up(x)), or the same with gate and up
in one layer.

A tensor that is computed again for gradients, by whoever would else keep it until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from kprof.kernels.swap.dispatch import OTHERWISE, Ways, key_of
from kprof.kernels.swap.gates import (
    GEGLU,
    SWIGLU,
    Given,
    Probe,
    Recognised,
    layers_of,
    looks_gated,
    recognise,
    why_unknown_layers,
)
from kprof.kernels.swap.patches import is_passed_over, python_modules, why_foreign
from kprof.kernels.swap.probes import are_alike, kind_of, place_of, probing
from kprof.kernels.swap.providers import LEAN
from kprof.kernels.swap.reads import CHANGED, Reads, reads_of_module
from kprof.kernels.swap.site import Around, Request, Site, Skip, Switch, bound, running_as_ever
from kprof.kernels.swap.sites import Family


class _Again(NamedTuple):
    """What stands for the tensor meanwhile."""

    make: Callable[[], Tensor]
    shape: torch.Size


def run_on(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make())."""
    return layer(make())


def run_without_keeping(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make()); what it keeps of that for gradients is made again for them.

    Where that is not known to be right, or to save anything, it is kept as ever: by a layer other
    than torch's linear one, or one with hooks, which may change what it is given, or where somebody
    else has hooks for what is saved, as gradient checkpointing does.

    Args:
        layer: Which.
        make: Computes what it is given, the same bits every time.
    """
    x = make()
    if not _saves_x(layer):
        return layer(x)
    address, size = x.data_ptr(), x.numel()

    def pack(saved: Tensor) -> Tensor | _Again:
        is_x = saved.data_ptr() == address and saved.numel() == size and saved.is_contiguous()
        return _Again(make, saved.shape) if is_x else saved

    with saved_tensors_hooks(pack, _unpack):
        return layer(x)


def _saves_x(layer: Module) -> bool:
    is_watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    is_plain = type(layer).forward is Linear.forward and is_passed_over(layer)
    return torch.is_grad_enabled() and is_plain and not is_watched


def _unpack(packed: Tensor | _Again) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        return packed.make().view(packed.shape)


NOT_AS_FOUND = "its activation is another one now, or somebody watches it"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the gated MLPs below a module."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        if _holds_experts(module) and SWIGLU in request.kernels:
            why = "its experts share one module, which multiplies inside a loop over them"
            yield Skip(name or type(module).__name__, SWIGLU, type(module).__name__, why)
        layers, why_none = layers_of(module), why_unknown_layers(module)
        if why_none is not None:
            yield from _sites(name or type(module).__name__, module, why_none, why_none, request)
        if len(layers) not in (2, 3):
            continue
        reads = reads_of_module(module, leaves=layers.values())
        if isinstance(reads, str):
            found: Recognised | str | None = reads if looks_gated(module) else None
        else:
            found = request.once(("gated", *kind_of(module)), recognise, module, reads)
        if found is not None:
            yield from _sites(name or type(module).__name__, module, found, reads, request)


def _sites(
    name: str, module: Module, found: Recognised | str, reads: Reads | str, request: Request
) -> Iterator[Site | Skip]:
    asked = [one for one in (SWIGLU, GEGLU) if one in request.kernels]
    kernel = asked[0] if isinstance(found, str) else found.kernel
    if kernel not in asked:
        return
    why = why_foreign(module)
    if isinstance(found, str) or isinstance(reads, str):
        yield Skip(name, kernel, type(module).__name__, why or str(found))
        return
    why = why or request.once(("checked", *kind_of(module)), _check, module, found, request)
    if why is not None:
        yield Skip(name, kernel, type(module).__name__, why)
    else:
        yield _site(name, module, found, reads, request)


def _holds_experts(module: Module) -> bool:
    """Tell whether its own parameters are the layers of many gated MLPs."""
    own = [name for name, one in module._parameters.items() if one is not None and one.dim() == 3]
    return any("up" in name or "gate" in name for name in own) and any("down" in n for n in own)


def _check(module: Module, found: Recognised, request: Request) -> str | None:
    """Let the kernel itself run on the data; a sentence says what is wrong with it."""
    device = place_of(module)
    parameter = next(module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    if (dtype, None) not in found.settings:
        return None
    with probing(device) as generator:
        probe = Probe(module, device, generator)
        tensors = probe.tensors((dtype, None), found.gate, found.up)
        function, provider, _ = request.providers.choose(
            request.kernels[found.kernel],
            tensors[0],
            tuple(tensors[0].shape),
            is_default=_is_default(found),
        )
        if function is None:
            return None
        if not are_alike(
            function(*tensors, *_options(found)), probe.given_to_last((dtype, None), False)
        ):
            return f"the kernel of {provider} does not agree with it on random data"
    return None


def _is_default(found: Recognised) -> bool:
    """Tell whether every provider knows how: two tensors, and tanh."""
    return found.up is not None and found.options in ((), ("tanh",))


def _options(found: Recognised) -> tuple[str, ...]:
    return () if found.options in ((), ("tanh",)) else found.options


def _site(name: str, module: Module, found: Recognised, reads: Reads, request: Request) -> Site:
    kernel = request.kernels[found.kernel]
    maker, settings = request.new_maker(), found.settings
    ways = Ways(kernel, request.providers, settings, is_default=_is_default(found), maker=maker)
    switch = Switch()
    original = type(module).forward
    passed_over = {name: module._modules[name] for name in found.passed_over}
    put = bound(_gated(original, found, passed_over, reads, ways, switch), original, switch)
    return Site(name, module, put, ways, switch=switch, why_changed=reads.why_changed)


def _gated(
    original: Callable[..., Any],
    found: Recognised,
    passed_over: Mapping[str, Any],
    reads: Reads,
    ways: Ways,
    switch: Switch,
) -> Callable[..., Any]:
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    as_ever, is_changed = running_as_ever(original, ways, switch), reads.changes()
    first, second, last = found.gate, found.up, found.down
    options, run_first = _options(found), _running_first(found)

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or x is None:
            return as_ever(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        children = self._modules
        if not _are_as_found(children, passed_over):
            return as_ever(self, NOT_AS_FOUND, x)
        if is_changed is not None and is_changed(self):
            return as_ever(self, CHANGED, x)
        gate, up = run_first(children, x)
        if is_compiling():
            function = trace(gate, up, *options)
            if function is None:
                return original(self, x)
            return children[last](function(gate, up, *options))
        key = key_of(gate, up)
        way = known.get(key) or decide(key, (gate, up, *options))
        way.num_calls += 1
        if way.function is None:
            return original(_with_results(self, {first: gate, second: up}), x)
        run = run_without_keeping if way.provider == LEAN else run_on
        return run(children[last], partial(way.function, gate, up, *options))

    return forward


def _running_first(found: Recognised) -> Callable[[Mapping[str, Any], Any], tuple[Any, Any]]:
    """Return what runs gate and up in the order of the original, which hooks can see."""
    gate, up, is_up_first = found.gate, found.up, found.is_up_first

    def run(children: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        if is_up_first:
            second = children[up](x)  # type: ignore[index]
            return children[gate](x), second
        return children[gate](x), None if up is None else children[up](x)

    return run


def _are_as_found(children: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Tell whether these children are those that were found, and nobody would miss their calls."""
    return all(children[one] is child and is_passed_over(child) for one, child in found.items())


def _with_results(module: Module, results: dict[str | None, Tensor | None]) -> Module:
    """Return the module for a call of its own code that need not run these layers again."""
    children = dict(module._modules)
    for name, result in results.items():
        if name is not None:
            children[name] = layer = Given(children[name])
            layer.result = result
    return Around(module, children).clone


FAMILY = Family(kernels=(SWIGLU, GEGLU), find=find)
