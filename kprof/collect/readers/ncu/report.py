"""Nsight Compute's own reports, `.ncu-rep`: through NVIDIA's module, or its program where it is."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

from kprof.collect.ncu import export_report, find_program
from kprof.collect.readers.ncu.launches import GPU_NAME, Launch, Metric, is_wanted
from kprof.collect.readers.ncu.table import EXPORT, Table, read_table
from kprof.errors import TraceError

MODULE = "ncu_report"
INSTALL = "pip install ncu-report"


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
        stream=_whole(action, "launch__stream_id", -1),
        device=_whole(action, "launch__device_id", 0),
        gpu=gpu.as_string() if gpu is not None else None,
        metrics=metrics,
    )


def _dimensions(action: Any, prefix: str) -> str | None:  # noqa: ANN401
    numbers = [_whole(action, f"{prefix}{axis}", -1) for axis in "xyz"]
    return None if -1 in numbers else ",".join(map(str, numbers))


def _whole(action: Any, name: str, otherwise: int) -> int:  # noqa: ANN401
    metric = action.metric_by_name(name)
    return otherwise if metric is None else int(metric.as_uint64())
