"""The correctness gate for the calls of one workload: levels L0 and L1 at its own shapes.

`--swap auto` runs it for each candidate that pays, in a process of its own: a kernel that hangs or
breaks the GPU ends that process alone. Rows beyond some millions of elements are left out: kernels
treat all rows alike, and the truth is computed in float64.

python -m kprof.kernels.swap.gated KERNEL=PROVIDER SORTS RESULT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import torch

from kprof.kernels import Kernel, Shape, kernel_named
from kprof.kernels.bench.choice import counted
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.correctness import GateReport, check
from kprof.kernels.correctness.levels import result_of_gate
from kprof.kernels.correctness.subject import Subject
from kprof.kernels.swap.swap_report import GATE_PASSED, CallSort, Checked

# Of the first tensor of a call; less in Triton's interpreter, which has no bfloat16 either.
MOST_ELEMENTS = {"cuda": 2**22, "cpu": 2**11}
LEAST_ROWS = 8
MOST_BATCHES = 2
# Sizes of a shape that begins with batches.
LEAST_OF_BATCHES = 5
NUM_VALUES = {"cuda": 1_000_000, "cpu": 2_000}
# Values of each sort: usual ones, outliers, rows of unlike size, none.
DISTRIBUTIONS = ("normal", "outliers", "uneven", "zeros")


def subject_for(kernel: Kernel, provider: str, sorts: Sequence[CallSort], device: str) -> Subject:
    """Return the gate's subject for these calls alone; none: for the kernel's own edges.

    Of compiled code the calls are not known.
    """
    sizes = [_with_few_rows(kernel, one.shape, device) for one in sorts] or list(kernel.edges)
    dtypes = dict.fromkeys(sort.dtype for sort in sorts) or kernel.dtypes
    known = [one for one in dtypes if one in kernel.dtypes]
    if device == "cpu":
        known = [one for one in known if one != "bfloat16"]
    has_gradients = not sorts or any(one.has_gradients for one in sorts)
    subject = subject_of(kernel, provider, device)
    return replace(
        subject,
        shapes=tuple(dict.fromkeys(sizes)),
        # No other sizes than those.
        free=(),
        dtypes=tuple(known),
        layouts=tuple(dict.fromkeys(("contiguous", *(one.layout for one in sorts)))),
        differentiable=subject.differentiable if has_gradients else (),
        contexts=("gradient", "no_grad") if has_gradients else ("no_grad",),
        distributions=DISTRIBUTIONS if device == "cuda" else DISTRIBUTIONS[:1],
        num_values=NUM_VALUES[device],
    )


def _with_few_rows(kernel: Kernel, shape: Shape, device: str) -> Shape:
    """Return a shape with fewer rows, or batches where a kernel's shapes have those."""
    if len(shape) == 1:
        return (min(shape[0], MOST_ELEMENTS[device]),)
    first, *others = counted(kernel, shape)
    # Batch, heads and lengths, instead of rows.
    if len(kernel.shapes[0]) > kernel.exact + 1 and len(kernel.shapes[0]) >= LEAST_OF_BATCHES:
        return (min(first, MOST_BATCHES), *others)
    most = max(LEAST_ROWS, MOST_ELEMENTS[device] // max(*others, 1))
    return (min(first, most), *others)


def judge(name: str, sorts: Sequence[CallSort]) -> Checked:
    """Return that a candidate passes the gate for these calls, or what it fails."""
    kernel_name, _, provider = name.partition("=")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = kernel_named(kernel_name)
    subject = subject_for(kernel, provider, sorts, device)
    if not (subject.shapes and subject.dtypes):
        return Checked("the gate has none of its calls")
    report = check(subject, ("L0", "L1"))
    return Checked(outcome_of(report), result_of_gate(report))


def outcome_of(report: GateReport) -> str:
    """Return that all levels were passed, or the first that was not, and why."""
    for level in report.levels:
        if level.state == "failed" or (report.is_gpu_broken and level.state != "passed"):
            return f"fails the correctness gate at {level.name}: {level.why}"
    return GATE_PASSED


def main(arguments: Sequence[str]) -> None:
    """Judge one candidate, and write the outcome."""
    name, sorts, result = arguments
    known = msgspec.json.decode(Path(sorts).read_bytes(), type=list[CallSort])
    Path(result).write_text(json.dumps(asdict(judge(name, known))))


if __name__ == "__main__":
    main(sys.argv[1:])
