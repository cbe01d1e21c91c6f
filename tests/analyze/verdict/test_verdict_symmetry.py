"""What holds of the verdict on any pairs: no side, no unit and no order changes it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kprof.analyze.verdict import judge
from tests.analyze.verdict.verdict_pairs import (
    pair_of,
    plan_of,
)

MIRROR = {"FASTER": "SLOWER", "SLOWER": "FASTER"}
RATIOS = st.lists(st.floats(0.8, 1.25), min_size=6, max_size=30)


def paired(ratios):
    """Return pairs of these ratios, with samples of A that drift."""
    return [pair_of(1.0 + n / 100, (1.0 + n / 100) * r, n) for n, r in enumerate(ratios)]


@settings(max_examples=30)
@given(RATIOS, st.sampled_from([0, 10]))
def test_swapping_a_and_b_mirrors_the_verdict(ratios, more):
    plan = plan_of(max_pairs=len(ratios) + more)
    pairs = paired(ratios)
    (claim,) = judge(plan, pairs)
    (mirrored,) = judge(plan, [replace(p, a=p.b, b=p.a) for p in pairs])
    # The mean has to agree with FASTER more closely than with SLOWER, so one side may be open.
    assert mirrored.verdict in (MIRROR.get(claim.verdict, claim.verdict), "INCONCLUSIVE") or (
        claim.verdict == "INCONCLUSIVE" and mirrored.verdict in ("SLOWER", "SAME")
    )
    assert (mirrored.verdict == "INVALID") == (claim.verdict == "INVALID")
    assert mirrored.is_material == claim.is_material
    if claim.interval:
        assert mirrored.interval.low == pytest.approx(1 / claim.interval.high)
        assert mirrored.interval.ratio == pytest.approx(1 / claim.interval.ratio)
        assert mirrored.mean.low == pytest.approx(1 / claim.mean.high)
        assert mirrored.mean.ratio == pytest.approx(1 / claim.mean.ratio)
    else:
        assert mirrored.interval is None


@settings(max_examples=20)
@given(RATIOS, st.sampled_from([2.0**-20, 0.5, 1024.0]))
def test_the_unit_of_the_values_changes_nothing(ratios, factor):
    plan, pairs = plan_of(max_pairs=len(ratios)), paired(ratios)
    scaled = [replace(p, a=(p.a[0] * factor,), b=(p.b[0] * factor,)) for p in pairs]
    (claim,), (other,) = judge(plan, pairs), judge(plan, scaled)
    assert other.verdict == claim.verdict
    assume(claim.interval is not None)
    assert other.interval.low == pytest.approx(claim.interval.low, rel=1e-12)


@settings(max_examples=20)
@given(RATIOS, st.randoms(use_true_random=False))
def test_with_all_pairs_in_their_order_changes_nothing(ratios, random):
    plan, pairs = plan_of(max_pairs=len(ratios)), paired(ratios)
    shuffled = random.sample(pairs, len(pairs))
    assert judge(plan, shuffled) == judge(plan, pairs)


@settings(max_examples=30)
@given(RATIOS, st.sampled_from([0, 15]))
def test_a_verdict_never_contradicts_the_interval_beside_it(ratios, more):
    (claim,) = judge(plan_of(max_pairs=len(ratios) + more), paired(ratios))
    assume(claim.interval is not None)
    low, high = claim.interval.low, claim.interval.high
    assert low <= claim.interval.ratio <= high
    assert claim.verdict != "FASTER" or high < 1
    assert claim.verdict != "SLOWER" or low > 1
    is_open = low <= 1 <= high or claim.mean.high >= 1.01 or claim.mean.high < 1
    assert claim.verdict != "INCONCLUSIVE" or is_open
    assert claim.verdict != "SAME" or 1 / 1.01 < claim.interval.ratio < 1.01
    assert (claim.p_value <= 0.05) == (low > 1 or high < 1)
