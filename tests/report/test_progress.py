"""What a terminal shows of what takes long."""

import sys

import pytest
from rich.console import Console

from kprof.report import progress
from kprof.report.progress import Progress


@pytest.fixture
def at_once(monkeypatch):
    """Let a bar show at once, on what passes for a terminal."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(Console, "is_terminal", True)


def bar_of(shown):
    """Return the bar's only task, when it is there."""
    shown._timer.join()
    (task,) = shown._bar.tasks
    return task


@pytest.mark.usefixtures("at_once")
def test_a_known_stage_shows_its_share_of_all():
    shown = Progress()
    shown("analyzing")
    assert (bar_of(shown).description, bar_of(shown).percentage) == ("analyzing", 25)
    shown.close()


@pytest.mark.usefixtures("at_once")
def test_another_stage_shows_no_share_as_nobody_knows_it():
    shown = Progress()
    shown("checking rmsnorm")
    assert (bar_of(shown).description, bar_of(shown).total) == ("checking rmsnorm", None)
    shown("checking swiglu")
    assert bar_of(shown).description == "checking swiglu"
    shown.close()


def test_where_there_is_no_terminal_nothing_shows(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    shown = Progress()
    shown("analyzing")
    shown._timer.join()
    assert shown._bar is None
    shown.close()


def test_where_there_is_no_terminal_whoever_is_named_hears_of_every_stage():
    heard = []
    shown = Progress(heard.append)
    shown("checking rmsnorm")
    shown("checking swiglu")
    shown.close()
    assert heard == ["checking rmsnorm", "checking swiglu"]


@pytest.mark.usefixtures("at_once")
def test_where_a_bar_shows_a_stage_nobody_else_hears_of_it():
    heard = []
    shown = Progress(heard.append)
    shown("checking rmsnorm")
    assert bar_of(shown).description == "checking rmsnorm"
    shown.close()
    assert heard == []


def test_a_bar_that_would_begin_after_the_end_does_not(monkeypatch):
    monkeypatch.setattr(Console, "is_terminal", True)
    shown = Progress()
    shown("analyzing")
    shown.close()
    # The timer had fired already, and waited.
    shown._show()
    assert shown._bar is None


@pytest.mark.usefixtures("at_once")
def test_what_is_printed_meanwhile_goes_where_it_should(capsys):
    shown = Progress()
    shown("analyzing")
    bar_of(shown)
    sys.stdout.write("a result\n")
    shown.close()
    assert capsys.readouterr().out == "a result\n"
