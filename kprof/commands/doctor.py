"""`kprof doctor`, which has no options."""

from __future__ import annotations


def doctor() -> None:
    """Say what this machine can measure, and how to mend the rest."""
    from rich.console import Console

    from kprof.doctor import check_machine
    from kprof.report.checks import print_checks

    checks = [(c.name, c.state, c.found, c.mend) for c in check_machine()]
    print_checks(checks, Console())
