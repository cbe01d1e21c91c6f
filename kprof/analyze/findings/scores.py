"""Scores: what findings predicted, against what an A/B then measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from kprof.analyze.engagement import (
    ComparisonAdded,
    Engagement,
    Entry,
    Holding,
    Predicted,
    RunAdded,
)
from kprof.comparison import Comparison

# A's step, and that of the recording that predicts, are the same workload's within this.
SAME_STEP = 0.1


@dataclass(frozen=True)
class Score:
    """A prediction and its measurement; all gains are shares of A's step."""

    entry: int
    """The comparison's."""
    name: str
    source: str
    predicted: tuple[float, float]
    measured: float
    interval: tuple[float, float]
    """Interval of the measurement, at its own confidence."""
    verdict: str
    doubts: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The middle of the prediction minus the measurement: above 0, too much was predicted."""
        return sum(self.predicted) / 2 - self.measured

    @property
    def is_inside(self) -> bool:
        """Whether what was measured lies within the predicted interval."""
        return self.predicted[0] <= self.measured <= self.predicted[1]

    @property
    def is_clear(self) -> bool:
        """Whether the whole measured interval lies on the same side of the predicted ends."""
        (low, high), (least, most) = self.predicted, self.interval
        return (low <= least and most <= high) if self.is_inside else (most < low or high < least)


@dataclass(frozen=True)
class Unscored:
    """A comparison that tests no prediction, and why."""

    entry: int
    name: str
    why: str


@dataclass(frozen=True)
class RecordedPrediction:
    """A prediction, and the entry that it was written down in."""

    entry: Entry
    predicted: Predicted


@dataclass(frozen=True)
class Scores:
    """All that was scored, and all that was not."""

    scored: tuple[Score, ...]
    unscored: tuple[Unscored, ...]
    untested: tuple[RecordedPrediction, ...]
    """Predictions that no comparison tests yet."""

    @property
    def mean_absolute_error(self) -> float | None:
        """How far predictions were off, in shares of a step; None: none was scored."""
        return fmean(abs(one.error) for one in self.scored) if self.scored else None

    @property
    def mean_error(self) -> float | None:
        """The same with its sign: above 0, too much was promised; None: none was scored."""
        return fmean(one.error for one in self.scored) if self.scored else None

    @property
    def num_inside(self) -> int:
        """How many measurements lie within what was predicted."""
        return sum(one.is_inside for one in self.scored)

    @property
    def num_surely_inside(self) -> int:
        """How many of these do so with their whole interval."""
        return sum(one.is_inside and one.is_clear for one in self.scored)


def predictions_in(engagement: Engagement, by_s: float = float("inf")) -> list[RecordedPrediction]:
    """Return every prediction.

    Of one name, the newest that was written down by `by_s`, in seconds since 1970; where there is
    none so early, the newest.
    """
    every = [
        RecordedPrediction(entry, one) for entry in engagement.entries for one in entry.predictions
    ]
    in_time = [one for one in every if one.entry.when_s <= by_s]
    found = {one.predicted.name: one for one in [*every, *in_time]}
    return list(found.values())


def score(engagement: Engagement) -> Scores:
    """Score every comparison that tests a prediction."""
    compared = engagement.of(ComparisonAdded)
    results = [_score(engagement, entry, one) for entry, one in compared]
    # A prediction repeated by a run after the change is new: that change did not test it.
    tested = {one.bet.name: entry.number for entry, one in compared if one.bet is not None}
    return Scores(
        tuple(one for one in results if isinstance(one, Score)),
        tuple(one for one in results if isinstance(one, Unscored)),
        tuple(
            one
            for one in predictions_in(engagement)
            if tested.get(one.predicted.name, 0) < one.entry.number
        ),
    )


def _score(engagement: Engagement, entry: Entry, added: ComparisonAdded) -> Score | Unscored:
    comparison, bet = added.comparison, added.bet
    if bet is None:
        return Unscored(entry.number, comparison.b, "it was added as a test of no prediction")
    made_in = engagement.entry(bet.entry) or entry
    predicted = next((one for one in made_in.predictions if one.name == bet.name), None)
    claim = comparison.headline
    if predicted is None:
        return Unscored(entry.number, bet.name, f"entry {bet.entry} does not predict it")
    if predicted.shares is None:
        return Unscored(entry.number, bet.name, f"no gain was predicted: {predicted.basis}")
    if claim.metric.unit != "ns":
        why = f"it compares {claim.metric.name}, and times were predicted"
        return Unscored(entry.number, bet.name, why)
    if claim.interval is None or claim.verdict == "INVALID":
        return Unscored(entry.number, bet.name, f"it measured no gain: {claim.why}".rstrip())
    if began_s(comparison) < made_in.when_s:
        why = "it was measured before the prediction was written down, so it is no test of it"
        return Unscored(entry.number, bet.name, why)
    interval = claim.interval
    return Score(
        entry.number,
        bet.name,
        predicted.source,
        predicted.shares,
        1 - interval.ratio,
        (1 - interval.high, 1 - interval.low),
        claim.verdict,
        tuple(_doubts(comparison, made_in.content, predicted)),
    )


def began_s(comparison: Comparison) -> float:
    """Return when the first pair was taken, in seconds since 1970."""
    return min((pair.start_ns for pair in comparison.pairs), default=0) / 1e9


def _doubts(comparison: Comparison, made_in: Holding, predicted: Predicted) -> Iterator[str]:
    """Yield what the comparison measured otherwise than the recording that predicts."""
    place = comparison.plan.metrics.index(comparison.headline.metric)
    step_ns = median(pair.a[place] for pair in comparison.pairs if not pair.problem)
    if abs(step_ns / predicted.step_ns - 1) > SAME_STEP:
        yield (
            f"A's step took {step_ns / 1e6:.4g} ms, and {predicted.step_ns / 1e6:.4g} ms in the "
            "recording that predicts"
        )
    gpu = comparison.facts.get("GPU")
    gpus = made_in.gpus if isinstance(made_in, RunAdded) else ()
    if gpu and gpus and gpu not in gpus:
        yield f"A ran on {gpu}, and the recording that predicts on {', '.join(gpus)}"
