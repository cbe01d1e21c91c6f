"""The options of `kprof roofline`."""

from __future__ import annotations

from typing import Annotated

import typer

from kprof.answer import Answer


def roofline(
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> Answer | None:
    """Measure what this GPU reaches, once, for later runs on it.

    Takes less than a minute and 13 GiB of the GPU's memory. The roofline of every later
    `kprof run` on this GPU and driver is drawn from it.
    """
    from kprof.roofline import measure_roofline

    measured = measure_roofline()
    if json:
        return Answer("", [], measured.json())
    from rich.console import Console

    from kprof.report.ceilings import print_ceilings

    ceilings = measured.ceilings
    figures = [(f.name, f.value, f.unit, f.detail, f.spread) for f in ceilings.figures]
    title = f"{ceilings.gpu}, driver {ceilings.driver}, measured in {ceilings.took_s:.0f} s"
    print_ceilings(title, figures, Console())
    typer.echo(f"kept for later runs: {measured.path or 'nowhere, there is no home folder'}")
    return None
