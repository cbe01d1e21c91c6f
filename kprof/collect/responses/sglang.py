"""SGLang's `bench_serving --output-details`: a line for every run, lists for its requests."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from kprof.collect.result_json import (
    arrivals,
    at,
    damaged,
    decode,
    in_ns,
    read_bytes,
    without_details,
)
from kprof.responses import NO_TIMES, Load, Response, Responses, Times

TOOL = "SGLang bench_serving"
OPTION = "record with `python -m sglang.bench_serving --output-details --output-file FILE`"
NOT_A_NUMBER = re.compile(rb"(:\s*)(-?Infinity|NaN)(?=\s*[,}])")
NO_SENDING = (
    "SGLang's bench_serving does not record when requests were sent: no rates, no length of the "
    "load"
)
NO_WAIT = (
    "the file does not say how long requests waited in the client for a place among those that "
    "run at a time, so no time from when they were due is met"
)


class _Result(msgspec.Struct):
    """What is read of a run; times in seconds."""

    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    output_lens: list[int] | None = None
    input_lens: list[int] | None = None
    errors: list[str] | None = None
    start_times: list[float] | None = None
    request_rate: float | str | None = None
    max_concurrency: int | None = None


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a file is a result of SGLang's benchmark, in detail or not."""
    return b'"total_output_tokens_retokenized"' in head


def read(path: Path) -> list[Responses]:
    """Read the requests of every run in the file; a line is a run.

    Raises:
        KprofError: the file is damaged, or was saved without details.
    """
    lines = [line for line in read_bytes(path).splitlines() if line.strip()]
    # A rate of infinity is written as Python does, which is no JSON.
    plain = [NOT_A_NUMBER.sub(rb"\1null", line) for line in lines]
    return [_responses(decode(line, path, _Result, TOOL), path) for line in plain]


def _responses(result: _Result, path: Path) -> Responses:
    ttfts, itls, lengths = result.ttfts, result.itls, result.output_lens
    if not ttfts or itls is None or lengths is None:
        raise without_details(path, TOOL, OPTION)
    for column in (itls, lengths, result.errors, result.input_lens, result.start_times):
        if column is not None and len(column) != len(ttfts):
            raise damaged(path, TOOL, "its lists differ in length")
    if any(min([ttft, *gaps]) < 0 for ttft, gaps in zip(ttfts, itls, strict=True)):
        raise damaged(path, TOOL, "it holds a negative time")
    load = _load(result)
    rows = tuple(_response(result, i, load) for i in range(len(ttfts)))
    doubts = () if result.start_times else (NO_SENDING,)
    return Responses(path.name, TOOL, load, rows, doubts)


def _response(result: _Result, i: int, load: Load) -> Response:
    assert result.ttfts is not None
    assert result.itls is not None
    assert result.output_lens is not None
    sent_ns, error = in_ns(at(result.start_times, i) or 0.0), at(result.errors, i) or ""
    first_ns, num_tokens = in_ns(result.ttfts[i]), result.output_lens[i]
    is_answered = not error and num_tokens > 0
    chunk_ns = NO_TIMES
    if first_ns > 0:
        chunk_ns = _as_chunks(arrivals(sent_ns + first_ns, result.itls[i]), result.itls[i])
    # One chunk of many tokens may be the first of an answer that then was not streamed.
    has_every_chunk = len(chunk_ns) != 1 or num_tokens == 1
    return Response(
        sent_ns,
        "answered" if is_answered else "failed",
        chunk_ns=chunk_ns,
        has_every_chunk=has_every_chunk,
        is_due_known=load.kind == "closed" or result.max_concurrency is None,
        end_ns=int(chunk_ns[-1]) if len(chunk_ns) and has_every_chunk else None,
        input_tokens=at(result.input_lens, i),
        output_tokens=num_tokens if is_answered else None,
        error=error or ("" if is_answered else "no output"),
    )


def _as_chunks(chunk_ns: Times, gaps: list[float]) -> Times:
    """Return when tokens came, of which SGLang spreads those of one chunk over its gap.

    They came at the end of the gap, all at once; such gaps are the same to the last digit.
    """
    times = chunk_ns.copy()
    for i in range(len(gaps) - 2, -1, -1):
        if gaps[i] == gaps[i + 1]:
            times[i + 1] = times[i + 2]
    return np.asarray(times, np.int64)


def _load(result: _Result) -> Load:
    rate, limit = result.request_rate, result.max_concurrency
    capped = f", {limit} at a time at most" if limit else ""
    why = NO_WAIT if limit else ""
    if isinstance(rate, float) and np.isfinite(rate):
        return Load("open", f"{rate:g} requests/s, Poisson{capped}", why)
    if rate == "trace":
        return Load("open", f"a timed trace{capped}", why)
    if limit:
        return Load("closed", f"{limit} at a time")
    return Load("open", "all requests at once", "all requests were sent at once: a burst, no load")
