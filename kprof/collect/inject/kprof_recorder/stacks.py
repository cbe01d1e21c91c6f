"""Modules that call each other, as torch.compile notes them with the nodes of its graphs."""

# ruff: noqa: ANN401 - the compiler's own have no types.

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from .ranges import Models

# Modules by identity, outermost first.
Stack = tuple[int, ...]
# The stack of every name in the comments of one piece of generated code; None for what belongs to
# no module itself, such as the sum of two gradients.
Notes = dict[str, "Stack | None"]
# The stack of every node of a graph, and the names of its inputs.
Nodes = dict[str, tuple["Stack | None", frozenset[str]]]


@dataclass(frozen=True)
class Input:
    """An input of a graph: the stack of what uses it, None for several, and its shape if known."""

    stack: Stack | None
    shape: list[int] | None


class Stacks:
    """The modules that the compiler traced through, and their names."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._modules: dict[int, weakref.ref[Module]] = {}
        self._identities: dict[str, int] = {}

    def trace(self, key: str, module: Module) -> None:
        """Note a module by the key that it has in the stacks of nodes."""
        self._identities[key] = self.identify(module)

    def identify(self, module: Module) -> int:
        """Return what stands for a module in a stack."""
        self._modules[id(module)] = weakref.ref(module)
        return id(module)

    def of_traced(self, graph: Any, root: Stack) -> Notes:
        """Return the stacks of a graph of Dynamo's; all lie within `root`."""
        notes: Notes = {}
        for node in _nodes_in(graph):
            _add(notes, node.name, self._stack(node.meta.get("nn_module_stack"), root))
        return notes

    def of_inputs(self, graph: Any, root: Stack) -> list[Input]:
        """Return the inputs of a graph of Dynamo's, with the stack of what alone uses each."""
        return [
            Input(self._of_users(node, root), _shape(node))
            for node in graph.graph.nodes
            if node.op == "placeholder"
        ]

    def _of_users(self, node: Any, root: Stack) -> Stack | None:
        stacks = {self._stack(user.meta.get("nn_module_stack"), root) for user in node.users}
        return stacks.pop() if len(stacks) == 1 else None

    def nodes_of(self, graph: Any, root: Stack) -> Nodes:
        """Return the nodes of a graph that Inductor is about to rewrite."""
        return {node.name: (self._stack_of(node, root), _inputs(node)) for node in _nodes_in(graph)}

    def of_compiled(self, graph: Any, root: Stack, before: Nodes) -> Notes:
        """Return the stacks of a graph of Inductor's, by what its comments call the nodes.

        Of a node that took the place of others, as a product with an addend does, torch tells the
        modules of the last one only: those of the others are known from the graph `before`.
        """
        nodes = list(_nodes_in(graph))
        replaced = before.keys() - {node.name for node in nodes}
        notes: Notes = {}
        for node in nodes:
            name = _name_in_comments(node)
            if name is None:
                continue
            _add(notes, name, self._stack_of(node, root))
            if before and node.name not in before:
                for stack, inputs in map(before.__getitem__, replaced):
                    if inputs and inputs <= _inputs(node):
                        _add(notes, name, stack)
        return notes

    def names_of(self, stack: Stack) -> list[list[str]] | None:
        """Return the names of a stack, for every module of its outermost one's class.

        One frame may serve many, such as the layers of a model that are compiled each. None where
        a module is not known any more.
        """
        modules = [self._modules[each]() for each in stack]
        anchor = modules[0] if modules else None
        if anchor is None:
            return None if modules else []
        if self.models.name_of(anchor) is None:
            self.models.describe(anchor)
            self.models.range_name_of(anchor)
        paths = [_path_to(module, anchor) for module in modules]
        found: dict[Any, list[Any]] = {}
        for instance in self.models.alike(anchor):
            below = [None if path is None else _follow(path, instance) for path in paths]
            names = [None if m is None else self.models.name_of(m) for m in below]
            if None not in names:
                # Of two modules with one name only that name is known.
                is_known = found.setdefault(names[0], names) == names
                found[names[0]] = names if is_known else names[:1]
        return list(found.values())

    def _stack(self, recorded: dict[str, Any] | None, root: Stack) -> Stack:
        found = [self._identities[key.partition("@")[0]] for key in recorded or ()]
        return tuple(dict.fromkeys((*root, *found)))

    def _stack_of(self, node: Any, root: Stack) -> Stack | None:
        """Return the stack of a node, for a backward one that of its forward."""
        if node.meta.get("partitioner_tag") != "is_backward":
            return self._stack(node.meta.get("nn_module_stack"), root)
        if "fwd_nn_module_stack" in node.meta:
            return self._stack(node.meta["fwd_nn_module_stack"], root)
        return None


def _add(notes: Notes, name: str, stack: Stack | None) -> None:
    """Note a node; of several with one name, as in checkpointed parts, what they share is known."""
    other = notes.get(name)
    if stack is not None and other is not None:
        both = zip(stack, other, strict=False)
        stack = tuple(each for each, same in itertools.takewhile(lambda b: b[0] == b[1], both))
    notes[name] = other if stack is None else stack


def _nodes_in(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of those inside it, such as checkpointed parts."""
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from part.graph.nodes


def _inputs(node: Any) -> frozenset[str]:
    return frozenset(each.name for each in node.all_input_nodes)


def _shape(node: Any) -> list[int] | None:
    """Return the shape of an input whose sizes are fixed."""
    shape = getattr(node.meta.get("example_value"), "shape", ())
    is_fixed = all(type(size) is int for size in shape)
    return list(shape) if shape and is_fixed else None


def _name_in_comments(node: Any) -> str | None:
    """Return what Inductor's comments call a node."""
    if "from_node" in node.meta:
        return str(node.meta["from_node"][0].name)
    return str(node.name) if node.meta.get("partitioner_tag") == "is_backward" else None


def _path_to(module: Module | None, root: Module) -> tuple[str, ...] | None:
    """Return the names that lead from `root` to `module`."""
    rest: list[tuple[tuple[str, ...], Module]] = [((), root)]
    seen = set()
    while rest and module is not None:
        path, each = rest.pop()
        if each is module:
            return path
        if id(each) not in seen:
            seen.add(id(each))
            rest.extend(((*path, name), m) for name, m in each._modules.items() if m is not None)
    return None


def _follow(path: tuple[str, ...], module: Module | None) -> Module | None:
    for name in path:
        module = module._modules.get(name) if module is not None else None
    return module
