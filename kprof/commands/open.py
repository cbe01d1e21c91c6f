"""`kprof open`: traces analyzed, with their report."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kprof.commands import Answer, ShowSecrets, refuse_idle_options, say
from kprof.errors import KprofError, TraceError
from kprof.report.redaction import secrets_shown

# Python looks for cycles after 700 new objects. Tables are arrays and hold none: with a trace of
# 580 MB it looked 319 times, and 75 times with this number, in 0.1 s less.
OBJECTS_BETWEEN_COLLECTIONS = 20_000
# What to do where the output cannot be written.
_COMPLETE = "see where it goes; the run itself is complete, in {}"


def open(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Traces, folders of traces, or a run.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder [default: NAME.kprof].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="RANKS", help="Ranks to show in detail, of many, as 0,8-15."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Read on a Dask cluster, as tcp://HOST:8786."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the timeline for Perfetto too, or as .json.gz."),
    ] = None,
    show_secrets: ShowSecrets = False,
) -> Answer:
    """Analyze a trace or a saved run and write its report.

    With --force a saved run is read again from its recording. Of more ranks than fit into memory
    some are shown in detail; who waits for whom, and the sums by rank, are of all.
    """
    _refuse_to_lose_a_run(paths, out, force=force)
    if perfetto is not None:
        from kprof.report.perfetto import require_free, write_perfetto

        require_free(perfetto, force=force)
    is_as_saved = not (force or show_secrets or out or ranks or scheduler or perfetto)
    if is_as_saved and len(paths) == 1 and (kept := _kept_by(paths[0], json=json)) is not None:
        return kept
    from kprof.collect.memory_snapshot import is_snapshot

    if len(paths) == 1 and is_snapshot(paths[0]):
        idle = {"out": out, "force": force, "perfetto": perfetto, "ranks": ranks}
        idle["scheduler"] = scheduler
        refuse_idle_options("a memory snapshot", idle, set())
        return _memory_of(paths[0], json=json)
    chosen = None if ranks is None else _ranks_in(ranks)
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    from kprof.opened import open_run
    from kprof.report.progress import Progress

    progress = Progress(say, is_patient=True)
    try:
        with secrets_shown(shown=show_secrets):
            opened = open_run(
                paths, out, force=force, ranks=chosen, scheduler=scheduler, progress=progress
            )
            printed = opened.json if json else None
            if perfetto is not None:
                progress("exporting")
                write_perfetto(opened.trace, perfetto, force=force)
    finally:
        progress.close()
    fix = _COMPLETE.format(opened.folder)
    last = f"report: {opened.report}"
    if perfetto is not None:
        last += f"\ntimeline: {perfetto}, for https://ui.perfetto.dev"
    answer = Answer(opened.trace.meta.source, [] if json else opened.summary, printed, last)
    return answer._replace(if_unwritten=fix, shows_secrets=show_secrets)


def _kept_by(run: Path, *, json: bool) -> Answer | None:
    """Return the answer that a saved run keeps; None where its tables have to be read."""
    from kprof.report.kept_summary import kept_summary
    from kprof.storage import REPORT_FILE, SUFFIX, saved_result

    if json:
        printed = saved_result(run)
        return None if printed is None else Answer(run.name, [], printed)
    # A run under another name is copied, into a folder of that ending.
    kept = kept_summary(run) if run.suffix == SUFFIX else None
    if kept is None:
        return None
    folder = run.absolute()
    last = f"report: {folder / REPORT_FILE}"
    return Answer(*kept, last=last, if_unwritten=_COMPLETE.format(folder))


def _ranks_in(text: str) -> list[int]:
    """Return the ranks in a text as 0,8-15."""
    from kprof.collect.recorder.kprof_recorder.chosen import spans_in

    try:
        return [rank for span in spans_in(text) for rank in span]
    except ValueError as error:
        raise KprofError(
            f"--ranks {text}: {error.args[0] or 'nothing'} is no rank",
            fix="name ranks and spans of ranks: --ranks 0,8-15",
        ) from None


def _memory_of(path: Path, *, json: bool) -> Answer:
    """Return who holds the peak of each device in a memory snapshot of torch."""
    import msgspec

    from kprof.analyze.memory import find_peak
    from kprof.collect.memory_snapshot import read_snapshot
    from kprof.report.section import Section, Table
    from kprof.report.sections.memory import ORDER, TITLE, parts_of_peaks

    peaks = tuple(find_peak(history) for history in read_snapshot(path))
    if not peaks:
        raise TraceError(
            f"{path.name} holds no segment of memory", fix="take the snapshot while CUDA is in use"
        )
    printed = msgspec.json.format(msgspec.json.encode({"schema": 1, "memory": peaks}))
    # A snapshot has no page that could show the rest of a table.
    parts = [
        replace(part, terminal_rows=len(part.rows)) if isinstance(part, Table) else part
        for part in parts_of_peaks(peaks)
    ]
    section = Section(TITLE, ORDER, tuple(parts))
    last = "next: kprof run --memory SCRIPT, whose report names modules and owners"
    return Answer(path.name, [section], printed if json else None, last)


def _refuse_to_lose_a_run(paths: list[Path], out: Path | None, *, force: bool) -> None:
    """Refuse to write several paths over the first of them, where that is a saved run."""
    from kprof.storage import is_saved

    if len(paths) > 1 and out is None and not force and is_saved(paths[0]):
        first, second, *_ = paths
        raise KprofError(
            f"{first} is a run, and all of them taken for one job would replace it",
            fix=f"to compare two: kprof diff {first} {second}; for ranks of one job: --out DIR",
        )
