"""What the partner report draws of a service: the time to N tokens, and distributions."""

import json
import re
from dataclasses import replace

from kprof.analyze.sla.targets import read_targets
from kprof.commands.sla import json_of, judge_responses
from kprof.report.partner import render_report
from kprof.report.partner.evidence import Evidence, service_level_in
from kprof.report.partner.outcome import UNPROVEN, outcome_of
from kprof.report.partner.parts import Picture, read_template
from kprof.report.partner.sections import service_level
from kprof.report.partner.service_curves import BOUND, HALF, TAIL, later_in_words, pictures_of
from kprof.report.section import Text
from kprof.report.sla_verdict import sentence_of
from tests.quantities import quantities_in
from tests.report.partner_evidence import everything, level_of
from tests.report.partner_pages import paragraphs_of, rows_of, said, steps_of
from tests.responses import MS, answer, failure, service

TTF4, TTFT = "ttf4_p99<=100ms", "ttft_p99<=60ms"


def kept(*texts, rows):
    """Return a verdict as it comes back from what kprof sla printed."""
    judged = judge_responses([service(*rows)], read_targets(texts), None, 0)
    return service_level_in(json.loads(json_of(judged)))


def of_four_tokens(number, gap_ms=20):
    return [answer(10, sent_ms=20 * i, gaps_ms=(gap_ms,) * 3) for i in range(number)]


def rows_by_name(picture):
    return {row[0]: row[1:] for row in picture.table.rows}


def test_the_curve_has_the_time_of_every_n_and_its_bound():
    (picture,) = pictures_of([("now", kept(TTF4, rows=of_four_tokens(500)))])
    assert [column.header for column in picture.table.columns][1:] == ["1", "2", "4"]
    rows = rows_by_name(picture)
    assert rows[HALF] == ("10.00 ms", "30.0 ms", "70.0 ms")
    assert rows[BOUND] == ("10.00 ms", "30.0 ms", "70.0 ms")


def test_a_bound_that_too_few_requests_allow_is_missing_and_not_drawn():
    (picture,) = pictures_of([("now", kept(TTF4, rows=of_four_tokens(20)))])
    assert rows_by_name(picture)[BOUND] == ("—", "—", "—")
    assert [name for _, name in picture.legend] == [HALF, TAIL]


def test_before_and_after_are_told_apart_by_name_and_each_level_by_its_symbol():
    before, after = (kept(TTF4, rows=of_four_tokens(500, gap)) for gap in (90, 20))
    (picture,) = pictures_of([("before", before), ("after", after)])
    rows = rows_by_name(picture)
    assert rows[f"{TAIL}, before"][-1] == "280 ms"
    assert rows[f"{TAIL}, after"][-1] == "70.0 ms"
    assert len({style for style, _ in picture.legend}) == len(picture.legend) == 6


def test_the_limit_lies_at_its_height_and_names_its_tokens():
    (picture,) = pictures_of([("now", kept(TTF4, rows=of_four_tokens(500)))])
    words = [shape.text for shape in picture.wide.shapes if hasattr(shape, "text")]
    assert "100 ms" in words
    assert [quantities_in(word) for word in words if "limit" in word] == [["4 tokens"]]


def test_one_token_is_no_plural():
    (judgement,) = kept("ttf1_p99<=100ms", rows=of_four_tokens(500)).assessment.judgements
    promised = service_level.target_in_words(judgement)
    assert quantities_in(promised) == ["100 ms", "99 %"]
    assert "token" in promised and "tokens" not in promised


def test_a_distribution_ends_below_100_percent_where_requests_failed():
    rows = [*of_four_tokens(3), failure(sent_ms=90)]
    (tokens, times) = pictures_of([("now", kept(TTFT, rows=rows))])
    assert HALF in rows_by_name(tokens)
    # Three of four were answered, so nobody knows within which time 90 % were.
    assert times.table.rows == (("now", "10.00 ms", "—", "—", "—", "—"),)


def test_a_distribution_shows_the_bound_of_what_was_promised():
    (_, times) = pictures_of([("now", kept(TTFT, rows=of_four_tokens(500)))])
    assert ("k0 triangle", "99 % bound, now") in times.legend
    (_, unknown) = pictures_of([("now", kept(TTFT, rows=of_four_tokens(20)))])
    assert len(unknown.legend) == 1


def test_what_an_older_kprof_printed_has_no_curves_and_is_shown_without():
    told = json.loads(json_of(judge_responses([service(*of_four_tokens(9))], read_targets([TTF4]))))
    del told["curves"]
    assert pictures_of([("now", service_level_in(told))]) == []


def test_few_points_are_kept_and_the_last_is_among_them():
    long = [answer(10, gaps_ms=(1,) * 199) for _ in range(3)]
    curve = kept(TTF4, rows=long).curves.tokens
    assert len(curve.num_tokens) == 64
    assert curve.num_tokens[-1] == 200
    assert curve.by_level["p50"][-1] == 209 * MS


def test_the_section_holds_its_curves():
    evidence = Evidence("T", service_levels=(kept(TTF4, TTFT, rows=of_four_tokens(500)),))
    pictures = [
        block for block in service_level.render(evidence).blocks if isinstance(block, Picture)
    ]
    assert pictures[1:] == pictures_of([("now", evidence.service_levels[0])])
    assert len(pictures[1:]) == 2
    page = render_report(evidence, read_template("partner"), "partner")
    assert len(re.findall(r'<polyline class="line k0"', page)) == 8


def test_the_reason_of_an_unprovable_target_names_all_samples_and_those_that_count():
    in_a_spell = [answer(t, sent_ms=20 * i) for i, t in enumerate([20] * 490 + [30, 40] * 5)]
    judged = kept(TTFT, rows=in_a_spell)
    chapter = service_level.render(Evidence("t", service_levels=(judged,)))
    reason = chapter.blocks[1].text
    (judgement,) = judged.assessment.judgements
    promised = service_level.target_in_words(judgement)
    assert reason[1:].startswith(promised[1:])
    assert quantities_in(promised) == ["60 ms", "99 %"]
    assert judgement.num_samples == 500
    counted = f"{judgement.num_independent:,.0f}"
    assert quantities_in(reason.removeprefix(reason[: len(promised)])) == ["500", counted, "459"]


def test_no_bound_is_drawn_that_counts_clumps_as_independent_and_so_contradicts_the_verdict():
    calm = of_four_tokens(490)
    spell = [answer(30 + i % 2, sent_ms=9800 + 20 * i, gaps_ms=(20,) * 3) for i in range(10)]
    judged = kept(TTF4, rows=[*calm, *spell])
    assert judged.assessment.judgements[0].high is None
    (picture,) = pictures_of([("now", judged)])
    assert rows_by_name(picture)[BOUND] == ("—", "—", "—")


def test_a_doubt_about_a_target_names_its_promise_in_words():
    doubt = "slow ones come in clumps"
    level = level_of(doubts=(f"ttf64_p99<=100ms: {doubt}",))
    promised = service_level.target_in_words(level.assessment.judgements[0])
    told = [row[0] for row in rows_of(Evidence("t", service_levels=(level,)), "Service level")]
    assert told[-1].lower() == f"{promised}. {doubt}."


def test_a_faster_change_whose_promises_are_not_proven_says_so_and_what_would_tell():
    level = level_of("NOT PROVEN", high=None)
    (judgement,) = level.assessment.judgements
    judgements = (replace(judgement, samples_needed=1910, num_samples=1200),)
    level = replace(level, assessment=replace(level.assessment, judgements=judgements))
    evidence = everything(service_levels=(level,))
    assert UNPROVEN in outcome_of(evidence).sentence
    (longer,) = [step for step in steps_of(evidence) if UNPROVEN in step]
    assert quantities_in(longer) == ["1,910", "1,200"]
    assert UNPROVEN not in said(everything())


def test_why_a_promise_is_not_proven_stands_before_its_numbers():
    level = level_of("NOT PROVEN")
    chapter = service_level.render(Evidence("t", service_levels=(level,)))
    lead, reason, table, method = chapter.blocks[:4]
    assert lead == Text(f"? {sentence_of(level.assessment)}")
    (judgement,) = level.assessment.judgements
    assert quantities_in(reason.text) == quantities_in(service_level.target_in_words(judgement))
    assert judgement.why in reason.text.lower()
    assert table.rows[0][4] == "? Not proven"
    assert method.text == service_level.METHOD


def test_the_bound_of_a_missed_target_is_the_best_value_that_is_left_and_is_called_so():
    level = level_of("MISSED", high=120e6)
    promised = service_level.target_in_words(level.assessment.judgements[0])
    evidence = Evidence("t", service_levels=(level,))
    assert rows_of(evidence, promised) == [
        ("now", "90.0 ms", "85.0 ms", "✗ Missed, proven", "1,200")
    ]
    assert service_level.METHOD in paragraphs_of(evidence, "muted")


def test_a_first_token_that_comes_later_than_before_is_said():
    soon, late = (kept(TTF4, rows=[answer(ttft) for _ in range(9)]) for ttft in (10, 12))
    told = later_in_words([("before", soon), ("after", late)])
    assert quantities_in(told) == ["12.0 ms", "10.0 ms"]
    found = paragraphs_of(Evidence("t", service_levels=(soon, late)), "warning")
    assert any(told in text for text in found)
    assert later_in_words([("before", late), ("after", soon)]) == ""
    assert later_in_words([("before", soon), ("after", soon)]) == ""
