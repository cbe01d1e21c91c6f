"""GuideLLM's report: one benchmark for each load, in it requests by outcome.

A streamed answer has the times of its first and last chunk and the number of chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Load, LoadKind, Outcome, Response, Responses
from kprof.collect.load_results import damaged, decode, in_ns, read_bytes, without_details
from kprof.errors import counted
from kprof.trace import Caveat

TOOL = "GuideLLM"
OPTION = "record the requests: leave out the option that samples them (sample_requests)"
SCHEDULED = ("constant", "poisson", "trace", "replay", "async")


class _Timings(msgspec.Struct):
    """Seconds of wall time; names changed from version 0.3 to 0.5."""

    targeted_start: float | None = None
    request_start: float | None = None
    resolve_start: float | None = None
    first_token_iteration: float | None = None
    first_iteration: float | None = None
    last_token_iteration: float | None = None
    last_iteration: float | None = None
    token_iterations: int | None = None
    iterations: int | None = None
    request_end: float | None = None
    resolve_end: float | None = None


class _Info(msgspec.Struct):
    timings: _Timings | None = None
    request_timings: _Timings | None = None
    scheduler_timings: _Timings | None = None
    error: str | None = None


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    text_tokens: int | None = None


class _Request(msgspec.Struct):
    """A request, nested since version 0.3, flat before."""

    info: _Info | None = None
    scheduler_info: _Info | None = None
    input_metrics: _Usage | None = None
    output_metrics: _Usage | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    iterations: int | None = None
    start_time: float | None = None
    end_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    error: str | None = None


class _ByOutcome(msgspec.Struct):
    successful: list[_Request] | None = None
    incomplete: list[_Request] | None = None
    errored: list[_Request] | None = None


class _Totals(msgspec.Struct):
    total: int | None = None


class _Metrics(msgspec.Struct):
    request_totals: _Totals | None = None


class _Strategy(msgspec.Struct):
    type_: str = "unknown"
    rate: float | None = None
    streams: int | None = None
    max_concurrency: int | None = None


class _Arguments(msgspec.Struct):
    strategy: _Strategy | None = None


class _Benchmark(msgspec.Struct):
    requests: _ByOutcome | None = None
    metrics: _Metrics | None = None
    request_totals: _Totals | None = None
    config: _Arguments | None = None
    scheduler: _Arguments | None = None
    args: _Arguments | None = None


class _Report(msgspec.Struct):
    benchmarks: list[_Benchmark]


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a file is a report of GuideLLM."""
    return b'"guidellm_version"' in head or (b'"benchmarks"' in head and b'"type_"' in head)


def read(path: Path) -> list[Responses]:
    """Read the requests of every load in the report.

    Raises:
        KprofError: the file is damaged, or holds no requests or a sample of them.
    """
    report = decode(read_bytes(path), path, _Report, TOOL)
    return [_responses(benchmark, path) for benchmark in report.benchmarks]


def _responses(benchmark: _Benchmark, path: Path) -> Responses:
    strategy = _strategy_of(benchmark)
    is_scheduled = strategy.type_ in SCHEDULED
    found = benchmark.requests or _ByOutcome()
    by_outcome: tuple[tuple[Outcome, list[_Request]], ...] = (
        ("answered", found.successful or []),
        ("cancelled", found.incomplete or []),
        ("failed", found.errored or []),
    )
    rows, num_unsent = [], 0
    for outcome, requests in by_outcome:
        for request in requests:
            row = _response(request, outcome, is_scheduled=is_scheduled)
            if row is not None:
                rows.append(row)
            elif outcome == "cancelled":
                num_unsent += 1
            else:
                raise damaged(path, TOOL, f"a request ({outcome}) has no start")
    num_requests = sum(len(requests) for _, requests in by_outcome)
    totals = (benchmark.metrics and benchmark.metrics.request_totals) or benchmark.request_totals
    if not rows or (totals and totals.total and totals.total > num_requests):
        raise without_details(path, TOOL, OPTION)
    load = Load(*_load(strategy))
    return Responses(path.name, TOOL, load, tuple(rows), _doubts(num_unsent))


def _strategy_of(benchmark: _Benchmark) -> _Strategy:
    for place in (benchmark.config, benchmark.scheduler, benchmark.args):
        if place is not None and place.strategy is not None:
            return place.strategy
    return _Strategy()


def _response(request: _Request, outcome: Outcome, *, is_scheduled: bool) -> Response | None:
    times = _timings_of(request)
    start = times.request_start or times.resolve_start
    if start is None and outcome == "failed":
        # It failed before it was sent, which is no less a failure.
        start = times.targeted_start or times.request_end or times.resolve_end
    if start is None:
        return None
    first = times.first_token_iteration or times.first_iteration
    last = times.last_token_iteration or times.last_iteration
    num_chunks = times.token_iterations or times.iterations or request.iterations
    output_tokens = _tokens(request.output_metrics, request.output_tokens)
    chunk_ns = NO_TIMES
    if first is not None:
        both = (first,) if last is None or num_chunks == 1 or last == first else (first, last)
        chunk_ns = np.array([in_ns(time) for time in both], np.int64)
    end = last or times.request_end or times.resolve_end
    return Response(
        in_ns(start),
        outcome,
        in_ns(times.targeted_start) if is_scheduled and times.targeted_start else None,
        chunk_ns,
        has_every_chunk=len(chunk_ns) < 2 or num_chunks == 2,
        is_due_known=not is_scheduled or times.targeted_start is not None,
        num_chunks=num_chunks,
        end_ns=in_ns(_end_of(times, end, outcome)) if end else None,
        input_tokens=_tokens(request.input_metrics, request.prompt_tokens),
        output_tokens=output_tokens or None if outcome == "answered" else None,
        error=_error_of(request) if outcome == "failed" else "",
    )


def _timings_of(request: _Request) -> _Timings:
    info = request.info or request.scheduler_info
    if info is None or (info.timings is None and info.request_timings is None):
        return _Timings(
            request_start=request.start_time,
            first_token_iteration=request.first_token_time,
            last_token_iteration=request.last_token_time,
            request_end=request.end_time,
        )
    times = info.timings or info.request_timings or _Timings()
    if times.targeted_start is None and info.scheduler_timings is not None:
        due = info.scheduler_timings.targeted_start
        times = msgspec.structs.replace(times, targeted_start=due)
    return times


def _tokens(usage: _Usage | None, flat: int | None) -> int | None:
    if usage is None:
        return flat
    return usage.total_tokens if usage.total_tokens is not None else usage.text_tokens


def _end_of(
    times: _Timings, end: float, outcome: Literal["answered", "failed", "cancelled"]
) -> float:
    """Return the end of an answer's content, or when a request was given up."""
    if outcome == "answered":
        return end
    return times.request_end or times.resolve_end or end


def _error_of(request: _Request) -> str:
    info = request.info or request.scheduler_info
    return request.error or (info.error if info else None) or "error"


def _load(strategy: _Strategy) -> tuple[LoadKind, str]:
    kind, rate = strategy.type_, strategy.rate
    if kind in SCHEDULED:
        return "open", f"{rate:g} requests/s, {kind}" if rate else kind
    if kind == "concurrent":
        return "closed", f"{strategy.streams or strategy.max_concurrency} at a time"
    if kind == "synchronous":
        return "closed", "1 at a time"
    if kind == "throughput":
        return "closed", "as many at a time as possible"
    return "unknown", "load not recorded"


def _doubts(num_unsent: int) -> tuple[Caveat, ...]:
    """Say what is left out: a request without a start, when the load ended, was never sent."""
    left_out = f"left out: {counted(num_unsent, 'request')} that never began"
    return (Caveat("unsent_left_out", left_out),) if num_unsent else ()
