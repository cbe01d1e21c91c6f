"""Reports of Nsight Compute: its CSV, or `.ncu-rep` through NVIDIA's module or program.

Each launch was measured alone, several times over: a report has durations and traffic, no starts.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd

from kprof.collect.readers.ncu.launches import GPU_NAME, Launch, Metric, counted_columns, is_wanted
from kprof.collect.readers.ncu.program import REPORT_SUFFIX, export_report, find_program
from kprof.collect.readers.ncu.table import EXPORT, Table, is_table, read_table
from kprof.collect.readers.table_columns import as_declared, places
from kprof.errors import TraceError
from kprof.trace import Caveat, Gpu, Meta, Trace, empty

# For the message about a file that no reader knows.
OPENS = "a report of Nsight Compute: its CSV or *.ncu-rep"

MODULE = "ncu_report"
INSTALL = "pip install ncu-report"

UNTIMED = "Nsight Compute measures each kernel alone, and tells nothing of when it runs"
_COLLECT = "profile with: ncu --set basic, or --metrics gpu__time_duration.sum,…"


def knows(path: Path, head: bytes) -> bool:
    """Say whether the file could be a report, or the CSV of one."""
    if path.is_dir():
        return False
    return path.name.endswith(REPORT_SUFFIX) or is_table(head)


def read(path: Path) -> Trace:
    """Read a report; its activities stand one after another, whenever they ran.

    Raises:
        TraceError: the file is damaged, is of another tool, or holds no launch; or it is a report
            and nothing here can read it.
    """
    table = read_launches(path)
    timed = [launch for launch in table.launches if launch.duration_ns is not None]
    if not timed:
        missing = "no duration of any launch" if table.launches else "no launch"
        raise TraceError(f"{path.name} holds {missing}", fix=_COLLECT)
    meta = Meta(
        source=path.name,
        tool="ncu",
        gpus=_gpus(timed),
        untimed=UNTIMED,
        num_ranks=len({launch.process for launch in timed}),
        counts={"events": len(table.launches), "file_bytes": path.stat().st_size},
        caveats=tuple(_caveats(table, timed)),
    )
    return Trace(_kernels(timed), empty("ranges"), empty("samples"), meta)


def read_launches(path: Path) -> Table:
    """Read the launches of a report or a CSV."""
    return read_report(path) if path.name.endswith(REPORT_SUFFIX) else read_table(path)


def read_report(path: Path) -> Table:
    """Read a report with `ncu_report`, which is NVIDIA's, or with `ncu` where only that is here.

    Raises:
        TraceError: neither is installed here, or the report cannot be read.
    """
    module = _find_module()
    if module is not None:
        return _read_with(module, path)
    if find_program() is None:
        raise TraceError(
            f"{path.name} is a report of Nsight Compute, which only NVIDIA's own software reads, "
            "and none is installed here",
            fix=f"{INSTALL}; or, where Nsight Compute is installed, export it and open the CSV: "
            f"{EXPORT}",
        )
    with tempfile.TemporaryDirectory(prefix="kprof-") as folder:
        return read_table(export_report(path, Path(folder) / f"{path.stem}.csv"))


def _find_module() -> ModuleType | None:
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


def _read_with(module: ModuleType, path: Path) -> Table:
    try:
        context = module.load_report(str(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise TraceError(
            f"{path.name} cannot be read: {error}",
            fix=f"update the module (pip install -U ncu-report), or export it: {EXPORT}",
        ) from error
    actions = [action for part in _parts(context) for action in _parts(part)]
    kernels = [action for action in actions if _is_kernel(module, action)]
    launches = tuple(_launch(module, action) for action in kernels)
    return Table(launches, len(actions) - len(kernels), ())


def _parts(whole: Any) -> Iterator[Any]:  # noqa: ANN401 - an object of NVIDIA's module
    """Yield the ranges of a report, or the actions of a range."""
    number, get = (
        (whole.num_ranges, whole.range_by_idx)
        if hasattr(whole, "num_ranges")
        else (whole.num_actions, whole.action_by_idx)
    )
    return (get(index) for index in range(number()))


def _is_kernel(module: ModuleType, action: Any) -> bool:  # noqa: ANN401
    """Tell kernels from ranges and whole graphs; older versions profiled nothing else."""
    kind = getattr(action, "workload_type", None)
    return kind is None or kind() == module.IAction.WorkloadType_KERNEL


def _launch(module: ModuleType, action: Any) -> Launch:  # noqa: ANN401
    metrics = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if metric is not None and is_wanted(name, unit := metric.unit()):
            metrics[name] = Metric(Decimal(repr(metric.as_double())), unit)
    gpu = action.metric_by_name(GPU_NAME)
    return Launch(
        name=action.name(module.IAction.NameBase_DEMANGLED),
        grid=_dimensions(action, "launch__grid_dim_"),
        block=_dimensions(action, "launch__block_dim_"),
        stream=_whole(action, "launch__stream_id"),
        device=_whole(action, "launch__device_id"),
        gpu=gpu.as_string() if gpu is not None else None,
        metrics=metrics,
    )


def _dimensions(action: Any, prefix: str) -> str | None:  # noqa: ANN401
    numbers = [_whole(action, f"{prefix}{axis}") for axis in "xyz"]
    return None if None in numbers else ",".join(map(str, numbers))


def _whole(action: Any, name: str) -> int | None:  # noqa: ANN401
    metric = action.metric_by_name(name)
    return None if metric is None else int(metric.as_uint64())


def _gpus(launches: list[Launch]) -> tuple[Gpu, ...]:
    named = {launch.device: launch.gpu for launch in launches if launch.gpu}
    gpus = [Gpu(index, name) for index, name in named.items()]
    return tuple(sorted(gpus, key=lambda gpu: gpu.device))


def _caveats(table: Table, timed: list[Launch]) -> Iterator[Caveat]:
    yield Caveat(
        "ran_alone",
        "Durations are of kernels that ran alone, by default with caches flushed before each and "
        "clocks held at their base: they are not those of the workload.",
    )
    if num_untimed := len(table.launches) - len(timed):
        untimed = f"Launches without a duration, left out: {num_untimed:,}."
        yield Caveat("untimed_launches", untimed)
    if any(launch.is_rounded for launch in timed):
        yield Caveat(
            "rounded_times",
            "Times are rounded in this file, as they are written in larger units than "
            "nanoseconds: export it with --print-units base.",
        )
    if all(launch.dram_read_bytes is None or launch.dram_written_bytes is None for launch in timed):
        yield Caveat(
            "no_traffic",
            "The traffic with the device's memory was not counted: add "
            "--metrics dram__bytes_read.sum,dram__bytes_write.sum.",
        )
    if table.num_other_lines:
        others = f"Lines, or results, that are no launch of a kernel: {table.num_other_lines:,}."
        yield Caveat("other_lines", others)
    for said in dict.fromkeys(table.said):
        yield Caveat("profiler_message", f"Nsight Compute: {said}.")


def _kernels(launches: list[Launch]) -> pd.DataFrame:
    processes = sorted({launch.process for launch in launches})
    rank = np.array([processes.index(launch.process) for launch in launches], dtype=np.int32)
    duration_ns = np.array([launch.duration_ns for launch in launches], dtype=np.int64)
    return as_declared(
        "kernels",
        len(launches),
        {
            "name": pd.Categorical([launch.name for launch in launches]),
            "activity": pd.Categorical(["kernel"] * len(launches)),
            "rank": rank,
            "device": places(launch.device for launch in launches).astype(np.int32),
            "stream": places(launch.stream for launch in launches),
            "start_ns": one_after_another(rank, duration_ns),
            "duration_ns": duration_ns,
            "grid": pd.Categorical([launch.grid for launch in launches]),
            "block": pd.Categorical([launch.block for launch in launches]),
            **counted_columns(launches),
        },
    )


def one_after_another(rank: np.ndarray, duration_ns: np.ndarray) -> np.ndarray:
    """Arrange each rank's activities one after another from 0, and return their starts."""
    start_ns = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank):
        rows = np.flatnonzero(rank == one)
        start_ns[rows[1:]] = np.cumsum(duration_ns[rows])[:-1]
    return start_ns
