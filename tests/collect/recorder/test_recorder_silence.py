"""What the recorder keeps to itself: warnings about its own work, of torch and of Python."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import record_function  # noqa: E402

from kprof.collect.recorder.kprof_recorder import ending, quiet  # noqa: E402
from kprof.collect.recorder.kprof_recorder.capture import (  # noqa: E402
    Capture,
    Others,
    Ours,
)
from kprof.collect.recorder.kprof_recorder.ending import ForkWarning  # noqa: E402
from kprof.collect.recorder.kprof_recorder.named_ranges import Range  # noqa: E402
from kprof.collect.recorder.kprof_recorder.quiet import Warnings  # noqa: E402
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402

ROOT = Path(__file__).parents[3]
OF_THREADS = "This process (pid=7) is multi-threaded, use of fork() may lead to deadlocks"


class StoppedInside(torch.autograd.Function):
    """A capture that ends amid ranges, inside C++ code that hands warnings to Python."""

    @staticmethod
    def forward(ctx, x, folder):
        capture = Capture(Settings(folder))
        capture.start()
        outer = Range("outer")
        outer.__enter__()
        with record_function("first"), record_function("second"):
            out = x * 2
            outer.__exit__(None, None, None)
            capture.stop()
        return out


class Asked(torch.autograd.Function):
    """Asks who gets the warnings of the C++ code around it, around the recorder's work."""

    @staticmethod
    def forward(ctx, x, answers):
        warned = Warnings()
        for _ in range(2):
            with Ours():
                pass
            answers.append(warned.send_to_log())
            warned.send_to(answers[-1])
        return x


def test_ranges_that_are_open_when_a_recording_ends_are_no_warning_to_the_workload(tmp_path):
    assert StoppedInside.apply(torch.ones(2, requires_grad=True), tmp_path).sum() == 4


def test_the_workloads_own_c_code_warns_as_ever_after_the_recorders_work():
    answers, log = [], Warnings().send_to_log()
    Asked.apply(torch.ones(2), answers)
    assert answers[0] == answers[1]
    assert answers[0] not in (None, log)


def test_a_level_that_kineto_takes_from_its_environment_meanwhile_stays():
    level = quiet.Level("no such variable", quiet.NOTHING)
    level._variable.value = 0
    level.lower()
    level._variable.value = 99
    level.restore()
    assert level._variable.value == 99


@pytest.fixture
def fork(monkeypatch, tmp_path):
    """A fork under Python 3.12, in a process whose second thread is that of torch's profiler."""
    for thread in ("1", "2"):
        (tmp_path / thread).touch()
    monkeypatch.setattr(ending, "THREADS", tmp_path)
    monkeypatch.setattr(ending, "WARNS", sys.version_info[:2])
    monkeypatch.setattr(Ours, "has_begun", True)
    monkeypatch.setattr(Others, "was_seen", False)
    return ForkWarning()


def warn_of_threads():
    warnings.warn(OF_THREADS, DeprecationWarning, stacklevel=1)


def test_a_fork_does_not_warn_of_the_profilers_thread(fork):
    fork.before_fork()
    warn_of_threads()
    with pytest.raises(UserWarning):
        warnings.warn("another", UserWarning, stacklevel=1)
    fork.in_child()


def test_what_was_shown_once_before_a_fork_is_not_shown_again(fork):
    shown = {}
    with pytest.raises(UserWarning):
        warnings.warn_explicit("once", UserWarning, "train.py", 1, registry=shown)
    version = shown["version"]
    fork.before_fork()
    fork.in_parent()
    with pytest.raises(UserWarning):
        warnings.warn_explicit("once", UserWarning, "train.py", 1, registry=shown)
    assert shown["version"] == version


@pytest.mark.parametrize("side", ["in_parent", "in_child"])
def test_after_a_fork_warnings_are_heard_on_both_sides(fork, side):
    theirs = warnings.filters
    fork.before_fork()
    getattr(fork, side)()
    assert warnings.filters is theirs
    with pytest.raises(DeprecationWarning):
        warn_of_threads()


def test_a_process_with_threads_of_its_own_is_warned(fork, tmp_path):
    (tmp_path / "3").touch()
    fork.before_fork()
    with pytest.raises(DeprecationWarning):
        warn_of_threads()


def test_a_process_that_has_used_the_profiler_itself_is_warned(fork, monkeypatch):
    monkeypatch.setattr(Others, "was_seen", True)
    fork.before_fork()
    with pytest.raises(DeprecationWarning):
        warn_of_threads()


def test_a_forked_child_is_warned_of_its_own_thread(fork):
    fork.before_fork()
    fork.in_child()
    fork.before_fork()
    with pytest.raises(DeprecationWarning):
        warn_of_threads()


PREPARED_ELSEWHERE = """
import threading
from pathlib import Path
from kprof.collect.recorder.kprof_recorder.capture import Capture
from kprof.collect.recorder.kprof_recorder.settings import Settings
thread = threading.Thread(target=Capture(Settings(Path())).prepare)
thread.start()
thread.join()
import ctypes
stderr = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")
ctypes.CDLL(None).fputs(b"heard", stderr)
"""


def test_kineto_says_nothing_of_a_thread_that_has_not_imported_torch():
    command = (sys.executable, "-c", PREPARED_ELSEWHERE)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == "heard"
