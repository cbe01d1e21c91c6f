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
from kprof.report.partner.outcome import KEPT_NOW, UNCHECKED
from kprof.report.partner.parts import (
    Template,
    all_sections,
    list_templates,
    read_template,
)
from kprof.report.partner.sections import time
from kprof.report.partner.sections.quality import CLASSES
from kprof.report.partner.sections.service_level import target_in_words
from kprof.report.partner.wording import VERDICTS, changed_in_words
from tests.quantities import quantities_in
from tests.report.partner_evidence import (
    calibration_of,
    comparison_of,
    everything,
    gate_of,
    level_of,
    run_of,
)
from tests.report.partner_pages import (
    facts_of,
    headings_of,
    page_of,
    paragraphs_of,
    rows_of,
    said,
    steps_of,
    verdict_of,
)
from tests.traces import analyzed_trace_of


def test_the_cover_says_in_one_sentence_what_changed_and_what_it_saves():
    tone, word, numbers = verdict_of(everything())
    assert (tone, word) == ("good", VERDICTS["FASTER"])
    assert numbers == ["20.0 %", "19.0 %", "21.0 %", "$0.10", "$0.05", "$0.20"]
    assert KEPT_NOW in said(everything())


def test_a_much_faster_change_is_said_as_a_multiple():
    fast = comparison_of(low=0.049, ratio=0.050, high=0.051)
    assert verdict_of(Evidence("T", comparisons=(fast,)))[2] == ["20.0", "19.6", "20.4"]


def test_a_promise_that_was_kept_before_is_no_gain():
    kept = everything(service_levels=(level_of("MET"), level_of("MET")))
    assert KEPT_NOW not in said(kept)


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
    adopt, check, *_ = steps_of(Evidence("T", comparisons=(swapped,)))
    assert adopt == f"{UNCHECKED}."
    assert "kprof kernels check rope rmsnorm --json" in check
    other = Evidence("T", comparisons=(comparison_of(b="--arg --workers --arg 8"),))
    assert not [step for step in steps_of(other) if "kernels check" in step]


def test_before_a_class_is_shown_the_next_step_says_which_levels_were_passed():
    checked = gate_of(is_bit_exact=False)
    first, _, *others = checked.levels
    only_first = replace(checked, levels=(first, not_run("L1", "too slow"), *others))
    one = Evidence("T", comparisons=(comparison_of(),), gates=(checked,))
    assert levels_in(steps_of(one)[0]) == ["L0", "L1"]
    two = replace(one, gates=(checked, only_first))
    assert levels_in(steps_of(two)[0]) == ["L0"]


def levels_in(step):
    return re.findall(r"\bL\d\b", step)


def test_of_one_target_the_summary_shows_what_was_measured_and_of_several_how_many_hold():
    levels = (level_of("MISSED"), level_of("MET"))
    found = rows_of(Evidence("T", service_levels=levels), "Service level")
    assert found == [("90.0 ms (limit 100 ms)", "90.0 ms (limit 100 ms)", "✓ met, proven")]
    nothing = level_of("MET")
    judgement = nothing.assessment.judgements[0]
    two = replace(nothing, assessment=Assessment((judgement, judgement), ()))
    assert quantities_in(summed_up(two)) == ["2", "2"]
    unknown = replace(judgement, estimate=None)
    one = replace(nothing, assessment=Assessment((unknown,), ()))
    assert quantities_in(summed_up(one)) == ["1", "1"]


def summed_up(level):
    """Return the summary's cell of a single service level."""
    return rows_of(Evidence("T", service_levels=(level,)), "Service level")[0][0]


def test_comparisons_of_one_script_are_headed_by_their_change_alone():
    graphs = comparison_of(b="inside train.py:cuda_graphs")
    evidence = Evidence("T", comparisons=(comparison_of(b="--arg --fast"), graphs))
    _, *found, _ = headings_of(evidence)
    changes = [changed_in_words(comparison.b) for comparison in evidence.comparisons]
    assert found == [f"train.py: {changes[0]}", changes[1]]


def test_a_slower_change_is_called_a_loss():
    slower = comparison_of("SLOWER", 1.04, 1.05, 1.06)
    evidence = Evidence("T", comparisons=(slower,))
    assert verdict_of(evidence) == ("warning", VERDICTS["SLOWER"], ["5.0 %", "4.0 %", "6.0 %"])
    assert rows_of(evidence, "Step time")[0][-1] == "✗ worse"
    assert steps_of(evidence)[0].startswith("Drop")


def test_an_inconclusive_comparison_claims_nothing_and_credits_no_money():
    unclear = comparison_of("INCONCLUSIVE", 0.97, 0.99, 1.02)
    evidence = everything(comparisons=(unclear,))
    assert verdict_of(evidence) == ("plain", VERDICTS["INCONCLUSIVE"], ["3.0 %", "2.0 %"])
    assert rows_of(evidence, "A million tokens")[0] == ("missing", "$0.50 ($0.25 to $1.00)", "", "")
    assert "saves $" not in said(evidence)


def test_an_invalid_comparison_says_why_and_claims_nothing():
    invalid = comparison_of("INVALID", low=None, why="The clocks differ.")
    evidence = Evidence("T", comparisons=(invalid,))
    assert verdict_of(evidence) == ("plain", VERDICTS["INVALID"], [])
    assert "The clocks differ." in said(evidence)


def test_a_faster_change_that_the_gate_rejects_is_not_recommended():
    evidence = everything(gates=(gate_of("failed"),))
    assert verdict_of(evidence)[:2] == ("warning", "Faster, but rejected")
    assert steps_of(evidence)[0].startswith("Do not adopt")


def test_a_change_is_adopted_only_once_its_results_are_shown_to_stay_right():
    assert steps_of(everything(gates=()))[0] == f"{UNCHECKED}."
    assert steps_of(everything())[0] == "Adopt the change."


def test_a_promise_is_told_in_words_with_its_bound_before_and_after():
    evidence = everything()
    promise = target_in_words(evidence.service_levels[0].assessment.judgements[0])
    assert quantities_in(promise) == ["64 tokens", "100 ms", "99 %"]
    before, after = rows_of(evidence, promise)
    assert before == ("before", "90.0 ms", "85.0 ms", "✗ Missed, proven", "1,200")
    assert after == ("after", "90.0 ms", "95.0 ms", "✓ Met, proven", "1,200")


def test_a_bound_that_no_number_of_samples_gave_is_missing_and_not_zero():
    level = level_of("NOT PROVEN", high=None)
    promise = target_in_words(level.assessment.judgements[0])
    found = rows_of(Evidence("T", service_levels=(level,)), promise)
    assert found == [("now", "90.0 ms", "missing", "? Not proven", "1,200")]


def test_a_level_of_the_gate_that_was_not_run_is_shown_as_such():
    found = rows_of(everything(), "rmsnorm by kprof", "L2, L3, L4, L5, L6")
    assert found == [("? Not run", "", "", "", "not asked for")]
    assert CLASSES["BIT-EXACT"] in said(everything())


def test_too_few_levels_show_no_equivalence():
    evidence = everything(gates=(gate_of(is_bit_exact=False),))
    assert quantities_in(rows_of(evidence, "Quality of results", "")[0][0]) == ["0", "1"]
    assert rows_of(evidence, "Quality of results")[0][-1].startswith("?")
    assert not [words for words in CLASSES.values() if words in said(evidence)]


def test_the_badge_says_how_often_the_instrument_errs_and_where():
    (is_met,) = facts_of(everything(), "Accuracy of kprof ab")
    assert is_met[0] == "✓" and "Round GPU, 2026-11-20" in is_met
    assert quantities_in(facts_of(everything(), "False-positive rate")[0]) == ["4.0 %", "100"]
    assert quantities_in(facts_of(everything(), "Minimum detectable effect")[0])[0] == "0.80 %"


def test_a_calibration_of_another_gpu_is_pointed_out():
    found = paragraphs_of(everything(calibration=calibration_of(device="Square GPU")), "warning")
    assert any("Square GPU" in text and "Round GPU" in text for text in found)


def test_an_instrument_that_was_never_calibrated_is_not_called_calibrated():
    evidence = everything(calibration=None)
    assert facts_of(evidence, "Accuracy of kprof ab") == []
    assert any("kprof selftest" in text for text in paragraphs_of(evidence, "warning"))


@pytest.mark.parametrize(
    ("section", "command"),
    [("service_level", "kprof sla RESULTS"), ("cost", "kprof cost RUN")],
)
def test_what_is_not_there_is_listed_with_how_to_get_it(section, command):
    evidence = Evidence("T", runs=(run_of(),))
    absent = all_sections()[section](evidence)
    assert rows_of(evidence, absent.what) == [(absent.how,)]
    assert absent.how.startswith(command)


def test_nothing_at_all_is_said_to_be_nothing():
    assert verdict_of(Evidence("Empty")) == ("plain", "No data", [])
    assert "$" not in said(Evidence("Empty"))


def test_decisions_stand_in_the_order_of_their_days():
    late, early = Decision(date(2026, 11, 9), "Adopted."), Decision(date(2026, 11, 2), "Tried.")
    found = said(everything(decisions=(late, early)))
    assert found.index("2026-11-02 Tried.") < found.index("2026-11-09 Adopted.")


def test_the_pairs_are_drawn_and_listed_in_the_order_of_time():
    page = page_of(everything())
    tips = re.findall(r"<title>pair (\d+): ", page)
    assert tips == [str(n) for n in [*range(1, 9), *range(1, 9)]]
    assert rows_of(everything(), "1", "before") == [("40 ms", "32 ms", "-20.10 %")]


def test_the_engineers_report_has_the_kernels_and_the_ledger():
    found = said(everything(), template="engineer")
    assert "Which kernels" not in found
    assert "gemm_kernel" in found
    assert any(
        "ledger" in text for text in paragraphs_of(everything(), "good", template="engineer")
    )


@pytest.mark.parametrize("name", sorted(all_sections()))
def test_a_section_can_say_something_of_nothing_and_of_everything(name):
    template = Template((name,))
    for evidence in (Evidence("T"), everything(), Evidence("T", runs=(run_of(),))):
        assert "<main" in render_report(evidence, template, "partner")


def test_the_date_is_that_of_the_evidence():
    assert day_of(everything()) == "2026-11-20"
    later = Decision(date(2026, 12, 24), "Adopted.")
    assert day_of(everything(decisions=(later,))) == "2026-12-24"


def day_of(evidence):
    (subtitle,) = paragraphs_of(evidence, "subtitle")
    return subtitle.rpartition(" ")[2]


def test_every_template_of_kprof_can_be_read():
    assert list_templates() == ["engineer", "partner"]
    assert all(read_template(name).sections for name in list_templates())


def time_of(*kernels, **more):
    """Return the last sentence of the section on time, of one run: on its launches."""
    run = analyzed_trace_of(*kernels, **more)
    texts = [
        block.text
        for block in time.render(Evidence("t", runs=(run,))).blocks
        if hasattr(block, "text")
    ]
    return texts[-1]


def test_the_part_on_time_says_how_many_launches_left_no_record():
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": i, "start_ns": i}
        for i in range(3)
    ]
    kernel = {"correlation": 1, "launch_row": 1, "start_ns": 10, "duration_ns": 5}
    assert quantities_in(time_of(kernel, ranges=calls)) == ["2", "3"]


def test_without_recorded_launches_the_part_on_time_does_not_know_what_was_lost():
    assert "not known" in time_of({"duration_ns": 5})


def test_a_gain_is_green_only_where_nothing_is_left_to_prove():
    proven = everything()
    assert verdict_of(proven)[0] == "good"
    unproven = replace(proven, service_levels=(level_of("NOT PROVEN"),))
    of = {
        "quality": replace(proven, gates=()),
        "class of quality": replace(proven, gates=(gate_of(is_bit_exact=False),)),
        "quality of all": replace(proven, comparisons=(comparison_of(b="--swap rmsnorm,rope"),)),
        "target": unproven,
        "both": replace(unproven, gates=()),
    }
    assert {name: verdict_of(evidence)[0] for name, evidence in of.items()} == dict.fromkeys(
        of, "open"
    )
