"""The rule that a failure of the recorder is never a failure of the workload."""

# ruff: noqa: ANN401 - `softly` passes on arguments of any type.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .native import RLock

Function = TypeVar("Function", bound=Callable[..., Any])


class Fallible(Protocol):
    """Something that can give up, and then does nothing more."""

    is_broken: bool
    lock: RLock

    def give_up(self, reason: str) -> None:
        """Do nothing from now on."""


def softly(method: Function) -> Function:
    """Make a method whose failure stops the recorder, never the workload."""

    @functools.wraps(method)
    def call(self: Fallible, *arguments: Any, **options: Any) -> Any:
        if self.is_broken:
            return None
        with self.lock:
            try:
                return method(self, *arguments, **options)
            except Exception as error:  # noqa: BLE001 - no failure here may be the workload's
                self.give_up(
                    f"The recorder stopped, because it failed in {method.__name__} "
                    f"({type(error).__name__}: {error})."
                )
                return None

    return call  # type: ignore[return-value]
