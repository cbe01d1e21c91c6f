"""What a host that launches late was doing: it waits, loads data, allocates, sleeps, is silent."""

import numpy as np
import pandas as pd
import pytest

from kprof.analyze.findings.one_offs import LOADING, without_start_up
from kprof.analyze.findings.recoverable import recoverable_ns
from kprof.analyze.idle.host_state import matching, threads_in
from tests.analyze.idle.idle_traces import LAUNCH, US, WAIT, analyzed, causes, spent


def test_a_range_without_a_name_matches_nothing():
    names = pd.Categorical(["cudaMalloc", None, "cudaFree", "cudaMalloc"])
    kinds = ["runtime", "runtime", "runtime", "op"]
    ranges = pd.DataFrame({"name": names, "kind": kinds})
    assert matching(ranges, "runtime", "cuda").tolist() == [0, 2]
    assert matching(ranges, "runtime", "Malloc").tolist() == [0]
    assert matching(ranges, "runtime", "Memcpy").tolist() == []


def test_threads_are_told_apart_by_rank_and_number():
    rank, thread = np.array([1, 1, 0, 0, 1]), np.array([5, 5, 5, 2, 5])
    assert threads_in(rank, thread) == [(0, 2), (0, 5), (1, 5)]
    assert threads_in(rank[:0], thread[:0]) == []


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


@pytest.mark.parametrize(
    "name",
    [
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
        "enumerate(DataPipe)#BatcherIterDataPipe",
    ],
)
def test_a_data_loader_of_another_recording_is_known_by_torchs_range(name):
    assert causes(spent(100, 990, kind="range", name=name))[0] == ("data loading", 890)


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate"])
def test_calls_that_manage_memory_are_the_allocators(call):
    assert causes(spent(100, 990, kind="runtime", name=call))[0] == ("allocator", 890)


@pytest.mark.parametrize("call", ["cudaMallocAsync", "cuMemFreeAsync", "cudaMemcpyAsync"])
def test_calls_that_do_not_block_are_part_of_launching(call):
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


def after_an_upload(name, *between):
    """Return the cause of the idle time in a call of an operator that has uploaded something."""
    upload = {**LAUNCH, "name": "cudaMemcpyAsync", "start_ns": 100 * US, "duration_ns": 10 * US}
    trace = analyzed(
        {"duration_ns": 50 * US},
        {"name": "Memcpy HtoD (Pageable -> Device)", "start_ns": 105 * US, "correlation": 1},
        *({"start_ns": 150 * US, "correlation": 3} for _ in between),
        {"start_ns": 1500 * US, "correlation": 2},
        ranges=[
            upload,
            *between,
            spent(200, 1400, name=name, kind="runtime"),
            {**LAUNCH, "start_ns": 1490 * US, "correlation": 2},
            {"name": "aten::convolution", "start_ns": 90 * US, "duration_ns": 1410 * US},
        ],
    )
    longest = trace.idle["duration_ns"].idxmax()
    return trace.idle["cause"][longest]


def test_a_wait_belongs_to_the_upload_before_it_unless_another_launch_lies_between():
    launch = {**LAUNCH, "start_ns": 140 * US, "correlation": 3}
    assert after_an_upload("cudaStreamSynchronize") == "pageable copy"
    assert after_an_upload("cudaStreamSynchronize", launch) == "synchronization"


def test_memory_allocated_by_an_operator_that_also_uploads_is_the_allocators():
    assert after_an_upload("cudaHostAlloc") == "allocator"


def test_a_copy_from_pinned_memory_is_launched_like_a_kernel():
    copy = {"name": "Memcpy HtoD (Pinned -> Device)", "activity": "memcpy"}
    assert causes(**copy) == [("launch-bound", 900)]


def test_a_barrier_waits_for_the_other_ranks():
    barrier = spent(90, 985, name="c10d::barrier")
    assert causes(barrier, spent(100, 980, **WAIT))[0] == ("collective wait", 880)


@pytest.mark.parametrize("name", ["nanosleep", "poll", "pthread_cond_timedwait", "recvmsg"])
def test_a_call_of_the_system_that_waits_is_no_work(name):
    assert causes(spent(100, 700, kind="system", name=name))[0] == ("no work", 600)


@pytest.mark.parametrize("name", ["read", "getc", "pthread_create", "pollute"])
def test_another_call_of_the_system_is_the_hosts_work(name):
    idle = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 9000 * US, "correlation": 1},
        ranges=[
            {**LAUNCH, "start_ns": 8990 * US},
            spent(200, 8900, kind="system", name=name),
        ],
    ).idle
    longest = idle.loc[idle["duration_ns"].idxmax()]
    assert (longest["cause"], longest["place"]) == ("launch-bound", name)
    assert longest["duration_ns"] >= 8700 * US


@pytest.mark.parametrize(
    ("kind", "name", "recoverable"),
    [
        ("python", "<built-in function sleep>", 0),
        # Of a worker's batch, a lock or a request: the call alone does not tell.
        ("system", "poll", pd.NA),
    ],
)
def test_what_a_waiting_call_would_give_back_is_not_known(kind, name, recoverable):
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 9000 * US, "correlation": 1},
        ranges=[{**LAUNCH, "start_ns": 8990 * US}, spent(200, 8900, kind=kind, name=name)],
    )
    waits = (trace.idle["cause"] == "no work").to_numpy(bool)
    assert trace.idle["duration_ns"][waits].sum() == 8700 * US
    assert recoverable_ns(trace)[waits].tolist() == [recoverable]


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


def test_a_silent_host_is_unknown_without_steps_and_stacks():
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


def first_use(*call_us, name="cudaLaunchKernel"):
    """Return the trace of an upload that the host waits for, then of launches of one kernel."""
    copy = {"name": "Memcpy HtoD (Pageable -> Device)", "activity": "memcpy", "correlation": 1}
    kernels, at = [copy | {"start_ns": 10 * US, "duration_ns": 500 * US}], 515
    calls = [spent(0, 512, kind="runtime", name="cudaMemcpy", correlation=1)]
    for number, took in enumerate(call_us, 2):
        call = spent(at, at + took, kind="runtime", name=name, correlation=number)
        kernels.append(
            {"name": "vecAdd", "correlation": number} | spent(at + took + 1, at + took + 3)
        )
        calls.append(call)
        at += took + 10
    return analyzed(*kernels, ranges=calls)


def loaded_us(trace):
    """Return the start-up by loading, and the longest idle time that a copy is blamed for."""
    start_up = sum(one.time_ns for one in without_start_up(trace)[1] if one.what == LOADING)
    idle = trace.idle
    blamed = idle["duration_ns"][(idle["cause"] == "pageable copy").to_numpy(bool)]
    return start_up // US, int(blamed.max() or 0) // US if len(blamed) else 0


def test_a_kernels_first_launch_that_takes_far_longer_than_others_loads_it():
    assert loaded_us(first_use(400, 5, 5, 5))[0] >= 400
    assert loaded_us(first_use(400))[0] >= 400


def test_modules_are_loaded_once_each_whenever_that_is():
    calls = [name for i in range(4) for name in (f"kernel {i}", *["vecAdd"] * 3)]
    ranges, kernels = [], [spent(0, 10) | {"correlation": 1, "name": "vecAdd"}]
    for number, name in enumerate(calls, 2):
        took, at = (5, 900)[name != "vecAdd"], 1000 * number
        ranges.append({**LAUNCH, "correlation": number} | spent(at - 1 - took, at - 1))
        kernels.append(spent(at, at + 980 - 890 * (name == "vecAdd")) | {"name": name})
        kernels[-1]["correlation"] = number
    assert loaded_us(analyzed(*kernels, ranges=ranges))[0] >= 4 * 800


def test_captures_that_go_on_leave_the_loading_of_a_module_start_up():
    calls = [{"name": "cuLibraryLoadData"}, *[{"name": "cudaGraphInstantiate"}] * 4]
    ranges, kernels = [], [spent(0, 10) | {"correlation": 1}]
    for number, call in enumerate(calls, 2):
        at = 1000 * number
        ranges.append(call | {"kind": "runtime"} | spent(at - 900, at - 10))
        ranges.append({**LAUNCH, "correlation": number} | spent(at - 5, at - 1))
        kernels.append(spent(at, at + 10) | {"correlation": number})
    assert loaded_us(analyzed(*kernels, ranges=ranges))[0] >= 890


def test_no_lead_would_hide_the_loading_of_a_kernel():
    assert loaded_us(first_use(400, 5, 5, 5))[1] < 40


def test_a_launch_loads_nothing_that_is_usual_or_no_kernels():
    assert loaded_us(first_use(400, 390, 410))[0] == 0
    assert loaded_us(first_use(40, 5, 5, 5))[0] == 0
    assert loaded_us(first_use(400, 5, 5, name="cudaGraphLaunch"))[0] == 0
