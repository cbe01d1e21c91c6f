"""Runs of a variant of a workload without a profiler, with timed windows of its steps.

A trial ends the workload itself, with every process that it has started.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from kprof.collect.launch import LOOK_S, injecting
from kprof.collect.nvml import Sampler, read_with_processes
from kprof.collect.recorder.kprof_recorder.schedule import Schedule
from kprof.collect.recorder.kprof_recorder.settings import Settings
from kprof.collect.windows import Sheets, Timed, Window, energy_of
from kprof.errors import KprofError, LaunchError, counted

PROCESSES = Path("/proc")
PATIENCE_S = 10.0
LOOK_AT_PROCESS_S = 0.05


@dataclass(frozen=True)
class Process:
    """One of the machine's processes; `born` tells it from a later one with the same number."""

    number: int
    parent: int
    session: int
    born: int


class Workload:
    """A command in a session of its own, whose output goes to a file, with all that it starts.

    `mark` is a variable of its environment alone: ranks and workers have it even
    where they left the session and their parent is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        mark: str,
        folder: Path | None = None,
    ) -> None:
        self._mark = f"{mark}={environment[mark]}".encode()
        self._has_ended = threading.Event()
        self._ended_ns = 0
        self._began_ns = time.perf_counter_ns()
        with log.open("wb") as file:
            self._root = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._await, name="kprof-workload", daemon=True).start()

    @property
    def wall_ns(self) -> int:
        """The time from its start to its end, or to now while it runs."""
        end_ns = self._ended_ns if self._has_ended.is_set() else time.perf_counter_ns()
        return end_ns - self._began_ns

    def wait(self, seconds: float) -> int | None:
        """Wait for the end, at most so long; return the exit code, -n after signal n, or None."""
        self._has_ended.wait(seconds)
        return self._root.returncode if self._has_ended.is_set() else None

    def end(self, number: int = signal.SIGTERM) -> None:
        """End all of it: with this signal, and after 10 s, or a second Ctrl-C, with SIGKILL."""
        try:
            self._signal_group(number)
            self._wait_for_all()
        finally:
            self._signal_group(signal.SIGKILL)
            self._has_ended.wait()
            while members := self._members():
                _send(members, signal.SIGKILL)
                time.sleep(LOOK_AT_PROCESS_S)

    def _await(self) -> None:
        self._root.wait()
        self._ended_ns = time.perf_counter_ns()
        self._has_ended.set()

    def _signal_group(self, number: int) -> None:
        # Once the root has been waited for, its number may be another group's.
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._root.pid, number)

    def _wait_for_all(self) -> None:
        told: set[Process] = set()
        patience_ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < patience_ends:
            has_ended = self._has_ended.wait(LOOK_AT_PROCESS_S)
            members = self._members() if has_ended else set()
            if has_ended and not members:
                return
            # Processes that have left the group get no other signal.
            _send(members - told, signal.SIGTERM)
            told |= members
            time.sleep(LOOK_AT_PROCESS_S if members else 0)

    def _members(self) -> set[Process]:
        """Return the processes of the workload that live."""
        running = _running()
        members = {p for p in running if p.session == self._root.pid or self._has_mark(p.number)}
        while children := _children_of(members, running) - members:
            members |= children
        return members

    def _has_mark(self, number: int) -> bool:
        try:
            return self._mark in (PROCESSES / str(number) / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


__all__ = [
    "LOG",
    "MARK",
    "Schedule",
    "Trial",
    "TrialError",
    "TrialInterrupted",
    "Variant",
    "Window",
    "Workload",
    "ending",
    "run_trial",
]

LOG = "output.log"
NUM_LAST_LINES = 15
# The variable by which the processes of a workload are known.
MARK = "KPROF_RAW"


@dataclass(frozen=True)
class Variant:
    """One of the two that are compared: what to run, and how it differs, in words."""

    label: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to kprof's own environment."""
    difference: str = ""

    @property
    def line(self) -> str:
        """The command line to type: its variables, then its command."""
        added = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*added, shlex.join(self.command)])


@dataclass(frozen=True)
class Trial:
    """The result of one process."""

    label: str
    windows: tuple[Window, ...]
    """Step times of rank 0; empty where the workload has no steps."""
    wall_ns: int
    """From its start to its end."""
    exit_code: int | None
    """128 + n after signal n; None where kprof ended it."""
    rule: str
    """The definition of a step, as a sentence; empty where there was none."""
    device_name: str | None
    """None where no GPU took part."""
    log: Path
    """The process's output, stdout and stderr together."""
    joules_per_step: float | None = None
    """Energy of all its GPUs, over neighbouring windows of one arm that take at least 2 s."""
    why_no_energy: str = ""
    """Why it is missing, as the end of a sentence."""
    problems: tuple[str, ...] = ()
    """Sentences that a reader of the numbers has to know."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and the driver, where they are known."""


class TrialError(KprofError):
    """A workload that did not get through its trial; `trial` has what was measured before.

    `arm` is the one that had the turn then; empty: unknown.
    """

    def __init__(self, problem: str, *, fix: str, trial: Trial, arm: str = "") -> None:
        super().__init__(problem, fix=fix)
        self.trial = trial
        self.arm = arm


class TrialInterrupted(KeyboardInterrupt):
    """The user pressed Ctrl-C; `trial` has the measurements before it."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.trial = trial


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
        self._why_ended = ""
        self._problems: list[str] = []

    def run(
        self,
        environment: Mapping[str, str],
        is_enough: Callable[[Sequence[Window]], bool],
        most_s: float | None,
        why_to_end: Callable[[], str],
    ) -> None:
        """Run the workload for as long as it is needed."""
        workload = self._start(environment)
        with ending(workload):
            code, num_windows = None, 0
            while code is None and not self._has_enough:
                code = workload.wait(LOOK_S)
                self._sheets.look()
                self._has_enough = self._sheets.is_over
                if self._sheets.num_windows > num_windows:
                    num_windows = self._sheets.num_windows
                    self._has_enough |= is_enough(self._sheets.windows())
                self._why_ended = "" if self._has_enough else why_to_end()
                if self._why_ended:
                    break
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
                    fix="fix the patch: a function that returns a context manager",
                    trial=trial,
                )
        if self._why_ended:
            raise TrialError(
                f"B: {self._why_ended}",
                fix=f"see its output in {self._log}",
                trial=trial,
                arm="B",
            )
        # Where it was ended from outside there is no exit code of its own.
        if self._exit_code and not self._has_enough:
            raise self._crash(trial, leading)
        return trial

    def _start(self, environment: Mapping[str, str]) -> Workload:
        command = self._variant.command
        try:
            return Workload(command, environment, self._log, MARK)
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
            f"{arm}: the workload ended with {how} after {counted(len(trial.windows), 'window')}. "
            f"The last that it printed:{shown}",
            fix=f"see that it runs by itself: {self._variant.line}; its output is in {self._log}",
            trial=trial,
            arm=arm,
        )


def run_trial(
    variant: Variant,
    schedule: Schedule,
    folder: Path,
    *,
    is_enough: Callable[[Sequence[Window]], bool],
    most_s: float | None = None,
    why_to_end: Callable[[], str] = lambda: "",
) -> Trial:
    """Run a variant until the schedule is done, `is_enough` says so, or it ends by itself.

    Then the process is ended, with all that it has started. `most_s` bounds the whole run.
    `why_to_end` is asked all the time: a sentence about arm B ends the trial as failed.

    Raises:
        LaunchError: it cannot be started, or the folder holds another trial.
        TrialError: it crashed, the patch of its arm B did, or `why_to_end` ended it.
        TrialInterrupted: the user pressed Ctrl-C.
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
        course.run(environment, is_enough, most_s, why_to_end)
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


def _children_of(parents: set[Process], running: Sequence[Process]) -> set[Process]:
    numbers = {parent.number for parent in parents}
    return {process for process in running if process.parent in numbers}


def _running() -> list[Process]:
    """Return every process that has not ended; none where the system does not list them."""
    found = [_describe(path) for path in PROCESSES.glob("[0-9]*/stat")]
    return [process for process in found if process is not None]


def _describe(path: Path) -> Process | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    # The name stands in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    return Process(int(path.parent.name), int(fields[1]), int(fields[3]), int(fields[19]))


def _send(processes: set[Process], number: int) -> None:
    for process in processes:
        # Another may have its number by now.
        if _describe(PROCESSES / str(process.number) / "stat") in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.number, number)


@contextlib.contextmanager
def ending(workload: Workload) -> Iterator[None]:
    """End the workload after this block, also after an exception."""
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
