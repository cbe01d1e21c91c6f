"""`kprof ncu`: run a recorded workload once more in Nsight Compute, and count what it did."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from kprof.collect.ncu import Window, profile
from kprof.collect.readers._ncu.join import function_in
from kprof.errors import KprofError
from kprof.open import Opened, Progress, open_run, open_trace
from kprof.trace import Trace

NUM_KERNELS = 10
# Each is run several times over, with its memory saved and restored: some 20 ms.
MOST_LAUNCHES = 1_000


class Launched(msgspec.Struct):
    """What launch.json says that is read here."""

    command: tuple[str, ...]
    cwd: str


def count(
    run: Path,
    num_kernels: int = NUM_KERNELS,
    most_launches: int = MOST_LAUNCHES,
    progress: Progress = lambda stage: None,
) -> Opened:
    """Count what the most expensive kernels of a run did, and analyze the run again with that.

    The run's own command is started again, and the first of its recorded steps is profiled.

    Raises:
        KprofError: `run` is no recording that could be run again, or nothing could be counted.
    """
    raw = run / "raw"
    if not run.exists():
        raise KprofError(f"{run} does not exist", fix="check the path")
    if not (raw / "launch.json").is_file():
        raise KprofError(
            f"{run} is no recording of kprof, so nothing says what to run again",
            fix="record the workload with `kprof run`, then name the folder that it wrote",
        )
    progress("reading")
    trace = open_trace(run)
    launched = msgspec.json.decode((raw / "launch.json").read_bytes(), type=Launched)
    window = window_of(trace, num_kernels, most_launches)
    progress("counting")
    profile(launched.command, Path(launched.cwd), raw, window)
    return open_run([run], None, force=True, progress=progress)


def window_of(trace: Trace, num_kernels: int, most_launches: int) -> Window:
    """Choose what to profile of an analyzed recording: the functions that take most time.

    Raises:
        KprofError: nothing of the recording can be profiled.
    """
    if trace.is_host_only:
        raise KprofError(
            f"{trace.meta.source} used no GPU, so there is nothing to count",
            fix="record the workload where it uses a GPU of NVIDIA",
        )
    if trace.meta.num_ranks > 1:
        raise KprofError(
            f"{trace.meta.source} has {trace.meta.num_ranks} ranks: running the kernels of one "
            "over and over would keep the others waiting in their collectives",
            fix="record and count a run of one rank",
        )
    kernels = trace.kernels
    is_chosen = (kernels["activity"] == "kernel") & (kernels["kind"] != "collective")
    chosen = kernels[is_chosen.to_numpy(bool)]
    time_ns = chosen.groupby("name", observed=True)["duration_ns"].sum()
    by_function = time_ns.groupby([function_in(str(name)) for name in time_ns.index]).sum()
    longest = by_function.sort_values(ascending=False, kind="stable").head(num_kernels)
    if not len(longest):
        raise KprofError(
            f"{trace.meta.source} holds no kernel that can be run alone",
            fix="record a part of the workload that computes",
        )
    steps = trace.meta.recording.steps_recorded if trace.meta.recording else ()
    first = int(np.min(steps)) if steps else None
    return Window(tuple(longest.index), most_launches, first)
