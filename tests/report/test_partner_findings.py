"""What the partner report says of runs: where the time goes, what was found, what came of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest

from kprof.analyze.energy import measure_step_energy
from kprof.commands.report import write_partner_report
from kprof.comparison import Interval
from kprof.findings import Diagnosis, Fix, NotApplicable
from kprof.report.partner.evidence import Evidence, Scored
from kprof.report.partner.outcome import outcome_of
from kprof.report.partner.parts import Card, Picture
from kprof.report.partner.sections import appendix, findings, time
from kprof.report.partner.sections import predictions as predicted
from kprof.report.partner.sections.findings import EFFORT
from kprof.report.partner.sections.predictions import TOGETHER, came_true, is_sure
from kprof.report.partner.wording import KINDS, WAITS
from kprof.report.playbooks import find_playbook
from kprof.report.section import Table
from kprof.report.units import UNKNOWN
from kprof.trace import Caveat
from tests.quantities import quantities_in
from tests.report.partner_evidence import (
    comparison_of,
    everything,
    finding_of,
    run_of,
)
from tests.report.partner_pages import (
    cells_in,
    facts_of,
    headings_of,
    page_of,
    paragraphs_of,
    rows_of,
    said,
    steps_of,
    verdict_of,
)
from tests.section_traces import RICH
from tests.traces import analyzed_trace_of


def test_the_gpu_of_a_run_is_not_named_again_for_the_comparison_on_it():
    run = run_of()
    gpu = replace(run.gpus[0], name="Round GPU", memory_bytes=1 << 30)
    run = replace(run, meta=replace(run.meta, gpus=(gpu,)))
    ((named,),) = gpus_in(Evidence("T", (run,), (comparison_of(),)))
    assert named.split(", ") == ["Round GPU", "1 GiB"]
    assert gpus_in(Evidence("T", comparisons=(comparison_of(),))) == [("Round GPU",)]


def gpus_in(evidence):
    """Return the rows of GPUs in the environment: the appendix's first table."""
    table = next(block for block in appendix.render(evidence).blocks if isinstance(block, Table))
    return [row[1:] for row in table.rows if row[0] == "GPU"]


def test_what_was_swapped_in_is_no_next_step_any_more():
    swapped, other = (run_of(finding_of(swap=name)) for name in ("rmsnorm", "rope"))
    command = finding_of().command
    steps = steps_of(Evidence("T", (swapped,), (comparison_of(),)))
    assert not [step for step in steps if command in step]
    steps = steps_of(Evidence("T", (other,), (comparison_of(),)))
    (about_it,) = [step for step in steps if command in step]
    assert quantities_in(about_it) == ["5", "10 %"]


def test_energy_that_no_counter_told_reads_missing_with_the_reason():
    (energy,) = facts_of(everything(), "Energy of a recorded step")
    assert energy.startswith("missing ")
    assert energy.endswith(measure_step_energy(everything().runs[0]).why)


def test_a_run_alone_says_that_savings_are_predicted_and_not_proven():
    verdict = verdict_of(Evidence("T", runs=(run_of(finding_of()),)))
    assert verdict == ("plain", "Predicted, not proven", ["5", "10 %"])


def test_two_runs_without_a_comparison_are_not_said_to_be_unchanged():
    alone = outcome_of(Evidence("T", runs=(run_of(finding_of()),)))
    after = outcome_of(Evidence("T", runs=(run_of(), run_of(finding_of()))))
    assert alone.word == after.word == "Predicted, not proven"
    assert "Nothing" in alone.sentence and "Nothing" not in after.sentence


def test_shares_of_time_are_shown_in_plain_words_and_add_up_to_all():
    found = Evidence("T", runs=(run_of(),))
    assert rows_of(found, KINDS["gemm"]) == [("60.0 %", "600 ns")]
    assert rows_of(found, WAITS["data loading"]) == [("30.0 %", "300 ns")]
    assert rows_of(found, KINDS["norm"]) == [("10.0 %", "100 ns")]
    assert rows_of(found, "All") == [("100.0 %", "1 µs")]


def test_a_finding_card_says_what_it_saves_how_surely_and_with_how_much_work():
    evidence = Evidence("T", runs=(run_of(finding_of()),))
    assert "P1 Unfused norm" in headings_of(evidence)
    assert quantities_in(facts_of(evidence, "Saves")[0]) == ["5", "10 %", "50 ns", "100 ns"]
    assert facts_of(evidence, "Confidence") == ["high"]
    assert facts_of(evidence, "Effort") == [EFFORT["low"]]
    assert any(finding_of().command in text for text in paragraphs_of(evidence, "plain"))


def test_what_proves_a_finding_says_of_how_many_it_is():
    assert quantities_in(caption_of(run_of(finding_of()))) == []
    assert quantities_in(caption_of(run_of(finding_of(num_rows=1248)))) == ["1", "1,248"]
    assert quantities_in(caption_of(replace(RICH, diagnosis=Diagnosis((finding_of(),))))) == ["1"]


def caption_of(run):
    """Return the caption of the table that proves a run's only finding."""
    (card,) = (b for b in findings.render(Evidence("T", runs=(run,))).blocks if isinstance(b, Card))
    return card.details[-1].caption


def test_a_finding_of_unknown_saving_says_so():
    unknown = finding_of(saving=None)
    assert facts_of(Evidence("T", runs=(run_of(unknown),)), "Saves") == [UNKNOWN]


def test_a_finding_that_is_gone_after_the_change_is_marked():
    assert status_of(run_of(finding_of()), run_of())[0] == "✓"


def test_a_finding_that_is_there_before_and_after_is_marked_too():
    assert status_of(run_of(finding_of()), run_of(finding_of())).startswith("still")


def status_of(before, after):
    """Return what became of the only finding of two runs."""
    (status,) = facts_of(Evidence("T", runs=(before, after)), "Status")
    return status


def test_what_is_still_there_saves_what_it_would_save_now():
    before, after = run_of(finding_of()), run_of(finding_of(low_ns=200, high_ns=300))
    (saves,) = facts_of(Evidence("T", runs=(before, after)), "Saves")
    assert quantities_in(saves)[:2] == ["20", "30 %"]


def test_what_rules_cannot_see_after_the_change_is_not_said_to_be_gone():
    replayed = run_of().with_kernels(op=None, bucket="graph")
    status = status_of(run_of(finding_of()), replayed)
    assert (status[0], quantities_in(status)) == ("?", ["100 %"])
    waiting = finding_of(rows=(), idle_rows=(0,))
    assert status_of(run_of(waiting), replayed)[0] == "✓"


def test_waiting_that_goes_on_after_the_change_is_not_said_to_be_gone():
    waiting = finding_of("data_loading", fix=Fix(idle_cause="data loading"))
    status = status_of(run_of(waiting), run_of())
    assert (status[0], quantities_in(status)) == ("?", ["30 %"])


def test_a_rule_that_could_not_be_asked_after_the_change_says_why():
    not_applicable = NotApplicable("unfused_norm", "no shapes were recorded", "")
    after = replace(run_of(), diagnosis=Diagnosis(not_applicable=(not_applicable,)))
    status = status_of(run_of(finding_of()), after)
    assert (status[0], status.rpartition(": ")[2]) == ("?", not_applicable.because)


def test_many_kinds_of_work_are_folded_and_still_add_up_to_all():
    kinds = ("gemm", "norm", "copy", "set", "loss", "sort", "random", "softmax", "other")
    kernels = [
        {"kind": kind, "start_ns": 100 * i, "bucket": "attributed"}
        for i, kind in enumerate((*kinds, "attention", "reduction", "embedding"))
    ]
    evidence = Evidence("T", runs=(analyzed_trace_of(*kernels),))
    picture = next(block for block in time.render(evidence).blocks if isinstance(block, Picture))
    shares = {row[0]: float(row[1].removesuffix(" %")) for row in picture.table.rows}
    assert shares.pop("All") == pytest.approx(sum(shares.values()))
    assert shares[time.REST] == 25.0


def test_an_empty_run_makes_a_report():
    assert "Caveats" in said(Evidence("T", runs=(analyzed_trace_of(),)))


def test_a_prediction_is_scored_by_what_was_measured():
    right = Scored(
        "unfused_norm", 0.12, 0.18, date(2026, 11, 2), Interval(0.86, 0.85, 0.87, 0.95, "fixed")
    )
    wrong = Scored(
        "sync_in_loop", 0.12, 0.18, date(2026, 11, 3), Interval(0.99, 0.98, 1.0, 0.95, "fixed")
    )
    still = Scored("unfused_rope", 0.12, 0.18, date(2026, 11, 4))
    counts, rows = scores_of(right, wrong, still)
    assert counts == ["1", "2", "1"]
    assert rows == [
        ("unfused norm", "2026-11-02", "12 to 18 %", "13 to 15 %", "✓ Came true"),
        ("sync in loop", "2026-11-03", "12 to 18 %", "0 to 2 %", "✗ Was off"),
        ("unfused rope", "2026-11-04", "12 to 18 %", "not measured yet", "? Open"),
    ]
    assert scores_of(still)[0] == ["1"]
    near = replace(wrong, measured=Interval(0.89, 0.86, 0.90, 0.95, "fixed"))
    _, [row] = scores_of(replace(near, source="before.kprof"))
    assert row[1] == "2026-11-03, from before.kprof"
    assert (came_true(near), is_sure(near), row[-1][0]) == (False, False, "?")
    unsure = replace(right, measured=Interval(0.86, 0.80, 0.87, 0.95, "fixed"))
    counts, [row] = scores_of(unsure)
    assert counts == ["1", "1", "0"]
    assert (came_true(unsure), is_sure(unsure), row[-1][0]) == (True, False, "?")
    _, [row] = scores_of(replace(right, finding="all-swaps"))
    assert row[0] == TOGETHER["all-swaps"]


def scores_of(*predictions):
    """Return the numbers in the lead of the section on predictions, and the rows of its table."""
    lead, table = predicted.render(Evidence("T", predictions=predictions)).blocks
    return quantities_in(lead.text), list(table.rows)


def test_a_run_is_of_the_day_of_its_first_activity_not_of_its_clocks_base():
    first = {"name": "gemm", "start_ns": 50 * 24 * 3600 * 10**9}
    run = analyzed_trace_of(first, base_time_ns=1_790_812_800 * 10**9)  # 2026-10-01
    assert Evidence("Net", runs=(run,)).day == date(2026, 11, 20)


def test_a_run_without_findings_asks_for_no_other_run():
    (step,) = steps_of(Evidence("Net", runs=(run_of(),)))
    assert "kprof whatif" in step
    assert "kprof run" not in step


def test_a_report_is_written_with_the_playbooks_names_of_its_findings(tmp_path):
    write_partner_report(Evidence("T", runs=(run_of(finding_of()),)), tmp_path / "r.html")
    assert find_playbook("unfused_norm").title in (tmp_path / "r.html").read_text()


def test_predictions_and_findings_have_the_same_plain_names(tmp_path):
    open_one = Scored("unfused_norm", 0.12, 0.18, date(2026, 11, 2))
    evidence = Evidence("T", runs=(run_of(finding_of()),), predictions=(open_one,))
    write_partner_report(evidence, tmp_path / "r.html")
    assert "unfused norm" not in (tmp_path / "r.html").read_text()


def test_doubts_of_several_recordings_say_of_which_they_are():
    rained = [f"It rained {i}." for i in range(3)]
    runs = tuple(run_of(caveats=(Caveat("recorder", caveat),)) for caveat in rained)
    found = cells_in(page_of(Evidence("T", runs=runs)))
    about = [row[0] for caveat in rained for row in found if row[1:] == (caveat,)]
    assert about == ["Recording before", "Recording 2", "Recording after"]
    assert ("Recording", rained[0]) in cells_in(page_of(Evidence("T", runs=runs[:1])))


def test_a_page_of_much_evidence_stays_below_three_megabytes():
    kernel = {"kind": "gemm", "bucket": "attributed"}
    kernels = ({"name": f"k{i}_{'x' * 600}", "start_ns": 200 * i, **kernel} for i in range(2_000))
    many = tuple(finding_of(f"rule_{i}", rows=tuple(range(500))) for i in range(60))
    run = replace(analyzed_trace_of(*kernels), diagnosis=Diagnosis(many))
    long = comparison_of(pairs=comparison_of().pairs * 20)
    page = page_of(everything(runs=(run, run), comparisons=(long,) * 5))
    assert "x" * 20 in page
    assert 200_000 < len(page.encode()) < 3_000_000
