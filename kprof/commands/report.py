"""The options of `kprof report`: what was saved, for whom the page is, what it may show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kprof.answer import Answer


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Runs, comparisons, JSON of sla, cost, selftest, kernels check; before first.",
        ),
    ],
    template: Annotated[
        str, typer.Option(metavar="NAME", help="partner, engineer, or a file.toml of your own.")
    ] = "partner",
    redact: Annotated[
        Literal["internal", "partner", "public"],
        typer.Option(help="Leave out nothing; paths, hosts and prompts; those and prices."),
    ] = "partner",
    title: Annotated[str, typer.Option(help="Title of the page [the workload's name].")] = "",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path(
        "report.html"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> Answer:
    """Write one page for whoever decides: verdict, money, how sure.

    Of what is named twice, such as two runs, the first is before and the last after.
    """
    from kprof.errors import KprofError
    from kprof.partner import read_evidence, sections_of_summary, write_partner_report
    from kprof.report.progress import Progress

    if out.exists() and not force:
        raise KprofError(f"{out} exists already", fix="name another --out, or pass --force")
    progress = Progress()
    try:
        evidence = read_evidence(paths, title, progress)
        progress("drawing")
        write_partner_report(evidence, out, template, redact)
    finally:
        progress.close()
    return Answer(evidence.title, sections_of_summary(evidence, redact), None, f"report: {out}")
