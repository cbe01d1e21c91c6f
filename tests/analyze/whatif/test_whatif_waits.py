"""Who waits for whom in a replay: streams, events, threads, and a host that is held."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kprof.analyze.findings.one_offs import find_once
from kprof.analyze.passes import analyze
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import FASTER, REMOVED, WITHOUT, Change, Target
from kprof.analyze.whatif.dependencies import find_recorded
from kprof.analyze.whatif.predict import predict
from kprof.analyze.whatif.replay import ACROSS, WAIT
from tests.analyze.simulated import (
    BACKWARD,
    CALL_NS,
    END_OF_STEP,
    Do,
    Machine,
    faster,
    item,
    kernel,
    record,
    step_ns,
    synchronize,
    upload,
)
from tests.analyze.whatif.whatif_questions import GRAPHS, MM, NORM, ask, doubled
from tests.traces import trace_of


def test_a_wait_in_the_middle_keeps_the_launches_behind_it():
    program = [kernel("mm", 100_000), item(), kernel("norm", 40_000, host_ns=80_000)]
    found = ask(program, doubled(NORM), doubled(MM))
    assert found.predicted_step_ns == step_ns(faster(faster(program, "mm", 2), "norm", 2))


def test_a_stream_that_waits_for_another_follows_it():
    program = [
        kernel("mm", 90_000),
        kernel("norm", 30_000, stream=20, after=7),
        kernel("add", 10_000, after=20),
    ]
    found = ask(program, doubled(MM))
    assert found.predicted_step_ns == step_ns(faster(program, "mm", 2))
    assert found.predicted_step_ns == found.step_ns - 45_000


def test_work_hidden_behind_another_stream_gains_nothing():
    program = [kernel("norm", 50_000, stream=20), kernel("mm", 200_000), synchronize()]
    found = ask(program, doubled(NORM))
    assert found.predicted_step_ns == found.step_ns
    assert found.amdahl_step_ns == found.step_ns


def test_a_wait_for_a_stream_or_an_event_does_not_wait_for_other_streams():
    program = [
        kernel("norm", 300_000, stream=20),
        kernel("mm", 50_000),
        Do("synchronize"),
        kernel("mm", 500_000, host_ns=60_000),
    ]
    for what in ("Stream", "Event"):
        program[2] = synchronize(what)
        found = ask(program, doubled(NORM))
        assert found.predicted_step_ns == step_ns(faster(program, "norm", 2)) == found.step_ns
        assert ask(program, doubled(MM)).predicted_step_ns == step_ns(faster(program, "mm", 2))


def test_only_an_event_that_held_the_host_tells_what_it_stands_for():
    held, passed = (
        find_recorded(
            record([kernel("mm", 50_000), synchronize("Event", host_ns=host_ns)])
        ).replay()
        for host_ns in (0, 90_000)
    )
    assert (held.edges.kind == WAIT).sum() == 1
    assert (passed.edges.kind == WAIT).sum() == 0


@pytest.mark.parametrize("what", ["Stream", "Device"])
def test_a_wait_that_found_nothing_would_wait_for_slower_work(what):
    program = [
        kernel("norm", 20_000, stream=20),
        kernel("mm", 20_000),
        synchronize(what, host_ns=90_000),
        kernel("mm", 9_000),
    ]
    for name in ("norm", "mm"):
        found = ask(program, Change(FASTER, Target("kernel", name), 0.05))
        assert found.predicted_step_ns == step_ns(faster(program, name, 0.05))


@pytest.mark.parametrize(("what", "cause"), [("load", "data loading"), ("allocate", "allocator")])
def test_without_loading_or_allocating_the_host_has_that_time(what, cause):
    program = [kernel("mm", 9_000), Do(what, ns=80_000), kernel("mm", 9_000)]
    found = ask(program, Change(WITHOUT, cause=cause))
    assert found.predicted_step_ns == step_ns([program[0], Do("think"), program[2]])
    # No graph loads data, and none allocates.
    graphed = {"load": found.step_ns, "allocate": 2_000 + 17_000 + 9_000 + 220 + 9_000}
    assert ask(program, GRAPHS).predicted_step_ns == graphed[what]


def cycle(*parts, number=6):
    """Return a program of so many steps, each of these parts."""
    return [*parts, *((END_OF_STEP, *parts) * (number - 1))]


@pytest.mark.parametrize(("what", "cause"), [("load", "data loading"), ("allocate", "allocator")])
def test_the_first_wait_is_the_longest_where_nothing_was_queued_and_goes_as_well(what, cause):
    waits, work = Do(what, ns=1_000_000), [kernel("mm", 100_000)] * 4
    steps, others = cycle(waits, *work), cycle(Do("think"), *work)
    trace = analyze(Machine().run(steps))
    assert find_once(trace).ns[(trace.idle["cause"] == cause).to_numpy(bool)].sum() == 0
    found = predict([Change(WITHOUT, cause=cause)], find_baseline(trace))
    assert found.step_ns == round(step_ns(steps) / 6)
    truth_ns = step_ns(others) / 6
    assert found.predicted_step_ns == pytest.approx(truth_ns, rel=0.02)
    assert found.shortest_step_ns <= truth_ns <= found.longest_step_ns
    # In steps to come the device hides a part of the wait.
    steady_ns = step_ns(cycle(waits, *work, number=7)) - step_ns(steps)
    assert found.longest_step_ns == pytest.approx(found.step_ns - (steady_ns - truth_ns), rel=0.02)


@pytest.mark.parametrize(
    ("what", "cause"),
    [("load", "data loading"), ("allocate", "allocator"), ("think", "launch-bound")],
)
def test_a_host_that_spends_as_long_in_every_step_has_no_start_up(what, cause):
    work = [kernel("mm", 10_000)] * 4

    def once_ns(first_ns, later_ns):
        """Return the start-up of six steps of which the first has another wait."""
        hosts = [
            Do(what, host_ns=2_000 + ns) if what == "think" else Do(what, ns=ns)
            for ns in (first_ns, later_ns)
        ]
        steps = [hosts[0], *work, END_OF_STEP, *cycle(hosts[1], *work, number=5)]
        trace = analyze(Machine().run(steps))
        return find_once(trace).ns[(trace.idle["cause"] == cause).to_numpy(bool)].sum()

    assert once_ns(100_000, 100_000) == 0
    assert once_ns(900_000, 100_000) == pytest.approx(800_000, abs=1_000)


def test_a_copy_from_pinned_memory_holds_the_host_no_more():
    program = [kernel("mm", 9_000), upload(80_000, stream=20), kernel("mm", 9_000)]
    trace = analyze(Machine().run(program))
    found = predict([Change(WITHOUT, cause="pageable copy")], find_baseline(trace))
    # Two launches and the copy's begin; its call ends 1 µs before it, then comes the last launch.
    assert found.step_ns == 14_000 + 80_000 - 1_000 + 9_000 + 9_000
    # The copy itself still takes its time, on a stream of its own.
    assert found.predicted_step_ns == 14_000 + 80_000


def test_data_that_another_thread_loads_is_not_the_launching_threads_time():
    program = [kernel("mm", 9_000), Do("load", ns=80_000, thread=5), kernel("mm", 9_000)]
    found = ask(program, Change(WITHOUT, cause="data loading"))
    assert found.predicted_step_ns == found.step_ns


def test_what_one_thread_no_longer_loads_is_not_the_others_time():
    program = [
        kernel("mm", 9_000),
        Do("load", ns=80_000, thread=3),
        kernel("norm", 9_000, stream=20, thread=3),
        kernel("mm", 9_000),
    ]
    found = ask(program, Change(WITHOUT, cause="data loading"))
    assert found.predicted_step_ns == found.step_ns


def test_an_overlapping_kernel_never_begins_before_the_one_it_follows():
    names = (("add", 900_000), ("mm", 90_000), ("norm", 10_000))
    trace = record([kernel(name, ns, host_ns=0) for name, ns in names])
    start = trace.kernels["start_ns"] - [0, 0, 4_400]
    baseline = find_baseline(trace.with_kernels(start_ns=start))
    # The last begins 3 µs before the end of the one before, as long as that takes 3 µs.
    begin_ns = 7_000 + 900_000 + 1_400
    halved = predict([doubled(MM)], baseline)
    assert halved.predicted_step_ns == begin_ns + 45_000 - 3_000 + 10_000
    shortest = predict([Change(FASTER, MM, 900.0)], baseline)
    assert shortest.predicted_step_ns == begin_ns + 10_000


def test_the_backward_thread_goes_on_where_the_main_thread_stopped_and_back():
    program = [
        kernel("mm", 50_000),
        item(thread=BACKWARD),
        kernel("norm", 30_000, host_ns=40_000),
    ]
    found = ask(program, doubled(MM))
    assert found.predicted_step_ns == step_ns(faster(program, "mm", 2)) == found.step_ns - 25_000


def test_another_thread_begins_after_what_came_before_it():
    program = [kernel("mm", 50_000), item(), kernel("norm", 30_000, thread=3)]
    found = ask(program, doubled(MM))
    assert found.predicted_step_ns == step_ns(faster(program, "mm", 2)) == found.step_ns - 25_000


def test_a_launch_into_a_full_queue_was_held_by_the_device():
    program = [*(kernel("mm", 60_000, host_ns=0) for _ in range(2_400)), item(), kernel("norm", 9)]
    found = ask(program, doubled(MM))
    truth = step_ns(faster(program, "mm", 2))
    assert abs(found.predicted_step_ns - truth) < 0.001 * truth


def test_a_late_begin_on_its_own_stream_stays_unexplained():
    trace = record([kernel("mm", 90_000, host_ns=0) for _ in range(3)])
    late = trace.kernels["start_ns"] + [0, 0, 4_000]
    assert find_baseline(trace.with_kernels(start_ns=late)).uncertainty_ns == 4_000


def test_without_its_waits_the_host_runs_ahead():
    program = [
        kernel("mm", 100_000),
        synchronize(),
        kernel("mm", 100_000, host_ns=60_000),
    ]
    found = predict(
        [Change(WITHOUT, cause="synchronization")], find_baseline(analyze(Machine().run(program)))
    )
    assert found.step_ns == 114_000 + 60_000 + 7_000 + 100_000
    # Launch, its call, the wait that finds nothing, 60 µs of Python: over before the first kernel.
    # No more is saved than is recoverable: what any two kernels need between them stays.
    in_a_row_ns = 9_000 + 100_000 + 1_400 + 100_000
    assert in_a_row_ns <= found.predicted_step_ns <= in_a_row_ns + 100


def test_the_least_that_a_wait_saves_is_what_the_next_one_leaves():
    waits = [kernel("mm", 100_000), synchronize()]
    late = kernel("mm", 100_000, host_ns=60_000)
    change = Change(WITHOUT, cause="synchronization")
    several, alone = (
        predict([change], find_baseline(analyze(Machine().run([*program, late]))))
        for program in ([*waits, late, synchronize()], waits)
    )
    # The last wait of several stays, and so the time for which the device waits after it.
    assert several.predicted_step_ns + 30_000 < several.longest_step_ns < several.step_ns
    # A single wait of a step is followed by that of the next one, and goes.
    assert alone.longest_step_ns == alone.predicted_step_ns


def test_removing_what_no_recorded_host_launched_may_save_nothing():
    rows = [{"name": "mm", "start_ns": at, "duration_ns": 1_000} for at in (0, 50_000)]
    baseline = find_baseline(analyze(trace_of(*rows)))
    removed, faster = (
        predict([Change(what, Target("kernel", "mm"), 2.0)], baseline) for what in (REMOVED, FASTER)
    )
    # Not all of the window of 51 µs: its gap is not known to go.
    assert (removed.shortest_step_ns, removed.longest_step_ns) == (49_000, 51_000)
    assert (faster.shortest_step_ns, faster.longest_step_ns) == (50_720, 51_000)


@pytest.mark.parametrize("late_ns", [-500, 0, 500])
def test_a_wait_at_the_edge_of_a_step_stays_a_wait(late_ns):
    steps = cycle(synchronize(host_ns=1_000), *[kernel("mm", 100_000)] * 4, number=5)
    trace = Machine().run(steps)
    calls = trace.ranges["name"] == "cudaDeviceSynchronize"
    begins = trace.ranges["start_ns"].where(calls)
    # Each step but the first begins at its call, or a clock's resolution beside it.
    starts, ends = trace.ranges["start_ns"].copy(), trace.ranges["start_ns"].copy()
    ends += trace.ranges["duration_ns"]
    marks = trace.ranges.index[trace.ranges["kind"] == "step"]
    for before, after, begin in zip(marks, marks[1:], begins.dropna().iloc[1:], strict=False):
        ends[before] = starts[after] = int(begin) + late_ns
    trace = trace.with_ranges(start_ns=starts, duration_ns=ends - starts)
    baseline = find_baseline(analyze(trace))
    assert baseline.error == 0
    gained = baseline.step_ns - predict([doubled(MM)], baseline).predicted_step_ns
    assert gained == pytest.approx(4 * 50_000, rel=0.02)


def edges_across(program, streams):
    """Return the edges between streams as rows of activities, and their lags."""
    replay = find_recorded(record(program)).replay(streams)
    edges, first = replay.edges, replay.first_activity
    of = edges.kind == ACROSS
    pairs = zip(edges.source[of] - first, edges.target[of] - first, edges.lag_ns[of], strict=True)
    return sorted({tuple(int(value) for value in pair) for pair in pairs})


@pytest.mark.parametrize(
    ("after_ns", "lag_ns"), [(0, 0), (1, 1), (1_399, 1_399), (1_400, 1_400), (90_000, 1_400)]
)
def test_streams_in_order_wait_no_longer_than_activities_of_one_stream(after_ns, lag_ns):
    first = kernel("mm", 10_000, host_ns=0)
    # The call takes 3 µs: so much later the second is launched, and begins after the first ended.
    late = kernel("norm", 5_000, stream=20, host_ns=10_000 + after_ns - CALL_NS)
    assert edges_across([first, late], "in order") == [(0, 1, lag_ns)]
    assert edges_across([first, late], "free") == []


def test_streams_in_order_wait_for_the_last_that_had_ended():
    program = [
        kernel("mm", 12_000, host_ns=0),
        kernel("add", 90_000, stream=20),
        kernel("mm", 4_000, stream=9),
        kernel("norm", 5_000, stream=30, host_ns=30_000),
    ]
    assert edges_across(program, "in order") == [(2, 3, 1_400)]


def test_what_follows_a_waiting_activity_on_its_stream_needs_no_edge_of_its_own():
    program = [
        kernel("mm", 10_000, host_ns=0),
        kernel("norm", 5_000, stream=20, host_ns=20_000),
        *[kernel("norm", 5_000, stream=20)] * 3,
    ]
    assert edges_across(program, "in order") == [(0, 1, 1_400)]


@given(
    some.lists(
        some.tuples(
            some.sampled_from([7, 20, 30]), some.integers(1, 20_000), some.integers(0, 20_000)
        ),
        min_size=1,
        max_size=12,
    ),
    some.data(),
)
def test_streams_in_order_never_pass_what_had_ended_whatever_changes(activities, data):
    program = [kernel("mm", ns, stream=stream, host_ns=host) for stream, ns, host in activities]
    recorded = find_recorded(record(program))
    replay, those = recorded.replay("in order"), recorded.activities
    number = len(those.start)
    changed = data.draw(
        some.lists(some.integers(0, 40_000), min_size=number, max_size=number), label="ns"
    )
    first = replay.first_activity
    duration_ns = np.append(replay.duration_ns[:first], changed)
    end = replace(replay, duration_ns=duration_ns).run()[first:]
    start = end - changed
    for one in range(number):
        ended = [
            other
            for other in range(number)
            if those.lane[other] != those.lane[one] and those.end[other] <= those.start[one]
        ]
        last = max(ended, key=lambda other: those.end[other], default=None)
        if last is not None:
            wait_ns = min(int(those.start[one] - those.end[last]), 1_400)
            assert start[one] >= end[last] + wait_ns
