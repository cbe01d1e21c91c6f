"""`benchmarks/verdict_hazards.py`: what it judges at once comes out as what is judged alone."""

from dataclasses import replace

import pytest

from tests.samples import benchmark


@pytest.fixture(scope="module")
def hazards():
    return benchmark("verdict_hazards")


def in_short(found):
    """Return verdict, whether the exit code is 1, and number of pairs."""
    return [(said, code == 1, taken) for said, code, taken in found]


@pytest.mark.parametrize(
    "name",
    [
        "stalls in 10 % of B, 42 pairs",
        "B in two states, 42 pairs",
        "4 % slower for 12 pairs, then 4 % faster, 42 pairs",
        "5 % after B and B 2 % faster, 42 pairs",
    ],
)
def test_comparisons_judged_at_once_come_out_as_judged_alone(hazards, monkeypatch, name):
    monkeypatch.setattr(hazards, "BLOCK", 12)
    (place,) = [n for n, hazard in enumerate(hazards.HAZARDS) if hazard.name == name]
    at_once = in_short(hazards.outcomes_of(place, 0))
    # At its place, which is a part of its generator's seed.
    alone = [replace(hazard, is_of_values=True) for hazard in hazards.HAZARDS]
    monkeypatch.setattr(hazards, "HAZARDS", alone)
    assert at_once == in_short(hazards.outcomes_of(place, 0))
