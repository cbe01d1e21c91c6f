"""The records of an engagement: measurements, predictions, decisions for one workload."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kprof.analyze.kernel_times import Benched, read_benched
from kprof.comparison import Comparison
from kprof.findings import Worth

SCHEMA = 1
# Names of predictions that are about several findings at once.
ALL_FINDINGS, ALL_SWAPS = "all-findings", "all-swaps"

When = Literal["before", "after"]
Content = TypeVar("Content", bound="Holding")


class Holding(msgspec.Struct, frozen=True, tag_field="kind"):
    """The kind of an entry: one of those below."""


class Opened(Holding, frozen=True, tag="opened"):
    """The engagement began."""

    name: str


class Predicted(msgspec.Struct, frozen=True):
    """A predicted saving of a step, recorded before anything was changed."""

    name: str
    """A rule's name, `all-findings`, the target and change of a what-if question, or any other."""
    source: Literal["finding", "all findings", "what-if", "own"]
    claim: str
    step_ns: int
    low_ns: int | None
    high_ns: int | None
    """None: unknown."""
    basis: str
    confidence: str = ""
    effort: str = ""
    swap: str = ""
    """The kernel to swap in, or several, separated by commas."""
    command: str = ""
    worth: Worth | None = None

    @property
    def shares(self) -> tuple[float, float] | None:
        """The interval as shares of the step, low and high; None where it is not known."""
        if self.low_ns is None or self.high_ns is None or self.step_ns <= 0:
            return None
        return self.low_ns / self.step_ns, self.high_ns / self.step_ns


class TimeSpent(msgspec.Struct, frozen=True):
    """A part of the window: of a phase and a kind of work, or idle."""

    phase: str | None
    part: str | None
    is_idle: bool
    time_ns: int


class RunAdded(Holding, frozen=True, tag="run"):
    """A recorded run in short, with all that it predicts."""

    when: When
    command: str
    gpus: tuple[str, ...]
    versions: dict[str, str]
    step_ns: int | None
    """Median of the recorded steps; None where the run marks none."""
    unrecorded_step_ns: int | None
    """Median of steps that were only timed, which recording slows; None: there were none."""
    num_steps: int
    window_ns: int
    time: tuple[TimeSpent, ...]
    utilisation: dict[str, float | None]
    predictions: tuple[Predicted, ...]
    caveats: tuple[str, ...] = ()
    num_findings: int | None = None
    """All findings, with those that predict nothing; None in entries of earlier versions."""

    @property
    def true_step_ns(self) -> int | None:
        """Time of a step, as far as the run shows it."""
        return self.unrecorded_step_ns or self.step_ns


class PredictionAdded(Holding, frozen=True, tag="prediction"):
    """A person's prediction of a change that no rule proposes."""

    predicted: Predicted


class Bet(msgspec.Struct, frozen=True):
    """The prediction that a comparison tests."""

    entry: int
    name: str


class ComparisonAdded(Holding, frozen=True, tag="comparison"):
    """An A/B with all its pairs; the times of single steps stay where it lies."""

    comparison: Comparison
    calibration: str = ""
    """The calibration's statement on the error rate of such verdicts."""
    bet: Bet | None = None


class TargetJudged(msgspec.Struct, frozen=True):
    """A target of a service level with what was measured; "never": failed requests reach it."""

    target: str
    verdict: str
    why: str
    unit: str
    estimate: float | str | None
    samples: int


class ServiceLevelAdded(Holding, frozen=True, tag="service-level"):
    """The output of `kprof sla --json`."""

    when: When
    said: dict[str, Any]

    @property
    def verdict(self) -> str:
        """The verdict on all targets."""
        return str(self.said["verdict"])

    @property
    def targets(self) -> tuple[TargetJudged, ...]:
        """The verdict on each of them."""
        return msgspec.convert(self.said["targets"], type=tuple[TargetJudged, ...])


class Figure(msgspec.Struct, frozen=True):
    """A figure of `kprof cost` with its band."""

    topic: str
    name: str
    unit: str
    low: float
    mid: float
    high: float


class CostAdded(Holding, frozen=True, tag="cost"):
    """The output of `kprof cost --json`."""

    when: When
    said: dict[str, Any]

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every figure with its band."""
        return msgspec.convert(self.said["figures"], type=tuple[Figure, ...])


class LevelChecked(msgspec.Struct, frozen=True):
    """A level of the quality gate: passed, failed, undecided or not run."""

    name: str
    state: str


class SubjectChecked(msgspec.Struct, frozen=True):
    """The quality gate's result for one replacement."""

    subject: str
    asked: tuple[str, ...]
    levels: tuple[LevelChecked, ...]

    @property
    def states(self) -> dict[str, str]:
        """The state of every level that was asked for."""
        return {one.name: one.state for one in self.levels if one.name in self.asked}


class GateAdded(Holding, frozen=True, tag="gate"):
    """The output of `kprof kernels check --json`, for each replacement."""

    said: tuple[dict[str, Any], ...]

    @property
    def subjects(self) -> dict[str, SubjectChecked]:
        """The results, by replacement."""
        found = msgspec.convert(self.said, type=tuple[SubjectChecked, ...])
        return {one.subject: one for one in found}


class BenchAdded(Holding, frozen=True, tag="bench"):
    """The output of `kprof kernels bench --json`, for each measured call."""

    said: tuple[dict[str, Any], ...]

    @property
    def calls(self) -> tuple[Benched, ...]:
        """The measurements, by call."""
        return read_benched(self.said)


class CalibrationAdded(Holding, frozen=True, tag="calibration"):
    """The output of `kprof selftest --json`: the error rates of verdicts on this machine."""

    said: dict[str, Any]


class Decided(Holding, frozen=True, tag="decision"):
    """The decision, in words."""

    text: str


AnyContent = (
    Opened
    | RunAdded
    | PredictionAdded
    | ComparisonAdded
    | ServiceLevelAdded
    | CostAdded
    | GateAdded
    | BenchAdded
    | CalibrationAdded
    | Decided
)


class Source(msgspec.Struct, frozen=True):
    """The source of an entry: the name of a file or folder, and the SHA-256 of its content."""

    name: str
    sha256: str


class Entry(msgspec.Struct, frozen=True):
    """One measurement, prediction or decision, with its date."""

    number: int
    date: str
    """UTC, to the second, as in 2026-11-20T15:00:00Z."""
    content: AnyContent
    source: Source | None = None
    schema: int = SCHEMA

    @property
    def when_s(self) -> float:
        """The date in seconds since 1970."""
        return datetime.fromisoformat(self.date.replace("Z", "+00:00")).timestamp()

    @property
    def predictions(self) -> tuple[Predicted, ...]:
        """The predictions of this entry."""
        if isinstance(self.content, PredictionAdded):
            return (self.content.predicted,)
        return self.content.predictions if isinstance(self.content, RunAdded) else ()


@dataclass(frozen=True)
class Engagement:
    """All entries in the order of their numbers."""

    folder: Path
    entries: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """Its name, as given in the beginning."""
        first = self.entries[0].content
        return first.name if isinstance(first, Opened) else self.folder.name

    def of(self, kind: type[Content]) -> list[tuple[Entry, Content]]:
        """Return the entries of one kind, each with its content."""
        return [(one, one.content) for one in self.entries if isinstance(one.content, kind)]

    def entry(self, number: int) -> Entry | None:
        """Return the entry with this number; None if it was removed."""
        return next((one for one in self.entries if one.number == number), None)


# Neither the slashes of a web address nor the slash of a unit.
FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/=,:'\"]+/)+")


def without_folders(text: str) -> str:
    """Shorten every absolute path in a text to its last name."""
    return FOLDERS.sub("", text)
