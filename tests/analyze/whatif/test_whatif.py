"""What a step would take after a change, against simulated programs whose truth is known."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.passes import analyze
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import (
    FASTER,
    REMOVED,
    REPLACED,
    ROOFLINE,
    WITHOUT,
    Change,
    Target,
    durations_after,
    rows_of,
)
from kprof.analyze.whatif.predict import find_predictions, predict
from kprof.opened import read
from kprof.trace import Recording
from tests.analyze.simulated import (
    Do,
    Machine,
    faster,
    item,
    kernel,
    record,
    step_ns,
    synchronize,
)
from tests.analyze.whatif.whatif_questions import GRAPHS, MM, NORM, ask, doubled
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, table_of, trace_of

RECORDED = Path(__file__).parents[2] / "data" / "h200"


def test_a_device_that_is_always_busy_gains_what_amdahl_says():
    program = [kernel("mm", 100_000), kernel("norm", 60_000), kernel("mm", 100_000)]
    found = ask(program, doubled(MM))
    assert found.step_ns == step_ns(program) == 271_800
    assert found.predicted_step_ns == found.amdahl_step_ns == 171_800


def test_a_host_that_is_too_slow_leaves_nothing_to_gain():
    program = [kernel("mm", 4_000, host_ns=50_000) for _ in range(10)]
    found = ask(program, doubled(MM))
    assert found.step_ns == 538_000
    assert found.predicted_step_ns == 536_000
    assert found.amdahl_step_ns == 518_000


def test_of_two_changes_to_the_same_kernel_the_larger_counts():
    program = [kernel("mm", 100_000)]
    both = [Change(FASTER, MM, 4.0), doubled(MM)]
    assert ask(program, *both).predicted_step_ns == step_ns(faster(program, "mm", 4))
    assert ask(program, *both[::-1]).predicted_step_ns == step_ns(faster(program, "mm", 4))


def test_what_is_removed_takes_its_launch_with_it():
    program = [kernel("mm", 5_000), *(kernel("norm", 2_000, host_ns=0) for _ in range(9)), item()]
    found = ask(program, Change(REMOVED, NORM))
    assert found.predicted_step_ns == step_ns([program[0], program[-1]])
    assert found.amdahl_step_ns == found.step_ns - 18_000


def test_without_any_kernel_the_host_still_takes_its_time():
    program = [kernel("mm", 100_000, host_ns=30_000), kernel("norm", 50_000, host_ns=20_000)]
    found = ask(program, Change(REMOVED, Target("kernel", "*")))
    assert found.predicted_step_ns == 30_000 + 20_000


def test_a_fused_kernel_replaces_several_of_every_step():
    program = [kernel("mm", 5_000), *(kernel("norm", 9_000, host_ns=0) for _ in range(9)), item()]
    found = ask(program, Change(REPLACED, NORM, total_ns=20_000, launches=2))
    fused = [kernel("norm", 10_000, host_ns=0)] * 2
    assert found.predicted_step_ns == step_ns([program[0], *fused, program[-1]])


def test_launches_in_a_graph_run_back_to_back_between_the_waits():
    program = [*(kernel("mm", 4_000, host_ns=50_000) for _ in range(10)), item()]
    found = ask(program, GRAPHS)
    # 50 µs to the first launch, 17 to the first node, ten nodes 0.22 apart; the host's time behind
    # the last launch stays, so that the copy is launched before they are done.
    assert found.predicted_step_ns == 50_000 + 17_000 + 40_000 + 9 * 220 + 1_400 + 2_000 + 5_000


def test_silence_between_launches_is_not_launching():
    program = [kernel("mm", 4_000), kernel("mm", 4_000, host_ns=9_000_000), kernel("mm", 4_000)]
    assert ask(program, GRAPHS).predicted_step_ns > 9_000_000


def test_nothing_is_faster_than_its_roofline():
    trace = analyzed_trace_of(
        {"duration_ns": 100_000, "limit_ns": 20_000, "name": "mm"},
        {"start_ns": 101_400, "duration_ns": 50_000, "name": "norm"},
        {"start_ns": 152_800, "duration_ns": 10_000, "limit_ns": 5, "name": "add"},
    )
    baseline = find_baseline(trace)
    found = [
        predict([Change(ROOFLINE, Target("kernel", n))], baseline) for n in ("mm", "norm", "add")
    ]
    assert [one.predicted_step_ns for one in found] == [82_800, None, 153_660]
    assert "roofline" in found[1].reason


def test_a_kernel_that_takes_longer_than_any_number_holds_is_slower_all_the_same():
    far_ns = 2**60
    trace = analyzed_trace_of(
        {"duration_ns": 10**17, "name": "mm"},
        {"start_ns": far_ns, "duration_ns": 10**17, "name": "mm"},
    )
    slower = durations_after([Change(FASTER, MM, 1e-3)], trace)
    assert slower.tolist() == [2**60, 2**60]
    found = predict([Change(FASTER, MM, 1e-3)], find_baseline(trace))
    assert found.predicted_step_ns > found.step_ns


def test_no_kernel_becomes_shorter_than_the_shortest_but_by_amdahl():
    trace = analyzed_trace_of(
        {"duration_ns": 100_000, "name": "mm"},
        {"start_ns": 101_400, "duration_ns": 50_000, "name": "norm"},
        {"start_ns": 152_800, "duration_ns": 700, "name": "mm"},
    )
    found = predict([Change(FASTER, MM, 1e6)], find_baseline(trace))
    assert found.predicted_step_ns == 153_500 - 100_000 + 860
    assert found.amdahl_step_ns == 153_500 - 100_000 - 700


def test_work_of_at_least_so_much_tells_no_roofline():
    least = {"work_from": "bounds", "work_bound": "at least", "limit_ns": 1_000}
    trace = analyzed_trace_of(
        {"duration_ns": 100_000, "limit_ns": 20_000, "name": "mm"},
        {"start_ns": 101_400, "duration_ns": 100_000, "name": "experts", **least},
    )
    baseline = find_baseline(trace)
    both, one = (predict([Change(ROOFLINE, Target("kernel", n))], baseline) for n in ("*", "exp*"))
    assert (both.predicted_step_ns, both.known_share) == (201_400 - 80_000, 0.5)
    assert (one.predicted_step_ns, one.known_share) == (None, 0.0)
    assert "kernel:experts" not in [told.target for told in find_predictions(trace)]


def test_a_replay_that_misses_the_recording_predicts_nothing():
    launch = {"kind": "runtime", "name": "cudaLaunchKernel", "duration_ns": 3_000}
    trace = trace_of(
        {"start_ns": 10_000, "duration_ns": 100_000, "correlation": 1},
        {"start_ns": 900_000, "duration_ns": 100_000, "correlation": 2},
        ranges=[{**launch, "correlation": 1}, {**launch, "start_ns": 4_000, "correlation": 2}],
    )
    found = predict([doubled(Target("kernel", "kernel"))], find_baseline(analyze(trace)))
    assert found.predicted_step_ns is None
    assert found.amdahl_step_ns == 890_000
    assert quantities_in(found.reason)[0].startswith("79")


def test_a_large_recording_is_replayed_only_when_asked(monkeypatch):
    monkeypatch.setattr("kprof.analyze.whatif.predict.MOST_UNLESS_ASKED", 1)
    trace = record([kernel("mm", 9_000), kernel("mm", 9_000)])
    (found,) = find_predictions(trace)
    assert ("kprof whatif" in found.reason, quantities_in(found.reason)) == (True, ["2"])
    assert predict([doubled(MM)], find_baseline(trace)).predicted_step_ns is not None


def test_a_recording_that_is_too_large_says_so(monkeypatch):
    monkeypatch.setattr("kprof.analyze.whatif.baseline.MOST_ACTIVITIES", 1)
    (found,) = find_predictions(record([kernel("mm", 9_000), kernel("mm", 9_000)]))
    assert (found.target, found.change) == ("a step", "after any change")
    assert ("too many" in found.reason, quantities_in(found.reason)) == (True, ["2"])


def test_a_target_that_is_not_there_is_not_predicted():
    found = ask([kernel("mm", 9_000)], Change(REMOVED, NORM))
    assert found.predicted_step_ns is None
    assert found.reason.endswith(" kernel:norm")


def test_what_differs_from_launch_to_launch_makes_a_prediction_uncertain():
    trace = record([kernel("mm", 4_000, host_ns=50_000) for _ in range(10)])
    start = trace.kernels["start_ns"] + [0, 0, 0, 0, 0, 0, 0, 0, 0, 3_000]
    found = predict([doubled(MM)], find_baseline(trace.with_kernels(start_ns=start)))
    # Nine launches took 7 µs to begin; nothing tells why the last took 10, and may do so again.
    assert found.step_ns == 541_000
    assert found.uncertainty_ns == 3_000


def test_a_host_recording_is_predicted_by_amdahl():
    ops = [{"name": n, "start_ns": s, "duration_ns": 100} for n, s in (("aten::mm", 0), ("b", 200))]
    trace = analyze(trace_of(ranges=ops))
    found = predict([doubled(Target("op", "aten::mm"))], find_baseline(trace))
    assert (found.step_ns, found.predicted_step_ns, found.amdahl_step_ns) == (300, 250, 250)
    refused = predict([GRAPHS], find_baseline(trace))
    assert (refused.predicted_step_ns, "host operators" in refused.reason) == (None, True)


def test_on_the_host_an_operator_is_asked_about_once():
    host = {"activity": "host", "device": -1, "name": "aten::mm", "op": "aten::mm", "op_row": 0}
    trace = analyzed_trace_of(
        {**host, "duration_ns": 100_000, "limit_ns": 20_000},
        ranges=[{"name": "aten::mm", "duration_ns": 100_000}],
    )
    assert [one.target for one in find_predictions(trace)] == ["op:aten::mm"]


def test_what_recording_adds_to_the_host_is_taken_off():
    program = [kernel("mm", 4_000, host_ns=50_000) for _ in range(10)]
    recording = Recording("steps", 9, (5,), "device", (538_000,), (269_000,))
    trace = record(program)
    trace = replace(trace, meta=replace(trace.meta, recording=recording))
    found = predict([Change(FASTER, MM, 1.0)], find_baseline(trace))
    assert found.is_without_recording
    assert found.step_ns == found.predicted_step_ns == 269_000
    assert found.uncertainty_ns <= 0.01 * 269_000
    # What recording added was idle, too, and is not to be gained a second time.
    idle = {"cause": "launch-bound", "duration_ns": 200_000, "recoverable_ns": 200_000}
    gained = replace(trace, idle=table_of("idle", [idle, idle], ["idle"]))
    assert predict([GRAPHS], find_baseline(gained)).amdahl_step_ns == 269_000 - (400_000 - 269_000)


def test_the_slowest_of_several_ranks_makes_the_step():
    program = [kernel("mm", 100_000), kernel("norm", 60_000)]
    machines = [Machine(), Machine()]
    machines[0].run(program)
    machines[1].run([kernel("mm", 200_000), kernel("norm", 60_000)])
    rows = [
        [{**row, "rank": rank} for row in getattr(machine, table)]
        for table in ("kernels", "ranges")
        for rank, machine in enumerate(machines)
    ]
    trace = analyze(trace_of(*rows[0], *rows[1], ranges=[*rows[2], *rows[3]]))
    found = predict([doubled(MM)], find_baseline(trace))
    assert (found.step_ns, found.predicted_step_ns) == (270_400, 170_400)
    assert found.amdahl_step_ns == 170_400


def test_the_nodes_of_a_graph_follow_one_another():
    launch = {"kind": "runtime", "name": "cudaGraphLaunch", "duration_ns": 9_000, "correlation": 1}
    nodes = [{"start_ns": s, "duration_ns": 10_000, "correlation": 1} for s in (17_000, 28_000)]
    late = {"start_ns": 49_000, "duration_ns": 5_000, "correlation": 1, "name": "mm", "stream": 8}
    trace = analyze(trace_of(*nodes, late, ranges=[launch]))
    found = predict([doubled(Target("kernel", "kernel"))], find_baseline(trace))
    assert found.step_ns - found.predicted_step_ns == 10_000


def test_the_questions_worth_asking_are_answered_with_the_analysis():
    program = [*(kernel("mm", 4_000, host_ns=50_000) for _ in range(10)), item()]
    trace = analyze(Machine().run(program))
    assert [(one.target, one.change) for one in trace.meta.what_if] == [
        ("launches", "in CUDA graphs")
    ]
    assert find_predictions(trace) == list(trace.meta.what_if)


def test_what_saves_next_to_nothing_is_not_worth_a_line():
    rows = [
        {"name": name, "start_ns": start, "duration_ns": 100_000, "limit_ns": limit}
        for name, start, limit in (("mm", 0, 50_000), ("norm", 101_400, 99_900))
    ]
    found = find_predictions(analyzed_trace_of(*rows))
    assert [one.target for one in found] == ["kernel:mm"]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json.gz")), ids=lambda path: path.name)
def test_the_replay_of_a_recorded_workload_takes_as_long_as_it_did(path):
    baseline = find_baseline(add_attribution(read([path])))
    assert baseline.error < 0.01
    assert predict([Change(FASTER, Target("kernel", "*"), 1.0)], baseline).predicted_step_ns == (
        baseline.step_ns
    )


programs = some.lists(
    some.one_of(
        some.builds(
            kernel,
            some.sampled_from(["mm", "norm"]),
            some.integers(1_000, 300_000),
            host_ns=some.just(0) | some.integers(0, 100_000),
        ),
        some.builds(item, host_ns=some.just(0) | some.integers(0, 50_000)),
        some.builds(synchronize, host_ns=some.just(0) | some.integers(0, 50_000)),
        some.builds(Do, some.just("think"), host_ns=some.just(0) | some.integers(0, 100_000)),
    ),
    min_size=1,
    max_size=12,
).map(lambda program: [kernel("mm", 10_000), *program])


@settings(max_examples=25, deadline=None)
@given(programs, some.sampled_from([1.0, 2.0, 10.0]))
def test_a_faster_kernel_changes_a_step_as_the_machine_itself_would(program, factor):
    found = ask(program, Change(FASTER, MM, factor))
    assert found.uncertainty_ns == 0
    assert found.step_ns == step_ns(program)
    assert found.predicted_step_ns == step_ns(faster(program, "mm", factor))


@settings(max_examples=15, deadline=None)
@given(programs, some.integers(20, 30))
def test_faster_is_never_slower(program, stream):
    beside = [kernel("norm", 70_000, stream=stream), *program, kernel("mm", 9_000, after=stream)]
    baseline = find_baseline(record(beside))
    times = [
        predict([Change(FASTER, MM, factor)], baseline).predicted_step_ns
        for factor in (1.0, 1.5, 3.0, 50.0)
    ]
    assert times[0] == baseline.step_ns
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("change", [Change(REMOVED, MM), GRAPHS, doubled(MM)])
def test_a_change_leaves_the_recording_as_it_was(change):
    baseline = find_baseline(record([kernel("mm", 9_000), item(), kernel("mm", 9_000)]))
    first = predict([change], baseline)
    assert predict([change], baseline) == first
    assert baseline.step_ns == find_baseline(baseline.trace).step_ns


def loads_ahead_of_backward(num_batches):
    """Return batches of 100 ms each that autograd's thread launches most kernels of."""
    ms, kernels, ranges = 1_000_000, [], []
    for batch in range(num_batches):
        begin = batch * 104 * ms
        load = {"kind": "range", "name": "enumerate(DataLoader)#x.__next__", "thread": 1}
        ranges.append({**load, "start_ns": begin, "duration_ns": 100 * ms})
        for at in range(4):
            number, thread = 4 * batch + at, 1 if at == 0 else 2
            start = begin + (100 + at) * ms
            call = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": number}
            if thread == 2:
                node = {"name": "autograd::engine::evaluate_function: MmBackward0"}
                ranges.append({**node, "thread": 2, "start_ns": start - 1, "duration_ns": 9_000})
            ranges.append({**call, "thread": thread, "start_ns": start, "duration_ns": 5_000})
            ran = {"name": "mm", "start_ns": begin + 100 * ms + 7_000 + 10 * at * ms}
            kernels.append({**ran, "duration_ns": 10 * ms, "correlation": number})
    return trace_of(*kernels, ranges=ranges)


def test_autograds_thread_is_not_the_main_program_though_it_launches_most():
    trace = analyze(loads_ahead_of_backward(10))
    found = predict([Change(WITHOUT, cause="data loading")], find_baseline(trace))
    assert found.step_ns == 976_000_000
    # No more is saved than is recoverable: what any two kernels need between them stays.
    assert 400_000_000 <= found.predicted_step_ns <= 400_014_000


def test_a_window_without_steps_loses_no_more_than_what_is_removed():
    launches = [
        {"name": "cudaLaunchKernel", "kind": "runtime", "start_ns": at, "duration_ns": 10}
        | {"correlation": number}
        for number, at in ((1, 0), (2, 5_000))
    ]
    kernels = [
        {"name": "first", "start_ns": 100, "duration_ns": 1_000, "correlation": 1},
        {"name": "second", "start_ns": 5_100, "duration_ns": 1_000, "correlation": 2},
    ]
    baseline = find_baseline(analyzed_trace_of(*kernels, ranges=launches))
    found = predict([Change(REMOVED, Target("kernel", "first"))], baseline)
    assert baseline.step_ns == 6_000
    assert 4_000 <= found.predicted_step_ns <= 5_100


def test_a_module_has_what_runs_inside_it_and_nothing_of_its_siblings():
    modules = ["layers.0", "layers.0.attn", "layers.01", "layers.1", "layers.0x.y", "head"]
    trace = analyzed_trace_of(*({"name": "k", "module": one} for one in modules), {"name": "k"})
    for name, inside in {"layers.0": 2, "layers.*": 5, "layers.0.attn": 1, "layers": 5}.items():
        assert rows_of(Target("module", name), trace).sum() == inside
    assert rows_of(Target("kernel", "k"), trace).all()
    assert not rows_of(Target("kernel", "layers"), trace).any()
