"""What is said of large parts of a step that no rule explains."""

from __future__ import annotations

import pytest

from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.findings.unexplained import find_unexplained, is_of_nvidia
from kprof.analyze.idle.causes import CAUSES, DEPENDENCY_WAIT
from kprof.analyze.passes import analyze
from kprof.analyze.whatif.baseline import find_baseline
from kprof.trace import Gpu
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, trace_of

MATMUL = {"name": "matmul", "kind": "gemm", "duration_ns": 1_000}
HOST = {"activity": "host", "kind": "other"}
UPLOAD = {
    "name": "Memcpy HtoD (Pinned -> Device)",
    "activity": "memcpy",
    "kind": "copy",
    "duration_ns": 1_000,
    "copied_bytes": 50_000,
}


def on(gpu, *kernels, calls=(), idle=()):
    ranges = [{"kind": "runtime", "name": name} for name in calls]
    return analyzed_trace_of(*kernels, ranges=ranges, idle=idle, gpus=(Gpu(0, gpu),))


def learned(trace):
    (found,) = find_unexplained(trace, [])
    return found.details[-1]


@pytest.mark.parametrize(
    ("gpu", "calls", "told"),
    [
        ("NVIDIA H100 80GB HBM3", ["cudaLaunchKernel"], True),
        ("", ["cuLaunchKernel"], True),
        ("", [], True),
        ("AMD Instinct MI300X", ["hipLaunchKernel"], False),
        ("AMD Radeon Graphics", [], False),
        ("", ["hipLaunchKernel"], False),
        ("ARTEMIS", [], False),
        ("CUDA device of architecture 86", ["launches"], True),
        ("", ["urEnqueueKernelLaunch"], False),
    ],
)
def test_tools_of_nvidia_are_named_for_its_devices_alone(gpu, calls, told):
    trace = on(gpu, MATMUL, calls=calls)
    assert is_of_nvidia(trace) is told
    assert ("--ncu" in learned(trace)) is told


@pytest.mark.parametrize(("gpu", "told"), [("NVIDIA A100", True), ("AMD Instinct MI210", False)])
def test_a_wait_for_another_stream_is_shown_by_nsight_on_nvidia_alone(gpu, told):
    wait = {"cause": DEPENDENCY_WAIT, "start_ns": 1_000, "duration_ns": 9_000, "kernel_row": 1}
    small = {**MATMUL, "duration_ns": 10, "start_ns": 10_000}
    trace = on(gpu, {**small, "start_ns": 0}, small, idle=[wait])
    assert ("--nsys" in learned(trace)) is told


def test_copies_say_how_much_they_move_and_how_fast():
    (found,) = find_unexplained(on("NVIDIA A100", UPLOAD), [])
    assert quantities_in(found.claim)[-2:] == ["48.8 KiB", "50.0 GB/s"]
    assert "--ncu" not in found.details[-1]


def test_copies_with_a_few_kernels_among_them_are_still_copies():
    kernel = {"name": "direct_copy_kernel", "kind": "copy", "start_ns": 2_000, "duration_ns": 400}
    (found,) = find_unexplained(on("NVIDIA A100", UPLOAD, kernel), [])
    assert "at 50.0 GB/s" in found.claim
    assert "that copies" in found.details[-1]


def test_of_copies_of_no_known_size_nothing_is_said():
    (found,) = find_unexplained(on("NVIDIA A100", {**UPLOAD, "copied_bytes": None}), [])
    assert "not known" in found.claim


def test_kernels_that_copy_are_counted_like_any_other():
    kernel = {"name": "direct_copy_kernel", "kind": "copy", "duration_ns": 1_000}
    assert "--ncu" in learned(on("NVIDIA A100", kernel))


def test_without_a_timeline_shares_are_of_the_device_time():
    trace = analyzed_trace_of(MATMUL, untimed="nothing tells when it ran")
    (found,) = find_unexplained(trace, [])
    assert ("device time" in found.claim, "100 %" in quantities_in(found.claim)) == (True, True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("cudaLaunchKernel", True),
        ("hipLaunchKernel", True),
        ("urEnqueueKernelLaunch", True),
        ("runFunction - job_prep_and_submit_for_execution", False),
        ("aclrtLaunchKernel", False),
    ],
)
def test_nothing_is_replayed_where_the_hosts_waits_are_unknown(call, told):
    baseline = find_baseline(on("A", MATMUL, calls=[call]))
    assert (baseline.refusal is None) is told


@pytest.mark.parametrize(("num_ranks", "is_asked"), [(1, True), (2, False)])
def test_ranks_that_are_open_together_are_not_asked_for(num_ranks, is_asked):
    collective = {"name": "ncclKernel_AllReduce", "kind": "collective", "duration_ns": 1_000}
    ranks = [{**collective, "rank": rank} for rank in range(num_ranks)]
    learn = learned(analyzed_trace_of(*ranks, num_ranks=num_ranks))
    assert ("kprof open FOLDER" in learn) is is_asked
    assert ("playbook exposed_collectives" in learn) is not is_asked


def launching(number, *kernels):
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": at, "start_ns": 10 * at}
        for at in range(number)
    ]
    op = {"kind": "op", "name": "aten::mm", "duration_ns": 900}
    return analyze(trace_of(*kernels, ranges=[op, *calls]))


@pytest.mark.parametrize(("number", "is_told"), [(4, False), (5, False), (6, True)])
def test_launches_without_activity_are_a_finding_above_a_fifth(number, is_told):
    kernels = [{**MATMUL, "correlation": at, "start_ns": 2_000 * at + 100} for at in range(4)]
    trace = launching(number, *kernels)
    claims = [one.claim for one in find_unexplained(trace, [])]
    told = "2 of 6 launches of kernels and graphs (33 %) left no activity in the recording: their"
    assert claims[0].startswith(told) is is_told


def test_of_a_host_whose_launches_left_nothing_that_is_told_first_and_graded():
    trace = launching(3)
    assert "3 of 3 launches" in find_unexplained(trace, [])[0].claim
    (check,) = [one for one in audit(trace) if one.name == "GPU activity"]
    assert (check.verdict, quantities_in(check.evidence)) == ("bad", ["3"])
    assert trace.diagnosis.findings[0].cause_ns is None


def test_operators_of_a_host_outside_of_all_steps_are_told_to_be_there():
    step = {"kind": "step", "name": "ProfilerStep#1", "start_ns": 0, "duration_ns": 500}
    after = {"kind": "op", "name": "aten::empty", "start_ns": 900, "duration_ns": 40}
    outside, inside = (
        find_unexplained(analyze(trace_of(ranges=[step, {**after, "start_ns": begin}])), [])[0]
        for begin in (900, 300)
    )
    assert "time of 40 ns outside of all steps, where all of them ran, the largest" in outside.claim
    assert "time of 40 ns in a step the largest are aten::empty 40 ns (100 %)" in inside.claim


# For each part of a recording how a trace holds it, and the option that records it.
HELD = {
    "stacks": ({"ranges": [{"kind": "python", "name": "train.py(3): step"}]}, "--stacks"),
    "shapes": ({"ranges": [{"input_shapes": "[[4, 4]]"}]}, "shapes"),
    "memory": (
        {"samples": [{"source": "profiler", "quantity": "allocated_bytes", "value": 1.0}]},
        "--memory",
    ),
    "counters": ({"kernel": {"counted_ns": 900}}, "--ncu"),
    "nsys": ({"meta": {"tool": "nsys"}}, "--nsys"),
}


def recorded_with(parts, cause, activity):
    """Return a trace that is idle for the cause, runs a kernel, and holds these parts."""
    held = [HELD[part][0] for part in parts]
    ranges = [row for one in held for row in one.get("ranges", ())]
    samples = [row for one in held for row in one.get("samples", ())]
    first, second = (
        {**MATMUL, **activity, "start_ns": start, **row}
        for start in (0, 3_000)
        for row in [{key: v for one in held for key, v in one.get("kernel", {}).items()}]
    )
    idle = {"cause": cause, "start_ns": 1_000, "duration_ns": 2_000, "kernel_row": 1}
    meta = {key: value for one in held for key, value in one.get("meta", {}).items()}
    return analyzed_trace_of(first, second, ranges=ranges, samples=samples, idle=[idle], **meta)


@pytest.mark.parametrize("activity", [{}, {"activity": "memcpy", "kind": "copy"}, HOST])
@pytest.mark.parametrize("cause", [*CAUSES, None])
def test_no_advice_is_to_record_what_is_recorded(cause, activity):
    for parts in (*((part,) for part in HELD), tuple(HELD)):
        trace = recorded_with(parts, cause, activity)
        told = [one for found in find_unexplained(trace, []) for one in found.details]
        advice = [one for one in told if one.startswith("To learn more: ")]
        # What records shapes is not what leaves them out.
        advice = [one.replace("--no-shapes", "") for one in advice]
        for part in parts:
            assert not any(HELD[part][1] in one for one in advice), (parts, advice)


def test_what_was_not_recorded_is_advised():
    advice = " ".join(
        one
        for cause in CAUSES
        for found in find_unexplained(recorded_with((), cause, {}), [])
        for one in found.details
    )
    for _, option in (HELD[part] for part in ("stacks", "memory", "counters", "nsys")):
        assert option in advice
    (of_host,) = find_unexplained(recorded_with((), None, HOST), [])[:1]
    assert "shapes" in of_host.details[-1]
    assert "--stacks" in of_host.details[-1]


def test_operators_of_a_host_of_which_none_has_a_name_are_no_finding():
    trace = recorded_with((), None, {**HOST, "name": None})
    assert [one for one in find_unexplained(trace, []) if one.rows] == []


@pytest.mark.parametrize(("kind", "told"), [("runtime", True), ("op", False)])
def test_a_program_that_may_not_be_pythons_is_asked_for_nvtx_ranges(kind, told):
    silent = {"cause": None, "start_ns": 1_000, "duration_ns": 9_000, "kernel_row": 1}
    small = {**MATMUL, "duration_ns": 10, "start_ns": 10_000}
    ranges = [{"kind": kind, "name": "work"}]
    trace = analyzed_trace_of(MATMUL, small, ranges=ranges, idle=[silent], tool="nsys")
    assert ("NVTX" in learned(trace)) is told


@pytest.mark.parametrize(("called_ns", "is_the_hosts"), [(900, False), (2_500, True), (None, True)])
def test_what_was_launched_in_time_is_not_blamed_on_the_host(called_ns, is_the_hosts):
    late = {"cause": None, "start_ns": 1_000, "duration_ns": 2_000, "kernel_row": 1}
    calls = [] if called_ns is None else [{"kind": "runtime", "start_ns": called_ns}]
    launched = {} if called_ns is None else {"launch_row": 0}
    trace = analyzed_trace_of(
        MATMUL, {**MATMUL, "start_ns": 3_000, **launched}, ranges=calls, idle=[late]
    )
    (found,) = [one for one in find_unexplained(trace, []) if one.idle_rows]
    assert ("host's work" in found.claim) is is_the_hosts
