"""What an engagement tells: people in Markdown and a page, machines in JSON and JUnit."""

import json
from dataclasses import asdict
from xml.etree import ElementTree

import msgspec
import pytest

from kprof.ab import engagement_folder
from kprof.ab.engagement_folder import read_engagement
from kprof.ab.pricing import calculate, json_of
from kprof.analyze.engagement import CostAdded, ServiceLevelAdded
from kprof.analyze.kernel_times import Benched
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.target_verdict import Judgement
from kprof.analyze.sla.targets import parse_target
from kprof.commands.engage import evidence_of, write_report
from kprof.commands.report import read_evidence
from kprof.errors import KprofError
from kprof.kernels.correctness.levels import LEVELS, GateReport, Level
from kprof.report.junit import Case, render_junit
from kprof.report.markdown import render_markdown
from kprof.report.section import Column, Facts, Figure, Section, Table, Text
from kprof.report.sla_verdict import Judged, result_of_sla
from tests.cost_answers import TODAY
from tests.engagements import comparison_of, finding, write_comparison, write_run
from tests.quantities import quantities_in
from tests.report.partner_pages import cells_in

HOSTILE = "</script>|`*_[x](y)<b>\x00\u202e"


@pytest.fixture
def folder(tmp_path):
    engagement_folder.init(tmp_path / "engagement", "Tiny")
    return tmp_path / "engagement"


def written(path, content):
    path.write_bytes(msgspec.json.encode(content))
    return path


def level_of(verdict, time_ns):
    """Return what kprof sla would print of one target."""
    found = Judgement(parse_target("ttft_p95<=200ms"), verdict, "why", time_ns, 1.0, 2.0, 900, 900)
    return result_of_sla(Judged("results.json", Assessment((found,))))


def price_of(price):
    return calculate({"gpu": "H100", "price": price, "tokens_per_s": "1000"}, TODAY)


def gate_of(state):
    asked = ("L0", "L1")
    levels = tuple(Level(name, state if name in asked else "not run", "") for name in LEVELS)
    return asdict(GateReport("softmax by kprof", levels, asked))


def rows_of(folder, title):
    """Return the rows of the Markdown's section of this title, without its head."""
    write_report(read_engagement(folder))
    text = (folder / "report.md").read_text().partition(f"## {title}")[2].partition("## ")[0]
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_a_page_for_a_pull_request_begins_with_its_name_and_cuts_names_of_kernels(folder, tmp_path):
    kernel = f"kernel:void at::native::{'deep::' * 50}last at its roofline"
    engagement_folder.add(folder, [write_run(tmp_path / "run.kprof")])
    engagement_folder.predict(folder, kernel, (0.01, 0.02))
    (row,) = [one for one in rows_of(folder, "Predictions") if "at its roofline" in one]
    assert row.startswith("| kernel:void at::native::deep") and len(row) < 200
    assert (folder / "report.md").read_text().startswith("# Engagement: Tiny\n")


def test_money_has_the_digits_that_its_band_allows_and_no_tokens_where_none_are_named(
    folder, tmp_path
):
    asked = {"gpu": "H100", "price": "2,3,4", "step_s": "0.05", "gpus": "1", "speedup": "1.5"}
    (tmp_path / "cost.json").write_bytes(json_of(calculate(asked, TODAY)))
    engagement_folder.add(folder, [tmp_path / "cost.json"], "after")
    rows = rows_of(folder, "Before and after")
    steps, *others = rows
    name, before, after = (cell.strip() for cell in steps.strip("|").split(" | "))
    assert (name.endswith("\\$"), before) == (True, "—")
    assert quantities_in(after) == ["0.042", "0.028", "0.056"]
    assert any("cheaper" in row for row in others)
    assert not [row for row in rows if "token" in row]


def test_before_and_after_stand_side_by_side(folder, tmp_path):
    before = written(tmp_path / "before.json", level_of("MISSED", 3e8))
    after = written(tmp_path / "after.json", level_of("MET", 1e8))
    engagement_folder.add(folder, [before])
    engagement_folder.add(folder, [after], "after")
    (row,) = rows_of(folder, "Before and after")
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells == ["ttft\\_p95\\<=200ms", "missed, 300 ms", "met, 100 ms"]


def test_what_was_measured_on_one_side_only_is_missing_on_the_other(folder, tmp_path):
    (tmp_path / "cost.json").write_bytes(json_of(price_of("3")))
    engagement_folder.add(folder, [tmp_path / "cost.json"], "after")
    (line,) = [one for one in rows_of(folder, "Before and after") if "as paid, \\$/M" in one]
    assert line.split(" | ")[1] == "—"
    assert "0.8333" in line


def test_what_ab_says_of_targets_and_costs_is_added_with_it(folder, tmp_path):
    told = msgspec.to_builtins(comparison_of())
    told["targets"] = {"A": level_of("MISSED", 3e8), "B": level_of("MET", 1e8)}
    told["costs"] = json.loads(json_of(price_of("3")))
    engagement_folder.add(folder, [written(tmp_path / "ab.json", told)])
    found = read_engagement(folder)
    assert [one.when for _, one in found.of(ServiceLevelAdded)] == ["before", "after"]
    assert [one.when for _, one in found.of(CostAdded)] == ["after"]


def test_a_cost_from_which_nothing_follows_is_refused(folder, tmp_path):
    content = json.loads(json_of(price_of("3"))) | {"figures": []}
    with pytest.raises(KprofError, match=r"cost\.json"):
        engagement_folder.add(folder, [written(tmp_path / "cost.json", content)])


def test_kernels_stand_beside_their_peers_and_who_did_not_run_is_no_peer(folder, tmp_path):
    times = {"kprof": 2_000.0, "liger": 3_000.0, "eager": 8_000.0}
    measured = [
        {"provider": name, "shape": [8192, 4096], "gpu_ns": time, "share_of_copy": 0.9}
        for name, time in times.items()
    ]
    measured.append({"provider": "quack", "shape": [8192, 4096], "gpu_ns": 1.0, "problem": "wrong"})
    choice = {"kernel": "rmsnorm", "dtype": "bfloat16", "bucket": [8192, 4096], "gpu": "H200"}
    choice |= {"direction": "forward", "provider": "kprof", "date": "2026-11-20", "versions": {}}
    path = written(tmp_path / "bench.json", [{**choice, "measured": measured}])
    engagement_folder.add(folder, [path])
    (row,) = rows_of(folder, "Compared with other libraries")
    what, ours, other, which, ratio = (cell.strip() for cell in row.strip("|").split(" | "))
    assert what == "rmsnorm forward, 8192x4096 bfloat16"
    assert (ours, other, which, quantities_in(ratio)) == ("2 µs", "3 µs", "liger", ["1.50"])
    page = cells_in((folder / "report.html").read_text())
    (shown,) = [cells for cells in page if cells[:1] == (what,)]
    assert (shown[3], quantities_in(shown[4])) == ("liger", ["1.50"])
    assert read_evidence([path]).benches == evidence_of(read_engagement(folder))[0].benches


def test_a_kernel_without_a_peer_has_no_ratio():
    alone = Benched("rope", "bfloat16", "forward", "kprof", "H200", "2026-11-20", ())
    assert alone.ratio is None
    assert alone.ours is None


def test_the_page_is_made_of_the_entries_and_of_the_runs_beside_them(folder, tmp_path):
    engagement_folder.add(folder, [write_run(tmp_path / "run.kprof", finding(swap="rmsnorm"))])
    engagement_folder.add(folder, [write_comparison(tmp_path / "old.kprof", 0.99)], tests="nothing")
    engagement_folder.add(folder, [write_comparison(tmp_path / "new.kprof", 0.87)])
    for name, when in (("MISSED", "after"), ("MET", "before")):
        engagement_folder.add(
            folder, [written(tmp_path / f"{name}.json", level_of(name, 3e8))], when
        )
    engagement_folder.add(folder, [written(tmp_path / "gate.json", [gate_of("passed")])])
    engagement_folder.decide(folder, "Adopt it.")
    evidence, missing = evidence_of(read_engagement(folder))
    assert missing == ()
    assert len(evidence.runs) == 1
    assert evidence.headline.headline.interval.ratio == 0.87
    verdicts = [one.assessment.judgements[0].verdict for one in evidence.service_levels]
    assert verdicts == ["MET", "MISSED"]
    assert evidence.gates[0].passed
    assert [one.text for one in evidence.decisions] == ["Adopt it."]
    (scored,) = evidence.predictions
    assert (scored.finding, scored.low, scored.high) == ("unfused_norm", 0.1, 0.2)
    assert scored.measured.ratio == 0.87
    assert evidence.sources[-1].name == "gate.json"


def test_a_run_that_was_changed_or_is_gone_is_named_and_not_shown(folder, tmp_path):
    run = write_run(tmp_path / "run.kprof", finding())
    engagement_folder.add(folder, [run])
    (run / "findings.json").write_text((run / "findings.json").read_text() + " ")
    evidence, missing = evidence_of(read_engagement(folder))
    assert evidence.runs == ()
    assert missing == ("run.kprof",)


def test_the_same_entries_give_the_same_bytes(folder, tmp_path):
    engagement_folder.add(folder, [write_run(tmp_path / "run.kprof", finding(swap="rmsnorm"))])
    engagement_folder.add(folder, [write_comparison(tmp_path / "ab.kprof")])
    names = [f"report.{form}" for form in ("html", "json", "md", "xml")]
    write_report(read_engagement(folder))
    first = [(folder / name).read_bytes() for name in names]
    write_report(read_engagement(folder))
    assert [(folder / name).read_bytes() for name in names] == first


def test_reports_elsewhere_replace_nothing_unless_told_to(folder, tmp_path):
    (tmp_path / "x.md").write_text("mine")
    with pytest.raises(KprofError, match=r"x\.md") as error:
        write_report(read_engagement(folder), tmp_path / "x.html")
    assert "--force" in error.value.fix
    assert (tmp_path / "x.md").read_text() == "mine"
    write_report(read_engagement(folder), tmp_path / "x.html", force=True)
    assert "Tiny" in (tmp_path / "x.md").read_text()


def test_the_json_has_a_schema_every_entry_and_every_score(folder, tmp_path):
    engagement_folder.add(folder, [write_run(tmp_path / "run.kprof", finding(swap="rmsnorm"))])
    engagement_folder.add(folder, [write_comparison(tmp_path / "ab.kprof", 0.87)])
    write_report(read_engagement(folder))
    told = json.loads((folder / "report.json").read_text())
    assert told["schema"] == 1
    assert [one["content"]["kind"] for one in told["entries"]] == ["opened", "run", "comparison"]
    assert told["predictions"]["num_scored"] == 1
    assert told["predictions"]["mean_absolute_error"] == pytest.approx(0.02)


def test_junit_fails_proven_regressions_and_skips_inconclusive_rulings(folder, tmp_path):
    for verdict, ratio, width in (
        ("SLOWER", 1.05, 0.01),
        ("SLOWER", 1.015, 0.01),
        ("INCONCLUSIVE", 1.0, 0.1),
        ("FASTER", 0.9, 0.01),
    ):
        path = tmp_path / f"{verdict}{ratio}.kprof"
        engagement_folder.add(folder, [write_comparison(path, ratio, width, verdict)])
    engagement_folder.add(folder, [written(tmp_path / "before.json", level_of("MISSED", 3e8))])
    engagement_folder.add(
        folder, [written(tmp_path / "after.json", level_of("MISSED", 4e8))], "after"
    )
    engagement_folder.add(folder, [written(tmp_path / "gate.json", [gate_of("undecided")])])
    write_report(read_engagement(folder))
    suite = ElementTree.parse(folder / "report.xml").getroot()[0]
    outcomes = [case[0].tag if len(case) else "passed" for case in suite]
    assert outcomes == [
        *("failure", "skipped", "skipped", "passed"),
        *("failure", "skipped", "skipped"),
    ]


def test_markdown_shows_names_as_they_are():
    table = Table((Column("a", "right"), Column("b")), (("1", HOSTILE),), "Caption.")
    parts = (Text("2 < 3\nwarned", "warning"), Facts((("x", "y", "z"),)), table, Figure([], {}))
    text = render_markdown(HOSTILE, [Section("One", 0, parts)])
    assert "<b>" not in text.replace("\\<", "")
    assert "⚠ 2 \\< 3 warned" in text
    assert "| --: | --- |" in text
    row = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    assert row.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize("number", [26, 27])
def test_markdown_says_how_many_rows_it_leaves_out(number):
    rows = tuple((str(i),) for i in range(number))
    text = render_markdown("T", [Section("One", 0, (Table((Column("a"),), rows),))])
    *_, last = text.strip().splitlines()
    assert quantities_in(last) == [str(number - 25)]
    assert "| 24 |" in text
    assert "| 25 |" not in text


def test_markdown_leaves_out_what_a_summary_leaves_out():
    assert "Hidden" not in render_markdown("T", [Section("Hidden", 0, (), in_terminal=False)])


def test_junit_holds_names_that_xml_cannot():
    told = render_junit(HOSTILE, [Case(HOSTILE, HOSTILE, "failed", HOSTILE)])
    root = ElementTree.fromstring(told)
    assert root[0][0].get("name") == HOSTILE.replace("\x00", "\ufffd").replace("\u202e", "\ufffd")
    assert root[0].get("failures") == "1"
