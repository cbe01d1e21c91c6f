"""Norms and activations whose results only linear layers read: under autocast, written rounded.

The forward of the layer around them is patched: the call of such a norm tells the swapped norm who
reads its result. Nothing else changes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels.swap.patches import MARK, is_passed_over, rewritten, tree_of, why_foreign
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.activations import GELU, activation_of
from kprof.kernels.swap.sites.activations import Recognised as Activation
from kprof.kernels.swap.sites.norms import LAYERNORM, RMSNORM, Recognised, norm_of
from kprof.kernels.swap.uses import Narrowing, Place, is_name, narrowing, place_of_node


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the layers below a module whose forward calls such norms or activations.

    They have no calls of their own to report: the norms do.
    """
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        names = producers_in(module, request)
        tree = tree_for(module, request) if names else None
        if tree is None or why_foreign(module) is not None:
            continue
        calls = {
            place: telling(found)
            for place, found in read_by_linears(module, tree, names, request).items()
            if found is not None
        }
        if calls:
            yield _site(name or type(module).__name__, module, tree, calls)


def producers_in(module: Module, request: Request) -> list[str]:
    """Return the names of children that are norms or activations which are swapped."""
    names = []
    for name, child in module.named_children():
        is_own = not hasattr(type(module), name) and name not in module.__dict__
        if is_own and _is_swapped(child, request):
            names.append(name)
    return names


def _is_swapped(child: Module, request: Request) -> bool:
    norm = norm_of(child, request)
    if isinstance(norm, Recognised):
        return norm.kernel in request.kernels
    if GELU not in request.kernels:
        return False
    found = activation_of(child, request)
    return isinstance(found, Activation) and found.kernel == GELU and not found.is_one_operator


def tree_for(module: Module, request: Request) -> ast.FunctionDef | None:
    """Return the syntax tree of a module's forward, as `tree_of` does."""
    tree: ast.FunctionDef | None = trees_of(request)(type(module).forward)
    return tree


def trees_of(request: Request) -> Callable[..., Any]:
    """Return `tree_of`, which parses each forward once."""
    return lambda forward: request.once(("tree", forward), tree_of, forward)


def read_by_linears(
    module: Module, tree: ast.FunctionDef, names: Iterable[str], request: Request
) -> dict[Place, Narrowing | None]:
    """Return how the results of children may be rounded, by the place of the call."""
    return {
        place: narrowing(module, tree, place, trees_of(request))
        for place, name in calls_of_children(tree)
        if name in names
    }


def calls_of_children(tree: ast.FunctionDef) -> Iterator[tuple[Place, str]]:
    """Yield place and NAME of each call `self.NAME(x)` in a forward, with one argument."""
    arguments = tree.args.posonlyargs + tree.args.args
    owner = arguments[0].arg if arguments else ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            function, is_starred = node.func, isinstance(node.args[0], ast.Starred)
            is_own = isinstance(function, ast.Attribute) and is_name(function.value)
            if is_own and not is_starred and function.value.id == owner:  # type: ignore[attr-defined]
                yield place_of_node(node), function.attr  # type: ignore[attr-defined]


class Mark(ast.NodeTransformer):
    """Replaces `self.NAME(x)` at these places by `kprof_call_N(self.NAME, x)`."""

    def __init__(self, places: Iterable[Place]) -> None:
        """Number the places in their order."""
        self._numbers = {place: number for number, place in enumerate(places)}

    def visit_Call(self, node: ast.Call) -> Any:
        """Replace the call of a child."""
        number = self._numbers.get(place_of_node(node))
        self.generic_visit(node)
        if number is None:
            return node
        name = ast.Name(_name(number), ast.Load())
        call = ast.Call(name, [node.func, *node.args], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def functions_for(calls: Mapping[Place, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the functions that `Mark` calls, by name."""
    return {_name(number): function for number, function in enumerate(calls.values())}


def _name(number: int) -> str:
    return f"kprof_call_{number}"


def telling(readers: Narrowing) -> Callable[..., Any]:
    """Return a function that calls a norm or an activation, and tells it who reads its result."""

    def call(norm: Any, x: Any) -> Any:
        function = getattr(norm.__dict__.get("forward"), "__func__", None)
        switch = getattr(function, MARK, None)
        if switch is None or switch.owner is not norm or not is_passed_over(norm):
            return norm(x)
        assert function is not None
        return function(norm, x, kprof_readers=readers)

    return call


def _site(
    name: str, module: Module, tree: ast.FunctionDef, calls: Mapping[Place, Callable[..., Any]]
) -> Site:
    original, switch = type(module).forward, Switch()
    marked = Mark(calls).visit(copy.deepcopy(tree))
    patched = rewritten(original, marked, functions_for(calls))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_original = switch.owner is not self or is_compiling()
        return (original if is_original else patched)(self, *args, **kwargs)

    def why_changed(owner: Any) -> str | None:
        is_another = type(owner).forward is not original
        return "its forward is another one now" if is_another else None

    put = bound(forward, original, switch)
    return Site(name, module, put, {}, switch=switch, why_changed=why_changed)


FAMILY = Family(kernels=(RMSNORM, LAYERNORM, GELU), find=find)
