"""Checks of kernels with NVIDIA's compute-sanitizer: accesses out of bounds, shared-memory races.

It runs a process in which every edge shape is called once in every dtype and layout. Torch's
caching allocator is off there, so that memory beyond an allocation belongs to no other tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kprof.kernels.correctness import Case, Level, Measure, Subject
from kprof.kernels.correctness.levels import judge

COMMAND = "compute-sanitizer"
WHAT = {"memcheck": "accesses out of bounds", "racecheck": "races in shared memory"}
LAYOUTS = ("contiguous", "padded")
LONGEST_S = 600
FORWARD = "forward"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) ")
# Lines that are findings: not the tool's name, and not the host's stack of the launch. A race has
# two ends; the number of racing threads depends on the shape, and is removed.
FINDING = re.compile(
    r"^=+ (?!COMPUTE-SANITIZER|\s|Saved|Host|Program|Target)(.+(?:\n=+ +and .+)*)$", re.MULTILINE
)
CONTINUED = re.compile(r"\n=+ +| \[\d+ hazards?\]")


@dataclass(frozen=True)
class Sanitized:
    """Findings of one tool; `num_errors` is None if it could not run."""

    tool: str
    num_errors: int | None
    what: str
    """The first error, or why it could not run; empty: no error."""
    findings: tuple[str, ...] = ()
    """Distinct errors, in the order of the log."""


def sanitized(level: Level, kernel: str, provider: str) -> Level:
    """Return L0 with the findings of compute-sanitizer, or with a note why it could not run."""
    measures, notes = list(level.measures), list(level.notes)
    for tool, what in WHAT.items():
        found = sanitize(tool, kernel, provider)
        if found.num_errors is None:
            notes.append(f"{COMMAND} could not look for {what}: {found.what}")
        else:
            name = f"{what}, by {COMMAND}"
            measures.append(Measure(name, found.num_errors, 0, None, "faults", where=found.what))
    judged = judge(level.name, measures, level.looked_at, notes=notes)
    # A level that was not run does not pass because nothing was found.
    return judged if level.state != "not run" else replace(level, notes=judged.notes)


def sanitize(tool: str, kernel: str, provider: str, *, are_forward: bool = False) -> Sanitized:
    """Run one tool of compute-sanitizer over all edges of a provider."""
    program = shutil.which(COMMAND)
    if program is None:
        return Sanitized(tool, None, "it is not on the PATH; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--tool", tool, "--log-file", str(log)]
        command += edges_of(kernel, provider, are_forward=are_forward)
        # Without its cache, torch allocates each tensor apart.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LONGEST_S
            )
        except subprocess.TimeoutExpired:
            return Sanitized(tool, None, f"it took more than {LONGEST_S} s")
        said = log.read_text(errors="replace") if log.exists() else ""
    return read_log(tool, said, done.returncode, done.stderr)


def edges_of(kernel: str, provider: str, *, are_forward: bool) -> list[str]:
    """Return the command of a process in which all edges run once."""
    return [sys.executable, "-m", __name__, kernel, provider, *[FORWARD] * are_forward]


def read_log(tool: str, said: str, exit_code: int, complaints: str) -> Sanitized:
    """Return the findings of a log; None errors if the log is incomplete."""
    summary = SUMMARY.search(said)
    found = (CONTINUED.sub(_joined, one) for one in FINDING.findall(said))
    findings = tuple(dict.fromkeys(one for one in found if not SUMMARY.search(one)))
    if summary is None or (exit_code and not int(summary[1])):
        last = [*findings[:1], *complaints.strip().splitlines()[-1:]]
        return Sanitized(tool, None, "; ".join(last) or f"it ended with {exit_code}")
    if not int(summary[1]):
        return Sanitized(tool, 0, "")
    return Sanitized(tool, int(summary[1]), findings[0] if findings else "", findings)


def _joined(between: re.Match[str]) -> str:
    return " " if between[0].startswith("\n") else ""


def run_edges(subject: Subject) -> int:
    """Call a subject's new code on every edge, with its gradients; return how many calls ran.

    Raises:
        RuntimeError: the code raised where the replaced code does not.
    """
    from kprof.kernels.correctness.observe import draw, observe

    num_calls = 0
    for case in _cases(subject):
        arguments = draw(subject, case)
        raised = observe(subject.new, subject, case, arguments).raised
        if raised is None:
            num_calls += 1
        elif observe(subject.replaced, subject, case, arguments).raised is None:
            raise RuntimeError(f"{case}: {raised}")
    return num_calls


def _cases(subject: Subject) -> Iterator[Case]:
    for dtype in subject.dtypes:
        for shape in subject.shapes:
            for layout in LAYOUTS:
                yield Case(shape, dtype, layout=layout)


def main(kernel: str, provider: str, *options: str) -> None:
    """Run all edges, in the process under compute-sanitizer."""
    from kprof.kernels import kernel_named
    from kprof.kernels.bench.measure import subject_of

    subject = subject_of(kernel_named(kernel), provider, "cuda")
    run_edges(replace(subject, differentiable=()) if FORWARD in options else subject)


if __name__ == "__main__":
    main(*sys.argv[1:])
