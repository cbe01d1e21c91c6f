"""What a calibration found: rates with their intervals, per kind of noise, against targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SCHEMA = 1
EFFECTS = (0.01, 0.02, 0.05)
"""Planted slow-downs."""
GAINS = (-0.02, -0.05)
"""Planted gains: FASTER needs the mean as well, so it is not SLOWER with A and B swapped."""


@dataclass(frozen=True)
class Rate:
    """So many out of so many."""

    count: int
    of: int

    @property
    def share(self) -> float:
        """The rate as a share of one."""
        return self.count / self.of

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true rate lies with 95 % (Clopper and Pearson 1934, exact)."""
        from scipy.stats import beta

        low = beta.ppf(0.025, self.count, self.of - self.count + 1) if self.count else 0.0
        rest = self.of - self.count
        return float(low), float(beta.ppf(0.975, self.count + 1, rest) if rest else 1.0)


def pooled(rates: Sequence[Rate]) -> Rate:
    """Return several rates as one."""
    return Rate(sum(rate.count for rate in rates), sum(rate.of for rate in rates))


@dataclass(frozen=True)
class Judged:
    """How verdicts came out; where by effect, that is in text: "0", "0.01" and so on."""

    false_positive: Rate
    """No difference, and an interval that leaves out 1."""
    false_verdict: Rate
    """No difference, and FASTER or SLOWER: nearly equal is SAME even where 1 is left out."""
    same: Rate
    """No difference, and SAME."""
    power: dict[str, Rate]
    """A difference, and the right one of FASTER and SLOWER."""
    same_at: dict[str, Rate]
    """A difference, and SAME."""
    wrong_direction: Rate
    """A difference, and the wrong one of FASTER and SLOWER."""
    coverage: Rate
    """The interval holds the truth, over all effects."""
    pairs: dict[str, float]
    """How many pairs were taken, on average, by effect."""
    false_material: Rate = Rate(0, 0)
    """No difference, and an interval that lies beyond the smallest effect."""
    refused: Rate = Rate(0, 0)
    """INVALID, because the ratio seems to change with time or with what ran before."""


@dataclass(frozen=True)
class Scenario:
    """One kind of noise: the plan's verdicts with all pairs, and with stopping early."""

    name: str
    says: str
    fixed: Judged
    early: Judged
    least_found: float
    """The least difference that four in five comparisons with all pairs find."""


@dataclass(frozen=True)
class Target:
    """A figure and what it has to reach."""

    name: str
    value: float
    better: Literal["lower", "higher"]
    reach: float
    where: str
    """The scenario with the worst value."""

    @property
    def is_met(self) -> bool:
        """Whether the value is as good as it has to be."""
        if self.better == "lower":
            return self.value <= self.reach
        return self.value >= self.reach


@dataclass(frozen=True)
class Calibration:
    """How often the verdicts of this instrument were right, where and when it was found out."""

    kind: Literal["simulated", "gpu", "host"]
    device: str
    driver: str | None
    date: str
    num_pairs: int
    num_comparisons: int
    """In each scenario without an effect, as planned; each rate says of how many it is."""
    seed: int
    smallest_effect: float
    alpha: float
    scenarios: tuple[Scenario, ...]
    targets: tuple[Target, ...]
    took_s: float
    doubts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """What was to be taken and has no result, or none yet."""
    schema: int = SCHEMA

    @property
    def least_found(self) -> float | None:
        """The least difference that four in five find in the worst scenario with planted ones."""
        planted = [scenario.least_found for scenario in self.scenarios if scenario.fixed.power]
        return max(planted, default=None)

    @property
    def is_met(self) -> bool | None:
        """Whether every target is met; missing where something else is, and none is missed."""
        if not all(target.is_met for target in self.targets):
            return False
        return None if self.missing else True
