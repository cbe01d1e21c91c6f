"""Child processes that take numbered pieces of work from one pipe, until there are none."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import kprof

_NUMBER = struct.Struct("=i")


@dataclass(frozen=True)
class Child:
    """A process that was started, and the file that it writes its results to."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def ended(self) -> int:
        """Wait for its end, turn its output to the beginning, and return its exit code."""
        code = self.process.wait()
        self.output.seek(0)
        return code


@contextmanager
def claims_of(numbers: Iterable[int]) -> Iterator[int]:
    """Open a pipe that holds `numbers`; each is read once, by whichever process is free."""
    claims, write_end = os.pipe()
    try:
        # Up to 16,384 of them fit in a pipe.
        os.write(write_end, b"".join(map(_NUMBER.pack, numbers)))
    finally:
        os.close(write_end)
    try:
        yield claims
    finally:
        os.close(claims)


def claimed(claims: int) -> Iterator[int]:
    """Yield the numbers that no other process has taken."""
    while claim := os.read(claims, _NUMBER.size):
        yield _NUMBER.unpack(claim)[0]


@contextmanager
def children_of(
    module: str, files: tuple[int, ...], task: object, number: int
) -> Iterator[list[Child]]:
    """Start `number` fresh interpreters, which neither fork threads nor import main.

    Each calls `serve` of `module` with the numbers of the open `files` as arguments of its command
    and `task`, pickled, as its input. Those that still run at the end are killed.
    """
    folder = str(Path(kprof.__file__).parents[1])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", f"from {module} import serve; serve()", *map(str, files)]
    children: list[Child] = []
    with ExitStack() as stack:
        for _ in range(number):
            # Into files, so that no process waits for its reader; they have no name.
            stdin = stack.enter_context(tempfile.TemporaryFile(prefix="kprof-"))
            stdout = stack.enter_context(tempfile.TemporaryFile(prefix="kprof-"))
            pickle.dump(task, stdin)
            stdin.seek(0)
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                pass_fds=files,
            )
            children.append(Child(process, stdout))
        try:
            yield children
        finally:
            for child in children:
                child.process.kill()
                child.process.wait()
