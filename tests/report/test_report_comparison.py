"""What a reader is shown of a comparison."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from kprof.analyze.verdict.per_token import per_token
from kprof.comparison import FILE, Claim, Comparison, Interval, Metric, Pair, Plan, load, save
from kprof.errors import KprofError
from kprof.findings import Caveat
from kprof.report.comparison_sections import (
    conditions_of,
    format_interval,
    format_percent,
    headline,
    sections_of_comparison,
)
from kprof.report.html import render_page
from kprof.report.section import Figure, Table, Text
from kprof.report.terminal import print_summary
from tests.quantities import quantities_in
from tests.section_traces import fact

STEP = Metric("step time", "ns")
ENERGY = Metric("energy per step", "J")
SAID = (Text("Calibrated."),)
HOSTILE = "</script><script>document.title='owned'</script>"


def comparison_of(verdict="FASTER", ratio=0.9, metrics=(STEP,), **changes):
    """Return a comparison of three pairs, one of them left out."""
    interval = Interval(ratio, ratio - 0.01, ratio + 0.01, 0.95, "fixed")
    values = tuple(2e6 if metric.unit == "ns" else 30.0 for metric in metrics)
    pairs = (
        Pair(values, tuple(v * ratio for v in values), True, 1_700_000_000_000_000_000),
        Pair(values, tuple(v * ratio for v in values), False, 2, (1500.0, 1480.0)),
        Pair(values, tuple(v * 9 for v in values), False, 3, (None, None), "another process"),
    )
    claims = tuple(Claim(metric, verdict, 2, interval, 0.01, why="Why.") for metric in metrics)
    plan = Plan(metrics, max_pairs=40, seed=0)
    fields = {"name": "train.py", "a": "as it is", "b": "--env FAST=1", "plan": plan}
    fields |= {"pairs": pairs, "claims": claims, "protocol": "In one process."}
    return Comparison(**(fields | changes))


def terminal(comparison, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(comparison.name, sections_of_comparison(comparison, SAID), console)
    return console.export_text()


def tables(comparison):
    sections = sections_of_comparison(comparison, SAID)
    return [part for section in sections for part in section.parts if isinstance(part, Table)]


def test_the_verdict_stands_first_with_the_change_and_its_interval():
    text = terminal(comparison_of())
    assert text.index("FASTER") < text.index("-10.0 %") < text.index("-11.0 % to -9.00 %")


def test_a_change_that_is_not_proven_is_said_to_be_chance_perhaps():
    unclear, proven = (headline(comparison_of(v).headline) for v in ("INCONCLUSIVE", "FASTER"))
    assert quantities_in(unclear) == quantities_in(proven) == ["10.0 %"]
    assert "chance" in unclear and "chance" not in proven
    assert sections_of_comparison(comparison_of("INCONCLUSIVE"))[0].parts[0].tone == "plain"


@pytest.mark.parametrize("width", [80, 200])
def test_both_variants_are_named_with_their_medians(width):
    text = terminal(comparison_of(), width)
    assert "2 ms" in text
    assert "1.8 ms" in text
    assert "--env FAST=1" in text


def test_a_verdict_without_an_interval_shows_none():
    claim = Claim(STEP, "INVALID", 2, why="They differ.")
    text = terminal(comparison_of(claims=(claim,)))
    assert claim.why in text
    assert "Interval" not in text


def test_pairs_that_were_left_out_are_counted_and_shown_with_their_reason():
    assert quantities_in(pairs_of(comparison_of())) == ["40", "1"]
    (pairs,) = [table for table in tables(comparison_of()) if table.columns[0].header == "Pair"]
    assert [row[-1] for row in pairs.rows] == ["", "", "another process"]
    assert pairs.rows[1][5:7] == ("1,500", "1,480")


def test_how_many_more_pairs_it_takes_is_said():
    claim = Claim(STEP, "INCONCLUSIVE", 2, Interval(1, 0.9, 1.1, 0.95, "fixed"), pairs_needed=70)
    assert quantities_in(pairs_of(comparison_of(claims=(claim,)))) == ["40", "1", "70"]


def pairs_of(comparison):
    """Return what stands beside the number of pairs."""
    return fact(sections_of_comparison(comparison)[0], "Pairs")[1]


def test_doubts_of_a_comparison_that_an_older_version_saved_keep_their_texts(tmp_path):
    save(comparison_of(), tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "doubts": ["Not settled."]}))
    assert load(tmp_path).doubts == (Caveat("saved", "Not settled."),)


def test_doubts_of_a_comparison_read_back_with_their_ids(tmp_path):
    doubts = (Caveat("not_settled", "Not settled."),)
    save(comparison_of(doubts=doubts), tmp_path)
    assert load(tmp_path).doubts == doubts


def test_doubts_and_the_instruments_own_error_stand_beside_the_verdict():
    comparison = comparison_of(doubts=(Caveat("not_settled", "Not settled."),))
    verdict = sections_of_comparison(comparison, SAID)[0]
    assert verdict.parts[-2:] == (Text("Not settled.", "warning"), *SAID)


def test_every_metric_has_its_claim():
    (claims,) = [
        table
        for table in tables(comparison_of(metrics=(STEP, ENERGY)))
        if table.columns[0].header == "Metric"
    ]
    assert [row[0] for row in claims.rows] == ["step time", "energy per step"]


def test_the_figure_has_a_dot_for_each_pair_and_marks_those_left_out():
    sections = sections_of_comparison(comparison_of())
    figure = next(p for s in sections for p in s.parts if isinstance(p, Figure))
    assert [trace["x"] for trace in figure.data] == [[1, 2], [3]]
    assert figure.data[0]["y"] == [0.9, 0.9]


def test_the_plan_can_be_checked_by_its_hash():
    comparison = comparison_of()
    cells = [cell for table in tables(comparison) for row in table.rows for cell in row]
    assert comparison.plan.digest in cells
    assert Plan((STEP,), max_pairs=41, seed=0).digest != comparison.plan.digest


def test_no_name_becomes_markup():
    comparison = comparison_of(
        name=HOSTILE, a=HOSTILE, b=HOSTILE, doubts=(Caveat("trial", HOSTILE),)
    )
    page = render_page(HOSTILE, sections_of_comparison(comparison, (Text(HOSTILE),)))
    assert HOSTILE not in page


def test_ratios_over_decades_are_marked_in_full_and_narrow_ones_as_plotly_likes():
    def axis_of(comparison):
        (pairs,) = (s for s in sections_of_comparison(comparison, SAID) if s.title == "Every pair")
        return pairs.parts[0].layout["yaxis"]

    wide = axis_of(comparison_of())
    assert dict(zip(wide["tickvals"], wide["ticktext"], strict=True))[5.0] == "5"
    assert "0.2" in wide["ticktext"]
    narrow = axis_of(comparison_of(pairs=comparison_of().pairs[:2]))
    assert "tickvals" not in narrow


def test_a_comparison_without_pairs_has_a_report():
    claim = Claim(STEP, "INVALID", 0, why="No pairs.")
    parts = [
        p for s in sections_of_comparison(comparison_of(pairs=(), claims=(claim,))) for p in s.parts
    ]
    assert not any(isinstance(part, Figure) for part in parts)
    assert any(isinstance(part, Text) and "No pairs." in part.text for part in parts)


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.9, "-10.0 %"), (1.0, "+0.00 %"), (1.0123, "+1.23 %"), (3.0, "+200.0 %")]
)
def test_a_ratio_is_shown_as_a_change_in_percent(ratio, text):
    assert format_percent(ratio) == text


def test_an_interval_is_told_as_changes():
    interval = Interval(0.98, 0.97, 0.99, 0.975, "fixed")
    assert format_interval(interval) == "-3.00 % to -1.00 %"


def test_a_saved_comparison_is_read_as_it_was(tmp_path):
    comparison = comparison_of()
    save(comparison, tmp_path)
    assert load(tmp_path) == comparison


def test_a_damaged_comparison_is_one_clear_error(tmp_path):
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(KprofError, match=str(tmp_path)):
        load(tmp_path)


def test_a_table_of_pairs_has_no_column_of_which_nothing_is_known():
    whole = comparison_of()
    without_gpu = [replace(pair, clocks_mhz=(None, None), problem="") for pair in whole.pairs]
    (pairs,) = [
        table
        for table in tables(comparison_of(pairs=tuple(without_gpu)))
        if table.columns[0].header == "Pair"
    ]
    assert [column.header for column in pairs.columns] == ["Pair", "First", "A", "B", "Change"]
    assert pairs.rows[0] == ("1", "A", "2 ms", "1.8 ms", "-10.0 %")


def test_the_confidence_of_the_interval_stands_beside_it():
    fixed = comparison_of()
    interval = replace(fixed.headline.interval, level=0.99, kind="sequence")
    sequence = comparison_of(claims=(replace(fixed.headline, interval=interval),))
    found = [fact(sections_of_comparison(one)[0], "Interval")[1] for one in (fixed, sequence)]
    assert [quantities_in(text) for text in found] == [["95 %"], ["99 %"]]
    assert found[0].removeprefix("95 %") != found[1].removeprefix("99 %")


def figures(comparison):
    sections = sections_of_comparison(comparison)
    return [part for section in sections for part in section.parts if isinstance(part, Figure)]


def test_the_samples_of_both_are_drawn_and_the_clocks_of_pairs_that_have_both():
    _, samples, clocks = figures(comparison_of())
    assert [trace["y"] for trace in samples.data] == [[2.0, 2.0, 2.0], [1.8, 1.8, 18.0]]
    assert [(trace["x"], trace["y"]) for trace in clocks.data] == [([2], [1500.0]), ([2], [1480.0])]


def test_without_a_sensor_no_clock_is_drawn_and_it_is_said():
    blind = [replace(pair, clocks_mhz=(None, None)) for pair in comparison_of().pairs]
    comparison = comparison_of(pairs=tuple(blind))
    assert len(figures(comparison)) == 2
    assert quantities_in(conditions_of(comparison.pairs)) == ["1"]  # the pair left out
    assert "MHz" in conditions_of(comparison_of().pairs)


def test_what_left_pairs_out_is_counted_beside_the_clocks():
    found = conditions_of(comparison_of().pairs)
    assert quantities_in(found) == ["1,480", "1,500 MHz", "1"]
    assert comparison_of().pairs[2].problem in found


def test_a_dot_tells_when_it_was_taken_and_what_came_first():
    text = figures(comparison_of())[0].data[1]["text"]
    assert quantities_in(text[0])[:2] == ["2 ms", "18 ms"]
    assert "B first" in text[0]
    assert text[0].endswith(comparison_of().pairs[2].problem)


def test_a_value_that_is_none_leaves_the_rest_of_its_row_and_of_the_page():
    whole = comparison_of()
    spoilt = replace(whole.pairs[0], b=(math.nan,))
    claim = Claim(STEP, "INVALID", 2, why="1 of 4 values are no finite number.")
    comparison = comparison_of(pairs=(spoilt, *whole.pairs[1:]), claims=(claim,))
    (pairs,) = [table for table in tables(comparison) if table.columns[0].header == "Pair"]
    assert pairs.rows[0][:5] == ("1", "A", "2 ms", "—", "—")
    assert figures(comparison)[0].data[0]["x"] == [2]
    assert "1.8 ms" in terminal(comparison)


def test_of_a_step_whose_tokens_are_known_a_token_has_its_energy_and_its_interval():
    comparison = comparison_of(metrics=(STEP, ENERGY), tokens_per_step=1000.0)
    (claims,) = [table for table in tables(comparison) if table.columns[0].header == "Metric"]
    rows = {row[0]: row[1:] for row in claims.rows}
    assert rows["energy per token"][:4] == ("30 mJ → 27 mJ", "-10.0 %", "-11.0 %", "-9.00 %")
    assert rows["throughput"][0] == "500 ktok/s → 556 ktok/s"
    assert rows["throughput"][1:4] == ("+11.1 %", "+9.89 %", "+12.4 %")


def test_without_its_tokens_nothing_is_said_of_a_token():
    assert per_token(comparison_of(metrics=(STEP, ENERGY))) == ()


def test_no_value_of_a_token_comes_of_one_that_is_none():
    whole = comparison_of(metrics=(STEP, ENERGY), tokens_per_step=1000.0)
    spoilt = replace(whole.pairs[0], b=(1.8e6, math.nan))
    found = per_token(replace(whole, pairs=(spoilt, *whole.pairs[1:])))
    assert [one.claim.metric.name for one in found] == ["throughput"]


def test_a_value_that_was_none_is_none_again_when_it_is_read(tmp_path):
    whole = comparison_of()
    spoilt = replace(whole, pairs=(replace(whole.pairs[0], b=(math.nan,)), *whole.pairs[1:]))
    save(spoilt, tmp_path)
    found = load(tmp_path)
    assert math.isnan(found.pairs[0].b[0])
    assert found.pairs[0].a == whole.pairs[0].a
    assert found.pairs[1:] == whole.pairs[1:]


def test_what_stands_beside_a_comparison_is_kept_with_it(tmp_path):
    comparison = comparison_of()
    save(comparison, tmp_path, {"calibration": "Calibrated.", "costs": None})
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert (content["calibration"], content["costs"], content["schema"]) == ("Calibrated.", None, 1)
    assert load(tmp_path) == comparison


def test_a_comparison_of_a_newer_kprof_is_refused(tmp_path):
    save(comparison_of(), tmp_path, {"schema": 2})
    with pytest.raises(KprofError) as error:
        load(tmp_path)
    assert quantities_in(error.value.problem)[-2:] == ["2", "1"]
