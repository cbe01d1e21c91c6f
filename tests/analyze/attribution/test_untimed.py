"""Captures that do not tell when anything ran: what they say, and what they leave open."""

import pytest

from kprof.analyze.attribution.ledger import balance, truth_columns
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.capture_quality.unanswered import find_unanswered
from kprof.analyze.diff.comparability import find_doubts, find_obstacle
from kprof.analyze.passes import analyze
from kprof.collect.merge import merge
from kprof.collect.readers.ncu.reader import UNTIMED
from kprof.commands.whatif import ask
from kprof.errors import TraceError
from kprof.opened import open_run, read
from kprof.report.result import result_of
from kprof.report.section import sections_of
from tests.ncu_files import launch, raw_page
from tests.traces import trace_of

TIME = "Where the time goes"
WHY = "the recorder keeps no times"


def untimed(**columns):
    rows = [{"start_ns": start, "duration_ns": 100, **columns} for start in (0, 100)]
    return analyze(trace_of(*rows, untimed=WHY))


def texts_of(trace):
    """Return all that a report says, by section."""
    return {
        section.title: " ".join(part.text for part in section.parts if hasattr(part, "text"))
        for section in sections_of(trace)
    }


def test_durations_add_up():
    trace = untimed()
    ledger = balance(trace)
    assert ledger.balances
    assert truth_columns(trace, ledger)["gpu_sum_ns"] == 200


def test_what_needs_starts_is_missing_and_never_nought():
    trace = untimed()
    truth = truth_columns(trace, balance(trace))
    needs_starts = ("busy_ns", "idle_ns", "window_ns", "overlapped_ns", "gpu_busy_union_ns")
    assert [truth[name] for name in (*needs_starts, "gpu_span_ns")] == [None] * 6


def test_no_gap_is_told_and_no_piece_of_idle_time():
    trace = untimed()
    assert trace.kernels[["gap_before_ns", "gap_cause"]].isna().all(axis=None)
    assert trace.idle.empty


def test_the_result_leaves_utilisation_and_idle_time_open():
    trace = untimed()
    result = result_of(trace, balance(trace))
    assert result["untimed"] == WHY
    assert result["idle"] is None
    assert {share["value"] for share in result["utilisation"].values()} == {None}
    assert result["what_if"] == []


def test_a_sum_of_launches_counts_as_so_many():
    trace = untimed(launches=5)
    assert truth_columns(trace, balance(trace))["gpu_events"] == 10
    assert result_of(trace, balance(trace))["kernels"][0]["calls"] == 10


@pytest.mark.parametrize("title", ["Timeline", "Idle time", "What if", "Utilisation"])
def test_a_section_that_needs_a_timeline_says_why_it_has_none(title):
    assert WHY in texts_of(untimed())[title]


def test_no_section_claims_that_the_gpu_was_idle_or_not():
    told = texts_of(untimed())
    assert "not known" in told[TIME]
    assert "not known" in told["Ledger"]
    assert "was idle" not in told[TIME]


def test_the_audit_says_that_there_is_no_timeline():
    (check,) = [check for check in audit(untimed()) if check.name == "Timeline"]
    assert (check.verdict, check.evidence) == ("limited", WHY)


def test_such_a_capture_has_no_missing_launches():
    assert {check.name for check in audit(untimed())} == {"Timeline", "Known work"}


def test_when_anything_ran_is_a_question_left_open():
    assert WHY in [found.because for found in find_unanswered(untimed())]


def test_with_a_timeline_the_question_is_answered():
    trace = analyze(trace_of({}))
    assert "What ran when" not in " ".join(found.question for found in find_unanswered(trace))


def test_it_is_not_compared_with_a_capture_that_has_a_timeline():
    with_timeline = analyze(trace_of({}))
    problem, _ = find_obstacle(untimed(), with_timeline)
    assert (problem.startswith("A "), WHY in problem) == (True, True)
    problem, _ = find_obstacle(with_timeline, untimed())
    assert (problem.startswith("B "), WHY in problem) == (True, True)


def test_two_without_timeline_are_compared_by_sums_and_a_doubt_says_so():
    assert find_obstacle(untimed(), untimed()) is None
    assert "no_timeline" in {doubt.id for doubt in find_doubts(untimed(), untimed())}


def test_it_is_not_merged_with_a_capture_that_has_a_timeline():
    with pytest.raises(TraceError, match="no timeline"):
        merge([trace_of({}, untimed=WHY), trace_of({})], "both")


def test_a_what_if_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "report.csv"
    path.write_text(raw_page(launch("gemm"), launch("gemm")))
    opened = open_run([path], tmp_path / "run.kprof", force=False)
    (answer,) = ask(opened.folder, ["gemm=2"]).answers
    assert answer.predicted_step_ns is None
    assert UNTIMED in answer.reason


def test_two_reports_are_two_ranks_whatever_either_leaves_out(tmp_path):
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    paths[0].write_text(raw_page(launch("gemm")))
    paths[1].write_text(raw_page(launch("copy", grid="", block="")))
    trace = read(paths)
    assert trace.kernels["rank"].tolist() == [0, 1]
    assert trace.kernels["grid"].isna().tolist() == [False, True]
    assert not trace.has_timeline
