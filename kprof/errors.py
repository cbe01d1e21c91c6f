"""What a user can cause, always together with the way out."""

from __future__ import annotations


class KprofError(Exception):
    """A problem that its reader can mend; the command line prints it and exits with `exit_code`."""

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
