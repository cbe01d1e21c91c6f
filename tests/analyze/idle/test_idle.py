"""Every nanosecond in which a device did nothing has one cause, or none that anybody knows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprof.analyze.attribution.ledger import balance, union_ns
from kprof.analyze.groupings import split_window
from kprof.analyze.idle.causes import CAUSES, group_idle, inside_window
from kprof.analyze.idle.gaps import find_launches
from kprof.analyze.passes import analyze
from kprof.opened import read
from kprof.trace import Recording
from tests.analyze.idle.idle_traces import LAUNCH, US, WAIT, analyzed, causes, idle_of, spent


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


def test_a_gap_as_between_any_two_kernels_has_no_cause_on_the_host():
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
    assert trace.kernels["gap_before_ns"].fillna(0).tolist() == [0, 0, 50 * US]


def test_what_a_device_waits_for_its_first_activity_is_idle_time_but_no_gap():
    late = {**LAUNCH, "start_ns": 60 * US}
    first = {"start_ns": 70 * US, "duration_ns": 30 * US, "device": 1, "correlation": 1}
    trace = analyzed({"duration_ns": 100 * US}, first, ranges=[late])
    assert trace.idle["duration_ns"].sum() == 70 * US
    assert trace.kernels["gap_before_ns"].isna().all()
    assert trace.kernels["gap_cause"].isna().all()


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


def late_after_a_wait(names, first=-3, **meta):
    """Return what the host launches 90 µs late after waits of such names, one in each step.

    The device is drained when the first of them begins; the others wait for 300 µs of work.
    `first` is when the first begins, in µs from the device's first activity, which takes 2.
    """
    kernels = [{"start_ns": 0, "duration_ns": 2 * US, "correlation": 90}]
    ranges = []
    for number, name in enumerate(names):
        now = 400 * number
        ranges += [
            spent(now - 7, now + 395, kind="step", name=str(number)),
            spent(now - 295 if number else first, now + 3, kind="runtime", name=name),
            {**LAUNCH, "start_ns": (now + 85) * US, "correlation": number},
        ]
        kernels.append({"start_ns": (now + 92) * US, "duration_ns": 310 * US})
        kernels[-1]["correlation"] = number
    idle = analyzed(*kernels, ranges=ranges, **meta).idle
    return idle[idle["edge"].isna() & (idle["duration_ns"] > 3 * US)]["cause"].tolist()


def test_a_wait_that_the_drain_left_nothing_to_wait_for_costs_the_lead_that_it_costs_later():
    steps = Recording("a rule", 3, (0, 1, 2))
    waits = [WAIT["name"]] * 3
    assert late_after_a_wait(waits, recording=steps) == ["synchronization"] * 3
    # Whether or not the device's first activity has just ended.
    assert late_after_a_wait(waits, first=2.5, recording=steps) == ["synchronization"] * 3
    # Without a drain nothing hid what it waited for.
    assert late_after_a_wait(waits) == ["launch-bound", *["synchronization"] * 2]


def test_what_another_call_waits_for_later_says_nothing_of_the_first_one():
    steps = Recording("a rule", 3, (0, 1, 2))
    waits = ["cudaDeviceSynchronize", *[WAIT["name"]] * 2]
    assert late_after_a_wait(waits, recording=steps)[0] == "launch-bound"


def test_a_python_range_without_a_name_is_no_line_of_the_workload():
    idle = idle_of(
        spent(0, 995, kind="python", name="train.py(12): clip"),
        spent(60, 730, kind="python", name=None),
        spent(100, 700, **WAIT),
    )
    assert idle["line"].iloc[0] == "train.py(12): clip"


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


def test_at_most_the_whole_of_a_wait_is_recoverable():
    assert idle_of()["recoverable_ns"].tolist() == [900 * US]
    wait = {**WAIT, "start_ns": 90 * US, "duration_ns": 900 * US}
    assert idle_of(wait)["recoverable_ns"].tolist() == [900 * US]


def test_what_a_wait_for_another_stream_would_leave_is_unknown():
    assert idle_of(launched_at=50 * US, stream=8)["recoverable_ns"].isna().all()


def test_the_docs_explain_every_cause():
    text = (Path(__file__).parents[3] / "docs" / "analysis.md").read_text()
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


@pytest.mark.slow
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
    ledger, split = balance(trace), split_window(trace)
    assert ledger.balances
    assert group_idle(inside_window(trace.idle))["time_ns"].sum() == ledger.idle_ns
    assert split["time_ns"][split["is_idle"].astype(bool)].sum() == ledger.idle_ns
    assert split["time_ns"].sum() == ledger.window_ns
    assert (trace.idle["duration_ns"] > 0).all()
    assert (trace.idle["recoverable_ns"].fillna(0) <= trace.idle["duration_ns"]).all()


def spans(table):
    """Return rank, device, start and end of each row."""
    columns = (table[c].tolist() for c in ("rank", "device", "start_ns", "duration_ns"))
    return [(rank, device, at, at + ns) for rank, device, at, ns in zip(*columns, strict=True)]


def length(rows):
    return union_ns(*(np.array([row[i] for row in rows], dtype=np.int64) for i in (2, 3)))


def test_short_pauses_within_a_recorded_cuda_graph_are_the_devices_own():
    trace = analyze(read([Path(__file__).parents[2] / "data" / "h200" / "cudagraph.json.gz"]))
    inside = inside_window(trace.idle)
    times = inside["duration_ns"].groupby(inside["cause"], observed=True).sum()
    assert times["between kernels"] > 4 * times["dependency wait"]
    # As launches on an idle device take under CUPTI.
    assert 7_000 <= find_launches(trace).latency_ns[0] <= 12_000
