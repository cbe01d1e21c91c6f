"""The samples behind an SLA target: a range of time for each answer that counts.

Some times are known only as a range. The number of tokens in a chunk may be unknown, so a time to
N tokens lies between two chunks. A request that the client sent late lies between its time from
sending and its time from the schedule. A cancelled one takes at least as long as the client
waited. A target is met only if the upper ends meet it, and missed only if the lower ends miss it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kprof.analyze.sla.independence import (
    Independent,
    Marks,
    Spells,
    count_independent,
    count_spells,
    fewest,
)
from kprof.analyze.sla.responses import NO_TIMES, Response, Responses, Times
from kprof.analyze.sla.targets import Target

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
    """Return the least time that a client waited for a request that was cancelled."""
    end_ns = _end_ns(response)
    return 0.0 if end_ns is None else float(end_ns - response.sent_ns)


Values = npt.NDArray[np.float64]

LONGEST_NS = 2**62

LEFT_OUT = {
    "ttf": "shorter than that many tokens",
    "tpot": "of one token",
    "itl": "of one chunk or token",
    "stall": "of one chunk",
    "gap": "of one chunk",
}


@dataclass(frozen=True)
class Sample:
    """Times in ns of one run, at least (`low`) and at most (`high`), in the order of sending."""

    low: Values
    high: Values
    num_left_out: int = 0
    why_left_out: str = ""
    sizes: Times | None = None
    """How many of them each answer has, where it may have several; missing: one each."""
    due_ns: Times | None = None
    """When each answer was due; missing: not recorded."""
    num_unknown: int = 0
    """Number of answers for which the file leaves open where in the range the time lies."""

    def mark(self, is_marked: npt.NDArray[np.bool_]) -> Marks:
        """Count the marked times of every answer, and its times."""
        if self.sizes is None:
            return Marks(is_marked.astype(np.float64), np.ones(len(is_marked)))
        answers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        marked = np.bincount(answers, weights=is_marked, minlength=len(self.sizes))
        return Marks(marked.astype(np.float64), self.sizes.astype(np.float64))


def independent_at(samples: Sequence[Sample], times: Sequence[float]) -> Independent:
    """Return as how many independent answers all samples count, by those slower than a time.

    Where many are equally slow, those as slow are looked at as well. Of several times the one that
    leaves the fewest counts.
    """
    return fewest(
        [
            count_independent([sample.mark(slower(sample.high, time)) for sample in samples])
            for time in times
            for slower in (np.greater, np.greater_equal)
        ]
    )


def samples_of(target: Target, runs: Sequence[Responses]) -> list[Sample]:
    """Return the sample of every run."""
    name = target.metric.name
    if name == "gap":
        return [_gaps(run) for run in runs]
    return [_sample(run, measure_of(target), LEFT_OUT.get(name, "")) for run in runs]


def measure_of(target: Target) -> Time:
    """Return what measures the target's time of one answer."""
    if target.num_tokens is not None:
        return partial(time_to_tokens, num_tokens=target.num_tokens)
    return TIMES[target.metric.name]


def in_order(run: Responses) -> list[Response]:
    """Return the requests in the order in which they were due."""
    return sorted(run.rows, key=lambda row: (row.due_ns, row.sent_ns, row.end_ns or 0))


def spells_in(
    runs: Sequence[Responses], samples: Sequence[Sample], longest_s: float
) -> Spells | None:
    """Count the longest spells that samples extend over; None: no spell is assumed.

    Runs that overlap in time saw the same spells.
    """
    if not longest_s:
        return None
    due_ns = [np.empty(0, np.int64) if each.due_ns is None else each.due_ns for each in samples]
    sizes = [np.ones(len(each.high)) if each.sizes is None else each.sizes for each in samples]
    return count_spells(
        np.concatenate(due_ns), np.concatenate(sizes).astype(float), load_s(runs), longest_s
    )


def load_s(runs: Sequence[Responses]) -> float:
    """Return for how long requests were under way in some run, in seconds."""
    spans = [(min(r.due_ns for r in run.rows), _last_ns(run)) for run in runs if run.rows]
    covered, reached = 0, -LONGEST_NS
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered / 1e9


def _last_ns(run: Responses) -> int:
    return max(max(row.sent_ns, row.end_ns or row.sent_ns) for row in run.rows)


def _sample(run: Responses, measure: Time, why: str) -> Sample:
    rows = in_order(run)
    measured = [measure(row) for row in rows]
    known = [time for time in measured if time is not None]
    due_ns = [row.due_ns for row, time in zip(rows, measured, strict=True) if time is not None]
    left_out = len(measured) - len(known)
    return Sample(
        *_columns(known),
        left_out,
        why,
        due_ns=np.array(due_ns, np.int64),
        num_unknown=sum(width_of(time, row) > 0 for row, time in zip(rows, measured, strict=True)),
    )


def width_of(time: Range | None, row: Response) -> float:
    """Return how far apart the ends of an answer's time are, beyond the client's own lateness."""
    if time is None or row.outcome != "answered":
        return 0.0
    return time.high - time.low - (row.sent_ns - row.due_ns if row.is_due_known else 0)


def _columns(ranges: Sequence[Range]) -> tuple[Values, Values]:
    table = np.array(ranges, np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _gaps(run: Responses) -> Sample:
    """Pool the gaps of all answers; one without an answer counts as one of mean length, late."""
    if not all(row.has_every_chunk for row in run.rows):
        return Sample(np.empty(0), np.empty(0))
    rows = in_order(run)
    lengths = [len(all_gaps(row)) for row in rows if row.outcome == "answered"]
    with_gaps = sum(length > 0 for length in lengths)
    num_each = -(-sum(lengths) // with_gaps) if with_gaps else 1
    of_rows = [(row.due_ns, ranges) for row in rows if len(ranges := _gaps_of(row, num_each))]
    gaps = [ranges for _, ranges in of_rows]
    low, high = (np.concatenate([np.empty(0), *(each[i] for each in gaps)]) for i in (0, 1))
    return Sample(
        low,
        high,
        len(lengths) - with_gaps,
        LEFT_OUT["gap"],
        np.array([len(each[0]) for each in gaps], np.int64),
        np.array([due_ns for due_ns, _ in of_rows], np.int64),
    )


def _gaps_of(row: Response, num_each: int) -> tuple[Values, ...]:
    """Return the gaps of an answer, at least and at most; none where it was one chunk."""
    if row.outcome == "answered":
        known = all_gaps(row).astype(np.float64)
        return (known, known) if len(known) else ()
    least = NEVER if row.outcome == "failed" else 0.0
    return np.full(num_each, least), np.full(num_each, NEVER)
