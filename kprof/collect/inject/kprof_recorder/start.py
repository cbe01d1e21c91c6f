"""Puts the recorder's parts together in a process that has imported torch."""

from __future__ import annotations

import contextlib

from .capture import PROFILER_ERRORS, watch_others
from .compiler import keep_from_compiler
from .ending import Deadline, hide_from_tracebacks, on_exit, on_fork
from .hooks import Hooks
from .outcome import Outcome
from .recorder import Recorder
from .recording import EARLY_NS
from .settings import Settings


class Session:
    """The recorder of this process with all that belongs to it."""

    def __init__(self, settings: Settings) -> None:
        self.recorder = Recorder(settings)
        self.outcome = Outcome(self.recorder)
        self.hooks = Hooks(self.recorder)
        self.hooks.install()
        keep_from_compiler(__package__)
        watch_others(self.recorder.make_way)
        self.deadline: Deadline | None = None
        self.is_following = False

    def follow_the_process(self) -> None:
        """Record from here to the process's end."""
        self.is_following = True
        hide_from_tracebacks()
        on_exit(self.finish)
        on_fork(before=self.forget_deadline, in_child=self.recorder.abandon)
        self.recorder.on_activity = self.begin_with_rank
        self.recorder.begin()
        self.deadline = Deadline(EARLY_NS / 1e9, self.recorder.end_capture)

    def restart(self, settings: Settings) -> None:
        """Record as `settings` say from here on, counting steps anew."""
        self.recorder.restart(settings)
        self.outcome.restart()

    def begin_with_rank(self) -> None:
        """Note what is known once the workload has begun its work."""
        self.forget_deadline()
        self.outcome.announce()

    def forget_deadline(self) -> None:
        """Let the provisional recording be bounded by the hooks alone."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def finish(self) -> None:
        """Write what was recorded; the workload's own end goes on whatever happens here."""
        self.forget_deadline()
        if self.recorder.is_broken and not self.recorder.problems:
            return
        with contextlib.suppress(*PROFILER_ERRORS):
            self.outcome.finish()


session: Session | None = None


def start(settings: Settings) -> Session:
    """Return the one recorder of this process, installed if there was none."""
    global session
    if session is None:
        session = Session(settings)
    return session
