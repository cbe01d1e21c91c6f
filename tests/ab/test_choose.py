"""`kprof ab --swap auto`: which kernels are taken, from windows with and without each."""

import json
import os
import time
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kprof.ab import choose as choose_module
from kprof.ab.choose import NothingPaysError, choose, tried_in
from kprof.ab.search import Search, Seen
from kprof.ab.variants import AbOptions
from kprof.collect.trials import TrialError, Variant
from kprof.collect.windows import Window
from kprof.errors import KprofError
from kprof.kernels.swap.kept import facts_of_machine, keep_gate
from kprof.kernels.swap.swap_report import (
    CHOICE,
    GATE_PASSED,
    GATE_UNFINISHED,
    NEEDS_GPU,
    UNMEASURED,
    CallSort,
    Checked,
    Choice,
    Ran,
    Tried,
    read_choice,
)
from kprof.report.swap import section_of_choice
from tests.ab.ab_runs import trial_of
from tests.quantities import quantities_in

S = 1_000_000_000


def window(arm, start_s, time_ns, problem=""):
    return Window(arm, 4, start_s * S, (start_s + 1) * S, time_ns, (), 0, problem=problem)


def log_of(path, *turns, dropped=(), last_call_s=10**9, num_compiled=0):
    lines = []
    for name, begin_s in turns:
        lines.append({"event": "enter", "name": name, "time_ns": begin_s * S - 1})
        left = {"num_calls": 3 * min(begin_s, last_call_s), "num_compiled": num_compiled}
        lines.append({"event": "leave", "name": name, "time_ns": (begin_s + 1) * S, **left})
    lines += [{"event": "drop", "name": name, "time_ns": 0, "why": "no call"} for name in dropped]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_a_window_is_compared_with_the_one_before_or_after_it_in_turn(tmp_path):
    # The workload itself becomes slower and slower; the candidate takes nine tenths of its time.
    times = [100.0 * 1.1**n * (0.9 if n % 2 else 1.0) for n in range(25)]
    windows = [window("AB"[n % 2], n, one) for n, one in enumerate(times)]
    log = log_of(tmp_path / "log", *(("rope=kprof", n) for n in range(1, 25, 2)), dropped=["x=y"])
    found = tried_in(windows, log)
    assert found["rope=kprof"].ratio == pytest.approx(0.9)
    # The first window is not counted: kernels were compiled in it. Of a candidate that is alone,
    # each third one has no window beside it that is not used yet.
    assert found["rope=kprof"].num_windows == 8
    assert found["x=y"] == Tried("x=y", why="no call")


def test_a_window_with_a_problem_does_not_count(tmp_path):
    windows = [window("AB"[n % 2], n, 100.0, "throttled" if n == 2 else "") for n in range(5)]
    found = tried_in(windows, log_of(tmp_path / "log", *(("rope=kprof", n) for n in (1, 3))))
    assert found["rope=kprof"].num_windows == 0
    assert found["rope=kprof"].ratio is None


def normal(draw, count):
    return draw.normal(0, 0.02, count)


def with_spikes(draw, count):
    return draw.normal(0, 0.005, count) + (draw.random(count) < 0.1) * draw.exponential(0.2, count)


def simulated(folder, share, noise, *, num_turns, num_runs):
    """Return the share of runs in which a candidate is found faster, and slower."""
    draw = np.random.default_rng(7)
    log = log_of(folder / "log", *(("rope=kprof", n) for n in range(1, 2 * num_turns + 3, 2)))
    found = []
    for _ in range(num_runs):
        times = 100 * np.exp(noise(draw, 2 * num_turns + 3))
        times[1::2] *= share
        windows = [window("AB"[n % 2], n, one) for n, one in enumerate(times)]
        found.append(tried_in(windows, log, is_end=True)["rope=kprof"])
    return [
        sum(getattr(one, what) for one in found) / num_runs for what in ("is_faster", "is_slower")
    ]


@pytest.mark.parametrize("noise", [normal, with_spikes])
@pytest.mark.parametrize("num_turns", [12, 60])
def test_looks_during_the_choice_choose_few_neutral_candidates(tmp_path, num_turns, noise):
    shares = simulated(tmp_path, 1.0, noise, num_turns=num_turns, num_runs=300)
    # Of 5 % each; with a look after every window it is 27 % of 40.
    assert max(shares) < 0.06


def test_a_gain_of_3_percent_is_found_under_noise_of_2_percent(tmp_path):
    is_faster, is_slower = simulated(tmp_path, 0.97, normal, num_turns=24, num_runs=100)
    assert is_faster > 0.85
    assert is_slower == 0


def test_windows_with_compilation_hide_no_gain(tmp_path):
    def noise(draw, count):
        times = normal(draw, count)
        times[1:9:2] += 1.0
        return times

    is_faster, is_slower = simulated(tmp_path, 0.97, noise, num_turns=60, num_runs=100)
    assert is_faster > 0.9
    assert is_slower == 0


def test_the_look_that_decided_counts_and_not_the_windows_after_it(tmp_path):
    # Faster by a tenth until 8 windows are compared, then slower by a tenth.
    shares = [0.9] * 12 + [1.1] * 13
    times = [100.0 * (shares[n // 2] if n % 2 else 1.0) for n in range(51)]
    windows = [window("AB"[n % 2], n, one) for n, one in enumerate(times)]
    log = log_of(tmp_path / "log", *(("rope=kprof", n) for n in range(1, 51, 2)))
    found = tried_in(windows, log, is_end=True)["rope=kprof"]
    assert (found.num_windows, found.is_faster) == (8, True)
    assert found.ratio == pytest.approx(0.9)


def test_before_the_end_windows_between_two_looks_decide_nothing(tmp_path):
    times = [100.0 * (0.9 if n % 2 else 1.0) for n in range(23)]
    windows = [window("AB"[n % 2], n, one) for n, one in enumerate(times)]
    log = log_of(tmp_path / "log", *(("rope=kprof", n) for n in range(1, 23, 2)))
    found = [tried_in(windows, log, is_end=one)["rope=kprof"] for one in (False, True)]
    assert [one.num_windows for one in found] == [7, 7]
    assert [one.is_faster for one in found] == [False, True]


def test_the_first_step_of_a_window_which_begins_with_an_empty_queue_decides_nothing(tmp_path):
    # Faster by a tenth, but the host needs three steps' time to fill the queue again.
    times = [90.0 if n % 2 else 100.0 for n in range(33)]
    steps = [((400,) if n % 2 else (110,)) + (int(one),) * 3 for n, one in enumerate(times)]
    windows = [
        replace(window("AB"[n % 2], n, sum(one) / 4), steps_ns=one) for n, one in enumerate(steps)
    ]
    log = log_of(tmp_path / "log", *(("rope=kprof", n) for n in range(1, 33, 2)))
    found = tried_in(windows, log, is_end=True)["rope=kprof"]
    assert found.is_faster
    assert found.ratio == pytest.approx(0.9)


@pytest.mark.parametrize("steps", [(60, 50), (1_000, 945), (940, 960)])
@pytest.mark.parametrize("gap", [0, 50])
def test_work_between_steps_counts_in_both_windows_of_a_pair(tmp_path, steps, gap):
    times = [float(steps[n % 2] + gap) for n in range(33)]
    windows = [
        replace(window("AB"[n % 2], n, one), steps_ns=(steps[n % 2],) * 4)
        for n, one in enumerate(times)
    ]
    log = log_of(tmp_path / "log", *(("rope=kprof", n) for n in range(1, 33, 2)))
    found = tried_in(windows, log, is_end=True)["rope=kprof"]
    assert found.ratio == pytest.approx((steps[1] + gap) / (steps[0] + gap))


def tried(name, low, ratio, high):
    return Tried(name, 3, 0, 6, ratio, low, high)


def test_of_each_kernel_the_fastest_is_taken_if_it_is_faster_for_sure():
    choice = Choice(
        (
            tried("cross_entropy=kprof-shared", 0.85, 0.86, 0.87),
            tried("cross_entropy=kprof", 0.88, 0.9, 0.92),
            tried("rope=kprof", 0.96, 0.98, 1.001),
            tried("softmax=kprof", 1.0, 1.1, 1.2),
            Tried("adamw=kprof", why="no call"),
        )
    )
    assert choice.names == ("cross_entropy=kprof-shared",)
    assert choice.predicted == 0.86
    _, timed, others = section_of_choice(choice, 0.87).parts
    assert ["=".join(row[:2]) for row in timed.rows] == [one.name for one in choice.tried[:4]]
    assert [row[-1] == "chosen" for row in timed.rows] == [True, False, False, False]
    assert others.rows == (("adamw=kprof", "no call"),)


def test_nothing_is_taken_where_nothing_is_faster_for_sure():
    assert Choice((tried("rope=kprof", 0.9, 0.99, 1.05),)).names == ()
    assert Choice(()).predicted == 1.0


class Process:
    """Stands in for a workload of which each candidate takes a share of the time as it is.

    A kernel without a provider has the first one that `shares` names.
    """

    def __init__(self, shares, ends_with=None, on_its_way_out=()):
        self.shares, self.ends_with, self.on_its_way_out = shares, ends_with, on_its_way_out
        self.names = []

    def share(self, candidate):
        return prod(self.shares[self.named(one)] for one in candidate.split(",") if one)

    def named(self, part):
        known = (one for one in self.shares if one == part or one.partition("=")[0] == part)
        return next(known)

    def __call__(self, variant, schedule, folder, *, is_enough, why_to_end=None):
        given, log = schedule.patch_arguments
        self.names.append(given.split())
        log, windows, turn, base = Path(log), [], 0, ""
        for second, arm in enumerate(schedule.letters[:400]):
            noise = 1 + 0.004 * ((second * 7919) % 13 - 6) / 6
            if arm == "A":
                windows.append(window(arm, second, 100.0 * noise * self.share(base)))
            else:
                plan = log.with_suffix(".plan")
                told = json.loads(plan.read_text()) if plan.exists() else {}
                left, base = told.get("left", given.split()), told.get("base", "")
                name = left[turn % len(left)] if left else None
                turn += 1
                parts = [self.named(one) for one in (name or "").split(",") if one]
                if self.ends_with in parts:
                    write(log, name, "enter", *self.on_its_way_out)
                    trial = trial_of("A", windows)
                    raise TrialError("B: the workload ended", fix="see", trial=trial, arm="B")
                if name is not None:
                    append(log, name, second, base, parts)
                share = self.share(base if name is None else name)
                windows.append(window(arm, second, 100.0 * noise * share))
            if is_enough(windows):
                break
        return trial_of("A", windows)


def write(log, name, *events, why="no call"):
    left = {"num_calls": 0, "num_compiled": 0, "why": why}
    with log.open("a") as file:
        for event in events:
            file.write(json.dumps({"event": event, "name": name, "time_ns": 0, **left}) + "\n")


def append(log, name, second, base="", parts=()):
    ran = {kernel: {"provider": by} for kernel, _, by in (one.partition("=") for one in parts)}
    left = {"num_calls": second, "num_compiled": 0, "ran": ran}
    with log.open("a") as file:
        for event, at_ns in (("enter", second * S - 1), ("leave", (second + 1) * S)):
            line = {"event": event, "name": name, "time_ns": at_ns, "base": base}
            file.write(json.dumps(line | (left if event == "leave" else {})) + "\n")


def passing(place, end_s, one):
    return Checked(GATE_PASSED)


def chosen(monkeypatch, folder, process, judge=passing, **options):
    monkeypatch.setattr(choose_module, "run_trial", process)
    monkeypatch.setattr(choose_module, "_judge", judge)
    names = list(getattr(process, "shares", ["rope=kprof"]))
    monkeypatch.setattr("kprof.kernels.swap.candidates.candidate_names", lambda: names)
    (folder / "raw").mkdir()
    a = Variant("A", ("python", "train.py"))
    asked = AbOptions(("train.py",), swap="auto", **options)
    return choose(a, asked, folder, folder / "raw", lambda message: None)


def reasons_in(folder):
    tried = json.loads((folder / "choice.json").read_text())["tried"]
    return {one["name"]: one["why"] for one in tried}


def test_where_all_kernels_together_are_slower_each_is_tried_alone(monkeypatch, tmp_path):
    shares = {"rope=kprof": 0.9, "adamw=kprof": 1.2, "rmsnorm=kprof": 0.95, "rmsnorm=aten": 0.93}
    choice = chosen(monkeypatch, tmp_path, Process(shares))
    assert choice.names == ("rope=kprof", "rmsnorm=aten")
    assert choice.predicted == pytest.approx(0.9 * 0.93, rel=0.01)
    assert [one.name for one in choice.tried][-1] == "adamw=kprof"
    for one in choice.tried:
        assert one.ratio == pytest.approx(shares[one.name], rel=0.01)
    assert choice.joint.ratio == pytest.approx(0.9 * 1.2 * 0.95, rel=0.01)
    assert json.loads((tmp_path / "choice.json").read_text())["tried"][0]["name"] == "rope=kprof"


def test_the_gates_reports_of_what_is_chosen_are_kept_with_the_choice(monkeypatch, tmp_path):
    def judge(place, end_s, one):
        return Checked(GATE_PASSED, {"subject": one.name})

    shares = {"rope=kprof": 0.9, "adamw=kprof": 1.2, "rmsnorm=kprof": 0.95, "rmsnorm=aten": 0.93}
    choice = chosen(monkeypatch, tmp_path, Process(shares), judge)
    assert choice == read_choice(tmp_path / CHOICE)
    subjects = [one["subject"] for one in choice.gate_reports]
    assert subjects == list(choice.names) == ["rope=kprof", "rmsnorm=aten"]


def test_of_the_joint_swap_each_kernel_is_left_out_in_turn_and_its_provider_exchanged(
    monkeypatch, tmp_path
):
    shares = {"rope=kprof": 0.8, "adamw=kprof": 1.04, "rmsnorm=kprof": 0.95, "rmsnorm=aten": 0.9}
    choice = chosen(monkeypatch, tmp_path, Process(shares))
    assert set(choice.names) == {"rope=kprof", "rmsnorm=aten"}
    assert choice.joint.ratio == pytest.approx(0.8 * 1.04 * 0.95, rel=0.01)
    found = {one.name: one for one in choice.tried}
    for name in ("rope=kprof", "adamw=kprof", "rmsnorm=kprof"):
        assert found[name].ratio == pytest.approx(shares[name], rel=0.01)
        assert found[name].low < shares[name] < found[name].high
    # Against the provider in the joint swap.
    assert found["rmsnorm=aten"].instead_of == "kprof"
    assert found["rmsnorm=aten"].ratio == pytest.approx(0.9 / 0.95, rel=0.01)
    assert choice.predicted == pytest.approx(0.8 * 0.9, rel=0.01)
    outcomes = {"=".join(row[:2]): row[-1] for row in section_of_choice(choice, 0.72).parts[1].rows}
    assert [outcomes[one] == "chosen" for one in shares] == [True, False, False, True]


@pytest.mark.parametrize(
    ("ratio", "low", "high", "is_chosen"),
    [
        (1.03, 0.96, 1.12, True),
        (0.98, 0.97, 0.99, True),
        (0.999, 0.996, 1.002, False),
        (1.02, 1.01, 1.03, False),
    ],
)
def test_a_kernel_of_the_joint_swap_is_left_out_where_it_gains_nothing_for_sure(
    ratio, low, high, is_chosen
):
    joined = replace(tried("rope=kprof", low, ratio, high), is_joined=True)
    assert (Choice((joined,)).names == ("rope=kprof",)) is is_chosen


def test_where_steps_are_long_the_joint_swap_is_chosen_before_any_kernel_is_judged(
    monkeypatch, tmp_path
):
    shares = {"rope=kprof": 0.9, "adamw=kprof": 0.95, "rmsnorm=kprof": 0.98, "rmsnorm=aten": 0.9}
    process, num_windows = Process(shares), 30

    def run(variant, schedule, folder, *, is_enough, why_to_end):
        def is_over(windows):
            return is_enough(windows) or len(windows) == num_windows

        return process(variant, schedule, folder, is_enough=is_over)

    run.shares = shares
    choice = chosen(monkeypatch, tmp_path, run)
    assert set(choice.names) == {"rope=kprof", "adamw=kprof", "rmsnorm=kprof"}
    assert choice.predicted == pytest.approx(0.9 * 0.95 * 0.98, rel=0.01)
    assert [one.ratio for one in choice.tried] == [None] * 4


def test_kernels_that_are_neutral_together_are_not_chosen(monkeypatch, tmp_path):
    with pytest.raises(KprofError):
        chosen(monkeypatch, tmp_path, Process({"rope=kprof": 1.0, "adamw=kprof": 1.0}), budget_s=1)


def test_a_provider_stands_in_for_one_of_the_joint_swap_that_the_gate_is_against(
    monkeypatch, tmp_path
):
    def judge(place, end_s, one):
        return Checked("fails" if one.name == "rmsnorm=kprof" else GATE_PASSED)

    shares = {"rope=kprof": 0.8, "rmsnorm=kprof": 0.9, "rmsnorm=aten": 0.95}
    choice = chosen(monkeypatch, tmp_path, Process(shares), judge=judge)
    assert set(choice.names) == {"rope=kprof", "rmsnorm=aten"}
    assert choice.predicted == pytest.approx(0.8 * 0.95, rel=0.01)


def tried_of(search, *, num_compiled=0):
    joint = replace(tried(search.joint, 0.8, 0.85, 0.9), num_compiled=num_compiled)
    ran = {one: Ran("kprof") for one in search.joint.split(",")}
    return {search.joint: joint}, {search.joint: Seen(ran, {}, took_s=20.0)}


@pytest.mark.parametrize(("time_left_s", "num_left"), [(60.0, 4), (10.0, 0)])
def test_compiled_code_is_compiled_anew_a_few_times_and_while_there_is_time(time_left_s, num_left):
    search = Search([f"{one}=kprof" for one in "abcdefgh"])
    left, base = search.left(*tried_of(search, num_compiled=3), time_left_s)
    assert (len(left), base) == (num_left, search.joint)
    assert len(search.left(*tried_of(search), time_left_s)[0]) == 8


def test_where_the_joint_swap_is_slower_kernels_that_ran_in_it_are_tried_first():
    search = Search(["a=kprof", "b=kprof", "c=aten", "c=kprof"])
    _, seen = tried_of(search)
    seen[search.joint] = Seen({"c": Ran("kprof")}, {}, took_s=1.0)
    left, base = search.left({search.joint: tried(search.joint, 1.1, 1.2, 1.3)}, seen, 60.0)
    assert (left, base) == (["c=aten", "c=kprof", "a=kprof", "b=kprof"], "")


def test_what_was_faster_only_without_a_kernel_of_the_base_is_not_chosen_beside_it():
    search = Search(["a=x", "b=x"], apart=["a", "b"])
    faster = {"a=x": tried("a=x", 0.89, 0.9, 0.91), "b=x": tried("b=x", 0.94, 0.95, 0.96)}
    assert search.left(faster, {}, 60.0) == (["a=x,b=x"], "a=x")
    outcome, _ = search.outcome(faster, {})
    assert Choice(tuple(outcome.values())).names == ("a=x",)
    beside = faster | {"a=x,b=x": tried("a=x,b=x", 0.94, 0.95, 0.96)}
    outcome, _ = search.outcome(beside, {})
    assert Choice(tuple(outcome.values())).names == ("a=x", "b=x")


def test_of_kernels_that_ran_those_that_pay_by_the_findings_are_tried_first():
    search = Search(["a=kprof", "b=kprof", "c=kprof"], likely=lambda: ["c", "b"])
    _, seen = tried_of(search)
    seen[search.joint] = Seen({"a": Ran("kprof"), "c": Ran("kprof")}, {}, took_s=1.0)
    left, _ = search.left({search.joint: tried(search.joint, 1.1, 1.2, 1.3)}, seen, 60.0)
    assert left == ["c=kprof", "a=kprof", "b=kprof"]


def test_kernels_that_pay_by_the_findings_are_left_out_last():
    search = Search(["a=kprof", "b=kprof", "c=kprof"], likely=lambda: ["b", "a"])
    left, _ = search.left(*tried_of(search), 60.0)
    assert left == ["a,b", "b,c", "a,c"]


@pytest.mark.parametrize(("low", "high"), [(0.8, 0.9), (1.1, 1.2)])
def test_a_kernel_that_nobody_has_measured_is_tried_before_others_that_did_not_run(low, high):
    """In the joint swap it does not run, since no provider is named there."""
    search = Search(["a=kprof", "b=aten", "b=kprof", "c=kprof", "d=kprof"])
    joint = tried(search.joint, low, (low + high) / 2, high)
    whys = {"a": "no call", "c": UNMEASURED}
    seen = {search.joint: Seen({"b": Ran("aten"), "d": Ran("kprof")}, whys, took_s=1.0)}
    left, base = search.left({search.joint: joint}, seen, 60.0)
    names = [one for one in left if "c=kprof" in one or "a=kprof" in one]
    assert [one.count("a=kprof") for one in names] == [0, 1]
    if base:
        exchanged = [one for one in left if "=" in one]
        assert exchanged == [search.exchanged(one) for one in ("c=kprof", "b=kprof", "a=kprof")]
        outcome, _ = search.outcome({search.joint: joint}, seen)
        assert (outcome["a=kprof"].why, outcome["c=kprof"].why) == ("no call", "")


def test_a_kernel_that_runs_where_another_is_left_out_takes_its_place():
    search = Search(["head=kprof", "loss=kprof", "rope=kprof"])
    found, seen = tried_of(search)
    seen[search.joint] = Seen({"head": Ran("kprof"), "rope": Ran("kprof")}, {"loss": "none"}, 1.0)
    found["loss,rope"] = tried("loss,rope", 0.9, 0.95, 0.97)
    seen["loss,rope"] = Seen({"loss": Ran("kprof"), "rope": Ran("kprof")}, {}, 1.0)
    outcome, joint = search.outcome(found, seen)
    assert set(Choice(tuple(outcome.values()), joint=joint).names) == {"loss=kprof", "rope=kprof"}


class HostLimited(Process):
    """Each kernel saves time of the GPU; with two of them the host limits the step."""

    def share(self, candidate):
        share = super().share(candidate)
        return max(share, 0.97) if "," in candidate else share


def test_kernels_that_pay_alone_but_not_together_are_not_chosen_together(monkeypatch, tmp_path):
    shares = {"adamw=kprof": 0.85, "rmsnorm=kprof": 0.92, "rope=kprof": 0.9, "softmax=kprof": 1.6}
    choice = chosen(monkeypatch, tmp_path, HostLimited(shares))
    (name,) = choice.names
    assert choice.predicted == pytest.approx(shares[name], rel=0.01)


@pytest.mark.parametrize("on_its_way_out", [(), ("leave",), ("leave", "drop")])
def test_a_candidate_that_ends_the_workload_is_left_out_and_the_rest_is_tried(
    monkeypatch, tmp_path, on_its_way_out
):
    process = Process({"rope=kprof": 1.0, "adamw=kprof": 0.5}, "rope=kprof", on_its_way_out)
    choice = chosen(monkeypatch, tmp_path, process)
    # Of the joint swap it is unknown which kernel it was.
    assert process.names == [["rope,adamw"], ["rope=kprof", "adamw=kprof"], ["adamw=kprof"]]
    assert choice.names == ("adamw=kprof",)
    assert "the workload ended" in choice.tried[-1].why


def test_a_workload_that_ends_by_itself_ends_the_choice(monkeypatch, tmp_path):
    def ended(variant, schedule, folder, *, is_enough, why_to_end):
        raise TrialError("A: the workload ended", fix="see", trial=trial_of("A", []))

    with pytest.raises(TrialError):
        chosen(monkeypatch, tmp_path, ended)


def test_where_nothing_pays_the_reasons_are_kept(monkeypatch, tmp_path):
    with pytest.raises(KprofError) as error:
        chosen(monkeypatch, tmp_path, Process({"rope=kprof": 1.1}), budget_s=1.0)
    assert str(tmp_path / "choice.json") in error.value.fix


WITHOUT_RATIO = Tried("rope=kprof")
SLOWER = Tried("rope=kprof", ratio=1.1, low=1.05, high=1.2)
FASTER = Tried("rope=kprof", ratio=0.9, low=0.85, high=0.95)


@pytest.mark.parametrize(
    ("tried", "exit_code"),
    [
        (SLOWER, 1),
        (replace(WITHOUT_RATIO, why="no call"), 1),
        (replace(FASTER, gate="fails"), 1),
        (replace(FASTER, gate=GATE_UNFINISHED), 3),
        (WITHOUT_RATIO, 3),
        (replace(WITHOUT_RATIO, why=NEEDS_GPU), 3),
    ],
)
def test_that_no_kernel_pays_is_an_answer_and_that_none_was_judged_is_none(
    tmp_path, tried, exit_code
):
    error = choose_module._nothing_chosen(Choice((tried,)), tmp_path)
    assert error.exit_code == exit_code


def test_a_choice_tells_the_interval_of_each_change():
    told = []
    choose_module._tell_choice(Choice((FASTER, WITHOUT_RATIO)), told.append)
    assert [part in told[0] for part in ("-10.0", "-15.0", "-5.0")] == [True, True, True]
    assert len(told) == 1


def ends_after(num_steps_of, *, drops=(), why="no call"):
    """Return a stand-in for a workload that ends by itself after so many windows."""

    def run(variant, schedule, folder, *, is_enough, why_to_end):
        log = Path(schedule.patch_arguments[1])
        for name in drops:
            write(log, name, "enter", "drop", why=why)
        windows = [window("AB"[n % 2], n, 100.0) for n in range(num_steps_of)]
        run.is_enough = is_enough(windows)
        return trial_of("A", windows)

    run.shares = {"rope=kprof": 1.0, "adamw=kprof": 1.0}
    return run


@pytest.mark.parametrize(
    ("drops", "says_no_call"),
    [
        (("rope=kprof",), False),
        (("rope,adamw", "rope=kprof"), False),
        (("rope,adamw", "rope=kprof", "adamw=kprof"), True),
    ],
)
def test_no_kernel_has_a_call_only_where_each_was_tried(monkeypatch, tmp_path, drops, says_no_call):
    process = ends_after(3, drops=drops)
    with pytest.raises(KprofError) as error:
        chosen(monkeypatch, tmp_path, process)
    # The choice goes on for the ones that were not tried yet.
    assert process.is_enough is says_no_call
    assert ("kernels list" in error.value.fix) is says_no_call
    # That no kernel has a call is an answer; a workload that ends too early is an error.
    assert error.value.exit_code == (1 if says_no_call else 2)


def test_a_workload_without_a_gpu_is_told_to_run_on_one(monkeypatch, tmp_path):
    drops = ("rope,adamw", "rope=kprof", "adamw=kprof")
    with pytest.raises(KprofError) as error:
        chosen(monkeypatch, tmp_path, ends_after(3, drops=drops, why=NEEDS_GPU))
    assert NEEDS_GPU in error.value.problem
    assert "run it on a GPU" in error.value.fix
    assert error.value.exit_code == 3


def test_steps_that_are_too_long_for_a_choice_are_not_called_too_few(monkeypatch, tmp_path):
    with pytest.raises(KprofError) as error:
        chosen(monkeypatch, tmp_path, ends_after(3), budget_s=-1.0)
    # Nor is the output shown, in which a workload that ended says why.
    assert "output" not in error.value.fix
    assert error.value.exit_code == 3


def test_reasons_found_before_a_crash_are_kept(monkeypatch, tmp_path):
    process = Process({"rope=kprof": 1.0, "adamw=kprof": 0.5, "x=y": 1.0}, ends_with="rope=kprof")

    def run(variant, schedule, folder, *, is_enough, why_to_end):
        log = Path(schedule.patch_arguments[1])
        if "x=y" in schedule.patch_arguments[0].split():
            write(log, "x=y", "enter", "drop")
        return process(variant, schedule, folder, is_enough=is_enough, why_to_end=why_to_end)

    run.shares = process.shares
    choice = chosen(monkeypatch, tmp_path, run)
    assert choice.names == ("adamw=kprof",)
    assert {one.name: one.why for one in choice.tried}["x=y"] == "no call"


def test_a_workload_that_ends_with_no_candidate_in_is_no_candidates_fault(monkeypatch, tmp_path):
    process = Process({"rope=kprof": 1.0, "adamw=kprof": 0.5}, "rope=kprof", ("drop",))
    with pytest.raises(TrialError):
        chosen(monkeypatch, tmp_path, process)
    assert len(process.names) == 1


def found_after_calls(folder, **options):
    log = log_of(folder / "log", *(("rope=kprof", n) for n in range(1, 41, 2)), **options)
    windows = [window("AB"[n % 2], n, 90.0 if n % 2 else 100.0) for n in range(41)]
    return tried_in(windows, log, is_end=True)["rope=kprof"]


def test_windows_in_which_nothing_was_replaced_are_none_of_the_kernel(tmp_path):
    # As where each epoch has a new model.
    found = found_after_calls(tmp_path, last_call_s=9)
    assert (found.ratio, found.num_windows) == (None, 0)
    assert found.why == choose_module.NO_MORE_CALLS


@pytest.mark.parametrize("options", [{}, {"last_call_s": 0, "num_compiled": 1}])
def test_calls_in_compiled_graphs_are_not_counted_and_count(tmp_path, options):
    found = found_after_calls(tmp_path, **options)
    assert (found.is_faster, found.why) == (True, "")


def test_ranks_that_share_a_log_are_one_workload(tmp_path):
    turns = [("rope=kprof", n) for n in range(1, 41, 2) for _ in range(8)]
    log = log_of(tmp_path / "log", *turns)
    windows = [window("AB"[n % 2], n, 90.0 if n % 2 else 100.0) for n in range(41)]
    assert tried_in(windows, log, is_end=True)["rope=kprof"].is_faster


def test_where_calls_end_the_reason_is_kept(monkeypatch, tmp_path):
    def run(variant, schedule, folder, *, is_enough, why_to_end):
        log = Path(schedule.patch_arguments[1])
        log_of(log, *(("rope=kprof", n) for n in range(1, 41, 2)), last_call_s=9)
        windows = [window("AB"[n % 2], n, 100.0) for n in range(41)]
        assert is_enough(windows)
        return trial_of("A", windows)

    with pytest.raises(KprofError) as error:
        chosen(monkeypatch, tmp_path, run)
    assert str(tmp_path / "choice.json") in error.value.fix
    (told,) = json.loads((tmp_path / "choice.json").read_text())["tried"]
    assert told["why"] == choose_module.NO_MORE_CALLS


def test_reasons_are_kept_where_the_workload_ends_before_any_is_timed(monkeypatch, tmp_path):
    with pytest.raises(KprofError):
        chosen(monkeypatch, tmp_path, ends_after(3, drops=["rope=kprof"]))
    assert reasons_in(tmp_path)["rope=kprof"] == "no call"


class Watched(Process):
    """A process in which a candidate has faults that the trial itself looks for."""

    def __init__(self, shares, name, *lines):
        super().__init__(shares)
        self.name, self.lines = name, lines

    def __call__(self, variant, schedule, folder, *, is_enough, why_to_end):
        first = schedule.patch_arguments[0].split()
        if self.name in (self.named(part) for name in first for part in name.split(",")):
            self.names.append(first)
            with Path(schedule.patch_arguments[1]).open("a") as file:
                for line in self.lines:
                    file.write(json.dumps({"name": first[0], "time_ns": 0, **line}) + "\n")
            why = why_to_end()
            assert why
            raise TrialError(f"B: {why}", fix="see", trial=trial_of("A", []), arm="B")
        return super().__call__(variant, schedule, folder, is_enough=is_enough)


ENTER, LEAVE = {"event": "enter"}, {"event": "leave", "num_calls": 3, "num_compiled": 0}
LEAVE["ran"] = {"rope": {"provider": "kprof"}, "adamw": {"provider": "kprof"}}
SPOILT = {"event": "drop", "why": "no numbers", "is_spoilt": True, "kernel": "rope"}
JOINT, ALONE, OTHER = ["rope,adamw"], ["rope=kprof", "adamw=kprof"], ["adamw=kprof"]


@pytest.mark.parametrize(
    ("lines", "why", "begun"),
    [
        ([ENTER], "no window ended", [JOINT, ALONE, OTHER]),
        # The log says which kernel of the joint swap it is.
        ([ENTER, LEAVE, SPOILT], "no numbers", [JOINT, OTHER]),
    ],
)
def test_one_that_hangs_or_spoils_results_is_left_out_and_the_rest_is_tried(
    monkeypatch, tmp_path, lines, why, begun
):
    process = Watched({"rope=kprof": 1.0, "adamw=kprof": 0.5}, "rope=kprof", *lines)
    choice = chosen(monkeypatch, tmp_path, process)
    assert process.names == begun
    assert choice.names == ("adamw=kprof",)
    assert why in reasons_in(tmp_path)["rope=kprof"]


def test_a_candidate_that_is_out_does_not_hang_however_long_nothing_happens(tmp_path):
    log = log_of(tmp_path / "log", ("rope=kprof", 1))
    look = choose_module.Look(log, Search(["rope=kprof"]), 60.0, lambda message: None)
    assert look.why_to_end() == ""


def test_of_a_kernel_the_next_provider_is_taken_where_the_gate_is_against_the_fastest(
    monkeypatch, tmp_path
):
    shares = {"rmsnorm=aten": 0.8, "rmsnorm=kprof": 0.9, "rope=kprof": 0.7, "adamw=kprof": 1.1}
    process, judged = Process(shares), []

    def judge(place, end_s, one):
        judged.append(one.name)
        return Checked("fails" if one.name in ("rmsnorm=aten", "rope=kprof") else GATE_PASSED)

    choice = chosen(monkeypatch, tmp_path, process, judge=judge)
    assert choice.names == ("rmsnorm=kprof",)
    assert choice.predicted == pytest.approx(0.9, rel=0.01)
    # Those that do not pay are not judged.
    assert sorted(judged) == ["rmsnorm=aten", "rmsnorm=kprof", "rope=kprof"]
    timed = section_of_choice(choice, None).parts[1]
    assert ["fails" in row[-1] for row in timed.rows] == [True, True, False, False]


def test_a_candidate_is_judged_in_a_process_that_may_hang_or_die(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = Tried("rope=kprof", sorts=(CallSort((4, 8), "float32", False),))
    end_s = time.monotonic() + 60
    # No module of that name: the process dies without an outcome.
    monkeypatch.setattr(choose_module, "GATE", "no.such.module")
    assert choose_module._judge(tmp_path, end_s, one).outcome not in ("", GATE_PASSED)
    assert choose_module._judge(tmp_path, 0.0, one) == Checked(GATE_UNFINISHED)
    # Neither is kept; an outcome is, for the same calls.
    facts = {"name": one.name, "sorts": json.dumps([asdict(sort) for sort in one.sorts])}
    kept = Checked("fails", {"levels": []})
    keep_gate({**facts, **facts_of_machine(os.environ)}, kept)
    assert choose_module._judge(tmp_path, 0.0, one) == kept
    assert choose_module._judge(tmp_path, 0.0, replace(one, sorts=())) != kept


def kept_twice(monkeypatch, folder, process, change=lambda script: None, judge=passing, **options):
    """Return the choices of two commands for one script, which may change between them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(choose_module, "run_trial", process)
    monkeypatch.setattr(choose_module, "_judge", judge)
    monkeypatch.setattr(choose_module, "_all_names", lambda: list(process.shares))
    script, found = folder / "train.py", []
    script.write_text("import torch")
    for number, more in enumerate(({}, options)):
        out = folder / str(number)
        (out / "raw").mkdir(parents=True)
        asked = AbOptions((str(script),), swap="auto", **more)
        a = Variant("A", ("python", str(script), "--fast"))
        found.append(choose_module.chosen(a, asked, out, out / "raw", lambda message: None))
        change(script)
    return found


def test_a_choice_is_used_again_for_the_same_code(monkeypatch, tmp_path):
    process = Process({"rope=kprof": 0.9})
    first, second = kept_twice(monkeypatch, tmp_path, process)
    assert len(process.names) == 1
    assert (first.names, second.names) == (("rope=kprof",), ("rope=kprof",))
    assert (first.made, bool(second.made)) == ("", True)
    assert reasons_in(tmp_path / "1") == {"rope=kprof": ""}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda script: script.write_text("import torch, numpy"), {}),
        (lambda script: script.with_name("model.py").write_text("import torch"), {}),
        (lambda script: None, {"budget_s": 30.0}),
    ],
)
def test_kernels_are_chosen_anew_for_other_code_and_with_a_budget(
    monkeypatch, tmp_path, change, options
):
    process = Process({"rope=kprof": 0.9})
    kept_twice(monkeypatch, tmp_path, process, change, **options)
    assert len(process.names) == 2


def test_that_no_kernel_pays_is_known_the_second_time(monkeypatch, tmp_path):
    process = Process({"rope=kprof": 1.1})
    for number in ("a", "b"):
        (tmp_path / number).mkdir()
        with pytest.raises(NothingPaysError):
            kept_twice(monkeypatch, tmp_path, process) if number == "a" else again(tmp_path)
    assert len(process.names) == 1


def test_that_no_kernel_has_a_call_is_known_the_second_time(monkeypatch, tmp_path):
    process = ends_after(3, drops=("rope,adamw", "rope=kprof", "adamw=kprof"))
    for number in ("a", "b"):
        (tmp_path / number).mkdir()
        with pytest.raises(NothingPaysError) as error:
            kept_twice(monkeypatch, tmp_path, process) if number == "a" else again(tmp_path)
        assert error.value.exit_code == 1


def again(folder):
    out = folder / "again"
    (out / "raw").mkdir(parents=True)
    a = Variant("A", ("python", str(folder / "train.py"), "--fast"))
    asked = AbOptions((str(folder / "train.py"),), swap="auto")
    return choose_module.chosen(a, asked, out, out / "raw", lambda message: None)


def test_a_kernel_that_the_gate_had_no_time_for_is_not_known_the_second_time(monkeypatch, tmp_path):
    process = Process({"rope=kprof": 0.9})
    outcomes = iter([Checked(GATE_UNFINISHED), Checked(GATE_PASSED)])
    with pytest.raises(NothingPaysError) as error:
        kept_twice(monkeypatch, tmp_path, process, judge=lambda *of: next(outcomes))
    assert "--budget" in error.value.fix
    monkeypatch.setattr(choose_module, "_judge", lambda *of: next(outcomes))
    assert again(tmp_path).names == ("rope=kprof",)


@pytest.mark.parametrize(
    ("window_s", "silent_s", "hangs"),
    [(1.0, 110, False), (1.0, 130, True), (10.0, 190, False), (10.0, 210, True)],
)
def test_a_candidate_hangs_after_two_minutes_and_after_twenty_windows(
    tmp_path, window_s, silent_s, hangs
):
    log, now_ns = tmp_path / "log", time.time_ns()
    log.write_text(
        json.dumps({"event": "enter", "name": "rope=kprof", "time_ns": now_ns - silent_s * 10**9})
        + "\n"
    )
    look = choose_module.Look(log, Search(["rope=kprof"]), 60.0, lambda message: None)
    longest, short = (
        replace(window("A", 1, 10**6), start_ns=now_ns, end_ns=now_ns + round(s * 1e9))
        for s in (window_s, 0.1)
    )
    look.is_enough([longest, short])
    assert bool(look.why_to_end()) == hangs


def test_a_choice_ends_when_its_budget_is_spent_and_tells_the_time_every_ten_seconds(
    tmp_path, monkeypatch
):
    now_s, told, enough = [0.0], [], []
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)
    monkeypatch.setattr(choose_module, "time", clock)
    log = log_of(tmp_path / "log", ("rope=kprof", 1))
    look = choose_module.Look(log, Search(["rope=kprof", "adamw=kprof"]), 60.0, told.append)
    windows = [window("A", n, 10**6) for n in range(3)]
    for now_s[0] in (100.0, 105.0, 111.0, 120.0, 159.0, 161.0):
        enough.append(look.is_enough(windows))
    assert enough == [False] * 5 + [True]
    # The last window is one of the base.
    assert not look.is_enough(windows[:2])
    assert [quantities_in(one)[-2:] for one in told] == [["11", "60 s"], ["59", "60 s"]]
