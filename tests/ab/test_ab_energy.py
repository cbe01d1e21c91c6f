"""The energy of two variants: when it is judged, and what is told where it cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kprof.ab import in_process, processes
from tests.ab.ab_runs import Workload, script_in, stand_in, trial_of, window_of
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in

NO_GPU = "no GPU took part"


@pytest.fixture
def script(tmp_path, monkeypatch):
    return script_in(tmp_path, monkeypatch)


@pytest.mark.parametrize("words", [("--patch", "patch.py:f"), ("--env", "K=V")])
def test_energy_that_cannot_be_compared_is_told(script, monkeypatch, capsys, words):
    stand_in(monkeypatch)
    kprof("ab", *words, "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert [claim["metric"]["name"] for claim in result["claims"]] == ["step time"]
    (doubt,) = [one for one in result["doubts"] if one["id"] == "energy_not_compared"]
    assert NO_GPU in doubt["text"]


@pytest.fixture
def counter(monkeypatch):
    """Let this machine have a GPU with an energy counter."""
    monkeypatch.setattr(in_process, "can_count_energy", lambda: True)


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
    stand_in(monkeypatch, b=1.25, why=NO_GPU)
    kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script)
    result = json.loads(capsys.readouterr().out)
    assert 24 <= len(result["pairs"]) < 30
    assert [claim["verdict"] for claim in result["claims"]] == ["SLOWER", "INVALID"]
    assert result["claims"][1]["why"] == f"N{NO_GPU[1:]}."


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

    monkeypatch.setattr(in_process, "run_trial", Late(b=0.8, watts={"A": 500, "B": 550}, why=""))
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

    monkeypatch.setattr(processes, "run_trial", sometimes)
    kprof("ab", "--env", "K=V", "--energy", "--pairs", "6", "--fixed", "--json", script)
    result = json.loads(capsys.readouterr().out)
    (doubt,) = [one for one in result["doubts"] if why in one["text"]]
    assert quantities_in(doubt["text"]) == ["1", "12", "8 %"]
    assert result["claims"][1]["verdict"] == "INVALID"
    assert sum(pair[arm][1] is None for pair in result["pairs"] for arm in "ab") == 1


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


H100 = "NVIDIA H100 80GB HBM3"
OF_ANOTHER = "The price is that of H200, as --gpu says, and the times were measured on H100"


@pytest.mark.parametrize(
    ("words", "name", "warns"),
    [
        (("--gpus", "1"), "H100, on-demand", False),
        (("--gpu", "H100"), "H100, on-demand", False),
        (("--gpu", "H200"), "H200, on-demand", True),
        (("--gpu", "H200", "--price", "3"), "as given", False),
    ],
)
def test_steps_cost_what_the_gpu_costs_that_took_them(
    script, monkeypatch, capsys, words, name, warns
):
    stand_in(monkeypatch, b=0.8).device_name = H100
    kprof("ab", "--patch", "patch.py:f", "--pairs", "24", *words, "--json", script)
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["price"]["name"] == name
    assert any(one.startswith(OF_ANOTHER) for one in costs["warnings"]) == warns


def test_a_gpu_without_a_price_is_named(script, monkeypatch, capsys):
    stand_in(monkeypatch, b=0.8).device_name = "NVIDIA L1"
    kprof("ab", "--patch", "patch.py:f", "--pairs", "24", "--gpus", "1", "--json", script)
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["price"] is None
    (note,) = [one for one in costs["notes"] if "NVIDIA L1" in one]
    assert "--price" in note


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


def test_with_energy_fewer_pairs_are_planned_and_the_least_time_is_told(
    script, monkeypatch, capsys
):
    monkeypatch.setattr(in_process, "can_count_energy", lambda: True)
    stand_in(monkeypatch, b=0.9, watts={"A": 100.0, "B": 100.0}, why="")
    assert kprof("ab", "--patch", "patch.py:f", "--energy", "--json", script) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["plan"]["max_pairs"] == 40
    least = "in at most 40 pairs of windows of 2.5 s: 24 pairs, 120 s at the least"
    assert least in said.err
