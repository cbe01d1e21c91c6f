"""Nsight Systems' own program: finding it, running a workload in it, exporting its reports."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kprof.errors import LaunchError, TraceError

PROGRAM = "nsys"
REPORT_SUFFIX = ".nsys-rep"
# In a run's `raw` folder: the export, what the program itself printed, the workload's process id.
EXPORT, LOG, PID = "nsys.sqlite", "nsys.log", "nsys.pid"
HANDOVER = Path(__file__).parent / "handover.py"
INSTALL = (
    "install nsight-systems-cli, or the CUDA toolkit, so that `nsys` is on the PATH; without "
    "--nsys torch's own profiler records"
)
PROFILE = (
    "profile",
    "--trace=cuda,nvtx,osrt",
    "--cuda-graph-trace=node",
    "--sample=none",
    "--cpuctxsw=none",
    "--stats=false",
    # The recorder marks the window. A later one makes a report of its own, and none ends the
    # workload, as Nsight Systems would by default.
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=repeat",
    # A program that the workload leaves behind is not waited for; kprof alone would not either.
    "--wait=primary",
)


class ProfiledProcess:
    """A workload inside Nsight Systems: its streams, exit code and signals are its own.

    What Nsight Systems prints goes to a file. Signals go to the workload past it, since it would
    end without the workload; for the same reason it does not belong to the terminal's group.
    """

    has_terminal = False

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], raw: Path) -> None:
        self._raw = raw.resolve()
        stdout, stderr = _set_aside(1), _set_aside(2)
        handed_over = (sys.executable, "-I", "-S", str(HANDOVER), str(self._raw / PID), _umask())
        # A % would stand for something else there.
        output = "--output=" + str(self._raw / PROGRAM).replace("%", "%%")
        words = (find_program(), *PROFILE, output, *handed_over, str(stdout), str(stderr), *command)
        try:
            with (self._raw / LOG).open("wb") as log:
                self._process = subprocess.Popen(
                    words,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    pass_fds=(stdout, stderr),
                    start_new_session=True,
                )
        finally:
            os.close(stdout)
            os.close(stderr)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end and return the workload's exit code.

        Raises:
            LaunchError: Nsight Systems ended before it had started the workload.
        """
        code = self._process.wait()
        if self._pid() is None:
            raise LaunchError(
                f"Nsight Systems did not start the workload: {_last_line(self._raw / LOG)}",
                fix="see if a newer Nsight Systems does; without --nsys torch's profiler records",
            )
        (self._raw / PID).unlink()
        return code

    def send_signal(self, number: int) -> None:
        """Send the workload a signal once it runs; afterwards, to what still writes its trace."""
        while (pid := self._pid()) is None and self.poll() is None:
            time.sleep(0.01)
        try:
            os.kill(pid or self._process.pid, number)
        except ProcessLookupError:
            self._process.send_signal(number)

    def _pid(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int((self._raw / PID).read_text())
        return None


def keep_window(raw: Path, *, is_explained: bool) -> tuple[str, ...]:
    """Export the report of the last window, for the reader; return what went wrong.

    The recorder asks for another window only where it has dropped the one before. Where there is
    no report, the recorder may have said why.
    """
    found = raw.glob(f"{PROGRAM}*{REPORT_SUFFIX}")
    reports = sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not reports and is_explained:
        return ()
    if not reports:
        return (
            "Nsight Systems wrote no report, since no window opened. Steps that kprof cannot see "
            'are named in the script: kprof.range("step").',
        )
    try:
        export_report(reports[-1], raw / EXPORT)
    except TraceError as error:
        return (f"{error.problem}. {error.fix}.",)
    return ()


def export_report(report: Path, target: Path) -> Path:
    """Export a report as SQLite to `target`, and return that.

    Raises:
        TraceError: Nsight Systems is not installed here, or cannot export it.
    """
    program = shutil.which(PROGRAM)
    by_hand = f"{PROGRAM} export --type=sqlite {report.name}"
    if program is None:
        raise TraceError(
            f"{report.name} is a report of Nsight Systems, which only Nsight Systems can read, "
            "and it is not installed here",
            fix=f"where it is installed run: {by_hand}; then open the .sqlite file",
        )
    command = [program, "export", "--type=sqlite", "--force-overwrite=true"]
    command += [f"--output={target}", str(report.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode or not target.is_file():
        said = (done.stderr or done.stdout).decode(errors="replace")
        raise TraceError(
            f"{report.name} cannot be exported: {_last_of(said)}",
            fix="export it with the Nsight Systems that wrote it, or a newer one, and open the "
            f".sqlite file: {by_hand}",
        )
    return target


def _last_of(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def find_program() -> str:
    """Return where Nsight Systems is.

    Raises:
        LaunchError: it is not installed.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise LaunchError("--nsys: Nsight Systems is not installed here", fix=INSTALL)
    return program


def _set_aside(stream: int) -> int:
    """Return a second descriptor of a stream of this process; of nothing where it is closed."""
    try:
        return os.dup(stream)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _umask() -> str:
    """Return this process's umask, which Nsight Systems would take from the workload."""
    mask = os.umask(0)
    os.umask(mask)
    return str(mask)


def _last_line(path: Path) -> str:
    return _last_of(path.read_bytes().decode(errors="replace"))
