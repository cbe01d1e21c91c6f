"""The reading of load generators' result files: choice of the reader, decoding, units, errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Response, Responses, Times
from kprof.collect.sources import head_of, require_file_or_folder
from kprof.errors import KprofError, modules_in

LONGEST_NS = 2.0**61
"""Longer than any time, and short enough that two of them can be added."""
RECORD_AGAIN = "copy the file again, or record it again"

T = TypeVar("T")
V = TypeVar("V")


class ResultError(KprofError):
    """A result file that cannot be read, or from which no request can be told."""


RECORDED_BY = (
    "AIPerf (profile_export.jsonl), vllm bench serve (--save-result --save-detailed), "
    "GuideLLM (its JSON report), SGLang bench_serving (--output-details), inference-perf "
    "(per_request_lifecycle_metrics.json) and genai-bench"
)

MOST_TOKENS = 2**40
"""More than any answer has, and few enough to be added up."""

TIMES = ("ttfts", "itls", "latencies")


class Columns(msgspec.Struct):
    """The lists of a result, one entry a request each, as vLLM and SGLang write it; in seconds."""

    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    output_lens: list[int] | None = None
    input_lens: list[int] | None = None
    errors: list[str] | None = None
    generated_texts: list[str] | None = None
    start_times: list[float] | None = None
    queue_times: list[float] | None = None
    latencies: list[float] | None = None
    request_rate: float | str | None = None
    max_concurrency: int | None = None

    @property
    def capped(self) -> str:
        """The end of a load's name: how many requests run at a time at most."""
        return f", {self.max_concurrency} at a time at most" if self.max_concurrency else ""


class Request(NamedTuple):
    """The entries of one request; times in seconds, missing where the file has none."""

    ttft_s: float
    gaps_s: list[float]
    num_tokens: int | None
    input_tokens: int | None
    error: str
    text: str | None
    started_s: float | None
    waited_s: float | None
    took_s: float | None


class Arrived(NamedTuple):
    """When the chunks of an answer came, as in `Response`."""

    chunk_ns: Times = NO_TIMES
    has_every_chunk: bool = True
    end_ns: int | None = None
    tokens: Times | None = None


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
    return next((r for r in modules_in("kprof.collect.loadgen") if r.knows(path, head)), None)


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


def _is_doubled(rows: Sequence[Response]) -> bool:
    """Tell whether at least half of the requests repeat another one, to the nanosecond."""
    if len({row.sent_ns for row in rows}) < 2:
        return False  # Not known when each was sent.
    told = {(row.sent_ns, row.end_ns, row.outcome, row.chunk_ns.tobytes()) for row in rows}
    return 2 * len(told) <= len(rows)


def is_result(name: str) -> bool:
    """Tell whether some reader knows what `name` leads to."""
    path, _ = _split(name)
    return path.exists() and _find_reader(path) is not None


def requests_of(result: Columns, path: Path, tool: str, option: str) -> list[Request]:
    """Return the requests of a result.

    Raises:
        ResultError: the file is damaged, or was saved without details (`option` saves them).
    """
    ttfts, itls, lengths = result.ttfts, result.itls, result.output_lens
    if not ttfts or itls is None or lengths is None:
        raise without_details(path, tool, option)
    kept = (itls, lengths, result.errors, result.start_times)
    # A version that does not record one of these may write an empty list.
    others = (result.input_lens, result.queue_times, result.latencies, result.generated_texts)
    if any(column is not None and len(column) != len(ttfts) for column in kept) or any(
        column and len(column) != len(ttfts) for column in others
    ):
        raise damaged(path, tool, "its lists differ in length")
    for name in TIMES:
        _refuse_negative(getattr(result, name) or (), name, path, tool)
    return [
        Request(
            ttfts[i],
            itls[i],
            lengths[i],
            at(result.input_lens, i),
            at(result.errors, i) or "",
            at(result.generated_texts, i),
            at(result.start_times, i),
            at(result.queue_times, i),
            at(result.latencies, i),
        )
        for i in range(len(ttfts))
    ]


def decode(text: bytes, path: Path, kind: type[T], tool: str) -> T:
    """Decode JSON of a file; what is not asked for is skipped."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise damaged(path, tool, str(error)) from error


def damaged(path: Path, tool: str, why: str) -> ResultError:
    """Return the error on a file that is not what its beginning says."""
    problem = f"{path.name} is a damaged result of {tool}: {why}"
    return ResultError(problem, fix=RECORD_AGAIN)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
        raise ResultError(problem, fix="check the path, and that you may read it") from error


def in_ns(amount: object, unit_ns: float = 1e9) -> int:
    """Return whole nanoseconds of an amount in a unit, seconds unless told otherwise."""
    return round(_amount_ns(amount, unit_ns))


def _amount_ns(amount: object, unit_ns: float) -> float:
    if not isinstance(amount, int | float) or not abs(amount) * unit_ns < LONGEST_NS:
        raise ResultError(f"{amount!r} stands where a time belongs", fix=RECORD_AGAIN)
    return amount * unit_ns


def arrivals(first_ns: int, gaps: object, unit_ns: float = 1e9) -> Times:
    """Return when chunks arrived: the first, and the others after the gaps between them."""
    if not isinstance(gaps, list) or not all(isinstance(gap, int | float) for gap in gaps):
        raise ResultError(f"{gaps!r} stands where a list of gaps belongs", fix=RECORD_AGAIN)
    if abs(first_ns) >= LONGEST_NS:
        raise ResultError(f"{first_ns} ns stands where a time belongs", fix=RECORD_AGAIN)
    after_ns = [took_ns(total, unit_ns) for total in accumulate(gaps, initial=0.0)]
    return first_ns + np.array(after_ns, np.int64)


def took_ns(amount: object, unit_ns: float = 1e9) -> int:
    """Return a duration in whole nanoseconds, rounded up: a limit that it breaks stays broken.

    A picosecond is put to the arithmetic of floats: 0.1 s + 0.2 s are 0.3 s.
    """
    return math.ceil(round(_amount_ns(amount, unit_ns), 3))


def without_details(path: Path, tool: str, option: str) -> ResultError:
    """Return the error on a summary, from which no percentile can be proven."""
    return ResultError(f"{path.name} holds no single requests of {tool}", fix=option)


def _refuse_negative(
    column: Sequence[float | list[float]], name: str, path: Path, tool: str
) -> None:
    for i, times in enumerate(column, start=1):
        if min(times if isinstance(times, list) else [times], default=0.0) < 0:
            raise damaged(path, tool, f"{name} of request {i} is negative")


def at(column: Sequence[V] | None, place: int) -> V | None:
    """Return the value at a place of a list that may be missing or too short."""
    return column[place] if column is not None and place < len(column) else None


def response_of(
    request: Request,
    arrived: Arrived,
    sent_ns: int,
    due_ns: int | None = None,
    *,
    is_due_known: bool = True,
) -> Response:
    """Return a request with its answer; one with an error or without tokens has failed."""
    is_answered = not request.error and request.num_tokens != 0
    return Response(
        sent_ns,
        "answered" if is_answered else "failed",
        due_ns,
        arrived.chunk_ns,
        has_every_chunk=arrived.has_every_chunk,
        tokens=arrived.tokens if is_answered else None,
        is_due_known=is_due_known,
        end_ns=arrived.end_ns,
        input_tokens=request.input_tokens,
        output_tokens=request.num_tokens if is_answered else None,
        error=request.error or ("" if is_answered else "no output"),
    )


def first_ns_of(request: Request) -> int | None:
    """Return the time to the first chunk; None: none came, or the answer was not streamed."""
    return took_ns(request.ttft_s) if request.ttft_s > 0 else None
