"""What the findings predict for kernels: a window of the workload is recorded before any is tried.

The workload is ended behind its window and the dry run of a swap; the recording is analyzed as
that of `kprof run`. It is kept beside the comparison.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import TypeAlias

from kprof.ab.variants import AbOptions, Tell
from kprof.collect.launch import LOOK_S, LaunchOptions, complete, environment_for, write_description
from kprof.collect.trials import LOG, MARK, Variant, Workload, ending
from kprof.errors import KprofError
from kprof.findings import Diagnosis
from kprof.kernels.swap.swap_report import Predicted
from kprof.opened import open_trace

# Returns what the findings predict, and why nothing, if so; waits until they are known.
Prediction: TypeAlias = Callable[[], tuple[tuple[Predicted, ...], str]]
# Longest time of the recording, beside which the choice is worth nothing.
MOST_S = 300.0
# After the recording is written, for a step with the dry run.
PATIENCE_S = 20.0
DRY_RUN, RECORDER = "dry_run.json", "recorder.json"


def predictions(a: Variant, options: AbOptions, folder: Path, tell: Tell) -> Prediction:
    """Record a workload; return a function that waits for what findings predict for kernels.

    The recording is analyzed beside what comes next, which takes a while to start.
    """
    tell("recording a window, for what the findings predict")
    try:
        record(a, options, folder)
    except (KprofError, OSError) as error:
        return no_predictions(_why(error))
    analysis: Future[tuple[tuple[Predicted, ...], str]] = Future()

    def analyze() -> None:
        try:
            analysis.set_result(_predictions_of(folder))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            analysis.set_exception(error)

    # Python waits at its end for the threads of a pool, also after Ctrl-C.
    threading.Thread(target=analyze, daemon=True).start()
    return analysis.result


def no_predictions(why: str) -> Prediction:
    """Return a function that says why findings predict nothing."""
    return lambda: ((), why)


def _why(error: Exception) -> str:
    return error.problem if isinstance(error, KprofError) else str(error)


def _predictions_of(folder: Path) -> tuple[tuple[Predicted, ...], str]:
    try:
        diagnosis = open_trace(folder).diagnosis
    except (KprofError, OSError) as error:
        return (), _why(error)
    if diagnosis is None:
        return (), "the recording has no findings"
    return tuple(predicted_by(diagnosis)), ""


def predicted_by(diagnosis: Diagnosis) -> list[Predicted]:
    """Return what findings predict for the kernels that they recommend, the best first."""
    found: list[Predicted] = []
    for one in diagnosis.findings:
        if one.swap is None:
            continue
        low = high = None
        saving = one.saving
        if saving is not None and saving.high_ns is not None and saving.step_ns:
            low = 1 - saving.high_ns / saving.step_ns
            high = 1 - (saving.low_ns or 0) / saving.step_ns
        found.append(Predicted(one.swap, low, high))
    return sorted(found, key=lambda one: inf if one.low is None else one.low)


def record(a: Variant, options: AbOptions, folder: Path) -> None:
    """Record a window of the workload into a folder, and end it.

    Raises:
        KprofError: nothing was recorded.
        OSError: the workload cannot be started.
    """
    raw = folder / "raw"
    raw.mkdir(parents=True)
    # No kernels: a script that asks for those that were chosen for it runs as it is.
    launched = LaunchOptions(a.command, folder, skip=options.skip, swap="")
    environment = {**environment_for(launched, raw), **a.environment}
    started_ns = time.time_ns()
    write_description(raw, a.command, (started_ns, None), None)
    workload = Workload(a.command, environment, folder / LOG, MARK)
    with ending(workload):
        end_s = time.monotonic() + MOST_S
        while workload.wait(LOOK_S) is None and time.monotonic() < end_s:
            if _is_recorded(raw):
                break
    # That it was ended is no failure of its own.
    complete(raw, a.command, (started_ns, time.time_ns()), 0)
    if not any(raw.glob("rank*-pid*/window-*")):
        raise KprofError(
            "no window of the workload was recorded", fix=f"see its output in {folder / LOG}"
        )


def _is_recorded(raw: Path) -> bool:
    """Return whether all processes have written their window, and made the dry run if one comes.

    Some may never do either: what is there counts after a while.
    """
    recorders = list(raw.glob(f"rank*-pid*/{RECORDER}"))
    written = [one for one in recorders if json.loads(one.read_text())["is_complete"]]
    if not written:
        return False
    last_s = max(one.stat().st_mtime for one in written)
    are_all = all(one in written and (one.parent / DRY_RUN).exists() for one in recorders)
    return are_all or time.time() - last_s > PATIENCE_S
