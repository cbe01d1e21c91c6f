"""Counts the steps of a process from the events of the hooks, and defines their listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .named_ranges import Models
from .native import RLock
from .recording import Recording, now
from .softly import softly
from .step_counter import Source, StepCounter


class Follower:
    """Follows the steps of this process; what that is good for says `_follow_counter`."""

    def __init__(self) -> None:
        self.counter = StepCounter()
        self.models = Models()
        self.lock = RLock()
        self.is_broken = False
        self.on_change: Callable[[], None] = lambda: None

    def is_busy(self) -> bool:
        """Whether a signal's handler, which calls this, has come amid the recorder's own work."""
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    def activity(self) -> None:
        """Note that there is work: a batch is fetched or a model is called."""
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        """Do nothing more; the workload goes on."""
        raise NotImplementedError

    def _follow_counter(self) -> None:
        """Do what there is to do where a step begins or ends."""
        raise NotImplementedError

    def _look_at(self, source: Source) -> None:
        """Look at what a step may be counted by, before it is."""

    @softly
    def call_begins(self, source: Source, is_training: bool) -> None:
        """Note the beginning of an outermost call."""
        self.activity()
        self._look_at(source)
        self.counter.call_begins(source, now(), is_training=is_training)
        self._follow_counter()

    @softly
    def call_ends(self, source: Source) -> None:
        """Note the end of an outermost call."""
        self.counter.call_ends(source, now())
        self._follow_counter()

    @softly
    def backward(self) -> None:
        """Note a backward pass."""
        self.activity()
        self.counter.backward()

    @softly
    def optimizer_ends(self, source: Source) -> None:
        """Note the end of an optimizer's step."""
        self.activity()
        self._look_at(source)
        self.counter.optimizer_ends(source, now())
        self._follow_counter()

    @softly
    def range_begins(self) -> None:
        """Note the beginning of a range that the user named "step"."""
        self.activity()
        self.counter.range_begins(now())
        self._follow_counter()

    @softly
    def range_ends(self) -> None:
        """Note the end of a range that the user named "step"."""
        self.counter.range_ends(now())
        self._follow_counter()


class Listener(Protocol):
    """Receives the events of the hooks in one process; a listener to all of them counts its steps.

    A listener that changes the events it wants calls `on_change`, which the hooks set.
    """

    on_change: Callable[[], None]
    models: Models
    lock: RLock
    is_broken: bool
    """Whether nothing needs to be told any more."""

    @property
    def running(self) -> Recording | None:
        """The recording in progress, if there is one."""

    @property
    def is_capturing(self) -> bool:
        """Whether ranges reach a trace now."""

    @property
    def is_counting(self) -> bool:
        """Whether outermost calls still have to be told."""

    def give_up(self, reason: str) -> None:
        """Do nothing more; the workload goes on."""

    def activity(self) -> None:
        """Note that there is work: a batch is fetched or a model is called."""

    def call_begins(self, source: Source, is_training: bool) -> None:
        """Note the beginning of an outermost call."""

    def call_ends(self, source: Source) -> None:
        """Note the end of an outermost call."""

    def backward(self) -> None:
        """Note a backward pass."""

    def optimizer_ends(self, source: Source) -> None:
        """Note the end of an optimizer's step."""

    def cuda_is_ready(self) -> None:
        """Note that CUDA has been initialized."""

    def check_bounds(self) -> None:
        """Note that many modules were called within what is being recorded."""
