"""`kprof whatif`: a step's predicted time after changes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kprof.commands import Answer, say
from kprof.errors import KprofError

if TYPE_CHECKING:
    from kprof.analyze.whatif.changes import Change
    from kprof.opened import Progress
    from kprof.trace import Prediction, Trace

# Beyond these a change is no kernel's any more.
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e6
IDLE = "idle:"


def whatif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or a trace.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHANGE", help="TARGET=2, =roofline or =removed; or graphs."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> Answer:
    """Predict the time of a step after changes.

    Each alone, then all together. A TARGET is kernel:, op:, module: or kind: and a name, with *
    for anything, or idle: and a cause; =2 is twice as fast. Of several ranks: ranks=in-time,
    communication=hidden.
    """
    from kprof.report.sections.what_if import section_of

    found = ask(run, changes or [], say=say)
    parts = [section_of(found.answers, whole=found.whole)]
    words = ["kprof", "whatif", str(run), *found.suggestions]
    last = f"ask: {shlex.join(words)}" if found.suggestions else ""
    code = KprofError.exit_code if found.refused else 0
    return Answer(run.name, parts, json_of(found.answers) if json else None, last, code)


@dataclass(frozen=True)
class Asked:
    """Answers, and more questions that the trace can be asked."""

    answers: list[Prediction]
    whole: str
    """What is predicted: a step, or the window."""
    suggestions: list[str]
    refused: tuple[KprofError, ...] = ()
    """Why other questions have no answer."""


def ask(
    run: Path,
    questions: Sequence[str],
    progress: Progress = lambda stage: None,
    say: Callable[[str], None] = lambda message: None,
) -> Asked:
    """Predict each change alone, and all of them together; a saved run keeps the answers.

    Without a question, what the run was asked when it was analyzed, or since. `say` is told which
    questions cannot be understood, and when a run cannot be written, and so does not keep answers.

    Raises:
        KprofError: the run cannot be read, or no question can be understood.
    """
    from kprof.analyze.whatif.across_ranks import QUESTIONS, answer
    from kprof.analyze.whatif.baseline import find_baseline
    from kprof.analyze.whatif.predict import predict, suggest
    from kprof.opened import open_trace
    from kprof.report.sections.what_if import whole_of
    from kprof.storage import is_saved

    trace = open_trace(run, progress)
    if not questions:
        return Asked(list(trace.meta.what_if), whole_of(trace), _arguments(suggest(trace)))
    progress("replaying")
    across = [answer(text, trace) for text in questions if text in QUESTIONS]
    changes, refused = _understood([one for one in questions if one not in QUESTIONS], trace)
    if refused and not (changes or across):
        raise refused[0]
    for one in refused:
        say(str(one))
    baseline = find_baseline(trace)
    together = [changes] if len(changes) > 1 else []
    answers = [predict(asked, baseline) for asked in [*([one] for one in changes), *together]]
    answers += across
    if is_saved(run):
        try:
            _keep(answers, trace, run)
        except KprofError as error:
            say(f"{error.problem}; the answers stand here only")
    asked_next = _arguments(suggest(trace, baseline))
    return Asked(answers, whole_of(trace), asked_next, tuple(refused))


def _understood(questions: Sequence[str], trace: Trace) -> tuple[list[Change], list[KprofError]]:
    """Return the changes that these questions are about, and why others are about none."""
    changes, refused = [], []
    for text in questions:
        try:
            changes.append(parse_change(text, trace))
        except KprofError as error:
            refused.append(error)
    return changes, refused


def _arguments(changes: Sequence[Change]) -> list[str]:
    return [one.question for one in changes]


def parse_change(text: str, trace: Trace) -> Change:
    """Read `TARGET=2`, `TARGET=roofline`, `TARGET=removed`, `idle:CAUSE=removed` or `graphs`.

    Raises:
        KprofError: it is none of these, the factor is out of all bounds, or nothing in the trace is
            the target.
    """
    from kprof.analyze.whatif.changes import (
        FASTER,
        GRAPHED,
        GRAPHS,
        REMOVED,
        ROOFLINE,
        WITHOUT,
        Change,
        parse_cause,
        parse_target,
    )

    if text == GRAPHS:
        return Change(GRAPHED)
    # Names of kernels may hold an equals sign of their own.
    name, _, how = text.rpartition("=")
    if name.startswith(IDLE):
        cause = parse_cause(name.removeprefix(IDLE), trace)
        if how != REMOVED:
            raise KprofError(
                f"{text!r} is not a change", fix=f"idle time can only be removed: {name}={REMOVED}"
            )
        return Change(WITHOUT, cause=cause)
    if name and how in (ROOFLINE, REMOVED):
        return Change(how, parse_target(name, trace))
    try:
        factor = float(how)
    except ValueError:
        factor = 0.0
    if not name or not 0 < factor < float("inf"):
        raise KprofError(
            f"{text!r} is not a change",
            fix="write kind:gemm=2, module:NAME=roofline, op:NAME=removed, idle:CAUSE=removed, "
            "graphs, ranks=in-time or communication=hidden",
        )
    if not LEAST_FACTOR <= factor <= MOST_FACTOR:
        raise KprofError(
            f"{text!r} has a factor of {how}, which is out of range",
            fix=f"give one from {LEAST_FACTOR:g} (a thousand times slower) to {MOST_FACTOR:,.0f}, "
            "or write =removed",
        )
    return Change(FASTER, parse_target(name, trace), factor)


def _keep(answers: list[Prediction], trace: Trace, run: Path) -> None:
    """Write the answers into the run, in place of earlier ones to the same questions."""
    from kprof.opened import Opened
    from kprof.storage import META_FILE, RESULT_FILE, save_meta, whole_or_not_at_all

    new = {(one.target, one.change): one for one in answers}
    old = [one for one in trace.meta.what_if if (one.target, one.change) not in new]
    meta = replace(trace.meta, what_if=(*old, *new.values()))
    kept = replace(trace, meta=meta)
    with whole_or_not_at_all(run) as unfinished:
        opened = Opened(kept, run)
        (unfinished / RESULT_FILE).write_bytes(opened.json)
        save_meta(meta, unfinished / META_FILE)


def json_of(answers: list[Prediction]) -> bytes:
    """Return the answers as indented JSON."""
    return msgspec.json.format(msgspec.json.encode([asdict(one) for one in answers]))
