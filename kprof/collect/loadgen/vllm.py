"""`vllm bench serve --save-result --save-detailed`: lists with an entry for every request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kprof.analyze.sla.responses import Load, Response, Responses
from kprof.collect.load_results import (
    Arrived,
    Columns,
    Request,
    arrivals,
    decode,
    first_ns_of,
    in_ns,
    read_bytes,
    requests_of,
    response_of,
    took_ns,
)
from kprof.errors import counted
from kprof.trace import Caveat

TOOL = "vllm bench serve"
NO_SENDING = Caveat(
    "no_sending_times",
    "this version of vLLM does not record when requests were sent: no rates, no lateness",
)
NOT_KNOWN = (
    "the file does not say how long requests waited in the client for a place among those that "
    "run at a time, so no time from when they were due is met; record it with a newer vLLM"
)
LAST_CHUNK_NS = 1_000_000
"""An answer ends with its last chunk, but for a message without tokens right after it."""
BURST_S_PER_REQUEST = 1e-3
"""Requests that are due at once are created within microseconds each."""
FULL_SHARE = 0.9
"""Share of the limit; a slot is reused at once, except for requests that end together."""
OPTION = "record with `vllm bench serve --save-result --save-detailed`"


class _Result(Columns):
    """Further fields that vLLM records."""

    burstiness: float | None = None
    ramp_up_strategy: str | None = None
    completed: int | None = None


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a file is a result of vLLM's benchmark, in detail or not."""
    return b'"request_throughput"' in head or (b'"request_rate"' in head and b'"backend"' in head)


def read(path: Path) -> list[Responses]:
    """Read the requests of one run.

    Raises:
        KprofError: the file is damaged, or was saved without details.
    """
    # With --append-result every run is a line of its own.
    lines = [line for line in read_bytes(path).splitlines() if line.strip()]
    is_appended = len(lines) > 1 and all(line.rstrip().endswith(b"}") for line in lines)
    documents = lines if is_appended else [b"\n".join(lines)]
    return [_responses(decode(each, path, _Result, TOOL), path) for each in documents]


def _responses(result: _Result, path: Path) -> Responses:
    requests = requests_of(result, path, TOOL, OPTION)
    load = _load(result)
    rows = tuple(_response(result, request, load) for request in requests)
    return Responses(path.name, TOOL, load, rows, tuple(_doubts(result, rows)))


def _load(result: _Result) -> Load:
    limit, capped = result.max_concurrency, result.capped
    if result.ramp_up_strategy is not None:
        why = "the load grows all along, so percentiles are of a mixture of loads"
        return Load("open", f"{result.ramp_up_strategy} ramp{capped}", why)
    if isinstance(result.request_rate, float):
        spacing = "Poisson" if result.burstiness in (1.0, None) else "gamma"
        name = f"{result.request_rate:g} requests/s, {spacing}{capped}"
        return Load("open", name, NOT_KNOWN if limit and not _has_due(result) else "")
    if _is_closed(result):
        return Load("closed", f"{limit} at a time")
    if result.request_rate is None:
        return Load("unknown", "load not recorded")
    starts, waits = result.start_times or [], result.queue_times or []
    due = [sent - waited for sent, waited in zip(starts, waits, strict=False)] or starts
    if not due or _is_burst(due):
        why = "all requests were sent at once: a burst, no load"
        return Load("open", "all requests at once", why)
    return Load(
        "open", f"a timed trace{capped}", "" if _has_due(result) or not limit else NOT_KNOWN
    )


def _has_due(result: _Result) -> bool:
    return bool(result.queue_times) and bool(result.start_times)


def _is_closed(result: _Result) -> bool:
    """Tell a burst behind a limit, which is a closed loop, from the schedule of a timed trace.

    Both have a rate of "inf". In a burst all requests were due at once, and wait for a place.
    """
    limit = result.max_concurrency
    if _is_scheduled(result) or limit is None:
        return False
    starts, waits = result.start_times, result.queue_times
    if not starts:
        return not waits
    if waits:
        return _is_burst([sent - waited for sent, waited in zip(starts, waits, strict=True)])
    return _is_full(result, starts, limit)


def _is_scheduled(result: _Result) -> bool:
    return isinstance(result.request_rate, float) or result.ramp_up_strategy is not None


def _is_burst(due_s: Sequence[float]) -> bool:
    return max(due_s) - min(due_s) <= BURST_S_PER_REQUEST * len(due_s)


def _is_full(result: _Result, starts: Sequence[float], limit: int) -> bool:
    """Tell whether the limit was reached whenever a request was sent, after the first ones."""
    assert result.ttfts is not None
    assert result.itls is not None
    took = result.latencies or [
        first + sum(gaps) for first, gaps in zip(result.ttfts, result.itls, strict=True)
    ]
    sent = np.sort(np.array(starts))
    ended = np.sort(np.array(starts) + np.array(took))
    later = sent[limit:]
    if not len(later):
        return _is_burst(starts)
    under_way = limit + 1 + np.arange(len(later)) - np.searchsorted(ended, later)
    return bool(np.median(under_way) >= FULL_SHARE * limit)


def _response(result: _Result, request: Request, load: Load) -> Response:
    sent_ns, due_ns = in_ns(request.started_s or 0.0), _due_ns(request, load)
    # Behind a limit, a request waits until the service has answered another one.
    since_ns = sent_ns if due_ns is None or not _waits(result) else min(sent_ns, due_ns)
    is_due_known = load.kind == "closed" or not _waits(result) or _has_due(result)
    arrived = _arrived(request, sent_ns)
    return response_of(request, arrived, since_ns, due_ns, is_due_known=is_due_known)


def _due_ns(request: Request, load: Load) -> int | None:
    if request.waited_s is None or load.kind == "closed" or request.started_s is None:
        return None
    return in_ns(request.started_s) - in_ns(request.waited_s)


def _waits(result: _Result) -> bool:
    """Tell whether a request may have waited in the client until another one was answered."""
    return result.max_concurrency is not None


def _arrived(request: Request, sent_ns: int) -> Arrived:
    """Return when chunks came.

    A server that buffers sends a first chunk and the rest later, of which vLLM lists nothing; only
    the latency tells when the answer ended.
    """
    first_ns = first_ns_of(request)
    ended_ns = sent_ns + took_ns(request.took_s) if request.took_s else None
    if first_ns is None:
        return Arrived(end_ns=ended_ns)
    chunk_ns = arrivals(sent_ns + first_ns, request.gaps_s)
    last_ns = int(chunk_ns[-1])
    if request.num_tokens is not None and len(chunk_ns) < request.num_tokens:
        if ended_ns is None:
            is_streamed = len(chunk_ns) > 1
            return Arrived(chunk_ns, is_streamed, last_ns if is_streamed else None)
        if ended_ns - last_ns > LAST_CHUNK_NS:
            first_and_end = np.array([chunk_ns[0], ended_ns], np.int64)
            return Arrived(first_and_end, has_every_chunk=False, end_ns=ended_ns)
    return Arrived(chunk_ns, end_ns=max(last_ns, ended_ns or 0))


def _doubts(result: _Result, rows: tuple[Response, ...]) -> list[Caveat]:
    doubts = []
    if result.start_times is None:
        doubts.append(NO_SENDING)
    answered = sum(row.outcome == "answered" for row in rows)
    if result.completed is not None and result.completed != answered:
        differ = (
            f"the file counts {counted(result.completed, 'completed request')}, its lists hold "
            f"{counted(answered, 'answer')} with tokens; the others count as failed"
        )
        doubts.append(Caveat("counts_differ", differ))
    return doubts
