"""`kprof ncu`: add hardware counters of its most expensive kernels to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kprof.commands import Answer


def ncu(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that kprof run wrote.")],
    kernels: Annotated[int, typer.Option(metavar="N", min=1, help="How many kernels.")] = 10,
    launches: Annotated[int, typer.Option(metavar="N", min=1, help="At most, of all.")] = 1_000,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """Count what the kernels of a run did, by hardware counters.

    Runs the workload once more in Nsight Compute, its most expensive kernels several times over.
    Then the report says which bytes were moved, and how busy memory, SMs and tensor cores were.
    """
    from kprof.report.progress import Progress
    from kprof.report.sections.counters import render
    from kprof.run import count

    progress = Progress()
    try:
        opened = count(run, kernels, launches, progress)
    finally:
        progress.close()
    title, last = opened.trace.meta.source, f"report: {opened.report}"
    return Answer(title, [render(opened.trace)], opened.json if json else None, last)
