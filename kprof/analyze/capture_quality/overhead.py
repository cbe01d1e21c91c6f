"""The recording overhead: steps with the recorder against steps without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from kprof.trace import Trace

NOTICEABLE_SLOWDOWN = 0.05
"""A recorded step that is longer by more than this distorts the shares of elapsed time.

One that is shorter by as much did other work: recording makes no step shorter.
"""


@dataclass(frozen=True)
class RecordingCost:
    """Median durations of a step in ns, of how many steps, and by whose clock."""

    recorded_ns: float
    unrecorded_ns: float
    num_recorded: int
    num_unrecorded: int
    clock: str
    spread_ns: float | None
    """How far steps of one kind lie apart; None where one of each kind does not tell."""

    @property
    def slowdown(self) -> float:
        """How much longer a recorded step took, as a share of an unrecorded one."""
        return self.recorded_ns / self.unrecorded_ns - 1

    @property
    def is_of_like_steps(self) -> bool:
        """Whether recorded steps did what the others do, by all that their times tell."""
        return self.slowdown >= -NOTICEABLE_SLOWDOWN

    @property
    def is_known(self) -> bool:
        """Whether the steps tell: they differ by more than their spread, or hardly even with it.

        Those that are not alike tell nothing.
        """
        if self.spread_ns is None or not self.is_of_like_steps:
            return False
        differ_ns = abs(self.recorded_ns - self.unrecorded_ns)
        return (
            differ_ns > self.spread_ns
            or differ_ns + self.spread_ns <= NOTICEABLE_SLOWDOWN * self.unrecorded_ns
        )

    @property
    def is_within_spread(self) -> bool:
        """Whether the spread of the steps explains the difference; recording speeds up none."""
        differ_ns = self.recorded_ns - self.unrecorded_ns
        return differ_ns < 0 or (self.spread_ns is not None and differ_ns <= self.spread_ns)

    @property
    def most_slowdown(self) -> float:
        """The most that recording can have slowed a step, by the spread of the steps."""
        return abs(self.slowdown) + (self.spread_ns or 0.0) / self.unrecorded_ns

    @property
    def is_noticeable(self) -> bool:
        """Whether recorded steps are known to be so much longer that shares mislead."""
        return self.is_known and self.slowdown >= NOTICEABLE_SLOWDOWN

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
        spread_ns=_spread(recording.recorded_step_ns, recording.unrecorded_step_ns),
    )


def _spread(*kinds: Sequence[int]) -> float | None:
    """Return how far the middle half of the steps of a kind lies apart, of the wider kind.

    Steps close in time are alike, so many of them do not make a small difference certain. A single
    step may be any of its kind: then it is the whole range of the others.
    """
    several = [times for times in kinds if len(times) > 1]
    if len(several) < len(kinds):
        return max((max(times) - min(times) for times in several), default=None)
    return max(upper - lower for lower, _, upper in (quantiles(times, n=4) for times in several))
