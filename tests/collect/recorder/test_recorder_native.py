"""The recorder hands C nothing that may die, and uses no function that the workload replaced."""

import _thread
import gc
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import capture, native  # noqa: E402
from kprof.collect.recorder.kprof_recorder.ending import Deadline, MainThread  # noqa: E402
from kprof.collect.recorder.kprof_recorder.recorder import now  # noqa: E402
from tests.recorded import MODEL, record  # noqa: E402

BELOW_ASYNCIO = """
import asyncio, faulthandler, time
from kprof_recorder import start
faulthandler.enable()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
start.session.forget_deadline()
start.EARLY_NS = 50_000_000
start.session.bound_beginning()
def train():
    time.sleep(0.2)
    for _ in range(6):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
async def main():
    await asyncio.get_running_loop().run_in_executor(None, train)
    for _ in range(9):
        await asyncio.sleep(0.01)
asyncio.run(main())
"""


@pytest.mark.slow
def test_training_below_an_event_loop_survives_a_deadline_that_has_passed(tmp_path, capfd):
    run = record(tmp_path, MODEL + BELOW_ASYNCIO)
    assert (run.result.exit_code, capfd.readouterr().err) == (0, "")
    assert run.recorded_steps() == [5]


def wait_until(is_true):
    end = time.monotonic() + 5
    while not is_true() and time.monotonic() < end:
        time.sleep(0.001)
    return is_true()


def test_the_main_thread_calls_what_another_thread_asked_for():
    asked, called = MainThread(), []
    thread = threading.Thread(
        target=lambda: asked.call(lambda: called.append(native.is_main_thread()))
    )
    thread.start()
    thread.join()
    assert wait_until(lambda: called) == [True]


def test_an_action_is_called_once_its_owner_is_gone():
    called = []

    def ask():
        asked = MainThread()
        asked.call(lambda: called.append(1))
        del asked
        gc.collect()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert wait_until(lambda: called) == [1]


def test_an_interrupt_amid_an_action_reaches_the_main_thread_and_loses_no_other_action():
    asked, called = MainThread(), []

    def interrupt():
        raise KeyboardInterrupt

    def ask():
        asked.call(interrupt)
        asked.call(lambda: called.append(1))

    thread = threading.Thread(target=ask)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        wait_until(lambda: False)
    assert wait_until(lambda: called) == [1]


def test_a_deadline_that_was_cancelled_acts_no_more():
    called = []
    deadline = Deadline(0.0, lambda: called.append(1), is_busy=lambda: True)
    time.sleep(0.05)
    deadline.cancel()
    time.sleep(0.15)
    assert called == []


def test_a_deadline_acts_on_the_main_thread_once_nothing_is_busy():
    busy, called = [1], []
    deadline = Deadline(
        0.0, lambda: called.append(native.is_main_thread()), is_busy=lambda: busy and busy.pop()
    )
    assert wait_until(lambda: called) == [True]
    deadline.cancel()


def test_a_deadline_is_no_thread_of_the_workloads():
    before = threading.enumerate()
    deadline = Deadline(60.0, lambda: None)
    assert threading.enumerate() == before
    deadline.cancel()
    assert threading.Thread().name.startswith("Thread-")


def test_the_recorders_clock_and_threads_are_not_those_that_a_workload_has_replaced(monkeypatch):
    for module, name in ((time, "sleep"), (time, "perf_counter_ns"), (_thread, "get_ident")):
        monkeypatch.setattr(module, name, None)
    before = now()
    capture.sleep(0.001)
    assert now() > before
    assert native.get_ident() == threading.main_thread().ident


def test_a_thread_that_waits_needs_no_turn_of_a_processor():
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    assert wait_until(lambda: str(thread.native_id) not in capture.running_threads())
    is_over.set()


def test_a_trace_ends_once_each_thread_that_could_run_has_had_its_turn(monkeypatch):
    ran_ns = iter([{"7": 5, "8": 5}, {"7": 5}, {"7": 20_000_004}, {"7": 20_000_005}, {}])
    slept = []
    monkeypatch.setattr(torch.autograd, "_toggle_collection_dynamic", lambda *how: None)
    monkeypatch.setattr(capture, "num_other_threads", lambda: 1)
    monkeypatch.setattr(capture, "running_threads", lambda: next(ran_ns))
    monkeypatch.setattr(capture, "sleep", slept.append)
    capture.let_others_leave()
    assert slept == [0.02] * 3
