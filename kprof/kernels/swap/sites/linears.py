"""Linear layers: GEMMs with weights in FP8.

FP8 is less precise, so some layers are swapped only if a filter names them in full: heads and
routers, whose small errors decide between tokens and experts, and layers too small to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Embedding, Linear, Module

from kprof.kernels.fp8._copies import Activation, find_activation
from kprof.kernels.fp8._weights import forget
from kprof.kernels.fp8.fp8_gemm import WIDE
from kprof.kernels.fp8.fp8_linear import BY_ROWS, linear_of_copy, route_by_rows
from kprof.kernels.swap.dispatch import OTHERWISE, PLAIN, Decision, Dispatcher, key_of
from kprof.kernels.swap.patches import why_foreign
from kprof.kernels.swap.probes import Setting
from kprof.kernels.swap.site import FP8_LINEAR, Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family

KERNEL = FP8_LINEAR
# Names of layers whose results are compared with each other.
DECIDING = {
    "heads": ("classifier", "embed_out", "lm_head", "output_projection", "qa_outputs", "score"),
    "routers": ("gate", "router"),
}
# Weights of a layer; with fewer, a call takes as long as a launch in any precision.
LEAST_WEIGHTS = 1 << 20
MULTIPLE = 16
# First compute capability with FP8 GEMMs.
LEAST_CAPABILITY = (8, 9)
SETTINGS: frozenset[Setting] = frozenset((dtype, cast) for dtype in WIDE for cast in (None, dtype))


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the linear layers below a module."""
    if not isinstance(root, Module):
        return
    embedded = {id(one.weight) for one in root.modules() if isinstance(one, Embedding)}
    for name, module in root.named_modules():
        if not isinstance(module, Linear):
            continue
        label = name.replace("_orig_mod.", "") or type(module).__name__
        why = _why_not(module)
        if why is None and not request.is_named_in_full(KERNEL, label):
            why = _why_spared(label, module, is_tied=id(module.weight) in embedded)
        if why is not None:
            yield Skip(label, KERNEL, type(module).__name__, why)
        else:
            yield _site(label, module, request)


def _why_not(module: Linear) -> str | None:
    """Return why a layer cannot be in FP8."""
    why = why_foreign(module)
    if why is not None:
        return why
    if type(module) is not Linear or "weight" not in module._parameters:
        return "it is no plain Linear with a weight of its own"
    weight = module.weight
    if type(weight) not in PLAIN:
        return f"its weights are a {type(weight).__name__}, no plain tensor"
    if weight.dtype not in WIDE:
        return f"its weights are in {str(weight.dtype).removeprefix('torch.')}, not in 16 bits"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < LEAST_CAPABILITY:
        return "its GPU does not multiply FP8"
    return None


def _why_spared(name: str, module: Linear, *, is_tied: bool) -> str | None:
    """Return why a layer is not in FP8 by default, which a filter can overrule."""
    for sort, names in DECIDING.items():
        if name.rpartition(".")[2] in names:
            return f"{sort} stay as precise as they are: {KERNEL}@{name} takes it all the same"
    if is_tied:
        return "it shares its weights with an embedding, which needs them as they are"
    shape = tuple(module.weight.shape)
    if module.weight.numel() < LEAST_WEIGHTS or any(length % MULTIPLE for length in shape):
        return f"weights of {shape[0]} x {shape[1]}: too few to gain, or no multiples of {MULTIPLE}"
    return None


def _site(name: str, module: Linear, request: Request) -> Site:
    dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, SETTINGS)
    switch = Switch()
    original = type(module).forward
    bind = bound(_linear(original, dispatcher, switch), original, switch)

    def put(owner: Any) -> Any:
        # Writes to its weights since another swap were not counted.
        forget(owner)
        return bind(owner)

    rows, columns = module.weight.shape
    return Site(name, module, put, dispatcher, switch=switch, shape=f"{rows}x{columns}")


def _linear(
    original: Callable[..., Any], dispatcher: Dispatcher, switch: Switch
) -> Callable[..., Any]:
    known, decide, trace = dispatcher.known, dispatcher.decide, dispatcher.tracing()
    run_original = running_original(original, dispatcher, switch)

    def forward(self: Any, x: Any = None, /, **kwargs: Any) -> Any:
        if switch.owner is not self or kwargs or not isinstance(x, Tensor):
            return run_original(self, OTHERWISE, *(() if x is None else (x,)), **kwargs)
        parameters = self._parameters
        if "weight" not in parameters or "bias" not in parameters:
            # It was pruned, parametrized or sharded.
            return run_original(self, "its weights are no parameters of its own any more", x)
        weight, bias = parameters["weight"], parameters["bias"]
        if is_compiling():
            function = trace(x, weight, bias) if type(weight) in PLAIN else None
            return original(self, x) if function is None else function(x, weight, bias)
        key = key_of(x, weight)
        decision = known.get(key)
        if decision is None:
            shape = (x.numel() // max(x.shape[-1], 1), *weight.shape)
            decision = decide(key, (x, weight, bias), shape)
        decision.num_calls += 1
        if decision.function is None:
            return original(self, x)
        made = find_activation(id(x))
        return (
            decision.function(x, weight, bias)
            if made is None
            else _joined(decision, made, x, weight, bias)
        )

    return forward


def _joined(
    decision: Decision, made: Activation, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Any:
    """Return a layer's result, from the FP8 copy of x if its provider takes one and x has one."""
    if decision.provider in BY_ROWS and made.tensor() is x:
        route = route_by_rows(x, weight, BY_ROWS[decision.provider])
        copy = None if route is None else made.copy_of(x)
        if route is not None and copy is not None:
            decision.num_joined += 1
            return linear_of_copy(x, *copy, weight, bias, route)
    assert decision.function is not None
    return decision.function(x, weight, bias)


FAMILY = Family(kernels=(KERNEL,), find=find)
