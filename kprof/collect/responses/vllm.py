"""`vllm bench serve --save-result --save-detailed`: lists with an entry for every request."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kprof.collect.result_json import (
    arrivals,
    at,
    damaged,
    decode,
    in_ns,
    read_bytes,
    without_details,
)
from kprof.responses import NO_TIMES, Load, Response, Responses

TOOL = "vllm bench serve"
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
    rows = tuple(_response(result, i) for i in range(len(ttfts)))
    return Responses(path.name, TOOL, _load(result), rows, tuple(_doubts(result, rows)))


def _response(result: _Result, i: int) -> Response:
    assert result.ttfts is not None
    assert result.itls is not None
    assert result.output_lens is not None
    sent_ns = in_ns(at(result.start_times, i) or 0.0)
    waited_ns = at(result.queue_times, i)
    error = at(result.errors, i) or ""
    # A failed request has no tokens and no first one; what it says of the error may be empty.
    is_answered = not error and result.output_lens[i] > 0
    first_ns = in_ns(result.ttfts[i])
    chunk_ns = NO_TIMES
    if first_ns > 0:
        chunk_ns = arrivals(sent_ns + first_ns, result.itls[i])
    took = at(result.latencies, i)
    end_ns = int(chunk_ns[-1]) if len(chunk_ns) else None
    if end_ns is None and took:
        end_ns = sent_ns + in_ns(took)
    return Response(
        sent_ns,
        "answered" if is_answered else "failed",
        None if waited_ns is None or _is_closed(result) else sent_ns - in_ns(waited_ns),
        chunk_ns,
        end_ns=end_ns,
        input_tokens=at(result.input_lens, i),
        output_tokens=result.output_lens[i] if is_answered else None,
        error=error or ("" if is_answered else "no output"),
    )


def _is_closed(result: _Result) -> bool:
    return not _is_scheduled(result) and result.max_concurrency is not None


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
        if limit and result.queue_times is None:
            why = (
                f"at most {limit} requests ran at a time, and this version of vLLM does not say "
                "how long others waited in the client: times count from the sending, without that"
            )
            return Load("open", name, why)
        return Load("open", name)
    if limit:
        return Load("closed", f"{limit} at a time")
    if result.request_rate is None:
        return Load("unknown", "load not recorded")
    return Load("open", "all requests at once", "all requests were sent at once: a burst, no load")


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
