"""Findings stay with the run, stand in its JSON, and are shown where they belong."""

import json
from dataclasses import replace

import pytest

from kprof.analyze.findings.diagnose import diagnose
from kprof.findings import Diagnosis, Finding, Fix, NotApplicable, Saving
from kprof.opened import open_run
from kprof.report.section import Table, Text, sections_of
from kprof.report.sections.findings import format_saving, render
from kprof.storage import load, save
from tests.analyze.findings.rule_cases import CASES
from tests.collect.readers.test_recorded_traces import FOLDER
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of


def told(*findings, **more):
    return replace(analyzed_trace_of({}), diagnosis=Diagnosis(findings, **more))


def finding(rule="a_rule", low_ns=1_000_000, high_ns=2_000_000, **more):
    saving = Saving(10_000_000, low_ns, high_ns, "replayed")
    return Finding(rule, "It is slow", "high", "low", rows=(0,), saving=saving, **more)


def texts(section):
    return [part.text for part in section.parts if isinstance(part, Text)]


def tables(section):
    return [part for part in section.parts if isinstance(part, Table)]


def test_findings_survive_being_saved(tmp_path):
    trace = CASES["unfused_norm"].faulty()
    trace = replace(trace, diagnosis=diagnose(trace))
    save(trace, tmp_path)
    assert load(tmp_path).diagnosis == trace.diagnosis


def test_findings_that_were_saved_with_the_former_names_are_read(tmp_path):
    trace = told(
        finding(fix=Fix(idle_cause="data loading")),
        not_applicable=(NotApplicable("stragglers", "one rank was recorded", "record all"),),
    )
    save(trace, tmp_path)
    path = tmp_path / "findings.json"
    content = json.loads(path.read_text())
    for one in content["findings"]:
        one["remedy"] = one.pop("fix")
    content["unasked"] = [
        {"rule": one["rule"], "because": one["because"], "way_out": one["fix"]}
        for one in content.pop("not_applicable")
    ]
    path.write_text(json.dumps(content))
    assert load(tmp_path).diagnosis == trace.diagnosis


def test_a_run_of_before_there_were_rules_can_be_opened(tmp_path):
    save(analyzed_trace_of({}), tmp_path)
    assert not (tmp_path / "findings.json").exists()
    assert load(tmp_path).diagnosis is None
    assert "open RUN --force" in texts(render(load(tmp_path)))[0]


def test_an_opened_trace_keeps_its_findings_with_their_rows_in_a_file_of_their_own(tmp_path):
    opened = open_run([FOLDER / "compiled.json.gz"], tmp_path / "run.kprof", force=False)
    kept = json.loads((tmp_path / "run.kprof" / "findings.json").read_text())
    _, found, *_ = kept["findings"]
    assert found["rule"] == "unfused_loss"
    assert len(found["rows"]) == found["num_rows"] == 16
    _, listed, *_ = json.loads(opened.json)["findings"]["findings"]
    assert listed["claim"] == found["claim"]
    assert "rows" not in listed


def test_the_best_findings_are_told_in_words_and_all_in_the_table():
    section = render(told(*[finding(f"rule_{i}") for i in range(5)]))
    assert texts(section)[1:] == [
        f"{i + 1}. It is slow. It costs not known. A fix saves 1 ms to 2 ms (10.0 % to 20.0 %) of "
        f"a step. How: kprof playbook rule_{i}"
        for i in range(3)
    ] + ["2 more in the report's tables: rule_3, rule_4."]
    assert [row[0] for row in tables(section)[0].rows] == [f"rule_{i}" for i in range(5)]


def test_overlapping_savings_are_told_together():
    together = Saving(10_000_000, 2_000_000, 3_000_000, "replayed")
    lead = texts(render(told(finding(), finding("b"), together=together)))[0]
    assert "All fixes together would save 2 ms to 3 ms (20.0 % to 30.0 %) of a step" in lead


@pytest.mark.parametrize(
    ("low_ns", "high_ns", "words"),
    [
        (None, None, []),
        (0, 1_000_000, ["1 ms", "10.0 %"]),
        (500_000, 1_000_000, ["500 µs", "1 ms", "5.0 %", "10.0 %"]),
    ],
)
def test_a_saving_says_how_much_is_known(low_ns, high_ns, words):
    told = format_saving(Saving(10_000_000, low_ns, high_ns, ""))
    assert quantities_in(told) == words
    assert ("up to" in told) == (low_ns == 0)
    assert ("not known" in told) == (low_ns is None)


def test_an_unknown_saving_is_said_to_be_unknown():
    unknown = replace(finding(low_ns=None, high_ns=None), fix=Fix())
    assert "The saving is not known." in texts(render(told(unknown)))[1]


def test_a_finding_of_the_hosts_ranges_shows_these_as_its_evidence():
    step = {"kind": "range", "name": "compile_fx", "duration_ns": 5_000}
    trace = analyzed_trace_of({}, ranges=[step])
    found = replace(finding(), rows=(), range_rows=(0,))
    section = render(replace(trace, diagnosis=Diagnosis((found,))))
    assert tables(section)[2].rows == (("a_rule", "host: compile_fx", "—", "—", "1", "5 µs"),)


def test_rules_that_could_not_be_asked_are_listed_with_the_fix():
    section = render(
        told(not_applicable=(NotApplicable("stragglers", "one rank was recorded", "record all"),))
    )
    assert tables(section)[0].rows == (("stragglers", "one rank was recorded", "record all"),)


def test_rules_that_could_not_be_asked_for_one_reason_stand_together():
    not_applicable = tuple(
        NotApplicable(name, "no GPU", "use one") for name in ("stragglers", "throttling")
    )
    section = render(told(not_applicable=not_applicable))
    assert tables(section)[0].rows == (("stragglers, throttling", "no GPU", "use one"),)


def test_no_finding_is_no_clean_bill_where_rules_could_not_be_asked():
    section = render(
        told(not_applicable=(NotApplicable("stragglers", "one rank was recorded", "record all"),))
    )
    assert section.in_terminal
    assert [quantities_in(text) for text in texts(section)] == [["1"]]
    (text,) = texts(render(told()))
    assert ("No rule found" in text, quantities_in(text)) == (True, [])


def test_findings_stand_in_the_report_before_where_the_time_goes():
    titles = [section.title for section in sections_of(told(finding()))]
    assert titles.index("Findings") < titles.index("Where the time goes")
