"""`kprof sla`: judge SLA targets on results of load generators, a recorded run, or in process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kprof.analyze.sla.targets import Target, read_targets
from kprof.commands import Answer
from kprof.errors import KprofError

if TYPE_CHECKING:
    from kprof.analyze.sla.responses import Responses
    from kprof.report.sla_verdict import Judged

# The default of --spell, which holds in `kprof.analyze.sla.evaluate` as well.
LONGEST_SPELL_S = 10.0


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
        typer.Option(metavar="TARGET", help="SLA target, such as ttf64_p99<=100ms; repeatable."),
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
        typer.Option(metavar="S", min=0, help="Longest slow spell in seconds, assumed by MET."),
    ] = LONGEST_SPELL_S,
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
    from kprof.report.sla_verdict import sections_of_sla

    judged = judge_results(results, read_targets(target or [], preset), gpus, spell)
    if out is not None:
        write_page(judged, out, force=force)
    last = f"page: {out}" if out else "as a page with its curves: kprof sla ... --out sla.html"
    result = json_of(judged) if json else None
    code = judged.assessment.exit_code
    return Answer(judged.source, sections_of_sla(judged), result, last, code)


def judge_results(
    names: Sequence[str],
    targets: Sequence[Target],
    num_gpus: int | None = None,
    spell_s: float = LONGEST_SPELL_S,
) -> Judged:
    """Judge targets on result files, runs of one load each, or on one recorded run.

    "Met" rests on slow spells of the service that last no longer than `spell_s`; 0: on none.

    Raises:
        KprofError: a file cannot be read, or the files are of different loads.
    """
    from kprof.collect.load_results import is_result, read_result

    if len(names) == 1 and not is_result(names[0]):
        recorded = _judge_run(Path(names[0]), targets)
        if recorded is not None:
            return recorded
    runs = [read_result(name) for name in names]
    for i, run in enumerate(runs):
        if any(_is_same(run, other) for other in runs[:i]):
            raise KprofError(
                f"{names[i]} is named twice, and would count twice", fix="name it once"
            )
    return judge_responses(runs, targets, num_gpus, spell_s)


def _judge_run(path: Path, targets: Sequence[Target]) -> Judged | None:
    """Judge a recorded run; None: it is none, or steps are not asked for."""
    from kprof.report.sla_verdict import Judged

    if not any(target.metric.name == "step" for target in targets):
        return None
    # The tables of a run need pandas, and result files do not.
    from kprof.analyze.sla.evaluate import judge_steps
    from kprof.opened import open_trace

    return Judged(path.name, judge_steps(open_trace(path), targets))


def _is_same(run: Responses, other: Responses) -> bool:
    """Tell whether two runs have the same requests, by when they were sent and ended."""
    times = [[(row.sent_ns, row.end_ns) for row in each.rows] for each in (run, other)]
    return times[0] == times[1]


def judge_responses(
    runs: Sequence[Responses],
    targets: Sequence[Target],
    num_gpus: int | None = None,
    spell_s: float = LONGEST_SPELL_S,
) -> Judged:
    """Judge targets on the requests of one or more runs at one load.

    Raises:
        KprofError: the runs are of different loads.
    """
    from kprof.analyze.sla.doubts import find_doubts
    from kprof.analyze.sla.evaluate import Assessment, judge
    from kprof.report.sla_verdict import Judged

    if not runs:
        raise KprofError("there is no run to judge", fix="name a result file")
    _refuse_mixture(runs)
    judgements = judge(runs, targets, num_gpus, spell_s)
    doubts = find_doubts(runs, targets, judgements)
    assessment = Assessment(judgements, doubts, num_gpus, spell_s or None)
    source = runs[0].source if len(runs) == 1 else f"{len(runs)} runs"
    return Judged(source, assessment, tuple(runs))


def _refuse_mixture(runs: Sequence[Responses]) -> None:
    """Refuse runs at different loads: a percentile of mixed loads describes none of them."""
    loads = list(dict.fromkeys(run.load.name for run in runs if run.load.kind != "unknown"))
    if len(loads) > 1:
        problem = f"the runs are of different loads: {'; '.join(loads)}"
        raise KprofError(problem, fix="judge each load by itself, with all its runs")


def write_page(judged: Judged, path: Path, *, force: bool) -> None:
    """Write the verdict as one offline HTML page."""
    from kprof.report import html
    from kprof.report.sla_verdict import sections_of_sla

    title = f"Service level of {judged.source}"
    html.write_page(title, sections_of_sla(judged, for_page=True), path, force=force)


def json_of(judged: Judged) -> bytes:
    """Return the verdict as indented JSON."""
    from kprof.report.sla_verdict import result_of_sla

    return msgspec.json.format(msgspec.json.encode(result_of_sla(judged)))
