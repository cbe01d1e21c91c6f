"""The headline shares of an analyzed trace."""

import pytest

from kprof.analyze.utilisation import measure_utilisation
from tests.traces import analyzed_trace_of

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
