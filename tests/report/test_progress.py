"""What a terminal shows of what takes long."""

import sys
import threading

import pytest
import rich.progress
from rich.console import Console

from kprof.report import progress
from kprof.report.progress import Progress
from tests.quantities import quantities_in


@pytest.fixture
def bars(monkeypatch):
    """Return the bars that are made; none waits before it shows."""
    made, bar = [], rich.progress.Progress

    def make(**options):
        made.append(bar(**options))
        return made[-1]

    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(rich.progress, "Progress", make)
    return made


@pytest.fixture
def terminal(monkeypatch):
    """Let stderr pass for a terminal."""
    monkeypatch.setattr(Console, "is_terminal", True)


def wait_for_timers():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def task_of(bars):
    """Return the only task of the only bar, when it is there."""
    wait_for_timers()
    ((task,),) = (bar.tasks for bar in bars)
    return task


@pytest.mark.usefixtures("terminal")
def test_a_known_stage_shows_its_share_of_all(bars):
    shown = Progress()
    shown("analyzing")
    task = task_of(bars)
    assert (task.description.split(",")[0], task.percentage) == ("analyzing", pytest.approx(70))
    assert quantities_in(task.description) == ["1 s"]
    shown.close()


@pytest.mark.usefixtures("terminal")
def test_a_stage_of_unknown_number_shows_no_share(bars):
    shown = Progress()
    shown("checking rmsnorm")
    assert (task_of(bars).description, task_of(bars).total) == ("checking rmsnorm", None)
    shown("checking swiglu")
    assert task_of(bars).description == "checking swiglu"
    shown.close()


def test_without_a_terminal_there_is_no_bar(bars):
    shown = Progress()
    shown("analyzing")
    wait_for_timers()
    assert bars == []
    shown.close()


def test_without_a_terminal_work_that_takes_long_is_told_in_lines(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    heard = []
    shown = Progress(heard.append, is_patient=True)
    shown("reading")
    wait_for_timers()
    shown("analyzing")
    shown.close()
    assert heard[0] == "reading"
    assert heard[1].startswith("analyzing") and quantities_in(heard[1]) == ["1 s"]


def test_without_a_terminal_work_that_is_soon_done_says_nothing():
    heard = []
    shown = Progress(heard.append, is_patient=True)
    shown("reading")
    shown("analyzing")
    shown.close()
    assert heard == []


def test_without_a_terminal_every_stage_is_told():
    heard = []
    shown = Progress(heard.append)
    shown("checking rmsnorm")
    shown("checking swiglu")
    shown.close()
    assert heard == ["checking rmsnorm", "checking swiglu"]


@pytest.mark.usefixtures("terminal")
def test_a_stage_that_a_bar_shows_is_not_told(bars):
    heard = []
    shown = Progress(heard.append)
    shown("checking rmsnorm")
    assert task_of(bars).description == "checking rmsnorm"
    shown.close()
    assert heard == []


@pytest.mark.usefixtures("terminal")
def test_a_bar_does_not_begin_after_the_end(bars, monkeypatch):
    fired = []

    class Late(threading.Timer):
        """A timer that fires when the test says so."""

        def start(self):
            fired.append(self.function)

    monkeypatch.setattr(threading, "Timer", Late)
    shown = Progress()
    shown("analyzing")
    shown.close()
    (show,) = fired
    show()
    assert bars == []


@pytest.mark.usefixtures("terminal")
def test_output_printed_beside_a_bar_goes_to_stdout(bars, capsys):
    shown = Progress()
    shown("analyzing")
    task_of(bars)
    sys.stdout.write("a result\n")
    shown.close()
    assert capsys.readouterr().out == "a result\n"
