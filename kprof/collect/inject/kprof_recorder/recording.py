"""One recording: the capture, its stage, the steps in it, the bounds of its size."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from .capture import Capture

# The provisional capture is bounded in steps, time and size: most scripts never need it.
EARLY_STEPS = 2
EARLY_NS = 20_000_000_000
EARLY_MODULE_CALLS = 25_000
# About 500 MB of trace; a window that grows beyond is cut.
WINDOW_MODULE_CALLS = 100_000

EPOCH_NS = time.time_ns() - time.perf_counter_ns()


def now() -> int:
    """Return ns since 1970 on a clock that never jumps."""
    return EPOCH_NS + time.perf_counter_ns()


class Stage(Enum):
    """Where the recorder is; stages follow each other in this order."""

    BEGINNING = "torch is imported, no step has begun"
    EARLY = "the first steps"
    WAITING = "warm-up"
    WINDOW = "the window"
    DONE = "after the window"


@dataclass
class Recording:
    """A capture and the steps in it."""

    capture: Capture
    is_window: bool
    start_ns: int
    is_block: bool = False
    steps: list[int] = field(default_factory=list)
    num_module_calls: int = 0
    caveats: list[str] = field(default_factory=list)

    def find_overrun(self, now_ns: int) -> str | None:
        """Return why the recording has to end here and now, or None while it may go on."""
        elapsed_ns = now_ns - self.start_ns
        most = WINDOW_MODULE_CALLS if self.is_window else EARLY_MODULE_CALLS
        is_late = not self.is_window and elapsed_ns > EARLY_NS
        if self.num_module_calls <= most and not is_late:
            return None
        return (
            f"The recording was cut after {self.num_module_calls} module calls in "
            f"{elapsed_ns / 1e9:.1f} s, inside a step, to bound its size; record fewer steps "
            "with --steps."
        )
