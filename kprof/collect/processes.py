"""A workload that kprof ends itself, with every process that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
PATIENCE_S = 10.0
LOOK_S = 0.05


@dataclass(frozen=True)
class Process:
    """One of the machine's processes; `born` tells it from a later one with the same number."""

    number: int
    parent: int
    session: int
    born: int


class Workload:
    """A command in a session of its own, whose output goes to a file, with all that it starts.

    `mark` is a variable of its environment that nobody else's has: ranks and workers have it even
    where they left the session and their parent is gone.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, mark: str
    ) -> None:
        self._mark = f"{mark}={environment[mark]}".encode()
        self._has_ended = threading.Event()
        self._ended_ns = 0
        self._began_ns = time.perf_counter_ns()
        with log.open("wb") as file:
            self._root = subprocess.Popen(
                list(command),
                env=dict(environment),
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
                time.sleep(LOOK_S)

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
            has_ended = self._has_ended.wait(LOOK_S)
            members = self._members() if has_ended else set()
            if has_ended and not members:
                return
            # Nobody else tells those who have left the group.
            _send(members - told, signal.SIGTERM)
            told |= members
            time.sleep(LOOK_S if members else 0)

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
