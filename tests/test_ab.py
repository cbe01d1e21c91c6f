"""`kprof ab`, from its options to its report: what is refused, what is kept, what is told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kprof import ab, alternate, calibrations, comparison, flip
from kprof.analyze.calibration.simulate import simulate
from kprof.collect.machine import Machine
from kprof.collect.trials import Trial, TrialError, TrialInterrupted, Variant, Window
from tests.test_cli import kprof


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Work in an empty folder with a script and a patch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "patch.py").touch()
    path = tmp_path / "train.py"
    path.touch()
    # The order is another one each time, and how many pairs a verdict takes with it.
    monkeypatch.setattr(comparison, "draw_seed", lambda: 0)
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

    flicker = 0.0

    def __init__(self, b=1.0, num_windows=10_000, fail=None, watts=None, why="no GPU took part"):
        self.b, self.num_windows, self.fail, self.started = b, num_windows, fail, []
        self.watts, self.why, self.schedules = watts, why, []

    def __call__(self, variant, schedule, folder, *, is_enough):
        folder.mkdir(parents=True, exist_ok=True)
        self.started.append(variant)
        self.schedules.append(schedule)
        if self.fail and len(self.started) > self.fail[0]:
            raise self.fail[1]
        windows = []
        for number, arm in enumerate(schedule.letters[: self.num_windows]):
            noise = 1 + 0.003 * ((number * 7919) % 13 - 6) / 6
            took_ns = round(1e6 * noise * (self.b if arm == "B" else 1))
            flicker = 1 + self.flicker * ((number * 7001) % 11 - 5)
            joules = self.watts and 10 * took_ns * self.watts[arm] / 1e9 * flicker
            windows.append(replace(window_of(arm, took_ns, number), joules=joules))
            if is_enough(windows):
                break
        return replace(trial_of(variant.label, windows), why_no_energy=self.why)


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
    stopped = "It was stopped by hand after 8 of 160 pairs: no verdict comes before 11."
    assert stopped in result["doubts"]


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
    stopped = "It was stopped by hand after 7 of 40 pairs: no verdict comes before 9."
    assert stopped in result["doubts"]


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


@pytest.fixture
def counter(monkeypatch):
    """Let this machine have a GPU with an energy counter."""
    monkeypatch.setattr(flip, "can_count_energy", lambda: True)


def test_energy_of_two_arms_in_one_process_is_judged_in_windows_of_seconds(
    script, monkeypatch, capsys, counter
):
    workload = stand_in(monkeypatch, b=0.8, watts={"A": 500, "B": 600}, why="")
    kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    step, energy = result["claims"]
    assert (step["verdict"], energy["verdict"]) == ("FASTER", "FASTER")
    assert energy["interval"]["ratio"] == pytest.approx(0.8 * 600 / 500, rel=0.01)
    assert workload.schedules[0].window_s >= 2
    assert result["doubts"] == []


def test_energy_that_the_sampled_power_contradicts_gets_no_verdict_and_keeps_its_values(
    script, monkeypatch, capsys, counter
):
    why = "the energy counters and the sampled power differ by 8 %"
    stand_in(monkeypatch, b=0.8, watts={"A": 500, "B": 600}, why=why)
    assert kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script) == 0
    result = json.loads(capsys.readouterr().out)
    step, energy = result["claims"]
    assert (step["verdict"], energy["verdict"]) == ("FASTER", "INVALID")
    assert energy["why"] == f"T{why[1:]}."
    assert energy["interval"] is None
    assert result["pairs"][0]["a"][1] == pytest.approx(0.5, rel=0.01)


def test_a_step_decides_alone_where_no_window_has_its_energy(script, monkeypatch, capsys, counter):
    stand_in(monkeypatch, b=0.8, why="no GPU took part")
    kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert len(result["pairs"]) < 20
    assert [claim["verdict"] for claim in result["claims"]] == ["FASTER", "INVALID"]
    assert result["claims"][1]["why"] == "No GPU took part."


def test_the_energy_of_a_window_that_is_read_a_moment_later_is_waited_for(
    script, monkeypatch, capsys, counter
):
    seen = []

    class Late(Workload):
        """Knows a window's energy only when the next one has ended; energy is noisy."""

        flicker = 0.03

        def __call__(self, variant, schedule, folder, *, is_enough):
            def look(windows):
                seen.append(len(windows))
                late = [*windows[:-1], replace(windows[-1], joules=None)]
                return is_enough(late)

            return super().__call__(variant, schedule, folder, is_enough=look)

    monkeypatch.setattr(flip, "run_trial", Late(b=0.8, watts={"A": 500, "B": 550}, why=""))
    kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    # The step is decided after a dozen pairs; its energy takes more.
    assert [claim["verdict"] for claim in result["claims"]] == ["FASTER", "FASTER"]
    assert 30 < seen[-1] < 150


def test_why_some_processes_have_no_energy_is_counted(script, monkeypatch, capsys):
    why = "the energy counters and the sampled power differ by 8 %"
    number = iter(range(1000))

    def sometimes(variant, schedule, folder, *, is_enough):
        folder.mkdir(parents=True, exist_ok=True)
        windows = [window_of(arm, 1e6, i) for i, arm in enumerate(schedule.letters)]
        is_missing = next(number) == 3
        trial = trial_of(variant.label, windows)
        return replace(
            trial,
            joules_per_step=None if is_missing else 3.0,
            why_no_energy=why if is_missing else "",
        )

    monkeypatch.setattr(alternate, "run_trial", sometimes)
    kprof("ab", "--env", "K=V", "--energy", "--pairs", "6", "--fixed", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert f"The energy of 1 of 12 processes is missing: {why}." in result["doubts"]
    assert result["claims"][1]["verdict"] == "INVALID"
    assert sum(pair[arm][1] is None for pair in result["pairs"] for arm in "ab") == 1


def test_a_script_without_steps_has_nothing_to_switch_between(script, monkeypatch, capsys):
    def without_steps(variant, schedule, folder, *, is_enough):
        return replace(trial_of("A", []), rule="")

    monkeypatch.setattr(flip, "run_trial", without_steps)
    assert kprof("ab", "--patch", "patch.py:f", script, "600") == 2
    error = capsys.readouterr().err
    assert f"{script} took no steps that kprof knows" in error
    assert 'kprof.range("step")' in error


def test_a_script_of_too_few_steps_is_named_and_not_its_last_argument(script, monkeypatch, capsys):
    stand_in(monkeypatch, num_windows=1)
    assert kprof("ab", "--patch", "patch.py:f", script, "600") == 2
    assert f"{script} ended before a pair of windows was taken" in capsys.readouterr().err


def test_a_stop_before_the_first_pair_says_where_the_output_is(script, monkeypatch, capsys):
    def stopped(variant, schedule, folder, *, is_enough):
        raise TrialInterrupted(trial_of("A", []))

    monkeypatch.setattr(flip, "run_trial", stopped)
    assert kprof("ab", "--patch", "patch.py:f", script) == 130
    assert "stopped before the first pair" in capsys.readouterr().err


def kept(script):
    return json.loads((Path(script).with_name("train-ab.kprof") / "comparison.json").read_bytes())


def test_the_folder_keeps_what_is_printed_as_json(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.9)
    words = ("--price", "2,3,4", "--tokens-per-step", "64", "--target", "step_p50<=60ms")
    kprof("ab", "--patch", "patch.py:f", *words, "--json", script)
    assert json.loads(capsys.readouterr().out) == kept(script)
    assert kept(script).keys() >= {"calibration", "costs", "targets", "per_token", "schema"}


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

    monkeypatch.setattr(alternate, "run_trial", empty_at_last)
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


def test_tokens_told_for_the_energy_of_a_token_are_no_question_of_costs(
    script, monkeypatch, capsys, counter
):
    stand_in(monkeypatch, b=0.8, watts={"A": 500, "B": 600}, why="")
    kprof("ab", "--patch", "patch.py:f", "--energy", "--tokens-per-step", "50", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert "costs" not in result
    assert [one["claim"]["metric"]["name"] for one in result["per_token"]] == [
        "throughput",
        "energy per token",
    ]
    assert result["per_token"][1]["a"] == pytest.approx(0.5 / 50, rel=0.01)


def test_the_energy_that_was_measured_is_part_of_the_costs(script, monkeypatch, capsys, counter):
    stand_in(monkeypatch, b=0.8, watts={"A": 500, "B": 600}, why="")
    words = ("--energy", "--tokens-per-step", "50", "--price", "3")
    kprof("ab", "--patch", "patch.py:f", *words, "--json", script)
    figures = json.loads(capsys.readouterr().out)["costs"]["figures"]
    (measured,) = [one for one in figures if (one["topic"], one["name"]) == ("Energy", "measured")]
    assert measured["mid"] == pytest.approx(0.8 * 0.6 / 50, rel=0.01)


def test_the_partners_page_says_better_of_energy_and_faster_of_time(
    script, monkeypatch, capsys, counter
):
    stand_in(monkeypatch, b=0.8, watts={"A": 500, "B": 600}, why="")
    kprof("ab", "--patch", "patch.py:f", "--energy", "--tokens-per-step", "50", script)
    kprof("report", "train-ab.kprof")
    page = Path("report.html").read_text()
    assert "energy per token" in page
    assert page.count("Better, proven") == 3
    assert "Faster, proven" in page


def test_the_calibration_of_the_machine_goes_with_the_comparison(script, monkeypatch, capsys):
    made = replace(simulate(50, 40, 0, "2026-11-20"), kind="host", device="a processor")
    coarse = tuple(replace(one, least_found=0.016) for one in made.scenarios)
    made = replace(made, scenarios=coarse)
    monkeypatch.setattr(ab, "last_calibration", lambda: made)
    monkeypatch.setattr(calibrations, "this_machine", lambda: Machine("host", "a processor", None))
    stand_in(monkeypatch, b=0.9)
    kprof("ab", "--patch", "patch.py:f", script)
    assert "Finds from" in capsys.readouterr().out
    assert any("find only differences from 1.6 % on" in doubt for doubt in kept(script)["doubts"])
    kprof("report", "train-ab.kprof")
    assert "Finds differences from" in Path("report.html").read_text()


def test_what_is_stopped_after_enough_pairs_has_its_verdict_also_where_all_were_wanted(
    script, monkeypatch, capsys
):
    def interrupted(variant, schedule, folder, *, is_enough):
        windows = [
            window_of(arm, 1000 + 100 * (arm == "B") + i % 3, i)
            for i, arm in enumerate(schedule.letters[:40])
        ]
        raise TrialInterrupted(trial_of("A", windows))

    monkeypatch.setattr(flip, "run_trial", interrupted)
    assert kprof("ab", "--patch", "patch.py:f", "--fixed", "--json", script) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["doubts"] == ["It was stopped by hand after 20 of 40 pairs."]


def test_the_order_is_another_one_in_each_comparison_unless_its_seed_is_named(
    script, monkeypatch, capsys
):
    monkeypatch.undo()
    monkeypatch.chdir(Path(script).parent)
    stand_in(monkeypatch, b=0.9)
    seeds = []
    for number, named in enumerate(([], [], ["--seed", "7"])):
        command = ["ab", "--patch", "patch.py:f", "--json", "--out", f"{number}.kprof", *named]
        assert kprof(*command, script) == 0
        seeds.append(json.loads(capsys.readouterr().out)["plan"]["seed"])
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    assert ab.AbOptions((script,)).seed != ab.AbOptions((script,)).seed


def test_more_pairs_than_can_be_judged_are_refused_before_anything_runs(
    script, monkeypatch, capsys
):
    workload = stand_in(monkeypatch)
    assert kprof("ab", "--patch", "patch.py:f", "--pairs", "1001", script) == 2
    assert workload.started == []
    assert kprof("ab", "--patch", "patch.py:f", "--pairs", "1000", "--fixed", "--json", script) == 0
    assert json.loads(capsys.readouterr().out)["claims"][0]["num_pairs"] == 1000


def test_with_energy_fewer_pairs_are_planned_and_the_least_time_is_told(
    script, monkeypatch, capsys
):
    monkeypatch.setattr(flip, "can_count_energy", lambda: True)
    stand_in(monkeypatch, b=0.9, watts={"A": 100.0, "B": 100.0}, why="")
    assert kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["plan"]["max_pairs"] == 40
    least = "in at most 40 pairs of windows of 2.5 s: 10 pairs, 50 s at the least"
    assert least in said.err
