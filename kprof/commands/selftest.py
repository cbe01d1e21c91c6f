"""`kprof selftest`: measure how often the verdicts of `kprof ab` are right."""

from __future__ import annotations

from typing import Annotated

import typer

from kprof.commands import Answer, say

EXIT_CODES = {True: 0, False: 1, None: 3}


def selftest(
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Use simulated noise: no GPU, half a minute.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Make fewer comparisons.")] = False,
    comparisons: Annotated[
        int | None, typer.Option(metavar="N", min=50, help="Comparisons of each kind.")
    ] = None,
    pairs: Annotated[
        int, typer.Option(metavar="N", min=10, max=1000, help="Pairs per comparison.")
    ] = 40,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Seed of noise and order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """Measure the error rates of `kprof ab` on this machine.

    Compares, for a few minutes, the same work with itself, also under disturbances, and with work
    that is 1, 2 and 5 % longer. The result is stored, and printed with every later comparison.

    Results are stored as they are measured. Exit code 0: every target is met; 1: one is missed; 3:
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
