"""`kprof selftest`: measure how often the verdicts of `kprof ab` are right."""

from __future__ import annotations

from typing import Annotated

import typer

from kprof.commands import Answer, say

EXIT_CODES = {True: 0, False: 1, None: 3}


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

    What is found is kept as it goes. Exit code 0: every target is met; 1: one is missed; 3:
    something could not be measured.
    """
    from kprof.ab.calibrate import calibrate, json_of, keep, simulate_noise
    from kprof.report.calibration import sections_of_calibration

    if simulate:
        found = simulate_noise(comparisons or (2_000 if quick else 4_000), pairs, seed)
        last = "on this machine: kprof selftest"
    else:
        path = None
        for found in calibrate(comparisons, pairs, seed, say, quick=quick):
            before, path = path, keep(found, is_complete=False)
            if path and not before:
                say(f"kept as it goes: {path}")
        path = keep(found)
        last = f"kept for later comparisons: {path or 'nowhere, there is no home folder'}"
    return Answer(
        f"self-test, {found.device}",
        sections_of_calibration(found),
        json_of(found) if json else None,
        last,
        exit_code=EXIT_CODES[found.is_met],
    )
