"""Norms whose results only linear layers read: under autocast they are written rounded.

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
from kprof.kernels.swap.sites.norms import LAYERNORM, RMSNORM, Recognised, norm_of
from kprof.kernels.swap.uses import Narrowing, Place, is_name, narrowing, place_of_node


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the layers below a module whose forward calls such norms.

    They have no calls of their own to report: the norms do.
    """
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        norms = norms_in(module, request)
        tree = tree_for(module, request) if norms else None
        if tree is None or why_foreign(module) is not None:
            continue
        calls = {
            place: found
            for place, found in read_by_linears(module, tree, norms, request).items()
            if found is not None
        }
        if calls:
            yield _site(name or type(module).__name__, module, tree, calls)


def norms_in(module: Module, request: Request) -> list[str]:
    """Return the names of children that are norms which are swapped."""
    names = []
    for name, child in module.named_children():
        norm = norm_of(child, request)
        is_own = not hasattr(type(module), name) and name not in module.__dict__
        if isinstance(norm, Recognised) and norm.kernel in request.kernels and is_own:
            names.append(name)
    return names


def tree_for(module: Module, request: Request) -> ast.FunctionDef | None:
    """Return the syntax tree of a module's forward, as `tree_of` does."""
    tree: ast.FunctionDef | None = _trees(request)(type(module).forward)
    return tree


def _trees(request: Request) -> Callable[..., Any]:
    return lambda forward: request.once(("tree", forward), tree_of, forward)


def read_by_linears(
    module: Module, tree: ast.FunctionDef, norms: Iterable[str], request: Request
) -> dict[Place, Narrowing | None]:
    """Return how the results of the calls of norms may be rounded, by the place of the call."""
    arguments = tree.args.posonlyargs + tree.args.args
    owner = arguments[0].arg if arguments else ""
    return {
        place_of_node(node): narrowing(module, tree, place_of_node(node), _trees(request))
        for node in ast.walk(tree)
        if _is_call_of(node, owner, norms)
    }


def _is_call_of(node: ast.AST, owner: str, names: Iterable[str]) -> bool:
    """Return whether a node is `self.NAME(...)` with one argument."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and is_name(function.value)
        and function.value.id == owner
        and function.attr in names
        and not isinstance(node.args[0], ast.Starred)
    )


class Mark(ast.NodeTransformer):
    """Replaces `self.NAME(x)` at these places by `kprof_norm_N(self.NAME, x)`."""

    def __init__(self, places: Iterable[Place]) -> None:
        """Number the places in their order."""
        self._numbers = {place: number for number, place in enumerate(places)}

    def visit_Call(self, node: ast.Call) -> Any:
        """Replace the call of a norm."""
        number = self._numbers.get(place_of_node(node))
        self.generic_visit(node)
        if number is None:
            return node
        name = ast.Name(_name(number), ast.Load())
        call = ast.Call(name, [node.func, *node.args], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def functions_for(calls: Mapping[Place, Narrowing]) -> dict[str, Callable[..., Any]]:
    """Return the functions that `Mark` calls, by name."""
    return {_name(number): _calling(found) for number, found in enumerate(calls.values())}


def _name(number: int) -> str:
    return f"kprof_norm_{number}"


def _calling(readers: Narrowing) -> Callable[..., Any]:
    """Return a function that calls a norm, and tells it who reads its result."""

    def call(norm: Any, x: Any) -> Any:
        function = getattr(norm.__dict__.get("forward"), "__func__", None)
        switch = getattr(function, MARK, None)
        if switch is None or switch.owner is not norm or not is_passed_over(norm):
            return norm(x)
        assert function is not None
        return function(norm, x, kprof_readers=readers)

    return call


def _site(
    name: str, module: Module, tree: ast.FunctionDef, calls: Mapping[Place, Narrowing]
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


FAMILY = Family(kernels=(RMSNORM, LAYERNORM), find=find)
