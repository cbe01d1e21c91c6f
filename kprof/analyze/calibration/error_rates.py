"""The result of a calibration: error rates with their intervals, judged against targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kprof.findings import Caveat

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
    doubts: tuple[Caveat, ...] = ()
    missing: tuple[str, ...] = ()
    """Comparisons that were planned and have no result, or none yet."""
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


LEAST_POWER = {"0.01": 0.80, "0.02": 0.95, "0.05": 0.99}


FALSE_POSITIVES, WRONG_DIRECTION = "false positives", "wrong direction"
FALSE_MATERIAL = "false and material"

Of = Callable[[Scenario], float]


def targets_of_simulation(
    scenarios: Sequence[Scenario], smallest_effect: float
) -> tuple[Target, ...]:
    """Return the targets of simulated noise."""
    margin = f"{smallest_effect:g}"

    def saved(scenario: Scenario) -> float:
        return 1 - scenario.early.pairs["0.02"] / scenario.fixed.pairs["0.02"]

    return (
        _lowest(scenarios, FALSE_POSITIVES, 0.05, lambda s: s.fixed.false_positive.share),
        _lowest(scenarios, "false FASTER or SLOWER", 0.05, lambda s: s.fixed.false_verdict.share),
        _lowest(scenarios, FALSE_MATERIAL, 0.01, lambda s: s.fixed.false_material.share),
        *_of_power(scenarios),
        _highest(scenarios, "coverage, least", 0.93, lambda s: s.fixed.coverage.share),
        _lowest(scenarios, "coverage, most", 0.97, lambda s: s.fixed.coverage.share),
        _lowest(scenarios, WRONG_DIRECTION, 0.0, lambda s: s.fixed.wrong_direction.share),
        _highest(scenarios, "SAME where it is", 0.90, lambda s: s.fixed.same.share),
        _lowest(
            scenarios, "SAME at the smallest effect", 0.06, lambda s: s.fixed.same_at[margin].share
        ),
        _lowest(
            scenarios, "false positives, stopping", 0.05, lambda s: s.early.false_positive.share
        ),
        _highest(scenarios, "coverage, stopping", 0.95, lambda s: s.early.coverage.share),
        # No plan stops before 24 of its 40 pairs, and as FASTER none of one sample a pair does.
        _highest(scenarios, "pairs saved at 2 %, stopping", 0.15, saved),
    )


def targets_on_a_machine(scenarios: Sequence[Scenario]) -> tuple[Target, ...]:
    """Return the targets of a machine; power and coverage where an effect was planted.

    So few comparisons scatter: what 95 of 100 runs of a right instrument reach is enough. There
    is no target of what is missing.
    """
    if not scenarios:
        return ()
    worst = max(scenarios, key=lambda s: _excess(s.fixed.false_positive))
    false = worst.fixed.false_positive
    reach = quantile(0.95, false.of, 0.05)
    of_material = max((s.fixed.false_material for s in scenarios), key=lambda rate: rate.share)
    most = quantile(0.95, max(of_material.of, 1), 0.01)
    found = [
        Target(FALSE_POSITIVES, false.share, "lower", reach, worst.name),
        _lowest(scenarios, FALSE_MATERIAL, most, lambda s: s.fixed.false_material.share),
    ]
    planted = [scenario for scenario in scenarios if scenario.fixed.power]
    if planted:
        coverage = pooled([scenario.fixed.coverage for scenario in planted])
        least, most = (quantile(level, coverage.of, p) for level, p in ((0.05, 0.93), (0.95, 0.97)))
        found += [
            *_of_power(planted),
            Target("coverage, least", coverage.share, "higher", least, "planted, together"),
            Target("coverage, most", coverage.share, "lower", most, "planted, together"),
            _lowest(planted, WRONG_DIRECTION, 0.0, lambda s: s.fixed.wrong_direction.share),
        ]
    return tuple(found)


def _excess(rate: Rate) -> float:
    return rate.share - quantile(0.95, rate.of, 0.05)


def quantile(level: float, num_comparisons: int, chance: float) -> float:
    """Return the share that so many comparisons stay within; 27 of 400 for 95 % at 5 %."""
    from scipy.stats import binom

    return float(binom.ppf(level, num_comparisons, chance)) / num_comparisons


def _of_power(scenarios: Sequence[Scenario]) -> list[Target]:
    found = []
    for effect, reach in LEAST_POWER.items():
        planted = [scenario for scenario in scenarios if effect in scenario.fixed.power]
        if planted:
            name = f"power at {100 * float(effect):g} %"
            found.append(_highest(planted, name, reach, _power(effect)))
    return found


def _power(effect: str) -> Of:
    return lambda scenario: scenario.fixed.power[effect].share


def _lowest(scenarios: Sequence[Scenario], name: str, reach: float, of: Of) -> Target:
    worst = max(scenarios, key=of)
    return Target(name, of(worst), "lower", reach, worst.name)


def _highest(scenarios: Sequence[Scenario], name: str, reach: float, of: Of) -> Target:
    worst = min(scenarios, key=of)
    return Target(name, of(worst), "higher", reach, worst.name)
