"""Who can listen to the hooks: what they tell, and what they ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .native import RLock
from .ranges import Models
from .recording import Recording
from .steps import Source


class Listener(Protocol):
    """What the hooks tell of one process to; one that listens to all of it counts its steps.

    Whoever changes what the hooks ask for calls `on_change`, which the hooks set.
    """

    on_change: Callable[[], None]
    models: Models
    lock: RLock
    is_broken: bool
    """Whether nothing needs to be told any more."""

    @property
    def running(self) -> Recording | None:
        """What is being recorded, if a trace is."""

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
