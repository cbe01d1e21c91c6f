"""Named ranges on the workload's timeline, for torch's profiler or for NVTX.

The names of modules and models are remembered while these live (`Known`).
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.nn import Module, UninitializedParameter

from .settings import NSIGHT
from .step_counter import Source

Thing = TypeVar("Thing")
Fact = TypeVar("Fact")


class Known(Generic[Thing, Fact]):
    """Facts about objects, by identity: what a workload compares or hashes may be anything."""

    def __init__(self, find_out: Callable[[Thing], Fact]) -> None:
        self._find_out = find_out
        self._facts: dict[int, tuple[weakref.ref[Thing], Fact]] = {}

    def __call__(self, thing: Thing) -> Fact:
        """Return the fact about `thing`, found out the first time only."""
        known = self._facts.get(id(thing))
        if known is not None and known[0]() is thing:
            return known[1]
        fact = self._find_out(thing)
        self._facts[id(thing)] = (weakref.ref(thing), fact)
        return fact

    def alive(self) -> Iterator[Thing]:
        """Yield the objects that still live."""
        for reference, _ in list(self._facts.values()):
            thing = reference()
            if thing is not None:
                yield thing


STEP = "kprof.step#"
PHASE = "kprof.phase#"
MODULE = "kprof.module#"
CAPTURE = "kprof.capture#"
GRAPH = "kprof.graph#"

# Wrappers put a segment of their own into every name below them.
WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
)
WRAPPED = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


# One of these is set in every process that a tool of NVIDIA's listens to.
LISTENERS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


_RecordFunctionFast = torch._C._profiler._RecordFunctionFast


class TorchRange:
    """A range in torch's trace, open inside `with`.

    `_RecordFunctionFast` costs 0.5 us in a trace, where `record_function` costs 4 us. But torch
    writes the end of a range to where the trace lay in which it began, and raises where it began
    in none: so a range is left open for ever if torch's profiler was started or stopped within it,
    which another thread may do at any time.
    """

    __slots__ = ("_opened", "name")
    num_changes = 0
    left_open: ClassVar[list[object]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self._opened = _open_in_torch(self.name)

    def __exit__(self, *exception: object) -> None:
        _close_in_torch(self._opened)


def _open_in_torch(name: str) -> tuple[Any, int]:
    num_changes = TorchRange.num_changes
    function = _RecordFunctionFast(name)
    function.__enter__()
    return function, num_changes


def _close_in_torch(opened: tuple[Any, int]) -> None:
    function, num_changes = opened
    if num_changes == TorchRange.num_changes:
        function.__exit__(None, None, None)
    else:
        # Its destructor would end it as well.
        TorchRange.left_open.append(function)


def noting_changes(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the `__enter__` of `record_function` that remembers in which trace it is opened."""

    def enter_and_note(self: Any) -> Any:  # noqa: ANN401 - torch's own is not typed
        self.kprof_changes = TorchRange.num_changes
        return enter(self)

    return enter_and_note


def leaving_open(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `__exit__` of `record_function` that obeys the rule of `TorchRange`.

    Without it, the workload's own range around its first call of a model corrupts the heap.
    """

    def leave_if_unchanged(self: Any, *exception: object) -> Any:  # noqa: ANN401
        if getattr(self, "kprof_changes", TorchRange.num_changes) == TorchRange.num_changes:
            return leave(self, *exception)
        TorchRange.left_open.append(self.record)
        return None

    return leave_if_unchanged


class NvtxRange(TorchRange):
    """A range in torch's trace and in NVTX, open inside `with`."""

    __slots__ = ()

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch.cuda.nvtx.range_pop()


class PlainNvtxRange:
    """A range in NVTX alone, open inside `with`: torch writes those of its own there as well."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.nvtx.range_pop()


def range_type(environment: Mapping[str, str]) -> Any:  # noqa: ANN401 - torch's own has no type
    """Return what opens a named range inside `with`, wherever this process is listened to."""
    if environment.get("KPROF_TRACER") == NSIGHT and _has_nvtx():
        return PlainNvtxRange
    is_heard = any(name in environment for name in LISTENERS)
    return NvtxRange if is_heard and _has_nvtx() else TorchRange


def _has_nvtx() -> bool:
    return hasattr(torch._C, "_nvtx")


Range = range_type(os.environ)


def _open(name: str) -> Any:  # noqa: ANN401 - of any type of range
    opened = Range(name)
    opened.__enter__()
    return opened


def _close(opened: Any) -> None:  # noqa: ANN401 - of any type of range
    opened.__exit__(None, None, None)


# The two ends of a range, for what is done so often that `with Range(name)` costs too much.
open_range, close_range = (
    (_open_in_torch, _close_in_torch) if Range is TorchRange else (_open, _close)
)


@dataclass(frozen=True)
class Model:
    """A module that the workload called itself: what its calls are to the counter of steps."""

    source: Source
    could_train: bool
    """Whether a parameter wants a gradient, or there is none: a loss tells nothing either way."""


class Models:
    """The modules that the workload called itself, and the names of all modules in them."""

    def __init__(self) -> None:
        self.describe = Known(_describe)
        self.range_names: dict[int, str] = {}
        # A name is found by identity, so it goes with its module.
        self._named: dict[int, weakref.KeyedRef[int, Module]] = {}
        self._has_model = False
        self.has_compiled = False

    def range_name_of(self, module: Module) -> str:
        """Return the range of `module`: its full path, or its class if it is in no other."""
        name = self.range_names.get(id(module))
        if name is None:
            self._name_all_in(module)
            name = self.range_names[id(module)]
        return name

    def name_known(self) -> None:
        """Name all that was seen so far anew, before the first recorded step needs it."""
        self.range_names.clear()
        self._named.clear()
        self._has_model = False
        for module in sorted(self.describe.alive(), key=_num_modules, reverse=True):
            self.range_name_of(module)

    def name_of(self, module: Module) -> str | None:
        """Return the name of a module that has one."""
        name = self.range_names.get(id(module))
        return name.removeprefix(MODULE) if name is not None else None

    def alike(self, module: Module) -> list[Module]:
        """Return the modules with a name that are of the class of `module`."""
        named = [reference() for reference in list(self._named.values())]
        return [m for m in named if m is not None and type(m) is type(module)]

    def _name_all_in(self, root: Module) -> None:
        model = root
        while type(model).__name__ in WRAPPERS and model._modules:
            wrapper, model = model, next(iter(model._modules.values()))
            # Nothing else of a compiled model shows: its range takes the model's own name.
            shown = model if type(wrapper).__name__ == "OptimizedModule" else wrapper
            self._name(wrapper, type(shown).__name__)
        prefix = f"{type(model).__name__}." if self._has_model else ""
        self.has_compiled |= type(root).__name__ == "OptimizedModule"
        for path, module in _modules_in(model):
            self.has_compiled |= getattr(module, "_compiled_call_impl", None) is not None
            name = f"{prefix}{WRAPPED.sub('', path).lstrip('.')}" if path else type(model).__name__
            self._name(module, name)
        self._has_model = self._has_model or bool(model._modules)

    def _name(self, module: Module, name: str) -> None:
        key = id(module)
        if key not in self.range_names:
            self.range_names[key] = MODULE + name
            self._named[key] = weakref.KeyedRef(module, self._forget, key)

    def _forget(self, reference: weakref.KeyedRef[int, Module]) -> None:
        del self.range_names[reference.key], self._named[reference.key]


def _modules_in(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield `root` and all modules below it with their paths, each once, by identity.

    torch's own `named_modules` compares modules, and a workload may override either.
    """
    seen: set[int] = set()
    rest = [("", root)]
    while rest:
        path, module = rest.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        # A workload may have put anything there.
        below = [(name, m) for name, m in module._modules.items() if isinstance(m, Module)]
        rest.extend((f"{path}.{name}" if path else name, m) for name, m in reversed(below))


def _num_modules(root: Module) -> int:
    return sum(1 for _ in _modules_in(root))


def _describe(module: Module) -> Model:
    parameters = {
        id(parameter): parameter
        for _, owner in _modules_in(module)
        for parameter in owner._parameters.values()
        if parameter is not None and not isinstance(parameter, UninitializedParameter)
    }.values()
    # Without the workload's own kinds of tensors and modes.
    with torch._C.DisableTorchFunction():
        size = sum(p.numel() for p in parameters)
        could_train = size == 0 or any(p.requires_grad for p in parameters)
    # Not by attribute, which a workload may have its own way to find.
    inner = next((m for name, m in module._modules.items() if name == "_orig_mod"), module)
    class_name = type(inner).__name__
    return Model(Source(id(module), f"outermost call of {class_name}", size), could_train)
