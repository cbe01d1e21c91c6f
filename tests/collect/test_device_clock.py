"""A GPU's clock that puts activities before their launches is moved, by as little as that takes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.collect.device_clock import TOLERANCE_NS, on_the_hosts_clock
from kprof.opened import read
from tests.quantities import quantities_in
from tests.traces import trace_of

MS, US = 10**6, 10**3
SPAN_NS = 500 * MS


def activities(start_ns, first=0, **changes):
    """Return activities of 3 µs, which launches of these numbers made."""
    times = ({"start_ns": int(start), "duration_ns": 3 * US} for start in start_ns)
    return [
        {**one, "correlation": number, **changes} for number, one in enumerate(times, start=first)
    ]


def launches(launch_ns):
    """Return calls of 4 µs that launch activities."""
    what = {"kind": "runtime", "name": "cudaLaunchKernel", "duration_ns": 4 * US}
    return [
        {**what, "start_ns": int(launch), "correlation": number}
        for number, launch in enumerate(launch_ns)
    ]


def launched(launch_ns, start_ns):
    return trace_of(*activities(start_ns), ranges=launches(launch_ns))


def drawn(seed, number=400):
    """Return launches, and when their activities truly begin: some at once, others queue."""
    generator = np.random.default_rng(seed)
    launch_ns = np.sort(generator.integers(0, SPAN_NS, number)) + 10**18
    waits_ns = generator.exponential(300 * US, number) * (generator.random(number) < 0.5)
    return launch_ns, launch_ns + 5 * US + waits_ns.astype(int)


def starts(trace):
    return trace.kernels["start_ns"].to_numpy()


def test_a_clock_that_contradicts_nothing_is_left_alone():
    trace = launched(*drawn(0))
    assert on_the_hosts_clock(trace) is trace


def test_what_rounding_does_is_no_contradiction():
    launch_ns, start_ns = drawn(0)
    trace = launched(launch_ns, np.minimum(start_ns, launch_ns) - TOLERANCE_NS)
    assert on_the_hosts_clock(trace) is trace


@given(
    seed=st.integers(0, 10**6),
    offset_ns=st.integers(50 * US, 5_000 * US),
    drift=st.floats(-5e-4, 5e-4),
)
def test_nothing_begins_before_its_launch_and_little_else_changes(seed, offset_ns, drift):
    launch_ns, true_ns = drawn(seed)
    off_ns = offset_ns + (drift * (true_ns - true_ns.min())).astype(int)
    trace = launched(launch_ns, true_ns - off_ns)
    moved = on_the_hosts_clock(trace)
    assert (starts(moved) >= launch_ns).all()
    if off_ns.min() > 10 * US:
        # Half of the launches begin after 5 µs, which nobody can tell from the clock's offset.
        assert np.abs(starts(moved) - (true_ns - 5 * US)).max() <= 10 * US
    assert (moved.kernels["duration_ns"] == 3 * US).all()
    assert moved.ranges is trace.ranges


def test_the_caveat_says_how_many_by_how_much_and_what_was_done():
    launch_ns = np.arange(0, 100 * MS, MS)
    moved = on_the_hosts_clock(launched(launch_ns, launch_ns - 40 * US))
    (caveat,) = moved.meta.caveats
    told = ["100", "100", "0", "40 µs", "40", "40 µs"]
    assert quantities_in(caveat.text)[: len(told)] == told
    assert moved.meta.counts["early_activities"] == 100


def test_work_that_queues_up_moves_nothing_back():
    launch_ns = np.arange(0, 100 * MS, MS)
    queued_ns = np.linspace(0, 50 * MS, 100).astype(int)
    early_ns = launch_ns + queued_ns - 30 * US
    moved = on_the_hosts_clock(launched(launch_ns, early_ns))
    added = starts(moved) - early_ns
    assert added.min() >= 0
    assert added.max() == 30 * US


def test_a_single_activity_is_moved_to_its_launch():
    moved = on_the_hosts_clock(launched([MS], [MS - 70 * US]))
    assert starts(moved).tolist() == [MS]


def test_a_drift_that_no_clock_has_is_taken_for_an_offset():
    launch_ns = np.arange(0, 100 * MS, MS)
    early_ns = launch_ns - np.linspace(10 * US, 10 * MS, 100).astype(int)
    moved = on_the_hosts_clock(launched(launch_ns, early_ns))
    added = starts(moved) - early_ns
    assert (starts(moved) >= launch_ns).all()
    assert added.max() - added.min() <= 1e-3 * 100 * MS + 1


@pytest.mark.parametrize("other", [{"device": 1}, {"activity": "host"}])
def test_others_are_left_where_they_are(other):
    launch_ns = np.arange(0, 100 * MS, MS)
    early = activities(launch_ns - 40 * US)
    late = activities(launch_ns + 9 * US, first=1_000, **other)
    trace = trace_of(*early, *late, ranges=launches(launch_ns))
    moved = on_the_hosts_clock(trace)
    assert (starts(moved)[:100] == launch_ns).all()
    assert (starts(moved)[100:] == starts(trace)[100:]).all()


def test_counters_move_along_and_what_the_host_sampled_stays():
    launch_ns = np.arange(0, 100 * MS, MS)
    counted = {"rank": 0, "time_ns": 20 * MS, "source": "counters", "quantity": "dram_read_bytes"}
    trace = trace_of(
        *activities(launch_ns - 40 * US),
        ranges=launches(launch_ns),
        samples=[counted, {"rank": 0, "time_ns": 20 * MS}],
    )
    moved = on_the_hosts_clock(trace)
    assert moved.samples["time_ns"].tolist() == [20 * MS + 40 * US, 20 * MS]


def test_how_many_were_early_is_counted_over_all_that_were_moved():
    launch_ns = np.arange(0, 100 * MS, MS)
    first = activities(launch_ns[:60] - 40 * US)
    second = activities(launch_ns[60:] - 70 * US, first=60, device=1)
    moved = on_the_hosts_clock(trace_of(*first, *second, ranges=launches(launch_ns)))
    assert moved.meta.counts["early_activities"] == 100


def test_launches_of_another_process_move_nothing():
    launch_ns = np.arange(0, 100 * MS, MS)
    trace = launched(launch_ns + 5_000 * MS, launch_ns)
    moved = on_the_hosts_clock(trace)
    assert (starts(moved) == launch_ns).all()
    (caveat,) = moved.meta.caveats
    assert quantities_in(caveat.text)[-1] == "5,000,000 µs"


def test_of_two_launches_with_one_number_neither_tells():
    launch_ns = np.arange(0, 100 * MS, MS)
    calls = [*launches(launch_ns), *launches(launch_ns + 80 * MS)]
    trace = trace_of(*activities(launch_ns + 9 * US), ranges=calls)
    assert on_the_hosts_clock(trace) is trace


def with_strays(launch_ns, start_ns, stray_ns, early_ns):
    """Return a trace with activities in other streams, so much before launches of their numbers."""
    first = len(launch_ns)
    strays = activities(stray_ns, first=first, stream=20)
    calls = launches([*launch_ns, *(np.array(stray_ns) + early_ns)])
    return trace_of(*activities(start_ns), *strays, ranges=calls)


@pytest.mark.parametrize("early_ns", [[25 * US], [200 * MS], [5_000 * MS], [40 * MS, 90 * MS, US]])
def test_launches_of_others_among_hundreds_that_fit_move_nothing(early_ns):
    launch_ns = np.arange(0, 300 * MS, MS)
    stray_ns = [50 * MS + 500 * US, 70 * MS + 500 * US, 80 * MS + 500 * US][: len(early_ns)]
    trace = with_strays(launch_ns, launch_ns + 10 * US, stray_ns, early_ns)
    assert (starts(on_the_hosts_clock(trace)) == starts(trace)).all()


def test_a_launch_of_another_is_not_used_counted_and_said():
    launch_ns = np.arange(0, 300 * MS, MS)
    trace = with_strays(launch_ns, launch_ns + 10 * US, [50 * MS + 500 * US], 200 * MS)
    found = on_the_hosts_clock(trace)
    assert found.kernels["correlation"].isna().tolist() == [False] * 300 + [True]
    assert found.meta.counts["disbelieved_launches"] == 1
    assert "early_activities" not in found.meta.counts
    (caveat,) = found.meta.caveats
    assert quantities_in(caveat.text)[:4] == ["1", "301", "0", "200,000 µs"]


@pytest.mark.parametrize("stray_ns", [315 * US, 360 * US, 450 * US, 200 * MS])
def test_a_clock_that_is_off_drifts_for_no_single_launch(stray_ns):
    launch_ns = np.arange(0, 300 * MS, MS)
    trace = with_strays(launch_ns, launch_ns - 300 * US, [150 * MS + 500 * US], stray_ns)
    moved = on_the_hosts_clock(trace)
    added = starts(moved) - starts(trace)
    assert added.max() == added.min()
    assert 300 * US <= added.max() <= 320 * US


def test_a_clock_that_jumps_keeps_the_times_between_activities():
    launch_ns = np.arange(0, 200 * MS, MS)
    start_ns = launch_ns + np.where(launch_ns < 100 * MS, -52 * US, 8 * US)
    moved = on_the_hosts_clock(launched(launch_ns, start_ns))
    assert (starts(moved) - start_ns == 52 * US).all()


def test_of_work_that_queues_up_behind_each_wait_the_few_first_tell_the_clock():
    in_step = np.arange(200)
    launch_ns = np.concatenate([step * 100 * MS + in_step * 5 * US for step in range(5)])
    true_ns = np.concatenate([step * 100 * MS + 6 * US + in_step * 400 * US for step in range(5)])
    off_ns = 300 * US
    trace = launched(launch_ns, true_ns - off_ns)
    moved = on_the_hosts_clock(trace)
    assert (starts(moved) == true_ns - 6 * US).all()
    assert moved.kernels["correlation"].notna().all()


def test_times_that_are_damaged_are_left_to_be_refused():
    trace = launched([0, 2**62], [-(2**62), 2**62])
    assert on_the_hosts_clock(trace) is trace


def test_opened_runs_are_moved(tmp_path):
    def event(number, category, start_us, **place):
        about = {"ph": "X", "cat": category, "name": "kernel", "ts": start_us, "dur": 3}
        return {**about, **place, "args": {"correlation": number, "device": 0, "stream": 7}}

    calls = [event(n, "cuda_runtime", 1e3 * n, pid=1, tid=1) for n in range(100)]
    kernels = [event(n, "kernel", 1e3 * n - 200, pid=0, tid=7) for n in range(100)]
    path = tmp_path / "early.json"
    path.write_text(json.dumps({"traceEvents": [*calls, *kernels]}))
    trace = read([path])
    begins = trace.kernels["start_ns"] - trace.kernels["start_ns"].min()
    assert begins.tolist() == [MS * n for n in range(100)]
    assert trace.meta.counts["early_activities"] == 100
    assert quantities_in(trace.meta.caveats[-1].text)[:3] == ["100", "100", "0"]
