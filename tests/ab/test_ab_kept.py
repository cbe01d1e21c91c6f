"""What a comparison's folder keeps, and what reports and engagements show of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kprof.ab import calibrate, compare, processes
from kprof.ab.calibrate import Machine
from kprof.analyze.calibration.simulate import simulate
from kprof.kernels.correctness.levels import Level
from tests.ab.ab_runs import kept, script_in, stand_in, trial_of, window_of
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in


@pytest.fixture
def script(tmp_path, monkeypatch):
    return script_in(tmp_path, monkeypatch)


def test_the_folder_keeps_what_is_printed_as_json(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    words = ("--price", "2,3,4", "--tokens-per-step", "64", "--target", "step_p50<=60ms")
    kprof("ab", "--patch", "patch.py:f", *words, "--json", script)
    assert json.loads(capsys.readouterr().out) == kept(script)
    assert kept(script).keys() >= {"calibration", "costs", "targets", "per_token", "schema"}


def test_the_page_has_a_section_of_whatever_was_asked_for(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    judged = Level("L6", "passed", "")
    monkeypatch.setattr("kprof.ab.training.trained_alike", lambda *of: judged)
    swap, cost, target = ("--swap", "rmsnorm"), ("--price", "2,3,4"), ("--target", "step_p50<=60ms")
    pages = {}
    for words in (swap, (*swap, *cost), (*swap, *target), (*swap, "--losses", "32")):
        assert kprof("ab", *words, "--force", "--pairs", "40", script) == 0
        pages[words] = titles_of("train-ab.kprof/report.html")
    plain, priced, kept_target, trained = pages.values()
    assert plain
    assert [one for one in kept_target if one not in plain] == ["Targets"]
    assert [one.split(",")[0] for one in priced if one not in plain] == ["Cost"]
    (of_training,) = (one for one in trained if one not in plain)
    assert (
        kprof("ab", *swap, *cost, *target, "--losses", "32", "--force", "--pairs", "40", script)
        == 0
    )
    told = [
        one.split(",")[0] for one in titles_of("train-ab.kprof/report.html") if one not in plain
    ]
    assert told == ["Targets", of_training, "Cost"]


def titles_of(page):
    """Return the titles of the sections of a page, in order."""
    return re.findall(r"<h2[^>]*>(?:<[^>]*>)*([^<]*)", Path(page).read_text())


def test_what_was_typed_stands_in_the_facts(script, monkeypatch):
    stand_in(monkeypatch)
    kprof("ab", "--patch", "patch.py:f", "--pairs", "6", script)
    assert kept(script)["facts"]["made by"] == f"kprof ab --patch patch.py:f --pairs 6 {script}"


def test_a_report_and_an_engagement_show_what_a_comparisons_folder_holds(
    script, monkeypatch, capsys
):
    stand_in(monkeypatch, b=0.9)
    words = ("--price", "2,3,4", "--tokens-per-step", "64", "--target", "step_p50<=60ms")
    kprof("ab", "--patch", "patch.py:f", *words, script)
    assert kprof("report", "train-ab.kprof") == 0
    page = Path("report.html").read_text()
    assert "step_p50&lt;=60ms" in page
    assert "as given" in page
    assert kprof("engage", "init", "case") == 0
    assert kprof("engage", "add", "case", "train-ab.kprof") == 0
    kinds = {path.name.split("-", 1)[1].split("-train")[0] for path in Path("case").glob("0*.json")}
    assert kinds >= {"comparison", "service-level", "cost"}


def test_pairs_that_were_none_are_shown_and_kept_wherever_a_comparison_goes(
    script, monkeypatch, capsys
):
    def empty_at_last(variant, schedule, folder, *, is_enough):
        folder.mkdir(parents=True, exist_ok=True)
        windows = [window_of(arm, 1e6, i) for i, arm in enumerate(schedule.letters)]
        return trial_of(variant.label, [] if "003" in str(folder) else windows)

    monkeypatch.setattr(processes, "run_trial", empty_at_last)
    assert kprof("ab", "--env", "K=V", "--pairs", "6", "--fixed", script) == 3
    assert kept(script)["claims"][0]["verdict"] == "INVALID"
    assert kprof("report", "train-ab.kprof") == 0
    assert "no finite number" in Path("report.html").read_text()
    assert kprof("engage", "init", "case") == 0
    assert kprof("engage", "add", "case", "train-ab.kprof", "--tests", "nothing") == 0
    assert kprof("engage", "report", "case") == 0
    assert kprof("gate", "--strict", "train-ab.kprof") == 3
    (entry,) = Path("case").glob("0002-*.json")
    pairs = json.loads(entry.read_bytes())["content"]["comparison"]["pairs"]
    assert [pair["a"] == [None] for pair in pairs] == [False, False, True, False, False, False]


def test_the_calibration_of_the_machine_goes_with_the_comparison(script, monkeypatch, capsys):
    made = replace(simulate(6, 40, 0, "2026-11-20"), kind="host", device="a processor")
    coarse = tuple(replace(one, least_found=0.016) for one in made.scenarios)
    made = replace(made, scenarios=coarse)
    monkeypatch.setattr(compare, "last_calibration", lambda: made)
    monkeypatch.setattr(calibrate, "this_machine", lambda: Machine("host", "a processor", None))
    stand_in(monkeypatch, b=0.9)
    kprof("ab", "--patch", "patch.py:f", script)
    assert "Minimum detectable effect" in capsys.readouterr().out
    (doubt,) = [one for one in kept(script)["doubts"] if one["id"] == "resolution"]
    assert quantities_in(doubt["text"]) == ["40", "1.6 %", "1 %"]
    kprof("report", "train-ab.kprof")
    assert "Minimum detectable effect" in Path("report.html").read_text()
