"""Faults planted in simulated workloads are found, and nothing is found in their clean twins."""

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kprof.collect.readers.kineto.reader import read
from tests.planted import workloads
from tests.planted.machine import US, Machine
from tests.planted.workloads import PLANTED, train
from tests.traces import measured

GOOD_ENOUGH = 0.9
# What the device needs between kernels is below this, in every workload.
GAP_NS = 5 * US


def analyzed(machine):
    with tempfile.TemporaryDirectory() as folder:
        return measured(read(machine.write(Path(folder) / "trace.json")))


def recorded(run, seed, *, stacks=False):
    """Run a workload on the machine; return its analysis and how long the GPU was idle for it."""
    machine = Machine(seed, stacks=stacks)
    run(machine)
    trace = analyzed(machine)
    idle_ns = int(trace.kernels["gap_before_ns"].sum())
    return trace, idle_ns - machine.own_ns


def found_ns(trace):
    """Return the idle time by cause; what nobody knows is under None."""
    inside = trace.idle[trace.idle["edge"].isna()]
    sums = inside.groupby("cause", observed=True, dropna=False)["duration_ns"].sum()
    return Counter({cause: int(ns) for cause, ns in sums.items() if cause != "between kernels"})


def found_gaps(trace):
    """Count the gaps by cause."""
    kernels = trace.kernels[trace.kernels["gap_before_ns"].fillna(0) > GAP_NS]
    return Counter(kernels["gap_cause"].astype(object).fillna("unknown"))


@cache
def twins(name, seed):
    """Run a workload with and without its fault; both with the same jitter."""
    planted = PLANTED[name]
    return [
        recorded(
            lambda m, is_faulty=is_faulty: planted.run(m, is_faulty), seed, stacks=planted.stacks
        )
        for is_faulty in (True, False)
    ]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_explains_the_idle_time_that_it_makes(name):
    (faulty, idle_ns), (_, clean_idle_ns) = twins(name, seed=1)
    assert idle_ns > clean_idle_ns + 50 * US
    found = found_ns(faulty)
    assert found[PLANTED[name].cause] == pytest.approx(idle_ns - clean_idle_ns, rel=0.1)
    assert found[PLANTED[name].cause] > GOOD_ENOUGH * found.total()


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_is_found_where_no_fault_was_planted(name):
    _, (clean, _) = twins(name, seed=1)
    assert not found_gaps(clean)
    assert found_ns(clean).total() < 0.01 * clean.idle["duration_ns"].sum() + 10 * US


@pytest.mark.slow
@settings(max_examples=1)
@given(st.integers(0, 10**6))
@example(1)
def test_precision_and_recall_are_good_for_every_cause_by_time_and_by_count(seed):
    """Pool all workloads: what was planted, what was found, and what of it was right."""
    planted, found, right = Counter(), Counter(), Counter()
    for name, workload in PLANTED.items():
        (faulty, idle_ns), (clean, clean_idle_ns) = twins(name, seed=seed)
        gaps = found_gaps(faulty)
        for measure, truth, seen, unseen in (
            ("time", idle_ns - clean_idle_ns, found_ns(faulty), found_ns(clean)),
            ("count", gaps.total(), gaps, found_gaps(clean)),
        ):
            planted[workload.cause, measure] += truth
            right[workload.cause, measure] += min(truth, seen[workload.cause])
            for cause, amount in (seen + unseen).items():
                found[cause, measure] += amount
    precision = {key: right[key] / found[key] for key in planted}
    recall = {key: right[key] / planted[key] for key in planted}
    assert min(precision.values()) >= GOOD_ENOUGH, precision
    assert min(recall.values()) >= GOOD_ENOUGH, recall


def test_every_cause_that_a_fault_can_have_is_planted():
    causes = {planted.cause for planted in PLANTED.values()}
    assert len(PLANTED) >= 12
    assert causes == {
        *("launch-bound", "data loading", "synchronization", "pageable copy", "allocator"),
        *("collective wait", "dependency wait", "profiler", "no work"),
    }


def test_a_loader_that_the_gpu_does_not_wait_for_is_not_blamed():
    def load(machine):
        with machine.phase("data"):
            machine.run(600 * US)

    trace, _ = recorded(lambda m: train(m, before=load), seed=1)
    assert not found_gaps(trace)


def test_a_wait_is_not_blamed_for_what_the_host_is_too_slow_to_launch_anyway():
    def decode(machine):
        for number in range(8):
            with machine.step(number):
                workloads.forward(machine, 60, workloads.SHORT)
                machine.item()

    trace, _ = recorded(decode, seed=1)
    found = found_ns(trace)
    assert found["launch-bound"] > 0.85 * found.total()


def test_threads_that_watch_the_gpu_are_not_blamed():
    def watched(machine):
        workloads.kernels_too_short(machine, faulty=True)
        machine.now, before = 1_000_000_000, machine.now
        with machine.on_thread(999):
            while machine.now < before:
                machine.call("cudaEventSynchronize", 500 * US)

    trace, _ = recorded(watched, seed=1)
    assert set(found_ns(trace)) == {"launch-bound"}


def test_an_allocation_while_the_gpu_is_busy_is_not_blamed():
    trace, _ = recorded(lambda m: train(m, amid=lambda m: m.call("cudaMalloc", 300 * US)), seed=1)
    assert not found_gaps(trace)


def think(machine):
    with machine.phase("forward"):
        machine.run(9_000 * US)


def load(machine):
    with machine.phase("data"):
        machine.run(20_000 * US)


def test_a_wait_gets_what_it_adds_to_the_idle_time_of_a_slow_host():
    alone = found_ns(recorded(lambda m: train(m, amid=think), seed=1)[0])
    both = found_ns(recorded(lambda m: train(m, amid=think, after=Machine.item), seed=1)[0])
    assert both["launch-bound"] == pytest.approx(alone["launch-bound"], rel=0.1)
    assert both["synchronization"] == pytest.approx(both.total() - alone.total(), rel=0.2)


def test_a_slow_loader_is_blamed_before_the_wait_that_comes_before_it():
    both = found_ns(recorded(lambda m: train(m, before=load, after=Machine.item), seed=1)[0])
    assert both["data loading"] > 0.95 * both.total()
