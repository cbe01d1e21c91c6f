"""The recorder's functions in torch, hidden from torch.compile."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import torch

_frames: Any = torch._C._dynamo.eval_frame


def _callback() -> object:
    """Return what would compile the next frame, in a torch that has no way to ask for it."""
    callback = _frames.set_eval_frame(None)
    _frames.set_eval_frame(callback)
    return callback


# Callable while the frames called from here are compiled, so that nothing else may run here.
get_compiler: Callable[[], object] = getattr(_frames, "get_eval_frame_callback", _callback)


def num_compiled() -> int:
    """Return a count that grows with each frame that torch.compile compiles in this process.

    Frames of which the whole has to be one graph are counted by their graphs alone.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0
    # A look must not add a counter: the workload may read them.
    counts = ((utils.counters.get(one) or {}) for one in ("frames", "stats"))
    return sum(
        int(one.get(name, 0)) for one, name in zip(counts, ("ok", "unique_graphs"), strict=True)
    )


def keep_from_compiler(package: str) -> None:
    """Let torch.compile run all code of `package` as it is and compile only what that calls."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for code in _codes_in(module):
                _skip(code)


def _codes_in(owner: ModuleType | type) -> Iterator[CodeType]:
    for value in vars(owner).values():
        function = getattr(value, "fget", None) or getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType):
            yield from _with_inner(value.__code__)
        if isinstance(function, FunctionType):
            yield from _with_inner(function.__code__)
        elif isinstance(value, type) and value.__module__ == getattr(owner, "__name__", None):
            yield from _codes_in(value)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _skip(code: CodeType) -> None:
    if hasattr(_frames, "set_code_exec_strategy"):
        action = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _frames.set_code_exec_strategy(code, strategy)
    elif hasattr(_frames, "skip_code"):
        _frames.skip_code(code)


# ruff: noqa: ANN401 - what is replaced may be of any type.


def replace(
    owner: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    *,
    is_static: bool = False,
) -> None:
    """Put what `make` returns for `owner.name` in its place."""
    original = getattr(owner, name)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, staticmethod(replacement) if is_static else replacement)


def subclasses(cls: Any) -> set[Any]:
    """Return every class below `cls`."""
    below = set(cls.__subclasses__())
    return below.union(*(subclasses(c) for c in below))


def is_plain(function: object) -> TypeGuard[FunctionType]:
    """Tell whether calling it runs it to its end, which no generator or coroutine does."""
    return (
        isinstance(function, FunctionType)
        and not inspect.isgeneratorfunction(function)
        and not inspect.iscoroutinefunction(function)
    )
