"""The recorder's output of each process: a folder in `raw/`, a part of the run."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from kprof.collect.recorder.kprof_recorder.chosen import is_chosen

# A name with a quote in it: before the process id, or alone on its line, as Kineto lays it out.
_QUOTED_NAME = re.compile(
    rb'(?<="name": ")[^"]*".*(?=", "pid": )|(?<=^    "name": ")(?:(?!", ").)*(?=",$)'
)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')


def leave_out_helpers(raw: Path) -> None:
    """Remove what processes without steps recorded, if others have steps.

    So are those that the multiprocessing of one with steps started, as a pool's workers are. A
    script that starts other programs would otherwise be reported as one of several ranks.
    """
    recorders = recorders_of(raw)
    stepping = {recorder["pid"] for recorder in recorders.values() if recorder["num_steps_seen"]}
    helpers = [
        part
        for part, recorder in recorders.items()
        if recorder["world_size"] == 1
        and (not recorder["num_steps_seen"] or recorder["started_by"] in stepping)
    ]
    if len(helpers) < len(recorders):
        for part in helpers:
            shutil.rmtree(part)


def leave_out_other_ranks(raw: Path, ranks: str) -> None:
    """Remove what ranks recorded that were not asked for: their launcher did not tell the rank."""
    for part, recorder in recorders_of(raw).items():
        if not is_chosen(ranks, recorder["rank"]):
            shutil.rmtree(part)


def recorders_of(raw: Path) -> dict[Path, dict[str, Any]]:
    """Return what each process says of itself, by its folder.

    One that withdraws meanwhile, or was cut off while it wrote, is left out.
    """
    found = {}
    for path in sorted(raw.glob("rank*-pid*/recorder.json")):
        with contextlib.suppress(FileNotFoundError, JSONDecodeError):
            found[path.parent] = json.loads(path.read_text())
    return found


def compress_parts(raw: Path) -> tuple[Path, ...]:
    """Compress the traces that the recorder wrote plainly, and return their folders."""
    names = ("window", "light", "graph")
    traces = [path for name in names for path in raw.glob(f"rank*-pid*/{name}-*.json")]
    for trace in sorted(traces):
        unfinished = trace.with_name(f".{trace.name}.gz")
        try:
            with trace.open("rb") as plain, gzip.open(unfinished, "wb", compresslevel=1) as packed:
                packed.writelines(map(escape_name, plain))
        except (OSError, KeyboardInterrupt):
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.replace(trace.with_name(f"{trace.name}.gz"))
        trace.unlink()
    return tuple(sorted(trace.parent for trace in raw.glob("rank*-pid*/window-0.json.gz")))


def escape_name(line: bytes) -> bytes:
    """Escape the quotes in an event's name, which torch writes as they are (2.13 still does)."""
    if b'"name": "' not in line:
        return line
    return _QUOTED_NAME.sub(lambda name: _BARE_QUOTE.sub(rb'\\"', name[0]), line)
