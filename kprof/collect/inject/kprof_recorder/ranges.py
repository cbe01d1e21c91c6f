"""Named ranges on the workload's timeline, for torch's profiler and as NVTX."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from types import TracebackType

import torch

STEP = "kprof.step#"
PHASE = "kprof.phase#"
MODULE = "kprof.module#"

# Wrappers put a segment of their own into every name below them.
WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
)
WRAPPED = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


class Range:
    """A range that is open between `open` and `close`, on one thread.

    `_RecordFunctionFast` costs 0.2 us where `record_function` costs 4 us; both reach the trace.
    """

    __slots__ = ("_function", "_is_nvtx", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = torch._C._profiler._RecordFunctionFast(name)
        self._is_nvtx = torch.cuda.is_initialized()

    def open(self) -> Range:
        """Open the range now."""
        if self._is_nvtx:
            torch.cuda.nvtx.range_push(self.name)
        self._function.__enter__()
        return self

    def close(self) -> None:
        """Close the range now."""
        self._function.__exit__(None, None, None)
        if self._is_nvtx:
            torch.cuda.nvtx.range_pop()

    def __enter__(self) -> Range:
        return self.open()

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Model:
    """A module that the workload called itself: how large it is, whether it can be trained."""

    name: str
    num_parameters: int
    is_trainable: bool


class Models:
    """The modules that the workload called itself, and the names of all modules in them."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[weakref.ref[torch.nn.Module], Model]] = {}
        self._names: dict[int, str] = {}
        self._roots: list[torch.nn.Module] = []
        self.has_compiled = False

    def describe(self, module: torch.nn.Module) -> Model:
        """Return what is known of `module`, counting its parameters the first time only."""
        reference, model = self._models.get(id(module), (None, None))
        if reference is not None and model is not None and reference() is module:
            return model
        model = _describe(module)
        self._models[id(module)] = (weakref.ref(module), model)
        return model

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the fully qualified name of `module`, or its class name if it is in no other."""
        name = self._names.get(id(module))
        if name is None:
            self._name_all_in(module)
            name = self._names[id(module)]
        return name

    def name_known(self) -> None:
        """Name the modules of every model seen so far, before the first recorded step needs it."""
        alive = [reference() for reference, _ in self._models.values()]
        for module in sorted((m for m in alive if m is not None), key=_num_modules, reverse=True):
            self.name_of(module)

    def forget_names(self) -> None:
        """Let go of the modules whose names were needed."""
        self._names.clear()
        self._roots.clear()

    def _name_all_in(self, root: torch.nn.Module) -> None:
        model = root
        while type(model).__name__ in WRAPPERS:
            wrapper, model = model, next(iter(model.children()))
            # Nothing else of a compiled model shows: its range takes the model's own name.
            shown = model if type(wrapper).__name__ == "OptimizedModule" else wrapper
            self._names.setdefault(id(wrapper), type(shown).__name__)
        is_only = not any(_num_modules(other) > 1 for other in self._roots)
        prefix = "" if is_only else f"{type(model).__name__}."
        self.has_compiled |= type(root).__name__ == "OptimizedModule"
        for path, module in model.named_modules():
            self.has_compiled |= getattr(module, "_compiled_call_impl", None) is not None
            name = f"{prefix}{WRAPPED.sub('', path).lstrip('.')}" if path else type(model).__name__
            self._names.setdefault(id(module), name)
        # A name is found by identity, which a module keeps only while it is alive.
        self._roots.append(root)


def _num_modules(root: torch.nn.Module) -> int:
    return sum(1 for _ in root.modules())


def _describe(module: torch.nn.Module) -> Model:
    original = getattr(module, "_orig_mod", module)
    parameters = [
        p for p in module.parameters() if not isinstance(p, torch.nn.UninitializedParameter)
    ]
    return Model(
        name=type(original).__name__,
        num_parameters=sum(p.numel() for p in parameters),
        is_trainable=any(p.requires_grad for p in parameters),
    )
