"""The launch of a workload under the recorder; its streams, signals, exit code pass through."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Union

from kprof.collect.nsys import EXPORT, ProfiledProcess, keep_window
from kprof.collect.nvml import Sampler
from kprof.collect.process_folders import (
    compress_parts,
    leave_out_helpers,
    leave_out_other_ranks,
    recorders_of,
)
from kprof.collect.recorder.kprof_recorder.settings import DRY_RUN, NSIGHT, OPTIONAL, Settings
from kprof.errors import LaunchError, counted, three_digits
from kprof.storage import own_version

RECORDER = Path(__file__).parent / "recorder"
LOOK_S = 0.05
# After the window: for the dry run in the next step and the light pass behind it, and for a
# workload that was asked to end.
LONGEST_CHECK_S = 5.0
PATIENCE_S = 10.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Process = Union["PlainProcess", ProfiledProcess]
Say = Callable[[str], None]


@dataclass(frozen=True)
class LaunchOptions:
    """The workload to start, the output folder, the recording; `skip` and `steps` count steps."""

    command: tuple[str, ...]
    out: Path
    """The run's folder, NAME.kprof; the recording goes into its `raw` folder."""
    skip: int = 5
    steps: int = 3
    stacks: bool = False
    memory: bool = False
    shapes: bool = True
    counters: bool = False
    light: bool = False
    """Whether a light pass follows the window, which tells times that recording slows little."""
    seconds: float | None = None
    """The longest that a window may take; None: as long as its steps take."""
    nsys: bool = False
    """Whether Nsight Systems records, instead of torch's profiler."""
    swap: str | None = None
    """The kernels to swap in."""
    stops_after_recording: bool = False
    """Whether the workload is ended once its window is written."""
    ranks: str | None = None
    """The ranks to record, as 0,8-15, or one of each host; None: all."""


@dataclass(frozen=True)
class LaunchResult:
    """The end of the workload; `exit_code` is its own, 128 + n after signal n."""

    exit_code: int
    raw: Path
    wall_ns: int
    parts: tuple[Path, ...]
    """One folder for each process that recorded something; empty when none did."""
    messages: tuple[str, ...]
    """Sentences about what went wrong in recording, for stderr and the report."""


class PlainProcess(subprocess.Popen[bytes]):
    """A workload as it is: in the terminal's group, if there is a terminal."""

    has_terminal = True

    def __init__(self, command: tuple[str, ...], environment: dict[str, str]) -> None:
        super().__init__(command, env=environment)


def launch(options: LaunchOptions, say: Say = lambda message: None) -> LaunchResult:
    """Run the command to its end under the recorder and NVML sampling.

    `say` hears when the recording begins and when it is over.

    Raises:
        LaunchError: the command cannot be started, or the folder holds another recording.
    """
    raw = options.out / "raw"
    if raw.exists() and any(raw.iterdir()):
        raise LaunchError(
            f"{options.out}: holds a recording already",
            fix="choose another folder with --out, or overwrite it with --force",
        )
    raw.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(raw / "nvml.jsonl")
    started_ns = time.time_ns()
    # In case that kprof does not live to the workload's end.
    write_description(raw, options.command, (started_ns, None), None)
    sampler.start()
    try:
        start = partial(ProfiledProcess, raw=raw) if options.nsys else PlainProcess
        follower = WindowFollower(raw, options, say)
        environment = environment_for(options, raw)
        exit_code = run_command(options.command, environment, look=follower.look, start=start)
        exit_code = 0 if follower.has_stopped else exit_code
        follower.close()
    finally:
        sampler.stop()
    times_ns = (started_ns, time.time_ns())
    parts, troubles = complete(raw, options.command, times_ns, exit_code, options.ranks)
    # Only processes that remain count: how their helpers ended does not matter.
    messages = messages_of(sampler, raw, exit_code, options.ranks)
    if options.nsys:
        recorders = recorders_of(raw)
        is_explained = any(recorder["problems"] for recorder in recorders.values())
        troubles += keep_window(raw, is_explained=is_explained)
        parts = (*recorders, raw) if (raw / EXPORT).exists() else ()
    return LaunchResult(exit_code, raw, times_ns[1] - started_ns, parts, messages + troubles)


class WindowFollower:
    """Follows the window of a workload in what its processes write, and tells the user of it."""

    def __init__(self, raw: Path, options: LaunchOptions, say: Say) -> None:
        self.has_stopped = False
        """Whether the workload was asked to end."""
        self._raw, self._options, self._say = raw, options, say
        self._began_ns: int | None = None
        self._is_over = self._may_train = False
        self._over_since = 0.0
        self._stamp: tuple[tuple[str, int], ...] = ()

    def look(self, process: Process) -> None:
        """Read what is new; end the workload where that was asked for and nothing is to come."""
        if not self.has_stopped and self._has_news():
            self._follow(recorders_of(self._raw))
        if self._is_over and self._options.stops_after_recording and not self._may_train:
            self._stop(process)

    def close(self) -> None:
        """Tell of a recording that only the end of the workload completed."""
        recorders = recorders_of(self._raw)
        whole = [one for part, one in recorders.items() if [*part.glob("window-*.json*")]]
        if self._is_over or not whole:
            return
        if windows := [one for one in whole if len(one["window_ns"]) > 1]:
            self._say_recorded(windows, "")
        elif number := max(sum(step["recorded"] for step in one["steps"]) for one in whole):
            steps = counted(number, "step")
            self._say_below(whole, f"recorded {steps} from the beginning, warm-up included")
        else:
            self._say_below(whole, "recorded from the beginning, without steps")

    def _has_news(self) -> bool:
        stamp: tuple[tuple[str, int], ...] = ()
        for path in sorted(self._raw.glob("rank*-pid*/recorder.json")):
            with contextlib.suppress(FileNotFoundError):
                stamp += ((str(path), path.stat().st_mtime_ns),)
        has_changed, self._stamp = stamp != self._stamp, stamp
        return has_changed

    def _follow(self, recorders: Mapping[Path, dict[str, Any]]) -> None:
        windows = [one for one in recorders.values() if one["window_ns"]]
        if not windows:
            return
        began_ns = min(one["window_ns"][0] for one in windows)
        # Training replaces calls that came before it, and a block of the script an earlier one.
        is_another = self._is_over and began_ns != self._began_ns
        if self._began_ns is None or is_another:
            self._is_over = False
            self._say_below(
                windows,
                f"recording {self._what_is_recorded(windows)}"
                + (", in place of the recording before" if is_another else ""),
            )
        self._began_ns = began_ns
        is_complete = all(one["is_complete"] and len(one["window_ns"]) > 1 for one in windows)
        if is_complete and not self._is_over:
            self._is_over, self._over_since = True, time.monotonic()
            self._may_train = any(one.get("may_train") for one in windows)
            self._say_recorded(windows, f"; {self._what_follows()}")

    def _say_recorded(self, windows: Sequence[Mapping[str, Any]], follows: str) -> None:
        begins, ends = zip(*(one["window_ns"] for one in windows), strict=True)
        number = min(sum(step["recorded"] for step in one["steps"]) for one in windows)
        what = counted(number, "step") if number else "a block"
        took = three_digits((max(ends) - min(begins)) / 1e9)
        self._say_below(windows, f"recorded {what} in {took} s{follows}")

    def _say_below(self, windows: Sequence[Mapping[str, Any]], message: str) -> None:
        """Say something on a line of its own, also below an open progress bar."""
        is_bar_open = any(one.get("is_bar_open") for one in windows)
        self._say(f"\n{message}" if is_bar_open else message)

    def _what_is_recorded(self, windows: Sequence[Mapping[str, Any]]) -> str:
        if any(one.get("is_block") for one in windows):
            return "a block"
        steps = counted(self._options.steps, "step")
        return f"{steps} of training" if any(one["optimizer"] for one in windows) else steps

    def _what_follows(self) -> str:
        if self._may_train:
            return "training may follow, and would be recorded instead; Ctrl-C to stop here"
        if self._options.stops_after_recording:
            return "the workload is ended here"
        return "the workload goes on; Ctrl-C to stop here"

    def _stop(self, process: Process) -> None:
        waited_s = time.monotonic() - self._over_since
        if not self.has_stopped and (waited_s > LONGEST_CHECK_S or not self._is_checking()):
            self.has_stopped = True
            self._over_since = time.monotonic()
            process.send_signal(signal.SIGTERM)
        elif self.has_stopped and waited_s > PATIENCE_S:
            process.send_signal(signal.SIGKILL)

    def _is_checking(self) -> bool:
        """Tell whether the dry run of a swap or the light pass, after the window, is to come."""
        recorders = recorders_of(self._raw)
        return any(
            one.get("is_light_pass_due") or (one["device_name"] and not (part / DRY_RUN).exists())
            for part, one in recorders.items()
        )


def write_description(
    raw: Path,
    command: Sequence[str],
    started_and_ended_ns: tuple[int, int | None],
    exit_code: int | None,
) -> None:
    """Write launch.json: what was run, where, when, and how it ended (None: not yet)."""
    description = {
        "schema": 1,
        "command": list(command),
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "started_ns": started_and_ended_ns[0],
        "ended_ns": started_and_ended_ns[1],
        "exit_code": exit_code,
        "versions": _versions(),
    }
    (raw / "launch.json").write_text(json.dumps(description, indent=2))


def _versions() -> dict[str, str]:
    return {
        "kprof": own_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def run_command(
    command: tuple[str, ...],
    environment: dict[str, str],
    look: Callable[[Process], None] | None = None,
    start: Callable[[tuple[str, ...], dict[str, str]], Process] = PlainProcess,
) -> int:
    """Run a command to its end and return its exit code; `look` is called meanwhile, every 50 ms.

    Raises:
        LaunchError: the command cannot be started.
    """
    try:
        process = start(command, environment)
    except OSError as error:
        raise LaunchError(
            f"{command[0]}: cannot be started ({error.strerror})",
            fix="check that the program exists and may be executed",
        ) from error
    with _forwarding_signals(process):
        while look is not None and process.poll() is None:
            look(process)
            time.sleep(LOOK_S)
        code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding_signals(process: Process) -> Iterator[None]:
    """Pass signals on to the workload while it runs."""

    def forward(number: int, frame: FrameType | None) -> None:
        # The terminal has already interrupted its whole foreground group, the workload included.
        if number != signal.SIGINT or not (process.has_terminal and _is_foreground()):
            process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_foreground() -> bool:
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def environment_for(
    options: LaunchOptions, raw: Path, trigger: Path | None = None
) -> dict[str, str]:
    """Return the workload's environment: this process's own, and what starts the recorder."""
    settings = Settings(
        raw=raw.resolve(),
        skip=options.skip,
        steps=options.steps,
        shapes=options.shapes,
        stacks=options.stacks,
        memory=options.memory,
        counters=options.counters,
        seconds=options.seconds,
        trigger=trigger,
        tracer=NSIGHT if options.nsys else Settings.tracer,
        # Where every rank is started under a kprof of its own, each is the leader.
        leader=os.environ.get("LOCAL_RANK", Settings.leader),
        light=options.light and trigger is None and not options.nsys,
        swap=options.swap,
        ranks=options.ranks,
    )
    return injecting(settings, os.environ)


def injecting(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with what makes every Python of the workload do what `settings` say."""
    path = environment.get("PYTHONPATH")
    return {
        **{name: value for name, value in environment.items() if name not in OPTIONAL},
        **settings.to_environment(),
        "PYTHONPATH": str(RECORDER) + (os.pathsep + path if path else ""),
    }


def complete(
    raw: Path,
    command: Sequence[str],
    started_and_ended_ns: tuple[int, int | None],
    exit_code: int | None,
    ranks: str | None = None,
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Bring what the recorder wrote into its final form; return the parts, and what went wrong."""
    try:
        write_description(raw, command, started_and_ended_ns, exit_code)
        if ranks is not None:
            leave_out_other_ranks(raw, ranks)
        leave_out_helpers(raw)
        return compress_parts(raw), ()
    except OSError as error:
        return (), (f"The recording in {raw} could not be completed: {error}.",)


def messages_of(
    sampler: Sampler, raw: Path, exit_code: int = 0, ranks: str | None = None
) -> tuple[str, ...]:
    """Return what went wrong; what only limits the recording is said in the report."""
    recorders = recorders_of(raw)
    messages = [f"{part.name}: {p}" for part, r in recorders.items() for p in r["problems"]]
    if not recorders and exit_code:
        messages.append(f"The workload ended with code {exit_code} before it ran torch.")
    elif not recorders and ranks is not None:
        messages.append(
            f"No process of --ranks {ranks} reported a recording: is there such a rank?"
        )
    elif not recorders:
        messages.append(
            "No process reported a recording. Either none ran torch operators, or the recorder "
            "could not enter: Python started with -I, -E or -S, an environment without the "
            "caller's PYTHONPATH, a program that is not Python, or a process that was killed."
        )
    if sampler.problem is not None and any(r["device_name"] for r in recorders.values()):
        messages.append(f"Power and clocks were not sampled: {sampler.problem}.")
    return tuple(messages)


def command_for(arguments: Sequence[str], *, is_module: bool = False) -> tuple[str, ...]:
    """Return the command that runs a script, a module (`-m`), or any program.

    Raises:
        LaunchError: there is no such script, module or program.
    """
    if not arguments:
        raise LaunchError("nothing to run", fix="name a script: kprof run train.py")
    target = arguments[0]
    if target.startswith("-"):
        raise LaunchError(
            f"kprof has no option {target} here",
            fix="a script's options stand after it, kprof's own before it: see --help",
        )
    if is_module:
        _check_module(target)
        return (sys.executable, "-m", *arguments)
    is_script = Path(target).is_file() and not os.access(target, os.X_OK)
    if target.endswith(".py") or is_script:
        if not Path(target).is_file():
            raise LaunchError(
                f"{target}: no such script",
                fix="check the path; a module is named with -m, as in -m package.module",
            )
        return (sys.executable, *arguments)
    if shutil.which(target) is None:
        raise LaunchError(
            f"{target}: command not found",
            fix="give a script (`kprof run train.py`) or a program on the PATH",
        )
    return tuple(arguments)


def _check_module(name: str) -> None:
    root = name.partition(".")[0]
    is_here = Path(root).is_dir() or Path(f"{root}.py").is_file()
    if not root or (not is_here and importlib.util.find_spec(root) is None):
        raise LaunchError(
            f"{name}: no such module",
            fix="run kprof from the folder that holds it, or install it in this environment",
        )
