"""What the partner report says of runs: where the time goes, what was found, what came of it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date

import pytest

from kprof.commands.report import write_partner_report
from kprof.comparison import Interval
from kprof.findings import Diagnosis, Remedy, Unasked
from kprof.report.partner.evidence import Evidence, Scored
from tests.report.partner_evidence import (
    comparison_of,
    everything,
    finding_of,
    run_of,
)
from tests.report.partner_pages import page_of, said
from tests.section_traces import RICH
from tests.traces import analyzed_trace_of


def test_the_gpu_of_a_run_is_not_named_again_for_the_comparison_on_it():
    run = run_of()
    gpu = replace(run.gpus[0], name="Round GPU", memory_bytes=1 << 30)
    run = replace(run, meta=replace(run.meta, gpus=(gpu,)))
    found = said(Evidence("T", (run,), (comparison_of(),)))
    found = found[found.index("Hardware and software") : found.index("Commands to repeat")]
    assert found.count("GPU Round GPU") == 1
    alone = said(Evidence("T", comparisons=(comparison_of(),)))
    assert "GPU Round GPU" in alone[alone.index("Hardware and software of the runs.") :]


def test_what_was_swapped_in_is_no_next_step_any_more():
    found = said(Evidence("T", (run_of(finding_of(swap="rmsnorm")),), (comparison_of(),)))
    steps = found[found.index("Next steps") : found.index("Where the time goes", 400)]
    assert "kprof ab --swap rmsnorm t.py" not in steps
    other = run_of(finding_of(swap="rope"))
    assert "unfused norm: a fix may save" in said(Evidence("T", (other,), (comparison_of(),)))


def test_energy_that_no_counter_told_reads_missing_with_the_reason():
    found = said(everything())
    assert "Energy of a recorded step missing no step is marked" in found


def test_a_run_alone_says_that_savings_are_predicted_and_not_proven():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "? Predicted, not proven Nothing was changed yet" in found
    assert "predicted to save 5 to 10 % of the time" in found


def test_two_runs_without_a_comparison_are_not_said_to_be_unchanged():
    found = said(Evidence("T", runs=(run_of(), run_of(finding_of()))))
    assert "Nothing was changed" not in found
    assert "No comparison proves what changed yet" in found


def test_shares_of_time_are_shown_in_plain_words_and_add_up_to_all():
    found = said(Evidence("T", runs=(run_of(),)))
    assert "Matrix multiplication 60.0 % 600 ns" in found
    assert "Idle: waiting for data 30.0 % 300 ns" in found
    assert "Normalisation 10.0 % 100 ns" in found
    assert "All 100.0 % 1 µs" in found


def test_a_finding_card_says_what_it_saves_how_surely_and_with_how_much_work():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "P1 Unfused norm Saves 5 to 10 % of a step (50 ns to 100 ns)" in found
    assert "Confidence high Effort low: a setting" in found
    assert "kprof ab --swap rmsnorm t.py" in found


def test_what_proves_a_finding_says_of_how_many_it_is():
    assert "Evidence." in said(Evidence("T", runs=(run_of(finding_of()),)))
    many = finding_of(num_rows=1248)
    told = "Evidence: the 1 that took longest, of 1,248."
    assert told in said(Evidence("T", runs=(run_of(many),)))
    stepped = replace(RICH, diagnosis=Diagnosis((finding_of(),)))
    assert "Evidence, in 1 recorded step together." in said(Evidence("T", runs=(stepped,)))


def test_a_finding_whose_saving_nobody_knows_says_so():
    unknown = finding_of(saving=None)
    assert "Saves not known" in said(Evidence("T", runs=(run_of(unknown),)))


def test_a_finding_that_is_gone_after_the_change_is_marked():
    found = said(Evidence("T", runs=(run_of(finding_of()), run_of())))
    assert "✓ no longer found after the change" in found


def test_a_finding_that_is_there_before_and_after_is_marked_too():
    found = said(Evidence("T", runs=(run_of(finding_of()), run_of(finding_of()))))
    assert "still found after the change" in found
    assert "no longer found" not in found


def test_what_is_still_there_saves_what_it_would_save_now():
    before, after = run_of(finding_of()), run_of(finding_of(low_ns=200, high_ns=300))
    found = said(Evidence("T", runs=(before, after)))
    assert "Saves 20 to 30 % of a step" in found
    assert "Saves 5 to 10 % of a step" not in found


def test_what_rules_cannot_see_after_the_change_is_not_said_to_be_gone():
    replayed = run_of().with_kernels(op=None, bucket="graph")
    found = said(Evidence("T", runs=(run_of(finding_of()), replayed)))
    assert "? not seen after the change, where 100 % of the device time has no operator" in found
    assert "no longer found" not in found
    waiting = finding_of(rows=(), idle_rows=(0,))
    assert "✓ no longer found" in said(Evidence("T", runs=(run_of(waiting), replayed)))


def test_waiting_that_goes_on_after_the_change_is_not_said_to_be_gone():
    waiting = finding_of("data_loading", remedy=Remedy(idle_cause="data loading"))
    found = said(Evidence("T", runs=(run_of(waiting), run_of())))
    assert "? less of it, but 30 % of the time is still spent so" in found
    assert "no longer found" not in found


def test_a_rule_that_could_not_be_asked_after_the_change_says_why():
    unasked = Diagnosis(unasked=(Unasked("unfused_norm", "no shapes were recorded", ""),))
    after = replace(run_of(), diagnosis=unasked)
    found = said(Evidence("T", runs=(run_of(finding_of()), after)))
    assert "? not checked after the change: no shapes were recorded" in found


def test_many_kinds_of_work_are_folded_and_still_add_up_to_all():
    kinds = ("gemm", "norm", "copy", "set", "loss", "sort", "random", "softmax", "other")
    kernels = [
        {"kind": kind, "start_ns": 100 * i, "bucket": "attributed"}
        for i, kind in enumerate((*kinds, "attention", "reduction", "embedding"))
    ]
    found = said(Evidence("T", runs=(analyzed_trace_of(*kernels),)))
    table = found[found.index("Adds up to 100 %") : found.index("All 100.0 %")]
    assert sum(float(share) for share in re.findall(r"([\d.]+) %", table)[1:]) == pytest.approx(100)
    assert "Everything else 25.0 %" in table


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
    found = said(everything(predictions=(right, wrong, still)))
    assert "1 of 2 predictions came true; 1 not measured yet." in found
    assert "unfused norm 2026-11-02 12 to 18 % 13 to 15 % ✓ Came true" in found
    assert "sync in loop 2026-11-03 12 to 18 % 0 to 2 % ✗ Was off" in found
    assert "1 prediction, none measured yet." in said(everything(predictions=(still,)))
    near = replace(wrong, measured=Interval(0.89, 0.86, 0.90, 0.95, "fixed"))
    found = said(everything(predictions=(replace(near, source="before.kprof"),)))
    assert "from before.kprof 12 to 18 %" in found
    assert "? Was off, not certain" in found
    unsure = replace(right, measured=Interval(0.86, 0.80, 0.87, 0.95, "fixed"))
    found = said(everything(predictions=(unsure,)))
    assert "1 of 1 prediction came true, 0 of them with certainty." in found
    assert "? Came true, not certain" in found
    together = replace(right, finding="all-swaps")
    words = "all kernels that findings propose, together 2026-11-02 12 to 18 %"
    assert words in said(everything(predictions=(together,)))


def test_a_run_is_of_the_day_of_its_first_activity_not_of_its_clocks_base():
    first = {"name": "gemm", "start_ns": 50 * 24 * 3600 * 10**9}
    run = analyzed_trace_of(first, base_time_ns=1_790_812_800 * 10**9)  # 2026-10-01
    assert Evidence("Net", runs=(run,)).day == date(2026, 11, 20)


def test_a_run_without_findings_asks_for_no_other_run():
    found = said(Evidence("Net", runs=(run_of(),)))
    assert "kprof whatif" in found
    assert "record a run" not in found


def test_a_report_is_written_with_the_playbooks_names_of_its_findings(tmp_path):
    write_partner_report(Evidence("T", runs=(run_of(finding_of()),)), tmp_path / "r.html")
    assert "A norm is unfused" in (tmp_path / "r.html").read_text()


def test_predictions_and_findings_have_the_same_plain_names(tmp_path):
    open_one = Scored("unfused_norm", 0.12, 0.18, date(2026, 11, 2))
    evidence = Evidence("T", runs=(run_of(finding_of()),), predictions=(open_one,))
    write_partner_report(evidence, tmp_path / "r.html")
    assert "unfused norm" not in (tmp_path / "r.html").read_text()


def test_doubts_of_several_recordings_say_of_which_they_are():
    runs = tuple(run_of(caveats=(f"It rained {i}.",)) for i in range(3))
    found = said(Evidence("T", runs=runs))
    assert "Recording before It rained 0." in found
    assert "Recording 2 It rained 1." in found
    assert "Recording after It rained 2." in found
    assert "Recording It rained 0." in said(Evidence("T", runs=runs[:1]))


def test_a_page_of_much_evidence_stays_below_three_megabytes():
    kernel = {"kind": "gemm", "bucket": "attributed"}
    kernels = ({"name": f"k{i}_{'x' * 600}", "start_ns": 200 * i, **kernel} for i in range(2_000))
    many = tuple(finding_of(f"rule_{i}", rows=tuple(range(500))) for i in range(60))
    run = replace(analyzed_trace_of(*kernels), diagnosis=Diagnosis(many))
    long = comparison_of(pairs=comparison_of().pairs * 20)
    page = page_of(everything(runs=(run, run), comparisons=(long,) * 5))
    assert "x" * 20 in page
    assert 200_000 < len(page.encode()) < 3_000_000
