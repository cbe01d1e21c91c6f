"""Casts of linear layers' float32 weights under autocast: those of many layers in one launch.

The first layer of a group that is called casts the weights and biases of all of them; each layer
multiplies by its copy. A copy serves one call: until the backward pass has run, a further call of
the layer is the original's, whose weights autocast casts. So weights are cast anew for each
backward pass, however they were written to in between, and each gradient is that of one use.

Their gradients are cast to float32 when all of a group are there. With several ranks they would
come too late for the collectives that overlap with the backward pass; layers are left alone there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import maybe_current_level
from torch.compiler import is_compiling
from torch.nn import Module, Parameter

from kprof.kernels import OURS
from kprof.kernels.cast_weights import NARROW, cast_until, cast_weights
from kprof.kernels.runtime import is_forward_mode
from kprof.kernels.swap.dispatch import OTHERWISE, Decision, Dispatcher
from kprof.kernels.swap.patches import python_modules, why_foreign
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
FROZEN = "no layer near it has weights with gradients"


class _Layer:
    """A linear layer of a group."""

    __slots__ = (
        "bias",
        "copies",
        "decision",
        "dispatcher",
        "found",
        "switch",
        "versions",
        "weight",
    )

    def __init__(self, layer: Module, dispatcher: Dispatcher, switch: Switch) -> None:
        self.found = weakref.ref(layer)
        self.dispatcher, self.switch = dispatcher, switch
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.versions: tuple[int, int] = (0, 0)
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
        key = dtype, weight.device, tuple(one.dtype for one in given)
        known = self.dispatcher.known.get(key)
        self.decision = known or self.dispatcher.decide(key, tuple(given))
        if self.decision.provider != OURS or self.decision.function is None:
            return []
        self.weight, self.bias = weight, bias
        self.versions = weight._version, 0 if bias is None else bias._version
        return given

    def is_as_cast(self, layer: Any) -> bool:
        """Return whether weight and bias are those that were cast."""
        own, bias = layer._parameters, self.bias
        is_same = own.get("weight") is self.weight and own.get("bias") is bias
        if not is_same or "weight" in layer.__dict__ or "bias" in layer.__dict__:
            return False
        assert self.weight is not None
        versions = self.weight._version, 0 if bias is None else bias._version
        return versions == self.versions


class _Group:
    """Layers whose weights are cast at once."""

    def __init__(self) -> None:
        self.layers: list[_Layer] = []
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


def _num_ranks() -> int:
    distributed = torch.distributed
    is_on = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_on else 1


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the linear layers below a module."""
    if not isinstance(root, Module):
        return
    groups: dict[torch.device, _Group] = {}
    for name, module in python_modules(root):
        if not is_linear(module):
            continue
        label, weight = name or type(module).__name__, module._parameters.get("weight")
        why = why_foreign(module) or _why_not(weight)
        if why is not None:
            yield Skip(label, CAST_WEIGHTS, type(module).__name__, why)
            continue
        assert weight is not None
        group = groups.get(weight.device)
        if group is None or group.num_elements + weight.numel() > MOST_ELEMENTS:
            group = groups[weight.device] = _Group()
        group.num_elements += weight.numel()
        yield _site(label, module, group, request)


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
