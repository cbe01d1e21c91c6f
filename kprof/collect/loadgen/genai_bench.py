"""genai-bench: a file for each scenario at one concurrency, with the metrics of every request.

An answer has the time to its first token and to its end, and no time of sending.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Load, Outcome, Response, Responses
from kprof.collect.load_results import damaged, decode, read_bytes, took_ns, without_details
from kprof.trace import Caveat

TOOL = "genai-bench"
OPTION = "name the file of one scenario and concurrency in the experiment's folder"
UNIT_NS = {"s": 1e9, "ms": 1e6}
NO_SENDING = Caveat(
    "no_sending_times",
    "genai-bench does not record when requests were sent: no rates, no length of the load",
)


class _Request(msgspec.Struct):
    ttft: float | None = None
    e2e_latency: float | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    error_code: int | None = None
    error_message: str | None = None


class _Aggregated(msgspec.Struct):
    num_concurrency: int | None = None


class _Result(msgspec.Struct):
    individual_request_metrics: list[_Request] | None = None
    aggregated_metrics: _Aggregated | None = None
    time_unit: str = msgspec.field(name="_time_unit", default="s")


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a file is a result of genai-bench."""
    return b'"aggregated_metrics"' in head and b'"num_concurrency"' in head


def read(path: Path) -> list[Responses]:
    """Read the requests of one run.

    Raises:
        KprofError: the file is damaged, or holds no requests.
    """
    result = decode(read_bytes(path), path, _Result, TOOL)
    if not result.individual_request_metrics:
        raise without_details(path, TOOL, OPTION)
    if result.time_unit not in UNIT_NS:
        raise damaged(path, TOOL, f"{result.time_unit!r} stands where s or ms belongs")
    unit_ns = UNIT_NS[result.time_unit]
    rows = tuple(_response(row, unit_ns) for row in result.individual_request_metrics)
    num = result.aggregated_metrics.num_concurrency if result.aggregated_metrics else None
    load = Load("closed", f"{num} at a time") if num else Load("unknown", "load not recorded")
    return [Responses(path.name, TOOL, load, rows, (NO_SENDING,))]


def _response(request: _Request, unit_ns: float) -> Response:
    has_failed = request.error_code is not None or request.e2e_latency is None
    outcome: Outcome = "failed" if has_failed else "answered"
    end_ns = None if request.e2e_latency is None else took_ns(request.e2e_latency, unit_ns)
    chunk_ns = NO_TIMES
    if request.ttft is not None and end_ns is not None and not has_failed:
        chunk_ns = np.unique([took_ns(request.ttft, unit_ns), end_ns]).astype(np.int64)
        # Times that run backwards are refused with the number of the request.
        if request.ttft > (request.e2e_latency or 0):
            chunk_ns = chunk_ns[::-1]
    return Response(
        0,
        outcome,
        chunk_ns=chunk_ns,
        has_every_chunk=len(chunk_ns) < 2,
        end_ns=end_ns,
        input_tokens=request.num_input_tokens,
        output_tokens=None if has_failed else request.num_output_tokens or None,
        error=(request.error_message or f"error {request.error_code}") if has_failed else "",
    )
