"""Puts together what times a process that has imported torch, in the recorder's place."""

from __future__ import annotations

import atexit
import contextlib

import torch

from .compiler import keep_from_compiler
from .ending import on_fork
from .hooks import Hooks, listen_to_engines
from .quiet import hide_from_tracebacks
from .schedule import Schedule
from .settings import Settings
from .step_counter import Source
from .window_timer import Sheet, WindowTimer

FORKED = (
    "A process that was forked after torch had been imported trained without being timed. Start "
    "it with the method spawn."
)


class TrialSession:
    """The timer of this process with all that belongs to it; nothing is recorded here."""

    is_following = True

    def __init__(self, settings: Settings) -> None:
        assert settings.schedule is not None
        self.recorder = WindowTimer(settings, Schedule.read(settings.schedule))
        self.hooks = Hooks(self.recorder)

    def follow_the_process(self) -> None:
        """Follow the schedule from here to the process's end."""
        self.hooks.install()
        keep_from_compiler(__package__)
        hide_from_tracebacks()
        on_fork(in_child=self.in_forked_child)
        self.recorder.on_activity = self.begin
        self.recorder.on_turn = self.hooks.listen_again
        atexit.register(self.recorder.end)

    def begin(self) -> None:
        """Look at where the workload has begun its work; a loader's worker has none of its own."""
        if torch.utils.data.get_worker_info() is not None:
            self.recorder.abandon()
            return
        listen_to_engines(self.hooks)

    def in_forked_child(self) -> None:
        """Time nothing of a forked child, and say so where it trains."""
        self.recorder.abandon()
        self.hooks.on_step = self.say_forked

    def say_forked(self, source: Source) -> None:
        """Warn that a forked child trains a model and is not timed."""
        self.hooks.on_step = lambda source: None
        with contextlib.suppress(OSError):
            Sheet(self.recorder.settings.raw).write("problem", text=FORKED)

    def block_begins(self) -> None:
        """Let a block that the workload would have recorded run as it is."""

    def block_ends(self) -> None:
        """Do nothing: nothing was recorded."""


session: TrialSession | None = None


def start(settings: Settings) -> TrialSession:
    """Return the one timer of this process, made if there was none."""
    global session
    if session is None:
        session = TrialSession(settings)
    return session
