"""Which reader knows a result file, and which of its loads is meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from kprof.collect.result_json import LONGEST_NS, ResultError
from kprof.collect.sources import head_of, require_file_or_folder
from kprof.discover import modules_in
from kprof.responses import Response, Responses

RECORDED_BY = (
    "AIPerf (profile_export.jsonl), vllm bench serve (--save-result --save-detailed), "
    "GuideLLM (its JSON report), SGLang bench_serving (--output-details), inference-perf "
    "(per_request_lifecycle_metrics.json) and genai-bench"
)


MOST_TOKENS = 2**40
"""More than any answer has, and few enough to be added up."""


def read_result(name: str) -> Responses:
    """Read the requests of a result file; `FILE#2` means the second load in it.

    Raises:
        KprofError: it cannot be read, no reader knows it, or it holds several loads.
    """
    path, place = _split(name)
    require_file_or_folder(path)
    reader = _reader_of(path)
    try:
        loads: list[Responses] = reader.read(path)
    except ResultError as error:
        if path.name in error.problem:
            raise
        raise ResultError(f"{path.name}: {error.problem}", fix=error.fix) from error
    if place is None and len(loads) > 1:
        listed = ", ".join(f"#{i} {run.load.name}" for i, run in enumerate(loads, start=1))
        problem = f"{path.name} holds {len(loads)} loads, each with percentiles of its own"
        raise ResultError(problem, fix=f"name one, as {path}#1; there are {listed}")
    if not 1 <= (place or 1) <= len(loads):
        problem = f"{path.name} has no load #{place}, there are {len(loads)}"
        raise ResultError(problem, fix=f"name one as {path}#1")
    chosen = loads[(place or 1) - 1]
    for number, row in enumerate(chosen.rows, start=1):
        if not _is_possible(row):
            problem = f"{path.name}: request {number} was answered before it was sent, or backwards"
            raise ResultError(problem, fix="its clock was set meanwhile; record it again")
    if _is_doubled(chosen.rows):
        problem = f"{path.name} holds its requests twice, and they would count twice"
        raise ResultError(problem, fix="name the file as it was recorded, or record it again")
    return chosen


def _is_doubled(rows: Sequence[Response]) -> bool:
    """Tell whether at least half of the requests repeat another one, to the nanosecond."""
    if len({row.sent_ns for row in rows}) < 2:
        return False  # Not known when each was sent.
    told = {(row.sent_ns, row.end_ns, row.outcome, row.chunk_ns.tobytes()) for row in rows}
    return 2 * len(told) <= len(rows)


def _is_possible(row: Response) -> bool:
    """Tell whether what came for a request came after it, in order, and not less than nothing."""
    times = [row.sent_ns, *row.chunk_ns[:1].tolist(), *row.chunk_ns[-1:].tolist()]
    ends = [] if row.end_ns is None else [row.end_ns]
    is_in_order = times == sorted(times) and not (np.diff(row.chunk_ns) < 0).any()
    counts = (row.output_tokens, row.input_tokens, row.num_chunks)
    return (
        is_in_order
        and all(row.sent_ns <= end for end in ends)
        and all(count is None or 0 <= count < MOST_TOKENS for count in counts)
        and abs(row.due_ns) < LONGEST_NS
        and all(abs(time) < LONGEST_NS for time in [*times, *ends])
    )


def is_result(name: str) -> bool:
    """Tell whether some reader knows what `name` leads to."""
    path, _ = _split(name)
    return path.exists() and _find_reader(path) is not None


def _split(name: str) -> tuple[Path, int | None]:
    path, mark, place = name.rpartition("#")
    if mark and place.isdecimal() and not Path(name).exists():
        return Path(path), int(place)
    return Path(name), None


def _reader_of(path: Path) -> ModuleType:
    reader = _find_reader(path)
    if reader is None:
        raise ResultError(
            f"{path} is not a result file of a known load generator",
            fix=f"it reads those of {RECORDED_BY}; of a recorded run, step times (step_p50<=60ms)",
        )
    return reader


def _find_reader(path: Path) -> ModuleType | None:
    head = b"" if path.is_dir() else head_of(path)
    return next((r for r in modules_in("kprof.collect.responses") if r.knows(path, head)), None)
