"""On a GPU: right on any stream, and right when a CUDA graph replays it with other inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kprof.gate.broken import blaming
from kprof.gate.numerics import find_wrong
from kprof.gate.observe import Observed, call_plainly, draw, observe_truth, snapshot
from kprof.gate.subject import Case, Function, Subject

SLEEP_CYCLES = 20_000_000
"""About ten milliseconds: whoever does not wait for the stream is far ahead of it."""
NUM_WARM_UPS = 3


def find_stream_faults(subject: Subject, function: Function, case: Case) -> Iterator[str]:
    """Find results that are wrong on a stream of one's own, or in a replayed graph."""
    is_plain = case.distribution == "normal" and case.layout == "contiguous"
    if not subject.device.startswith("cuda") or not is_plain or 0 in case.shape:
        return
    right = draw(subject, case)
    forward = replace(subject, differentiable=())
    runs = {"on a stream of its own": _on_a_stream, "in a replayed CUDA graph": _in_a_graph}
    for where, run in runs.items():
        try:
            with blaming(function, subject, f"{case}, {where}"):
                new = run(function, subject, case)
        except RuntimeError as error:
            yield f"{where} raises: {error}"
            continue
        replaced = call_plainly(subject.replaced, subject, right)
        truth = observe_truth(forward, case, right)
        fault = find_wrong(subject, new, replaced, truth)
        if fault:
            yield f"{fault} {where}"


def _stale(subject: Subject, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of the arguments that hold zeros, but for those that stay what they are."""
    return tuple(
        a.clone() if i in subject.constant else torch.zeros_like(a) if isinstance(a, Tensor) else a
        for i, a in enumerate(arguments)
    )


def _fill(buffers: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        if isinstance(buffer, Tensor):
            buffer.copy_(value)


def _on_a_stream(function: Function, subject: Subject, case: Case) -> Observed:
    """Run on a new stream, on which the inputs are made just before, late."""
    values = draw(subject, case)
    given = _stale(subject, values)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        _fill(given, values)
        # What is copied here, in the stream's order, is what a next kernel would see.
        observed = snapshot(function(*given), given, subject)
    torch.cuda.synchronize()
    return observed


def _in_a_graph(function: Function, subject: Subject, case: Case) -> Observed:
    """Capture a call on other inputs, then replay it on these."""
    values = draw(subject, case)
    given = _stale(subject, values)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UPS):
            function(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = function(*given)
    _fill(given, values)
    graph.replay()
    torch.cuda.synchronize()
    return snapshot(returned, given, subject)
