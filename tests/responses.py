"""Builders of responses: services whose every time is known."""

import numpy as np

from kprof.analyze.sla.evaluate import judge
from kprof.analyze.sla.responses import Load, Response, Responses
from kprof.analyze.sla.targets import parse_target

MS = 1_000_000
OPEN = Load("open", "50 requests/s, Poisson")


def answer(ttft_ms=50, *, sent_ms=0, gaps_ms=(), late_ms=0, tokens=None, **changes):
    """Return an answer of one token a chunk, unless `tokens` says otherwise (None: unknown)."""
    sent_ns = round(sent_ms * MS)
    arrivals = sent_ns + np.rint(np.cumsum([ttft_ms, *gaps_ms]) * MS).astype(np.int64)
    counts = np.arange(1, len(arrivals) + 1) if tokens is None else np.array(tokens)
    return Response(
        sent_ns,
        **{
            "scheduled_ns": sent_ns - round(late_ms * MS),
            "chunk_ns": arrivals,
            "tokens": counts,
            "end_ns": int(arrivals[-1]),
            "output_tokens": int(counts[-1]),
            **changes,
        },
    )


def failure(sent_ms=0):
    """Return a request that ended in an error."""
    return Response(
        round(sent_ms * MS), "failed", end_ns=round((sent_ms + 1) * MS), error="refused"
    )


def cancelled(after_ms, sent_ms=0):
    """Return a request that the client gave up, without a token."""
    return Response(round(sent_ms * MS), "cancelled", end_ns=round((sent_ms + after_ms) * MS))


def service(*rows, load=OPEN, source="service"):
    """Return a run of these requests."""
    return Responses(source, "test", load, rows)


def run_of(times_ms, **changes):
    """Return a run whose answers have these times to the first token, one every 20 ms."""
    return service(*(answer(t, sent_ms=20 * i, **changes) for i, t in enumerate(times_ms)))


def judged(text, *runs, gpus=None, spell_s=0):
    """Return the judgement on one target; no slow spell is assumed unless told."""
    (judgement,) = judge(runs, [parse_target(text)], gpus, spell_s)
    return judgement


def verdict(text, *runs, gpus=None, spell_s=0):
    """Return the verdict on one target."""
    return judged(text, *runs, gpus=gpus, spell_s=spell_s).verdict
