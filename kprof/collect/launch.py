"""Starts a workload under the recorder; arguments, streams, signals and exit code pass through."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from kprof.collect.inject.kprof_recorder.settings import Settings
from kprof.collect.nvml import Sampler
from kprof.errors import LaunchError

INJECT = Path(__file__).parent / "inject"
# A name with a quote in it: before the process id, or alone on its line, as Kineto lays it out.
_QUOTED_NAME = re.compile(
    rb'(?<="name": ")[^"]*".*(?=", "pid": )|(?<=^    "name": ")(?:(?!", ").)*(?=",$)'
)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class LaunchOptions:
    """What to start, where to write, and what to record; `skip` and `steps` count steps."""

    command: tuple[str, ...]
    out: Path
    """The run's folder, NAME.kprof; the recording goes into its `raw` folder."""
    skip: int = 5
    steps: int = 3
    stacks: bool = False
    memory: bool = False
    shapes: bool = True


@dataclass(frozen=True)
class LaunchResult:
    """What came of it; `exit_code` is the workload's own, 128 + n after signal n."""

    exit_code: int
    raw: Path
    wall_ns: int
    parts: tuple[Path, ...]
    """One folder for each process that recorded something; empty when none did."""
    messages: tuple[str, ...]
    """Sentences about what went wrong in recording, for stderr and the report."""


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
            f"kprof run has no option {target}",
            fix="a script's options stand after it, kprof's own before it: see kprof run --help",
        )
    if is_module:
        _check_module(target)
        return (sys.executable, "-m", *arguments)
    is_script = Path(target).is_file() and not os.access(target, os.X_OK)
    if target.endswith(".py") or is_script:
        if not Path(target).is_file():
            raise LaunchError(
                f"{target}: no such script",
                fix="check the path; a module is run with `kprof run -m package.module`",
            )
        return (sys.executable, *arguments)
    if shutil.which(target) is None:
        raise LaunchError(
            f"{target}: command not found",
            fix="give a script (`kprof run train.py`) or a program on the PATH",
        )
    return tuple(arguments)


def launch(options: LaunchOptions) -> LaunchResult:
    """Run the command to its end under the recorder and NVML sampling.

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
        exit_code = _run(options.command, environment_for(options, raw))
    finally:
        sampler.stop()
    ended_ns = time.time_ns()
    messages = messages_of(sampler, raw, exit_code)
    try:
        write_description(raw, options.command, (started_ns, ended_ns), exit_code)
        leave_out_helpers(raw)
        parts = compress_parts(raw)
    except OSError as error:
        parts = ()
        messages += (f"The recording in {raw} could not be completed: {error}.",)
    return LaunchResult(exit_code, raw, ended_ns - started_ns, parts, messages)


def environment_for(options: LaunchOptions, raw: Path) -> dict[str, str]:
    """Return the workload's environment: this process's own, and what starts the recorder."""
    settings = Settings(
        raw=raw.resolve(),
        skip=options.skip,
        steps=options.steps,
        shapes=options.shapes,
        stacks=options.stacks,
        memory=options.memory,
    )
    path = os.environ.get("PYTHONPATH")
    return {
        # Kineto would write its own progress into the workload's stderr.
        "KINETO_LOG_LEVEL": "99",
        **os.environ,
        **settings.to_environment(),
        "PYTHONPATH": str(INJECT) + (os.pathsep + path if path else ""),
    }


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


def leave_out_helpers(raw: Path) -> None:
    """Remove what processes without steps recorded, if others have steps.

    A script that starts other programs would otherwise be reported as one of several ranks.
    """
    recorders = _recorders(raw)
    helpers = [
        part
        for part, recorder in recorders.items()
        if not recorder["num_steps_seen"] and recorder["world_size"] == 1
    ]
    if len(helpers) < len(recorders):
        for part in helpers:
            shutil.rmtree(part)


def _recorders(raw: Path) -> dict[Path, dict[str, Any]]:
    """Return what each process says of itself, by its folder."""
    paths = sorted(raw.glob("rank*-pid*/recorder.json"))
    return {path.parent: json.loads(path.read_text()) for path in paths}


def compress_parts(raw: Path) -> tuple[Path, ...]:
    """Compress the traces that the recorder wrote plainly, and return their folders."""
    for trace in sorted(raw.glob("rank*-pid*/window-*.json")):
        unfinished = trace.with_name(f".{trace.name}.gz")
        try:
            with trace.open("rb") as plain, gzip.open(unfinished, "wb", compresslevel=1) as packed:
                packed.writelines(map(escape_name, plain))
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.replace(trace.with_name(f"{trace.name}.gz"))
        trace.unlink()
    return tuple(sorted(trace.parent for trace in raw.glob("rank*-pid*/window-0.json.gz")))


def escape_name(line: bytes) -> bytes:
    """Escape the quotes in an event's name, which torch writes as they are (2.13 still does)."""
    if b'"name": "' not in line:
        return line
    return _QUOTED_NAME.sub(lambda name: _BARE_QUOTE.sub(rb'\\"', name[0]), line)


def _run(command: tuple[str, ...], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise LaunchError(
            f"{command[0]}: cannot be started ({error.strerror})",
            fix="check that the program exists and may be executed",
        ) from error
    with _forwarding_signals(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the workload while it runs."""

    def forward(number: int, frame: FrameType | None) -> None:
        # The terminal has already interrupted its whole foreground group, the workload included.
        if number != signal.SIGINT or not _is_foreground():
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


def messages_of(sampler: Sampler, raw: Path, exit_code: int = 0) -> tuple[str, ...]:
    """Return what went wrong; what only limits the recording is said in the report."""
    recorders = _recorders(raw)
    messages = [f"{part.name}: {p}" for part, r in recorders.items() for p in r["problems"]]
    if not recorders and exit_code:
        messages.append(f"The workload ended with code {exit_code} before it ran torch.")
    elif not recorders:
        messages.append(
            "No process reported a recording. Either none ran torch operators, or the recorder "
            "could not enter: Python started with -I, -E or -S, an environment without the "
            "caller's PYTHONPATH, a program that is not Python, or a process that was killed."
        )
    if sampler.problem is not None and any(r["device_name"] for r in recorders.values()):
        messages.append(f"Power and clocks were not sampled: {sampler.problem}.")
    return tuple(messages)


def _check_module(name: str) -> None:
    root = name.partition(".")[0]
    is_here = Path(root).is_dir() or Path(f"{root}.py").is_file()
    if not root or (not is_here and importlib.util.find_spec(root) is None):
        raise LaunchError(
            f"{name}: no such module",
            fix="run kprof from the folder that holds it, or install it in this environment",
        )


def _versions() -> dict[str, str]:
    try:
        own = version("kprof")
    except PackageNotFoundError:
        own = "not installed"
    return {"kprof": own, "python": platform.python_version(), "platform": platform.platform()}
