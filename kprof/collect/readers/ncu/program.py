"""Nsight Compute's own program: finding it, running a workload in it, exporting its reports."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kprof.collect.launch import LaunchOptions, environment_for
from kprof.errors import LaunchError, TraceError

PROGRAM = "ncu"
REPORT_SUFFIX = (".ncu-rep", ".ncu-repz")
# In a run's `raw` folder: the report, its export, what the program and the workload printed, and
# what the recorder, which opens the window, wrote meanwhile.
REPORT, EXPORT, LOG, WINDOW = "ncu.ncu-rep", "ncu.csv", "ncu.log", "ncu-window"
INSTALL = "install nsight-compute, or the CUDA toolkit, so that `ncu` is on the PATH"
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
# The pipes of the tensor cores have other names in every generation. Where one metric is of all of
# them, the others would only cost more passes over every launch.
_TENSOR = re.compile(r"^(sm__pipe_tensor\w*cycles_active)\s", re.MULTILINE)
_ALL_TENSOR = "sm__pipe_tensor_cycles_active"
_PERMISSION = "ERR_NVGPUCTRPERM"


@dataclass(frozen=True)
class Window:
    """Which launches to profile: those of these functions, at most so many, in one step."""

    functions: tuple[str, ...]
    most_launches: int
    skip: int | None
    """Steps before the one to profile; None where no step was marked: from the start."""


def profile(command: tuple[str, ...], cwd: Path, raw: Path, window: Window) -> None:
    """Run a command once more inside Nsight Compute; leave its report and export in `raw`.

    Clocks are left alone and caches are flushed before each launch, so that a launch's traffic
    does not depend on the one before. What is printed goes to a file.

    Raises:
        LaunchError: Nsight Compute is not here, may not count, or profiled nothing.
    """
    program = find_program()
    if program is None:
        raise LaunchError("Nsight Compute is not installed here", fix=INSTALL)
    (raw / REPORT).unlink(missing_ok=True)
    options = LaunchOptions(command, raw.parent, skip=window.skip or 0, steps=1, nsys=True)
    environment = environment_for(options, raw / WINDOW) if window.skip is not None else None
    (raw / WINDOW).mkdir(exist_ok=True)
    # A % would stand for something else there.
    export = "--export=" + str((raw / REPORT).absolute()).replace("%", "%%")
    words = [program, *_options(program, window), export, *command]
    try:
        with (raw / LOG).open("wb") as log:
            nothing = subprocess.DEVNULL
            subprocess.run(
                words,
                cwd=cwd,
                env=environment,
                stdin=nothing,
                stdout=log,
                stderr=log,
                check=False,
            )
    except OSError as error:
        raise LaunchError(f"{program} cannot be started: {error}", fix=INSTALL) from error
    finally:
        shutil.rmtree(raw / WINDOW, ignore_errors=True)
    if not (raw / REPORT).is_file():
        raise _without_report((raw / LOG).read_text(errors="replace"), raw / LOG)
    export_report(raw / REPORT, raw / EXPORT)


def find_program() -> str | None:
    """Return where Nsight Compute is, or None."""
    return shutil.which(PROGRAM)


def _options(program: str, window: Window) -> list[str]:
    names = "|".join(re.escape(name) for name in window.functions)
    return [
        "--target-processes=all",
        "--clock-control=none",
        "--cache-control=all",
        *(["--profile-from-start=off"] if window.skip is not None else []),
        "--kernel-name-base=function",
        f"--kernel-name=regex:(^|::)({names})$",
        f"--launch-count={window.most_launches}",
        "--metrics=" + ",".join([*METRICS, *_tensor_metrics(program)]),
        "--force-overwrite",
    ]


def _tensor_metrics(program: str) -> list[str]:
    """Return what counts the tensor cores of the GPU here; nothing where unknown."""
    asked = subprocess.run(
        [program, "--query-metrics"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    found = dict.fromkeys(_TENSOR.findall(asked.stdout))
    found = {_ALL_TENSOR: None} if _ALL_TENSOR in found else found
    return [f"{name}.avg.pct_of_peak_sustained_elapsed" for name in found]


def _without_report(said: str, log: Path) -> LaunchError:
    """Return why there is no report, from what Nsight Compute printed."""
    if _PERMISSION in said:
        return LaunchError(
            "Nsight Compute may not read the GPU's counters here (ERR_NVGPUCTRPERM)",
            fix="run as root, or let the administrator load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0; in a container add --cap-add=SYS_ADMIN",
        )
    errors = re.findall(r"==ERROR==\s*(.+)", said)
    if errors:
        return LaunchError(f"Nsight Compute failed: {errors[-1]}", fix=f"see {log}")
    return LaunchError(
        "Nsight Compute profiled nothing: no launch of these kernels was in the window",
        fix=f"see {log}; does the workload take the same path every time?",
    )


def export_report(report: Path, target: Path) -> Path:
    """Export a report as CSV to `target`, and return that.

    Raises:
        TraceError: Nsight Compute is not installed here, or cannot export it.
    """
    program = find_program()
    if program is None:
        raise TraceError(f"{report.name} needs Nsight Compute to be exported", fix=INSTALL)
    command: Sequence[str] = (program, "--import", str(report.absolute()), "--csv", "--page", "raw")
    with target.open("wb") as file:
        done = subprocess.run(
            [*command, "--print-units", "base"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "it said nothing"
        raise TraceError(
            f"{report.name} cannot be exported: {said.splitlines()[-1]}",
            fix="export it with the Nsight Compute that wrote it, or a newer one",
        )
    return target
