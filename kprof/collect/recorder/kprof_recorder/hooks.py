"""Where the recorder listens: modules, backward passes, optimizers, loaders, engines, CUDA.

`Module.__call__` is replaced once, before torch.compile looks at it, and never again: the compiler
takes the replacement for the original and compiles what it would have compiled. (torch's global
module hooks cost eight times as much a call, warn on stderr for every compiled module, and change
what is compiled.) Asking the workload's own modules and optimizers may fail.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.profiler import record_function
from torch.compiler import is_compiling
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .compiler import get_compiler, is_plain, replace, subclasses
from .memory import history
from .named_ranges import (
    PHASE,
    Known,
    Range,
    close_range,
    leaving_open,
    noting_changes,
    open_range,
)
from .native import get_ident
from .recorder import Listener
from .step_counter import REPLAY, Source

if TYPE_CHECKING:
    pass

Thing = TypeVar("Thing")
Fact = TypeVar("Fact")


class Asking:
    """Facts about the workload's own things; where one has none, the recorder stops."""

    def __init__(self, recorder: Listener) -> None:
        self._recorder = recorder
        self._describe = Known(_describe)

    def about_call(self, module: Module) -> tuple[Source, bool] | None:
        """Return what a model is to the counter of steps, and whether this call may train it."""
        return self._ask(self._describe_call, module)

    def about_generate(self, module: Module) -> Source | None:
        """Return what a model's `generate` is to the counter of steps."""
        model = self._ask(self._recorder.models.describe, module)
        if model is None:
            return None
        key, name, size = model.source.key, model.source.name, model.source.size
        # One more than the model's own calls, so that whole generations win over them.
        return Source(("generate", key), f"{name}.generate", size + 1)

    def about_step(self, optimizer: Optimizer) -> Source | None:
        """Return what an optimizer is to the counter of steps."""
        return self._ask(self._describe, optimizer)

    def range_name(self, module: Module) -> str | None:
        """Return the name of the range of a module."""
        return self._ask(self._recorder.models.range_name_of, module)

    def optimizers(self) -> Iterator[Optimizer]:
        """Yield the optimizers that have stepped, as far as they still live."""
        return self._describe.alive()

    def _describe_call(self, module: Module) -> tuple[Source, bool]:
        model = self._recorder.models.describe(module)
        # A property of the workload's own is asked only where there is nothing else to ask.
        mode = vars(module).get("training")
        # A frozen scripted module has none: it cannot be trained.
        is_training = getattr(module, "training", False) if mode is None else mode
        return model.source, model.could_train and is_training and torch.is_grad_enabled()

    def _ask(self, fact: Callable[[Thing], Fact], thing: Thing) -> Fact | None:
        try:
            return fact(thing)
        except Exception as error:  # noqa: BLE001 - no failure here may be the workload's
            reason = (
                f"The recorder stopped, because a {type(thing).__name__} could not be described "
                f"({type(error).__name__}: {error})."
            )
        with self._recorder.lock:
            if not self._recorder.is_broken:
                self._recorder.give_up(reason)
        return None


def _describe(optimizer: Optimizer) -> Source:
    # Without the workload's own kinds of tensors and modes.
    with torch._C.DisableTorchFunction():
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return Source(id(optimizer), f"{type(optimizer).__name__}, {size:,} parameters", size)


# ruff: noqa: ANN401 - what passes through here is the workload's own, of any type.


CALLS_BETWEEN_CHECKS = 256


class Hooks:
    """The recorder's view of one process.

    `on_call` is what a module's call goes through: None (straight on) unless outermost calls are
    counted or a trace is being recorded, so that a workload at rest pays one Python frame a call.
    """

    def __init__(self, recorder: Listener) -> None:
        self.recorder = recorder
        self.asking = Asking(recorder)
        self.depth = 0
        self.stepping: set[tuple[int, int]] = set()
        self.on_call: Callable[..., Any] | None = None
        self.on_step: Callable[[Source], None] = recorder.optimizer_ends
        recorder.on_change = self.refresh
        self.refresh()

    def refresh(self) -> None:
        """Choose what a module's call goes through, after the recorder or the depth changed."""
        recorder = self.recorder
        if recorder.is_broken:
            self.on_call = None
        elif self.depth == 0:
            self.on_call = self.call_outermost if recorder.is_counting else None
        else:
            self.on_call = self.call_in_range if recorder.is_capturing else None

    def install(self) -> None:
        """Replace what must be replaced in torch."""
        replace(record_function, "__enter__", noting_changes)
        replace(record_function, "__exit__", leaving_open)
        replace(Module, "__call__", self.around_module_call)
        replace(torch.autograd, "backward", self.around_backward)
        replace(torch.autograd, "grad", self.around_backward)
        replace(_BaseDataLoaderIter, "__next__", self.around_fetch)
        replace(Optimizer, "profile_hook_step", self.around_step_of, is_static=True)
        replace(torch.cuda.CUDAGraph, "replay", self.around_replay)
        replace(torch.cuda, "_lazy_init", self.around_cuda_init)
        Module.__init_subclass__ = self.after_subclass()
        for module_class in subclasses(Module):
            self.listen_to_generate(module_class)
        for optimizer_class in subclasses(Optimizer):
            step = vars(optimizer_class).get("step")
            if hasattr(step, "hooked"):
                optimizer_class.step = self.telling(step)

    # Calls of modules.

    def around_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `Module.__call__` that goes through `on_call`."""
        hooks = self

        def call(self: Module, *args: Any, **kwargs: Any) -> Any:
            # First, so that a compiler never sees what comes after.
            if is_compiling():
                return original(self, *args, **kwargs)
            on_call = hooks.on_call
            if on_call is None or callable(get_compiler()):
                return original(self, *args, **kwargs)
            return on_call(original, self, args, kwargs)

        return call

    def call_outermost(
        self, call: Callable[..., Any], module: Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module from outside every other, which may be a step."""
        if torch.jit.is_tracing():
            return call(module, *args, **kwargs)
        found = self.asking.about_call(module)
        if found is None:
            return call(module, *args, **kwargs)
        return self.in_step(*found, self.call_root, call, module, args, kwargs)

    def in_step(
        self, source: Source, is_training: bool, call: Callable[..., Any], *args: Any
    ) -> Any:
        """Call a model from outside every other, which may be a step."""
        self.recorder.call_begins(source, is_training)
        self.depth += 1
        self.refresh()
        try:
            if self.recorder.is_capturing:
                with Range(PHASE + "forward"):
                    return call(*args)
            return call(*args)
        finally:
            self.depth -= 1
            self.recorder.call_ends(source)
            self.refresh()

    def call_root(self, call: Callable[..., Any], module: Module, args: Any, kwargs: Any) -> Any:
        """Call a module, within its range if a trace is being recorded."""
        if self.recorder.is_capturing:
            return self.call_in_range(call, module, args, kwargs)
        return call(module, *args, **kwargs)

    def call_in_range(
        self, call: Callable[..., Any], module: Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module within its range; what is done here is done for every module's call."""
        running = self.recorder.running
        if running is None:
            return call(module, *args, **kwargs)
        running.num_module_calls += 1
        if running.num_module_calls % CALLS_BETWEEN_CHECKS == 0:
            self.recorder.check_bounds()
        name = self.recorder.models.range_names.get(id(module)) or self.asking.range_name(module)
        if name is None:
            return call(module, *args, **kwargs)
        # In this frame: a deep model takes as many of Python's frames as it has such calls.
        opened = open_range(name)
        try:
            return call(module, *args, **kwargs)
        finally:
            close_range(opened)

    # Whole generations and replays of graphs.

    def after_subclass(self) -> Any:
        """Return what listens to the `generate` of a new class of modules."""
        listen = self.listen_to_generate

        # A function: before Python 3.11, a method would not be told the class.
        def init_subclass(cls: type[Module], /, **options: Any) -> None:
            super(Module, cls).__init_subclass__(**options)
            listen(cls)

        return classmethod(init_subclass)

    def listen_to_generate(self, cls: type[Module]) -> None:
        """Replace the `generate` of a class where it is defined, which may be a mixin."""
        for base in cls.__mro__:
            generate = vars(base).get("generate")
            if (
                generate is not None
                and is_plain(generate)
                and not hasattr(generate, "kprof_listens")
            ):
                base.generate = self.around_generate(generate)  # type: ignore[attr-defined]

    def around_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `generate` whose outermost call may be a step."""
        hooks = self

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_outermost = not is_compiling() and hooks.depth == 0 and isinstance(self, Module)
            if not is_outermost or not hooks.recorder.is_counting:
                return original(self, *args, **kwargs)
            source = hooks.asking.about_generate(self)
            if source is None:
                return original(self, *args, **kwargs)
            return hooks.in_step(source, False, lambda: original(self, *args, **kwargs))

        generate.kprof_listens = True  # type: ignore[attr-defined]
        return generate

    def around_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `CUDAGraph.replay` that may be a step when no module's call is around it."""
        return self.as_step(Source(REPLAY, REPLAY), original)

    def as_step(self, source: Source, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose calls may be steps, when no other such call is around them."""
        hooks = self

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hooks.depth or not hooks.recorder.is_counting:
                return original(self, *args, **kwargs)
            return hooks.in_step(source, False, lambda: original(self, *args, **kwargs))

        return call

    # Phases.

    def around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backward pass within its range."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self.recorder.is_counting:
                return original(*args, **kwargs)
            self.recorder.backward()
            # Checkpointing calls modules again in here; those are no steps.
            self.depth += 1
            self.refresh()
            try:
                return self.in_phase("backward", original, args, kwargs)
            finally:
                self.depth -= 1
                self.refresh()

        return backward

    def around_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loader's `__next__` within its range."""
        hooks = self

        def fetch(self: Any) -> Any:
            if is_compiling() or hooks.depth or not hooks.recorder.is_counting:
                return original(self)
            hooks.recorder.activity()
            return hooks.in_phase("data", original, (self,), {})

        return fetch

    def around_step_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the decorator of every optimizer's `step`, which tells its end from outside."""
        return lambda step: self.telling(original(step))

    def telling(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an optimizer's `step` within its range; its end may be the end of a step."""

        @functools.wraps(step)
        def step_and_tell(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # One that calls another of the same optimizer, as a subclass does, is one step.
            inside = (get_ident(), id(optimizer))
            if is_compiling() or inside in self.stepping:
                return step(optimizer, *args, **kwargs)
            self.stepping.add(inside)
            history.note((optimizer,))
            try:
                result = self.in_phase("optimizer", step, (optimizer, *args), kwargs)
            finally:
                self.stepping.discard(inside)
            source = self.asking.about_step(optimizer)
            if source is not None:
                self.on_step(source)
            return result

        step_and_tell.kprof_tells = True  # type: ignore[attr-defined]
        return step_and_tell

    def listen_again(self) -> None:
        """Listen again to the functions that mark steps, where they were replaced since."""
        for module_class in subclasses(Module):
            self.listen_to_generate(module_class)
        for optimizer in self.asking.optimizers():
            owner: Any = next(c for c in type(optimizer).__mro__ if "step" in vars(c))
            if not hasattr(owner.step, "kprof_tells"):
                owner.step = self.telling(owner.step)

    def in_phase(self, phase: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call something within the range of a phase, if a trace is being recorded."""
        if not self.recorder.is_capturing:
            return call(*args, **kwargs)
        with Range(PHASE + phase):
            return call(*args, **kwargs)

    def around_cuda_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the initialization of CUDA that tells when it has been done."""

        def initialize() -> Any:
            was_initialized = torch.cuda.is_initialized()
            result = original()
            if not was_initialized and torch.cuda.is_initialized():
                self.recorder.cuda_is_ready()
            return result

        return initialize


# Module, class and method that each worker process calls once for every batch of a schedule.
ENGINES = (
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_model"),
    ("sglang.srt.managers.scheduler", "Scheduler", "run_batch"),
)


def listen_to_engines(hooks: Hooks) -> None:
    """Take the steps of an engine that this process has imported for the workload's steps."""
    for module_name, class_name, method_name in ENGINES:
        owner = getattr(sys.modules.get(module_name), class_name, None)
        original = vars(owner).get(method_name) if isinstance(owner, type) else None
        if callable(original):
            name = f"engine step ({class_name}.{method_name})"
            source = Source(module_name, name, size=sys.maxsize)
            setattr(owner, method_name, hooks.as_step(source, original))
