"""The times of one answer, each as a range: what is surely waited for, and what is so at most.

A recording leaves some things open. How many tokens a chunk held may be unknown, so a time to N
tokens lies between two chunks; a request that was late because the client was is between its time
from sending and its time from the schedule; one that was cancelled would have taken at least as
long as somebody waited. A promise is met only if the upper ends keep it, and missed only if the
lower ends break it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kprof.responses import NO_TIMES, Response, Times

NEVER = math.inf
MANY_TOKENS = np.iinfo(np.int64).max


class Range(NamedTuple):
    """A time in ns: at least, at most."""

    low: float
    high: float


FAILED = Range(NEVER, NEVER)
UNKNOWN = Range(0.0, NEVER)


def time_to_first(response: Response) -> Range | None:
    """Return the time to the first chunk with content."""
    if response.outcome == "failed":
        return FAILED
    if len(response.chunk_ns):
        return _since_due(response, int(response.chunk_ns[0]), int(response.chunk_ns[0]))
    if response.outcome == "cancelled":
        return Range(_waited(response), NEVER)
    return _until_end(response)


def time_to_tokens(response: Response, num_tokens: int) -> Range | None:
    """Return the time to the first tokens; None: the answer was complete with fewer of them."""
    if response.outcome == "failed":
        return FAILED
    total = total_tokens(response)
    if response.outcome == "answered" and total is not None and total < num_tokens:
        return None
    least, most = tokens_by_chunk(response)
    # Chunks that are not listed may have brought them from the first one on.
    early = int(np.searchsorted(most, num_tokens)) if response.has_every_chunk else 0
    late = int(np.searchsorted(least, num_tokens))
    chunks = response.chunk_ns
    if late < len(chunks):
        return _since_due(response, int(chunks[early]), int(chunks[late]))
    is_cancelled = response.outcome == "cancelled"
    low = _waited(response) if is_cancelled else 0.0
    if early < len(chunks):
        low = float(chunks[early]) - response.sent_ns
    return Range(low, NEVER if is_cancelled or total is None else _until_end(response).high)


def time_to_end(response: Response) -> Range | None:
    """Return the time to the whole answer."""
    if response.outcome == "failed":
        return FAILED
    if response.outcome == "cancelled":
        return Range(_waited(response), NEVER)
    end_ns = _end_ns(response)
    return UNKNOWN if end_ns is None else _since_due(response, end_ns, end_ns)


def time_per_token(response: Response) -> Range | None:
    """Return the time per token after the first; None: there was one token only."""
    total = total_tokens(response)
    if response.outcome != "answered" or total is None:
        return FAILED if response.outcome == "failed" else UNKNOWN
    if total <= 1:
        return None
    taken = _after_first_chunk(response)
    return Range(taken.low / (total - 1), taken.high / (total - 1))


def time_between_tokens(response: Response) -> Range | None:
    """Return the time per token after the first chunk; None: nothing came after it."""
    total = total_tokens(response)
    if response.outcome != "answered" or total is None:
        return FAILED if response.outcome == "failed" else UNKNOWN
    if total <= 1:
        return None
    taken, (least, most) = _after_first_chunk(response), tokens_by_chunk(response)
    if not len(least):
        return Range(0.0, taken.high)
    rest_at_most, rest_at_least = total - int(least[0]), total - int(most[0])
    if rest_at_most <= 0:
        return None
    return Range(taken.low / rest_at_most, taken.high / max(rest_at_least, 1))


def longest_gap(response: Response) -> Range | None:
    """Return the longest gap between chunks; None: there was one chunk only."""
    if response.outcome == "failed":
        return FAILED
    gaps = np.diff(response.chunk_ns)
    if response.outcome == "cancelled":
        return Range(float(gaps.max(initial=0)), NEVER)
    if response.has_every_chunk and len(response.chunk_ns):
        return Range(float(gaps.max()), float(gaps.max())) if len(gaps) else None
    if response.num_chunks is None or not len(gaps):
        return UNKNOWN
    # The longest is no shorter than their mean, and no longer than all of them together.
    num_gaps = max(response.num_chunks - 1, 1)
    return Range(float(gaps.sum()) / num_gaps, float(gaps.sum()))


def all_gaps(response: Response) -> Times:
    """Return every gap between chunks that is known."""
    return np.diff(response.chunk_ns) if response.has_every_chunk else NO_TIMES


Time = Callable[[Response], "Range | None"]

TIMES: dict[str, Time] = {
    "ttft": time_to_first,
    "tpot": time_per_token,
    "itl": time_between_tokens,
    "stall": longest_gap,
    "e2e": time_to_end,
}


def total_tokens(response: Response) -> int | None:
    """Return how many output tokens there were."""
    if response.output_tokens is not None:
        return response.output_tokens
    if response.tokens is not None and len(response.tokens):
        return int(response.tokens[-1])
    return None


def tokens_by_chunk(response: Response) -> tuple[Times, Times]:
    """Return the least and the most output tokens that may have come by each chunk.

    A chunk holds at least one token; where there are more chunks than tokens (a chat's first one
    names the role alone), at most one.
    """
    if response.tokens is not None:
        return response.tokens, response.tokens
    num_listed, total = len(response.chunk_ns), total_tokens(response)
    num_chunks = num_listed if response.has_every_chunk else response.num_chunks
    places = np.arange(1, num_listed + 1)
    if not response.has_every_chunk and num_listed:
        places[-1] = num_listed if num_chunks is None else num_chunks
    if total is None or response.outcome != "answered":
        return places, np.full(num_listed, MANY_TOKENS)
    if num_chunks is None:
        # The first chunk may have brought one token or all.
        least, most = np.full(num_listed, min(total, 1)), np.full(num_listed, total)
    else:
        least = np.maximum(places - max(num_chunks - total, 0), 0)
        most = np.minimum(places, total) if total < num_chunks else total - num_chunks + places
    if num_listed and has_last_chunk(response):
        least[-1] = most[-1] = total
    return least, most


def has_last_chunk(response: Response) -> bool:
    """Tell whether the last listed time is that of the last content."""
    return response.has_every_chunk or len(response.chunk_ns) > 1


def _since_due(response: Response, early_ns: int, late_ns: int) -> Range:
    high = float(late_ns - response.due_ns) if response.is_due_known else NEVER
    return Range(float(early_ns - response.sent_ns), high)


def _end_ns(response: Response) -> int | None:
    if response.end_ns is not None:
        return response.end_ns
    is_listed = len(response.chunk_ns) and has_last_chunk(response)
    return int(response.chunk_ns[-1]) if is_listed else None


def _until_end(response: Response) -> Range:
    """Return a time within an answer of which only the end is known."""
    end_ns = _end_ns(response)
    return UNKNOWN if end_ns is None else _since_due(response, response.sent_ns, end_ns)


def _after_first_chunk(response: Response) -> Range:
    end_ns = _end_ns(response)
    if not len(response.chunk_ns) or end_ns is None:
        return _until_end(response)
    taken = float(end_ns - int(response.chunk_ns[0]))
    return Range(taken, taken)


def _waited(response: Response) -> float:
    """Return how long somebody surely waited for a request that was cancelled."""
    end_ns = _end_ns(response)
    return 0.0 if end_ns is None else float(end_ns - response.sent_ns)
