"""Comparison: variant A against variant B of one workload, from the plan to the verdict.

The plan is fixed before the first sample; samples come in pairs; a claim judges one metric.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from kprof.errors import KprofError
from kprof.findings import Caveat, with_ids

SCHEMA = 1
# The chance of an order, 0.5 to their number, is no float much beyond.
MOST_PLANNED_PAIRS = 1000
FILE = "comparison.json"
PAIRS_FILE = "pairs.json"
CHOSEN = ", chosen by --swap auto"
"""What follows the kernels of a swap that kprof has chosen, in the words for B."""

Better = Literal["lower", "higher"]
Verdict = Literal["FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INVALID"]


@dataclass(frozen=True)
class Metric:
    """One quantity to compare, such as `Metric("step", "ms")`."""

    name: str
    unit: str
    better: Better = "lower"


def draw_seed() -> int:
    """Return a seed for one comparison.

    A workload's slow steps are often the same ones in every run. With the same order as well they
    would fall on the same variant each time, and doing it again would confirm a wrong verdict.
    """
    return secrets.randbits(32)


@dataclass(frozen=True)
class Plan:
    """The decisions made before the first measurement."""

    metrics: tuple[Metric, ...]
    smallest_effect: float = 0.01
    """The least relative difference that matters: within it, two variants are the same."""
    alpha: float = 0.05
    """The error that all verdicts of the comparison together may make."""
    max_pairs: int = 40
    stops_early: bool = True
    seed: int = field(default_factory=draw_seed)
    """Seed of the random order inside each pair."""

    def __post_init__(self) -> None:
        """Refuse a plan that no verdict can come of."""
        if self.max_pairs > MOST_PLANNED_PAIRS:
            raise KprofError(
                f"a plan of {self.max_pairs} pairs is too long",
                fix=f"plan at most {MOST_PLANNED_PAIRS}",
            )

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, so that a reader can tell that it was not changed afterwards."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()

    def orders(self) -> Iterator[bool]:
        """Yield whether A comes first in the next pair, without end: fair coins from the seed."""
        coins = Random(self.seed)
        while True:
            yield coins.random() < 0.5


@dataclass(frozen=True)
class Pair:
    """Neighbouring samples of A and B, in random order: a value of each for every metric."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    is_a_first: bool
    start_ns: int
    """Wall time at which the first of the two began."""
    clocks_mhz: tuple[float | None, float | None] = (None, None)
    """The GPU's clock during A's sample and during B's; missing where no sensor said."""
    problem: str = ""
    """Why the verdict leaves this pair out: one of the causes stated before; empty: it counts."""
    mean_a: tuple[float, ...] = ()
    """Means behind A's values where those are medians of several windows; empty: they are means."""
    mean_b: tuple[float, ...] = ()
    num_windows: int = 1
    """How many windows of each variant the values are of."""


@dataclass(frozen=True)
class Interval:
    """Where B's value over A's lies, at this confidence: 0.5 is half of A's."""

    ratio: float
    low: float
    high: float
    level: float
    kind: Literal["fixed", "sequence"]
    """`fixed`: for a number of pairs set beforehand; `sequence`: valid whenever one stops."""


@dataclass(frozen=True)
class Claim:
    """The verdict on one metric, and what it rests on; FASTER means that B is better."""

    metric: Metric
    verdict: Verdict
    num_pairs: int
    interval: Interval | None = None
    p_value: float | None = None
    """Two-sided p-value of A and B being alike, by the test of the interval: Wilcoxon's signed
    ranks or, after an early stop, the sequence's; corrected for the looks and, by Holm, for the
    other metrics."""
    is_material: bool = False
    """Whether the whole interval lies beyond the smallest effect."""
    pairs_needed: int | None = None
    """For an inconclusive verdict: about how many more pairs would decide; None: unknown."""
    why: str = ""
    """A sentence: what decided, or what was in the way."""
    mean: Interval | None = None
    """B's mean over A's, which costs follow; `interval` is that of the median pair."""


@dataclass(frozen=True)
class Comparison:
    """A against B: everything that its report shows."""

    name: str
    a: str
    b: str
    plan: Plan
    pairs: tuple[Pair, ...]
    claims: tuple[Claim, ...]
    protocol: str
    """A sentence: how samples were taken, in one process or in alternating ones."""
    doubts: tuple[Caveat, ...] = ()
    steps_ns: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Times of single steps of A and of B, a tuple for each window or process."""
    facts: dict[str, str] = field(default_factory=dict)
    """Machine, versions, commands: what it takes to do it again."""
    tokens_per_step: float | None = None
    """Tokens per step of A and of B, as the user gave them; missing where not given."""
    schema: int = SCHEMA

    @property
    def headline(self) -> Claim:
        """The claim on the first metric."""
        return self.claims[0]

    def __repr__(self) -> str:
        """Return the verdicts, a line for each metric."""
        return f"{self.b} against {self.a}\n" + "\n".join(map(_told, self.claims))


def _told(claim: Claim) -> str:
    """Return a claim as one line: B's change of the metric in percent, with its interval."""
    told = f"{claim.verdict}: {claim.metric.name}"
    if claim.interval is not None:
        at, low, high = (
            f"{100 * (ratio - 1):+.2f}"
            for ratio in (claim.interval.ratio, claim.interval.low, claim.interval.high)
        )
        told += f" {at} % ({low} to {high} %, {claim.num_pairs} pairs)"
    return f"{told}. {claim.why}" if claim.why else told


def save(comparison: Comparison, folder: Path, besides: Mapping[str, object] | None = None) -> None:
    """Write the comparison as JSON into `folder`, which exists, with what stands `besides` it."""
    partial = folder / f"{FILE}.partial"
    partial.write_bytes(encode(comparison, besides) + b"\n")
    partial.replace(folder / FILE)
    (folder / PAIRS_FILE).unlink(missing_ok=True)


def encode(comparison: Comparison, besides: Mapping[str, object] | None = None) -> bytes:
    """Return the comparison as indented JSON; what is not a number becomes null."""
    content = {**msgspec.to_builtins(comparison), **(besides or {})}
    return msgspec.json.format(msgspec.json.encode(content))


def save_pairs(plan: Plan, pairs: Sequence[Pair], folder: Path) -> None:
    """Keep what was measured so far, in case that the comparison does not come to its end."""
    content = {"schema": SCHEMA, "plan": plan, "pairs": pairs}
    (folder / PAIRS_FILE).write_bytes(msgspec.json.encode(content))


def load(folder: Path) -> Comparison:
    """Read a comparison that `save` wrote.

    Raises:
        KprofError: there is none, or it is damaged, or a newer kprof wrote it.
    """
    try:
        return read(msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError) as error:
        raise KprofError(
            f"{folder} holds no complete comparison: {error}",
            fix="name a folder that `kprof ab` wrote",
        ) from error


def read(content: Mapping[str, Any]) -> Comparison:
    """Return the comparison in the JSON that `encode` wrote; what stands besides is passed over.

    Raises:
        msgspec.ValidationError: it is none.
        KprofError: a newer kprof wrote it.
    """
    if content.get("schema", SCHEMA) != SCHEMA:
        raise KprofError(
            f"the comparison is of schema {content['schema']}, and this kprof knows {SCHEMA}",
            fix="use the version of kprof that wrote it, or a newer one",
        )
    return msgspec.convert(as_read(content), type=Comparison)


def as_read(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a comparison whose doubts have ids, and whose lost values are NaN."""
    content = with_ids(content, "doubts")
    pairs = content.get("pairs")
    if not isinstance(pairs, list) or not all(isinstance(pair, dict) for pair in pairs):
        return content
    return {**content, "pairs": [_with_nan(pair) for pair in pairs]}


VALUES = "a", "b", "mean_a", "mean_b"


def _with_nan(pair: dict[str, Any]) -> dict[str, Any]:
    values = {arm: pair[arm] for arm in VALUES if isinstance(pair.get(arm), list)}
    return {**pair, **{arm: [nan if v is None else v for v in vs] for arm, vs in values.items()}}
