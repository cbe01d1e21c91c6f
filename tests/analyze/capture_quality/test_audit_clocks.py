"""The audit of clocks: of host and GPU, and of ranks."""

from dataclasses import replace

import pytest

from kprof.analyze.passes import analyze
from kprof.collect.merge import merge
from kprof.opened import read
from tests.analyze.capture_quality.audited import HOST_AND_GPU, check, names_of
from tests.collectives import recordings
from tests.kineto_files import kernel, launch, write
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, measured

SECOND = 1_000_000_000


def opened(folder, *early_us):
    """Open a file of launches a millisecond apart, whose kernels begin so much before them."""
    numbers = range(1, len(early_us) + 1)
    calls = [launch(ts=1e3 * n, args={"correlation": n}) for n in numbers]
    kernels = [
        kernel(ts=1e3 * n - early, args={"correlation": n})
        for n, early in zip(numbers, early_us, strict=True)
    ]
    return measured(read([write(folder, *calls, *kernels)]))


def test_kernels_that_begin_after_their_launches_show_clocks_that_agree(tmp_path):
    found = check(opened(tmp_path, -5, -8, -5), HOST_AND_GPU)
    assert (found.verdict, quantities_in(found.evidence)) == ("good", ["0", "3"])


def test_what_rounding_does_to_times_is_no_clock(tmp_path):
    assert check(opened(tmp_path, 1, -5), HOST_AND_GPU).verdict == "good"


def test_kernels_that_were_put_behind_their_launches_limit_what_lies_beside_the_host(tmp_path):
    found = check(opened(tmp_path, 200, 180, -9), HOST_AND_GPU)
    assert (found.verdict, quantities_in(found.evidence)) == ("limited", ["2", "3"])
    assert "corrected" in found.evidence


def test_a_launch_that_is_anothers_limits_though_the_clocks_agree(tmp_path):
    found = check(opened(tmp_path, *[-5] * 30, 200), HOST_AND_GPU)
    assert (found.verdict, quantities_in(found.evidence)) == ("limited", ["0", "30", "1"])
    assert "wrong launch" in found.evidence


def test_without_launches_nothing_tells_whether_clocks_agree(tmp_path):
    trace = measured(read([write(tmp_path, kernel(), kernel(ts=900))]))
    assert check(trace, HOST_AND_GPU).verdict == "unknown"


def test_of_two_launches_with_one_number_the_last_before_the_kernel_tells_of_the_clock(tmp_path):
    calls = [launch(ts=ts) for ts in (10, 5_000)]
    trace = measured(read([write(tmp_path, *calls, kernel(ts=20))]))
    assert check(trace, HOST_AND_GPU).verdict == "good"


def test_one_rank_has_no_clocks_to_compare():
    assert "Clocks of ranks" not in names_of(analyzed_trace_of({}))


def test_ranks_with_unchecked_clocks_are_unknown():
    trace = analyzed_trace_of({}, {"rank": 1}, num_ranks=2)
    assert check(trace, "Clocks of ranks").verdict == "unknown"


@pytest.mark.parametrize(("ahead_ns", "verdict"), [(0, "good"), (2 * SECOND, "limited")])
def test_clocks_of_ranks_are_graded_by_what_their_collectives_tell(ahead_ns, verdict):
    trace = analyze(merge(recordings([[0, 1]], [0, ahead_ns]), "ranks"))
    assert check(trace, "Clocks of ranks").verdict == verdict
    reworded = replace(trace, meta=replace(trace.meta, clocks="other words", caveats=()))
    assert check(reworded, "Clocks of ranks").verdict == verdict
