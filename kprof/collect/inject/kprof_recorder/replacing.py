"""Putting the recorder's functions in the place of torch's."""

# ruff: noqa: ANN401 - what is replaced may be of any type.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeGuard


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
