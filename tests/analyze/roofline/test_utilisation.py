"""The headline shares of an analyzed trace."""

from dataclasses import replace

import pytest

from kprof.analyze.roofline.utilisation import measure_utilisation
from kprof.device import DERIVED, OF_ATTRIBUTES
from kprof.trace import Gpu
from tests.traces import ROUND_DEVICE, analyzed_trace_of

# In 1 us the round device makes 1e8 FLOPs in bf16 and moves 1e6 bytes.
GEMM = {"duration_ns": 500, "dtype": "bf16", "flops": 20_000_000, "bytes": 100_000, "limit_ns": 200}


def shares(*kernels):
    headline = measure_utilisation(analyzed_trace_of(*kernels))
    return headline.mfu.value, headline.mbu.value, headline.roofline.value, headline.busy.value


def test_shares_are_of_the_time_from_first_to_last_activity():
    assert shares(GEMM, {**GEMM, "start_ns": 500}) == pytest.approx((0.4, 0.2, 0.4, 1.0))


def test_work_that_checkpointing_did_again_takes_time_but_is_not_useful():
    again = {**GEMM, "start_ns": 500, "recomputed": True}
    assert shares(GEMM, again) == pytest.approx((0.2, 0.1, 0.2, 1.0))


def test_mfu_and_mbu_are_of_the_datasheet_where_the_ceilings_were_measured():
    # A ceiling of half the round device's; an H200 moves 4.8 TB/s and has 989 TFLOP/s in bf16.
    measured = replace(ROUND_DEVICE, flops_per_s={"bf16": 50e12}, is_measured=True)
    known = analyzed_trace_of(GEMM, gpus=(Gpu(0, "NVIDIA H200"),), device=measured)
    unknown = analyzed_trace_of(GEMM, gpus=(Gpu(0, "Round GPU"),), device=measured)
    headline = measure_utilisation(known)
    assert headline.mfu.value == pytest.approx(20e6 / (989.5e12 * 500e-9), rel=1e-3)
    assert headline.roofline.value == pytest.approx(0.4)
    assert measure_utilisation(unknown).mfu.value == pytest.approx(0.8)


@pytest.mark.parametrize("share", ["mfu", "mbu"])
def test_a_peak_that_follows_from_the_gpus_attributes_is_none_of_a_datasheet(share):
    device = replace(ROUND_DEVICE, source=OF_ATTRIBUTES)
    derived = getattr(measure_utilisation(analyzed_trace_of(GEMM, device=device)), share).basis
    listed = getattr(measure_utilisation(analyzed_trace_of(GEMM)), share).basis
    assert (DERIVED in derived, "datasheet" in derived) == (True, False)
    assert (DERIVED in listed, "datasheet" in listed) == (False, True)


def test_work_that_is_only_known_from_below_makes_the_shares_lower_bounds():
    from_below = {**GEMM, "start_ns": 500, "work_from": "bounds", "work_bound": "at least"}
    exact = measure_utilisation(analyzed_trace_of(GEMM, {**GEMM, "start_ns": 500}))
    bounded = measure_utilisation(analyzed_trace_of(GEMM, from_below))
    assert (exact.mfu.is_lower_bound, bounded.mfu.is_lower_bound) == (False, True)


def test_a_complex_product_counts_at_the_peak_of_its_parts():
    product = {**GEMM, "dtype": "complex64"}
    assert shares(product)[0] == pytest.approx(20e6 / (10e12 * 500e-9))


def test_what_is_unknown_of_a_kernel_adds_its_time_and_nothing_else():
    unknown = {"start_ns": 500, "duration_ns": 500}
    without_flops, without_bytes = ({**GEMM, name: None} for name in ("flops", "bytes"))
    assert shares(GEMM, unknown) == pytest.approx((0.2, 0.1, 0.2, 1.0))
    # Of a type without a peak the FLOPs count no more than those of no type.
    for other in ({"dtype": "int64"}, {"dtype": None}):
        assert shares(GEMM, {**GEMM, **unknown, **other}) == pytest.approx((0.2, 0.2, 0.4, 1.0))
        assert shares({**GEMM, **other})[0] is None
    assert shares(without_flops)[:2] == (None, pytest.approx(0.2))
    assert shares(without_bytes)[:2] == (pytest.approx(0.4), None)
    assert shares({**GEMM, "limit_ns": None})[2] is None
