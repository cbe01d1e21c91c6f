"""`kprof selftest`: how often verdicts are right, on simulated noise and on this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from kprof.analyze.calibration.result import EFFECTS, SCHEMA, Calibration, Scenario
from kprof.analyze.calibration.simulate import simulate
from kprof.analyze.calibration.tally import Known, look_at_all, scenario_of
from kprof.analyze.calibration.targets import targets_on_a_machine
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.cache import cache_folder
from kprof.collect.disturbance import disturbance
from kprof.collect.known_effects import Knob, gpu_knobs, host_knobs
from kprof.collect.machine import Machine, this_host, this_machine
from kprof.comparison import Metric, Plan
from kprof.report.calibration import describe, result_of_calibration
from kprof.stopwatch import Stopwatch, stopwatch_for
from kprof.timing import Conditions, take_pairs, warm_up

COMPARISONS, QUICK_COMPARISONS = 400, 100
# Of each effect, a part of those without one.
PART_WITH_EFFECT = 4
SAMPLE_NS = 1e6
WARM_UP_S = 1.0
RAMP_S = 4.0
CO_TENANT_DUTY = 0.3

Tell = Callable[[str], None]


def simulate_noise(num_comparisons: int, num_pairs: int, seed: int) -> Calibration:
    """Judge comparisons of simulated noise, whose truth is known."""
    return simulate(num_comparisons, num_pairs, seed, _today())


def calibrate(
    num_comparisons: int | None, num_pairs: int, seed: int, tell: Tell, *, quick: bool = False
) -> tuple[Calibration, Path | None]:
    """Judge comparisons taken on this machine, and keep what was found for later reports.

    On the GPU that is at hand, else on the host's clock. Return also where it is kept.
    """
    number = num_comparisons or (QUICK_COMPARISONS if quick else COMPARISONS)
    begin_s = time.monotonic()
    machine, doubts = _usable_machine()
    plan = Plan((Metric("time per call", "ns"),), max_pairs=num_pairs, seed=seed)
    knobs = gpu_knobs() if machine.kind == "gpu" else host_knobs()
    bench = _Bench(machine, plan, Random(seed), tell)
    scenarios = [bench.with_effects(knob, number) for knob in knobs]
    scenarios += bench.disturbed(knobs[0], max(number // PART_WITH_EFFECT, 1))
    found = Calibration(
        kind=machine.kind,
        device=machine.name,
        driver=machine.driver,
        date=_today(),
        num_pairs=num_pairs,
        num_comparisons=number,
        seed=seed,
        smallest_effect=plan.smallest_effect,
        alpha=plan.alpha,
        scenarios=tuple(scenarios),
        targets=targets_on_a_machine(scenarios),
        took_s=time.monotonic() - begin_s,
        doubts=(*doubts, *bench.doubts),
    )
    return found, _keep(found)


def _usable_machine() -> tuple[Machine, list[str]]:
    """Return the GPU, or the host where there is none that torch can use, and says so."""
    machine = this_machine()
    if machine.kind == "host":
        return machine, ["There is no GPU: this is the host's clock, which says nothing of one."]
    try:
        import torch
    except ImportError:
        why = "torch is not installed"
    else:
        if torch.cuda.is_available():
            return machine, []
        why = f"torch {torch.__version__} cannot use it"
    return this_host(), [f"There is a GPU, but {why}: this is the host's clock."]


class _Bench:
    """Takes comparisons of work whose truth is known, one after the other."""

    def __init__(self, machine: Machine, plan: Plan, order: Random, tell: Tell) -> None:
        self._machine, self._plan, self._order, self._tell = machine, plan, order, tell
        self._levels: Levels = levels_of(plan)
        self._stopwatch: Stopwatch = stopwatch_for("gpu" if machine.kind == "gpu" else "wall")
        self.doubts: list[str] = []

    def with_effects(self, knob: Knob, number: int) -> Scenario:
        """Return what became of work that is the same, and of work that is slower."""
        found = [Known(0.0, 0.0, self._take(knob, 0.0, number, knob.name))]
        for effect in EFFECTS:
            taken = self._take(knob, effect, max(number // PART_WITH_EFFECT, 1), knob.name)
            truth = self._truth_of(taken, effect, knob.name)
            found.append(Known(effect, truth, taken))
        return scenario_of(knob.name, knob.says, found, self._levels, {})

    def disturbed(self, knob: Knob, number: int) -> list[Scenario]:
        """Return what became of work that is the same while others are in the way."""
        share = CO_TENANT_DUTY
        ways = (
            ("co-tenant", f"others busy {100 * share:g} % of the time", (share, share)),
            ("ramp", f"others busy 0 to 100 % of the time, every {RAMP_S:g} s", (0.0, 1.0)),
        )
        found = []
        for name, says, duty in ways:
            with disturbance(self._machine.kind, duty, RAMP_S):
                none = [Known(0.0, 0.0, self._take(knob, 0.0, number, name))]
            found.append(scenario_of(name, says, none, self._levels, {}))
        return found

    def _take(self, knob: Knob, effect: float, number: int, name: str) -> Floats:
        """Return the log ratios of so many comparisons, a row each."""
        what = f"{100 * effect:g} % slower" if effect else "the same twice"
        self._tell(f"{name}, {what}: {number} comparisons of {self._plan.max_pairs} pairs")
        a, b = knob.work(0.0), knob.work(effect)
        num_calls = warm_up((a, b), self._stopwatch, WARM_UP_S, SAMPLE_NS).num_calls
        pairs = take_pairs(a, b, self._stopwatch, num_calls, self._order, Conditions)
        values = [(pair.a[0], pair.b[0]) for pair in islice(pairs, number * self._plan.max_pairs)]
        if self._stopwatch.num_exposed:
            self.doubts.append(
                f"{name}, {what}: the GPU waited for launches in {self._stopwatch.num_exposed} "
                "samples, so that they are part of the time."
            )
            self._stopwatch.num_exposed = 0
        logs = np.log(np.array(values))
        return np.asarray((logs[:, 1] - logs[:, 0]).reshape(number, -1))

    def _truth_of(self, taken: Floats, effect: float, name: str) -> float:
        """Return the slow-down that was there, from all comparisons of it together."""
        truth = float(np.median(look_at_all(taken, self._levels).estimate))
        if abs(np.expm1(truth) / effect - 1) > 0.2:
            self.doubts.append(
                f"{name}: {100 * effect:g} % were planted and {100 * np.expm1(truth):.2f} % came."
            )
        return truth


def describe_calibration() -> str:
    """Return the sentence on how often verdicts err on this machine, for the reports."""
    found = last_calibration()
    if found is None:
        return "How often such verdicts err on this machine is not known yet: run kprof selftest."
    return describe(found)


def last_calibration() -> Calibration | None:
    """Return the latest calibration of this GPU and driver, else of this host, else None."""
    return _read(this_machine()) or _read(this_host())


def _read(machine: Machine) -> Calibration | None:
    path = _path_for(machine)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration) if path else None
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found is not None and found.schema == SCHEMA else None


def json_of(calibration: Calibration) -> bytes:
    """Return the calibration as indented JSON, the worst rates on top."""
    return msgspec.json.format(msgspec.json.encode(result_of_calibration(calibration)))


def _keep(calibration: Calibration) -> Path | None:
    machine = Machine(calibration.kind, calibration.device, calibration.driver)  # type: ignore[arg-type]
    path = _path_for(machine)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
        partial.replace(path)
    except OSError:
        return None
    return path


def _path_for(machine: Machine) -> Path | None:
    folder = cache_folder()
    text = f"{machine.name} {machine.driver or ''}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
    return folder / "calibration" / f"{name}.json" if folder else None


def _today() -> str:
    return datetime.now(tz=timezone.utc).date().isoformat()
