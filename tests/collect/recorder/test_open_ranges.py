"""Ranges and operators that are open while a capture ends and another begins."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import record_function  # noqa: E402

from kprof.collect.recorder.kprof_recorder.capture import Capture, can_start  # noqa: E402
from kprof.collect.recorder.kprof_recorder.named_ranges import (  # noqa: E402
    TorchRange,
    leaving_open,
    noting_changes,
)
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402


class WorkloadsRange(record_function):
    """A range of the workload's own, as the recorder changes it."""

    __enter__ = noting_changes(record_function.__enter__)
    __exit__ = leaving_open(record_function.__exit__)


def ended_after(change, capture, kind):
    """Return how many more ranges are left open when one ends after `change`."""
    num_before = len(TorchRange.left_open)
    with kind("around"):
        change()
    capture.cancel()
    return len(TorchRange.left_open) - num_before


@pytest.mark.parametrize("kind", [TorchRange, WorkloadsRange])
def test_a_range_is_not_ended_in_another_trace_than_it_began_in(tmp_path, kind):
    first, second = (Capture(Settings(tmp_path)) for _ in range(2))
    assert ended_after(first.start, first, kind) == 1
    second.start()
    assert ended_after(second.stop, second, kind) == 1
    assert ended_after(lambda: None, second, kind) == 0


class CallingBack(torch.autograd.Function):
    """Calls a function from within an operator, forward or backward."""

    @staticmethod
    def forward(ctx, x, call, call_backward):
        ctx.call_backward = call_backward
        call()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call_backward()
        return gradient, None, None


def test_an_operator_is_under_way_where_only_what_it_calls_has_a_frame(tmp_path):
    # As where torch's own `apply` is no function of Python's.
    seen = []

    def end_and_ask():
        capture = Capture(Settings(tmp_path))
        capture.start()
        capture.stop()
        seen.append(can_start())

    CallingBack.forward(SimpleNamespace(), torch.ones(2), end_and_ask, None)
    assert [*seen, can_start()] == [False, True]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_trace_begins_in_an_operator_in_which_another_has_ended(tmp_path, direction):
    seen = []

    def end_one():
        capture.stop()
        seen.append(can_start())

    capture = Capture(Settings(tmp_path))
    calls = (end_one, list) if direction == "forward" else (list, end_one)
    seen.append(can_start())
    capture.start()
    CallingBack.apply(torch.ones(2, requires_grad=True), *calls).sum().backward()
    seen.append(can_start())
    # Not in any operator: only where one has ended.
    CallingBack.apply(torch.ones(2), lambda: seen.append(can_start()), None)
    assert seen == [True, False, True, True]
