"""Casts of linear layers' float32 weights under autocast: those of many layers in one launch.

The first layer of a group that is called casts the weights and biases of all of them; each layer
multiplies by its copy. A copy serves one call: until the backward pass has run, a further call of
the layer is the original's, whose weights autocast casts, and no copy that is left is taken. So
weights are cast anew for each backward pass, however they were written to in between, and each
gradient is that of one use. A write through `.data` in between the cast and a layer's call shows in
no counter: models are left alone whose forwards or hooks may write so.

Their gradients are cast to float32 when all of a group are there. With several ranks they would
come too late for the collectives that overlap with the backward pass; layers are left alone there.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import maybe_current_level
from torch.compiler import is_compiling
from torch.nn import Module, Parameter
from torch.nn.modules import module as _GLOBAL

from kprof.kernels import OURS
from kprof.kernels.cast_weights import NARROW, cast_until, cast_weights
from kprof.kernels.runtime import is_forward_mode
from kprof.kernels.swap.dispatch import OTHERWISE, Decision, Dispatcher
from kprof.kernels.swap.patches import (
    functions_reached,
    innermost,
    names_in,
    python_modules,
    why_foreign,
)
from kprof.kernels.swap.probes import Setting
from kprof.kernels.swap.reads import CHANGED
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.uses import DETACHES, is_linear, multiply

CAST_WEIGHTS = "cast_weights"
SETTINGS: frozenset[Setting] = frozenset((torch.float32, cast) for cast in NARROW)
# Weights of a group, in elements: until the last gradient of a group is there, all of them are
# kept in 16 bits, 128 MiB. Large groups have few launches; this one is a copy of 0.15 ms.
MOST_ELEMENTS = 64 * 2**20
UNUSUAL = "it is called without autocast, without gradients, or inside a transform of torch.func"
AGAIN = "it is called again before a backward pass"
INSIDE = "it is called inside a backward pass"
RANKS = "several ranks: gradients would come too late for their collectives"
WRITES = "a forward or a hook of its model may write to weights through `.data`"
# Names by which code writes to a tensor so that its version stays.
UNSEEN = {"data", "set_"}
FROZEN = "no layer near it has weights with gradients"


class _Layer:
    """A linear layer of a group."""

    __slots__ = (
        "bias",
        "copies",
        "decision",
        "dispatcher",
        "found",
        "states",
        "switch",
        "weight",
    )

    def __init__(self, layer: Module, dispatcher: Dispatcher, switch: Switch) -> None:
        self.found = weakref.ref(layer)
        self.dispatcher, self.switch = dispatcher, switch
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.states: list[tuple[int, int]] = []
        """Versions and addresses of weight and bias."""
        self.copies: tuple[Tensor, Tensor | None] | None = None
        """Of weight and bias, until a call takes them."""
        self.decision: Decision | None = None

    def look(self, dtype: torch.dtype) -> list[Tensor]:
        """Return weight and bias, if they are to be cast; remember them."""
        layer, self.copies, self.decision = self.found(), None, None
        if layer is None or self.switch.owner is not layer:
            return []
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        given = [one for one in (weight, bias) if one is not None]
        if weight is None or any(type(one) is not Parameter for one in given):
            return []
        if any(one.is_inference() for one in given):
            return []
        key = dtype, weight.device, tuple(one.dtype for one in given)
        known = self.dispatcher.known.get(key)
        self.decision = known or self.dispatcher.decide(key, tuple(given))
        if self.decision.provider != OURS or self.decision.function is None:
            return []
        self.weight, self.bias = weight, bias
        self.states = _states_of(given)
        return given

    def is_as_cast(self, layer: Any) -> bool:
        """Return whether weight and bias are those that were cast."""
        own = layer._parameters
        is_same = own.get("weight") is self.weight and own.get("bias") is self.bias
        if not is_same or "weight" in layer.__dict__ or "bias" in layer.__dict__:
            return False
        return self.states == _states_of(one for one in (self.weight, self.bias) if one is not None)


def _states_of(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(one._version, one.data_ptr()) for one in weights]


class _Group:
    """Layers whose weights are cast at once."""

    def __init__(self, hooks: list[Mapping[int, Any]]) -> None:
        self.layers: list[_Layer] = []
        self.hooks = hooks
        """Those of all modules of the model, which come and go."""
        self.num_elements = 0
        self.dtype: torch.dtype | None = None
        self.is_due = True
        """Whether weights are to be cast: at first, and after each backward pass."""

    def begin(self) -> None:
        """Let weights be cast at the next call."""
        self.is_due = True

    def cast(self, dtype: torch.dtype) -> str | None:
        """Cast the weights of all layers; return why not."""
        if torch._C._current_graph_task_id() != -1:
            return INSIDE
        if _num_ranks() > 1:
            return RANKS
        if any(_may_write(hook) for hooks in self.hooks if hooks for hook in hooks.values()):
            return WRITES
        found = [(layer, layer.look(dtype)) for layer in self.layers]
        given = [one for _, weights in found for one in weights]
        trained = [one for one in given if one.requires_grad]
        if not trained:
            return FROZEN if given else None
        with torch.autocast(given[0].device.type, enabled=False):
            copies = iter(cast_until(self.begin, *trained, dtype=dtype))
            with torch.no_grad():
                frozen = [one for one in given if not one.requires_grad]
                others = iter(cast_weights(*frozen, dtype=dtype))
        for layer, weights in found:
            made = [next(copies if one.requires_grad else others) for one in weights]
            if made:
                layer.copies = made[0], made[1] if len(made) > 1 else None
        self.dtype, self.is_due = dtype, False
        return None

    def drop(self) -> None:
        """Let no copy be taken until a backward pass has run."""
        for layer in self.layers:
            layer.copies = None


def _num_ranks() -> int:
    distributed = torch.distributed
    is_on = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_on else 1


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the linear layers below a module."""
    if not isinstance(root, Module):
        return
    groups: dict[torch.device, _Group] = {}
    modules = [module for _, module in python_modules(root)]
    writes = any(request.once(("writes", type(one)), _forward_may_write, one) for one in modules)
    hooks = [_GLOBAL._global_forward_pre_hooks, _GLOBAL._global_forward_hooks]
    hooks += [own for one in modules for own in (one._forward_pre_hooks, one._forward_hooks)]
    for name, module in python_modules(root):
        if not is_linear(module):
            continue
        label, weight = name or type(module).__name__, module._parameters.get("weight")
        why = why_foreign(module) or _why_not(weight) or (WRITES if writes else None)
        if why is not None:
            yield Skip(label, CAST_WEIGHTS, type(module).__name__, why)
            continue
        assert weight is not None
        group = groups.get(weight.device)
        if group is None or group.num_elements + weight.numel() > MOST_ELEMENTS:
            group = groups[weight.device] = _Group(hooks)
        group.num_elements += weight.numel()
        yield _site(label, module, group, request)


def _forward_may_write(module: Module) -> bool:
    return _may_write(type(module).forward, module)


def _may_write(code: Any, module: Module | None = None) -> bool:
    """Return whether a forward or a hook, or a function that it calls, may write unseen.

    Code that cannot be read counts as none that does.
    """
    code = getattr(code, "func", code)
    is_plain = isinstance(code, (types.FunctionType, types.MethodType))
    function = code if is_plain else type(code).__call__
    inner = innermost(getattr(function, "__func__", function))
    called = [] if inner is None else [inner, *functions_reached(inner, module)]
    return any(one is not None and UNSEEN & {*names_in(one.__code__)} for one in called)


def _why_not(weight: Tensor | None) -> str | None:
    if weight is None or type(weight) is not Parameter:
        return "its weights are no parameter of its own"
    if weight.dtype != torch.float32:
        return f"its weights are {str(weight.dtype).removeprefix('torch.')}, not float32"
    return None


def _site(name: str, module: Module, group: _Group, request: Request) -> Site:
    dispatcher = Dispatcher(request.kernels[CAST_WEIGHTS], request.providers, SETTINGS)
    original, switch = type(module).forward, Switch()
    layer = _Layer(module, dispatcher, switch)
    group.layers.append(layer)
    bind = bound(_multiplying(original, layer, group), original, switch)

    def put(owner: Any) -> Any:
        group.begin()
        return bind(owner)

    weight = module._parameters["weight"]
    assert weight is not None
    shape = "x".join(map(str, weight.shape))
    return Site(name, module, put, dispatcher, switch=switch, shape=shape)


def _multiplying(original: Callable[..., Any], layer: _Layer, group: _Group) -> Callable[..., Any]:
    """Return the forward of a layer; `kprof_detaches`: its bias gets its gradient elsewhere."""
    dispatcher, switch = layer.dispatcher, layer.switch
    run_original, note = running_original(original, dispatcher, switch), dispatcher.noting()

    def forward(
        self: Any, x: Any = None, /, *args: Any, kprof_detaches: bool = False, **kwargs: Any
    ) -> Any:
        if switch.owner is not self or args or kwargs or not isinstance(x, Tensor):
            return run_original(self, OTHERWISE, *(() if x is None else (x, *args)), **kwargs)
        if is_compiling():
            note(False)
            return original(self, x)
        copies, why = _taken(self, x, layer, group)
        if why is not None:
            dispatcher.leave_out(why)
        if kprof_detaches:
            own = self._parameters
            weight, bias = copies or (own["weight"], own["bias"])
            return multiply(self, x, weight, bias.detach())
        return original(self, x) if copies is None else multiply(self, x, *copies)

    setattr(forward, DETACHES, True)
    return forward


def _taken(owner: Any, x: Tensor, layer: _Layer, group: _Group) -> tuple[Any, str | None]:
    """Return the copies for a call, or why the original runs; neither: the call was counted."""
    device = x.device.type
    if not (is_grad_enabled() and torch.is_autocast_enabled(device)) or _is_transformed(x):
        return None, UNUSUAL
    dtype = torch.get_autocast_dtype(device)
    why = group.cast(dtype) if group.is_due else None
    copies, decision, layer.copies = layer.copies, layer.decision, None
    if why is not None:
        return None, why
    if decision is None or (copies is None and decision.function is not None):
        group.drop()
        return None, AGAIN
    if copies is not None and (dtype != group.dtype or not layer.is_as_cast(owner)):
        return None, CHANGED
    decision.num_calls += 1
    return copies, None


def _is_transformed(x: Tensor) -> bool:
    """Return whether autocast would not cast x, or derivatives are taken in another way."""
    is_cast = x.dtype == torch.float32 or x.dtype in NARROW
    return not is_cast or maybe_current_level() is not None or is_forward_mode()


FAMILY = Family(kernels=(CAST_WEIGHTS,), find=find)
