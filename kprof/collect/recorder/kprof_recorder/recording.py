"""One recording: the capture, its stage, the steps in it, the bounds of its size."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .capture import Capture
from .named_ranges import STEP, Range
from .native import perf_counter_ns, time_ns
from .settings import Settings

# The provisional capture is bounded in steps, time and size: most scripts never need it.
EARLY_STEPS = 2
EARLY_NS = 20_000_000_000
EARLY_MODULE_CALLS = 25_000
# About 500 MB of trace; a window that grows beyond is cut.
WINDOW_MODULE_CALLS = 100_000

EPOCH_NS = time_ns() - perf_counter_ns()


def now() -> int:
    """Return ns since 1970 on a clock that never jumps."""
    return EPOCH_NS + perf_counter_ns()


class Stage(Enum):
    """Where the recorder is; stages follow each other in this order."""

    BEGINNING = "torch is imported, no step has begun"
    EARLY = "the first steps"
    IDLE = "nothing is to be recorded until somebody asks for it"
    WAITING = "warm-up"
    WINDOW = "the window"
    DONE = "after the window"


@dataclass
class Recording:
    """A capture and the steps in it."""

    capture: Capture
    settings: Settings
    start_ns: int
    is_window: bool = True
    is_block: bool = False
    steps: list[int] = field(default_factory=list)
    num_module_calls: int = 0
    caveats: list[str] = field(default_factory=list)
    _step_range: Any = None

    def begin_step(self, index: int) -> None:
        """Open the range of a step of the workload.

        Not where a capture of one thread alone does not hear it: torch fails where such a range is
        left in a thread that it does hear.
        """
        if self.capture.can_be_stopped_here:
            self._step_range = Range(f"{STEP}{index}")
            self._step_range.__enter__()

    def end_step(self, index: int, *, is_completed: bool) -> None:
        """Close the range of a step, which is recorded if it lay in here from end to end."""
        if not self.capture.can_be_stopped_here:
            # It has ended where the capture hears nothing, and torch must not be told there.
            self._step_range = None
            return
        if self._step_range is not None and is_completed:
            self.steps.append(index)
        self.leave_step()

    def leave_step(self) -> None:
        """Close the range of a step, wherever it is."""
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    @property
    def has_all_steps(self) -> bool:
        """Whether it holds as many steps as it should; a block ends where its user ends it."""
        if self.is_block:
            return False
        few = max(1, min(EARLY_STEPS, self.settings.skip - 1))
        return len(self.steps) >= (self.settings.steps if self.is_window else few)

    def find_overrun(self, now_ns: int) -> str | None:
        """Return why the recording has to end here and now, or None while it may go on."""
        elapsed_ns = now_ns - self.start_ns
        most = WINDOW_MODULE_CALLS if self.is_window else EARLY_MODULE_CALLS
        longest_ns = self.settings.longest_ns if self.is_window else EARLY_NS
        is_late = longest_ns is not None and elapsed_ns > longest_ns
        if self.num_module_calls <= most and not is_late:
            return None
        return (
            f"The recording was cut after {self.num_module_calls} module calls in "
            f"{elapsed_ns / 1e9:.1f} s, inside a step, to bound its size; record fewer steps "
            "with --steps, or for longer with --seconds."
        )
