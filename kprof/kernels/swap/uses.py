"""Uses of a value in the source of a forward, and values that only linear layers read.

Under autocast a linear layer rounds its input. If nothing else reads a value, its producer can
write it rounded, and both the wide copy and the cast are left out. It is rounded once, as before.
Gradients of several readers would be added rounded, so with gradients there may be only one.
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Module, functional

from kprof.kernels.swap.dispatch import PLAIN, cast_of
from kprof.kernels.swap.patches import innermost, is_passed_over

# Functions that see the variables of the function that calls them.
READS_LOCALS = {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "breakpoint"}
# Functions that turn autocast off, or enter what may.
SETS_AUTOCAST = {"set_autocast_enabled", "set_autocast_cpu_enabled", "set_autocast_dtype"} | {
    *("set_autocast_gpu_dtype", "set_autocast_cpu_dtype", "__enter__", "enter_context")
}
# Code that may go on elsewhere, where autocast is off.
INTERRUPTED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Attributes of a tensor that depend neither on its values nor on its dtype.
SHAPE = {"shape", "device", "ndim", "is_cuda", "layout", "size", "dim", "numel"}
# Attributes that do not depend on its values.
METADATA = SHAPE | {"dtype"}
# Modules inside modules that a value may pass on its way to linear layers.
MOST_LEVELS = 4
# Layers, by module and class, that multiply their only input by a weight and do nothing else.
LINEARS = {
    ("torch.nn.modules.linear", "Linear"),
    ("transformers.pytorch_utils", "Conv1D"),
}

# Attribute of a swapped forward that can leave the gradient of its bias to its caller.
DETACHES = "kprof_detaches"

# First line and column, last line and column: `f(x)` and `f(x).g()` have the same start.
Place = tuple[int, int, int, int]


def place_of_node(node: Any) -> Place:
    """Return where a node stands in the source."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def is_name(node: ast.AST | None) -> TypeGuard[ast.Name]:
    """Return whether a node is a variable."""
    return isinstance(node, ast.Name)


def blocks_of(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    """Yield the blocks inside a statement, except those of definitions."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, ())
    for one in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield one.body


def expressions_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield what runs before the blocks of a statement: for a definition, its head."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from (*statement.decorator_list, statement.args)
        yield from () if statement.returns is None else (statement.returns,)
    elif isinstance(statement, ast.ClassDef):
        yield from (*statement.decorator_list, *statement.bases, *statement.keywords)
    else:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, (ast.ExceptHandler, ast.match_case)):
                guard = child.type if isinstance(child, ast.ExceptHandler) else child.guard
                yield from () if guard is None else (guard,)
            elif isinstance(child, ast.withitem):
                yield child.context_expr
            elif isinstance(child, ast.expr):
                yield child


class OtherUse(Exception):
    """A use of the value that is not known to be harmless."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line


class Uses:
    """Follows the variables of a function that may hold a value, and checks each use of it."""

    def __init__(self, shared: set[str]) -> None:
        """Follow a value; `shared` are the variables that inner functions see."""
        self._shared = shared

    def line_of_other(self, tree: ast.FunctionDef, names: set[str] | None = None) -> int | None:
        """Return the line of a use that is not harmless; None: there is none.

        `names`: the variables with the value at the start.
        """
        try:
            self._block(tree.body, names or set())
        except OtherUse as found:
            return found.line
        return None

    def makes(self, statement: ast.stmt) -> bool:
        """Return whether a statement assigns the value."""
        raise NotImplementedError

    def passes(self, statement: ast.stmt) -> bool:
        """Return whether the value is not made where this statement runs."""
        return False

    def is_harmless(self, node: ast.AST, names: set[str], is_operand: bool) -> bool:
        """Return whether an expression, as a whole, is a harmless use of the value, or none."""
        raise NotImplementedError

    def are_operands(self, node: ast.AST) -> bool:
        """Return whether variables directly inside of an expression are operands of it."""
        raise NotImplementedError

    def is_held(self, node: ast.AST, names: set[str]) -> bool:
        """Return whether an expression is a variable that holds the value."""
        return is_name(node) and node.id in names and isinstance(node.ctx, ast.Load)

    def _block(self, block: Sequence[ast.stmt], names: set[str]) -> set[str]:
        """Return the variables that may hold the value after a block."""
        for statement in block:
            names = self._statement(statement, names)
        return names

    def _statement(self, one: ast.stmt, names: set[str]) -> set[str]:
        if isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return self._assigned(one, names)
        if self.passes(one):
            return names
        for part in expressions_of(one):
            self._read(part, names)
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return names - {one.name}
        blocks = list(blocks_of(one))
        after, before = set(names), None
        while before != after:
            # A loop runs its body again, with its assignments.
            before = set(after)
            for block in blocks:
                after |= self._block(block, set(after))
        return after

    def _assigned(self, one: Any, names: set[str]) -> set[str]:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        value, is_made = one.value, self.makes(one)
        is_copy = value is not None and self.is_held(value, names)
        if not (is_copy and all(isinstance(target, ast.Name) for target in targets)):
            self._read(value, names, is_operand=isinstance(one, ast.AugAssign))
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            if one.target.id in names:
                raise OtherUse(one.lineno)
            return names
        for target in targets:
            # x[0] = ..., x.data = ...: x is read, and written to.
            if not isinstance(target, ast.Name):
                self._read(target, names)
        stored = {
            node.id
            for target in targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        holds = (is_made or is_copy) and value is not None
        if holds and stored & self._shared:
            raise OtherUse(one.lineno)
        return names | stored if holds else names - stored

    def _read(self, node: ast.AST | None, names: set[str], *, is_operand: bool = False) -> None:
        """Look for uses of the value in an expression."""
        if node is None or self.is_harmless(node, names, is_operand):
            return
        is_bound = isinstance(node, ast.NamedExpr) and node.target.id in names | self._shared
        if is_bound or self.is_held(node, names):
            raise OtherUse(node.lineno)  # type: ignore[attr-defined]
        are_operands = self.are_operands(node)
        for child in ast.iter_child_nodes(node):
            self._read(child, names, is_operand=are_operands)


class Effects(NamedTuple):
    """Finds calls in the code of a layer: with the name of `self`, its norms, its children."""

    owner: str
    norms: frozenset[str]
    children: set[str]

    def norm_called(self, node: ast.AST) -> tuple[str, str] | None:
        """Return the norm, and the name of the variable, of `self.NORM(NAME)`."""
        norm = self.norm_of(node, is_name)
        return (norm, node.args[0].id) if norm else None  # type: ignore[attr-defined]

    def norm_of(self, node: ast.AST, is_given: Callable[[ast.expr], bool]) -> str:
        """Return the norm of `self.NORM(GIVEN)`; empty: it is something else."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return ""
        norm = self.child(node.func)
        return norm if norm in self.norms and is_given(node.args[0]) else ""

    def child(self, node: ast.AST) -> str:
        """Return the name of a child `self.NAME`; empty: it is something else."""
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            return ""
        is_own = node.value.id == self.owner and node.attr in self.children
        return node.attr if is_own else ""

    def first_effect_of(self, statement: ast.stmt) -> ast.AST | None:
        """Return the first part of a statement that runs code; None: it only copies."""
        if isinstance(statement, ast.Pass):
            return None
        value = getattr(statement, "value", None)
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        are_names = all(is_name(one) for one in targets)
        if isinstance(statement, (ast.Return, ast.AugAssign)) or not are_names:
            # The statement itself has an effect after its value.
            is_known = isinstance(statement, (ast.Return, ast.AugAssign, ast.Assign, ast.Expr))
            is_free = isinstance(statement, ast.Expr)
            effect = self.first_effect(value) if is_known else statement
            return effect if effect is not None or is_free else statement
        is_known = isinstance(statement, (ast.Assign, ast.AnnAssign))
        return self.first_effect(value) if is_known else statement

    def first_effect(self, node: ast.AST | None) -> ast.AST | None:
        """Return the first part of an expression, in order of evaluation, that runs code.

        None: it has only names, constants and children.
        """
        if node is None or isinstance(node, (ast.Name, ast.Constant)) or self.child(node):
            return None
        parts: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.Call):
            parts = (node.func, *node.args, *(one.value for one in node.keywords))
        elif isinstance(node, ast.BinOp):
            parts = (node.left, node.right)
        elif isinstance(node, (ast.Tuple, ast.List)):
            parts = node.elts
        elif isinstance(node, ast.Attribute):
            parts = (node.value,)
        elif isinstance(node, ast.Subscript):
            parts = (node.value, node.slice)
        effects = (self.first_effect(one) for one in parts)
        first = next((one for one in effects if one is not None), None)
        is_free = isinstance(node, (ast.Tuple, ast.List)) and first is None
        return None if is_free else first or node


def children_of(module: Module) -> set[str]:
    """Return the names for which `self.NAME` is always a child."""
    cls = type(module)
    plain = (
        cls.__getattribute__ is Module.__getattribute__ and cls.__getattr__ is Module.__getattr__
    )
    return {
        name
        for name, child in module._modules.items()
        if child is not None and plain and not hasattr(cls, name) and name not in module.__dict__
    }


class Reader(NamedTuple):
    """A child that gets the value as an argument."""

    child: str
    argument: int | str
    """Its position, or its name."""


class _Reading(Uses):
    """Records the children of a module to which a value goes."""

    def __init__(self, shared: set[str], owner: str, source: Place | None) -> None:
        """Follow the result of the call at `source`; None: the value is there at the start."""
        super().__init__(shared)
        self._owner, self._source = owner, source
        self.readers: list[Reader] = []

    def makes(self, statement: ast.stmt) -> bool:
        """Return whether a statement assigns the result of the call."""
        return self._is_source(getattr(statement, "value", None))

    def is_harmless(self, node: ast.AST, names: set[str], is_operand: bool) -> bool:
        """Return whether an expression reads the shape of the value, or gives it to children."""
        is_loop = isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
        if self._is_source(node) or (is_loop and self._occurs(node, names)):
            raise OtherUse(node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute):
            return self.is_held(node.value, names) and node.attr in SHAPE
        if not isinstance(node, ast.Call) or not self._child(node.func):
            return False
        for argument, given in _arguments_of(node):
            if self._is_source(given):
                self._read_inside(given, names)
            elif not self.is_held(given, names):
                self._read(given, names)
                continue
            if argument is None:
                raise OtherUse(node.lineno)
            self.readers.append(Reader(self._child(node.func), argument))
        return True

    def are_operands(self, node: ast.AST) -> bool:
        """Return False: no expression computes with the value."""
        return False

    def _assigned(self, one: Any, names: set[str]) -> set[str]:
        if not self.makes(one):
            return super()._assigned(one, names)
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        stored = {target.id for target in targets if is_name(target)}
        if isinstance(one, ast.AugAssign) or len(stored) < len(targets) or stored & self._shared:
            raise OtherUse(one.lineno)
        self._read_inside(one.value, names)
        return names | stored

    def _statement(self, one: ast.stmt, names: set[str]) -> set[str]:
        if isinstance(one, (ast.With, ast.AsyncWith)) and self._occurs(one, names):
            # It may turn autocast off.
            raise OtherUse(one.lineno)
        before = len(self.readers)
        names = super()._statement(one, names)
        if isinstance(one, (ast.For, ast.AsyncFor, ast.While)):
            # They may read it more than once.
            self.readers += self.readers[before:]
        return names

    def _occurs(self, node: ast.AST, names: set[str]) -> bool:
        return any(self.is_held(one, names) or self._is_source(one) for one in ast.walk(node))

    def _read_inside(self, source: ast.AST, names: set[str]) -> None:
        for child in ast.iter_child_nodes(source):
            self._read(child, names)

    def _child(self, node: ast.AST) -> str:
        is_own = isinstance(node, ast.Attribute) and is_name(node.value)
        return node.attr if is_own and node.value.id == self._owner else ""  # type: ignore[attr-defined]

    def _is_source(self, node: ast.AST | None) -> bool:
        is_call = self._source is not None and isinstance(node, ast.Call)
        return is_call and place_of_node(node) == self._source


def _arguments_of(call: ast.Call) -> Iterator[tuple[int | str | None, ast.expr]]:
    """Yield the arguments of a call by position or name; None: this is not known."""
    is_known = True
    for place, given in enumerate(call.args):
        is_known = is_known and not isinstance(given, ast.Starred)
        yield place if is_known else None, given
    for keyword in call.keywords:
        yield keyword.arg, keyword.value


def readers_of(module: Module, tree: ast.FunctionDef, source: Place | str) -> list[Reader] | None:
    """Return the children that read a value, where nothing else does; None: something does.

    Args:
        module: Whose forward the tree is.
        tree: Of the forward.
        source: The place of the call that returns the value, or the parameter that holds it.
    """
    inner = innermost(type(module).forward)
    arguments = tree.args.posonlyargs + tree.args.args
    if inner is None or not arguments:
        return None
    shared, owner = set(inner.__code__.co_cellvars), arguments[0].arg
    stores = any(
        is_name(node) and node.id == owner and not isinstance(node.ctx, ast.Load)
        for node in ast.walk(tree)
    )
    is_global = any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(tree))
    code = inner.__code__
    called = (READS_LOCALS | SETS_AUTOCAST) & {*code.co_names}
    if stores or is_global or owner in shared or called or code.co_flags & INTERRUPTED:
        return None
    names = {source} if isinstance(source, str) else set[str]()
    if names & shared:
        return None
    reading = _Reading(shared, owner, None if isinstance(source, str) else source)
    return reading.readers if reading.line_of_other(tree, names) is None else None


def child_of(module: Module, name: str) -> Module | None:
    """Return the child that the attribute of a module is; None: it is something else."""
    cls = type(module)
    looks_up = next(one for one in cls.__mro__ if "__getattribute__" in vars(one))
    is_looked_up = looks_up is object and cls.__getattr__ is Module.__getattr__
    is_child = is_looked_up and name not in module.__dict__ and not hasattr(cls, name)
    return module._modules.get(name) if is_child else None


def is_linear(module: Module) -> bool:
    """Return whether a module multiplies its input by a weight and does nothing else."""
    return (type(module).__module__, type(module).__name__) in LINEARS


def multiply(layer: Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what one of `LINEARS` computes, with another weight and bias."""
    if type(layer) is torch.nn.Linear:
        return functional.linear(x, weight, bias)
    assert bias is not None
    # Hugging Face's Conv1D, whose weight is transposed.
    rows = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return rows.view(*x.shape[:-1], weight.shape[-1])


class _Step(NamedTuple):
    """A module that a value is given to."""

    parent: weakref.ref[Module]
    name: str
    child: weakref.ref[Module]
    forward: Callable[..., Any]
    """Of its class."""
    is_linear: bool


class Narrowing:
    """Tells at each call whether a value that linear layers alone read can be written rounded."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        """Take all modules that the value is given to."""
        self._steps = tuple(dict.fromkeys(steps))
        self._num_reads = sum(step.is_linear for step in steps)

    def dtype_for(self, x: Tensor, made: torch.dtype | None = None) -> torch.dtype | None:
        """Return the dtype to which readers round a value that is made of x.

        `made`: its dtype; None: x's. The result is None if it is not float32, autocast is
        off, several readers have gradients, or a module on the way is watched or another one.
        """
        if (made or x.dtype) != torch.float32 or not torch.is_autocast_enabled(x.device.type):
            return None
        if self._num_reads > 1 and torch.is_grad_enabled():
            return None
        for step in self._steps:
            owner, child = step.parent(), step.child()
            if owner is None or child is None or id(child_of(owner, step.name)) != id(child):
                return None
            if type(child).forward is not step.forward or not is_passed_over(child):
                return None
            if step.is_linear and type(child._parameters.get("weight")) not in PLAIN:
                return None
        return cast_of(x)


Trees = Callable[[Callable[..., Any]], "ast.FunctionDef | None"]


def narrowing(
    module: Module, tree: ast.FunctionDef, source: Place, trees: Trees
) -> Narrowing | None:
    """Return how the result of a call in a module's forward may be rounded; None: it may not.

    `trees` returns the syntax tree of a forward, as `tree_of` does.
    """
    steps = [*_steps(module, tree, source, trees, MOST_LEVELS)]
    known = [one for one in steps if one is not None]
    return Narrowing(known) if known and len(known) == len(steps) else None


def _steps(
    module: Module, tree: ast.FunctionDef, source: Place | str, trees: Trees, levels: int
) -> Iterator[_Step | None]:
    """Yield the modules that a value is given to; None: something else reads it, or nothing."""
    readers = readers_of(module, tree, source) if levels else None
    if not readers:
        yield None
        return
    for reader in readers:
        child = child_of(module, reader.child)
        if child is None:
            yield None
            return
        is_last = is_linear(child) and reader.argument == 0
        forward = type(child).forward
        yield _Step(weakref.ref(module), reader.child, weakref.ref(child), forward, is_last)
        if not is_last:
            yield from _steps_inside(child, reader.argument, trees, levels - 1)


def _steps_inside(
    child: Module, argument: int | str, trees: Trees, levels: int
) -> Iterator[_Step | None]:
    """Yield the modules that a child's argument is given to."""
    forward: Callable[..., Any] = type(child).forward
    # A decorator may see the arguments, or turn autocast off.
    tree = None if hasattr(forward, "__wrapped__") else trees(forward)
    if tree is None or tree.decorator_list:
        yield None
        return
    named = [one.arg for one in tree.args.posonlyargs + tree.args.args][1:]
    others = [one.arg for one in tree.args.kwonlyargs]
    if isinstance(argument, int):
        name = named[argument] if argument < len(named) else ""
    else:
        name = argument if argument in (*named, *others) else ""
    yield from _steps(child, tree, name, trees, levels) if name else (None,)
