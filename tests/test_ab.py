"""`kprof ab`, from its options to its report: what is refused, what is kept, what is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kprof import alternate, flip
from kprof.collect.trials import Trial, TrialError, TrialInterrupted, Variant, Window
from tests.test_cli import kprof


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Work in an empty folder with a script and a patch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patch.py").touch()
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def window_of(arm, time_ns, number):
    return Window(arm, 10, number, number + 1, float(time_ns), (int(time_ns),) * 10, first_step=0)


def trial_of(label, windows):
    return Trial(
        label,
        tuple(windows),
        10**9,
        None,
        "a step",
        None,
        Path("output.log"),
        None,
        "no GPU took part",
    )


class Workload:
    """Stands in for processes: windows of A take 1 ms, of B as much as was said."""

    def __init__(self, b=1.0, num_windows=10_000, fail=None):
        self.b, self.num_windows, self.fail, self.started = b, num_windows, fail, []

    def __call__(self, variant, schedule, folder, *, is_enough):
        folder.mkdir(parents=True, exist_ok=True)
        self.started.append(variant)
        if self.fail and len(self.started) > self.fail[0]:
            raise self.fail[1]
        windows = []
        for number, arm in enumerate(schedule.letters[: self.num_windows]):
            noise = 1 + 0.003 * ((number * 7919) % 13 - 6) / 6
            windows.append(
                window_of(arm, round(1e6 * noise * (self.b if arm == "B" else 1)), number)
            )
            if is_enough(windows):
                break
        return trial_of(variant.label, windows)


def stand_in(monkeypatch, *rest, **more):
    workload = Workload(*rest, **more)
    monkeypatch.setattr(flip, "run_trial", workload)
    monkeypatch.setattr(alternate, "run_trial", workload)
    return workload


def test_a_clear_difference_takes_a_dozen_of_160_pairs(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    assert kprof("ab", "--patch", "patch.py:f", "--json", script) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["claims"][0]["verdict"] == "FASTER"
    assert (result["plan"]["max_pairs"], len(result["pairs"])) == (160, 11)
    assert result["doubts"] == []


def test_a_workload_that_ends_by_itself_is_judged_by_all_its_pairs(script, monkeypatch, capsys):
    stand_in(monkeypatch, num_windows=15)
    kprof("ab", "--patch", "patch.py:f", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 7
    assert result["claims"][0]["interval"]["kind"] == "fixed"
    assert result["doubts"] == ["The workload ended after 7 of 160 pairs."]


def test_ctrl_c_gives_the_verdict_of_what_was_taken(script, monkeypatch, capsys):
    letters = []

    def interrupted(variant, schedule, folder, *, is_enough):
        letters.extend(schedule.letters[:17])
        windows = [window_of(arm, 1000 + 100 * (arm == "B"), i) for i, arm in enumerate(letters)]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(flip, "run_trial", interrupted)
    assert kprof("ab", "--patch", "patch.py:f", "--json", script) in (1, 3)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) == 8
    assert "It was stopped by hand after 8 of 160 pairs." in result["doubts"]


def test_a_stop_by_hand_is_never_judged_as_if_the_plan_were_complete(script, monkeypatch, capsys):
    def interrupted(variant, schedule, folder, *, is_enough):
        windows = [window_of(arm, 10_000 + i % 7, i) for i, arm in enumerate(schedule.letters[:20])]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(flip, "run_trial", interrupted)
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
    assert "It was stopped by hand after 7 of 40 pairs." in result["doubts"]


def test_a_crash_in_the_fifth_pair_leaves_the_four_before(script, monkeypatch, capsys):
    crash = TrialError("B: the workload ended", fix="see", trial=trial_of("B", []))
    stand_in(monkeypatch, fail=(2 + 2 * 4, crash))
    assert kprof("ab", "--env", "K=V", script) == 2
    kept = Path(script).with_name("train-ab.kprof") / "pairs.json"
    assert len(json.loads(kept.read_bytes())["pairs"]) == 4
    error = capsys.readouterr().err
    assert f"the pairs taken before are kept in {kept}" in error
    assert "B: the workload ended" in error


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpu", "nosuch"), "no price is known for the GPU 'nosuch'"),
        (("--price", "cheap", "--gpu", "H200"), "cheap"),
        (("--target", "ttft_p99<=10ms"), "kprof ab times steps, and no requests"),
        (("--target", "step_p99<="), "is no target"),
        (("--swap", "nosuch"), "there is no kernel nosuch"),
        (("--env", "X"), "--env X sets nothing"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    script, monkeypatch, capsys, words, problem
):
    workload = stand_in(monkeypatch)
    assert kprof("ab", *words, script) == 2
    assert problem in capsys.readouterr().err
    assert workload.started == []


def test_how_b_differs_stands_in_the_command_that_repeats_it(script, monkeypatch, capsys):
    stand_in(monkeypatch)
    kprof("ab", "--env", "MODE=max autotune", "--pairs", "6", "--json", script)
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["command of B"].startswith("MODE='max autotune' ")
    assert facts["command of B"].endswith(facts["command of A"])
    b = Variant("B", ("python", "a b.py"), {"K": "V"})
    assert b.line == "K=V python 'a b.py'"
    assert replace(b, environment={}).line == "python 'a b.py'"


@pytest.mark.parametrize("words", [("--patch", "patch.py:f"), ("--env", "K=V")])
def test_energy_that_cannot_be_compared_is_told(script, monkeypatch, capsys, words):
    stand_in(monkeypatch)
    kprof("ab", *words, "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert [claim["metric"]["name"] for claim in result["claims"]] == ["step time"]
    assert "Energy is not compared: no GPU took part." in result["doubts"]
