"""Results that hold a list for each quantity, with an entry for every request (vLLM, SGLang)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kprof.collect.result_json import at, damaged, took_ns, without_details
from kprof.responses import NO_TIMES, Response, Times

TIMES = ("ttfts", "itls", "latencies")


class Columns(msgspec.Struct):
    """What is read of a result; times in seconds."""

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


def _refuse_negative(
    column: Sequence[float | list[float]], name: str, path: Path, tool: str
) -> None:
    for i, times in enumerate(column, start=1):
        if min(times if isinstance(times, list) else [times], default=0.0) < 0:
            raise damaged(path, tool, f"{name} of request {i} is negative")


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
