"""Idle time added up by cause and place, and collectives that only waited."""

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.idle.causes import find_exposed_waits, group_idle, inside_window, worst_places
from kprof.report.result import result_of
from tests.traces import analyzed_trace_of

PIECES = [
    {"cause": "launch-bound", "duration_ns": 30, "recoverable_ns": 29, "place": "aten::mm"},
    {"cause": "launch-bound", "duration_ns": 10, "recoverable_ns": 9, "place": "aten::add"},
    {"cause": "dependency wait", "duration_ns": 50, "start_ns": 60, "kernel_row": 1},
    {"duration_ns": 5},
    {"cause": "profiler", "duration_ns": 7, "recoverable_ns": 0, "edge": "before"},
]
IDLE = analyzed_trace_of({}, {"start_ns": 110}, idle=PIECES)


def test_idle_time_is_added_up_by_cause_with_what_could_be_gained():
    groups = group_idle(inside_window(IDLE.idle)).astype(object).fillna("?")
    assert groups.to_numpy().tolist() == [
        ["dependency wait", 50, 50 / 95, "?", 1, 50],
        ["launch-bound", 40, 40 / 95, 38, 2, 30],
        ["?", 5, 5 / 95, "?", 1, 5],
    ]


def test_the_worst_places_of_each_cause_come_first():
    worst = worst_places(inside_window(IDLE.idle), 1)
    assert worst[["cause", "place", "time_ns", "pieces"]].to_numpy().tolist() == [
        ["launch-bound", "aten::mm", 30, 1]
    ]


def test_layers_of_one_kind_are_one_place():
    pieces = [
        {"cause": "launch-bound", "place": "aten::mm", "module": f"layers.{i}.mlp"} for i in (3, 4)
    ]
    worst = worst_places(analyzed_trace_of({}, idle=pieces).idle, 5)
    assert worst[["module", "time_ns", "pieces"]].to_numpy().tolist() == [["layers.*.mlp", 200, 2]]


def test_the_result_holds_idle_time_by_cause_with_its_worst_places():
    idle = result_of(IDLE, balance(IDLE))["idle"]
    assert idle["time_ns"] == 102
    causes = [cause["cause"] for cause in idle["causes"]]
    assert causes == ["dependency wait", "launch-bound", "profiler", None]
    # The longer piece is a single wait in a window without steps: perhaps start-up.
    assert idle["causes"][1]["recoverable_ns"] == 9
    assert idle["causes"][1]["worst"][0]["place"] == "aten::mm"
    assert [edge["time_ns"] for edge in idle["at_the_edges"]] == [7]
    assert idle["exposed_collective_waits"] is None


REDUCE = {"collective": "allreduce", "group": "0 [0, 1]", "kind": "collective", "stream": 30}


def test_a_collective_that_began_early_waited_for_the_rank_that_came_last():
    trace = analyzed_trace_of(
        {**REDUCE, "rank": 0, "group_sequence": 1, "start_ns": 0, "duration_ns": 100},
        {**REDUCE, "rank": 1, "group_sequence": 1, "start_ns": 60, "duration_ns": 40},
        {"rank": 0, "kind": "gemm", "start_ns": 10, "duration_ns": 20},
        num_ranks=2,
    )
    waits = {wait.rank: (wait.waiting_ns, wait.exposed_ns) for wait in find_exposed_waits(trace)}
    assert waits == {0: (60, 40), 1: (0, 0)}


def test_a_wait_does_not_depend_on_the_ranks_clocks():
    trace = analyzed_trace_of(
        {**REDUCE, "rank": 0, "group_sequence": 1, "start_ns": 0, "duration_ns": 50},
        {**REDUCE, "rank": 1, "group_sequence": 1, "start_ns": 9_000, "duration_ns": 40},
        num_ranks=2,
    )
    assert [wait.waiting_ns for wait in find_exposed_waits(trace)] == [10, 0]


def test_without_numbers_collectives_are_not_matched():
    trace = analyzed_trace_of({**REDUCE, "rank": 0}, {**REDUCE, "rank": 1}, num_ranks=2)
    assert find_exposed_waits(trace) is None


def test_a_send_has_no_number_in_common_with_its_receive():
    send, receive = (
        {**REDUCE, "collective": name, "group_sequence": 1} for name in ("send", "recv")
    )
    trace = analyzed_trace_of({**send, "rank": 0}, {**receive, "rank": 1}, {**send, "rank": 1})
    assert find_exposed_waits(trace) is None
