"""`kprof ab`, from its options to its verdict: what is planned, what is refused."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kprof.ab.compare import exit_code_of
from kprof.ab.processes import facts_of, stopped, time_left
from kprof.ab.variants import AbOptions
from kprof.analyze.verdict import judge
from kprof.analyze.verdict.judge import fewest_for_verdict
from kprof.collect.trials import Variant
from kprof.comparison import Claim, Interval, Metric, Plan
from kprof.kernels.correctness.levels import Level
from tests.ab.ab_runs import Workload, script_in, stand_in, trial_of, window_of
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in


@pytest.fixture
def script(tmp_path, monkeypatch):
    return script_in(tmp_path, monkeypatch)


def test_a_clear_gain_takes_100_of_160_pairs(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    assert kprof("ab", "--patch", "patch.py:f", "--json", script) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["claims"][0]["verdict"] == "FASTER"
    assert (result["plan"]["max_pairs"], len(result["pairs"])) == (160, 100)
    assert result["doubts"] == []


def test_each_pair_is_told_once_when_it_is_whole_with_its_own_change(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    kprof("ab", "--patch", "patch.py:f", "--pairs", "6", "--fixed", "--json", script)
    printed = capsys.readouterr()
    pairs = json.loads(printed.out)["pairs"]
    changes = [f"{100 * (pair['b'][0] / pair['a'][0] - 1):+.1f} %" for pair in pairs]
    lines = [quantities_in(line) for line in printed.err.splitlines() if " of at most 6: B" in line]
    assert [line[:3] for line in lines] == [[str(n + 1), "6", c] for n, c in enumerate(changes)]
    # The windows that stand in began in 1970.
    left_h = [float(line[3].removesuffix(" h")) for line in lines[:-1]]
    assert left_h == pytest.approx(
        [time.time() / 3600 * (6 / n - 1) for n in range(1, 6)], rel=0.01
    )


def test_training_that_fails_is_a_failure_whatever_the_speed(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    states, codes = ("passed", "failed", "undecided", "not run"), []
    for state in states:
        judged = Level("L6", state, "")
        monkeypatch.setattr("kprof.ab.training.trained_alike", lambda *of, judged=judged: judged)
        words = ("--swap", "rmsnorm", "--pairs", "40", "--losses", "32", "--force", "--json")
        codes.append(kprof("ab", *words, script))
        (report,) = json.loads(capsys.readouterr().out)["gates"]
        assert (report["subject"], report["asked"]) == ("rmsnorm", ["L6"])
    assert codes == [0, 1, 0, 0]


def test_on_a_clock_too_coarse_for_its_windows_nothing_is_proven(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    monkeypatch.setattr("kprof.ab.in_process.measure_host_resolution_ns", lambda: 1e12)
    assert kprof("ab", "--patch", "patch.py:f", "--pairs", "40", "--json", script) == 3
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["verdict"], claim["interval"]) == ("INCONCLUSIVE", None)


def test_each_alternating_process_is_timed_over_five_windows(script, monkeypatch):
    workload, timed = Workload(), []

    def run_trial(*rest, **more):
        trial = workload(*rest, **more)
        timed.append(len(trial.windows))
        return trial

    monkeypatch.setattr("kprof.ab.processes.run_trial", run_trial)
    kprof("ab", "--env", "X=1", "--pairs", "6", "--fixed", script)
    # Two that are not counted, then six pairs.
    assert timed == [5] * 14


@pytest.mark.parametrize(
    ("protocol", "words"),
    [("processes", ("--env", "X=1")), ("in_process", ("--patch", "patch.py:f"))],
)
def test_the_window_of_the_fewest_steps_tells_how_fine_a_step_is_timed(
    script, monkeypatch, protocol, words
):
    workload, judged = Workload(b=0.9), []

    def run_trial(num_steps, *rest, **more):
        trial = workload(*rest, **more)
        short, *others = trial.windows
        return replace(trial, windows=(replace(short, num_steps=num_steps), *others))

    def noted(*args, **more):
        judged.append(more["resolution_ns"])
        return judge(*args, **more)

    monkeypatch.setattr(f"kprof.ab.{protocol}.measure_host_resolution_ns", lambda: 500.0)
    monkeypatch.setattr(f"kprof.ab.{protocol}.judge", noted)
    for num_steps in (10, 4):
        monkeypatch.setattr(f"kprof.ab.{protocol}.run_trial", partial(run_trial, num_steps))
        kprof("ab", *words, "--pairs", "6", "--json", "--force", script)
    assert judged == [50.0, 125.0]


def processes_of(change, monkeypatch):
    """Let processes be stood in for, each with its windows as `change` returns them."""
    workload = Workload(b=0.9)

    def run_trial(variant, *rest, **more):
        trial = workload(variant, *rest, **more)
        return replace(trial, windows=tuple(change(variant.label, list(trial.windows))))

    monkeypatch.setattr("kprof.ab.processes.run_trial", run_trial)


def test_a_pair_without_one_good_window_of_b_says_its_first_problem(script, monkeypatch, capsys):
    def change(label, windows):
        problems = ["", "", "", "", ""] if label == "A" else ["hot", "slow", "hot", "hot", "hot"]
        return [replace(w, problem=said) for w, said in zip(windows, problems, strict=True)]

    processes_of(change, monkeypatch)
    kprof("ab", "--env", "X=1", "--pairs", "6", "--fixed", "--json", script)
    pairs = json.loads(capsys.readouterr().out)["pairs"]
    assert [(pair["problem"], pair["num_windows"]) for pair in pairs] == [("hot", 1)] * 6


def test_good_windows_beside_bad_ones_are_a_pairs_values(script, monkeypatch, capsys):
    def change(label, windows):
        times = [10e6, 1e6, 2e6, 6e6, 9e6] if label == "A" else [1e6] * 5
        bad = ["hot", "", "", "", "hot"] if label == "A" else [""] * 5
        clocks = [1_400.0, 1_700.0, 1_500.0, None, None] if label == "A" else [None] * 5
        return [
            replace(w, time_ns=time_ns, problem=said, sm_clock_mhz=clock)
            for w, time_ns, said, clock in zip(windows, times, bad, clocks, strict=True)
        ]

    processes_of(change, monkeypatch)
    kprof("ab", "--env", "X=1", "--pairs", "6", "--fixed", "--json", script)
    (first, *_) = json.loads(capsys.readouterr().out)["pairs"]
    assert (first["problem"], first["num_windows"]) == ("", 3)
    assert (first["a"], first["mean_a"]) == ([2e6], [3e6])
    assert first["clocks_mhz"] == [1_500.0, None]


@pytest.mark.parametrize(("growth", "verdict"), [(0.0, "FASTER"), (0.1, "INVALID")])
def test_a_ratio_that_changes_within_each_process_makes_no_verdict(
    script, monkeypatch, capsys, growth, verdict
):
    rng = np.random.default_rng(0)

    def change(label, windows):
        first, each = (0.8, growth) if label == "B" else (1.0, 0.0)
        of_process = 1e6 * rng.normal(1.0, 0.001)
        return [
            replace(w, time_ns=of_process * (first + each * number))
            for number, w in enumerate(windows)
        ]

    processes_of(change, monkeypatch)
    kprof("ab", "--env", "X=1", "--pairs", "40", "--fixed", "--json", script)
    (claim,) = json.loads(capsys.readouterr().out)["claims"]
    assert (claim["verdict"], claim["num_pairs"]) == (verdict, 40)
    # B over A in the first window and in the last.
    told = [float(one) for one in re.findall(r"\b[01]\.\d{4}\b", claim["why"])]
    assert told == pytest.approx([0.8, 1.2] if growth else [], abs=0.005)


@pytest.mark.parametrize(("words", "window_s"), [((), 0.25), (("--energy",), 1.0)])
def test_energy_takes_windows_of_at_least_a_second(script, monkeypatch, words, window_s):
    workload = stand_in(monkeypatch)
    kprof("ab", "--env", "X=1", "--pairs", "6", *words, script)
    assert {schedule.window_s for schedule in workload.schedules} == {window_s}


def test_a_stop_by_hand_before_the_fewest_pairs_says_how_many_these_are():
    plan = Plan((Metric("step", "ns"),), max_pairs=40)
    least = fewest_for_verdict(plan)
    assert quantities_in(stopped(plan, least).text) == [str(least), "40"]
    assert quantities_in(stopped(plan, least - 1).text) == [str(least - 1), "40", str(least)]


def test_each_pair_is_told_with_how_much_longer_b_took(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    kprof("ab", "--env", "X=1", "--pairs", "6", "--fixed", "--json", script)
    assert re.findall(r"pair (\d) of .*B (\S+) %", capsys.readouterr().err)[-1] == ("6", "-10.0")


@pytest.mark.parametrize(("label", "other"), [("A", "B"), ("B", "A")])
def test_steps_of_one_alone_are_no_comparison(script, monkeypatch, capsys, label, other):
    processes_of(lambda of, windows: windows if of == label else [], monkeypatch)
    assert kprof("ab", "--env", "X=1", "--json", script) == 2
    said = capsys.readouterr().err
    assert f"only {label} " in said
    assert f"only {other} " not in said


def test_without_steps_whole_runs_are_compared(script, monkeypatch, capsys):
    judged = []
    processes_of(lambda of, windows: [], monkeypatch)
    monkeypatch.setattr("kprof.ab.processes.measure_host_resolution_ns", lambda: 500.0)
    monkeypatch.setattr(
        "kprof.ab.processes.judge",
        lambda *args, **more: judged.append(more["resolution_ns"]) or judge(*args, **more),
    )
    kprof("ab", "--env", "X=1", "--pairs", "6", "--fixed", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert judged == [500.0]
    assert result["plan"]["metrics"][0]["name"] == "run time"
    assert [(pair["a"], pair["b"]) for pair in result["pairs"]] == [([1e9], [1e9])] * 6


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--gpu", "nosuch"), "no price list has the GPU 'nosuch'"),
        (("--price", "cheap", "--gpu", "H200"), "cheap"),
        (("--target", "ttft_p99<=10ms"), "kprof sla"),
        (("--target", "step_p99<="), "step_p99<="),
        (("--swap", "nosuch"), "nosuch"),
        (("--env", "X"), "--env X"),
        (("--patch", "nosuch.py:f"), "nosuch.py"),
        (("--patch", "patch"), "--patch patch"),
        (("--patch", "patch.py:"), "--patch patch.py:"),
        (("--patch", ":f"), "--patch :f"),
        (("--env", "=V"), "--env =V"),
        (("--patch", "json:tool", "--env", "K=V"), "--env"),
        (("--swap", "rmsnorm", "--arg", "x"), "one environment"),
        (("--patch", "json:tool", "--swap", "rmsnorm"), "one of the two"),
        (("--smallest-effect", "0"), "--smallest-effect 0"),
        (("--smallest-effect", "100%"), "--smallest-effect 100%"),
        (("--smallest-effect", "1"), "--smallest-effect 1"),
        (("--smallest-effect", "x"), "--smallest-effect x"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_runs(
    script, monkeypatch, capsys, words, problem
):
    workload = stand_in(monkeypatch)
    assert kprof("ab", *words, script) == 2
    assert problem in capsys.readouterr().err
    assert workload.started == []
    assert not list(Path(script).parent.glob("*.kprof"))


def test_how_b_differs_stands_in_the_command_that_repeats_it(script, monkeypatch, capsys):
    stand_in(monkeypatch)
    kprof("ab", "--env", "MODE=max autotune", "--pairs", "6", "--json", script)
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["command of B"].startswith("MODE='max autotune' ")
    assert facts["command of B"].endswith(facts["command of A"])
    b = Variant("B", ("python", "a b.py"), {"K": "V"})
    assert b.line == "K=V python 'a b.py'"
    assert replace(b, environment={}).line == "python 'a b.py'"


@pytest.mark.parametrize("skip", ["1", "2"])
def test_how_many_steps_are_not_counted_is_said(script, monkeypatch, capsys, skip):
    stand_in(monkeypatch)
    kprof("ab", "--env", "K=V", "--pairs", "6", "--skip", skip, "--json", script)
    protocol = json.loads(capsys.readouterr().out)["protocol"]
    assert re.search(rf"\b{skip} steps?\b", protocol)


def test_the_order_is_another_one_in_each_comparison_unless_its_seed_is_named(
    script, monkeypatch, capsys
):
    monkeypatch.undo()
    monkeypatch.chdir(Path(script).parent)
    stand_in(monkeypatch, b=0.9)
    seeds = []
    for number, named in enumerate(([], [], ["--seed", "7"])):
        words = ["--pairs", "6", "--json", "--out", f"{number}.kprof", *named]
        assert kprof("ab", "--patch", "patch.py:f", *words, script) == 0
        seeds.append(json.loads(capsys.readouterr().out)["plan"]["seed"])
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    assert AbOptions((script,)).seed != AbOptions((script,)).seed


def test_more_pairs_than_can_be_judged_are_refused_before_anything_runs(
    script, monkeypatch, capsys
):
    workload = stand_in(monkeypatch, b=0.9, num_windows=20)
    for change in (["--patch", "patch.py:f"], ["--env", "K=V"]):
        assert kprof("ab", *change, "--pairs", "1001", script) == 2
    assert workload.started == []
    assert not list(Path(script).parent.glob("*.kprof"))
    assert kprof("ab", "--patch", "patch.py:f", "--pairs", "1000", "--fixed", "--json", script) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plan"]["max_pairs"] == 1000
    assert len(workload.schedules[0].letters) == 2000


@pytest.mark.parametrize(
    ("verdict", "low", "high", "code"),
    [
        ("SLOWER", 1.002, 1.008, 0),
        ("SLOWER", 1.002, 1.015, 3),
        ("SLOWER", 1.012, 1.03, 1),
        ("FASTER", 0.97, 0.99, 0),
        ("INCONCLUSIVE", 0.98, 1.03, 3),
    ],
)
def test_slower_is_an_error_only_where_it_matters(verdict, low, high, code):
    interval = Interval((low + high) / 2, low, high, 0.95, "fixed")
    claim = Claim(Metric("step", "ns"), verdict, 40, interval, is_material=low > 1.01)
    assert exit_code_of(claim, 0.01) == code


def test_the_peak_memory_of_each_arm_is_that_of_its_largest_window():
    peaks = {"A": (7, None, 21, 3), "B": (5,)}
    trials = [
        trial_of(
            label,
            [replace(window_of(label, 1, n), peak_memory_bytes=p) for n, p in enumerate(of_arm)],
        )
        for label, of_arm in peaks.items()
    ]
    a, b = (Variant(label, ("python", "train.py")) for label in peaks)
    name = "peak memory of A, B"
    assert facts_of(a, b, trials)[name].split(" , ") == ["21 B", "5 B"]
    unknown = trial_of("B", [window_of("B", 1, 0)])
    assert name not in facts_of(a, b, [trials[0], unknown])


def test_every_pair_tells_how_long_the_others_take():
    fixed = Plan((Metric("step", "ns"),), max_pairs=40, stops_early=False)
    early = Plan((Metric("step", "ns"),), max_pairs=40)
    assert quantities_in(time_left(10, fixed, 20.0)) == ["60 s"]
    assert quantities_in(time_left(10, early, 100.0)) == ["2", "5"]
    assert quantities_in(time_left(30, early, 60.0)) == ["20 s"]
    assert quantities_in(time_left(40, early, 60.0)) == []
