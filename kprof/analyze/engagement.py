"""An engagement: what was measured, predicted, tried and decided for one workload, by entries.

The folder of an engagement: numbered entries, each a small JSON file that seals the one before.

Entries are only ever added. Each holds the SHA-256 of its own content and of the entry before, so
that a change, a loss or a late insertion shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kprof.analyze.kernel_times import Benched, read_benched
from kprof.comparison import Comparison, with_nan
from kprof.errors import KprofError
from kprof.findings import Worth

SCHEMA = 1
# Names of predictions that are about several findings at once.
ALL_FINDINGS, ALL_SWAPS = "all-findings", "all-swaps"

When = Literal["before", "after"]
Content = TypeVar("Content", bound="Holding")


class Holding(msgspec.Struct, frozen=True, tag_field="kind"):
    """What an entry holds: one of the kinds below."""


class Opened(Holding, frozen=True, tag="opened"):
    """The engagement began."""

    name: str


class Predicted(msgspec.Struct, frozen=True):
    """What a step would get shorter by, as it was written down before anything was changed."""

    name: str
    """A rule's name, `all-findings`, the target and change of a what-if question, or any other."""
    source: Literal["finding", "all findings", "what-if", "own"]
    claim: str
    step_ns: int
    low_ns: int | None
    high_ns: int | None
    """None: nobody knows."""
    basis: str
    confidence: str = ""
    effort: str = ""
    swap: str = ""
    """The kernel that would take over, or several, separated by commas."""
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

    @property
    def true_step_ns(self) -> int | None:
        """What a step takes, as far as the run can tell."""
        return self.unrecorded_step_ns or self.step_ns


class PredictionAdded(Holding, frozen=True, tag="prediction"):
    """What somebody predicts of a change that no rule proposes."""

    predicted: Predicted


class Bet(msgspec.Struct, frozen=True):
    """The prediction that a comparison tests."""

    entry: int
    name: str


class ComparisonAdded(Holding, frozen=True, tag="comparison"):
    """An A/B with all its pairs; the times of single steps stay where it lies."""

    comparison: Comparison
    calibration: str = ""
    """What it was told of how often such verdicts err."""
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
    """What `kprof sla --json` said."""

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
    """What `kprof cost --json` said."""

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
    """What the quality gate found of one replacement."""

    subject: str
    asked: tuple[str, ...]
    levels: tuple[LevelChecked, ...]

    @property
    def states(self) -> dict[str, str]:
        """The state of every level that was asked for."""
        return {one.name: one.state for one in self.levels if one.name in self.asked}


class GateAdded(Holding, frozen=True, tag="gate"):
    """What `kprof kernels check --json` said, of each replacement."""

    said: tuple[dict[str, Any], ...]

    @property
    def subjects(self) -> dict[str, SubjectChecked]:
        """What was found, by replacement."""
        found = msgspec.convert(self.said, type=tuple[SubjectChecked, ...])
        return {one.subject: one for one in found}


class BenchAdded(Holding, frozen=True, tag="bench"):
    """What `kprof kernels bench --json` said, of each call that was measured."""

    said: tuple[dict[str, Any], ...]

    @property
    def calls(self) -> tuple[Benched, ...]:
        """What was measured, by call."""
        return read_benched(self.said)


class CalibrationAdded(Holding, frozen=True, tag="calibration"):
    """What `kprof selftest --json` said: how often verdicts err on this machine."""

    said: dict[str, Any]


class Decided(Holding, frozen=True, tag="decision"):
    """What was decided, in words."""

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
    """What an entry summarises: the name of a file or folder, and the SHA-256 of its content."""

    name: str
    sha256: str


class Entry(msgspec.Struct, frozen=True):
    """One thing that happened, with its date."""

    number: int
    date: str
    """UTC, to the second, as in 2026-11-20T15:00:00Z."""
    content: AnyContent
    previous: str
    """The digest of the entry before; empty for the first."""
    digest: str
    source: Source | None = None
    schema: int = SCHEMA

    @property
    def when_s(self) -> float:
        """The date in seconds since 1970."""
        return datetime.fromisoformat(self.date.replace("Z", "+00:00")).timestamp()

    @property
    def predictions(self) -> tuple[Predicted, ...]:
        """What was predicted here."""
        if isinstance(self.content, PredictionAdded):
            return (self.content.predicted,)
        return self.content.predictions if isinstance(self.content, RunAdded) else ()


@dataclass(frozen=True)
class Engagement:
    """All entries in their order, and what is wrong with them."""

    folder: Path
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    """Sentences: entries that were changed, or are missing; empty: they are as they were."""

    @property
    def name(self) -> str:
        """Its name, as given in the beginning."""
        first = self.entries[0].content
        return first.name if isinstance(first, Opened) else self.folder.name

    @property
    def seal(self) -> str:
        """The digest of the last entry: whoever has noted it can tell that nothing was changed."""
        return self.entries[-1].digest

    def of(self, kind: type[Content]) -> list[tuple[Entry, Content]]:
        """Return the entries of one kind, each with its content."""
        return [(one, one.content) for one in self.entries if isinstance(one.content, kind)]


LONGEST_SLUG = 40
SHORTEST_SEAL = 8


def seal(
    engagement: Engagement | None, folder: Path, content: AnyContent, source: Source | None, at: str
) -> Engagement:
    """Return the engagement with one more entry, or a new one with its first; write nothing.

    Raises:
        KprofError: an entry was changed after it was written, or the clock has gone back.
    """
    if engagement is not None and engagement.problems:
        raise KprofError(
            f"{folder}: {engagement.problems[0]}",
            fix="restore the entries as they were, for example from git; see kprof engage status",
        )
    before = engagement.entries if engagement is not None else ()
    if before and at < before[-1].date:
        raise KprofError(
            f"it is {at} here, and the last entry is of {before[-1].date}",
            fix="set this machine's clock, or wait: entries stand in the order of their dates",
        )
    previous = before[-1].digest if before else ""
    plain = _portable(
        msgspec.to_builtins(Entry(len(before) + 1, at, content, previous, "", source))
    )
    entry = _converted({**plain, "digest": _digest_of(plain)})
    return Engagement(folder, (*before, entry))


def write(entry: Entry, folder: Path) -> None:
    """Write an entry that was sealed, where none of its number and name is.

    Raises:
        KprofError: nothing can be written there.
    """
    kind = msgspec.inspect.type_info(type(entry.content)).tag  # type: ignore[attr-defined]
    path = folder / f"{entry.number:04d}-{kind}{_slug(entry.source)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="free some space, or mend the permissions") from error


def read_engagement(folder: Path, seal: str | None = None) -> Engagement:
    """Read all entries and check that none was changed.

    `seal`: the beginning of a seal that was noted earlier; its entry must still be there.

    Raises:
        KprofError: the folder holds no engagement, or an entry that is none.
    """
    if seal is not None and len(seal) < SHORTEST_SEAL:
        fix = f"give at least {SHORTEST_SEAL} digits, as kprof engage status shows them"
        raise KprofError(f"{seal!r} is too short for a seal", fix=fix)
    paths = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.json"))
    if not paths:
        raise KprofError(
            f"{folder} holds no engagement", fix=f"begin one: kprof engage init {folder}"
        )
    raw = [_raw(path) for path in paths]
    entries = tuple(_entry(path, content) for path, content in zip(paths, raw, strict=True))
    problems = list(_problems(paths, entries, raw))
    if seal is not None and not any(one.digest.startswith(seal.lower()) for one in entries):
        problems.append(f"No entry has the seal {seal}: entries were removed, or exchanged.")
    return Engagement(folder, entries, tuple(problems))


def _raw(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as error:
        raise _damaged(path, error) from error


def _entry(path: Path, raw: dict[str, object]) -> Entry:
    if raw.get("schema") != SCHEMA:
        raise KprofError(
            f"{path.name} is of schema {raw.get('schema')}, and this kprof knows {SCHEMA}",
            fix="use the version of kprof that wrote it, or a newer one",
        )
    try:
        return _converted(raw)
    except msgspec.MsgspecError as error:
        raise _damaged(path, error) from error


def _converted(plain: dict[str, Any]) -> Entry:
    """Return an entry; in the pairs of a comparison what is null was no number."""
    content = plain.get("content")
    if isinstance(content, dict) and isinstance(content.get("comparison"), dict):
        content = {**content, "comparison": with_nan(content["comparison"])}
    return msgspec.convert({**plain, "content": content}, type=Entry)


def _damaged(path: Path, error: Exception) -> KprofError:
    return KprofError(
        f"{path} is no entry of an engagement: {error}",
        fix="restore it, for example from git; entries are not edited by hand",
    )


def _problems(
    paths: list[Path], entries: tuple[Entry, ...], raw: list[dict[str, object]]
) -> Iterator[str]:
    previous = ""
    for place, (path, entry, content) in enumerate(zip(paths, entries, raw, strict=True), 1):
        if _digest_of(content) != entry.digest:
            yield f"{path.name} was changed after it was written."
        if entry.number != place or not path.name.startswith(f"{entry.number:04d}-"):
            yield f"{path.name} is entry {entry.number} and stands in place {place}."
        elif entry.previous != previous:
            yield f"{path.name} does not follow on the entry before it, which was exchanged."
        elif place > 1 and entry.date < entries[place - 2].date:
            yield f"{path.name} is dated before the entry before it."
        previous = entry.digest


def _digest_of(plain: dict[str, object]) -> str:
    """Return the SHA-256 of what is said, however its JSON is laid out."""
    content = {name: value for name, value in plain.items() if name != "digest"}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


# Not of an address on the web, and not the slash of a unit.
FOLDERS = re.compile(r"(?<![\w./:])/(?:[^\s/=,:'\"]+/)+")


def without_folders(text: str) -> str:
    """Return text in which an absolute path is but the name at its end."""
    return FOLDERS.sub("", text)


def _portable(value: object) -> dict[str, object]:
    """Return plain data as it is written: of an absolute path the name alone, text in UTF-8."""

    def plain(value: object) -> object:
        if isinstance(value, str):
            return without_folders(value).encode("utf-8", errors="replace").decode()
        if isinstance(value, dict):
            return {plain(name): plain(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value

    # Through JSON once: what is not a number is null there, so the digest is of what can be read.
    return msgspec.json.decode(msgspec.json.encode(plain(value)), type=dict[str, object])


def _slug(source: Source | None) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", source.name if source else "").strip("-").lower()
    return f"-{name[:LONGEST_SLUG]}" if name else ""
