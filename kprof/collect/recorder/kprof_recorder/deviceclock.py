"""How long each step took on the GPU, measured without making anybody wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .capture import is_capturing_a_graph
from .others import Others

# Enough to compare recorded steps with unrecorded ones; an event is never freed before the end.
MOST_STEPS = 256


@dataclass
class Marks:
    """Events on the GPU at a step's edges; the second is missing while the step is under way."""

    begin: torch.cuda.Event
    end: torch.cuda.Event | None = None


class DeviceClock:
    """Marks the edges of steps on the GPU's own timeline.

    The host runs ahead of the GPU, so that the host's clock alone can show the launching of a
    step where its work still waits.
    """

    def __init__(self) -> None:
        self._marks: dict[int, Marks] = {}

    def begin(self, index: int) -> None:
        """Mark where step `index` begins."""
        if len(self._marks) < MOST_STEPS and _can_mark():
            self._marks[index] = Marks(_mark())

    def end(self, index: int) -> None:
        """Mark where step `index` ends."""
        marks = self._marks.get(index)
        if marks is not None and marks.end is None and _can_mark():
            marks.end = _mark()

    def durations_ns(self) -> dict[int, int]:
        """Return the time between the marks of every step that the GPU has finished.

        Nothing comes from a GPU that failed under the workload.
        """
        try:
            return {
                index: round(marks.begin.elapsed_time(marks.end) * 1e6)
                for index, marks in self._marks.items()
                if marks.end is not None and marks.end.query()
            }
        except RuntimeError:
            return {}


def _can_mark() -> bool:
    """Whether a mark is safe and shows in no other profiler as the workload's."""
    return not Others.is_active and torch.cuda.is_initialized() and not is_capturing_a_graph()


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
