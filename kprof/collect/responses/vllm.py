"""`vllm bench serve --save-result --save-detailed`: lists with an entry for every request."""

from __future__ import annotations

from collections.abc import Sequence
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

TOOL = "vllm bench serve"
NOT_KNOWN = (
    "the file does not say how long requests waited in the client for a place among those that "
    "run at a time, so no time from when they were due is met; record it with a newer vLLM"
)
LAST_CHUNK_NS = 1_000_000
"""An answer ends with its last chunk, but for a message without tokens right after it."""
BURST_S_PER_REQUEST = 1e-3
"""Requests that are due at once are created within microseconds each."""
FULL_SHARE = 0.9
"""Of the limit: a place is taken again at once, but for what ends at the same time."""
OPTION = "record with `vllm bench serve --save-result --save-detailed`"


class _Result(msgspec.Struct):
    """What is read of a result; times in seconds."""

    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    output_lens: list[int] | None = None
    input_lens: list[int] | None = None
    errors: list[str] | None = None
    start_times: list[float] | None = None
    queue_times: list[float] | None = None
    latencies: list[float] | None = None
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
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
    ttfts, itls, lengths = result.ttfts, result.itls, result.output_lens
    if not ttfts or itls is None or lengths is None:
        raise without_details(path, TOOL, OPTION)
    kept = (result.errors, result.start_times)
    # What a version does not record may be an empty list of it.
    others = (result.input_lens or None, result.queue_times or None, result.latencies or None)
    for column in (itls, lengths, *kept, *others):
        if column is not None and len(column) != len(ttfts):
            raise damaged(path, TOOL, "its lists differ in length")
    _refuse_negative(result, path)
    load = _load(result)
    rows = tuple(_response(result, i, load) for i in range(len(ttfts)))
    return Responses(path.name, TOOL, load, rows, tuple(_doubts(result, rows)))


def _refuse_negative(result: _Result, path: Path) -> None:
    columns = ("ttfts", "itls", "latencies")
    for name in columns:
        for i, times in enumerate(getattr(result, name) or (), start=1):
            if min(times if isinstance(times, list) else [times], default=0.0) < 0:
                raise damaged(path, TOOL, f"{name} of request {i} is negative")


def _response(result: _Result, i: int, load: Load) -> Response:
    assert result.ttfts is not None
    assert result.itls is not None
    assert result.output_lens is not None
    sent_ns, due_ns = in_ns(at(result.start_times, i) or 0.0), _due_ns(result, i, load)
    error = at(result.errors, i) or ""
    # A failed request has no tokens and no first one; what it says of the error may be empty.
    is_answered = not error and result.output_lens[i] > 0
    first_ns = in_ns(result.ttfts[i])
    chunk_ns = NO_TIMES
    if first_ns > 0:
        chunk_ns = arrivals(sent_ns + first_ns, result.itls[i])
    took = at(result.latencies, i)
    ended_ns = sent_ns + in_ns(took) if took else None
    chunk_ns, has_every_chunk = _with_end(chunk_ns, result.output_lens[i], ended_ns)
    end_ns = ended_ns
    if len(chunk_ns) and (has_every_chunk or end_ns):
        end_ns = max(int(chunk_ns[-1]), end_ns or 0)
    return Response(
        # Behind a limit, a request waits until the service has answered another one.
        sent_ns if due_ns is None or not _waits(result) else min(sent_ns, due_ns),
        "answered" if is_answered else "failed",
        due_ns,
        chunk_ns,
        has_every_chunk=has_every_chunk,
        is_due_known=load.kind == "closed" or not _waits(result) or _has_due(result),
        end_ns=end_ns,
        input_tokens=at(result.input_lens, i),
        output_tokens=result.output_lens[i] if is_answered else None,
        error=error or ("" if is_answered else "no output"),
    )


def _with_end(chunk_ns: Times, num_tokens: int, ended_ns: int | None) -> tuple[Times, bool]:
    """Return the known arrivals, and whether they are all that brought tokens.

    A server that buffers sends a first chunk and the rest later, of which vLLM lists nothing; only
    the latency tells when the answer ended.
    """
    if not len(chunk_ns) or len(chunk_ns) >= num_tokens:
        return chunk_ns, True
    if ended_ns is None:
        return chunk_ns, len(chunk_ns) > 1
    is_last_listed = ended_ns - chunk_ns[-1] <= LAST_CHUNK_NS
    if is_last_listed:
        return chunk_ns, True
    return np.array([chunk_ns[0], ended_ns], np.int64), False


def _has_due(result: _Result) -> bool:
    return bool(result.queue_times) and bool(result.start_times)


def _waits(result: _Result) -> bool:
    """Tell whether a request may have waited in the client until another one was answered."""
    return result.max_concurrency is not None


def _due_ns(result: _Result, i: int, load: Load) -> int | None:
    waited = at(result.queue_times, i)
    if waited is None or load.kind == "closed" or not result.start_times:
        return None
    return in_ns(result.start_times[i]) - in_ns(waited)


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


def _is_scheduled(result: _Result) -> bool:
    return isinstance(result.request_rate, float) or result.ramp_up_strategy is not None


def _load(result: _Result) -> Load:
    limit = result.max_concurrency
    capped = f", {limit} at a time at most" if limit else ""
    if result.ramp_up_strategy is not None:
        why = "the load grows all along, so percentiles are of a mixture of loads"
        return Load("open", f"{result.ramp_up_strategy} ramp{capped}", why)
    if isinstance(result.request_rate, float):
        arrivals = "Poisson" if result.burstiness in (1.0, None) else "gamma"
        name = f"{result.request_rate:g} requests/s, {arrivals}{capped}"
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


def _doubts(result: _Result, rows: tuple[Response, ...]) -> list[str]:
    doubts = []
    if result.start_times is None:
        doubts.append(
            "this version of vLLM does not record when requests were sent: no rates, no lateness"
        )
    answered = sum(row.outcome == "answered" for row in rows)
    if result.completed is not None and result.completed != answered:
        doubts.append(
            f"the file says that {result.completed:,} requests were completed, its lists hold "
            f"{answered:,} answers with tokens; the others count as failed"
        )
    return doubts
