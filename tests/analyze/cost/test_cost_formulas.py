"""What tokens, fleets and training cost: published figures, exact sums, and what must hold."""

from datetime import date
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.cost.fleet import (
    Replicas,
    break_even_tokens_per_month,
    size_fleet,
    usd_per_month,
)
from kprof.analyze.cost.gain import payback_months, unit_gain
from kprof.analyze.cost.price import (
    Band,
    Ownership,
    Quote,
    interrupted_usd_per_gpu_hour,
    owned_usd_per_gpu_hour,
    price_of,
    ratios_by_list,
)
from kprof.analyze.cost.tokens import (
    Served,
    energy_usd_per_million_tokens,
    in_micro_dollars,
    provisioned_joules_per_token,
    split_bill,
    usd_at_api_prices,
    usd_per_million_tokens,
)
from kprof.analyze.cost.training import (
    bandwidth_utilisation,
    model_flops_per_s,
    tokens_per_s_of_budget,
    training_tokens_per_s,
    usd_per_billion_tokens,
)
from kprof.errors import KprofError

BILLION, TRILLION = 10**9, 10**12
VOICE_SPEEDUP = Fraction(281, 77)

positive = st.fractions(Fraction(1, 1000), 10**6, max_denominator=1000)
shares = st.fractions(Fraction(1, 100), 1, max_denominator=100)
servings = st.builds(
    Served,
    input_tokens=positive,
    output_tokens=positive,
    prefill_gpu_s=positive,
    decode_gpu_s=positive,
    cached_share=st.fractions(0, Fraction(99, 100), max_denominator=100),
    cached_weight=st.fractions(0, 1, max_denominator=100),
)


def exact(value):
    """Return a number as it is written."""
    return Fraction(str(value))


def near(value):
    """Allow half a percent, as far as published figures are rounded."""
    return pytest.approx(value, rel=0.005)


def quote(gpu="A", usd=1, price_list="one", day=1, term="on-demand"):
    return Quote(gpu, exact(usd), term, price_list, "https://prices", date(2026, 11, day))


# Published or recomputed figures, each with what it follows from.


@pytest.mark.parametrize(
    ("usd_per_hour", "tokens_per_s", "utilisation", "usd"),
    [
        (1.95, 30_000, 1, 0.01806),
        (1.95, 27_083, 1, 0.02),
        (1.95, 4_924, 1, 0.11),
        (2.00, 85, 1, 6.536),
        (2.60, 140, 1, 5.159),
        (2.00, 120, 1, 4.630),
        (2.00, 400, 1, 1.389),
        (16, 22_300, 1, 0.1993),
        (16, 52_300, 1, 0.0850),
        (3.99, 5_000, 1, 0.222),
        (3.99, 5_000, 0.6, 0.369),
        (3.99, 5_000, 0.4, 0.554),
        (3.99, 5_000, 0.3, 0.739),
    ],
)
def test_a_million_tokens_cost_what_was_published(usd_per_hour, tokens_per_s, utilisation, usd):
    found = usd_per_million_tokens(exact(usd_per_hour), exact(tokens_per_s), exact(utilisation))
    assert float(found) == near(usd)


def test_a_day_of_nodes_costs_their_hours_exactly():
    assert exact(226.75) * 8 * 2 * 24 == 87_072


def test_tokens_at_api_prices_are_a_revenue_with_its_margin():
    tokens = [Fraction(n * BILLION) for n in (342, 266, 168)]
    revenue = usd_at_api_prices(tokens, [exact(0.14), exact(0.55), exact(2.19)])
    assert float(revenue) == near(562_100)
    assert float(revenue / 87_072 - 1) == near(5.455)


def test_a_bill_is_less_a_token_of_all_than_a_token_of_output():
    assert float(Fraction(87_072, 776 * BILLION) * 10**6) == near(0.112)
    assert float(Fraction(87_072, 168 * BILLION) * 10**6) == near(0.518)


def test_a_training_costs_its_gpu_hours():
    assert float((exact(2.664) + exact(0.119) + exact(0.005)) * 2) == near(5.576)


def test_gpu_hours_for_a_trillion_tokens_tell_rate_price_and_mfu():
    rate = tokens_per_s_of_budget(Fraction(TRILLION), Fraction(180_000))
    flops = model_flops_per_s(Fraction(37 * BILLION), rate)
    assert float(rate) == near(1_543)
    assert usd_per_billion_tokens(Fraction(2), rate) == 360
    assert float(flops) == near(343e12)
    assert float(flops / (989 * TRILLION)) == near(0.346)


def test_a_dense_training_has_its_published_mfu():
    rate = tokens_per_s_of_budget(exact(15.6) * TRILLION, exact(30.84) * 10**6)
    flops = model_flops_per_s(Fraction(405 * BILLION), rate)
    assert float(rate) == near(140.5)
    # Of the peak with which the figure was published.
    assert float(flops / (989 * TRILLION)) == near(0.345)


def test_the_bandwidth_of_a_decode_step_is_half_used():
    assert bandwidth_utilisation(14 * Fraction(BILLION), exact(0.014), 2 * Fraction(TRILLION)) == (
        Fraction(1, 2)
    )


def test_a_faster_voice_agent_on_hardware_of_half_the_price_is_seven_times_cheaper():
    assert float(unit_gain(VOICE_SPEEDUP, Fraction(2))) == near(7.30)
    assert unit_gain(exact(3.6), Fraction(2)) == exact(7.2)


def test_energy_is_joules_provisioned_and_cents():
    joules = provisioned_joules_per_token(exact(1.73), Fraction(1000))
    assert joules == exact(1.73)
    assert float(energy_usd_per_million_tokens(joules, exact(0.08))) == near(0.0384)


# Exact sums.


@given(servings, positive, shares, st.fractions(1, 2, max_denominator=10))
def test_input_cached_and_output_cost_add_up_to_the_bill_exactly(served, price, used, overhead):
    bill = split_bill(served, price, used, overhead)
    hours = (served.prefill_gpu_s + served.decode_gpu_s) / 3600
    assert bill.input_usd + bill.output_usd == bill.total_usd == price * overhead * hours / used


@given(servings, positive)
def test_prices_of_a_token_times_tokens_are_the_bill_exactly(served, price):
    bill = split_bill(served, price)
    per_input, per_output = (
        bill.input_usd / served.input_tokens,
        bill.output_usd / served.output_tokens,
    )
    assert per_input * served.input_tokens + per_output * served.output_tokens == bill.total_usd


@given(servings, positive)
def test_a_cached_token_costs_its_weight_of_a_computed_one(served, price):
    bill = split_bill(served, price)
    computed = bill.computed_usd / served.computed_tokens
    assert bill.cached_usd == computed * served.cached_weight * served.cached_tokens


@given(st.lists(st.fractions(0, 1000, max_denominator=10**9), min_size=1, max_size=6))
def test_whole_micro_dollars_add_up_to_the_rounded_sum(parts):
    whole = in_micro_dollars(parts)
    assert sum(whole) == round(sum(parts) * 10**6)
    assert all(abs(a - b * 10**6) < 1 for a, b in zip(whole, parts, strict=True))


# What must hold.


@given(positive, positive, positive, shares)
def test_a_dearer_hour_is_never_a_cheaper_token(price, more, rate, used):
    dearer = usd_per_million_tokens(price + more, rate, used)
    assert dearer > usd_per_million_tokens(price, rate, used)


@given(positive, positive, shares)
def test_twice_the_speed_at_the_same_utilisation_halves_the_cost(price, rate, used):
    once, twice = (usd_per_million_tokens(price, r, used) for r in (rate, 2 * rate))
    assert once == 2 * twice
    assert usd_per_billion_tokens(price, rate) == 2 * usd_per_billion_tokens(price, 2 * rate)


@given(
    st.lists(st.fractions(0, 10**5, max_denominator=10), min_size=1, max_size=8).filter(any),
    positive,
    st.integers(1, 16),
    st.fractions(1, 2, max_denominator=10),
)
@settings(max_examples=200)
def test_whole_gpus_are_never_fewer_than_the_demand_needs(demand, rate, of_replica, headroom):
    fleet = size_fleet(demand, rate, Replicas(of_replica, 1, headroom))
    assert fleet.gpus * rate >= max(demand) * headroom
    assert fleet.gpus % of_replica == 0
    assert (fleet.gpus - of_replica) * rate < max(demand) * headroom or fleet.gpus == of_replica
    assert 0 < fleet.steady_utilisation <= fleet.scaled_utilisation <= 1


def test_a_fleet_keeps_its_floor_and_pays_for_cold_starts():
    demand = [Fraction(n) for n in (0, 900, 100)]
    fleet = size_fleet(demand, Fraction(100), Replicas(2, 1, Fraction(1), Fraction(1800)))
    # Replicas of 200 tokens/s: 1, 5 and 1; four starts of half an hour each.
    assert fleet.gpus == 10
    assert fleet.steady_gpu_hours == 30
    assert fleet.scaled_gpu_hours == (1 + 5 + 1 + 2) * 2
    assert fleet.used_gpu_hours == 10


def test_an_api_breaks_even_where_its_bill_is_that_of_the_gpus():
    monthly = usd_per_month(8, Fraction(2), Fraction(1))
    assert monthly == 11_680
    assert break_even_tokens_per_month(monthly, Fraction(4)) == 2_920_000_000


def test_a_fee_is_paid_back_by_what_is_saved_and_never_by_nothing():
    assert payback_months(Fraction(9_000), Fraction(3_000)) == 3
    assert payback_months(Fraction(9_000), Fraction(0)) is None


def test_an_own_gpu_costs_capital_operation_and_current():
    plain = Ownership(Fraction(35_040), Fraction(4))
    assert owned_usd_per_gpu_hour(plain) == 1
    half = Ownership(Fraction(35_040), Fraction(4), availability=Fraction(1, 2))
    assert owned_usd_per_gpu_hour(half) == 2
    powered = Ownership(
        Fraction(35_040),
        Fraction(4),
        opex_usd_per_gpu_year=Fraction(876),
        kw_per_gpu=Fraction(2),
        pue=exact(1.5),
        usd_per_kwh=exact(0.1),
    )
    assert owned_usd_per_gpu_hour(powered) == 1 + exact(0.1) + exact(0.3)


def test_interest_spreads_capital_by_the_recovery_factor():
    owned = Ownership(Fraction(8_760), Fraction(2), interest_per_year=exact(0.1))
    # 0.1 * 1.21 / 0.21 of the capital each year.
    assert owned_usd_per_gpu_hour(owned) == exact(0.121) / exact(0.21)


def test_interest_of_almost_nothing_is_no_interest():
    owned = Ownership(Fraction(8_760), exact(2.5), interest_per_year=exact(0.0001))
    assert float(owned_usd_per_gpu_hour(owned)) == pytest.approx(1 / 2.5, rel=1e-3)


TINY = Fraction(1, 10**150)


@pytest.mark.parametrize("rate", [Fraction(1, 10**20), TINY])
@pytest.mark.parametrize("years", [Fraction(1, 2), Fraction(2), TINY])
def test_next_to_no_interest_is_none(rate, years):
    owned, plain = (Ownership(Fraction(1), years, interest_per_year=r) for r in (rate, Fraction(0)))
    ratio = owned_usd_per_gpu_hour(owned) / owned_usd_per_gpu_hour(plain)
    assert float(ratio) == pytest.approx(1, rel=1e-12)


def test_interruptions_are_paid_as_lost_hours():
    assert interrupted_usd_per_gpu_hour(Fraction(2), exact(0.1), exact(0.5)) == exact(2.1)


# Prices.


def test_a_price_is_the_least_the_median_and_the_highest_of_the_newest_quotes():
    quotes = [
        quote(usd=1, price_list="a", day=9),
        quote(usd=9, price_list="a", day=1),
        quote(usd=2, price_list="b"),
        quote(usd=6, price_list="c"),
        quote(usd=0.5, price_list="d", term="spot"),
        quote("B", 0.1),
    ]
    price = price_of(quotes, "a", "on-demand")
    assert price.usd_per_gpu_hour == Band(Fraction(1), Fraction(2), Fraction(6))
    assert (price.oldest, price.newest) == (date(2026, 11, 1), date(2026, 11, 9))


def test_a_gpu_without_a_price_is_answered_with_the_nearest_names():
    with pytest.raises(KprofError, match="H1000") as refused:
        price_of([quote("H100"), quote("H200"), quote("L4")], "H1000", "on-demand")
    assert "H100" in refused.value.fix
    assert "L4" not in refused.value.fix


@pytest.mark.parametrize("words", [("spot",), ("on-demand", "nobody")])
def test_an_unknown_term_or_list_is_answered_with_those_that_there_are(words):
    with pytest.raises(KprofError) as refused:
        price_of([quote()], "A", *words)
    assert "on-demand" in refused.value.fix or "one" in refused.value.fix


@pytest.mark.parametrize(
    ("day", "is_stale"), [(date(2027, 1, 30), False), (date(2027, 1, 31), True)]
)
def test_a_price_is_stale_after_ninety_days(day, is_stale):
    assert price_of([quote()], "A", "on-demand").is_stale(day) is is_stale


def test_prices_are_divided_within_a_list_and_at_the_nearest_dates():
    quotes = [
        quote("A", 4, "x", day=3),
        quote("B", 2, "x", day=4),
        quote("B", 1, "x", day=9),
        quote("A", 9, "y"),
        quote("B", 3, "z"),
        quote("B", 3, "x", term="spot"),
    ]
    (one,) = ratios_by_list(quotes, "a", "b")
    assert (one.price_list, one.term, one.ratio) == ("x", "on-demand", 2)


def test_of_equally_near_prices_the_newest_are_divided():
    quotes = [quote("A", 4), quote("B", 2), quote("A", 9, day=9), quote("B", 3, day=9)]
    assert [one.ratio for one in ratios_by_list(quotes, "A", "B")] == [3]


@given(positive, positive)
def test_a_band_of_a_falling_function_keeps_low_below_high(low, spread):
    band = Band(low, low + spread, low + 2 * spread).map(lambda x: 1 / x)
    assert band.low < band.mid < band.high


def test_training_speed_follows_from_mfu_and_peak():
    rate = training_tokens_per_s(Fraction(BILLION), exact(0.5), Fraction(12 * TRILLION))
    assert rate == 1_000
