"""Times of the tokens that a function in this process generates, one prompt after the other."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Load, Response, Responses
from kprof.errors import KprofError
from kprof.trace import Caveat

ONE_BY_ONE = Load(
    "closed", "1 at a time", "no network and no queue: prompts came one by one in this process"
)
TOOL = "kprof.measure_generation"
WARMED_UP = Caveat(
    "same_prompts_warmed_up",
    "the process was warmed up with the same prompts that were then measured",
)

Generate = Callable[..., Any]


class _Streamer:
    """Receives tokens as Hugging Face's `generate` hands them out, the prompt's first."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note
        self._has_prompt = False

    def put(self, value: object) -> None:
        """Take tokens that have just been generated."""
        if self._has_prompt:
            self._note(value)
        self._has_prompt = True

    def end(self) -> None:
        """Take note that there are no more."""


def measure_generation(
    generate: Generate,
    prompts: Iterable[Any],
    *,
    count_tokens: Callable[[Any], int] | None = None,
    num_warm_up: int = 1,
    least_s: float = 0.0,
) -> Responses:
    """Time the tokens that `generate(prompt)` yields for every prompt, one at a time.

    `generate` returns an iterator of chunks, or takes a `streamer` as `generate` of Hugging
    Face's models does; a prompt that is a mapping is passed as keyword arguments. A chunk counts
    when it is there: a tensor on a device is waited for, which costs what overlaps it. Of a chunk,
    a number or a tensor counts its elements, a list its length; of text, `count_tokens` tells the
    number, else it is not known. The first prompts are generated once more, beforehand, to warm
    up. The prompts are repeated, from the first on, until `least_s` seconds have passed. A
    `RuntimeError` is a failed request, as a device raises it.

    Raises:
        KprofError: there is no prompt, or none was answered.
    """
    each = list(prompts)
    if not each:
        raise KprofError("there is no prompt to generate from", fix="give one prompt or more")
    for prompt in each[:num_warm_up]:
        _measure(generate, prompt, count_tokens)
    begun_s, rows = time.perf_counter(), list[Response]()
    while not rows or time.perf_counter() - begun_s < least_s:
        rows += [_measure(generate, prompt, count_tokens) for prompt in each]
    if all(row.outcome == "failed" for row in rows):
        problem = f"none of {len(rows)} prompts was answered: {rows[0].error}"
        raise KprofError(problem, fix="see that the function generates from these prompts")
    named = generate.func if isinstance(generate, partial) else generate
    name = getattr(named, "__qualname__", type(named).__name__)
    return Responses(name, TOOL, ONE_BY_ONE, tuple(rows), (WARMED_UP,) if num_warm_up else ())


def _measure(
    generate: Generate, prompt: object, count_tokens: Callable[[Any], int] | None
) -> Response:
    arrivals: list[int] = []
    counts: list[int | None] = []

    def note(chunk: object) -> None:
        _wait_for(chunk)
        arrivals.append(time.perf_counter_ns())
        counts.append(count_tokens(chunk) if count_tokens else _tokens_in(chunk))

    _settle()  # What another prompt left to do is not this one's time.
    sent_ns = time.perf_counter_ns()
    try:
        for chunk in _chunks(generate, prompt, note):
            note(chunk)
    except (RuntimeError, TimeoutError) as error:
        end_ns = time.perf_counter_ns()
        return Response(sent_ns, "failed", end_ns=end_ns, error=f"{type(error).__name__}: {error}")
    known = [count for count in counts if count is not None]
    is_known = bool(counts) and len(known) == len(counts)
    if not arrivals:
        return Response(sent_ns, "failed", end_ns=time.perf_counter_ns(), error="no output")
    return Response(
        sent_ns,
        chunk_ns=np.array(arrivals, np.int64) if arrivals else NO_TIMES,
        tokens=np.cumsum(known) if is_known else None,
        end_ns=arrivals[-1],
        output_tokens=sum(known) if is_known else None,
    )


def _wait_for(chunk: object) -> None:
    """Wait until a tensor on a device is computed; what lies on the host already is."""
    if getattr(chunk, "is_cuda", False):
        _settle()


def _settle() -> None:
    """Wait for everything that a device still has to do."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _tokens_in(chunk: object) -> int | None:
    """Return how many tokens a chunk holds; None: it is text, or something else."""
    if isinstance(chunk, bool | str | bytes):
        return None
    if isinstance(chunk, int):
        return 1
    if hasattr(chunk, "numel"):
        return int(chunk.numel())
    return len(chunk) if isinstance(chunk, list | tuple) else None


def _chunks(generate: Generate, prompt: object, note: Callable[[object], None]) -> Iterator[object]:
    """Yield what is generated; what goes through a streamer is noted as it comes."""
    arguments: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
    words = () if isinstance(prompt, Mapping) else (prompt,)
    if _takes_streamer(generate):
        generate(*words, **arguments, streamer=_Streamer(note))
        return
    generated = generate(*words, **arguments)
    if not isinstance(generated, Iterator):
        found = type(generated).__name__
        raise KprofError(
            f"the function returned a {found} at once, so no token has a time of its own",
            fix="pass a function that yields chunks as they come, or that takes a streamer",
        )
    yield from generated


def _takes_streamer(generate: Generate) -> bool:
    try:
        return "streamer" in inspect.signature(generate).parameters
    except (TypeError, ValueError):  # Functions written in C may have no signature.
        return False
