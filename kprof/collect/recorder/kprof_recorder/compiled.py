"""Which modules' operators each kernel of a compiled model runs: torch.compile's notes of it.

Compiled modules call no hooks. But Dynamo keeps the modules it traced through with every node of
its graphs, and Inductor names those nodes in comments of the code that it generates. Both are kept
here as they are; the reader puts them together. Nothing is changed in what is compiled, nothing is
imported that the workload has not imported itself, and no failure here reaches it.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import Module

from . import when_imported
from .named_ranges import Models
from .native import RLock
from .softly import softly

# ruff: noqa: ANN401 - the compiler's own have no types.


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
                # Of two modules with the same name only the name is known.
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


# ruff: noqa: ANN401 - the compiler's own have no types.


FILE = "compiled.json.gz"
# From here on the ranges around calls of compiled code name it,
NAMES_CALLS = (2, 9)
# and from here on Inductor's comments name the nodes of backward graphs as well.
NAMES_BACKWARD = (2, 10)
TOO_OLD = (
    "Before version 2.10, torch does not note which modules the backward kernels of a compiled "
    "model serve: but for operators with a parameter of theirs, they belong to it as a whole."
)
FROM_CACHE = (
    "A compiled backward pass came out of torch's cache, which does not hold which modules its "
    "kernels serve: but for operators with a parameter of theirs, they belong to the compiled "
    "model as a whole. To have all named, compile anew: set TORCHINDUCTOR_CACHE_DIR to an empty "
    "folder."
)


@dataclass
class Graph:
    """Dynamo's result for one frame; `root` is the module whose method it is, if it is one."""

    notes: Notes
    inputs: list[Input]
    root: Stack


@dataclass
class Code:
    """Inductor's result for one graph; `keys` are in the names of the ranges around its calls."""

    path: Path
    frame: str
    is_backward: bool
    notes: Notes | None
    inputs: list[Input]
    """Where there are no notes: what is known of the inputs of the whole graph."""
    keys: set[str] = field(default_factory=set)


class CompilerNotes:
    """Everything that this process compiled, since its beginning."""

    def __init__(self, models: Models) -> None:
        self.lock = RLock()
        self.is_broken = False
        self._trouble = ""
        self._stacks = Stacks(models)
        self._graphs: dict[str, Graph] = {}
        self._before: Nodes = {}
        self._of_key: dict[str, Notes] = {}
        self._of_code: dict[str, Notes] = {}
        self._codes: dict[str, Code] = {}

    def listen(self) -> None:
        """Listen to the compiler from the moment that the workload imports it."""
        if _torch_version() < NAMES_CALLS:
            return
        when_imported("torch._dynamo.variables.nn_module", self._listen_to_modules)
        when_imported("torch._dynamo.output_graph", self._listen_to_graphs)
        when_imported("torch._inductor.codecache", self._listen_to_cache)
        when_imported("torch._inductor.compile_fx", self._listen_to_rewriting)
        when_imported("torch._inductor.graph", self._listen_to_code)
        when_imported("torch._inductor.output_code", self._listen_to_loading)

    def give_up(self, reason: str) -> None:
        """Note nothing more; all else goes on."""
        self.is_broken = True
        what = "Modules inside compiled models are not named"
        self._trouble = reason.replace("The recorder stopped", what)

    @property
    def has_code(self) -> bool:
        """Whether anything was compiled."""
        return bool(self._codes)

    def caveats(self) -> list[str]:
        """Return what could not be noted, as sentences for the report."""
        if self._trouble:
            return [self._trouble]
        unnamed = [code for code in self._codes.values() if code.is_backward and code.notes is None]
        if not unnamed:
            return []
        return [TOO_OLD if _torch_version() < NAMES_BACKWARD else FROM_CACHE]

    @softly
    def write(self, folder: Path) -> None:
        """Write the generated code and the names of its modules into `folder`."""
        known = [code for code in self._codes.values() if code.notes is not None or code.inputs]
        told = [self._describe(code) for code in known if code.path.is_file()]
        if not told:
            return
        unfinished = folder / f".{FILE}"
        try:
            with gzip.open(unfinished, "wt", encoding="utf-8", compresslevel=1) as file:
                json.dump({"schema": 1, "codes": told}, file)
            unfinished.replace(folder / FILE)
        except OSError:
            # The room is needed to say what happened.
            unfinished.unlink(missing_ok=True)
            raise

    def _describe(self, code: Code) -> dict[str, Any]:
        places: dict[Stack, int] = {}

        def place(stack: Stack | None) -> int | None:
            return None if stack is None else places.setdefault(stack, len(places))

        notes = {name: place(stack) for name, stack in (code.notes or {}).items()}
        inputs = [{"stack": place(each.stack), "shape": each.shape} for each in code.inputs]
        return {
            "keys": sorted(code.keys),
            "frame": code.frame,
            "is_backward": code.is_backward,
            "text": code.path.read_text(encoding="utf-8"),
            "notes": notes,
            "inputs": inputs,
            "stacks": [self._stacks.names_of(stack) for stack in places],
        }

    # The compiler's own work.

    @softly
    def module_is_traced(
        self, key: str, source: object, translator: object, module: Module
    ) -> None:
        """Note a module whose call Dynamo is about to trace."""
        self._stacks.trace(key, module)

    @softly
    def graph_is_traced(self, output: Any, graph: Any, *rest: object) -> None:
        """Note the modules of a graph that Dynamo hands to the compiler."""
        owner = output.local_scope.get("self")
        root = (self._stacks.identify(owner),) if isinstance(owner, Module) else ()
        notes, inputs = self._stacks.of_traced(graph, root), self._stacks.of_inputs(graph, root)
        self._graphs[_compile_id()] = Graph(notes, inputs, root)

    @softly
    def code_is_looked_up(self, hashed: Any, graph: Any, *rest: object, **options: object) -> None:
        """Note the modules of a graph whose code may be in Inductor's cache."""
        self._of_key[hashed[0]] = self._stacks.of_compiled(graph, self._root(), {})

    @softly
    def graph_is_rewritten(self, graph: Any, *rest: object, **options: object) -> None:
        """Note the nodes of a graph that Inductor is about to rewrite, and generate code from."""
        self._before = self._stacks.nodes_of(graph, self._root())

    @softly
    def code_is_generated(self, code: object, lowering: Any) -> None:
        """Note the modules of a graph as code was generated from it."""
        notes = self._stacks.of_compiled(lowering.module, self._root(), self._before)
        self._of_code[lowering.cache_key] = notes

    @softly
    def code_is_loaded(self, result: object, compiled: Any, *rest: object) -> None:
        """Note a piece of code that is about to be used, whether generated or from a cache."""
        from torch._inductor.codecache import get_path

        name, key = compiled.cache_key, str(compiled._fx_graph_cache_key)
        is_backward = bool(compiled.fx_kwargs.get("is_backward"))
        notes = self._of_code.get(name, self._of_key.get(key))
        graph = self._graphs.get(_compile_id())
        if notes is None and graph is not None and not is_backward:
            # Dynamo traced the frame; later stages may have come from a cache.
            notes = graph.notes
        if is_backward and _torch_version() < NAMES_BACKWARD:
            notes = None
        inputs = graph.inputs if graph is not None and notes is None else []
        path = Path(get_path(name, "py")[2])
        code = Code(path, _compile_id(), is_backward, notes, inputs)
        self._codes.setdefault(name, code).keys.add(key)

    def _root(self) -> Stack:
        graph = self._graphs.get(_compile_id())
        return graph.root if graph is not None else ()

    # Where it does it.

    @softly
    def _listen_to_modules(self, dynamo: ModuleType) -> None:
        _tell_before(dynamo, "record_nn_module_stack", self.module_is_traced)

    @softly
    def _listen_to_graphs(self, dynamo: ModuleType) -> None:
        _tell_before(dynamo.OutputGraph, "call_user_compiler", self.graph_is_traced)

    @softly
    def _listen_to_cache(self, inductor: ModuleType) -> None:
        _tell_after(inductor, "compiled_fx_graph_hash", self.code_is_looked_up)

    @softly
    def _listen_to_rewriting(self, inductor: ModuleType) -> None:
        _tell_before(inductor, "fx_codegen_and_compile", self.graph_is_rewritten)

    @softly
    def _listen_to_code(self, inductor: ModuleType) -> None:
        _tell_after(inductor.GraphLowering, "compile_to_module", self.code_is_generated)

    @softly
    def _listen_to_loading(self, inductor: ModuleType) -> None:
        _tell_after(inductor.CompiledFxGraph, "post_compile", self.code_is_loaded)


def _tell_before(owner: Any, name: str, tell: Callable[..., object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        tell(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, call)


def _tell_after(owner: Any, name: str, tell: Callable[..., object]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        tell(result, *arguments, **options)
        return result

    setattr(owner, name, call)


def _compile_id() -> str:
    context = torch._guards.CompileContext.try_get()
    return str(context.compile_id) if context is not None else ""


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
