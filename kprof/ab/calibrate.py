"""`kprof selftest`: the error rates of verdicts, on simulated noise or on this machine.

On the machine, work is slowed down by known amounts: by more bytes, or by a spin. Each machine,
its GPU or its host, keeps its last result, which every later comparison quotes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np

from kprof.ab.disturbance import disturbance
from kprof.analyze.calibration.error_rates import (
    EFFECTS,
    SCHEMA,
    Calibration,
    Scenario,
    targets_on_a_machine,
)
from kprof.analyze.calibration.simulate import Each, Orders, arms_of, simulate
from kprof.analyze.calibration.tally import Known, look_at_all, scenario_of
from kprof.analyze.verdict.ranks import Floats
from kprof.analyze.verdict.rule import Levels, levels_of
from kprof.collect.nvml import Nvml, describe_devices, visible_devices
from kprof.comparison import Metric, Pair, Plan
from kprof.errors import KprofError
from kprof.findings import Caveat, with_ids
from kprof.report.calibration import badge_of, describe, result_of_calibration
from kprof.report.section import Part, Text
from kprof.storage import cache_folder
from kprof.timing import (
    Conditions,
    GpuStopwatch,
    Stopwatch,
    WallStopwatch,
    Work,
    stopwatch_for,
    take_pairs,
    warm_up,
)

Tell = Callable[[str], None]
Show = Callable[[str, Floats], None]


def show_nothing(name: str, samples: Floats) -> None:
    """Leave the samples alone."""


def simulate_noise(
    num_comparisons: int, num_pairs: int, seed: int, each: Each = map
) -> Calibration:
    """Judge comparisons of simulated noise, whose truth is known."""
    return simulate(num_comparisons, num_pairs, seed, _today(), each)


def _today() -> str:
    return datetime.now(tz=timezone.utc).date().isoformat()


def calibrate(
    num_comparisons: int | None,
    num_pairs: int,
    seed: int,
    tell: Tell,
    *,
    quick: bool = False,
    show: Show = show_nothing,
) -> Iterator[Calibration]:
    """Judge comparisons taken on this machine: on the GPU at hand, else on the host's clock.

    Yield what is known after every stage, the last time with all of them. What has not been
    taken, or not been possible, is in `missing`.
    """
    number = num_comparisons or (QUICK_COMPARISONS if quick else COMPARISONS)
    begin_s = time.monotonic()
    machine, doubts = _usable_machine()
    plan = Plan((Metric("time per call", "ns"),), max_pairs=num_pairs, seed=seed)
    tell("planting slow-downs of a known size")
    stages = _stages(gpu_knobs() if machine.kind == "gpu" else host_knobs(), number)
    bench = _Bench(machine, plan, Random(seed), tell, show)
    for position, stage in enumerate(stages, 1):
        tell(f"stage {position} of {len(stages)}: {stage.title}: {stage.number} comparisons")
        bench.run(stage)
        scenarios = bench.scenarios()
        yield Calibration(
            kind=machine.kind,
            device=machine.name,
            driver=machine.driver,
            date=_today(),
            num_pairs=num_pairs,
            num_comparisons=number,
            seed=seed,
            smallest_effect=plan.smallest_effect,
            alpha=plan.alpha,
            scenarios=scenarios,
            targets=targets_on_a_machine(scenarios),
            took_s=time.monotonic() - begin_s,
            doubts=(*doubts, *bench.doubts),
            missing=tuple(stage.title for stage in stages if stage not in bench.found),
        )


def _usable_machine() -> tuple[Machine, list[Caveat]]:
    """Return the GPU, or the host where there is none that torch can use, and says so."""
    machine = this_machine()
    if machine.kind == "host":
        told = "There is no GPU: this is the host's clock, which says nothing of one."
        return machine, [Caveat("host_clock", told)]
    try:
        import torch
    except ImportError:
        why = "torch is not installed"
    else:
        if torch.cuda.is_available():
            return machine, []
        why = f"torch {torch.__version__} cannot use it"
    told = f"There is a GPU, but {why}: this is the host's clock."
    return this_host(), [Caveat("host_clock", told)]


@dataclass(frozen=True)
class Machine:
    """The machine and settings for which a calibration is valid."""

    kind: Literal["gpu", "host"]
    name: str
    driver: str | None


# Large enough that what a call costs beside its bytes is lost in them.
HOST_BYTES = 256 << 10
GPU_BYTES = 256 << 20
VECTOR_BYTES, FLOAT_BYTES = 512, 4
SPIN_CYCLES = (2_000, 100_000)
CALIBRATION_SAMPLES = 200


@dataclass(frozen=True)
class Knob:
    """A way to make work slower: `work(effect)` takes 1 + effect times as long as `work(0)`."""

    name: str
    says: str
    work: Callable[[float], Work]


COMPARISONS, QUICK_COMPARISONS = 400, 100
# One comparison of each effect for so many without one.
PART_WITH_EFFECT = 4
SAMPLE_NS = 1e6
WARM_UP_S = 1.0
RAMP_S = 4.0
CO_TENANT_DUTY = 0.3
# A stage ends after so long with the comparisons that it has: one without an effect, undisturbed,
# and any other.
LONGEST_SAME_S, LONGEST_S = 120.0, 40.0
TELL_EVERY_S = 10.0


"""Gets a scenario's name and the logs of its samples of one work in time, a row a comparison."""


@dataclass(frozen=True)
class _Stage:
    """So many comparisons of a work with itself, or with itself made slower."""

    name: str
    """The scenario that it is a part of."""
    says: str
    knob: Knob
    number: int
    effect: float = 0.0
    duty: tuple[float, float] | None = None
    """For what share of the time others are in the way, as in `disturbance`."""

    @property
    def title(self) -> str:
        """The work of this part, in a few words."""
        what = f"{100 * self.effect:g} % slower" if self.effect else "the same twice"
        return f"{self.name}, {what}"

    @property
    def longest_s(self) -> float:
        """When it ends, with the comparisons that it has by then."""
        return LONGEST_S if self.effect or self.duty else LONGEST_SAME_S


class _Bench:
    """Takes comparisons of work whose truth is known, one after the other."""

    def __init__(
        self, machine: Machine, plan: Plan, order: Random, tell: Tell, show: Show = show_nothing
    ) -> None:
        self._machine, self._plan, self._order = machine, plan, order
        self._tell, self._show = tell, show
        self._levels: Levels = levels_of(plan)
        self._stopwatch: Stopwatch = stopwatch_for("gpu" if machine.kind == "gpu" else "wall")
        self.found: dict[_Stage, Known] = {}
        self.doubts: list[Caveat] = []

    def run(self, stage: _Stage) -> None:
        """Take a stage's comparisons; one that cannot be taken is found nowhere, and told."""
        try:
            with _others(self._machine, stage):
                samples, orders = self._take(stage)
        except KprofError as error:
            self._doubt("stage_failed", f"{stage.title}: {error.problem}.")
            return
        if len(samples) < stage.number:
            self._doubt(
                "stage_cut_short",
                f"{stage.title}: {len(samples)} of {stage.number} comparisons ended within the "
                f"{stage.longest_s:g} s that they may take.",
            )
        if not len(samples):
            return
        a, b = arms_of(samples, orders)
        truth = self._truth_of(b - a, stage.effect, stage.name) if stage.effect else 0.0
        self.found[stage] = Known(stage.effect, truth, a, b, orders)
        if not stage.effect:
            self._show(stage.name, samples)

    def _doubt(self, about: str, text: str) -> None:
        self.doubts.append(Caveat(about, text))

    def scenarios(self) -> tuple[Scenario, ...]:
        """Return what is known of each scenario whose comparisons without an effect are there."""
        return tuple(
            scenario_of(
                first.name,
                first.says,
                [known for stage, known in self.found.items() if stage.name == first.name],
                self._levels,
            )
            for first in self.found
            if not first.effect
        )

    def _take(self, stage: _Stage) -> tuple[Floats, Orders]:
        """Return the logs of all samples in time, a row a comparison, and which were of A first."""
        begin_s = time.monotonic()
        a, b = stage.knob.work(0.0), stage.knob.work(stage.effect)
        num_calls = warm_up((a, b), self._stopwatch, WARM_UP_S, SAMPLE_NS).num_calls
        pairs = take_pairs(a, b, self._stopwatch, num_calls, self._order, Conditions)
        taken = list(self._until_done(pairs, stage, begin_s))
        if self._stopwatch.num_exposed:
            self._doubt(
                "launches_in_time",
                f"{stage.title}: the GPU waited for launches in {self._stopwatch.num_exposed} "
                "samples, so that they are part of the time.",
            )
            self._stopwatch.num_exposed = 0
        number = len(taken) // self._plan.max_pairs
        whole = taken[: number * self._plan.max_pairs]
        in_time = [(p.a[0], p.b[0]) if p.is_a_first else (p.b[0], p.a[0]) for p in whole]
        orders = np.array([pair.is_a_first for pair in whole], dtype=bool)
        samples = np.log(np.array(in_time, dtype=float))
        return (
            samples.reshape(number, 2 * self._plan.max_pairs),
            orders.reshape(number, self._plan.max_pairs),
        )

    def _until_done(self, pairs: Iterator[Pair], stage: _Stage, begin_s: float) -> Iterator[Pair]:
        """Pass on the pairs of a stage, as many as it is to have or has time for."""
        told_s = begin_s
        for taken, pair in enumerate(islice(pairs, stage.number * self._plan.max_pairs), 1):
            yield pair
            now_s = time.monotonic()
            if now_s - begin_s > stage.longest_s:
                return
            if now_s - told_s > TELL_EVERY_S:
                told_s = now_s
                done = taken // self._plan.max_pairs
                self._tell(f"{done} of {stage.number} comparisons, {now_s - begin_s:.0f} s")

    def _truth_of(self, taken: Floats, effect: float, name: str) -> float:
        """Return the slow-down that was there, from all comparisons of it together."""
        truth = float(np.median(look_at_all(taken, self._levels).estimate))
        if abs(np.expm1(truth) / effect - 1) > 0.2:
            self._doubt(
                "planted_otherwise",
                f"{name}: {100 * effect:g} % were planted and {100 * np.expm1(truth):.2f} % came.",
            )
        return truth


UNKNOWN = "How often such verdicts err on this machine is not known yet: run kprof selftest."


def this_machine() -> Machine:
    """Return the first GPU that programs see, else the host's processor."""
    nvml = Nvml()
    try:
        devices = describe_devices(nvml)
        for index in visible_devices(devices, os.environ)[:1]:
            device = next(d for d in devices if d["index"] == index)
            return Machine("gpu", str(device.get("name")), str(device.get("driver")))
    finally:
        nvml.close()
    return this_host()


def this_host() -> Machine:
    """Return the host's processor."""
    return Machine("host", processor(), None)


def processor() -> str:
    """Return the model of the host's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _stages(knobs: Sequence[Knob], number: int) -> list[_Stage]:
    """Return what there is to do, each scenario's comparisons without an effect first."""
    part = max(number // PART_WITH_EFFECT, 1)
    stages = []
    for knob in knobs:
        stages.append(_Stage(knob.name, knob.says, knob, number))
        stages += [_Stage(knob.name, knob.says, knob, part, effect) for effect in EFFECTS]
    share = CO_TENANT_DUTY
    often = f"others busy {100 * share:g} % of the time"
    rising = f"others busy 0 to 100 % of the time, every {RAMP_S:g} s"
    return [
        *stages,
        _Stage("co-tenant", often, knobs[0], part, duty=(share, share)),
        _Stage("ramp", rising, knobs[0], part, duty=(0.0, 1.0)),
    ]


def gpu_knobs() -> tuple[Knob, ...]:
    """Return the GPU's: so many bytes more, and as many followed by a longer spin."""
    import torch

    source: Any = torch.zeros(2 * GPU_BYTES // FLOAT_BYTES, device="cuda")
    target: Any = torch.empty_like(source)

    def negate(num_bytes: int) -> None:
        # Whole vector loads only, and a kernel of torch's: the driver's own copy took 1.8 % more
        # on an H200 as soon as it was any larger than 256 MiB.
        whole = num_bytes // VECTOR_BYTES * VECTOR_BYTES // FLOAT_BYTES
        torch.neg(source[:whole], out=target[:whole])

    def negate_and_spin(num_cycles: int) -> None:
        negate(GPU_BYTES)
        torch.cuda._sleep(num_cycles)

    stopwatch = GpuStopwatch()
    more_bytes = _calibrated(negate, (GPU_BYTES, 2 * GPU_BYTES), stopwatch)
    longer_spin = _calibrated(negate_and_spin, SPIN_CYCLES, stopwatch)
    return (
        Knob("more bytes", "256 MiB read, negated and written, and so much more", more_bytes),
        Knob("longer spin", "256 MiB negated, then a spin so much longer", longer_spin),
    )


def _calibrated(
    run: Callable[[int], None], amounts: tuple[int, int], stopwatch: Stopwatch
) -> Callable[[float], Work]:
    """Return what makes the work of an effect, from the times of two amounts of it.

    A call costs something beside its amount, so time does not grow in proportion to that.
    """
    base, more = amounts
    works = partial(run, base), partial(run, more)
    num_calls = warm_up(works, stopwatch, WARM_UP_S, SAMPLE_NS).num_calls
    # In turns, so that a drifting clock takes part in both.
    times = [
        [stopwatch.time(work, num_calls) for work in works] for _ in range(CALIBRATION_SAMPLES)
    ]
    base_ns, more_ns = (float(value) for value in np.median(np.array(times), axis=0))
    if more_ns <= base_ns:
        raise KprofError(
            f"{more} of the work took no longer than {base}, so no slow-down can be planted",
            fix="stop other work on the GPU and the host, then measure again",
        )
    amount_as_long = base_ns * (more - base) / (more_ns - base_ns)
    return lambda effect: partial(run, base + round(effect * amount_as_long))


def host_knobs() -> tuple[Knob, ...]:
    """Return the host's: a checksum of so many bytes more."""
    data = memoryview(np.random.default_rng(0).bytes(2 * HOST_BYTES))

    def checksum(num_bytes: int) -> None:
        hashlib.sha256(data[:num_bytes])

    work = _calibrated(checksum, (HOST_BYTES, 2 * HOST_BYTES), WallStopwatch())
    return (Knob("more bytes", "SHA-256 of 256 KiB, and of so much more", work),)


def describe_calibration(found: Calibration | None) -> str:
    """Return the sentence on how often verdicts err on this machine, for the reports."""
    return UNKNOWN if found is None else describe(found)


def parts_of_calibration(found: Calibration | None) -> tuple[Part, ...]:
    """Return what stands of it beside a verdict."""
    if found is None:
        return (Text(UNKNOWN, "warning"),)
    return (badge_of(found), Text(describe(found), "muted"))


def doubt_resolution(found: Calibration | None, plan: Plan) -> str:
    """Say where this machine cannot see the least effect that matters; nothing where it can."""
    if found is None or found.device != this_machine().name:
        return ""
    least = found.least_found
    if least is None or least <= plan.smallest_effect:
        return ""
    return (
        f"On this machine {found.num_pairs} pairs find only differences from {100 * least:.2g} % "
        f"on, and {100 * plan.smallest_effect:g} % matters: smaller ones mostly end "
        "INCONCLUSIVE."
    )


def last_calibration() -> Calibration | None:
    """Return the latest calibration of this GPU and driver, else of this host, else None."""
    return _read(this_machine()) or _read(this_host())


def _read(machine: Machine) -> Calibration | None:
    path = _path_for(machine)
    try:
        if path is None:
            return None
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = msgspec.convert(with_ids(content, "doubts"), type=Calibration)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.schema == SCHEMA else None


def _path_for(machine: Machine) -> Path | None:
    folder = cache_folder()
    text = f"{machine.name} {machine.driver or ''}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
    return folder / "calibration" / f"{name}.json" if folder else None


def json_of(calibration: Calibration) -> bytes:
    """Return the calibration as indented JSON, the worst rates on top."""
    return msgspec.json.format(msgspec.json.encode(result_of_calibration(calibration)))


def keep(calibration: Calibration, *, is_complete: bool = True) -> Path | None:
    """Keep a calibration for later reports, or beside it one that is not complete yet.

    Return where; None without a home folder, or where nothing can be written.
    """
    machine = Machine(calibration.kind, calibration.device, calibration.driver)  # type: ignore[arg-type]
    path = _path_for(machine)
    if path is None:
        return None
    unfinished = path.with_suffix(".unfinished.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
        partial.replace(path if is_complete else unfinished)
        if is_complete:
            unfinished.unlink(missing_ok=True)
    except OSError:
        return None
    return path if is_complete else unfinished


def _others(machine: Machine, stage: _Stage) -> AbstractContextManager[None]:
    if stage.duty is None:
        return nullcontext()
    return disturbance(machine.kind, stage.duty, RAMP_S)
