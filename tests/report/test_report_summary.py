"""The first screen says what limits a run, the best change and its certainty, and adds up."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.steps import denominator, split_steps
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.findings.diagnose import diagnose, saves_alone
from kprof.analyze.findings.one_offs import start_up_ns
from kprof.findings import Diagnosis
from kprof.opened import open_trace
from kprof.report.redaction import redacted
from kprof.report.result import result_of
from kprof.report.section import Bar, Table, Text, sections_of
from kprof.report.sections.summary import render
from kprof.report.sections.time import render as render_time
from kprof.report.summary import summarize
from kprof.report.terminal import print_summary
from kprof.trace import Gpu
from tests.analyze.findings.rule_cases import CASES
from tests.analyze.findings.rule_traces import US, ran, trace_of_work
from tests.quantities import quantities_in
from tests.section_traces import HOST_ONLY, RICH
from tests.traces import analyzed_trace_of, measured, trace_of

DATA = Path(__file__).parents[1] / "data" / "h200"
# Real recordings, faults that were planted, and traces without steps, findings or a GPU.
RECORDED = (
    "llama_train",
    "hf_generate",
    "convnet_dataloader",
    "compiled",
    "cudagraph",
    "whole_step",
)
PLANTED = ("data_loading", "pageable_copies", "exposed_collectives", "sync_in_loop")
MANY_KINDS = analyzed_trace_of(
    *(
        {"kind": kind, "start_ns": 100 * number, "duration_ns": 100 - 10 * number}
        for number, kind in enumerate(
            ("gemm", "norm", "copy", "softmax", "attention", "elementwise", "other", "loss")
        )
    )
)
LEAN = {
    "host only": HOST_ONLY,
    "rich": RICH,
    "one kernel": analyzed_trace_of({}),
    "many kinds": MANY_KINDS,
}
NAMES = (*RECORDED, *PLANTED, *LEAN)
# What limits each: the owner of most of its time.
LIMITS = {
    "llama_train": ("bound", "compute"),
    "hf_generate": ("idle", "launch-bound"),
    "convnet_dataloader": ("idle", "launch-bound"),
    "compiled": ("bound", "compute"),
    "cudagraph": ("bound", None),
    "whole_step": ("bound", "compute"),
}
BEST = {
    "llama_train": ("unfused_norm", "high"),
    "hf_generate": ("no_cuda_graph_in_decode", "high"),
    "convnet_dataloader": ("launch_bound_host", "high"),
    "compiled": ("unfused_loss", "high"),
    "whole_step": ("low_dram_bandwidth", "medium"),
    "data_loading": ("data_loading", "high"),
    "pageable_copies": ("pageable_copies", "high"),
    "exposed_collectives": ("exposed_collectives", "high"),
    "sync_in_loop": ("sync_in_loop", "high"),
}


@cache
def trace_named(name):
    if name in PLANTED:
        trace = CASES[name].faulty()
        return trace.with_conclusions((), diagnose(trace))
    if name in LEAN:
        return LEAN[name]
    folder = DATA / name
    return open_trace(folder if folder.is_dir() else DATA / f"{name}.json.gz")


def first_screen(trace, lines=40, width=80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_summary(trace.meta.source, sections_of(trace, for_page=False), console)
    return "\n".join(console.file.getvalue().splitlines()[:lines])


def in_one_line(text) -> str:
    return " ".join(text.split())


@cache
def screen_of(name):
    """Return the first screen of a trace in one line; several tests ask for the same."""
    return in_one_line(first_screen(trace_named(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_time_of_a_summary_adds_up_to_the_steps_of_the_ledger(name):
    trace = trace_named(name)
    found = summarize(trace)
    split = split_steps(trace)
    assert sum(one.time_ns for one in found.time) == split["time_ns"].sum() == found.total_ns
    assert sum(one.time_ns for one in found.limits) == found.total_ns
    idle = split["time_ns"][split["is_idle"].astype(bool)].sum()
    of_idle = {"idle": 0, "imbalance": 0, "start-up": 0}
    for one in found.limits:
        of_idle |= {one.kind: of_idle[one.kind] + one.time_ns} if one.kind in of_idle else {}
    assert sum(of_idle.values()) == idle
    assert of_idle["start-up"] == start_up_ns(trace)
    assert found.whole_ns == denominator(trace).step_ns


@pytest.mark.parametrize("name", NAMES)
def test_the_shown_shares_of_the_bar_add_up_to_100_percent(name):
    (bar,) = [part for part in render(trace_named(name)).parts if isinstance(part, Bar)]
    assert sum(round(10 * float(one.shown.removesuffix(" %"))) for one in bar.segments) == 1000
    assert sum(one.share for one in bar.segments) == pytest.approx(1)
    assert len({one.label for one in bar.segments}) == len(bar.segments) <= 8


@pytest.mark.parametrize("name", NAMES)
def test_the_bar_and_the_table_of_time_say_the_same_of_one_label(name):
    trace = trace_named(name)
    (bar,) = [part for part in render(trace).parts if isinstance(part, Bar)]
    table = next(part for part in render_time(trace).parts if isinstance(part, Table))
    # Of a step where there are steps, else of the window: the last column.
    told = {row[0]: (row[1], row[-1]) for row in table.rows}
    common = [one for one in bar.segments if one.label in told]
    assert len(common) >= min(len(bar.segments), 6)
    for one in common:
        assert (one.shown, one.detail) == told[one.label]


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_limit_owns_most_of_the_time(name):
    first = summarize(trace_named(name)).limits[0]
    assert (first.kind, first.name) == LIMITS[name]


@pytest.mark.parametrize(("number", "is_warned"), [(1, True), (9, True), (10, False)])
def test_a_handful_of_activities_without_steps_is_told_to_be_no_workload(number, is_warned):
    kernels = [{"start_ns": 100 * at, "duration_ns": 50} for at in range(number)]
    texts = [part for part in render(analyzed_trace_of(*kernels)).parts if isinstance(part, Text)]
    warned = [one for one in texts if one.tone == "warning"]
    assert [quantities_in(one.text)[0] for one in warned] == [str(number)] * is_warned


def test_what_happened_once_limits_by_no_other_name():
    call = {"kind": "runtime", "name": "cudaLaunchKernel"}
    load = call | {"name": "cuModuleLoadData", "start_ns": 1_000, "duration_ns": 990_000}
    launch = call | {"correlation": 2, "start_ns": 995_000, "duration_ns": 4_000}
    kernels = [{"duration_ns": 1_000}, {"start_ns": 1_000_000, "correlation": 2}]
    first = summarize(measured(trace_of(*kernels, ranges=[load, launch]))).limits[0]
    assert (first.kind, first.name, first.time_ns) == ("start-up", None, 999_000)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "host copies"),
        ("Memcpy DtoH (Device -> Pageable)", "host copies"),
        ("Memcpy DtoD (Device -> Device)", "bound"),
        ("Memcpy PtoP (Device -> Device)", "bound"),
    ],
)
def test_the_link_limits_copies_between_host_and_device(name, limit):
    copy = {"name": name, "activity": "memcpy", "kind": "copy", "copied_bytes": 1 << 20}
    (found,) = summarize(trace_of_work({**ran("aten::copy_", 900 * US), **copy})).limits
    assert (found.kind, found.mostly) == (limit, "copy")


@pytest.mark.parametrize(("second_us", "mostly"), [(100, "Fan2"), (400, "Fan2"), (1100, "Fan1")])
def test_a_limit_names_the_kernel_where_its_kind_says_nothing(second_us, mostly):
    kernels = (
        {"name": "Fan2", "kind": "other", "duration_ns": 600 * US},
        {"name": "Fan1", "kind": "other", "start_ns": 600 * US, "duration_ns": second_us * US},
        {"kind": "gemm", "start_ns": (600 + second_us) * US, "duration_ns": 50 * US},
    )
    assert summarize(analyzed_trace_of(*kernels)).limits[0].mostly == mostly


def test_a_limit_of_many_small_kernels_of_no_kind_names_none():
    kernels = [
        {"name": f"k{number}", "kind": "other", "start_ns": number * US, "duration_ns": US}
        for number in range(5)
    ]
    assert summarize(analyzed_trace_of(*kernels)).limits[0].mostly is None


@pytest.mark.parametrize("name", NAMES)
def test_the_changes_are_the_first_findings_that_would_save_time(name):
    trace = trace_named(name)
    found = summarize(trace)
    diagnosis = trace.diagnosis or Diagnosis()
    saving = [one for one in diagnosis.findings if one.saving and one.saving.high_ns]
    alone = [one for one in saving if saves_alone(one)]
    expected = [one for one in alone if one.rule != "unexplained_time"]
    assert found.num_changes == len(expected)
    told = [(one.rule, one.claim, one.saving, one.confidence) for one in found.changes]
    assert told == [(one.rule, one.claim, one.saving, one.confidence) for one in expected[:3]]
    commands = [one.command or f"kprof playbook {one.rule}" for one in expected[:3]]
    assert [one.command for one in found.changes] == commands


def test_a_change_that_saves_next_to_nothing_alone_is_not_among_the_best():
    trace = trace_named("llama_train")
    first, *others = trace.diagnosis.findings
    tiny = replace(first, saving=replace(first.saving, low_ns=0, high_ns=27))
    told = replace(trace, diagnosis=replace(trace.diagnosis, findings=(*others, tiny)))
    before, found = summarize(trace), summarize(told)
    assert found.num_changes == before.num_changes - 1
    assert first.claim not in [one.claim for one in found.changes]


@pytest.mark.parametrize("name", BEST)
def test_the_best_change_is_known(name):
    best = summarize(trace_named(name)).changes[0]
    assert (best.rule, best.confidence) == BEST[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_screen_of_a_terminal_holds_everything(name):
    trace = trace_named(name)
    found, screen = summarize(trace), screen_of(name)
    expected = [in_one_line(part.text) for part in render(trace).parts if hasattr(part, "text")]
    assert [text for text in expected if text not in screen] == []
    for one in found.changes:
        assert one.command in screen
        assert f"certainty {one.confidence}" in screen
    assert len(re.findall(r"Next: `", screen)) >= len(found.changes)


def test_a_summary_counts_the_checks_of_the_audit():
    trace = trace_named("llama_train")
    found = summarize(trace)
    assert sum(found.quality.values()) == len(audit(trace))
    assert found.doubts == ("Steps",)


def test_the_machine_readable_result_holds_the_same_summary():
    trace = trace_named("hf_generate")
    told = redacted(result_of(trace, balance(trace)))["summary"]
    found = summarize(trace)
    assert told["whole_ns"] == found.whole_ns
    assert [one["time_ns"] for one in told["time"]] == [one.time_ns for one in found.time]
    assert [one["rule"] for one in told["changes"]] == [one.rule for one in found.changes]


def test_a_summary_without_a_diagnosis_proposes_nothing():
    found = summarize(analyzed_trace_of({}))
    assert (found.changes, found.num_changes, found.unexplained) == ((), 0, ())


@pytest.mark.parametrize("name", NAMES)
def test_a_large_cost_without_a_known_saving_is_told_before_the_changes(name):
    trace = trace_named(name)
    found, screen = summarize(trace), screen_of(name)
    findings = (trace.diagnosis or Diagnosis()).findings
    proposed = [one.claim for one in found.changes]
    first = [one for one in findings[:1] if one.claim not in proposed]
    told = [] if found.large_cost is None else [found.large_cost.claim]
    assert told == [one.claim for one in first]
    assert all(in_one_line(one) in screen for one in told)


@pytest.mark.parametrize(("share", "is_large"), [(0.1, False), (0.9, True)])
def test_a_finding_whose_saving_is_not_known_is_told_where_it_costs_much(share, is_large):
    trace = trace_named("data_loading")
    (known,) = [one for one in trace.diagnosis.findings if one.rule == "data_loading"]
    whole_ns = trace.diagnosis.whole_ns
    stall = replace(known, saving=None, cause_ns=round(share * whole_ns))
    found = summarize(trace.with_conclusions((), Diagnosis((stall,), whole_ns=whole_ns)))
    assert (found.large_cost is not None, found.changes) == (is_large, ())


def test_the_largest_operators_of_a_host_are_not_called_a_large_cost():
    screen = in_one_line(first_screen(trace_named("host only")))
    assert summarize(trace_named("host only")).large_cost is not None
    assert "Large cost" not in screen


@pytest.mark.parametrize(
    ("gpu", "names_ncu"),
    [("NVIDIA H100", True), ("CUDA device of architecture 86", True), ("AMD Instinct", False)],
)
def test_counters_are_asked_of_the_profiler_of_the_device(gpu, names_ncu):
    trace = analyzed_trace_of({"kind": "gemm"}, gpus=(Gpu(0, gpu),))
    assert ("--ncu" in first_screen(trace)) is names_ncu
