"""The options of `kprof kernels`: list, check, bench or explain, and which."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer
from typer import Option

from kprof.answer import Answer, say
from kprof.commands import refuse_idle_options
from kprof.errors import KprofError

Action = Literal["list", "check", "bench", "explain"]


def kernels(
    action: Annotated[Action, typer.Argument(metavar="ACTION", help="What to do.")] = "list",
    names: Annotated[
        list[str] | None, typer.Argument(metavar="KERNEL", help="Kernels [default: all].")
    ] = None,
    provider: Annotated[str | None, Option(help="check: whose code [default: kprof].")] = None,
    shape: Annotated[str | None, Option(metavar="MxN", help="bench: what to measure.")] = None,
    dtype: Annotated[
        list[str] | None, Option(help="check, bench: such as bfloat16; may be repeated.")
    ] = None,
    forward: Annotated[
        bool, Option("--forward", help="check: calls without gradients alone.")
    ] = False,
    sanitizer: Annotated[
        bool, Option("--sanitizer", help="check: let compute-sanitizer check as well, on a GPU.")
    ] = False,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """List replacement kernels, check them, measure who is fastest.

    check runs the quality gate on the GPU, or without one in Triton's interpreter; bench measures
    ours, torch's and the installed peers', without gradients and with them, and keeps both choices;
    explain shows them.
    """
    import msgspec

    from kprof import library
    from kprof.report import providers
    from kprof.report.progress import Progress

    def encoded(result: object) -> bytes | None:
        return msgspec.json.format(msgspec.json.encode(result)) if json else None

    chosen = names or []
    options: dict[str, object] = {"provider": provider, "shape": shape, "dtype": dtype}
    options |= {"forward": forward, "sanitizer": sanitizer}
    refuse_idle_options(action, options, TAKES[action])
    if action == "list":
        if chosen:
            fix = f"kprof kernels explain {chosen[0]}"
            raise KprofError(f"list takes no names, but {chosen[0]!r} is given", fix=fix)
        listed = library.list_kernels()
        last = "next: kprof kernels check"
        return Answer("kernels", [providers.section_of_kernels(listed)], encoded(listed), last)
    if action == "check":
        from kprof.report.gate import result_of_gate, sections_of_gate

        judged = library.Calls(tuple(dtype or ()), forward)
        with closing(Progress(say)) as progress:
            reports = library.check_kernels(
                chosen, provider, progress, calls=judged, sanitizes=sanitizer
            )
        sections = [section for report in reports for section in sections_of_gate(report)]
        states = {report[level].state for report in reports for level in report.asked}
        code = 1 if "failed" in states else 0 if states == {"passed"} else 3
        last = "next: kprof kernels bench"
        found = encoded([result_of_gate(report) for report in reports])
        return Answer("kernels check", sections, found, last, code)
    if action == "bench":
        wanted = library.shape_of(shape) if shape else None
        with closing(Progress(say)) as progress:
            choices = library.bench_kernels(chosen, wanted, dtype or [], progress)
    else:
        choices = library.explain_choices(chosen)
    sections = [providers.section_of_choice(one, library.ranked(one)) for one in choices]
    return Answer(f"kernels {action}", sections, encoded(choices), "next: kprof kernels explain")


# The options that each action takes, besides --json.
TAKES: dict[Action, set[str]] = {
    "list": set(),
    "check": {"--provider", "--dtype", "--forward", "--sanitizer"},
    "bench": {"--shape", "--dtype"},
    "explain": set(),
}
