"""Which modules' operators each kernel of a compiled model runs: what torch.compile notes of it.

Compiled modules call no hooks. But Dynamo keeps the modules it traced through with every node of
its graphs, and Inductor names those nodes in comments of the code that it generates. Both are kept
here as they are; the reader puts them together. Nothing is changed in what is compiled, nothing is
imported that the workload has not imported itself, and no failure here reaches it.
"""

# ruff: noqa: ANN401 - the compiler's own have no types.

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import Module

from . import when_imported
from .native import RLock
from .ranges import Models
from .softly import softly
from .stacks import Input, Nodes, Notes, Stack, Stacks

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
    """What Dynamo made of one frame; `root` is the module whose method it is, if it is one."""

    notes: Notes
    inputs: list[Input]
    root: Stack


@dataclass
class Code:
    """What Inductor made of one graph; `keys` are in the names of the ranges around its calls."""

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

    # What the compiler does.

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
            # Dynamo traced the frame, whatever came from a cache after that.
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
