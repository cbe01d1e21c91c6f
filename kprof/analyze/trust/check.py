"""One thing that could make a capture lie: what was found, what follows, how to do better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "limited", "bad", "unknown"]


@dataclass(frozen=True)
class Check:
    """One thing that could make a capture lie, and whether it did."""

    name: str
    verdict: Verdict
    evidence: str
    """What was found, in numbers; of an unknown one, why nobody can tell."""
    meaning: str = ""
    """What it does to the verdicts; empty where that is nothing."""
    remedy: str = ""
    """How to record better; empty where nothing needs to be."""


def graded(value: float, limits: tuple[float, float]) -> Verdict:
    """Return the verdict on a measure: good and limited up to their limits, bad beyond."""
    good, limited = limits
    return "good" if value <= good else "limited" if value <= limited else "bad"


def checked(
    name: str, verdict: Verdict, evidence: str, meaning: str = "", remedy: str = ""
) -> Iterator[Check]:
    """Yield a check; what is good needs no remedy."""
    is_good = verdict == "good"
    yield Check(name, verdict, evidence, "" if is_good else meaning, "" if is_good else remedy)


def percent(share: float) -> str:
    """Return a share of one in percent, for a sentence."""
    return f"{100 * share:.1f} %"
