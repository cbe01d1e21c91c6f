"""inference-perf: `per_request_lifecycle_metrics.json`, a list with an entry for every request.

The reports of its stages beside it tell which requests were of which load.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Load, Response, Responses, Times
from kprof.collect.load_results import decode, in_ns, read_bytes, took_ns, without_details
from kprof.errors import KprofError
from kprof.trace import Caveat

TOOL = "inference-perf"
RECORDS = "per_request_lifecycle_metrics.json"
OPTION = f"set report.request_lifecycle.per_request to true, and name {RECORDS}"
STAGES = "stage_*_lifecycle_metrics.json"
BEGINNING = re.compile(
    rb'\s*\[\s*\{\s*"start_time":[^,]*,\s*"end_time":[^,]*,\s*'
    rb'"(request|response|info|computed_metrics|error)":'
)
NO_SCHEDULE = Caveat(
    "no_stages",
    "inference-perf does not record when a request was due or which stage it belongs to, and the "
    "reports of its stages are not beside the file: a client that sent too late, and loads of "
    "several stages, go unnoticed",
)
LATEST = (
    "inference-perf records how late the latest request of a stage was sent, and each counts as "
    "that late"
)


class _Usage(msgspec.Struct):
    """Tokens by the server, in the spelling of OpenAI or Anthropic."""

    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    output_tokens: int | None = None
    chunk_times: list[float] | None = None
    output_token_times: list[float] | None = None
    server_usage: _Usage | None = None


class _Info(msgspec.Struct):
    """The fields of a request; versions before 0.5 have no `response_metrics`."""

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


class _Delay(msgspec.Struct):
    max: float | None = None


class _LoadSummary(msgspec.Struct):
    count: int
    schedule_delay: _Delay | None = None
    requested_rate: float | None = None
    concurrency: int | None = None


class _Stage(msgspec.Struct):
    load_summary: _LoadSummary


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
    stages = _stages_beside(records)
    if sum(stage.count for stage in stages) != len(requests):
        rows = tuple(_response(request) for request in requests)
        load = Load("unknown", "load not recorded")
        return [Responses(records.name, TOOL, load, rows, (NO_SCHEDULE,))]
    # A stage begins after the one before it has ended.
    requests.sort(key=lambda request: request.start_time)
    runs, first = [], 0
    for stage in stages:
        runs.append(_run_of(stage, requests[first : first + stage.count], records.name))
        first += stage.count
    return runs


def _stages_beside(records: Path) -> list[_LoadSummary]:
    """Return the loads of the stages in their order; none where a report cannot be read."""
    by_number = {
        int(found[1]): path
        for path in records.parent.glob(STAGES)
        if (found := re.fullmatch(r"stage_(\d+)_lifecycle_metrics\.json", path.name))
    }
    try:
        return [
            decode(read_bytes(path), path, _Stage, TOOL).load_summary
            for _, path in sorted(by_number.items())
        ]
    except KprofError:
        return []


def _response(
    request: _Request, late_ns: int | None = None, *, is_due_known: bool = True
) -> Response:
    info = request.info or _Info()
    answer = info.response_metrics or _Answer(info.output_tokens, info.output_token_times)
    times = answer.chunk_times or answer.output_token_times or []
    chunk_ns = np.array([in_ns(time) for time in times], np.int64) if times else NO_TIMES
    token_ns = np.array([in_ns(time) for time in answer.output_token_times or []], np.int64)
    error, num_tokens = request.error, _tokens(answer)
    end_ns = None if request.end_time is None else in_ns(request.end_time)
    # An answer without choices or text is recorded as one without an error.
    is_empty = not times and num_tokens is None
    has_failed = error is not None or end_ns is None or is_empty
    sent_ns = in_ns(request.start_time)
    return Response(
        sent_ns,
        "failed" if has_failed else "answered",
        None if late_ns is None else sent_ns - late_ns,
        chunk_ns,
        tokens=None if has_failed else _tokens_by_chunk(chunk_ns, token_ns, num_tokens),
        is_due_known=is_due_known,
        # The end is noticed after the last content.
        end_ns=int(chunk_ns[-1]) if len(chunk_ns) and not has_failed else end_ns,
        input_tokens=info.input_tokens,
        output_tokens=None if has_failed else num_tokens,
        error=_said(error) if error else "no output" if is_empty else "",
    )


def _said(error: _Error) -> str:
    return error.error_type or error.error_msg or "error"


def _tokens(answer: _Answer) -> int | None:
    """Return the tokens that the server counted, else those of the client's tokenizer."""
    usage = answer.server_usage or _Usage()
    told = usage.completion_tokens or usage.output_tokens
    return told or answer.output_tokens or None


def _tokens_by_chunk(chunk_ns: Times, token_ns: Times, num_tokens: int | None) -> Times | None:
    """Return the tokens that had come with each chunk; None: not every token has a time."""
    if not len(chunk_ns) or len(token_ns) != num_tokens:
        return None
    come: Times = np.searchsorted(token_ns, chunk_ns, side="right").astype(np.int64)
    return come if come[0] > 0 and come[-1] == num_tokens else None


def _run_of(stage: _LoadSummary, requests: list[_Request], source: str) -> Responses:
    late_s = stage.schedule_delay.max if stage.schedule_delay else None
    if stage.concurrency:
        load = Load("closed", f"{stage.concurrency} at a time")
    elif stage.requested_rate is None:
        load = Load("unknown", "load not recorded")
    else:
        load = Load("open", f"{stage.requested_rate:g} requests/s", LATEST if late_s else "")
    late_ns = took_ns(max(late_s, 0.0)) if late_s is not None and load.kind == "open" else None
    is_due_known = load.kind != "open" or late_ns is not None
    rows = tuple(_response(each, late_ns, is_due_known=is_due_known) for each in requests)
    return Responses(source, TOOL, load, rows)
