"""The options of `kprof sla`: which results, which targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kprof.answer import Answer


def sla(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULT",
            help="Result file of a load generator, or a recorded run for step times.",
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET", help="SLA target, as ttf64_p99<=100ms; repeatable."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Published targets: voice, chat, rag, mlperf-…"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of GPUs of the service.")
    ] = None,
    spell: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Longest slow spell, in s; MET assumes it."),
    ] = 10.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> Answer:
    """Judge SLA targets with 99 % confidence bounds.

    RESULT is recorded by AIPerf, vllm bench serve --save-detailed, GuideLLM, SGLang bench_serving
    --output-details, inference-perf or genai-bench. Several files are runs of one load; FILE#2 is
    the second load of a file. Exit code: 0 all targets are proven met, 1 one is proven missed, 2
    one cannot be judged on the given input, 3 inconclusive. A load shorter than ten slow spells
    (--spell) proves no target met; p95 takes 90 spells, p99 takes 459.
    """
    from kprof.report.sla import sections_of_sla
    from kprof.sla import json_of, judge_results, read_targets, write_page

    judged = judge_results(results, read_targets(target or [], preset), gpus, spell)
    if out is not None:
        write_page(judged, out, force=force)
    last = f"page: {out}" if out else "as a page with its curves: kprof sla ... --out sla.html"
    result = json_of(judged) if json else None
    code = judged.assessment.exit_code
    return Answer(judged.source, sections_of_sla(judged), result, last, code)
