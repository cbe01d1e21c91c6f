"""Microseconds with decimals become the nanoseconds that were written."""

from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.collect.readers.kineto.columns import (
    EXACT_BELOW_US,
    LIMIT_US,
    NeedsTextError,
    NotATimeError,
    exact_ns,
)

PARTS = st.tuples(
    st.integers(-(LIMIT_US - 1), LIMIT_US - 1), st.integers(0, 3), st.integers(0, 999)
)


def as_text(part):
    whole, num_decimals, fraction = part
    return str(whole) + (f".{fraction:03}"[: num_decimals + 1] if num_decimals else "")


def as_decimal_ns(text):
    return int((Decimal(text) * 1000).to_integral_value(rounding=ROUND_HALF_EVEN))


def through_json(texts):
    """Decode as the reader does: doubles first, the text only when they are not exact."""
    document = "[" + ",".join(texts) + "]"
    try:
        return exact_ns(msgspec.json.decode(document))
    except NeedsTextError:
        return exact_ns(msgspec.json.decode(document, type=list[Decimal]))


@given(st.lists(PARTS.map(as_text), max_size=20))
def test_every_time_equals_decimal_arithmetic_on_its_text(texts):
    assert through_json(texts).tolist() == [as_decimal_ns(text) for text in texts]


@given(st.lists(st.integers(0, int(EXACT_BELOW_US) * 1000 - 1), min_size=1, max_size=20))
def test_doubles_are_exact_to_the_nanosecond_below_their_limit(times_ns):
    texts = [f"{ns // 1000}.{ns % 1000:03}" for ns in times_ns]
    assert exact_ns([float(text) for text in texts]).tolist() == times_ns


@given(st.lists(st.integers(-LIMIT_US, LIMIT_US), max_size=20))
def test_whole_microseconds_are_multiplied_as_integers(times_us):
    assert exact_ns(times_us).tolist() == [us * 1000 for us in times_us]


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("others", [[], [1], [2.5, 0]])
def test_a_truth_value_is_no_time(value, others):
    with pytest.raises(NotATimeError):
        exact_ns([*others, value])


def test_a_large_fraction_is_refused_as_a_double_and_exact_as_text():
    with pytest.raises(NeedsTextError):
        exact_ns([1712867402348256.123])
    assert exact_ns([Decimal("1712867402348256.123")]).tolist() == [1712867402348256123]


def test_a_fourth_decimal_is_rounded_to_the_nanosecond():
    assert exact_ns([0.0016, Decimal("0.0016")]).tolist() == [2, 2]


@pytest.mark.parametrize(
    "value", [None, "soon", [1], float("nan"), float("inf"), Decimal("NaN"), 2**63, 1e300]
)
def test_what_is_no_time_is_named_by_its_position(value):
    with pytest.raises(NotATimeError) as error:
        exact_ns([1.5, value])
    assert error.value.position == 1
