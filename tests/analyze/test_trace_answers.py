"""An answer about a trace is computed once, and again where a pass returns another trace."""

from dataclasses import replace

from kprof.findings import Diagnosis
from kprof.trace import once_per_tables, once_per_trace
from tests.traces import trace_of


def test_an_answer_is_computed_once_per_trace():
    asked = []

    @once_per_trace
    def count(trace):
        asked.append(trace)
        return len(trace.kernels)

    trace = trace_of({"duration_ns": 100}, {"start_ns": 250})
    assert (count(trace), count(trace), len(asked)) == (2, 2, 1)


def test_a_trace_with_another_column_answers_anew():
    @once_per_trace
    def has_mark(trace):
        return "mark" in trace.kernels

    trace = trace_of({"duration_ns": 100})
    assert not has_mark(trace)
    assert has_mark(trace.with_kernels(mark=1))


def test_traces_that_share_tables_share_answers_about_these():
    asked = []

    @once_per_tables("kernels")
    def count(trace):
        asked.append(trace)
        return len(trace.kernels)

    trace = trace_of({"duration_ns": 100})
    other = replace(trace, meta=replace(trace.meta, source="another"))
    assert (count(trace), count(other), len(asked)) == (1, 1, 1)
    assert (count(trace.with_kernels(mark=1)), len(asked)) == (1, 2)


def test_functions_do_not_share_answers():
    @once_per_trace
    def first(trace):
        return 1

    @once_per_trace
    def second(trace):
        return 2

    trace = trace_of({"duration_ns": 100})
    assert (first(trace), second(trace)) == (1, 2)


def test_conclusions_keep_what_is_known_of_a_trace():
    asked = []

    @once_per_trace
    def count(trace):
        asked.append(trace)
        return len(trace.kernels)

    trace = trace_of({"duration_ns": 100})
    known = count(trace)
    told = trace.with_conclusions((), Diagnosis())
    assert (count(told), len(asked)) == (known, 1)
    assert told.diagnosis == Diagnosis()
    assert trace.diagnosis is None
