"""SGLang's `bench_serving --output-details`: a line for every run, lists for its requests."""

from __future__ import annotations

import re
from collections import Counter
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
)
from kprof.trace import Caveat

TOOL = "SGLang bench_serving"
OPTION = "record with `python -m sglang.bench_serving --output-details --output-file FILE`"
NOT_A_NUMBER = re.compile(rb"(:\s*)(-?Infinity|NaN)(?=\s*[,}])")
SPREADS = ("sglang", "sglang-native")
"""Backends that divide the gap before a chunk among its tokens; the others keep a gap a chunk."""
NO_SENDING = Caveat(
    "no_sending_times",
    "SGLang's bench_serving does not record when requests were sent: no rates, no length of the "
    "load",
)
NO_WAIT = (
    "the file does not say how long requests waited in the client for a place among those that "
    "run at a time, so no time from when they were due is met"
)
NO_USAGE = Caveat(
    "no_usage",
    "with an OpenAI backend, SGLang records the length that it asked for where the service reports "
    "no usage; the texts hold another number of tokens, so the lengths are not used",
)
MAY_BE_ASKED_FOR = Caveat(
    "maybe_no_usage",
    "with an OpenAI backend, SGLang records the length that it asked for where the service reports "
    "no usage: output tokens may be fewer, by as many as its own count of the texts differs",
)
COUNTS_AGREE = 0.05
"""Share by which SGLang's count of the texts differs from tokens that a service reports."""


class _Result(Columns):
    """Further fields that SGLang records."""

    backend: str = "sglang"
    total_output_tokens: int | None = None
    total_output_tokens_retokenized: int | None = None


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
    requests = requests_of(result, path, TOOL, OPTION)
    load, is_spread = _load(result), result.backend in SPREADS
    doubts = [] if result.start_times else [NO_SENDING]
    if not is_spread:
        is_counted = _is_counted(result)
        doubts.append(MAY_BE_ASKED_FOR if is_counted else NO_USAGE)
        if not is_counted:
            requests = [each._replace(num_tokens=each.num_tokens and None) for each in requests]
    gaps = Counter(gap for request in requests for gap in set(request.gaps_s))
    rows = []
    for request in requests:
        arrived = _spread(request, gaps) if is_spread else _as_chunks(request)
        rows.append(_response(request, arrived, load, is_capped=bool(result.max_concurrency)))
    return Responses(path.name, TOOL, load, tuple(rows), tuple(doubts))


def _load(result: _Result) -> Load:
    rate, limit, capped = result.request_rate, result.max_concurrency, result.capped
    why = NO_WAIT if limit else ""
    if isinstance(rate, float) and np.isfinite(rate):
        return Load("open", f"{rate:g} requests/s, Poisson{capped}", why)
    if rate == "trace":
        return Load("open", f"a timed trace{capped}", why)
    if limit:
        return Load("closed", f"{limit} at a time")
    return Load("open", "all requests at once", "all requests were sent at once: a burst, no load")


def _is_counted(result: _Result) -> bool:
    """Tell whether the tokens of the texts are as many as the recorded lengths say."""
    told, counted = result.total_output_tokens, result.total_output_tokens_retokenized
    if told is None or counted is None:
        return False
    return abs(counted - told) <= COUNTS_AGREE * told


def _spread(request: Request, gaps: Counter[float]) -> Arrived:
    """Return when chunks came, of which each token has its part of the gap before its chunk.

    Those of one chunk came together, at the end of the gap; their parts are the same to the last
    digit. Where other requests have the same gaps, the clock is too coarse to tell chunks by them.
    """
    found = _as_chunks(request)
    if not found.has_every_chunk or len(found.chunk_ns) < 2:
        return found
    parts = np.array(request.gaps_s)
    ends = np.append(parts[1:] != parts[:-1], True)
    is_told = all(gaps[gap] == 1 for gap in parts[~ends].tolist())
    if not is_told:
        return Arrived(found.chunk_ns[[0, -1]], has_every_chunk=False, end_ns=found.end_ns)
    chunk_ns = found.chunk_ns[np.append(True, ends)]
    if request.num_tokens is None or request.num_tokens <= len(parts):
        return Arrived(chunk_ns, end_ns=found.end_ns)
    tokens = request.num_tokens - len(parts) + np.arange(len(found.chunk_ns))
    return Arrived(chunk_ns, end_ns=found.end_ns, tokens=tokens[np.append(True, ends)])


def _as_chunks(request: Request) -> Arrived:
    """Return when chunks came, of which each has its gap."""
    first_ns = first_ns_of(request)
    if first_ns is None:
        return Arrived()
    chunk_ns = arrivals(_sent_ns(request) + first_ns, request.gaps_s)
    # One chunk of many tokens may be the first of an answer that then was not streamed.
    if len(chunk_ns) == 1 and request.num_tokens != 1:
        return Arrived(chunk_ns, has_every_chunk=False)
    return Arrived(chunk_ns, end_ns=int(chunk_ns[-1]))


def _sent_ns(request: Request) -> int:
    return in_ns(request.started_s or 0.0)


def _response(request: Request, arrived: Arrived, load: Load, *, is_capped: bool) -> Response:
    if not len(arrived.chunk_ns) and request.text == "" and not request.error:
        # SGLang counts an empty answer as a success of the length that it asked for.
        request = request._replace(num_tokens=0)
    is_due_known = load.kind == "closed" or not is_capped
    return response_of(request, arrived, _sent_ns(request), is_due_known=is_due_known)
