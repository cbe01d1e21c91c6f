"""What recording cost the workload: steps with the recorder against steps without."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from kprof.trace import Trace

NOTICEABLE_SLOWDOWN = 0.05
"""A recorded step that is longer by more than this distorts the shares of elapsed time."""


@dataclass(frozen=True)
class RecordingCost:
    """Median durations of a step in ns, of how many steps, and by whose clock."""

    recorded_ns: float
    unrecorded_ns: float
    num_recorded: int
    num_unrecorded: int
    clock: str

    @property
    def slowdown(self) -> float:
        """How much longer a recorded step took, as a share of an unrecorded one."""
        return self.recorded_ns / self.unrecorded_ns - 1

    @property
    def difference(self) -> str:
        """How a recorded step differs from an unrecorded one, in words."""
        return f"{100 * abs(self.slowdown):.1f} % {'shorter' if self.slowdown < 0 else 'longer'}"

    def without_recording(self, share_of_elapsed: float) -> float:
        """Return what a share of the elapsed time would be in an unrecorded step, at most all.

        Recording lengthens the host's part of a step; the device's own work stays as it is.
        """
        return min(share_of_elapsed * self.recorded_ns / self.unrecorded_ns, 1.0)


def measure_cost(trace: Trace) -> RecordingCost | None:
    """Return what recording cost, or None where no steps were timed on both sides."""
    recording = trace.meta.recording
    if recording is None or not recording.recorded_step_ns or not recording.unrecorded_step_ns:
        return None
    if recording.step_clock == "host" and (trace.kernels["activity"] != "host").any():
        return None  # The host runs ahead of a device: its clock shows the launching only.
    return RecordingCost(
        recorded_ns=median(recording.recorded_step_ns),
        unrecorded_ns=median(recording.unrecorded_step_ns),
        num_recorded=len(recording.recorded_step_ns),
        num_unrecorded=len(recording.unrecorded_step_ns),
        clock=recording.step_clock,
    )
