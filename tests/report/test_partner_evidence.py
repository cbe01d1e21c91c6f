"""Evidence is read back from what commands printed and kept, as it was."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import msgspec

from kprof.analyze.verdict.plausibility import find_power_effect
from kprof.commands.report import read_evidence
from kprof.comparison import Pair, save
from kprof.findings import Caveat
from kprof.kernels.correctness.levels import LEVELS, TRAINING, GateReport, Level, result_of_gate
from kprof.report.calibration import result_of_calibration
from kprof.report.partner.evidence import gates_in, parts_of
from kprof.report.partner.wording import VERDICTS, without_letters
from kprof.report.sla_verdict import result_of_sla
from tests.quantities import quantities_in
from tests.report.partner_evidence import (
    calibration_of,
    comparison_of,
    everything,
    gate_of,
)
from tests.report.partner_pages import paragraphs_of, rows_of, said, verdict_of


def test_what_commands_printed_is_read_back_as_it_was(tmp_path):
    evidence = everything()
    before, after = evidence.service_levels
    files = {
        "sla-1.json": result_of_sla(before),
        "sla-2.json": result_of_sla(after),
        "cost-1.json": msgspec.to_builtins(evidence.costs[0]),
        "cost-2.json": msgspec.to_builtins(evidence.costs[1]),
        "gate.json": result_of_gate(evidence.gates[0]),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "ab.kprof").mkdir()
    save(evidence.comparisons[0], tmp_path / "ab.kprof")
    read = read_evidence([tmp_path / name for name in [*files, "ab.kprof"]], evidence.title)
    assert read.comparisons == evidence.comparisons
    assert [one.assessment for one in read.service_levels] == [
        one.assessment for one in evidence.service_levels
    ]
    assert read.costs == evidence.costs
    assert read.gates == evidence.gates
    assert [source.what for source in read.sources][-2:] == ["quality gate", "comparison"]
    assert all(re.fullmatch("[0-9a-f]{64}", source.sha256) for source in read.sources)


def test_what_a_comparison_printed_brings_its_targets_its_costs_and_its_calibration(tmp_path):
    evidence = everything()
    before, after = (result_of_sla(level) for level in evidence.service_levels)
    content = msgspec.to_builtins(evidence.comparisons[0])
    content |= {
        "targets": {"A": before, "B": after},
        "costs": msgspec.to_builtins(evidence.costs[0]),
    }
    content |= {"calibration": "It errs now and then."}
    (tmp_path / "ab.json").write_bytes(msgspec.json.encode(content))
    read = read_evidence([tmp_path / "ab.json"])
    assert read.comparisons == evidence.comparisons
    assert [one.assessment.verdict for one in read.service_levels] == ["MISSED", "MET"]
    assert read.costs == evidence.costs[:1]
    assert read.calibration_text == content["calibration"]
    assert any(content["calibration"] in text for text in paragraphs_of(read, "plain"))


def test_a_comparison_with_values_that_are_no_numbers_is_read_and_shown(tmp_path):
    pairs = (*comparison_of().pairs, Pair((40e6,), (float("nan"),), True, 0))
    invalid = comparison_of("INVALID", None, pairs=pairs, why="A value is no number.")
    (tmp_path / "ab.kprof").mkdir()
    save(invalid, tmp_path / "ab.kprof")
    read = read_evidence([tmp_path / "ab.kprof"])
    assert verdict_of(read)[:2] == ("plain", VERDICTS["INVALID"])
    assert read.headline.headline.why in said(read)
    assert rows_of(read, "9", "before") == [("40 ms", "missing", "missing")]
    assert rows_of(read, "Step time") == [("missing", "? not valid")]


def test_a_calibration_is_read_from_what_selftest_printed(tmp_path):
    printed = result_of_calibration(calibration_of())
    (tmp_path / "selftest.json").write_bytes(msgspec.json.encode(printed))
    assert read_evidence([tmp_path / "selftest.json"]).calibration == calibration_of()


def test_the_sides_of_a_comparison_are_called_as_the_page_calls_them():
    pairs = tuple(replace(one, clocks_mhz=(1800, 1600)) for one in comparison_of().pairs)
    doubt = find_power_effect(comparison_of().plan, pairs)
    told = without_letters(doubt)
    assert (quantities_in(told), re.findall(r"\b[AB]\b", told)) == (["11.1 %"], [])
    assert re.findall(r"\b[AB]\b", doubt) == ["B", "A"]
    assert (
        said(
            everything(comparisons=(comparison_of(doubts=(Caveat("clocks_differ", doubt),)),))
        ).count(told)
        == 3
    )


def test_training_runs_of_a_swap_count_for_each_of_its_checked_kernels():
    levels = tuple(Level(name, "passed" if name == "L6" else "not run", "") for name in LEVELS)
    training = result_of_gate(GateReport("rmsnorm=kprof@*.mlp,rope", levels, ("L6",)))
    checked = result_of_gate(gate_of(is_bit_exact=False))
    other = checked | {"subject": "swiglu by kprof"}
    found = gates_in([training, checked, other])
    assert [(one.subject, one.reached) for one in found] == [
        (checked["subject"], TRAINING),
        (other["subject"], None),
    ]
    assert [one.subject for one in gates_in([training, other])] == [
        other["subject"],
        training["subject"],
    ]


def test_the_gates_reports_of_a_comparison_follow_it():
    said = {"plan": {}, "pairs": [], "claims": [], "gates": [{"subject": "rope"}]}
    assert [part.kind for part in parts_of(said)] == ["comparison", "quality gate"]
