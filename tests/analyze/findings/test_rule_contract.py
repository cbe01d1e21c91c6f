"""What holds for every rule: its findings, their form, and what it does to traces of any kind."""

import re
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.analyze.findings.diagnose import MOST_ROWS, RULES, diagnose, name_of
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.errors import modules_in
from kprof.findings import NOT_CALLED, DryRun, DryRunRow, Fix
from kprof.report.html import render_page
from kprof.report.playbooks import all_playbooks
from kprof.report.section import Table
from kprof.report.sections import findings
from kprof.trace import Gpu
from tests.analyze.findings.rule_cases import CASES
from tests.analyze.findings.rule_traces import trace_of_work
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, trace_of

UNTIMED = "only sums were kept"
GRADES = {"low", "medium", "high"}
HOSTILE = "</script><b>\"'&\n\u202eevil" + "x" * 10_000


@cache
def faulty(rule):
    return CASES[rule].faulty()


@cache
def diagnosed(rule):
    return replace(faulty(rule), diagnosis=diagnose(faulty(rule)))


@cache
def finding_of(rule):
    (found,) = [one for one in diagnosed(rule).diagnosis.findings if one.rule == rule]
    return found


@cache
def of_hostile_names(rule):
    """Return the trace, diagnosed, with hostile text at the end of kernels' and modules' names."""
    trace = faulty(rule)
    columns = {}
    for column in ("name", "module"):
        values = trace.kernels[column]
        names = {old: f"{old}{HOSTILE}" for old in values.cat.categories}
        columns[column] = values.cat.rename_categories(names)
    renamed = trace.with_kernels(**columns)
    return replace(renamed, diagnosis=diagnose(renamed))


def test_rules_and_playbooks_correspond_one_to_one():
    rules = [name_of(module) for module in modules_in(RULES)]
    assert len(rules) >= 20
    assert [*rules, UNEXPLAINED] == sorted(
        (page.name for page in all_playbooks()), key=lambda name: (name == UNEXPLAINED, name)
    )


def evidence_shown(trace):
    """Return the rules whose evidence the section of findings shows."""
    tables = [part for part in findings.render(trace).parts if isinstance(part, Table)]
    return {row[0] for row in tables[2].rows}


def test_a_finding_survives_what_is_worth_saying():
    assert {rule: finding_of(rule).playbook for rule in CASES} == {rule: rule for rule in CASES}


def test_a_claim_is_one_line_with_a_number_and_a_unit():
    claims = {rule: finding_of(rule).claim for rule in CASES}
    form = (
        r"[A-Z\d](?!.*\bnan\b)(?=.*(?:\d[\d,.]* ?(?:s|ms|µs|ns|GiB|MiB|versions|MHz)\b|\d %)).*[^.]"
    )
    assert {rule: one for rule, one in claims.items() if not re.fullmatch(form, one)} == {}


def opened_rows():
    """Yield the rule, the rows it names and the length of their table, for each table."""
    for rule in CASES:
        trace, found = diagnosed(rule), finding_of(rule)
        yield rule, found.rows, len(trace.kernels)
        yield rule, found.idle_rows, len(trace.idle)
        yield rule, found.range_rows, len(trace.ranges)


def test_a_finding_opens_into_rows_that_exist():
    opened = list(opened_rows())
    assert {rule for rule, rows, _ in opened if rows} == CASES.keys()
    assert [one for one in opened if list(one[1]) != sorted(set(one[1]))] == []
    assert [one for one in opened if len(one[1]) > MOST_ROWS] == []
    assert [one for one in opened if not {*one[1]} <= {*range(one[2])}] == []


def test_a_finding_counts_at_least_the_rows_that_it_shows():
    found = [finding_of(rule) for rule in CASES]
    assert [one.rule for one in found if one.num_rows < len(one.rows)] == []
    assert [one.rule for one in found if one.num_idle_rows < len(one.idle_rows)] == []


def test_a_saving_is_an_interval_within_the_step():
    savings = {rule: finding_of(rule).saving for rule in CASES}
    known = {rule: one for rule, one in savings.items() if one.high_ns is not None}
    beyond = {
        rule: one
        for rule, one in known.items()
        if not 0 <= one.low_ns <= one.high_ns <= one.step_ns or one.high_ns == 0
    }
    assert len(known) > len(CASES) / 2
    assert beyond == {}
    assert [rule for rule, one in savings.items() if not one.basis] == []


def test_an_unknown_saving_has_neither_bound_nor_fix():
    unknown = [one for one in map(finding_of, CASES) if one.saving.high_ns is None]
    assert unknown
    assert {(one.saving.low_ns, one.fix) for one in unknown} == {(None, Fix())}


def test_confidence_and_effort_have_one_of_three_grades():
    found = [finding_of(rule) for rule in CASES]
    assert {one.confidence for one in found} | {one.effort for one in found} <= GRADES


def test_a_fix_never_costs_time():
    found = [one for one in map(finding_of, CASES) if one.fix.best_ns is not None]
    took = {
        one.rule: diagnosed(one.rule).kernels["duration_ns"].iloc[list(one.rows)].sum()
        for one in found
        if one.num_rows == len(one.rows)
    }
    assert took
    assert [f.rule for f in found if not 0 <= f.fix.best_ns <= f.fix.modest_ns] == []
    assert [f.rule for f in found if f.rule in took and f.fix.modest_ns > took[f.rule]] == []


def test_asked_again_the_rules_say_the_same():
    assert [rule for rule in CASES if diagnose(faulty(rule)) != diagnosed(rule).diagnosis] == []


def test_hostile_names_stay_text():
    pages = {r: render_page("hostile", [findings.render(of_hostile_names(r))]) for r in CASES}
    assert [rule for rule, page in pages.items() if "</script><b>" in page] == []


def test_the_page_shows_the_evidence_of_every_finding():
    assert [rule for rule in CASES if rule not in evidence_shown(diagnosed(rule))] == []


def test_nothing_is_found_in_an_empty_trace():
    assert diagnose(analyzed_trace_of()).findings == ()


def by_rules(trace):
    """Return what rules find in a trace, without large parts that no rule explains."""
    return [one for one in diagnose(trace).findings if one.rule != UNEXPLAINED]


def test_no_rule_finds_anything_in_a_trace_of_one_kernel_of_which_nothing_is_known():
    assert by_rules(analyzed_trace_of({})) == []
    assert by_rules(analyzed_trace_of({}, device=None, gpus=())) == []


def test_of_a_host_alone_only_what_does_not_need_a_device_is_asked():
    host = {"activity": "host", "device": -1, "kind": "gemm", "op": "aten::mm", "dtype": "fp32"}
    told = diagnose(analyzed_trace_of(host))
    assert by_rules(analyzed_trace_of(host)) == []
    assert "launch_bound_host" in {one.rule for one in told.not_applicable}
    assert "data_loading" not in {one.rule for one in told.not_applicable}


def test_where_shapes_are_missing_rules_that_need_them_say_how_to_record_them():
    trace = analyzed_trace_of({"kind": "gemm", "op": "aten::mm"})
    told = diagnose(trace)
    (unasked,) = [one for one in told.not_applicable if one.rule == "fp8_opportunity"]
    assert unasked.because == why_no_work(trace).because
    assert "record_shapes=True" in unasked.fix


def test_a_trace_without_times_is_asked_for_nothing_that_needs_them():
    trace = replace(analyzed_trace_of({"kind": "gemm"}), meta=trace_of().meta)
    untimed = replace(trace, meta=replace(trace.meta, untimed=UNTIMED))
    because = {one.because for one in diagnose(untimed).not_applicable}
    assert UNTIMED in because


def test_a_gpu_of_unknown_size_is_no_error():
    trace = replace(faulty("low_occupancy"), meta=trace_of().meta)
    assert by_rules(replace(trace, meta=replace(trace.meta, gpus=(Gpu(0, "?"),)))) == []


def test_missing_columns_of_categories_are_no_error():
    kernels = [{"name": None, "op": None, "module": None, "duration_ns": 100}] * 3
    assert by_rules(analyzed_trace_of(*kernels)) == []
    assert pd.isna(analyzed_trace_of(*kernels).kernels["op"]).all()


def test_of_sums_without_times_a_saving_is_an_upper_bound():
    kernel = {"kind": "gemm", "dtype": "fp32", "op": "aten::mm", "duration_ns": 1000}
    trace = trace_of_work(kernel)
    untimed = replace(trace, meta=replace(trace.meta, untimed=UNTIMED))
    (found,) = diagnose(untimed).findings
    assert found.rule == "fp32_products"
    assert found.saving.low_ns == 0
    assert found.saving.basis.endswith(UNTIMED)


def test_rules_about_kernels_are_not_asked_of_a_hosts_operators():
    trace = faulty("low_dram_bandwidth")
    host = pd.Series(["host"] * len(trace.kernels), dtype="category")
    assert by_rules(trace) != []
    assert by_rules(trace.with_kernels(activity=host)) == []


def test_on_a_host_alone_a_slow_loader_is_found_and_its_waiting_bounds_the_saving():
    host = {"activity": "host", "device": -1, "stream": 1, "duration_ns": 100_000}
    wait = {"cause": "data loading", "device": -1, "start_ns": 100_000, "duration_ns": 900_000}
    trace = analyzed_trace_of(
        host,
        {**host, "start_ns": 1_000_000},
        idle=[{**wait, "recoverable_ns": 900_000, "place": "next"}],
    )
    (found,) = by_rules(replace(trace))
    assert quantities_in(found.claim)[:2] == ["900 µs", "82 %"]
    assert (found.saving.low_ns, found.saving.high_ns) == (0, 900_000)


def test_long_names_are_cut_in_what_is_told():
    told = [one for rule in CASES for one in of_hostile_names(rule).diagnosis.findings]
    assert max(len(detail) for one in told for detail in ("", *one.details)) < 400


def with_dry_run(rule, dry_run):
    trace = faulty(rule)
    checked = replace(trace, meta=replace(trace.meta, dry_run=dry_run))
    found = diagnose(checked).findings
    return [one for one in found if one.rule == rule]


@cache
def with_kernel():
    """Return the kernel of each rule that names one by what it finds in its case."""
    commands = {rule: finding_of(rule).command for rule in CASES}
    return {
        rule: command.split()[3]
        for rule, command in commands.items()
        if command.startswith("kprof ab --swap ")
    }


def rows_of(*outcomes):
    kernels = set(with_kernel().values())
    rows = [DryRunRow(kernel, *outcome) for kernel in kernels for outcome in outcomes]
    return DryRun(tuple(kernels), tuple(rows))


def with_and_without(dry_run):
    """Yield each rule that names a kernel, its finding with a dry run, and its finding without."""
    for rule in with_kernel():
        (found,) = with_dry_run(rule, dry_run)
        yield rule, found, finding_of(rule)


def test_rules_that_name_a_kernel_are_known():
    assert with_kernel().keys() >= {rule for rule in CASES if finding_of(rule).swap}
    assert len(with_kernel()) >= 7


def test_a_model_that_the_kernel_decodes_gets_it_instead_of_a_copy_of_the_script():
    rule = "no_cuda_graph_in_decode"
    by_copy = finding_of(rule).command
    for provider, command in (
        ("kprof", by_copy.replace("--python", "--swap decode", 1)),
        (None, by_copy),
    ):
        rows = (DryRunRow("decode", provider, "" if provider else "it has adapters", 1, 1),)
        (found,) = with_dry_run(rule, DryRun(("decode",), rows))
        assert found.command.split()[:3] == command.split()[:3]
        assert found.swap == ("decode" if provider else None)
    # Without a model of Hugging Face nothing is said of the kernel.
    (found,) = with_dry_run(rule, DryRun(("decode",), ()))
    assert (found.command, found.swap, found.dry_run) == (by_copy, None, "")


def test_a_kernel_that_fits_some_calls_is_recommended():
    told = [*with_and_without(rows_of(("kprof", "", 3, 6), (None, "another dtype", 2, 4)))]
    assert [rule for rule, a, b in told if (a.swap, a.command) != (b.swap, b.command)] == []
    assert [rule for rule, a, _ in told if "3 call sites" not in a.dry_run] == []
    assert [rule for rule, a, _ in told if "another dtype" not in a.dry_run] == []


@pytest.mark.parametrize("outcomes", [[(None, "another dtype", 2, 4)], []])
def test_a_kernel_that_would_not_run_is_not_recommended(outcomes):
    told = [*with_and_without(rows_of(*outcomes))]
    assert {(a.swap, a.command) for _, a, _ in told} == {(None, "")}
    assert {a.effort for _, a, _ in told} <= {"medium", "high"}
    assert [rule for why in outcomes for rule, a, _ in told if why[1] not in a.dry_run] == []
    # It does not become part of all swaps, and its saving stays what it was.
    assert [rule for rule, a, b in told if a.saving != b.saving] == []


@pytest.mark.parametrize("why", ["no dry run", "refused", "others", "not called"])
def test_a_kernel_that_was_not_checked_is_recommended_and_the_finding_says_so(why):
    dry_run = {
        "no dry run": None,
        "refused": DryRun(why_not="planted"),
        "others": DryRun(why_others="planted"),
        "not called": rows_of((None, NOT_CALLED, 2, 0)),
    }[why]
    told = [*with_and_without(dry_run)]
    assert [rule for rule, a, b in told if a.command != b.command] == []
    assert [rule for rule, a, _ in told if not a.dry_run.startswith("not checked")] == []
