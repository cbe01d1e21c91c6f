"""Biases before a GELU: the kernel of the GELU adds up the gradient of the linear layer's bias.

Found where a linear layer with a bias stands before a GELU, in the forward of one module, and
nothing else reads the layer's result. The forward is patched: the layer runs with a bias that has
no gradient, and the GELU gets the bias besides. The layer's result carries the bias from the one
call to the other.
"""

from __future__ import annotations

import ast
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Module, Parameter

from kprof.kernels.gelu import with_bias_inside
from kprof.kernels.swap.dispatch import PLAIN, Decision, Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import is_passed_over, python_modules, rewritten, why_foreign
from kprof.kernels.swap.reads import CHANGED, Reads
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.activations import GELU, Recognised, activation_of, reads_of
from kprof.kernels.swap.sites.readers import (
    Mark,
    calls_of_children,
    functions_for,
    producers_in,
    read_by_linears,
    telling,
    tree_for,
    trees_of,
)
from kprof.kernels.swap.uses import (
    DETACHES,
    Narrowing,
    Place,
    child_of,
    is_linear,
    multiply,
    narrowing,
    readers_of,
)

BIAS_GELU = "bias_gelu"
# The attribute of a linear layer's result that holds the bias.
BIAS = "kprof_bias"
WATCHED = "its linear layer or its GELU has hooks, or another forward"
NO_GRADIENT = "the bias gets no gradient"


class Pair(NamedTuple):
    """A linear layer with a bias, and the GELU that alone reads its result."""

    linear: str
    activation: str
    place: Place
    """Of the layer's call."""


def pairs_in(module: Module, tree: ast.FunctionDef, request: Request) -> list[Pair]:
    """Return the pairs in the forward of a module, which has this tree."""
    found = []
    for place, name in calls_of_children(tree):
        layer = child_of(module, name)
        if layer is None or not is_linear(layer) or layer._parameters.get("bias") is None:
            continue
        readers = readers_of(module, tree, place)
        if readers is None or len(readers) != 1 or readers[0].argument != 0:
            continue
        if _is_gelu(child_of(module, readers[0].child), request):
            found.append(Pair(name, readers[0].child, place))
    return found


def _is_gelu(child: Module | None, request: Request) -> bool:
    found = None if child is None else activation_of(child, request)
    return isinstance(found, Recognised) and found.kernel == GELU


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the modules below one with such pairs in their forward."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        if not any(_is_gelu(child, request) for child in module._modules.values()):
            continue
        tree, label = tree_for(module, request), name or type(module).__name__
        why = why_foreign(module)
        if tree is None or not pairs_in(module, tree, request):
            continue
        if why is not None:
            yield Skip(label, BIAS_GELU, type(module).__name__, why)
        else:
            yield _site(label, module, tree, Pairings(module, tree, request))


class _Pairing:
    """The two calls of a pair while a swap is on."""

    def __init__(self, module: Module, pair: Pair, request: Request) -> None:
        layer, activation = module._modules[pair.linear], module._modules[pair.activation]
        assert layer is not None
        assert activation is not None
        found, reads = activation_of(activation, request), reads_of(activation)
        assert isinstance(found, Recognised)
        assert isinstance(reads, Reads)
        self.reads = reads
        self._found, self._is_changed = found, changes_of(reads)
        self._layer, self._activation = weakref.ref(layer), weakref.ref(activation)
        kernel = request.kernels[BIAS_GELU]
        default = found.options == ("none",)
        self.dispatcher = Dispatcher(kernel, request.providers, found.settings, is_default=default)
        self._seen: dict[Any, Decision] = {}

    def call_linear(self, layer: Any, x: Any) -> Any:
        """Call the layer, with a bias that has no gradient if the GELU adds it up."""
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        why = self._why_original(layer, x, weight, bias)
        if why is not None:
            self.dispatcher.leave_out(why)
            return layer(x)
        sort = key_of(x, weight, bias)
        seen = self._seen.get(sort)
        if seen is not None and seen.function is None:
            seen.num_calls += 1
            return layer(x)
        own = layer.__dict__.get("forward")
        if own is None:
            result = multiply(layer, x, weight, bias.detach())
        else:
            result = own.__func__(layer, x, **{DETACHES: True})
        setattr(result, BIAS, (bias, sort))
        return result

    def calling(self, readers: Narrowing | None) -> Callable[..., Any]:
        """Return the function that calls the GELU; `readers`: of its result."""
        found, dispatcher, is_changed = self._found, self.dispatcher, self._is_changed
        known, decide, seen = dispatcher.known, dispatcher.decide, self._seen
        alone = call_child if readers is None else telling(readers)

        def call(activation: Any, x: Any) -> Any:
            bias, sort = x.__dict__.pop(BIAS, (None, None)) if type(x) is Tensor else (None, None)
            if bias is None:
                return alone(activation, x)
            if is_changed is not None and is_changed(activation):
                dispatcher.leave_out(CHANGED)
                return alone(activation, with_bias_inside(x, bias))
            dtype = found.dtype_for(x, readers)
            options = found.options if dtype is None else (*found.options, dtype)
            key = key_of(x, bias), dtype
            decision = known.get(key) or decide(key, (x, bias, *options))
            decision.num_calls += 1
            seen[sort] = decision
            if decision.function is None:
                return alone(activation, with_bias_inside(x, bias))
            return decision.function(x, bias, *options)

        return call

    def _why_original(self, layer: Any, x: Any, weight: Any, bias: Any) -> str | None:
        activation = self._activation()
        is_known = layer is self._layer() and activation is not None
        own = layer.__dict__.get("forward")
        is_other = own is not None and not hasattr(own, DETACHES)
        if not is_known or not is_linear(layer) or is_other:
            return WATCHED
        if not (is_passed_over(layer) and is_passed_over(activation)):
            return WATCHED
        if type(bias) is not Parameter or type(weight) is not Parameter or type(x) not in PLAIN:
            return "its tensors are no plain ones"
        return None if is_grad_enabled() and bias.requires_grad else NO_GRADIENT


def call_child(child: Any, x: Any) -> Any:
    """Call a module."""
    return child(x)


class Pairings:
    """The pairs in a module's forward, of which this is the tree."""

    def __init__(self, module: Module, tree: ast.FunctionDef, request: Request) -> None:
        """Find the pairs; there are none where `bias_gelu` was not asked for."""
        is_asked = BIAS_GELU in request.kernels
        pairs = pairs_in(module, tree, request) if is_asked else []
        self._pairings = {pair: _Pairing(module, pair, request) for pair in pairs}
        self.calls = _calls_of(module, tree, self._pairings, request) if pairs else {}
        """Functions that the forward calls instead of its children, by place."""
        self.parts = {
            f"{type(module).__name__}: {pair.linear}": one.dispatcher
            for pair, one in self._pairings.items()
        }

    def why_changed(self, owner: Any) -> str | None:
        """Return what has changed in a GELU since it was recognised; None: nothing."""
        changed = (
            one.reads.why_changed(owner._modules.get(pair.activation))
            for pair, one in self._pairings.items()
        )
        return next((why for why in changed if why is not None), None)


def _site(name: str, module: Module, tree: ast.FunctionDef, pairings: Pairings) -> Site:
    original, switch = type(module).forward, Switch()
    marked = Mark(pairings.calls).visit(copy.deepcopy(tree))
    patched = rewritten(original, marked, functions_for(pairings.calls))
    parts = pairings.parts
    notes = [one.noting() for one in parts.values()]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self:
            return original(self, *args, **kwargs)
        if is_compiling():
            for note in notes:
                note(False)
            return original(self, *args, **kwargs)
        return patched(self, *args, **kwargs)

    def why_changed(owner: Any) -> str | None:
        if type(owner).forward is not original:
            return "its forward is another one now"
        return pairings.why_changed(owner)

    put = bound(forward, original, switch)
    return Site(name, module, put, parts, switch=switch, why_changed=why_changed)


def _calls_of(
    module: Module, tree: ast.FunctionDef, pairings: dict[Pair, _Pairing], request: Request
) -> dict[Place, Callable[..., Any]]:
    """Return the functions that the forward calls instead of its children, by place."""
    alone = read_by_linears(module, tree, producers_in(module, request), request)
    calls = {place: telling(one) for place, one in alone.items() if one is not None}
    for pair, pairing in pairings.items():
        calls[pair.place] = pairing.call_linear
        for place, child in calls_of_children(tree):
            if child == pair.activation:
                readers = narrowing(module, tree, place, trees_of(request))
                calls[place] = pairing.calling(readers)
    return calls


FAMILY = Family(kernels=(BIAS_GELU,), find=find)
