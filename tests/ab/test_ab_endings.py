"""Comparisons that end before their plan: by themselves, by hand, by a crash."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kprof.ab import in_process
from kprof.collect.trials import TrialError, TrialInterrupted
from tests.ab.ab_runs import script_in, stand_in, trial_of, window_of
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in


@pytest.fixture
def script(tmp_path, monkeypatch):
    return script_in(tmp_path, monkeypatch)


def test_a_workload_that_ends_by_itself_is_judged_by_all_its_pairs(script, monkeypatch, capsys):
    stand_in(monkeypatch, num_windows=15)
    kprof("ab", "--patch", "patch.py:f", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 7
    assert result["claims"][0]["interval"]["kind"] == "fixed"
    assert [quantities_in(doubt["text"]) for doubt in result["doubts"]] == [["7", "160"]]


def test_ctrl_c_gives_the_verdict_of_what_was_taken(script, monkeypatch, capsys):
    letters = []

    def interrupted(variant, schedule, folder, *, is_enough):
        letters.extend(schedule.letters[:17])
        windows = [window_of(arm, 1000 + 100 * (arm == "B"), i) for i, arm in enumerate(letters)]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(in_process, "run_trial", interrupted)
    assert kprof("ab", "--patch", "patch.py:f", "--json", script) in (1, 3)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 8
    assert ["8", "160", "11"] in [quantities_in(doubt["text"]) for doubt in result["doubts"]]


def test_a_stop_by_hand_is_never_judged_as_if_the_plan_were_complete(script, monkeypatch, capsys):
    def interrupted(variant, schedule, folder, *, is_enough):
        windows = [window_of(arm, 10_000 + i % 7, i) for i, arm in enumerate(schedule.letters[:20])]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(in_process, "run_trial", interrupted)
    kprof("ab", "--patch", "patch.py:f", "--json", script)
    interval = json.loads(capsys.readouterr().out)["claims"][0]["interval"]
    assert interval is None or interval["kind"] == "sequence"


def test_ctrl_c_between_processes_gives_the_verdict_of_the_pairs_before(
    script, monkeypatch, capsys
):
    stop = TrialInterrupted(trial_of("A", []))
    stand_in(monkeypatch, b=2.0, fail=(2 + 2 * 7, stop))
    assert kprof("ab", "--env", "K=V", "--json", script) in (1, 3)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 7
    assert ["7", "40", "9"] in [quantities_in(doubt["text"]) for doubt in result["doubts"]]


def test_a_crash_in_the_fifth_pair_leaves_the_four_before(script, monkeypatch, capsys):
    crash = TrialError("B: the workload ended", fix="see", trial=trial_of("B", []))
    stand_in(monkeypatch, fail=(2 + 2 * 4, crash))
    assert kprof("ab", "--env", "K=V", script) == 2
    kept = Path(script).with_name("train-ab.kprof") / "pairs.json"
    assert len(json.loads(kept.read_bytes())["pairs"]) == 4
    error = capsys.readouterr().err
    assert str(kept) in error
    assert crash.problem in error


def test_a_script_without_steps_has_nothing_to_switch_between(script, monkeypatch, capsys):
    def without_steps(variant, schedule, folder, *, is_enough):
        return replace(trial_of("A", []), rule="")

    monkeypatch.setattr(in_process, "run_trial", without_steps)
    assert kprof("ab", "--patch", "patch.py:f", script, "600") == 2
    error = capsys.readouterr().err
    assert f"kprof: {script} " in error
    assert 'kprof.range("step")' in error


def test_a_script_of_too_few_steps_is_named_and_not_its_last_argument(script, monkeypatch, capsys):
    stand_in(monkeypatch, num_windows=1)
    assert kprof("ab", "--patch", "patch.py:f", script, "600") == 2
    assert f"kprof: {script} " in capsys.readouterr().err


def patch_broken(monkeypatch, *windows, printed=""):
    """Let the patch be one that cannot be entered, after these windows and this output."""

    def stopped(variant, schedule, folder, *, is_enough):
        log = folder / "output.log"
        log.write_text(printed)
        trial = replace(trial_of("A", windows), log=log)
        raise TrialError("The patch cannot be entered.", fix="mend the patch", trial=trial)

    monkeypatch.setattr(in_process, "run_trial", stopped)


def test_a_broken_patch_leaves_nothing_behind_where_nothing_was_timed_or_printed(
    script, monkeypatch
):
    patch_broken(monkeypatch)
    assert kprof("ab", "--patch", "patch.py:f", script) == 2
    assert not list(Path(script).parent.glob("*.kprof"))


@pytest.mark.parametrize(
    ("windows", "printed"), [([window_of("A", 1000, 0)], ""), ([], "step 1\n")]
)
def test_where_something_was_timed_or_printed_it_is_kept_and_named(
    script, monkeypatch, capsys, windows, printed
):
    patch_broken(monkeypatch, *windows, printed=printed)
    assert kprof("ab", "--patch", "patch.py:f", script) == 2
    folder = Path(script).with_name("train-ab.kprof")
    assert f"{folder}\n" in capsys.readouterr().err
    assert (folder / "raw" / "output.log").read_text() == printed


def test_a_stop_before_the_first_pair_says_where_the_output_is(script, monkeypatch, capsys):
    def stopped(variant, schedule, folder, *, is_enough):
        raise TrialInterrupted(trial_of("A", []))

    monkeypatch.setattr(in_process, "run_trial", stopped)
    assert kprof("ab", "--patch", "patch.py:f", script) == 130
    raw = Path(script).with_name("train-ab.kprof") / "raw"
    assert str(raw) in capsys.readouterr().err


def test_what_is_stopped_after_enough_pairs_has_its_verdict_also_where_all_were_wanted(
    script, monkeypatch, capsys
):
    def interrupted(variant, schedule, folder, *, is_enough):
        windows = [
            window_of(arm, 1_000_000 + 100_000 * (arm == "B") + 1_000 * (i % 3), i)
            for i, arm in enumerate(schedule.letters[:40])
        ]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(in_process, "run_trial", interrupted)
    assert kprof("ab", "--patch", "patch.py:f", "--fixed", "--json", script) == 1
    result = json.loads(capsys.readouterr().out)
    assert [quantities_in(doubt["text"]) for doubt in result["doubts"]] == [["20", "40"]]
