"""Comparisons whose processes are stood in for: how long each window takes is what a test says."""

import json
from dataclasses import replace
from pathlib import Path

from kprof import comparison
from kprof.ab import in_process, processes
from kprof.collect.trials import Trial, Window


def script_in(folder, monkeypatch):
    """Work in this empty folder, put a script and a patch there, and return the script's path."""
    monkeypatch.chdir(folder)
    (folder / "patch.py").touch()
    path = folder / "train.py"
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
    device_name = None

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
        trial = trial_of(variant.label, windows)
        return replace(trial, why_no_energy=self.why, device_name=self.device_name)


def stand_in(monkeypatch, *rest, **more):
    workload = Workload(*rest, **more)
    monkeypatch.setattr(in_process, "run_trial", workload)
    monkeypatch.setattr(processes, "run_trial", workload)
    return workload


def kept(script):
    """Return what the folder of a script's comparison holds of it."""
    return json.loads((Path(script).with_name("train-ab.kprof") / "comparison.json").read_bytes())
