"""What tokens, fleets and training cost: published figures, sums, and what must hold."""

import math
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.cost.answer import interrupted_usd_per_gpu_hour, owned_usd_per_gpu_hour
from kprof.analyze.cost.facts import Energy, Owning, Replicas, Served, Spot
from kprof.analyze.cost.fleet import size_fleet
from kprof.analyze.cost.price import Band, Quote, price_of, ratios_by_list
from kprof.analyze.cost.serving import in_micro_dollars, split_bill, usd_per_million_tokens
from kprof.errors import KprofError
from tests.cost_answers import assuming, figures, mid

# Names of figures.
RATE = "tokens per second of a GPU"
SPEED = "model TFLOP/s of a GPU"

positive = st.floats(1e-3, 1e6)
shares = st.floats(0.01, 1)
servings = st.builds(
    Served,
    input_tokens=positive,
    output_tokens=positive,
    prefill_gpu_s=positive,
    decode_gpu_s=positive,
    cached_share=st.floats(0, 0.99),
    cached_weight=st.floats(0, 1),
)


def near(value):
    """Allow half a percent, as far as published figures are rounded."""
    return pytest.approx(value, rel=0.005)


def quote(gpu="A", usd=1, price_list="one", day=1, term="on-demand"):
    return Quote(gpu, usd, term, price_list, "https://prices", date(2026, 11, day))


# Published or recomputed figures, each with what it follows from.


def test_a_million_tokens_cost_what_was_published():
    # Dollars by dollars an hour, tokens/s and utilisation.
    published = {
        (1.95, 30_000, 1): 0.01806,
        (1.95, 27_083, 1): 0.02,
        (1.95, 4_924, 1): 0.11,
        (2.00, 85, 1): 6.536,
        (2.60, 140, 1): 5.159,
        (2.00, 120, 1): 4.630,
        (2.00, 400, 1): 1.389,
        (16, 22_300, 1): 0.1993,
        (16, 52_300, 1): 0.0850,
        (3.99, 5_000, 1): 0.222,
        (3.99, 5_000, 0.6): 0.369,
        (3.99, 5_000, 0.4): 0.554,
        (3.99, 5_000, 0.3): 0.739,
    }
    found = {given: usd_per_million_tokens(*given) for given in published}
    assert found == near(published)


def test_gpu_hours_for_a_trillion_tokens_tell_rate_price_and_mfu():
    facts = {"price": 2, "active_parameters": "37B", "training_tokens": "1T"}
    facts |= {"gpu_hours": 180_000}
    told = assuming(facts, training={"peak_tflops": 989})
    assert mid(told, "Training", RATE, "tokens/s") == near(1_543)
    assert mid(told, "Training", "a billion tokens", "$/B tokens") == pytest.approx(360)
    assert mid(told, "Training", SPEED, "TFLOP/s") == near(343)
    assert mid(told, "Training", "MFU", "share") == near(0.346)


def test_a_dense_training_has_its_published_mfu():
    facts = {"active_parameters": "405B", "training_tokens": "15.6T", "gpu_hours": "30.84M"}
    told = assuming(facts, training={"peak_tflops": 989})
    assert mid(told, "Training", RATE, "tokens/s") == near(140.5)
    # Of the peak with which the figure was published.
    assert mid(told, "Training", "MFU", "share") == near(0.345)


def test_training_speed_follows_from_mfu_and_peak():
    facts = {"active_parameters": "1B", "training_tokens": "3.6B", "price": 2}
    told = assuming(facts, training={"mfu": 0.5, "peak_tflops": 12})
    assert mid(told, "Training", RATE, "tokens/s") == pytest.approx(1_000)
    assert mid(told, "Training", "GPU-hours", "h") == pytest.approx(1_000)
    assert mid(told, "Training", "the whole run", "$") == pytest.approx(2_000)


def test_energy_is_joules_provisioned_and_cents():
    energy = {"kw_per_gpu": 1.73, "usd_per_kwh": 0.08}
    told = assuming({"tokens_per_s": 1_000}, energy=energy)
    assert mid(told, "Energy", "provisioned", "J/token") == pytest.approx(1.73)
    assert mid(told, "Energy", "electricity, provisioned", "$/M tokens") == near(0.0384)


# Sums.


@given(servings, positive, shares, st.floats(1, 2))
def test_input_cached_and_output_cost_add_up_to_the_bill(served, price, used, overhead):
    bill = split_bill(served, price, used, overhead)
    hours = (served.prefill_gpu_s + served.decode_gpu_s) / 3600
    assert sum(bill) == pytest.approx(price * overhead * hours / used)


@given(servings, positive)
def test_a_cached_token_costs_its_weight_of_a_computed_one(served, price):
    bill = split_bill(served, price)
    computed = bill.computed_usd / served.computed_tokens
    cached = computed * served.cached_weight * served.cached_tokens
    assert bill.cached_usd == pytest.approx(cached)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=6))
def test_whole_micro_dollars_add_up_to_the_rounded_sum(parts):
    whole = in_micro_dollars(parts)
    assert sum(whole) == round(sum(part * 10**6 for part in parts))
    assert all(abs(a - b * 10**6) <= 1 for a, b in zip(whole, parts, strict=True))


# What must hold.


@given(positive, positive, positive, shares)
def test_a_dearer_hour_is_never_a_cheaper_token(price, more, rate, used):
    dearer = usd_per_million_tokens(price + more, rate, used)
    assert dearer >= usd_per_million_tokens(price, rate, used)


@given(positive, positive, shares)
def test_twice_the_speed_at_the_same_utilisation_halves_the_cost(price, rate, used):
    once, twice = (usd_per_million_tokens(price, r, used) for r in (rate, 2 * rate))
    assert once == pytest.approx(2 * twice)


@given(
    st.lists(st.integers(0, 10**5), min_size=1, max_size=8).filter(any),
    st.integers(1, 10**6),
    st.integers(1, 16),
    st.integers(10, 20),
)
@settings(max_examples=200)
def test_the_gpus_of_the_peak_are_the_fewest_whole_replicas(demand, rate, of_replica, tenths):
    replicas = Replicas(gpus_per_replica=of_replica, headroom=tenths / 10)
    fleet = size_fleet(demand, rate, replicas)
    # In whole numbers, which have no rounding.
    needed = -(-max(demand) * tenths // (rate * of_replica * 10))
    assert fleet.gpus == max(needed, 1) * of_replica
    assert 0 < fleet.steady_utilisation <= fleet.scaled_utilisation * (1 + 1e-12)
    assert fleet.scaled_utilisation <= 1 + 1e-12


def test_rounding_adds_no_replica():
    # 3 * 1.1 is a little more than 3.3 as floating-point numbers.
    assert size_fleet([3], 3.3, Replicas(headroom=1.1)).gpus == 1


def test_a_fleet_keeps_its_floor_and_pays_for_cold_starts():
    replicas = Replicas(gpus_per_replica=2, cold_start_s=1800)
    fleet = size_fleet([0, 900, 100], 100, replicas)
    # Replicas of 200 tokens/s: 1, 5 and 1; four starts of half an hour each.
    assert fleet.gpus == 10
    assert fleet.steady_gpu_hours == 30
    assert fleet.scaled_gpu_hours == (1 + 5 + 1 + 2) * 2
    assert fleet.used_gpu_hours == 10


def test_an_api_breaks_even_where_its_bill_is_that_of_the_gpus():
    told = assuming({"price": 2, "gpus": 8, "api_price": 4})
    # 8 GPUs for 730 hours at $2 are $11,680.
    assert mid(told, "Against an API", "break-even", "tokens/month") == 2_920_000_000


def test_an_own_gpu_costs_capital_operation_and_electricity():
    plain = Owning(capex_usd_per_gpu=35_040, life_years=4)
    assert owned_usd_per_gpu_hour(plain, Energy()) == 1
    half = Owning(capex_usd_per_gpu=35_040, life_years=4, availability=0.5)
    assert owned_usd_per_gpu_hour(half, Energy()) == 2
    run = Owning(capex_usd_per_gpu=35_040, life_years=4, opex_usd_per_gpu_year=876)
    energy = Energy(kw_per_gpu=2, pue=1.5, usd_per_kwh=0.1)
    assert owned_usd_per_gpu_hour(run, energy) == pytest.approx(1 + 0.1 + 0.3)


def test_interest_spreads_capital_by_the_recovery_factor():
    owned = Owning(capex_usd_per_gpu=8_760, life_years=2, interest_per_year=0.1)
    # 0.1 * 1.21 / 0.21 of the capital each year.
    assert owned_usd_per_gpu_hour(owned, Energy()) == pytest.approx(0.121 / 0.21)


@pytest.mark.parametrize("rate", [1e-20, 1e-150])
@pytest.mark.parametrize("years", [0.01, 0.5, 2])
def test_next_to_no_interest_is_none(rate, years):
    owned, plain = (
        owned_usd_per_gpu_hour(
            Owning(capex_usd_per_gpu=1, life_years=years, interest_per_year=r), Energy()
        )
        for r in (rate, 0)
    )
    assert owned == pytest.approx(plain, rel=1e-12)


def test_interruptions_are_paid_as_lost_hours():
    spot = Spot(interruptions_per_hour=0.1, restart_hours=0.5)
    assert math.isclose(interrupted_usd_per_gpu_hour(2, spot), 2.1)


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
    assert price.usd_per_gpu_hour == Band(1, 2, 6)
    assert (price.oldest, price.newest) == (date(2026, 11, 1), date(2026, 11, 9))


def test_a_gpu_without_a_price_is_answered_with_all_names_the_nearest_first():
    with pytest.raises(KprofError, match="H1000") as refused:
        price_of([quote("H100"), quote("H200"), quote("L4")], "H1000", "on-demand")
    assert "H100; H200; L4" in refused.value.fix


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


# Facts that have figures under every topic but energy and spot.
ALL = {
    "price": 2.0,
    "tokens_per_s": 5_000,
    "tokens_per_month": 10**11,
    "gpus": 8,
    "demand": [3_000, 9_000, 21_000],
    "speedup": 1.3,
    "fee": 5_000.0,
    "api_price": 4.0,
    "tokens_per_step": 1e5,
    "step_s": 0.5,
    "active_parameters": 8e9,
    "training_tokens": 1e12,
}


@pytest.mark.parametrize("more", [{"price": 3.0}, {"overhead": 1.5}])
def test_all_dollars_grow_with_the_price_and_the_overhead_and_nothing_else_does(more):
    told = assuming(ALL, overhead=1.0)
    facts = ALL | {name: value for name, value in more.items() if name in ALL}
    dearer = assuming(facts, overhead=more.get("overhead", 1.0))
    assert len(told["figures"]) == len(dearer["figures"]) > 20
    for before, after in zip(told["figures"], dearer["figures"], strict=True):
        is_dollars = before["unit"].startswith("$") or before["name"] == "break-even"
        times = 1.5 if is_dollars else 1 / 1.5 if before["unit"] == "months" else 1.0
        for end in ("low", "mid", "high"):
            assert after[end] == pytest.approx(times * before[end]), (before["name"], end)


def test_a_fee_is_paid_back_after_as_many_months_as_it_is_of_what_is_saved_in_one():
    told = assuming(ALL)
    for topic in ("Gain of a token", "Gain in cash"):
        saved, months = (
            figures(told, topic)[name, unit]
            for name, unit in (("saved", "$/month"), ("paid back after", "months"))
        )
        assert months["mid"] * saved["mid"] == pytest.approx(5_000)
        assert months["low"] * saved["high"] == pytest.approx(5_000)


def test_a_faster_token_is_cheaper_by_the_speed_up_on_the_same_gpu():
    assert mid(assuming(ALL), "Gain of a token", "a token gets cheaper by", "times") == 1.3


def test_gpus_serve_at_most_the_tokens_that_they_make_in_a_month():
    most = mid(assuming(ALL), "Against an API", "most that they serve", "tokens/month")
    assert most == pytest.approx(5_000 * 8 * 730 * 3_600)


def test_a_speed_up_without_a_price_is_a_ratio_and_asks_for_the_price():
    found = assuming({"tokens_per_s": 5000, "speedup": 1.5, "tokens_per_month": 10**9})
    assert figures(found, "Gain of a token")["a token gets cheaper by", "times"]["mid"] == 1.5
    assert len(figures(found, "Gain of a token")) == 1
    asked = {one["topic"]: tuple(one["give"]) for one in found["missing"]}
    assert asked["Gain of a token, in dollars"] == ("--gpu or --price",)


def test_a_speed_up_without_tokens_per_second_saves_no_dollars():
    found = assuming({"price": 2.0, "speedup": 1.5, "demand": [100.0]})
    assert "Gain in cash" not in {one["topic"] for one in found["figures"]}
    asked = {one["topic"]: tuple(one["give"]) for one in found["missing"]}
    assert asked["Gain in cash"] == ("--tokens-per-s",)
