"""What recording adds to a step is taken off before anything is predicted."""

from dataclasses import replace

import numpy as np
import pytest

from kprof.analyze.idle import causes
from kprof.analyze.whatif.baseline import (
    find_baseline,
    host_share,
    host_spread,
    own_host_ns,
    with_untouched,
)
from kprof.analyze.whatif.changes import (
    FASTER,
    REMOVED,
    WITHOUT,
    Change,
    Target,
    apply,
    without_rows,
)
from kprof.analyze.whatif.dependencies import find_recorded
from kprof.analyze.whatif.predict import predict
from kprof.analyze.whatif.replay import HOST
from kprof.trace import Recording
from tests.analyze.simulated import END_OF_STEP, Do, kernel, record, step_ns, upload
from tests.analyze.whatif.whatif_questions import GRAPHS, MM, NORM, doubled

# The device needs 47 + 10 x 50 + 9 x 1.4 µs; the host is done after 430.
DEVICE_BOUND = [kernel("mm", 50_000, host_ns=40_000) for _ in range(10)]
# 7 + 20 x 10 + 19 x 1.4 µs; the host is done after 98.
QUEUED = [kernel("mm", 10_000, host_ns=0)]
QUEUED += [kernel(name, 10_000) for name in [*["norm", "mm"] * 9, "norm"]]


def recorded(program, *, step_ns, host_ns=(), recorded_ns=None):
    """Record a program of which unrecorded steps took `step_ns`, and their host `host_ns`."""
    trace = record(program)
    recorded_ns = recorded_ns or find_baseline(trace).step_ns
    steps = ((recorded_ns,), (step_ns,) * max(len(host_ns), 1))
    recording = Recording("steps", 9, (5,), "device", *steps, unrecorded_host_ns=host_ns)
    return replace(trace, meta=replace(trace.meta, recording=recording))


def told(program, change, *, step_ns, host_ns=(), recorded_ns=None):
    """Predict a change to a program of which unrecorded steps took `step_ns`."""
    trace = recorded(program, step_ns=step_ns, host_ns=host_ns, recorded_ns=recorded_ns)
    found = predict([change], find_baseline(trace))
    assert found.is_without_recording
    assert found.step_ns == step_ns
    return found.predicted_step_ns


def test_a_host_that_ran_ahead_unrecorded_shows_its_own_time():
    fast = Change(FASTER, MM, 10.0)
    # Half of 427 µs to the last launch, its latency, and the kernel.
    after_ns = told(DEVICE_BOUND, fast, step_ns=539_600, host_ns=(215_000, 539_000, 539_000))
    assert after_ns == pytest.approx(213_500 + 7_000 + 5_000, rel=0.003)


def test_a_host_that_a_full_queue_held_does_not():
    fast = Change(FASTER, MM, 10.0)
    after_ns = told(DEVICE_BOUND, fast, step_ns=559_000, host_ns=(530_000, 540_000))
    assert after_ns == pytest.approx(427_000 + 7_000 + 5_000, rel=0.003)


@pytest.mark.parametrize(
    ("host_ns", "share"),
    [
        ((), 1.0),
        ((213_500, 213_500), 0.5),
        # Only the first ran ahead of the device.
        ((213_500, 500_000, 530_000), 0.5),
        ((500_000, 530_000), 1.0),
        ((485_000,), 1.0),
        ((10,), 0.2),
    ],
)
def test_a_host_takes_unrecorded_between_a_fifth_and_all_of_its_time(host_ns, share):
    trace = recorded(DEVICE_BOUND, step_ns=539_600, host_ns=host_ns)
    assert host_share(find_recorded(trace).replay(), trace) == pytest.approx(share, rel=0.01)


def test_a_host_with_no_time_of_its_own_takes_all_of_it():
    trace = recorded([kernel("mm", 50_000)], step_ns=50_000, host_ns=(10,))
    replay = find_recorded(trace).replay()
    assert host_share(replay, trace) == 0.2
    assert host_share(replay.scaled(HOST, 0.0), trace) == 1.0


def test_a_host_runs_ahead_that_is_done_in_less_than_nine_tenths_of_the_step():
    recording = Recording("steps", 9, (5,), "device", (100,), (100,) * 3)
    told = replace(recording, unrecorded_host_ns=(89, 90, 10))
    assert own_host_ns(told) == [89, 10]
    assert own_host_ns(replace(recording, unrecorded_host_ns=(89,))) == []


@pytest.mark.parametrize(
    ("host_ns", "spread"),
    [
        # From the 10th to the 90th percentile; the side that lies farther from the median.
        ((100, 100, 100, 100, 100), 0.0),
        ((60, 60, 100, 110, 110), 0.4),
        ((90, 90, 100, 150, 150), 0.5),
        ((1, 1, 1, 400, 400), 1.0),
        ((60, 60, 100, 110), 0.0),
    ],
)
def test_how_far_the_hosts_time_lies_from_its_median(host_ns, spread):
    trace = record([kernel("mm", 50_000)])
    steps_ns = (1_000,) * len(host_ns)
    recording = Recording("steps", 9, (5,), "device", (100,), steps_ns, unrecorded_host_ns=host_ns)
    trace = replace(trace, meta=replace(trace.meta, recording=recording))
    assert host_spread(trace) == pytest.approx(spread)


def test_what_hangs_on_the_host_is_as_unsure_as_its_time():
    hosts = (200_000, 205_000, 215_000, 225_000, 230_000)
    trace = recorded(DEVICE_BOUND, step_ns=539_600, host_ns=hosts)
    baseline = find_baseline(trace)
    bound, free = (predict([Change(FASTER, MM, by)], baseline) for by in (10.0, 1.1))
    # Of 213.5 µs from the first launch to the last, as most of them lie from their median.
    assert bound.uncertainty_ns == pytest.approx(213_500 * 13 / 215, rel=0.05)
    assert free.uncertainty_ns < 2_000


def test_what_recording_leaves_as_it_is_varies_with_the_rest():
    steps = tuple(range(900_000, 1_250_000, 35_000))
    program = launching([Do("allocate", ns=400_000)], slowed=2)
    trace = recorded(program, step_ns=1_070_000)
    recording = replace(trace.meta.recording, unrecorded_step_ns=steps)
    trace = replace(trace, meta=replace(trace.meta, recording=recording))
    found = predict([Change(FASTER, MM, 2.0)], find_baseline(trace))
    # Eight of ten lie within 126 of 1,057 µs.
    assert found.uncertainty_ns / found.step_ns == pytest.approx(126 / 1_057, abs=0.005)


def test_the_spread_of_few_unrecorded_steps_is_unknown():
    trace = recorded(DEVICE_BOUND, step_ns=539_600, host_ns=(200_000, 215_000, 230_000))
    found = predict([Change(FASTER, MM, 10.0)], find_baseline(trace))
    assert found.uncertainty_ns < 2_000


def test_what_the_device_took_longer_for_lay_between_its_activities():
    # Half of 19 x 1.4 µs less, of which nine are left.
    after_ns = told(QUEUED, Change(REMOVED, NORM), step_ns=233_600 - 13_300)
    assert after_ns == pytest.approx(7_000 + 100_000 + 9 * 700, rel=0.003)


def test_what_the_replay_misses_lies_everywhere_in_the_step():
    # Unrecorded 2 % longer: at a lower clock, say.
    after_ns = told(QUEUED, doubled(MM), step_ns=round(1.02 * 233_600), recorded_ns=233_600)
    assert after_ns == pytest.approx(1.02 * 183_600, rel=0.001)


def test_the_host_is_not_taken_to_be_faster_than_the_device_leaves_room_for():
    # The device alone still takes too long, however fast the host is.
    fast = Change(FASTER, Target("kernel", "*"), 10.0)
    after_ns = told(QUEUED, fast, step_ns=233_600 - 13_300)
    assert after_ns == pytest.approx(95_000 + 7_000 + 1_000, rel=0.003)


def test_the_mean_of_the_recorded_steps_is_held_against_their_own_mean():
    trace = record([kernel("mm", 4_000, host_ns=50_000) for _ in range(10)])
    # One of three steps was much slower, and a replay of all of them takes their mean.
    recorded_ns = (400_000, 400_000, 3 * 538_000 - 800_000)
    recording = Recording("steps", 9, (4, 5, 6), "device", recorded_ns, (269_000,))
    baseline = find_baseline(replace(trace, meta=replace(trace.meta, recording=recording)))
    assert baseline.step_ns == 269_000


LONG_NS = 4_000_000
# Work of the host's own, which a recorder does not lengthen, amid 20 launches that it does.
OWN_WORK = {
    causes.DATA_LOADING: Do("load", ns=LONG_NS),
    causes.ALLOCATOR: Do("allocate", ns=LONG_NS),
    causes.PAGEABLE_COPY: upload(LONG_NS),
}


def launching(work, *, slowed=1):
    """Return a step of the host's, its launches so many times as far apart."""
    launch = kernel("mm", 4_000, host_ns=slowed * 30_000)
    return [*[launch] * 10, *work, *[launch] * 10]


@pytest.mark.parametrize("cause", OWN_WORK)
def test_work_of_the_hosts_own_takes_unrecorded_what_it_took(cause):
    work = [OWN_WORK[cause]]
    wanted_ns = step_ns(launching(work))
    after_ns = told(launching(work, slowed=2), Change(WITHOUT, cause=cause), step_ns=wanted_ns)
    # The bytes of a copy still have to move, beside the host.
    rest = [kernel("copy", LONG_NS)] if cause == causes.PAGEABLE_COPY else []
    assert after_ns == pytest.approx(step_ns(launching(rest)), rel=0.03)


def test_many_operators_that_load_data_are_lengthened_as_others_are():
    loads = [Do("load", "aten::stack", ns=20_000, host_ns=0)] * 20
    wanted_ns = step_ns(launching(loads))
    slowed = launching([replace(load, ns=2 * load.ns) for load in loads], slowed=2)
    without = Change(WITHOUT, cause=causes.DATA_LOADING)
    after_ns = told(slowed, without, step_ns=wanted_ns)
    assert after_ns == pytest.approx(step_ns(launching([])), rel=0.03)


def test_the_step_behind_the_recorders_drain_is_none_of_the_mean():
    step = [*[kernel("mm", 50_000, host_ns=20_000)] * 10, END_OF_STEP]
    late = [Do("think", host_ns=300_000), *step]
    trace = record([*late, *step, *step[:-1]])
    alike_ns = 10 * (50_000 + 1_400)
    recorded_ns = (3 * find_baseline(trace).step_ns - 2 * alike_ns, alike_ns, alike_ns)
    recording = Recording("steps", 9, (0, 1, 2), "device", recorded_ns, (alike_ns,))
    baseline = find_baseline(replace(trace, meta=replace(trace.meta, recording=recording)))
    assert recorded_ns[0] > 1.5 * alike_ns
    assert baseline.added_ns
    assert baseline.replayed_ns == pytest.approx(alike_ns, rel=0.01)


def test_what_a_host_that_ran_ahead_kept_is_none_of_what_recording_lengthened():
    work, slow = [Do("allocate", ns=400_000)], {"ns": 90_000}
    step = [replace(do, **slow) if do.name == "mm" else do for do in launching(work, slowed=2)]
    host_ns, device_ns = 20 * 33_000 + 400_000, 20 * (90_000 + 1_400)
    assert host_ns < 0.9 * device_ns
    steps, fast = [*[*step, END_OF_STEP] * 3, *step], Change(FASTER, MM, 90 / 4)
    after_ns = told(steps, fast, step_ns=device_ns, host_ns=(host_ns, host_ns))
    assert after_ns == pytest.approx(host_ns, rel=0.03)


@pytest.mark.parametrize(
    ("work", "kept_ns"),
    [
        *((one, LONG_NS) for one in OWN_WORK.values()),
        (Do("sleep", ns=LONG_NS), LONG_NS),
        (Do("think", host_ns=LONG_NS), LONG_NS),
        (Do("load", "aten::stack", ns=LONG_NS), LONG_NS),
        # As torch's own recorder writes them.
        (Do("load", "enumerate(DataLoader)#_Iter.__next__", ns=LONG_NS), LONG_NS),
        # However short it is.
        (Do("allocate", ns=50_000), 50_000),
        (Do("think", host_ns=50_000), 0),
        (Do("load", ns=50_000), 0),
    ],
)
def test_of_the_hosts_time_what_no_recorder_lengthens_is_kept(work, kept_ns):
    trace = record(launching([work]))
    found = with_untouched(find_recorded(trace).replay(), trace).edges.kept_ns.sum()
    assert found == pytest.approx(kept_ns, rel=0.03)


def test_in_a_graph_nothing_is_left_of_what_recording_did_not_lengthen():
    launches = [kernel("mm", 1_000, host_ns=30_000)] * 5
    program = [*launches, OWN_WORK[causes.ALLOCATOR], *launches]
    replay = with_untouched(find_recorded(trace := record(program)).replay(), trace)
    graphed = apply([GRAPHS], replay, trace)
    is_before_it = np.arange(len(trace.kernels)) == 4
    assert without_rows(is_before_it, graphed, trace).step_ns() <= graphed.step_ns()


def test_the_first_step_counts_where_steps_do_different_work():
    short = [*[kernel("mm", 5_000, host_ns=20_000)] * 10, END_OF_STEP]
    long = [*[kernel("mm", 5_000, host_ns=20_000)] * 15, END_OF_STEP]
    replay = find_recorded(record([*short, *long, *short, *long[:-1]])).replay()
    assert replay.behind_the_drain().step_ns() == replay.step_ns()
