"""What the recorder asks of the workload's own things: it may fail, and must not change them."""

import inspect
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import capture, native  # noqa: E402
from kprof.collect.recorder.kprof_recorder.capture import (  # noqa: E402
    COMPILED_KERNELS,
    Ahead,
    let_others_leave,
    of_all_threads,
)
from kprof.collect.recorder.kprof_recorder.hooks import Hooks  # noqa: E402
from kprof.collect.recorder.kprof_recorder.recorder import Recorder  # noqa: E402
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402

EXPECTED = "The recorder stopped, because a Shy could not be described (ValueError: no)."


class Shy(torch.nn.Linear):
    @property
    def training(self):
        raise ValueError("no")

    @training.setter
    def training(self, value):
        pass


def in_thread(function):
    """Return what a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def recorder(tmp_path):
    return Recorder(Settings(tmp_path))


def test_a_module_that_cannot_be_described_is_called_all_the_same(recorder):
    hooks = Hooks(recorder)
    called = hooks.call_outermost(lambda module, x: x + 1, Shy(2, 2), (1,), {})
    assert (called, recorder.problems) == (2, [EXPECTED])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frozen_module_is_described_though_it_has_no_mode(recorder):
    frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(2, 2).eval()))
    hooks = Hooks(recorder)
    called = hooks.call_outermost(lambda module, x: x + 1, frozen, (1,), {})
    assert (called, recorder.problems) == (2, [])


def test_a_new_class_reaches_a_plain_function_as_python_3_10_needs_it(recorder):
    listener = Hooks(recorder).after_subclass()
    assert inspect.isfunction(listener.__func__)


def test_the_main_threads_trace_is_its_own_where_that_holds_more(monkeypatch):
    monkeypatch.delitem(sys.modules, COMPILED_KERNELS, raising=False)
    assert of_all_threads(memory=True) is None
    assert of_all_threads(memory=False) is not None


def test_a_thread_that_may_end_has_no_trace_of_its_own():
    assert in_thread(lambda: of_all_threads(memory=True)) is not None


def test_a_torch_without_traces_of_all_threads_records_the_main_thread_alone(monkeypatch):
    monkeypatch.setattr(capture, "hears_all_threads", lambda: False)
    assert capture.can_start()
    assert not in_thread(capture.can_start)


@pytest.mark.parametrize(("num_others", "num_asked"), [(0, 0), (1, 1)])
def test_before_a_trace_ends_nothing_more_is_noted_of_other_threads(
    monkeypatch, num_others, num_asked
):
    asked = []
    monkeypatch.setattr(
        torch.autograd, "_toggle_collection_dynamic", lambda *how: asked.append(how)
    )
    # Other tests of this process may have left some, such as the one that watches tqdm's bars.
    count, num_left = native.num_other_threads, native.num_other_threads()
    monkeypatch.setattr(capture, "num_other_threads", lambda: count() - num_left)
    is_over = threading.Event()
    for _ in range(num_others):
        threading.Thread(target=is_over.wait).start()
    let_others_leave()
    is_over.set()
    assert asked == [(False, {torch.profiler.ProfilerActivity.CPU})] * num_asked


class Prepared:
    """A capture of one thread that was set up ahead."""

    is_cancelled = False

    def __init__(self, can_start_here):
        self.can_start_here = can_start_here

    def prepare(self):
        pass

    def cancel(self):
        self.is_cancelled = True


def test_a_capture_that_was_set_up_in_another_thread_is_given_back():
    first, second = Prepared(False), Prepared(True)
    made = iter([first, second])
    ahead = Ahead(lambda settings: next(made))
    ahead.prepare(None)
    assert ahead.take(None) is second
    assert first.is_cancelled


def test_what_is_set_up_already_is_not_set_up_again():
    made = []
    ahead = Ahead(lambda settings: made.append(Prepared(True)) or made[-1])
    ahead.prepare(None)
    ahead.prepare(None)
    assert len(made) == 1
