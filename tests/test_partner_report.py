"""The partner report says what the evidence says, in plain words, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from fractions import Fraction
from html import unescape

import msgspec
import pytest

from kprof.analyze.cost.price import Band
from kprof.analyze.cost.sheet import Figure
from kprof.analyze.sla.judge import Assessment
from kprof.comparison import Interval, Pair, save
from kprof.finding import Saving, Worth
from kprof.gate.result import not_run
from kprof.partner import read_evidence, write_partner_report
from kprof.report.calibration import result_of_calibration
from kprof.report.costs import result_of_costs
from kprof.report.gate import result_of_gate
from kprof.report.partner import render_report
from kprof.report.partner.evidence import Decision, Evidence, Scored
from kprof.report.partner.template import Template, all_sections, list_templates, read_template
from kprof.report.partner.wording import changed_in_words
from kprof.report.sla import result_of_sla
from tests.partner_evidence import (
    calibration_of,
    comparison_of,
    costs_of,
    everything,
    finding_of,
    gate_of,
    level_of,
    run_of,
)
from tests.traces import analyzed_trace_of


def page_of(evidence, template="partner", level="partner"):
    return render_report(evidence, read_template(template), level)


def text_of(page):
    """Return what a page says, without its markup."""
    body = page[page.index("<body>") :]
    body = re.sub(r"<(script|style)>.*?</\1>", "", body, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)).replace("\xa0", " "))


def said(evidence, **more):
    return text_of(page_of(evidence, **more))


def test_the_cover_says_in_one_sentence_what_changed_and_what_it_saves():
    found = said(everything())
    assert "✓ Faster, proven With the change, one step takes 20.0 % less time" in found
    assert "(19.0 % to 21.0 %); every promise of the service is kept now" in found
    assert "it saves $0.10 ($0.05 to $0.20) per million tokens." in found


def test_a_much_faster_change_is_said_as_a_multiple():
    found = said(everything(comparisons=(comparison_of(low=0.049, ratio=0.050, high=0.051),)))
    assert "one step is 20.0 times as fast (19.6 to 20.4)" in found


def test_a_promise_that_was_kept_before_is_no_gain():
    kept = everything(service_levels=(level_of("MET"), level_of("MET")))
    assert "kept now, and was not before" not in said(kept)


def test_what_a_loss_costs_is_a_sum_and_its_range_goes_upwards():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    dearer = everything(comparisons=(slower,), costs=(costs_of("4.00"), costs_of("4.20")))
    found = said(dearer)
    assert "it costs another $0.20 ($0.10 to $0.40) per million tokens" in found
    assert "costs $0.20 ($0.10 to $0.40) more" in found


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("--swap rmsnorm,rope", "kernels swapped in: rmsnorm, rope"),
        ("inside agent.py:cuda_graphs", "CUDA graphs, switched on by agent.py"),
        ("--arg --workers --arg 8", "with the arguments --workers 8"),
        ("--env A=1 --env B=2", "with the variables A=1 B=2"),
        ("--env A=1 --arg x", "--env A=1 --arg x"),
        ("after.py", "after.py"),
    ],
)
def test_what_was_changed_is_said_in_plain_words(difference, words):
    assert changed_in_words(difference) == words


def test_what_was_swapped_in_is_to_be_checked_by_name_and_another_change_by_no_kernel():
    swapped = comparison_of(b="--swap rope,rmsnorm=liger")
    found = said(Evidence("T", comparisons=(swapped,)))
    assert "once the quality gate has shown that results stay right." in found
    assert "Check that they do: kprof kernels check rope rmsnorm --json > gate.json" in found
    other = said(Evidence("T", comparisons=(comparison_of(b="--arg --workers --arg 8"),)))
    assert "Check that they do" not in other


def test_before_a_class_is_shown_the_next_step_says_which_levels_were_passed():
    checked = gate_of(is_bit_exact=False)
    first, _, *others = checked.levels
    only_first = replace(checked, levels=(first, not_run("L1", "too slow"), *others))
    one = Evidence("T", comparisons=(comparison_of(),), gates=(checked,))
    assert "that results stay right; so far L0 and L1 passed." in said(one)
    two = replace(one, gates=(checked, only_first))
    assert "that results stay right; so far L0 passed." in said(two)


def test_of_one_target_the_summary_shows_what_was_measured_and_of_several_how_many_hold():
    levels = (level_of("MISSED"), level_of("MET"))
    found = said(Evidence("T", service_levels=levels))
    assert "Service level 90.0 ms (limit 100 ms) 90.0 ms (limit 100 ms) ✓ kept, proven" in found
    nothing = level_of("MET")
    judgement = nothing.assessment.judgements[0]
    two = replace(nothing, assessment=Assessment((judgement, judgement), ()))
    assert "Service level 2 of 2 targets proven" in said(Evidence("T", service_levels=(two,)))


def test_comparisons_of_one_script_are_headed_by_their_change_alone():
    graphs = comparison_of(b="inside train.py:cuda_graphs")
    found = said(Evidence("T", comparisons=(comparison_of(b="--arg --fast"), graphs)))
    assert "train.py: with the arguments --fast ✓ Faster" in found
    assert "CUDA graphs, switched on by train.py ✓ Faster" in found


def test_the_gpu_of_a_run_is_not_named_again_for_the_comparison_on_it():
    run = run_of()
    gpu = replace(run.gpus[0], name="Round GPU", memory_bytes=1 << 30)
    run = replace(run, meta=replace(run.meta, gpus=(gpu,)))
    found = said(Evidence("T", (run,), (comparison_of(),)))
    found = found[found.index("What it ran on.") : found.index("To do it again.")]
    assert found.count("GPU Round GPU") == 1
    alone = said(Evidence("T", comparisons=(comparison_of(),)))
    assert "GPU Round GPU" in alone[alone.index("What it ran on.") :]


def test_what_was_swapped_in_is_no_next_step_any_more():
    found = said(Evidence("T", (run_of(finding_of(swap="rmsnorm")),), (comparison_of(),)))
    steps = found[found.index("What next") : found.index("Where the time goes", 400)]
    assert "kprof ab --swap rmsnorm t.py" not in steps
    other = run_of(finding_of(swap="rope"))
    assert "unfused norm: mending it may save" in said(Evidence("T", (other,), (comparison_of(),)))


def test_energy_that_no_counter_told_reads_missing_with_the_reason():
    found = said(everything())
    assert "Energy of a step missing no step is marked" in found


def test_a_slower_change_is_called_a_loss():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    found = said(Evidence("T", comparisons=(slower,)))
    assert "✗ Slower, proven With the change, one step takes 5.0 % more time" in found
    assert "Drop the change" in found


def test_an_inconclusive_comparison_claims_nothing_and_credits_no_money():
    unclear = comparison_of("INCONCLUSIVE", 0.97, 0.99, 1.02)
    found = said(everything(comparisons=(unclear,)))
    assert "? Cannot tell yet It is not known yet whether the change helps" in found
    assert "no saving is credited" in found
    assert "saves $" not in found


def test_an_invalid_comparison_says_why_and_claims_nothing():
    invalid = comparison_of("INVALID", low=None, why="The clocks differ.")
    assert "Not a valid measurement: The clocks differ." in said(
        Evidence("T", comparisons=(invalid,))
    )


def test_a_faster_change_that_the_gate_rejects_is_not_recommended():
    found = said(everything(gates=(gate_of("failed"),)))
    assert "✗ Faster, but rejected" in found
    assert "Do not adopt the change as it is" in found
    assert "Adopt the change." not in found


def test_a_change_is_adopted_only_once_its_results_are_shown_to_stay_right():
    assert "1. Adopt the change." not in said(everything(gates=()))
    assert "Adopt the change once the quality gate has shown" in said(everything(gates=()))
    assert "Adopt the change. " in said(everything())


def test_a_run_alone_says_that_savings_are_predicted_and_not_proven():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "? Predicted, not proven Nothing was changed yet" in found
    assert "5 to 10 % of the time can be saved" in found


def test_shares_of_time_are_shown_in_plain_words_and_add_up_to_all():
    found = said(Evidence("T", runs=(run_of(),)))
    assert "Matrix multiplication 60.0 % 600 ns" in found
    assert "Idle: waiting for data 30.0 % 300 ns" in found
    assert "Normalisation 10.0 % 100 ns" in found
    assert "All 100.0 % 1 µs" in found


def test_a_finding_card_says_what_it_saves_how_surely_and_with_how_much_work():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "P1 Unfused norm Saves 5 to 10 % of a step (50 ns to 100 ns)" in found
    assert "How sure high Effort low: a setting" in found
    assert "kprof ab --swap rmsnorm t.py" in found


def test_a_finding_whose_saving_nobody_knows_says_so():
    unknown = finding_of(saving=None)
    assert "Saves not known" in said(Evidence("T", runs=(run_of(unknown),)))


def test_a_finding_that_is_gone_after_the_change_is_marked():
    found = said(Evidence("T", runs=(run_of(finding_of()), run_of())))
    assert "✓ no longer found after the change" in found


def test_a_finding_that_is_there_before_and_after_is_marked_too():
    found = said(Evidence("T", runs=(run_of(finding_of()), run_of(finding_of()))))
    assert "still found after it" in found
    assert "no longer found" not in found


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


def test_a_saving_is_priced_by_what_the_state_that_it_was_found_in_costs():
    before, after = run_of(finding_of()), run_of(finding_of("unfused_rope"))
    found = said(Evidence("T", runs=(before, after), costs=(costs_of("0.40"), costs_of("0.20"))))
    assert "In money $0.020 to $0.040 of a million tokens" in found
    assert "In money $0.010 to $0.020 of a million tokens" in found


def test_a_saving_is_worth_a_share_of_its_gpus_where_no_costs_were_given():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    found = said(Evidence("T", runs=(priced_run(worth),)))
    assert "In money $130 to $460 a month; that is of 1 GPU at $5.00 an hour" in found


def test_a_saving_without_a_price_says_so_and_is_no_nothing():
    found = said(Evidence("T", runs=(run_of(finding_of()),)))
    assert "In money not known: no price list has this GPU" in found


def test_a_saving_that_nobody_knows_has_no_money_either():
    unknown = priced_run(Saving(1000, None, None, "nobody knows"))
    assert "In money not known How sure" in said(Evidence("T", runs=(unknown,)))


def test_what_savings_are_worth_is_not_public():
    worth = Saving(1000, 50, 100, "replayed", Worth(131.0, 274.0, 460.4))
    found = said(Evidence("T", runs=(priced_run(worth),)), level="public")
    assert "In money [left out] How sure" in found
    assert "$" not in found


def priced_run(saving):
    """Return a run with a finding of this saving, priced by a list."""
    run = run_of(finding_of(saving=saving))
    return replace(run, diagnosis=replace(run.diagnosis, price="1 GPU at $5.00 an hour"))


def test_a_promise_is_told_in_words_with_its_bound_before_and_after():
    found = said(everything())
    promise = "time to the first 64 tokens: at most 100 ms for 99 % of requests"
    assert f"{promise} before 90.0 ms 85.0 ms ✗ Broken, proven 1,200" in found
    assert f"{promise} after 90.0 ms 95.0 ms ✓ Kept, proven 1,200" in found


def test_a_bound_that_no_number_of_samples_gave_is_missing_and_not_zero():
    found = said(Evidence("T", service_levels=(level_of("NOT PROVEN", high=None),)))
    assert "now 90.0 ms missing ? Not proven 1,200" in found


def test_money_stands_with_its_price_its_source_and_its_date():
    found = said(everything())
    assert "$4.29 (from $2.15 to $8.58), H100, on-demand, of 2026-08-26 to 2026-11-09" in found
    assert "Cloud: price list" in found


def test_a_month_follows_from_the_volume_that_savings_were_computed_for():
    saved = Band.known(Fraction(1, 10))
    monthly = Band.known(Fraction(200))
    figures = (
        Figure("Gain of a token", "saved", "$/M tokens", saved, ""),
        Figure("Gain of a token", "saved", "$/month", monthly, ""),
    )
    found = said(everything(costs=(costs_of("0.40", figures=figures),)))
    # The price is half to twice the middle one, and so is all that follows from it.
    assert (
        "A month $1,000 ($500 to $2,000) $800 ($400 to $1,600) saves $200 ($100 to $400)" in found
    )
    assert "A month is 2,000 million tokens." in found


def test_a_saving_has_the_range_of_the_price_and_that_of_the_gain():
    saved = Band(Fraction("0.08"), Fraction("0.10"), Fraction("0.12"))
    figures = (Figure("Gain of a token", "saved", "$/M tokens", saved, ""),)
    found = said(everything(costs=(costs_of("0.40", figures=figures),)))
    # From 8 cents at half the price to 12 cents at twice the price.
    assert "saves $0.10 ($0.04 to $0.24)" in found


def test_costs_that_do_not_change_are_no_saving():
    found = said(everything(costs=(costs_of("0.40"), costs_of("0.40"))))
    assert "; that saves" not in found
    assert "✓ cheaper" not in found


def test_a_level_of_the_gate_that_was_not_run_is_shown_as_such():
    found = said(everything())
    assert "L3: the model's outputs agree ? Not run" in found
    assert "the results are the same to the last bit" in found


def test_too_few_levels_show_no_equivalence():
    found = said(everything(gates=(gate_of(is_bit_exact=False),)))
    assert "which is too little to call it equivalent" in found
    assert "? not shown yet" in found


def test_the_badge_says_how_often_the_instrument_errs_and_where():
    found = said(everything())
    assert "✓ Keeps its targets on Round GPU, 2026-11-20" in found
    assert "Sees a difference by mistake 4.0 % of 100 comparisons" in found
    assert "Finds differences from 0.80 %" in found


def test_a_calibration_of_another_gpu_is_pointed_out():
    found = said(everything(calibration=calibration_of(device="Square GPU")))
    assert "calibrated on Square GPU, not on Round GPU" in found


def test_an_instrument_that_was_never_calibrated_is_not_called_calibrated():
    found = said(everything(calibration=None))
    assert "was not measured. To know: kprof selftest" in found
    assert "Keeps its targets" not in found


def test_what_is_not_there_is_listed_with_how_to_get_it():
    found = said(Evidence("T", runs=(run_of(),)))
    assert "Whether the service keeps its promises kprof sla RESULTS" in found
    assert "What it costs and saves kprof cost RUN" in found
    assert "Service level " not in found[: found.index("What to keep in mind")]


def test_nothing_at_all_is_said_to_be_nothing():
    found = said(Evidence("Empty"))
    assert "There is nothing to report on" in found
    assert "$" not in found.replace("$0", "")


def test_an_empty_run_makes_a_report():
    assert "What to keep in mind" in said(Evidence("T", runs=(analyzed_trace_of(),)))


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
    assert "Nothing of 1 prediction was measured yet." in said(everything(predictions=(still,)))
    together = replace(right, finding="all-swaps")
    words = "all kernels that findings propose, together 2026-11-02 12 to 18 %"
    assert words in said(everything(predictions=(together,)))


def test_decisions_stand_in_the_order_of_their_days():
    late, early = Decision(date(2026, 11, 9), "Adopted."), Decision(date(2026, 11, 2), "Tried.")
    found = said(everything(decisions=(late, early)))
    assert found.index("2026-11-02 Tried.") < found.index("2026-11-09 Adopted.")


def test_the_pairs_are_drawn_and_listed_in_the_order_of_time():
    page = page_of(everything())
    tips = re.findall(r"<title>pair (\d+): ", page)
    assert tips == [str(n) for n in [*range(1, 9), *range(1, 9)]]
    assert "1 before 40 ms 31.96 ms" in text_of(page) or "1 before 40 ms 32 ms" in text_of(page)


def test_the_engineers_report_has_the_kernels_and_the_books():
    found = said(everything(), template="engineer")
    assert "Which kernels" not in found
    assert "gemm_kernel" in found
    assert "The books balance to the nanosecond." in found


@pytest.mark.parametrize("name", sorted(all_sections()))
def test_a_section_can_say_something_of_nothing_and_of_everything(name):
    template = Template((name,))
    for evidence in (Evidence("T"), everything(), Evidence("T", runs=(run_of(),))):
        assert "<main" in render_report(evidence, template, "partner")


def test_the_date_is_that_of_the_evidence():
    assert "Evidence up to 2026-11-20" in said(everything())
    later = Decision(date(2026, 12, 24), "Adopted.")
    assert "Evidence up to 2026-12-24" in said(everything(decisions=(later,)))


def test_a_run_is_of_the_day_of_its_first_activity_not_of_its_clocks_base():
    first = {"name": "gemm", "start_ns": 50 * 24 * 3600 * 10**9}
    run = analyzed_trace_of(first, base_time_ns=1_790_812_800 * 10**9)  # 2026-10-01
    assert Evidence("Net", runs=(run,)).day == date(2026, 11, 20)


def test_a_run_without_findings_asks_for_no_other_run():
    found = said(Evidence("Net", runs=(run_of(),)))
    assert "kprof whatif" in found
    assert "record a run" not in found


def test_every_template_of_kprof_can_be_read():
    assert list_templates() == ["engineer", "partner"]
    assert all(read_template(name).sections for name in list_templates())


def test_what_commands_printed_is_read_back_as_it_was(tmp_path):
    evidence = everything()
    before, after = evidence.service_levels
    files = {
        "sla-1.json": result_of_sla(before),
        "sla-2.json": result_of_sla(after),
        "cost-1.json": result_of_costs(evidence.costs[0]),
        "cost-2.json": result_of_costs(evidence.costs[1]),
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
    content |= {"targets": {"A": before, "B": after}, "costs": result_of_costs(evidence.costs[0])}
    content |= {"calibration": "It errs now and then."}
    (tmp_path / "ab.json").write_bytes(msgspec.json.encode(content))
    read = read_evidence([tmp_path / "ab.json"])
    assert read.comparisons == evidence.comparisons
    assert [one.assessment.verdict for one in read.service_levels] == ["MISSED", "MET"]
    assert read.costs == evidence.costs[:1]
    assert "Instrument: It errs now and then." in said(read)


def test_a_comparison_with_values_that_are_no_numbers_is_read_and_shown(tmp_path):
    pairs = (*comparison_of().pairs, Pair((40e6,), (float("nan"),), True, 0))
    invalid = comparison_of("INVALID", None, pairs=pairs, why="A value is no number.")
    (tmp_path / "ab.kprof").mkdir()
    save(invalid, tmp_path / "ab.kprof")
    found = said(read_evidence([tmp_path / "ab.kprof"]))
    assert "Not a valid measurement: A value is no number." in found
    assert "9 before 40 ms missing missing" in found
    assert "Step time missing ? not valid" in found


def test_a_calibration_is_read_from_what_selftest_printed(tmp_path):
    printed = result_of_calibration(calibration_of())
    (tmp_path / "selftest.json").write_bytes(msgspec.json.encode(printed))
    assert read_evidence([tmp_path / "selftest.json"]).calibration == calibration_of()


def test_a_report_is_written_with_the_playbooks_names_of_its_findings(tmp_path):
    write_partner_report(Evidence("T", runs=(run_of(finding_of()),)), tmp_path / "r.html")
    assert "A norm is spelled out in operators" in (tmp_path / "r.html").read_text()
