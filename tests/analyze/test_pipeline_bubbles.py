"""Waits of pipeline stages for their neighbours: sends and receives beyond the shortest."""

from dataclasses import replace

import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.condense import condensed
from kprof.analyze.passes import analyze
from kprof.analyze.pipeline_bubbles import find_bubbles
from kprof.report.result import result_of
from kprof.report.section import Table
from kprof.report.sections import ranks
from kprof.trace import ProcessGroup
from tests.traces import trace_of

US = 1_000
STAGES = ProcessGroup("1", (0, 1), "mesh_pp")
STEP_NS = 500 * US


def call(rank, collective, start, duration, group="1 [0, 1]"):
    return {
        "rank": rank, "collective": collective, "kind": "collective", "group": group, "stream": 30,
        "start_ns": start * US, "duration_ns": duration * US, "step": 0,
    }  # fmt: skip


def gemm(rank, start, duration):
    return {
        "rank": rank, "kind": "gemm", "step": 0,
        "start_ns": start * US, "duration_ns": duration * US,
    }  # fmt: skip


# The second stage waits 90 µs for the first batch; each transfer takes 10 µs.
SENDS = (
    gemm(0, 0, 90), call(0, "send", 90, 10), gemm(0, 100, 90), call(0, "send", 190, 10),
    call(1, "recv", 0, 100), gemm(1, 100, 90), call(1, "recv", 190, 10), gemm(1, 200, 90),
)  # fmt: skip


def two_stages(*rows, groups=(STAGES,)):
    steps = [{"kind": "step", "name": "0", "rank": rank, "duration_ns": STEP_NS} for rank in (0, 1)]
    return trace_of(*rows, ranges=steps, num_ranks=2, process_groups=groups)


def test_a_stage_waits_for_what_a_receive_takes_beyond_the_shortest():
    first, second = find_bubbles(two_stages(*SENDS))
    assert (first.stage, first.ranks, first.waits_ns) == (0, (0,), 0)
    assert (second.stage, second.ranks, second.waits_ns) == (1, (1,), 90 * US)
    assert second.share == 90 * US / STEP_NS


def test_a_receive_beside_computation_is_no_bubble():
    waits = find_bubbles(two_stages(*SENDS, gemm(1, 0, 60)))[1].waits_ns
    assert waits == 30 * US


def test_the_waits_of_a_stage_without_sends_are_unknown():
    (second,) = find_bubbles(two_stages(*SENDS[:1], *SENDS[4:]))
    assert second.stage == 1


def test_the_stages_of_condensed_ranks_wait_as_long():
    trace = two_stages(*SENDS)
    assert find_bubbles(replace(trace, all_ranks=condensed(trace))) == find_bubbles(trace)


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        (SENDS, ()),
        (SENDS, (ProcessGroup("1", (0, 1), "undefined"),)),
        (SENDS, (ProcessGroup("2", (0, 1), "mesh_pp"),)),
        ((call(0, "allreduce", 0, 10), call(1, "allreduce", 0, 10)), (STAGES,)),
        ((gemm(0, 0, 10), gemm(1, 0, 10)), (STAGES,)),
    ],
    ids=["no groups", "no words", "another group", "no sends", "no collectives"],
)
def test_without_sends_in_a_named_pipeline_the_bubble_is_unknown(rows, groups):
    assert find_bubbles(two_stages(*rows, groups=groups)) is None


def test_the_report_and_its_json_tell_the_waits_of_each_stage():
    trace = analyze(two_stages(*SENDS))
    tables = [part for part in ranks.render(trace).parts if isinstance(part, Table)]
    (table,) = [one for one in tables if one.columns[0].header == "Pipeline stage"]
    assert [row[:3] for row in table.rows] == [("0", "1", "0 ns"), ("1", "1", "90 µs")]
    told = result_of(trace, balance(trace))
    assert [one["waits_ns"] for one in told["pipeline"]] == [0, 90 * US]
    assert told["experts"] is None
