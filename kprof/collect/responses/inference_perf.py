"""inference-perf: `per_request_lifecycle_metrics.json`, a list with an entry for every request."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from kprof.collect.result_json import decode, in_ns, read_bytes, without_details
from kprof.responses import NO_TIMES, Load, Response, Responses

TOOL = "inference-perf"
RECORDS = "per_request_lifecycle_metrics.json"
OPTION = f"set report.request_lifecycle.per_request to true, and name {RECORDS}"
BEGINNING = re.compile(rb'\s*\[\s*\{\s*"start_time":[^,]*,\s*"end_time":[^,]*,\s*"request":')
NO_SCHEDULE = (
    "inference-perf does not record when a request was due or which stage it belongs to: a client "
    "that sent too late, and loads of several stages, go unnoticed"
)


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    output_tokens: int | None = None
    chunk_times: list[float] | None = None
    output_token_times: list[float] | None = None
    server_usage: _Usage | None = None


class _Info(msgspec.Struct):
    """What is known of a request; versions before 0.5 have no `response_metrics`."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    output_token_times: list[float] | None = None
    response_metrics: _Answer | None = None


class _Error(msgspec.Struct):
    error_type: str | None = None
    error_msg: str | None = None


class _Request(msgspec.Struct):
    start_time: float
    end_time: float | None = None
    info: _Info | None = None
    error: _Error | None = None


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a file is a report of inference-perf, of requests or a summary."""
    if path.is_dir():
        return (path / RECORDS).is_file()
    is_summary = b'"load_summary"' in head and b'"successes"' in head
    return path.name == RECORDS or is_summary or bool(BEGINNING.match(head))


def read(path: Path) -> list[Responses]:
    """Read the requests of a report.

    Raises:
        KprofError: the file is damaged, or a summary.
    """
    records = path / RECORDS if path.is_dir() else path
    text = read_bytes(records)
    if text.lstrip().startswith(b"{"):
        raise without_details(records, TOOL, OPTION)
    requests = decode(text, records, list[_Request], TOOL)
    if not requests:
        raise without_details(records, TOOL, OPTION)
    rows = tuple(_response(request) for request in requests)
    load = Load("unknown", "load not recorded")
    return [Responses(records.name, TOOL, load, rows, (NO_SCHEDULE,))]


def _response(request: _Request) -> Response:
    info = request.info or _Info()
    answer = info.response_metrics or _Answer(info.output_tokens, info.output_token_times)
    times = answer.chunk_times or answer.output_token_times or []
    chunk_ns = np.array([in_ns(time) for time in times], np.int64) if times else NO_TIMES
    error = request.error
    end_ns = None if request.end_time is None else in_ns(request.end_time)
    has_failed = error is not None or end_ns is None
    return Response(
        in_ns(request.start_time),
        "failed" if has_failed else "answered",
        chunk_ns=chunk_ns,
        # The end is noticed after the last content.
        end_ns=int(chunk_ns[-1]) if len(chunk_ns) and not has_failed else end_ns,
        input_tokens=info.input_tokens,
        output_tokens=None if has_failed else _tokens(answer),
        error=(error.error_type or error.error_msg or "error") if error else "",
    )


def _tokens(answer: _Answer) -> int | None:
    """Return the tokens that the server counted, else those of the client's tokenizer."""
    told = answer.server_usage.completion_tokens if answer.server_usage else None
    return told or answer.output_tokens or None
