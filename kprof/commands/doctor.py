"""`kprof doctor`: the abilities of this machine, with a fix for each that it lacks."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kprof.collect.nvml import Nvml, describe_devices, read_sample
from kprof.device import HARMLESS_REASONS, THROTTLE_REASONS

State = Literal["ok", "missing", "limited"]

OLDEST_TORCH = (2, 6)
NEWEST_TORCH = (2, 13)

INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


@dataclass(frozen=True)
class Check:
    """One thing that measuring needs: what was found, and how to fix it where it is not ok."""

    name: str
    state: State
    found: str
    fix: str = ""


STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor() -> None:
    """Show what this machine can measure, and how to fix the rest."""
    from rich.console import Console

    checks = [(c.name, c.state, c.found, c.fix) for c in check_machine()]
    print_checks(checks, Console())


def check_machine(root: Path = Path("/")) -> tuple[Check, ...]:
    """Return every check of this machine and interpreter; /proc is looked for below `root`."""
    nvml = Nvml()
    try:
        on_gpus: list[Callable[[], Check]] = [
            lambda: check_driver(nvml),
            lambda: check_gpus(nvml),
            lambda: check_throttling(nvml),
        ]
        others: list[Callable[[], Check]] = [
            check_python,
            check_torch,
            check_cupti,
            lambda: check_counters(root, is_root=os.geteuid() == 0),
            lambda: check_tool(
                "nsys", "`kprof run --nsys` and reports not yet exported", ("--version",)
            ),
            lambda: check_tool("ncu", "hardware counters of single kernels", ("--version",)),
            lambda: check_package(
                "cupti", "cupti-python", "`kprof run --counters`", "pip install 'kprof[counters]'"
            ),
            lambda: check_package(
                "triton", "triton", "kprof's kernels", "it comes with a CUDA build of torch"
            ),
            lambda: check_other_profilers(os.environ, parents_of(root)),
            lambda: check_sandbox(root),
        ]
        checks = tuple(check() for check in [*on_gpus, *others])
    finally:
        nvml.close()
    return (what_works(checks), *checks)


def check_driver(nvml: Nvml) -> Check:
    """Look for the driver through NVML."""
    if nvml.problem is not None:
        return Check(
            "NVIDIA driver", "missing", nvml.problem, "install the NVIDIA driver (525 or newer)"
        )
    return Check("NVIDIA driver", "ok", str(nvml.ask("nvmlSystemGetDriverVersion")))


def check_gpus(nvml: Nvml) -> Check:
    """Look for GPUs, and whether they are divided by MIG."""
    devices = describe_devices(nvml)
    if not devices:
        return Check(
            "GPUs", "missing", "none", "on a GPU machine, pass the GPUs through to this container"
        )
    names = ", ".join(f"{device['index']}: {device.get('name', 'unnamed')}" for device in devices)
    if any(device.get("is_mig") for device in devices):
        return Check(
            "GPUs",
            "limited",
            f"{names}; MIG is on: ceilings, power and clocks are those of the whole GPU",
            "measure on a whole GPU (`nvidia-smi -mig 0` as its administrator)",
        )
    return Check("GPUs", "ok", names)


def check_throttling(nvml: Nvml) -> Check:
    """Look at why clocks are held down at this moment."""
    if not nvml.handles:
        return Check("throttling", "missing", "no GPU to ask")
    found = []
    for index in nvml.handles:
        bits = int(read_sample(nvml, index).get("throttle_reasons", 0))
        bits &= ~HARMLESS_REASONS
        found += [f"GPU {index}: {name}" for bit, name in THROTTLE_REASONS.items() if bits & bit]
    if found:
        return Check(
            "throttling", "limited", "; ".join(found), "cool the machine, or raise the power limit"
        )
    return Check("throttling", "ok", "clocks are not held down now")


def check_python() -> Check:
    """Check the interpreter that runs kprof, which also runs scripts."""
    found = f"{platform.python_version()} at {sys.executable}"
    return Check("Python", "ok", found)


def check_torch() -> Check:
    """Check which torch this interpreter has and whether it was built for CUDA."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed here", "pip install torch")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Check("torch", "limited", "without a version", "reinstall torch")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        return Check("torch", "missing", f"{found} is too old", "install torch 2.6 or newer")
    if _cuda_of_torch() is None:
        return Check(
            "torch", "limited", f"{found}, built without CUDA", "install a CUDA build of torch"
        )
    if numbers > NEWEST_TORCH:
        return Check("torch", "limited", f"{found}, newer than the last one tried (2.13)")
    return Check("torch", "ok", f"{found}, CUDA {_cuda_of_torch()}")


def _cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    for line in _text(Path(spec.origin).with_name("version.py")).splitlines():
        if line.startswith("cuda"):
            return line.partition("=")[2].strip().strip("'\"").replace("None", "") or None
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_cupti() -> Check:
    """Look for CUPTI, through which torch's profiler sees kernels."""
    places = [*_site_folders("nvidia/cuda_cupti/lib"), *_site_folders("nvidia/cu13/lib")]
    libraries = [library for place in places for library in place.glob("libcupti.so*")]
    if libraries:
        return Check("CUPTI", "ok", str(libraries[0]))
    for name in ("libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Check("CUPTI", "ok", f"{name}, found by the loader")
    return Check(
        "CUPTI",
        "missing",
        "no libcupti; GPU kernels cannot be recorded",
        "install a CUDA build of torch, which brings it, or the CUDA toolkit",
    )


def _site_folders(path: str) -> list[Path]:
    return [Path(entry) / path for entry in sys.path if entry and (Path(entry) / path).is_dir()]


def check_counters(root: Path, *, is_root: bool) -> Check:
    """Check who may read hardware counters; tracing does not need them."""
    parameters = root / "proc/driver/nvidia/params"
    fix = (
        "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as root "
        "(in a container with --cap-add=SYS_ADMIN)"
    )
    try:
        text = parameters.read_text()
    except OSError:
        return Check("hardware counters", "missing", f"{parameters} cannot be read", fix)
    if "RmProfilingAdminOnly: 0" in text:
        return Check("hardware counters", "ok", "open to every user")
    if is_root:
        return Check("hardware counters", "ok", "for administrators only, and this is one")
    return Check("hardware counters", "limited", "for administrators only", fix)


def check_tool(name: str, purpose: str, arguments: tuple[str, ...]) -> Check:
    """Look for a program of NVIDIA's that kprof can do without."""
    path = shutil.which(name)
    if path is None:
        return Check(
            name, "missing", "not on the PATH", f"optional, for {purpose}: install Nsight tools"
        )
    try:
        answer = subprocess.run(
            (path, *arguments), capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name, "limited", f"{path} does not answer ({error})", "reinstall it")
    lines = answer.stdout.strip().splitlines()
    return Check(name, "ok", f"{path}: {lines[-1] if lines else 'no version'}")


def check_package(module: str, package: str, purpose: str, fix: str) -> Check:
    """Look for an optional package in this interpreter."""
    if importlib.util.find_spec(module) is None:
        return Check(package, "missing", "not installed", f"optional, for {purpose}: {fix}")
    try:
        return Check(package, "ok", f"{version(package)}, for {purpose}")
    except PackageNotFoundError:
        return Check(package, "ok", f"of no known version, for {purpose}")


def check_other_profilers(environment: Mapping[str, str], parents: tuple[str, ...]) -> Check:
    """Look for another profiler: only one at a time can listen to CUPTI."""
    variables = [name for name in environment if name in INJECTIONS or name.startswith("KINETO_")]
    programs = [name for name in parents if name.startswith(("nsys", "ncu", "rocprof"))]
    daemons = ["nv-hostengine (DCGM)"] if shutil.which("nv-hostengine") else []
    if not (variables or programs or daemons):
        return Check("other profilers", "ok", "none attached")
    return Check(
        "other profilers",
        "limited",
        ", ".join([*variables, *programs, *daemons]),
        "run without the other profiler; pause DCGM's profiling with `dcgmi profile --pause`",
    )


def parents_of(root: Path) -> tuple[str, ...]:
    """Return the names of the processes above this one, nearest first."""
    names: list[str] = []
    process = os.getppid()
    while process > 1 and len(names) < 32:
        fields = _text(root / f"proc/{process}/stat").rpartition(")")[2].split()
        names.append(_text(root / f"proc/{process}/comm").strip())
        process = int(fields[1]) if len(fields) > 1 else 0
    return tuple(names)


def check_sandbox(root: Path) -> Check:
    """Look for kernels of sandboxes, which hide counters and slow system calls."""
    banner = _text(root / "proc/version")
    # gVisor introduces itself in its kernel log and always claims this version.
    if "gvisor" in banner.lower() or "4.4.0 #1 SMP Sun Jan 10" in banner:
        return Check(
            "kernel", "limited", "gVisor: slow system calls", "measure on a host without gVisor"
        )
    if re.search(r"-fc\b|firecracker", banner.lower()):
        return Check(
            "kernel", "limited", "Firecracker: a virtual machine without the CPU's own counters"
        )
    return Check("kernel", "ok", platform.release())


def what_works(checks: tuple[Check, ...]) -> Check:
    """Return the sum of `checks`: what a recording on this machine holds."""
    state = {check.name: check.state for check in checks}
    if state["torch"] == "missing":
        return Check(
            "recording",
            "limited",
            "this interpreter has no usable torch: saved traces can be opened, and workloads "
            "recorded that bring an interpreter of their own",
            "install torch here, or run the workload with `kprof run -- /its/own/python script.py`",
        )
    if state["GPUs"] == "missing":
        return Check(
            "recording",
            "limited",
            "host mode: without a GPU, steps, modules and operators are timed on the CPU; "
            "traces from other machines open in full",
            "record on a machine with an NVIDIA GPU",
        )
    if state["torch"] == "limited" or state["CUPTI"] != "ok":
        return Check(
            "recording",
            "limited",
            "operators are recorded, GPU kernels perhaps not (see torch and CUPTI below)",
            "fix torch or CUPTI",
        )
    return Check("recording", "ok", "GPU kernels, operators, modules, power and clocks")


def print_checks(checks: Sequence[tuple[str, str, str, str]], console: Console) -> None:
    """Print checks as (name, state, what was found, how to fix it)."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, state, found, fix in checks:
        text = Text(found)
        if fix:
            text.append(f"\n→ {fix}", style="dim")
        table.add_row(Text(name), Text(state, style=STYLES[state]), text)
    console.print(table)
