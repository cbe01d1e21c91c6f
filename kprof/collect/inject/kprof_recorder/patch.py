"""The change that arm B makes to a running process: a context manager of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import ModuleType

from .native import get_ident
from .schedule import Schedule


class PatchError(Exception):
    """The user's patch cannot be loaded, entered or left; the text shows where it failed."""


class Patch:
    """What arm B runs inside; arm A runs outside. Without a patch both are the same."""

    def __init__(self, schedule: Schedule) -> None:
        self._name = schedule.patch
        self._arguments = schedule.patch_arguments
        self._entered: AbstractContextManager[object] | None = None
        self._thread = 0

    @property
    def is_entered(self) -> bool:
        """Whether arm B holds."""
        return self._entered is not None

    @property
    def can_turn_here(self) -> bool:
        """Whether this thread is the one that has to leave what it entered, if any has."""
        return self._entered is None or get_ident() == self._thread

    def turn(self, arm: str) -> None:
        """Let `arm` hold from here on.

        Raises:
            PatchError: the patch failed.
        """
        if self._name is None or (arm == "B") == (self._entered is not None):
            return
        try:
            if arm == "B":
                manager = _load(self._name)(*self._arguments)
                manager.__enter__()
                self._entered, self._thread = manager, get_ident()
            elif self._entered is not None:
                entered, self._entered = self._entered, None
                entered.__exit__(None, None, None)
        except Exception as error:  # Whatever the user's code raises.
            doing = "entered" if arm == "B" else "left"
            shown = "".join(traceback.format_exception(error)).rstrip()
            raise PatchError(f"{self._name} cannot be {doing}.\n{shown}") from error

    def leave(self) -> None:
        """Let arm A hold, whatever holds now."""
        self.turn("A")


def _load(name: str) -> Callable[..., AbstractContextManager[object]]:
    place, _, attribute = name.rpartition(":")
    module = _module_in(place) if place.endswith(".py") else importlib.import_module(place)
    made_by: Callable[..., AbstractContextManager[object]] = attrgetter(attribute)(module)
    return made_by


def _module_in(path: str) -> ModuleType:
    """Import a file once, by a name that takes no other module's place."""
    name = "kprof_patch"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
