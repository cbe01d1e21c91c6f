"""Runs a variant of a workload and times windows of its steps: one process, no profiler."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from kprof.collect.inject.kprof_recorder.schedule import Schedule
from kprof.collect.inject.kprof_recorder.settings import Settings
from kprof.collect.launch import LOOK_S, injecting
from kprof.collect.nvml import Sampler
from kprof.collect.processes import Workload
from kprof.collect.samples import read_with_processes
from kprof.collect.stepenergy import energy_of
from kprof.collect.windows import Sheets, Timed, Window
from kprof.errors import KprofError, LaunchError

__all__ = [
    "Schedule",
    "Trial",
    "TrialError",
    "TrialInterrupted",
    "Variant",
    "Window",
    "run_trial",
]

LOG = "output.log"
NUM_LAST_LINES = 15
RAW = "KPROF_RAW"


@dataclass(frozen=True)
class Variant:
    """One of the two that are compared: what to run, and how it differs, in words."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to kprof's own environment."""
    difference: str = ""

    @property
    def line(self) -> str:
        """What one types to run it: its variables, then its command."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*added, shlex.join(self.command)])


@dataclass(frozen=True)
class Trial:
    """What came of one process."""

    label: str
    windows: tuple[Window, ...]
    """Of rank 0; empty where the workload has no steps."""
    wall_ns: int
    """From its start to its end."""
    exit_code: int | None
    """128 + n after signal n; None where kprof ended it."""
    rule: str
    """What a step is, as a sentence; empty where there was none."""
    device_name: str | None
    """None where no GPU took part."""
    log: Path
    """What it printed, stdout and stderr together."""
    joules_per_step: float | None = None
    """Of all its GPUs, over neighbouring windows of one arm that take at least 2 s."""
    why_no_energy: str = ""
    """Why it is missing, as the end of a sentence."""
    problems: tuple[str, ...] = ()
    """Sentences that a reader of the numbers has to know."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of torch and of the driver, where they are known."""


class TrialError(KprofError):
    """A workload that did not get through its trial; `trial` has what was measured before."""

    def __init__(self, problem: str, *, fix: str, trial: Trial) -> None:
        super().__init__(problem, fix=fix)
        self.trial = trial


class TrialInterrupted(KeyboardInterrupt):
    """Somebody pressed Ctrl-C; `trial` has what was measured before."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial


def run_trial(
    variant: Variant,
    schedule: Schedule,
    folder: Path,
    *,
    is_enough: Callable[[Sequence[Window]], bool],
    most_s: float | None = None,
) -> Trial:
    """Run a variant until the schedule is done, `is_enough` says so, or it ends by itself.

    Then the process is ended, with all that it has started. `most_s` bounds the whole run.

    Raises:
        LaunchError: it cannot be started, or the folder holds another trial.
        TrialError: it crashed, or the patch of its arm B did.
        TrialInterrupted: somebody pressed Ctrl-C.
    """
    raw = folder.resolve() / "raw"
    if raw.exists():
        raise LaunchError(f"{folder}: holds a trial already", fix="choose another folder")
    schedule = replace(schedule, patch=_placed(schedule.patch))
    raw.mkdir(parents=True)
    plan = raw / "schedule.json"
    schedule.write(plan)
    environment = injecting(Settings(raw, schedule=plan), {**os.environ, **variant.environment})
    course = Course(variant, schedule, Sheets(raw), folder / LOG)
    sampler = Sampler(raw / "nvml.jsonl", read=read_with_processes)
    sampler.start()
    try:
        course.run(environment, is_enough, most_s)
    except KeyboardInterrupt:
        sampler.stop()
        raise TrialInterrupted(course.judge(sampler.problem)) from None
    finally:
        sampler.stop()
    return course.judge(sampler.problem)


def _placed(patch: str | None) -> str | None:
    """Return a patch with the whole path of its file, since a workload may change its folder.

    Raises:
        LaunchError: it is malformed, or there is no such file.
    """
    if patch is None:
        return None
    place, _, name = patch.rpartition(":")
    if not place or not name:
        raise LaunchError(
            f"{patch}: names no function", fix="write FILE.py:NAME or MODULE:NAME for the patch"
        )
    if not place.endswith(".py"):
        return patch
    if not Path(place).is_file():
        raise LaunchError(f"{place}: no such file", fix="check the path of the patch")
    return f"{Path(place).resolve()}:{name}"


class Course:
    """A trial under way."""

    def __init__(self, variant: Variant, schedule: Schedule, sheets: Sheets, log: Path) -> None:
        self._variant = variant
        self._schedule = schedule
        self._sheets = sheets
        self._log = log
        self._wall_ns = 0
        self._exit_code: int | None = None
        self._has_enough = False
        self._problems: list[str] = []

    def run(
        self,
        environment: Mapping[str, str],
        is_enough: Callable[[Sequence[Window]], bool],
        most_s: float | None,
    ) -> None:
        """Run the workload for as long as it is needed."""
        workload = self._start(environment)
        with _ending(workload):
            code, num_windows = None, 0
            while code is None and not self._has_enough:
                code = workload.wait(LOOK_S)
                self._sheets.look()
                self._has_enough = self._sheets.is_over
                if self._sheets.num_windows > num_windows:
                    num_windows = self._sheets.num_windows
                    self._has_enough |= is_enough(self._sheets.windows())
                if most_s is not None and workload.wall_ns > most_s * 1e9:
                    self._problems.append(f"It was ended after {most_s:g} s, its longest time.")
                    break
            self._wall_ns = workload.wall_ns
            self._exit_code = 128 - code if code is not None and code < 0 else code

    def judge(self, why_not_sampled: str | None) -> Trial:
        """Return what came of it.

        Raises:
            TrialError: it crashed, or the patch of its arm B did.
        """
        self._sheets.look()
        leading = self._sheets.leading
        windows = self._sheets.windows()
        if windows and leading and leading.about["gpus"] and why_not_sampled:
            self._problems.append(f"Power and clocks were not sampled: {why_not_sampled}.")
        joules, why = energy_of(windows, self._schedule, self._sheets)
        trial = Trial(
            label=self._variant.label,
            windows=windows,
            wall_ns=self._wall_ns,
            exit_code=self._exit_code,
            rule=leading.about["rule"] if leading else "",
            device_name=leading.about["device_name"] if leading else None,
            log=self._log,
            joules_per_step=joules,
            why_no_energy=why,
            problems=(*self._problems, *self._sheets.problems()),
            versions=self._sheets.versions(),
        )
        for timed in self._sheets.all:
            if timed.is_patch_broken:
                raise TrialError(
                    f"The patch {timed.problems[-1]}",
                    fix="mend the patch: a function that returns a context manager",
                    trial=trial,
                )
        # Where it was ended from outside there is no exit code of its own.
        if self._exit_code and not self._has_enough:
            raise self._crash(trial, leading)
        return trial

    def _start(self, environment: Mapping[str, str]) -> Workload:
        command = self._variant.command
        try:
            return Workload(command, environment, self._log, RAW)
        except OSError as error:
            raise LaunchError(
                f"{command[0]}: cannot be started ({error.strerror})",
                fix="check that the program exists and may be executed",
            ) from error

    def _crash(self, trial: Trial, leading: Timed | None) -> TrialError:
        arm = self._variant.label
        if len(self._schedule.arms) > 1 and leading is not None and leading.arm is not None:
            arm = leading.arm
        code = self._exit_code or 0
        how = f"exit code {code}"
        if code > 128:
            with contextlib.suppress(ValueError):
                how = f"{signal.Signals(code - 128).name} (exit code {code})"
        lines = self._log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        shown = "".join(f"\n    {line}" for line in lines) or " nothing"
        return TrialError(
            f"{arm}: the workload ended with {how} after {len(trial.windows)} windows. "
            f"The last that it printed:{shown}",
            fix=f"see that it runs by itself: {self._variant.line}; its output is in {self._log}",
            trial=trial,
        )


@contextlib.contextmanager
def _ending(workload: Workload) -> Iterator[None]:
    """End the workload behind this block, whatever ends the block."""
    number = signal.SIGTERM
    try:
        with _leaving_on_signals():
            yield
    except KeyboardInterrupt:
        number = signal.SIGINT
        raise
    finally:
        workload.end(number)


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process: by default they would leave the workload."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
