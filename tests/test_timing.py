"""The timing loop: how it warms up, and in which order it takes the samples of a pair."""

import itertools
import time
from random import Random

import pytest

from kprof.comparison import Metric, Plan
from kprof.timing import (
    SLEEP_CYCLES,
    Conditions,
    GpuStopwatch,
    WallStopwatch,
    stopwatch_for,
    take_pairs,
    warm_up,
)


class Recorded:
    """A stopwatch that runs nothing: it gives each work the times planned for it."""

    name = "as planned"
    resolution_ns = 1.0
    num_exposed = 0

    def __init__(self, times):
        self.times = {work: iter(values) for work, values in times.items()}
        self.timed = []

    def time(self, work, num_calls):
        self.timed.append((work, num_calls))
        return next(self.times[work])


def work_a():
    """Do nothing, as A."""


def work_b():
    """Do nothing, as B."""


def no_sensor():
    return Conditions()


def pairs_of(num_pairs, stopwatch, watch=no_sensor, seed=0):
    taken = take_pairs(work_a, work_b, stopwatch, 3, Random(seed), watch)
    return list(itertools.islice(taken, num_pairs))


def endless(value):
    return itertools.repeat(value)


def test_a_pair_holds_the_time_of_each_work_whichever_came_first():
    pairs = pairs_of(20, Recorded({work_a: endless(7.0), work_b: endless(5.0)}))
    assert {(pair.a, pair.b) for pair in pairs} == {((7.0,), (5.0,))}
    assert {pair.is_a_first for pair in pairs} == {True, False}


def test_the_order_is_that_of_the_seed():
    stopwatch = Recorded({work_a: endless(1.0), work_b: endless(1.0)})
    first = [pair.is_a_first for pair in pairs_of(30, stopwatch, seed=4)]
    assert first == [pair.is_a_first for pair in pairs_of(30, stopwatch, seed=4)]
    assert first != [pair.is_a_first for pair in pairs_of(30, stopwatch, seed=5)]


def test_a_plan_draws_the_order_of_each_pair_alone_and_again_from_its_seed():
    plan = Plan((Metric("time", "ns"),), seed=0)
    drawn = list(itertools.islice(plan.orders(), 10_000))
    assert drawn[:8] == [False, False, True, True, False, True, False, True]
    assert list(itertools.islice(plan.orders(), 10_000)) == drawn
    # Of a fair coin, also behind a pair in which A was first: five standard deviations.
    after_a = [now for before, now in itertools.pairwise(drawn) if before]
    assert abs(sum(drawn) - 5_000) < 250
    assert abs(sum(after_a) - len(after_a) / 2) < 180


def test_samples_are_taken_in_the_order_that_the_pair_states():
    stopwatch = Recorded({work_a: endless(1.0), work_b: endless(1.0)})
    pairs = pairs_of(10, stopwatch)
    timed = [work for work, _ in stopwatch.timed]
    stated = [(work_a, work_b) if pair.is_a_first else (work_b, work_a) for pair in pairs]
    assert timed == list(itertools.chain(*stated))


def test_one_untimed_call_of_the_same_work_comes_before_each_sample():
    called = []
    stopwatch = WallStopwatch()
    taken = take_pairs(
        lambda: called.append("A"), lambda: called.append("B"), stopwatch, 2, Random(0), no_sensor
    )
    pair = next(taken)
    assert called == (["A"] * 3 + ["B"] * 3 if pair.is_a_first else ["B"] * 3 + ["A"] * 3)


def test_the_clock_of_each_sample_is_kept_with_its_work():
    readings = iter([Conditions(1500.0), Conditions(1900.0)])
    stopwatch = Recorded({work_a: endless(1.0), work_b: endless(1.0)})
    (pair,) = pairs_of(1, stopwatch, watch=lambda: next(readings))
    assert pair.clocks_mhz == ((1500.0, 1900.0) if pair.is_a_first else (1900.0, 1500.0))


def test_a_pair_beside_which_another_process_came_onto_the_gpu_is_left_out():
    readings = iter([Conditions(), Conditions(num_others=1)])
    stopwatch = Recorded({work_a: endless(1.0), work_b: endless(1.0)})
    (pair,) = pairs_of(1, stopwatch, watch=lambda: next(readings))
    assert "process" in pair.problem


@pytest.fixture
def a_second_a_look(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))


def test_warm_up_goes_on_until_two_blocks_in_a_row_agree(a_second_a_look):
    stopwatch = Recorded({work_a: iter([100.0] * 5 + [60.0] * 5 + [50.0] * 5 + [50.5] * 5)})
    assert warm_up((work_a,), stopwatch, 1, 1000.0).is_stable
    assert len(stopwatch.timed) == 20


def test_warm_up_waits_for_the_work_that_settles_last(a_second_a_look):
    settling = iter([100.0] * 5 + [60.0] * 10)
    stopwatch = Recorded({work_a: endless(70.0), work_b: settling})
    assert warm_up((work_a, work_b), stopwatch, 1, 1000.0).is_stable
    assert len(stopwatch.timed) == 30


def test_warm_up_of_what_never_settles_ends_and_says_so(a_second_a_look):
    rising = (1.1**n for n in itertools.count())
    stopwatch = Recorded({work_a: rising})
    assert not warm_up((work_a,), stopwatch, 1, 1000.0).is_stable
    assert len(stopwatch.timed) == 50


def test_a_sample_holds_as_many_calls_as_fill_it():
    slow = Recorded({work_a: endless(250.0)})
    assert warm_up((work_a,), slow, 0.01, 1000.0).num_calls == 4


def test_a_sample_is_long_for_its_clock():
    coarse = Recorded({work_a: endless(1000.0)})
    coarse.resolution_ns = 500.0
    assert warm_up((work_a,), coarse, 0.01, 1.0).num_calls == 50


def test_the_faster_of_two_works_decides_how_many_calls_fill_a_sample():
    stopwatch = Recorded({work_a: endless(500.0), work_b: endless(100.0)})
    assert warm_up((work_a, work_b), stopwatch, 0.01, 1000.0).num_calls == 10


def test_the_wall_stopwatch_counts_what_a_call_takes(monkeypatch):
    ticks = iter([1_000, 7_000])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    assert WallStopwatch().time(work_a, 3) == 2_000


@pytest.mark.gpu
@pytest.mark.parametrize("clock", ["gpu", "cold gpu"])
def test_a_gpu_stopwatch_sees_the_gpu_and_not_the_launch(clock):
    import torch

    one = torch.zeros(1, device="cuda")
    stopwatch = stopwatch_for(clock)
    stopwatch.time(lambda: one.add_(1), 100)
    assert 500 < stopwatch.time(lambda: one.add_(1), 100) < 20_000
    assert stopwatch.num_exposed == 0


class Sleepy(GpuStopwatch):
    """A GPU's stopwatch whose samples are hidden or not as planned; it keeps what was slept."""

    def __init__(self, *are_hidden):
        self._sleep_cycles = SLEEP_CYCLES
        self.num_exposed = 0
        self.are_hidden = iter(are_hidden)
        self.slept = []

    def _sample(self, work, num_calls):
        self.slept.append(self._sleep_cycles / SLEEP_CYCLES)
        return 1.0, next(self.are_hidden)


def test_the_gpu_sleeps_longer_until_launches_are_hidden_and_shorter_again_afterwards():
    stopwatch = Sleepy(False, False, True, True, True, True)
    for _ in range(4):
        stopwatch.time(work_a, 1)
    assert stopwatch.slept == pytest.approx([1, 2, 4, 4, 3.8, 3.61])
    assert stopwatch.num_exposed == 0


def test_a_long_sleep_goes_back_to_where_it_began_and_no_further():
    stopwatch = Sleepy(False, False, *[True] * 60)
    for _ in range(59):
        stopwatch.time(work_a, 1)
    assert stopwatch.slept[-1] == 1
