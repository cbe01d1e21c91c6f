"""`kprof ncu`: add hardware counters of its most expensive kernels to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kprof.commands import Answer, say


def ncu(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that kprof run wrote.")],
    kernels: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most expensive kernels to count.")
    ] = 10,
    launches: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum launches, of all kernels.")
    ] = 1_000,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """Measure hardware counters of a run's kernels with Nsight Compute.

    Runs the workload once more in Nsight Compute, which repeats its most expensive kernels. The
    report then shows bytes moved, and the load of memory, SMs and tensor cores.
    """
    from kprof.report.progress import Progress
    from kprof.report.sections.counters import render
    from kprof.run import count

    progress = Progress(say, is_patient=True)
    try:
        opened = count(run, kernels, launches, progress)
    finally:
        progress.close()
    title, last = opened.trace.meta.source, f"report: {opened.report}"
    return Answer(title, [render(opened.trace)], opened.json if json else None, last)
