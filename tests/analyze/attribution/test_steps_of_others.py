"""Steps of traces that kprof did not record: which rule tells them, and where they begin."""

from __future__ import annotations

import pytest

from kprof.analyze.attribution.steps import find_steps, rule_of, time_steps
from kprof.trace import Recording
from tests.traces import measured, trace_of

MS = 1_000_000


def span(name, start_ms, duration_ms, thread=1, **more):
    times = {"start_ns": int(start_ms * MS), "duration_ns": int(duration_ms * MS)}
    return {"kind": "range", "name": name, "thread": thread, **times, **more}


def work(start_ms, name="mm", grid="[1, 1, 1]", duration_ms=0.5, thread=1):
    """Return a launch, and the kernel of it that begins a little later."""
    call = {"kind": "runtime", "name": "cudaLaunchKernel", "thread": thread, "start_ns": 0}
    call |= {"start_ns": int(start_ms * MS), "duration_ns": 1_000}
    return call, {
        "name": name,
        "grid": grid,
        "start_ns": int((start_ms + 0.01) * MS),
        "duration_ns": int(duration_ms * MS),
    }


def opened(ranges, launches, **meta):
    """Analyze a trace of others with these ranges and pairs of `work`."""
    calls = [{**call, "correlation": number} for number, (call, _) in enumerate(launches)]
    kernels = [{**kernel, "correlation": number} for number, (_, kernel) in enumerate(launches)]
    return measured(trace_of(*kernels, ranges=[*ranges, *calls], **meta))


def begins_ms(trace):
    return [step.start_ns / MS for step in find_steps(trace)]


def updates(count, name="Optimizer.step#SGD.step"):
    """Return an update at the end of every 10 ms, and launches at 1 and 8.5 ms of each."""
    ranges = [span(name, 10 * i + 8, 2) for i in range(count)]
    return ranges, [work(10 * i + at) for i in range(count) for at in (1, 8.5)]


def test_a_step_lasts_from_the_end_of_one_update_to_the_end_of_the_next():
    ranges, launches = updates(3)
    trace = opened([span("load", 0, 0.5), *ranges], launches)
    assert begins_ms(trace) == [0, 10, 20]
    assert trace.kernels["step"].tolist() == [0, 0, 1, 1, 2, 2]
    assert "Optimizer.step#SGD.step" in rule_of(trace.ranges)


def test_a_first_step_that_began_before_the_recording_is_no_step():
    ranges, launches = updates(3)
    assert begins_ms(opened(ranges, launches[1:])) == [10, 20]


def test_with_gradients_accumulated_a_step_ends_at_an_update_alone():
    ranges, launches = updates(3)
    passes = [span("forward", 10 * i + at, 1) for i in range(3) for at in (1, 3, 5)]
    assert len(find_steps(opened([*passes, *ranges], launches))) == 3


def test_torchs_own_steps_come_before_updates():
    ranges, launches = updates(3)
    marks = [span(f"ProfilerStep#{i + 5}", 15 * i, 15, kind="step") for i in range(2)]
    trace = opened([*marks, *ranges], launches)
    assert [step.number for step in find_steps(trace)] == [5, 6]
    assert "ProfilerStep#" in rule_of(trace.ranges)


def torchs(*spans):
    return [span(f"ProfilerStep#{i}", at, took, kind="step") for i, (at, took) in enumerate(spans)]


def test_the_step_that_torchs_profiler_opens_before_it_stops_is_none():
    launches = [work(1), work(11)]
    stop = span("torch/profiler/profiler.py(700): stop", 20.1, 1, kind="python")
    trace = opened([*torchs((0, 10), (10, 10), (20, 0.05)), stop], launches)
    assert begins_ms(trace) == [0, 10]
    assert time_steps(trace).recorded_ns == (10 * MS, 10 * MS)


def test_a_last_step_in_which_the_host_does_something_counts():
    trace = opened(torchs((0, 10), (10, 10), (20, 2)), [work(1), work(11), work(21)])
    assert begins_ms(trace) == [0, 10, 20]


def test_where_no_step_holds_a_hosts_work_none_is_left_out():
    trace = measured(trace_of({}, ranges=torchs((0, 10), (10, 10))))
    assert begins_ms(trace) == [0, 10]


@pytest.mark.parametrize("classes", [("Adam", "Adam"), ("SGD", "Adam")])
def test_of_two_optimizers_the_one_with_more_to_update_delimits_steps(classes):
    ranges, launches = [], []
    for i in range(5):
        for turn, (name, at) in enumerate(zip(classes, (3, 8), strict=True)):
            ranges.append(span(f"Optimizer.step#{name}.step", 10 * i + at, 2))
            grid, took = (("[8, 1, 1]", 0.2), ("[64, 1, 1]", 0.9))[turn]
            launches.append(work(10 * i + at - 2))
            launches.append(work(10 * i + at + 0.5, "update", grid, took))
    # The first update makes the optimizer's state.
    launches.append(work(3.9, "zero", "[8, 1, 1]", 0.05))
    assert begins_ms(opened(ranges, launches))[1:] == [10, 20, 30, 40]


def test_an_optimizer_inside_another_one_updates_once():
    ranges, launches = updates(3)
    inner = [span("Optimizer.step#Inner.step", 10 * i + 8.2, 1) for i in range(3)]
    assert begins_ms(opened([*ranges, *inner], launches))[1:] == [10, 20]


def test_without_updates_ranges_that_repeat_at_the_top_of_the_main_thread_are_steps():
    launches = [work(10 * i + 1) for i in range(3)]
    inner = [span("attention", 10 * i + 1, 0.5) for i in range(3)]
    outer = [span(f"iteration {i}", 10 * i, 9) for i in range(3)]
    trace = opened([span("train", 0, 40), *outer, *inner], launches)
    assert begins_ms(trace) == [0, 10, 20]
    assert [step.number for step in find_steps(trace)] == [0, 1, 2]
    assert "iteration *" in rule_of(trace.ranges)


def test_ranges_of_another_thread_of_libraries_or_around_little_work_are_no_steps():
    launches = [work(10 * i + 1) for i in range(3)]
    others = {
        "another thread": [span("load", 10 * i, 9, thread=2) for i in range(3)],
        "a library": [span("nccl:all_reduce", 10 * i, 9) for i in range(3)],
        "data": [span("enumerate(DataLoader)#_Iter.__next__", 10 * i, 9) for i in range(3)],
        "data pipes": [span("enumerate(DataPipe)#Batcher", 10 * i, 9) for i in range(3)],
        "no launch": [span("log", 10 * i + 5, 4) for i in range(3)],
    }
    assert [name for name, ranges in others.items() if find_steps(opened(ranges, launches))] == []


def test_parts_that_repeat_in_turn_are_no_steps():
    launches = [work(10 * i + 1) for i in range(3)]
    parts = [span(name, 10 * i + at, 3) for i in range(3) for name, at in PARTS]
    assert find_steps(opened(parts, launches)) == []


@pytest.mark.parametrize("within", [(), ("mlp",), ("mlp", "attention")])
@pytest.mark.parametrize("name", ["layer_{}", "TransformerLayer_{}", "blocks.{}", "Stage {}"])
def test_numbered_parts_of_a_model_are_no_steps_nor_is_what_they_hold(name, within):
    launches = [work(10 * i + 1) for i in range(4)]
    parts = [span(name.format(i), 10 * i, 9) for i in range(4)]
    parts += [
        span(inner, 10 * i + 0.5 + 4 * place, 4 - place)
        for i in range(4)
        for place, inner in enumerate(within)
    ]
    assert find_steps(opened([span("forward", 0, 40), *parts], launches)) == []


def test_a_part_beside_the_layers_of_a_model_is_no_step():
    launches = [work(10 * i + at) for i in range(4) for at in (1, 7.1, 7.5)]
    parts = [span(f"layer_{i}", 10 * i, 6) for i in range(4)]
    beside = [span("loss", 10 * i + 7, 2) for i in range(4)]
    assert find_steps(opened([*parts, *beside], launches)) == []


@pytest.mark.parametrize(
    "name",
    [
        "zero_stage_2/step_{}",
        "Step {} (stage 1)",
        "Stage 1 | iter {}",
        "stage2 step {}",
        "encoder 1, batch={}",
        "Stage1Epoch{}",
        "lookahead_{}",
        "LOOKAHEAD_{}",
        "overhead {}",
        "player {}",
    ],
)
def test_a_name_that_numbers_steps_or_holds_a_models_word_inside_another_marks_steps(name):
    launches = [work(10 * i + 1) for i in range(4)]
    marks = [span(name.format(i), 10 * i, 9) for i in range(4)]
    assert begins_ms(opened(marks, launches)) == [0, 10, 20, 30]


@pytest.mark.parametrize("name", ["stage_1/microbatch_{}", "layer 3, timestep {}"])
def test_a_number_of_another_word_is_none_of_a_step(name):
    launches = [work(10 * i + 1) for i in range(4)]
    marks = [span(name.format(i), 10 * i, 9) for i in range(4)]
    assert find_steps(opened(marks, launches)) == []


PARTS = (("forward", 0), ("backward", 3), ("update", 6))


def test_autograds_thread_is_not_the_main_one_though_it_launches_most():
    node = {"kind": "op", "name": "MmBackward0", "forward_thread": 1, "sequence": 3, "thread": 2}
    launches = [work(10 * i + at, thread=2) for i in range(3) for at in (4, 5, 6)]
    launches += [work(10 * i + 1) for i in range(3)]
    outer = [span("iteration", 10 * i, 9) for i in range(3)]
    beside = [span("hook", 10 * i + 3.5, 4, thread=2) for i in range(3)]
    trace = opened([*outer, *beside, {**node, "start_ns": 4 * MS}], launches)
    assert rule_of(trace.ranges).count("iteration") == 1


def test_a_run_that_kprof_recorded_gets_no_further_steps():
    ranges, launches = updates(3)
    recording = Recording(step_rule="none", num_steps_seen=0, steps_recorded=())
    assert find_steps(opened(ranges, launches, recording=recording)) == []


def test_a_number_that_occurs_twice_is_two_steps_each_with_its_own_end():
    marks = [span("ProfilerStep#3", 10 * i, 9, kind="step") for i in range(2)]
    trace = opened(marks, [work(10 * i + 1, duration_ms=9) for i in range(2)])
    assert [step.device_end_ns for step in find_steps(trace)] == [10_010_000, 20_010_000]
    assert time_steps(trace).recorded_ns == (10_010_000, 10_000_000)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_updates_delimit_no_step(count):
    ranges, launches = updates(count)
    assert find_steps(opened([span("load", 0, 1), *ranges], [work(1), *launches])) == []
