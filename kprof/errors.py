"""Errors that a user can cause, each with its fix; the discovery of plug-in modules."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

INTERRUPTED = 128 + 2
"""The exit code that shells give a program that SIGINT (2) ended."""


class KprofError(Exception):
    """A problem that its reader can fix; the command line prints it and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\n  what to do: {self.fix}"


class TraceError(KprofError):
    """A trace that cannot be read, or that holds nothing to analyze."""


class LaunchError(KprofError):
    """A workload that cannot be started or recorded."""


def counted(number: float, noun: str, plural: str = "") -> str:
    """Write a number with its noun: 1 step, 2 steps, 1,204 activities."""
    text = f"{number:,.0f}"
    return f"{text} {noun if text == '1' else plural or noun + 's'}"


def three_digits(value: float) -> str:
    """Write a number in three digits, and all of those before its point: 0.0123, 12.3, 5,480."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def modules_in(package: str) -> list[ModuleType]:
    """Import every public module of `package`, in the order of their names."""
    folder = importlib.import_module(package)
    names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name[0] != "_")
    return [importlib.import_module(f"{package}.{name}") for name in names]
