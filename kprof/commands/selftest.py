"""The options of `kprof selftest`."""

from __future__ import annotations

from typing import Annotated

import typer

from kprof.answer import Answer, say


def selftest(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="On simulated noise: no GPU, half a minute.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer comparisons.")] = False,
    comparisons: Annotated[
        int | None, typer.Option(metavar="N", min=50, help="Comparisons of each kind.")
    ] = None,
    pairs: Annotated[int, typer.Option(metavar="N", min=10, max=1000, help="Pairs of each.")] = 40,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of noise and order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """Measure how often the verdicts of `kprof ab` are right.

    On this machine, in a few minutes: the same work twice, also while others disturb it, and work
    that is 1, 2 and 5 % longer. The result is kept, and stands on every later comparison.

    Exit code 0: every target is met; 1: one is missed.
    """
    from kprof.report.calibration import sections_of_calibration
    from kprof.selftest import calibrate, json_of, simulate_noise

    if simulate:
        found = simulate_noise(comparisons or (2_000 if quick else 4_000), pairs, seed)
        last = "on this machine: kprof selftest"
    else:
        found, path = calibrate(comparisons, pairs, seed, say, quick=quick)
        last = f"kept for later comparisons: {path or 'nowhere, there is no home folder'}"
    return Answer(
        f"self-test, {found.device}",
        sections_of_calibration(found),
        json_of(found) if json else None,
        last,
        exit_code=0 if found.is_met else 1,
    )
