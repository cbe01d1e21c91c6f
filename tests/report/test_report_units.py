"""Numbers become text in one way everywhere."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.findings.claims import in_words
from kprof.errors import three_digits
from kprof.report.units import (
    format_amount,
    format_count,
    format_range,
    format_share,
    format_time,
    or_missing,
    round_shares,
    shorten,
)

TIMES = [
    (0, "0 ns"),
    (999, "999 ns"),
    (999.6, "1 µs"),
    (999_499, "999 µs"),
    (999_500, "1 ms"),
    (999_624_000, "1 s"),
    (1_000, "1 µs"),
    (12_345, "12.3 µs"),
    (99_960, "100 µs"),
    (1_234_000_000_000, "1,234 s"),
    (None, "—"),
    (float("nan"), "—"),
]


def test_a_time_has_three_digits_and_its_unit():
    assert [format_time(time_ns) for time_ns, _ in TIMES] == [text for _, text in TIMES]


def test_a_rate_has_a_decimal_prefix():
    assert format_amount(1.979e15, "FLOP/s") == "1.98 PFLOP/s"
    assert format_amount(4.8e12, "B/s") == "4.8 TB/s"
    assert format_amount(None, "B/s") == "—"


def test_a_tiny_share_is_not_shown_as_nothing():
    assert format_share(0.0004) == "0.04 %"
    assert format_share(0.00001) == "< 0.01 %"
    assert format_share(0.0) == "0.0 %"
    assert format_share(None) == "—"


@pytest.mark.parametrize("time_ns", [999.6, 999_500, 999_624_000, -999_624_000])
def test_claims_round_up_to_the_next_unit_too(time_ns):
    assert in_words(time_ns).lstrip("-") in {"1 µs", "1 ms", "1 s"}


def test_an_interval_whose_ends_read_the_same_is_one_figure():
    assert format_range(format_time(6_590_100), format_time(6_594_900)) == "6.59 ms"
    assert format_range(format_time(6_590_100), format_time(6_595_100)) == "6.59 ms to 6.6 ms"


def test_one_thing_is_singular():
    assert format_count(1, "activity", "activities") == "1 activity"
    assert format_count(1200, "step") == "1,200 steps"


def test_shares_shown_add_up_to_a_hundred():
    assert round_shares([1, 1, 1]) == ["33.4 %", "33.3 %", "33.3 %"]


@given(st.lists(st.integers(0, 10**15), min_size=1).filter(any))
def test_shares_of_anything_add_up_to_a_hundred(amounts):
    tenths = [round(10 * float(text.removesuffix(" %"))) for text in round_shares(amounts)]
    assert sum(tenths) == 1000
    assert min(tenths) >= 0


def test_a_name_is_cut_in_its_middle():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 7) == "abcd…jk"


def test_only_a_missing_cell_is_a_dash():
    assert [or_missing(cell) for cell in ("a", 7, None, pd.NA, float("nan"))] == [
        "a",
        "7",
        "—",
        "—",
        "—",
    ]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.012345, "0.0123"),
        (12.345, "12.3"),
        (99.96, "100"),
        (5_479.6, "5,480"),
        (-1e6, "-1,000,000"),
    ],
)
def test_a_number_of_three_digits_never_has_an_exponent(value, written):
    assert three_digits(value) == written
