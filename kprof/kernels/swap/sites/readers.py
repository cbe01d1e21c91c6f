"""Calls of swapped norms and activations, in the forward of the layer around them.

Where linear layers alone read the result, it is written rounded under autocast: the call tells the
swapped norm who reads it. Where the input of a norm goes on beside it (`x = x + attn(norm(x))`), it
goes on through the norm, whose backward then adds both gradients: the call is a fork. The forward
is patched; nothing else changes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels.swap.patches import (
    MARK,
    innermost,
    is_passed_over,
    rewritten,
    tree_of,
    why_foreign,
)
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.activations import GELU, activation_of
from kprof.kernels.swap.sites.activations import Recognised as Activation
from kprof.kernels.swap.sites.norms import LAYERNORM, RMSNORM, Recognised, norm_of
from kprof.kernels.swap.uses import (
    METADATA,
    READS_LOCALS,
    Effects,
    Narrowing,
    Place,
    Uses,
    blocks_of,
    children_of,
    is_name,
    narrowing,
    place_of_node,
)


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the layers below a module whose forward makes such calls.

    They have no calls of their own to report: the norms do.
    """
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        names = producers_in(module, request)
        tree = tree_for(module, request) if names else None
        if tree is None or why_foreign(module) is not None:
            continue
        patch = patch_of(module, tree, names, request)
        if patch.functions:
            yield _site(name or type(module).__name__, module, patch)


class Patch(NamedTuple):
    """A tree with other calls, and the functions that it calls by name."""

    tree: ast.FunctionDef
    functions: dict[str, Callable[..., Any]]


def patch_of(
    module: Module,
    tree: ast.FunctionDef,
    names: Iterable[str],
    request: Request,
    fused: Container[Place] = (),
    others: Mapping[Place, Callable[..., Any]] | None = None,
) -> Patch:
    """Return the tree of a forward in which these norms and activations are called otherwise.

    `fused`: calls of norms that are no forks, as their input is a sum of the same kernel. `others`:
    functions that take the place of further calls.
    """
    readers = read_by_linears(module, tree, names, request)
    norms = {one for one in names if isinstance(norm_of(module._modules[one], request), Recognised)}
    forks = [one for one in forks_in(module, tree, norms) if one.call not in fused]
    forked = {one.call for one in forks}
    calls = {
        place: telling(one)
        for place, one in readers.items()
        if one is not None and place not in forked
    } | dict(others or {})
    functions = {_forking(n): forking(readers[one.call]) for n, one in enumerate(forks)}
    marked = Mark(calls).visit(InsertForks(forks).visit(copy.deepcopy(tree)))
    return Patch(marked, {**functions, **functions_for(calls)})


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
        function = swapped_forward(norm)
        return norm(x) if function is None else function(norm, x, kprof_readers=readers)

    return call


class Fork(NamedTuple):
    """A norm's call, whose input is added to something afterwards."""

    call: Place
    statement: Place
    """Around the call, which is the first of its effects."""
    norm: str
    variable: str
    """The argument."""
    holders: tuple[str, ...]
    """All variables that hold the input."""


def forks_in(module: Module, tree: ast.FunctionDef, norms: Iterable[str]) -> list[Fork]:
    """Return the forks in a module's forward, of which this is the tree."""
    inner, arguments = innermost(type(module).forward), tree.args.posonlyargs + tree.args.args
    if inner is None or not arguments or READS_LOCALS & {*inner.__code__.co_names}:
        return []
    owner, children = arguments[0].arg, children_of(module)
    shared = {*inner.__code__.co_cellvars, *inner.__code__.co_freevars}
    is_stored = any(
        is_name(one) and one.id == owner and not isinstance(one.ctx, ast.Load)
        for one in ast.walk(tree)
    )
    if owner in shared or is_stored:
        return []
    found = [*_forks_of(tree.body, Effects(owner, frozenset(norms) & children, children))]
    return [one for one in found if not shared & {*one.holders} and _goes_on(one, tree, shared)]


def _forks_of(block: Sequence[ast.stmt], effects: Effects) -> Iterator[Fork]:
    for place, statement in enumerate(block):
        for inside in blocks_of(statement):
            yield from _forks_of(inside, effects)
        effect = effects.first_effect_of(statement)
        called = None if effect is None else effects.norm_called(effect)
        if effect is not None and called is not None:
            norm, variable = called
            holders = _holders_of(variable, block[:place])
            yield Fork(place_of_node(effect), place_of_node(statement), norm, variable, holders)


def _holders_of(variable: str, before: Sequence[ast.stmt]) -> tuple[str, ...]:
    """Return the variables that are copies of one by the statements right before."""
    found = [variable]
    for one in reversed(before):
        if not isinstance(one, ast.Assign) or not is_name(one.value):
            break
        targets = [target.id for target in one.targets if is_name(target)]
        if one.value.id != variable or variable in targets or len(targets) < len(one.targets):
            break
        found += targets
    return tuple(dict.fromkeys(found))


def _goes_on(fork: Fork, tree: ast.FunctionDef, shared: set[str]) -> bool:
    """Return whether the input of a fork is added to something later, and not used otherwise."""
    inserting = InsertForks([fork])
    uses = _UsesOfInput(inserting.visit(copy.deepcopy(tree)), shared)
    return uses.line_of_other(uses.tree) is None and uses.is_used


class _UsesOfInput(Uses):
    """Looks for other uses of a fork's input than sums and copies."""

    def __init__(self, tree: ast.FunctionDef, shared: set[str]) -> None:
        super().__init__(shared)
        self.tree = tree
        self.is_used = False

    def makes(self, statement: ast.stmt) -> bool:
        """Return whether a statement assigns the input that goes on."""
        return getattr(statement, "is_of_fork", False)

    def is_harmless(self, node: ast.AST, names: set[str], is_operand: bool) -> bool:
        """Return whether an expression is an operand."""
        is_one = is_operand and self.is_held(node, names)
        self.is_used |= is_one
        return is_one

    def are_operands(self, node: ast.AST) -> bool:
        """Return whether an expression computes with its operands, or reads their metadata."""
        return isinstance(node, ast.BinOp) or (
            isinstance(node, ast.Attribute) and node.attr in METADATA
        )


class InsertForks(ast.NodeTransformer):
    """Runs a norm before the statement that calls it, and lets its input go on through it."""

    def __init__(self, forks: Iterable[Fork]) -> None:
        """Number the forks in their order."""
        numbered = [*enumerate(forks)]
        self._statements = {one.statement: (number, one) for number, one in numbered}
        self._calls = {one.call: number for number, one in numbered}
        self._functions: dict[int, ast.expr] = {}

    def visit(self, node: ast.AST) -> Any:
        """Insert two statements before that of a fork, and replace the norm's call."""
        is_call, is_statement = isinstance(node, ast.Call), isinstance(node, ast.stmt)
        number = self._calls.get(place_of_node(node)) if is_call else None
        found = self._statements.get(place_of_node(node)) if is_statement else None
        visited = super().visit(node)
        if number is not None:
            self._functions[number] = visited.func
            return ast.fix_missing_locations(ast.copy_location(_popped(number), node))
        if found is None:
            return visited
        number, fork = found
        return [*_inserted(number, fork, self._functions[number], visited.lineno), visited]


def _inserted(number: int, fork: Fork, norm: ast.expr, line: int) -> Iterator[ast.stmt]:
    """Yield the statements that run a norm, and let its input go on."""
    given = [norm, ast.Name(fork.variable, ast.Load())]
    call = ast.Call(ast.Name(_forking(number), ast.Load()), given, [])
    goes_on = ast.Assign([ast.Name(one, ast.Store()) for one in fork.holders], _popped(number))
    goes_on.is_of_fork = True  # type: ignore[attr-defined]
    for one in (ast.Assign([ast.Name(_forked(number), ast.Store())], call), goes_on):
        # At a place where no other code is.
        at = {"lineno": line, "end_lineno": line, "col_offset": 0, "end_col_offset": 0}
        yield ast.fix_missing_locations(ast.copy_location(one, ast.Pass(**at)))


def _popped(number: int) -> ast.Call:
    pop = ast.Attribute(ast.Name(_forked(number), ast.Load()), "pop", ast.Load())
    return ast.Call(pop, [], [])


def _forked(number: int) -> str:
    return f"kprof_forked_{number}"


def _forking(number: int) -> str:
    return f"kprof_fork_{number}"


def forking(readers: Narrowing | None) -> Callable[..., list[Any]]:
    """Return a function that calls a norm: its result, and its input as it goes on."""

    def call(norm: Any, x: Any) -> list[Any]:
        function = swapped_forward(norm)
        if function is None:
            return [norm(x), x]
        result = function(norm, x, kprof_readers=readers, kprof_forks=True)
        return [*result] if isinstance(result, tuple) else [result, x]

    return call


def swapped_forward(module: Any) -> Callable[..., Any] | None:
    """Return the forward by which a norm or an activation is swapped now, if it can be called.

    Where a module's own call of a function is replaced instead, its forward knows of no readers.
    """
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    switch = getattr(function, MARK, None)
    is_on = switch is not None and switch.owner is module and is_passed_over(module)
    takes_readers = READERS in (getattr(function, "__kwdefaults__", None) or ())
    return function if is_on and takes_readers else None


READERS = "kprof_readers"


def _site(name: str, module: Module, patch: Patch) -> Site:
    original, switch = type(module).forward, Switch()
    patched = rewritten(original, patch.tree, patch.functions)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_original = switch.owner is not self or is_compiling()
        return (original if is_original else patched)(self, *args, **kwargs)

    def why_changed(owner: Any) -> str | None:
        is_another = type(owner).forward is not original
        return "its forward is another one now" if is_another else None

    put = bound(forward, original, switch)
    return Site(name, module, put, {}, switch=switch, why_changed=why_changed)


FAMILY = Family(kernels=(RMSNORM, LAYERNORM, GELU), find=find)
