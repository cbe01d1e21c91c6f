"""The options of `kprof whatif`: which run, which changes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from kprof.answer import Answer, say


def whatif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or a trace.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="TARGET=2, =roofline or =removed; or graphs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> Answer:
    """Predict a step's time after changes.

    Each alone, then all together. A TARGET is kernel:, op:, module: or kind: and a name, with *
    for anything; =2 is twice as fast.
    """
    from kprof.report.sections.what_if import section_of
    from kprof.whatif import EXAMPLES, ask, json_of

    answers, whole = ask(run, changes or [], say=say)
    parts = [section_of(answers, whole=whole)]
    last = f"ask: kprof whatif {shlex.quote(str(run))} {EXAMPLES}"
    return Answer(run.name, parts, json_of(answers) if json else None, last)
