"""Energy and throttling are read from samples, or are not known."""

from __future__ import annotations

import numpy as np

from kprof.analyze.energy import (
    Series,
    around,
    energy_between,
    readings,
    thin_out,
    throttle_shares,
)
from tests.traces import trace_of


def series(*points) -> Series:
    time_ns, value = zip(*points, strict=True)
    return Series(np.array(time_ns, dtype=np.int64), np.array(value, dtype=np.float64))


COUNTER = series((0, 5000.0), (100, 6000.0), (200, 7000.0), (300, 9000.0))


def test_readings_are_of_one_quantity_and_device_in_the_order_of_time():
    trace = trace_of(
        samples=[
            {"time_ns": 9, "value": 2.0},
            {"time_ns": 5, "value": 1.0},
            {"device": 1, "value": 7.0},
            {"quantity": "energy_mj"},
        ]
    )
    assert readings(trace.samples, "nvml", "power_w", 0).value.tolist() == [1.0, 2.0]


def test_around_a_span_stand_its_readings_and_the_nearest_on_either_side():
    assert around(COUNTER, 110, 190).time_ns.tolist() == [100, 200]
    assert around(COUNTER, 150, 250).time_ns.tolist() == [100, 200, 300]


def test_beyond_the_last_reading_only_the_nearest_one_is_left():
    assert around(COUNTER, 900, 950).time_ns.tolist() == [300]
    assert around(COUNTER, -90, -50).time_ns.tolist() == [0]


def test_energy_is_the_rise_of_the_counter_in_joules():
    assert energy_between(COUNTER, 0, 250) == 3.0


def test_energy_of_a_span_with_too_few_readings_is_not_known():
    assert energy_between(COUNTER, 110, 290) is None


def test_energy_before_the_first_reading_is_not_known():
    assert energy_between(COUNTER, -1, 250) is None


def test_each_throttle_reason_has_its_share_of_the_samples():
    reasons = series((0, 0.0), (1, 4.0), (2, 4.0 + 64.0), (3, 2.0**20))
    shares = throttle_shares(reasons)
    assert (shares.pop("power cap"), shares.pop("hardware thermal slowdown")) == (0.5, 0.25)
    assert list(shares.values()) == [0.25]


def test_thinning_averages_or_keeps_peaks():
    curve = series(*((i, float(i % 4)) for i in range(8)))
    assert thin_out(curve, 2).value.tolist() == [1.5, 1.5]
    assert thin_out(curve, 2, keep_peaks=True).value.tolist() == [3.0, 3.0]
    assert thin_out(curve, 8) is curve
