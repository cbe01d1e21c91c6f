"""Bandwidth of collectives: the message over the transfer, without the wait for the last rank."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from kprof.analyze.bus_bandwidth import measure_collectives
from kprof.analyze.condense import condensed
from kprof.device import Links
from tests.rank_patterns import opened, pattern_of
from tests.traces import ROUND_DEVICE, trace_of

MS = 1_000_000
# 100 MB in fp32.
ELEMENTS = 25_000_000


def two_ranks(collective, message, num_ranks=2):
    """Rank 1 comes 3 ms late; the transfer takes 1 ms; a gemm of rank 0 hides 2 ms."""
    common = {"stream": 30, "collective": collective, "group": "0 [0, 1]", "group_sequence": 5}
    common |= {"kind": "collective", "name": "nccl"}
    rows = [
        {**common, "rank": 0, "op_row": 0, "start_ns": 0, "duration_ns": 4 * MS},
        {**common, "rank": 1, "op_row": 1, "start_ns": 3 * MS, "duration_ns": MS},
    ][:num_ranks]
    rows.append({"start_ns": 0, "duration_ns": 2 * MS, "kind": "gemm", "name": "gemm"})
    ranges = [
        {"name": "record_param_comms", "rank": rank, "message": message}
        for rank in range(num_ranks)
    ]
    return trace_of(*rows, ranges=ranges, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("collective", "given", "got", "algorithm", "bus"),
    [
        ("allreduce", ELEMENTS, ELEMENTS, 100e9, 100e9),
        ("_allgather_base", ELEMENTS // 2, ELEMENTS, 100e9, 50e9),
        ("_reduce_scatter_base", ELEMENTS, ELEMENTS // 2, 100e9, 50e9),
    ],
)
def test_two_ranks_move_100_mb_in_a_millisecond(collective, given, got, algorithm, bus):
    message = json.dumps([collective, given, got, "Float", 2])
    (row,) = measure_collectives(two_ranks(collective, message)).to_dict("records")
    assert row["transfer_ns"] == MS
    assert row["algorithm_bytes_per_s"] == pytest.approx(algorithm)
    assert row["bus_bytes_per_s"] == pytest.approx(bus)


def test_hidden_and_exposed_time_add_up_to_all():
    (row,) = measure_collectives(two_ranks("allreduce", None)).to_dict("records")
    assert (row["calls"], row["time_ns"]) == (2, 5 * MS)
    assert (row["hidden_ns"], row["exposed_ns"]) == (2 * MS, 3 * MS)


@pytest.mark.parametrize(
    ("message", "num_ranks"),
    [
        (None, 2),
        (json.dumps(["allreduce", 8, 8, "Quaternion", 2]), 2),
        (json.dumps(["allreduce", 8, 8, ["Float"], 2]), 2),
        (json.dumps([None, 8, 8, "Float", 2]), 2),
        (json.dumps(["allreduce", 10**400, 8, "Float", 2]), 2),
        (json.dumps(["allreduce", 8, 8, "Float", None]), 2),
        (json.dumps(["allreduce", 8, 8, "Float", 3]), 2),
        (json.dumps(["allreduce", 8, 8, "Float", 2]), 1),
    ],
    ids=[
        "no message",
        "unknown type",
        "types",
        "no name",
        "too large",
        "unknown number of ranks",
        "a rank is missing",
        "one rank",
    ],
)
def test_the_bandwidth_is_missing_where_the_recording_does_not_tell(message, num_ranks):
    table = measure_collectives(two_ranks("allreduce", message, num_ranks))
    assert pd.isna(table["bus_bytes_per_s"]).all()


ALL_REDUCE = json.dumps(["allreduce", ELEMENTS, ELEMENTS, "Float", 2])


def ceiling(trace, links, hosts=((0, "a"), (1, "a"))):
    device = replace(ROUND_DEVICE, links=links)
    trace = replace(trace, meta=replace(trace.meta, device=device, hosts=hosts))
    (row,) = measure_collectives(trace).to_dict("records")
    return row["ceiling_bytes_per_s"]


def test_the_ceiling_is_that_of_as_many_gpus_of_one_host():
    assert ceiling(two_ranks("allreduce", ALL_REDUCE), Links(400e9, 2)) == 400e9


@pytest.mark.parametrize(
    ("links", "hosts"),
    [
        (None, ((0, "a"), (1, "a"))),
        (Links(400e9, 8), ((0, "a"), (1, "a"))),
        (Links(400e9, 2), ((0, "a"), (1, "b"))),
        (Links(400e9, 2), ((0, "a"),)),
        (Links(400e9, 2), ()),
    ],
    ids=["not measured", "of 8 GPUs", "two hosts", "a host not told", "no host told"],
)
def test_the_ceiling_of_other_links_is_missing(links, hosts):
    assert pd.isna(ceiling(two_ranks("allreduce", ALL_REDUCE), links, hosts))


def test_condensed_ranks_have_the_bandwidth_and_the_hidden_time_of_all_of_them():
    trace = opened(replace(pattern_of("one", 8, 5), is_overlapped=True, groups=()))
    whole = measure_collectives(trace)
    some = replace(trace, all_ranks=condensed(trace), kernels=trace.kernels.iloc[:50])
    assert whole["bus_bytes_per_s"].notna().all()
    assert whole["hidden_ns"].sum() > 0
    pd.testing.assert_frame_equal(measure_collectives(some), whole, check_categorical=False)


@pytest.mark.parametrize("activity", ["copy", "set", "gemm"])
def test_a_condensed_collective_is_hidden_by_computation_alone(activity):
    trace = two_ranks("allreduce", ALL_REDUCE)
    kind = trace.kernels["kind"].astype(str).replace("gemm", activity).astype("category")
    trace = trace.with_kernels(kind=kind, step=pd.array([pd.NA] * len(kind), "Int64"))
    (row,) = measure_collectives(trace).to_dict("records")
    some = replace(trace, all_ranks=condensed(trace))
    (other,) = measure_collectives(some).to_dict("records")
    assert row["hidden_ns"] == other["hidden_ns"] == (2 * MS if activity == "gemm" else 0)


def test_a_recording_without_collectives_has_no_rows():
    assert len(measure_collectives(trace_of({"kind": "gemm"}))) == 0
