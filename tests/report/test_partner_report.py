"""The partner report says what the evidence says, in plain words, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date

import pytest

from kprof.analyze.sla.evaluate import Assessment
from kprof.kernels.correctness.levels import not_run
from kprof.report.partner import render_report
from kprof.report.partner.evidence import Decision, Evidence
from kprof.report.partner.parts import Template, all_sections, list_templates, read_template
from kprof.report.partner.sections import time
from kprof.report.partner.wording import changed_in_words
from tests.report.partner_evidence import (
    calibration_of,
    comparison_of,
    everything,
    gate_of,
    level_of,
    run_of,
)
from tests.report.partner_pages import page_of, said, text_of
from tests.traces import analyzed_trace_of


def test_the_cover_says_in_one_sentence_what_changed_and_what_it_saves():
    found = said(everything())
    assert "✓ Faster, proven With the change, one step takes 20.0 % less time" in found
    assert "(19.0 % to 21.0 %); every SLA target of the service is met now" in found
    assert "it saves $0.10 ($0.05 to $0.20) per million tokens." in found


def test_a_much_faster_change_is_said_as_a_multiple():
    found = said(everything(comparisons=(comparison_of(low=0.049, ratio=0.050, high=0.051),)))
    assert "one step is 20.0 times as fast (19.6 to 20.4)" in found


def test_a_promise_that_was_kept_before_is_no_gain():
    kept = everything(service_levels=(level_of("MET"), level_of("MET")))
    assert "kept now, and was not before" not in said(kept)


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
    assert "once the quality gate has shown that the results stay correct." in found
    assert "Check that they do: kprof kernels check rope rmsnorm --json > gate.json" in found
    other = said(Evidence("T", comparisons=(comparison_of(b="--arg --workers --arg 8"),)))
    assert "Check that they do" not in other


def test_before_a_class_is_shown_the_next_step_says_which_levels_were_passed():
    checked = gate_of(is_bit_exact=False)
    first, _, *others = checked.levels
    only_first = replace(checked, levels=(first, not_run("L1", "too slow"), *others))
    one = Evidence("T", comparisons=(comparison_of(),), gates=(checked,))
    assert "that the results stay correct; so far L0 and L1 passed." in said(one)
    two = replace(one, gates=(checked, only_first))
    assert "that the results stay correct; so far L0 passed." in said(two)


def test_of_one_target_the_summary_shows_what_was_measured_and_of_several_how_many_hold():
    levels = (level_of("MISSED"), level_of("MET"))
    found = said(Evidence("T", service_levels=levels))
    assert "Service level 90.0 ms (limit 100 ms) 90.0 ms (limit 100 ms) ✓ met, proven" in found
    nothing = level_of("MET")
    judgement = nothing.assessment.judgements[0]
    two = replace(nothing, assessment=Assessment((judgement, judgement), ()))
    assert "Service level 2 of 2 targets proven" in said(Evidence("T", service_levels=(two,)))
    unknown = replace(judgement, estimate=None)
    one = replace(nothing, assessment=Assessment((unknown,), ()))
    assert "Service level 1 of 1 target proven" in said(Evidence("T", service_levels=(one,)))


def test_comparisons_of_one_script_are_headed_by_their_change_alone():
    graphs = comparison_of(b="inside train.py:cuda_graphs")
    found = said(Evidence("T", comparisons=(comparison_of(b="--arg --fast"), graphs)))
    assert "train.py: with the arguments --fast ✓ Faster" in found
    assert "CUDA graphs, switched on by train.py ✓ Faster" in found


def test_a_slower_change_is_called_a_loss():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    found = said(Evidence("T", comparisons=(slower,)))
    assert "✗ Slower, proven With the change, one step takes 5.0 % more time" in found
    assert "Drop the change" in found


def test_an_inconclusive_comparison_claims_nothing_and_credits_no_money():
    unclear = comparison_of("INCONCLUSIVE", 0.97, 0.99, 1.02)
    found = said(everything(comparisons=(unclear,)))
    assert "? Inconclusive The measurement does not show yet whether the change helps" in found
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


def test_a_promise_is_told_in_words_with_its_bound_before_and_after():
    found = said(everything())
    promise = "time to the first 64 tokens: at most 100 ms for 99 % of requests"
    assert f"{promise} before 90.0 ms 85.0 ms ✗ Missed, proven 1,200" in found
    assert f"{promise} after 90.0 ms 95.0 ms ✓ Met, proven 1,200" in found


def test_a_bound_that_no_number_of_samples_gave_is_missing_and_not_zero():
    found = said(Evidence("T", service_levels=(level_of("NOT PROVEN", high=None),)))
    assert "now 90.0 ms missing ? Not proven 1,200" in found


def test_a_level_of_the_gate_that_was_not_run_is_shown_as_such():
    found = said(everything())
    assert "L2, L3, L4, L5, L6 ? Not run" in found
    assert "the results are the same to the last bit" in found


def test_too_few_levels_show_no_equivalence():
    found = said(everything(gates=(gate_of(is_bit_exact=False),)))
    assert "this does not prove equivalence yet" in found
    assert "? not shown yet" in found


def test_the_badge_says_how_often_the_instrument_errs_and_where():
    found = said(everything())
    assert "✓ Meets its targets on Round GPU, 2026-11-20" in found
    assert "False-positive rate 4.0 % in 100 comparisons" in found
    assert "Minimum detectable effect 0.80 %" in found


def test_a_calibration_of_another_gpu_is_pointed_out():
    found = said(everything(calibration=calibration_of(device="Square GPU")))
    assert "calibrated on Square GPU, not on Round GPU" in found


def test_an_instrument_that_was_never_calibrated_is_not_called_calibrated():
    found = said(everything(calibration=None))
    assert "was not measured on this machine. To measure it: kprof selftest" in found
    assert "Keeps its targets" not in found


def test_what_is_not_there_is_listed_with_how_to_get_it():
    found = said(Evidence("T", runs=(run_of(),)))
    assert "Whether the service meets its SLA targets kprof sla RESULTS" in found
    assert "What it costs and saves kprof cost RUN" in found
    assert "Service level " not in found[: found.index("Caveats")]


def test_nothing_at_all_is_said_to_be_nothing():
    found = said(Evidence("Empty"))
    assert "There is nothing to report on" in found
    assert "$" not in found.replace("$0", "")


def test_decisions_stand_in_the_order_of_their_days():
    late, early = Decision(date(2026, 11, 9), "Adopted."), Decision(date(2026, 11, 2), "Tried.")
    found = said(everything(decisions=(late, early)))
    assert found.index("2026-11-02 Tried.") < found.index("2026-11-09 Adopted.")


def test_the_pairs_are_drawn_and_listed_in_the_order_of_time():
    page = page_of(everything())
    tips = re.findall(r"<title>pair (\d+): ", page)
    assert tips == [str(n) for n in [*range(1, 9), *range(1, 9)]]
    assert "1 before 40 ms 31.96 ms" in text_of(page) or "1 before 40 ms 32 ms" in text_of(page)


def test_the_engineers_report_has_the_kernels_and_the_ledger():
    found = said(everything(), template="engineer")
    assert "Which kernels" not in found
    assert "gemm_kernel" in found
    assert "The ledger balances to the nanosecond." in found


@pytest.mark.parametrize("name", sorted(all_sections()))
def test_a_section_can_say_something_of_nothing_and_of_everything(name):
    template = Template((name,))
    for evidence in (Evidence("T"), everything(), Evidence("T", runs=(run_of(),))):
        assert "<main" in render_report(evidence, template, "partner")


def test_the_date_is_that_of_the_evidence():
    assert "Evidence up to 2026-11-20" in said(everything())
    later = Decision(date(2026, 12, 24), "Adopted.")
    assert "Evidence up to 2026-12-24" in said(everything(decisions=(later,)))


def test_every_template_of_kprof_can_be_read():
    assert list_templates() == ["engineer", "partner"]
    assert all(read_template(name).sections for name in list_templates())


def time_of(*kernels, **more):
    """Return the texts of the section on time, of one run."""
    run = analyzed_trace_of(*kernels, **more)
    return [
        block.text
        for block in time.render(Evidence("t", runs=(run,))).blocks
        if hasattr(block, "text")
    ]


def test_the_part_on_time_says_how_many_launches_left_no_record():
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": i, "start_ns": i}
        for i in range(3)
    ]
    kernel = {"correlation": 1, "launch_row": 1, "start_ns": 10, "duration_ns": 5}
    assert "The recording lost the GPU's work of 2 of 3 launches." in time_of(kernel, ranges=calls)


def test_without_recorded_launches_the_part_on_time_does_not_know_what_was_lost():
    told = "The recording holds no launches, so whether it lost work of the GPU is not known."
    assert told in time_of({"duration_ns": 5})
