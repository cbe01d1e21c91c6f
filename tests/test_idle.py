"""Every nanosecond in which a device did nothing has one cause, or none that anybody knows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribute import add_attribution
from kprof.analyze.classify import add_kind
from kprof.analyze.host import add_host_activity
from kprof.analyze.idle.assign import add_idle
from kprof.analyze.idle.causes import CAUSES
from kprof.analyze.ledger import union_ns
from kprof.trace import Recording
from tests.traces import trace_of

US = 1_000
LAUNCH = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1, "duration_ns": 5 * US}
WAIT = {"kind": "runtime", "name": "cudaStreamSynchronize"}


def analyzed(*kernels, ranges=(), **meta):
    trace = trace_of(*kernels, ranges=ranges, **meta)
    return add_idle(add_kind(add_attribution(add_host_activity(trace))))


def idle_of(*ranges, launched_at=990 * US, call_ns=5 * US, **second):
    """Return the idle time of a device that did nothing from 100 to 1,000 µs."""
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 1000 * US, "correlation": 1, **second},
        ranges=[{**LAUNCH, "start_ns": launched_at, "duration_ns": call_ns}, *ranges],
    )
    return trace.idle


def causes(*ranges, **options):
    """Return the idle time by cause, in µs, in the order of its pieces."""
    idle = idle_of(*ranges, **options)
    cause = idle["cause"].astype(object).where(idle["cause"].notna(), None)
    return [(c, ns / US) for c, ns in zip(cause, idle["duration_ns"], strict=True)]


def spent(start_us, end_us, **row):
    return {**row, "start_ns": start_us * US, "duration_ns": (end_us - start_us) * US}


def test_a_kernel_launched_after_the_device_went_idle_was_late_on_the_host():
    assert causes() == [("launch-bound", 900)]


def test_a_kernel_queued_before_on_the_same_stream_waited_for_something_unknown():
    assert causes(launched_at=50 * US) == [(None, 900)]


def test_a_kernel_queued_before_on_another_stream_waited_for_what_ran_there():
    assert causes(launched_at=50 * US, stream=8) == [("dependency wait", 900)]


def test_a_kernel_behind_a_collective_of_another_stream_waited_for_the_other_ranks():
    trace = analyzed(
        {"name": "ncclDevKernel_AllReduce", "duration_ns": 100 * US, "stream": 30},
        {"start_ns": 1000 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 0}],
    )
    assert trace.idle["cause"].tolist() == ["collective wait"]


def test_what_a_kernel_waited_for_is_what_ended_last_before_it():
    trace = analyzed(
        {"name": "ncclDevKernel_AllReduce", "duration_ns": 100 * US, "stream": 30},
        {"start_ns": 10 * US, "duration_ns": 10 * US},
        {"start_ns": 1000 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 0}],
    )
    assert trace.idle["cause"].tolist() == ["collective wait"]


def test_what_the_host_does_after_the_launch_did_not_hold_it_up():
    assert causes(spent(991, 1500, **WAIT), launched_at=985 * US) == [("launch-bound", 900)]


def test_a_launch_that_took_the_whole_gap_was_late():
    assert causes(launched_at=50 * US, call_ns=940 * US) == [("launch-bound", 900)]


def test_the_rest_of_a_gap_after_a_launch_came_through_is_not_the_hosts():
    # Launched when the device had been idle for 100 µs; a launch comes through in about 7.
    assert causes(launched_at=200 * US, stream=8) == [
        ("launch-bound", 114),
        ("dependency wait", 786),
    ]


def test_a_gap_that_any_two_kernels_have_between_them_is_nobodys_fault():
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 102 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 96 * US}],
    )
    assert trace.idle["cause"].tolist() == ["between kernels"]
    assert trace.idle["recoverable_ns"].tolist() == [0]


def test_the_nodes_of_a_graph_follow_one_another_without_the_host():
    graph = [{"start_ns": at * US, "correlation": 1, "duration_ns": US} for at in (100, 300)]
    launch = {**LAUNCH, "name": "cudaGraphLaunch", "start_ns": 90 * US, "duration_ns": 900 * US}
    trace = analyzed({"duration_ns": 20 * US}, *graph, ranges=[launch])
    assert trace.idle["cause"].tolist() == ["launch-bound", "dependency wait"]


def test_a_wait_for_the_device_is_synchronization_as_long_as_it_lasts():
    # It held the host for no time in which the device worked, so that no lead was lost.
    assert causes(spent(100, 700, **WAIT)) == [("synchronization", 600), ("launch-bound", 300)]


def test_what_is_launched_late_after_a_wait_is_synchronization_for_as_long_as_the_wait_held():
    assert causes(spent(40, 110, **WAIT)) == [("synchronization", 70), ("launch-bound", 830)]


def test_a_wait_of_another_rank_explains_nothing():
    assert causes(spent(40, 110, rank=1, **WAIT)) == [("launch-bound", 900)]


def test_a_wait_of_a_thread_that_launches_nothing_explains_nothing():
    assert causes(spent(40, 900, thread=9, **WAIT)) == [("launch-bound", 900)]


def test_a_wait_is_the_cause_also_after_the_host_was_ahead_for_a_moment():
    # It held the host for 200 µs. The third kernel was queued behind the second, the fourth late.
    at = {1: (240, 250), 2: (260, 350), 3: (300, 450), 4: (540, 550)}
    kernels = [
        {"start_ns": start * US, "duration_ns": 100 * US, "correlation": i}
        for i, (_, start) in at.items()
    ]
    kernels[2]["duration_ns"] = 50 * US
    launches = [{**LAUNCH, "correlation": i, "start_ns": made * US} for i, (made, _) in at.items()]
    wait = spent(0, 205, **WAIT)
    idle = analyzed({"duration_ns": 200 * US}, *kernels, ranges=[*launches, wait]).idle
    pieces = zip(idle["cause"], idle["duration_ns"] / US, strict=True)
    assert list(pieces) == [("synchronization", 50), ("synchronization", 50)]


def test_data_loading_counts_for_itself_also_after_a_wait():
    load = {"kind": "phase", "name": "data"}
    assert causes(spent(0, 110, **WAIT), spent(150, 850, **load)) == [
        ("synchronization", 50),
        ("data loading", 700),
        ("synchronization", 60),
        ("launch-bound", 90),
    ]


def test_a_data_loader_of_another_recording_is_known_by_torchs_range():
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    assert causes(spent(100, 990, kind="range", name=name))[0] == ("data loading", 890)


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate"])
def test_calls_that_manage_memory_are_the_allocators(call):
    assert causes(spent(100, 990, kind="runtime", name=call))[0] == ("allocator", 890)


@pytest.mark.parametrize("call", ["cudaMallocAsync", "cuMemFreeAsync", "cudaMemcpyAsync"])
def test_calls_that_block_nobody_are_part_of_launching(call):
    assert causes(spent(100, 990, kind="runtime", name=call)) == [("launch-bound", 900)]


def test_a_version_in_a_calls_name_changes_nothing():
    call = spent(100, 990, kind="runtime", name="cudaMemcpy_v3020")
    assert causes(call)[0] == ("synchronization", 890)


def test_a_copy_from_pageable_memory_blocks_the_host_and_so_does_its_wait():
    copy = {**LAUNCH, "name": "cudaMemcpyAsync", "start_ns": 100 * US, "duration_ns": 910 * US}
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"name": "Memcpy HtoD (Pageable -> Device)", "start_ns": 1000 * US, "correlation": 1},
        {"start_ns": 1500 * US, "correlation": 2},
        ranges=[
            copy,
            spent(1010, 1400, **WAIT),
            {**LAUNCH, "start_ns": 1490 * US, "correlation": 2},
            {"name": "aten::copy_", "start_ns": 90 * US, "duration_ns": 1400 * US},
        ],
    )
    assert trace.idle["cause"].tolist()[:2] == ["pageable copy", "pageable copy"]
    assert trace.idle["place"].tolist()[0] == "aten::copy_"


def test_a_copy_from_pinned_memory_is_launched_like_a_kernel():
    copy = {"name": "Memcpy HtoD (Pinned -> Device)", "activity": "memcpy"}
    assert causes(**copy) == [("launch-bound", 900)]


def test_a_barrier_waits_for_the_other_ranks():
    barrier = spent(90, 985, name="c10d::barrier")
    assert causes(barrier, spent(100, 980, **WAIT))[0] == ("collective wait", 880)


def test_what_the_profiler_does_amid_a_launch_is_the_profilers():
    flush = spent(200, 900, kind="overhead", name="Activity Buffer Request", thread=0)
    assert causes(flush) == [("launch-bound", 100), ("profiler", 700), ("launch-bound", 100)]


def test_that_the_driver_loads_a_kernel_is_not_the_profilers():
    load = spent(200, 900, kind="overhead", name="Lazy Function Loading", thread=0)
    assert causes(load) == [("launch-bound", 900)]


def test_sleeping_is_no_work_where_stacks_tell():
    sleep = spent(200, 900, kind="python", name="<built-in function sleep>")
    assert causes(sleep) == [("launch-bound", 100), ("no work", 700), ("launch-bound", 100)]


def test_a_lock_that_the_data_loader_waits_for_is_data_loading():
    lock = "<built-in method acquire of _thread.lock object at 0x7f18>"
    loader = "torch/utils/data/dataloader.py(720): __next__"
    rows = [spent(100, 990, kind="python", name=name) for name in (loader, lock)]
    assert causes(*rows)[0] == ("data loading", 890)


def silence(*steps):
    """Return the cause of 9 ms in which the host shows nothing before it launches."""
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 9_100 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 9_090 * US}, *steps],
    )
    inside = trace.idle[trace.idle["edge"].isna()]
    return inside.sort_values("duration_ns")["cause"].tolist()[-1]


def test_a_silent_host_in_a_step_runs_python():
    assert silence(spent(0, 10_000, kind="step", name="1")) == "launch-bound"


def test_a_silent_host_between_steps_has_no_work():
    steps = [spent(0, 90, kind="step", name="1"), spent(9_085, 9_200, kind="step", name="2")]
    assert silence(*steps) == "no work"


def test_nobody_knows_what_a_silent_host_does_without_steps_and_stacks():
    assert silence(spent(0, 50, name="aten::mm"), spent(9_085, 9_200, name="aten::mm")) is not None
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 9_100 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 9_090 * US}, spent(0, 50, name="aten::mm")],
    )
    assert trace.idle.sort_values("duration_ns")["cause"].isna().tolist()[-1]


def test_where_the_launching_thread_shows_nothing_the_others_are_asked():
    # The first kernel of a backward pass: autograd's thread is new, the calling one waited.
    wait = spent(100, 980, thread=2, **WAIT)
    earlier = {**LAUNCH, "correlation": 7, "thread": 2, "start_ns": 0}
    trace = analyzed(
        {"duration_ns": 100 * US, "correlation": 7},
        {"start_ns": 1000 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 990 * US}, wait, earlier],
    )
    assert trace.idle["cause"].tolist()[0] == "synchronization"


def test_the_gap_before_an_orphan_has_no_known_cause():
    trace = analyzed({"duration_ns": 100 * US}, {"start_ns": 250 * US})
    assert trace.idle["cause"].isna().all()
    assert trace.kernels["gap_before_ns"][1] == 150 * US
    assert trace.kernels["gap_cause"].isna().all()


def test_the_gap_before_the_first_activity_is_unknown():
    assert analyzed({"stream": 7}).kernels["gap_before_ns"].isna().all()


def test_a_gaps_cause_is_that_of_its_longest_piece():
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 1000 * US, "correlation": 1},
        ranges=[
            {**LAUNCH, "start_ns": 990 * US},
            spent(100, 700, kind="runtime", name="cudaMalloc"),
        ],
    )
    assert trace.kernels["gap_cause"].tolist()[1] == "allocator"


def test_a_device_is_idle_while_another_one_of_its_rank_works():
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"duration_ns": 40 * US, "device": 1},
        {"start_ns": 90 * US, "duration_ns": 10 * US, "device": 1},
    )
    assert trace.idle[["device", "start_ns", "duration_ns"]].to_numpy().tolist() == [
        [1, 40 * US, 50 * US]
    ]
    assert trace.kernels["gap_before_ns"].sum() == 0


def test_idle_time_of_the_steps_outside_the_window_stands_apart():
    step = spent(0, 900, kind="step", name="1")
    launch = {**LAUNCH, "start_ns": 90 * US}
    kernel = {"start_ns": 100 * US, "duration_ns": 300 * US, "correlation": 1}
    trace = analyzed(kernel, ranges=[step, launch])
    assert trace.idle[["edge", "duration_ns"]].to_numpy().tolist() == [
        ["before", 100 * US],
        ["after", 500 * US],
    ]


def test_kprofs_own_drain_costs_the_lead_before_the_first_launch():
    ranges = [spent(0, 200, kind="step", name="1"), {**LAUNCH, "start_ns": 90 * US}]
    recording = Recording("a rule", 1, (1,))
    kernel = {"start_ns": 100 * US, "duration_ns": 300 * US, "correlation": 1}
    trace = analyzed(kernel, ranges=ranges, recording=recording)
    assert trace.idle["cause"].tolist() == ["profiler"]


def late_in_each_step(*late_us):
    """Return the pieces inside the window of steps in which the host is late by so much."""
    kernels, ranges, now = [], [], 0
    for number, late in enumerate(late_us):
        ranges.append(spent(now, now + late + 300, kind="step", name=str(number)))
        for i, gap in enumerate((0, late)):
            now += gap
            kernels.append(
                {"start_ns": now * US, "duration_ns": 100 * US, "correlation": 2 * number + i}
            )
            ranges.append({**LAUNCH, "start_ns": (now - 7) * US, "correlation": 2 * number + i})
            now += 100
        now += 1
    recording = Recording("a rule", len(late_us), tuple(range(len(late_us))))
    idle = analyzed(*kernels, ranges=ranges, recording=recording).idle
    inside = idle[idle["edge"].isna() & (idle["cause"] != "between kernels")]
    return list(zip(inside["cause"], inside["duration_ns"] / US, strict=True))


def test_a_first_step_that_is_more_idle_than_the_later_ones_lost_its_lead_to_the_drain():
    assert late_in_each_step(90, 20, 20) == [
        ("profiler", 70),
        ("launch-bound", 20),
        ("launch-bound", 20),
        ("launch-bound", 20),
    ]


def test_a_first_step_like_the_later_ones_lost_nothing_to_the_drain():
    assert late_in_each_step(90, 90, 90) == [("launch-bound", 90)] * 3


def test_a_wait_names_its_operator_its_module_and_the_workloads_line():
    idle = idle_of(
        spent(100, 700, **WAIT),
        spent(80, 710, name="aten::_local_scalar_dense"),
        spent(70, 720, kind="module", name="model.head"),
        spent(0, 995, kind="python", name="train.py(12): clip"),
        spent(60, 730, kind="python", name="torch/_tensor.py(3): item"),
    )
    first = idle.iloc[0]
    assert first["cause"] == "synchronization"
    assert first["evidence_row"] == 1
    assert (first["place"], first["module"], first["line"]) == (
        "aten::_local_scalar_dense",
        "model.head",
        "train.py(12): clip",
    )


def test_a_late_launch_names_what_the_host_ran_in_the_middle_of_the_gap():
    idle = idle_of(spent(90, 980, name="aten::sort"), spent(980, 999, name="aten::mm"))
    assert idle["place"].tolist() == ["aten::sort"]


def test_what_the_device_needs_between_two_kernels_is_not_recoverable():
    assert idle_of()["recoverable_ns"].tolist() == [900 * US - 1_500]


def test_what_a_wait_for_another_stream_would_leave_is_unknown():
    assert idle_of(launched_at=50 * US, stream=8)["recoverable_ns"].isna().all()


def test_the_docs_explain_every_cause():
    text = (Path(__file__).parent.parent / "docs" / "analysis.md").read_text()
    assert [cause for cause in CAUSES if f"| {cause} |" not in text] == []


def test_without_a_gpu_only_data_loading_is_told_from_the_rest():
    load = {"kind": "phase", "name": "data"}
    ranges = [spent(0, 100), spent(150, 900, **load), spent(1000, 1100)]
    idle = analyzed(ranges=ranges).idle
    assert idle["cause"].astype(object).fillna("?").tolist() == ["?", "data loading", "?"]
    assert idle["duration_ns"].tolist() == [50 * US, 750 * US, 100 * US]


MOMENT = st.integers(0, 3_000)
LENGTH = st.integers(0, 800)
ACTIVITY = st.fixed_dictionaries(
    {
        "start_ns": MOMENT.map(lambda us: us * US),
        "duration_ns": LENGTH.map(lambda us: us * 100),
        "stream": st.sampled_from([7, 8]),
        "device": st.sampled_from([0, 1]),
        "rank": st.sampled_from([0, 1]),
        "correlation": st.one_of(st.none(), st.integers(0, 5)),
        "name": st.sampled_from(["gemm", "ncclKernel", "Memcpy HtoD (Pageable -> Device)"]),
    }
)
RANGE = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            ["op", "runtime", "runtime", "step", "phase", "python", "overhead"]
        ),
        "name": st.sampled_from(
            ["cudaLaunchKernel", "cudaDeviceSynchronize", "cudaMalloc", "data", "1", "Buffer Flush"]
        ),
        "start_ns": MOMENT.map(lambda us: us * US),
        "duration_ns": LENGTH.map(lambda us: us * US),
        "thread": st.sampled_from([1, 2]),
        "rank": st.sampled_from([0, 1]),
        "correlation": st.one_of(st.none(), st.integers(0, 5)),
    }
)


@given(st.lists(ACTIVITY, min_size=1, max_size=12), st.lists(RANGE, max_size=12))
def test_the_pieces_of_every_device_are_all_of_its_idle_time_and_never_overlap(activities, ranges):
    trace = analyzed(*activities, ranges=ranges)
    kernels = spans(trace.kernels)
    inside = spans(trace.idle[trace.idle["edge"].isna()])
    for rank, device in {(row[0], row[1]) for row in kernels}:
        of_rank = [row for row in kernels if row[0] == rank]
        busy = [row for row in of_rank if row[1] == device]
        idle = [row for row in inside if row[:2] == (rank, device)]
        window = max(row[3] for row in of_rank) - min(row[2] for row in of_rank)
        assert length(idle) == sum(row[3] - row[2] for row in idle)
        assert length(busy) + length(idle) == length(busy + idle) == window
    assert (trace.idle["duration_ns"] > 0).all()
    assert (trace.idle["recoverable_ns"].fillna(0) <= trace.idle["duration_ns"]).all()


def spans(table):
    """Return rank, device, start and end of each row."""
    columns = (table[c].tolist() for c in ("rank", "device", "start_ns", "duration_ns"))
    return [(rank, device, at, at + ns) for rank, device, at, ns in zip(*columns, strict=True)]


def length(rows):
    return union_ns(*(np.array([row[i] for row in rows], dtype=np.int64) for i in (2, 3)))
