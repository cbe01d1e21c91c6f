"""Bandwidth of collectives: the message over the transfer, without the wait for the last rank."""

import json

import pandas as pd
import pytest

from kprof.analyze.bus_bandwidth import measure_collectives
from tests.traces import trace_of

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
        (json.dumps(["allreduce", 8, 8, "Float", None]), 2),
        (json.dumps(["allreduce", 8, 8, "Float", 3]), 2),
        (json.dumps(["allreduce", 8, 8, "Float", 2]), 1),
    ],
    ids=["no message", "unknown type", "unknown number of ranks", "a rank is missing", "one rank"],
)
def test_the_bandwidth_is_missing_where_the_recording_does_not_tell(message, num_ranks):
    table = measure_collectives(two_ranks("allreduce", message, num_ranks))
    assert pd.isna(table["bus_bytes_per_s"]).all()


def test_a_recording_without_collectives_has_no_rows():
    assert len(measure_collectives(trace_of({"kind": "gemm"}))) == 0
