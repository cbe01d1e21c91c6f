"""Starts a workload under the recorder; arguments, streams, signals and exit code pass through."""

from __future__ import annotations

import contextlib
import gzip
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
    sampler.start()
    try:
        exit_code = _run(options.command, environment_for(options, raw))
    finally:
        sampler.stop()
    ended_ns = time.time_ns()
    write_description(raw, options.command, (started_ns, ended_ns), exit_code)
    parts = compress_parts(raw)
    return LaunchResult(
        exit_code=exit_code,
        raw=raw,
        wall_ns=ended_ns - started_ns,
        parts=parts,
        messages=tuple(_messages(parts, sampler)),
    )


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
    raw: Path, command: Sequence[str], started_and_ended_ns: tuple[int, int], exit_code: int
) -> None:
    """Write launch.json: what was run, where, when, and how it ended."""
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


def compress_parts(raw: Path) -> tuple[Path, ...]:
    """Compress the traces that the recorder wrote plainly, and return their folders."""
    for trace in sorted(raw.glob("rank*-pid*/window-*.json")):
        unfinished = trace.with_name(f".{trace.name}.gz")
        with trace.open("rb") as plain, gzip.open(unfinished, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
        unfinished.replace(trace.with_name(f"{trace.name}.gz"))
        trace.unlink()
    return tuple(sorted(folder.parent for folder in raw.glob("rank*-pid*/recorder.json")))


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


def _messages(parts: tuple[Path, ...], sampler: Sampler) -> Iterator[str]:
    if not parts:
        yield (
            "No process reported a recording. Either none ran torch operators, or the recorder "
            "could not enter: Python started with -I, -E or -S, an environment without the "
            "caller's PYTHONPATH, a program that is not Python, or a process that was killed."
        )
    for part in parts:
        caveats: list[Any] = json.loads((part / "recorder.json").read_text())["caveats"]
        yield from (f"{part.name}: {caveat}" for caveat in caveats if "failure" in caveat)
    if sampler.problem is not None:
        yield f"Power and clocks were not sampled: {sampler.problem}."


def _check_module(name: str) -> None:
    root = name.partition(".")[0]
    is_here = bool(root) and (Path(root).is_dir() or Path(f"{root}.py").is_file())
    if not is_here and importlib.util.find_spec(root) is None:
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
