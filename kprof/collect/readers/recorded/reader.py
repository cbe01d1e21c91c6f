"""Raw recordings of `kprof run`: one window of each process, CUDA graphs' captures beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pandas as pd

from kprof.collect.ceilings import FILE, kept_ceilings
from kprof.collect.memory_snapshot import add_memory
from kprof.collect.merge import concatenated, merge, shifted
from kprof.collect.nsys import EXPORT
from kprof.collect.readers.kineto import reader as kineto
from kprof.collect.readers.kineto.damage import UNREADABLE
from kprof.collect.readers.marks import is_own_step
from kprof.collect.readers.ncu.join import with_counters
from kprof.collect.readers.nsys import reader as nsys
from kprof.collect.readers.recorded.compiled_code import add_notes
from kprof.collect.readers.recorded.light_pass import PassesDifferError, SameStep, compared, joined
from kprof.collect.readers.recorded.sampled_counters import with_samples
from kprof.device import Device
from kprof.errors import TraceError, counted
from kprof.findings import DryRun
from kprof.trace import Caveat, LightPass, ProcessGroup, Recording, Trace, empty

_WINDOW = re.compile(r"window-([0-9]{1,9})\.json(?:\.gz)?")

BEGIN = "cudaStreamBeginCapture"


class Step(msgspec.Struct):
    """A step as the recorder timed it."""

    index: int
    start_ns: int
    end_ns: int
    recorded: bool = False
    light: bool = False
    device_ns: int | float | None = None


class Recorder(msgspec.Struct):
    """The fields read from one process's recorder.json."""

    pid: int | None = None
    rank: int | None = None
    host: str | None = None
    node: int | None = None
    gpu_uuids: list[str | None] = []
    process_groups: list[ProcessGroup] = []
    skip: int | None = None
    steps: list[Step] = []
    step_rule: str | None = None
    num_steps_seen: int | None = None
    is_count_final: bool = True
    caveats: list[str] = []
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None


class Launch(msgspec.Struct):
    """The fields read from launch.json."""

    command: tuple[str, ...] = ()
    host: str | None = None
    versions: dict[str, str] = {}
    started_ns: int | None = None
    ended_ns: int | None = None
    exit_code: int | None = None


class DeviceLine(msgspec.Struct):
    """The fields read from NVML's facts on one GPU."""

    driver: str | None = None


class Devices(msgspec.Struct):
    """The first line of nvml.jsonl."""

    devices: list[DeviceLine] = []


# The file, in the folder of a process, with the table of a dry run.
DRY_RUN = "dry_run.json"
File = TypeVar("File", Recorder, Launch, DryRun)


def knows(path: Path, head: bytes) -> bool:
    """Tell a run folder by its launch record."""
    return path.is_dir() and _raw(path).joinpath("launch.json").is_file()


def _raw(path: Path) -> Path:
    return path if path.name == "raw" else path / "raw"


def read(path: Path) -> Trace:
    """Read every process's window and the NVML samples of one run."""
    raw = _raw(path)
    launch = _decoded(raw / "launch.json", Launch)
    num_without, light = 0, None
    if (raw / EXPORT).is_file():
        traces, recorders = _of_nsight(raw)
    else:
        traces, recorders, light = _of_torch(raw, path.name)
        traces, recorders, num_without = _with_device(traces, recorders)
    trace = merge(traces, path.name)
    told = (Caveat("recorder", text) for recorder in recorders for text in recorder.caveats)
    caveats = [*trace.meta.caveats, *told]
    if num_without:
        without = f"Recorded processes that used no GPU, left out: {num_without}."
        caveats.append(Caveat("processes_without_gpu", without))
    meta = replace(
        trace.meta,
        source=path.name,
        command=launch.command,
        host=launch.host,
        versions={
            **trace.meta.versions,
            **launch.versions,
            **_versions(recorders[0]),
            **_driver(raw / "nvml.jsonl"),
        },
        recording=_recording(launch, recorders[0], light),
        light=light,
        dry_run=_dry_run(raw),
        device=_ceilings(raw),
        caveats=tuple(dict.fromkeys(caveats)),
    )
    if meta.base_time_ns is None and (raw / "nvml.jsonl").is_file():
        unplaced = "Power and clocks are left out: the trace does not tell its wall time."
        caveat = Caveat("power_left_out", unplaced)
        meta = replace(meta, caveats=(*meta.caveats, caveat))
    samples = _nvml_samples(raw / "nvml.jsonl", meta.base_time_ns)
    if len(samples):
        both = pd.concat([trace.samples, samples], ignore_index=True)
        trace = replace(trace, samples=both.astype({"source": "category", "quantity": "category"}))
    return with_counters(replace(trace, meta=meta), raw)


def _decoded(path: Path, form: type[File]) -> File:
    # json reads what it wrote: a word of a command line may hold bytes that are no text.
    try:
        return msgspec.convert(json.loads(path.read_bytes()), form)
    except (OSError, ValueError, *UNREADABLE) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TraceError:
    return TraceError(
        f"{path.parent.name}/{path.name} cannot be read: {error}",
        fix="record the run again; the process may have been killed while writing",
    )


def _of_nsight(raw: Path) -> tuple[list[Trace], list[Recorder]]:
    """Return the one window of Nsight Systems, and the process whose steps speak for all first."""
    parts = sorted(raw.glob("rank*-pid*/recorder.json"))
    recorders = [_decoded(part, Recorder) for part in parts] or [Recorder()]
    recorders.sort(key=lambda r: (not any(step.recorded for step in r.steps), r.rank or 0))
    ranks = {r.pid: r.rank or 0 for r in recorders if r.pid is not None}
    trace = nsys.read(raw / EXPORT, ranks)
    caveats = (*trace.meta.caveats, *_untraced(trace, recorders))
    return [replace(trace, meta=replace(trace.meta, caveats=caveats))], recorders


def _untraced(trace: Trace, recorders: list[Recorder]) -> Iterator[Caveat]:
    """Tell of ranks whose steps lay outside the window, which one rank opens for all."""
    is_own = is_own_step(trace.ranges)
    traced = trace.ranges["rank"][is_own].value_counts()
    for recorder in recorders:
        rank, number = recorder.rank or 0, sum(step.recorded for step in recorder.steps)
        if number > traced.get(rank, 0):
            yield Caveat(
                "steps_outside_window",
                f"Rank {rank} marked {counted(number, 'step')}, and {traced.get(rank, 0)} of them "
                "lie in the trace: it was not in step with the rank that opens and closes the "
                "window.",
            )


def _with_device(
    traces: list[Trace], recorders: list[Recorder]
) -> tuple[list[Trace], list[Recorder], int]:
    """Leave out processes without GPU activity, unless all are, and say how many those were."""
    using = [i for i, trace in enumerate(traces) if len(trace.kernels)] or range(len(traces))
    num_without = len(traces) - len(using)
    return [traces[i] for i in using], [recorders[i] for i in using], num_without


def _of_torch(raw: Path, name: str) -> tuple[list[Trace], list[Recorder], LightPass | None]:
    """Return the window of every process, as torch's profiler wrote it, on its light pass."""
    windows, others = newest_windows(raw)
    if not windows:
        raise TraceError(
            f"{name}: no process of this run recorded anything",
            fix="see the messages of `kprof run`; does the script import torch?",
        )
    recorders = [_decoded(part / "recorder.json", Recorder) for part, _ in windows]
    traces = [
        _of_rank(
            add_memory(
                with_samples(add_captures(add_notes(kineto.read(window), part), part), part), part
            ),
            recorder,
        )
        for (part, window), recorder in zip(windows, recorders, strict=True)
    ]
    if others:
        caveat = Caveat(
            "other_windows",
            "Of several windows of a process one is analyzed. Left out, to be opened apart: "
            f"{', '.join(others)}.",
        )
        traces[0] = _with_caveat(traces[0], caveat)
    try:
        traces, light = _on_light_passes([part for part, _ in windows], traces, recorders)
    except PassesDifferError as error:
        told = f"All times are those of the full pass, for the light one differs: {error}."
        traces[0], light = _with_caveat(traces[0], Caveat("light_pass_differs", told)), None
    return traces, recorders, light


def _with_caveat(trace: Trace, caveat: Caveat) -> Trace:
    return replace(trace, meta=replace(trace.meta, caveats=(*trace.meta.caveats, caveat)))


def _on_light_passes(
    parts: list[Path], traces: list[Trace], recorders: list[Recorder]
) -> tuple[list[Trace], LightPass | None]:
    """Return the processes that used a GPU with the times of their light passes: all, or none.

    Raises:
        PassesDifferError: in one of them the steps of the light pass are others.
    """
    found, sums = list(traces), []
    for place, (part, trace, recorder) in enumerate(zip(parts, traces, recorders, strict=True)):
        if not len(trace.kernels):
            continue
        path = next(iter(sorted(part.glob("light-0.json*"))), None)
        if path is None or not any(step.light for step in recorder.steps):
            return traces, None
        try:
            light = kineto.read(path)
        except TraceError as error:
            raise PassesDifferError(error.problem) from None
        sums.append(compared(trace, light))
        found[place] = joined(trace, light, _steps_of_passes(trace, light, recorder))
    device_ns, full_ns = (
        sum(getattr(one, name) for one in sums) for name in ("device_ns", "full_device_ns")
    )
    return found, LightPass(device_ns, full_ns) if sums else None


def _steps_of_passes(trace: Trace, light: Trace, recorder: Recorder) -> list[SameStep]:
    """Return the steps of the full pass with those of the light one, in their order."""
    wall_ns = light.meta.base_time_ns
    full = [step.index for step in recorder.steps if step.recorded]
    others = [step for step in recorder.steps if step.light]
    if len(full) != len(others):
        raise PassesDifferError(f"it has {len(others)} steps instead of {len(full)}")
    marks = trace.ranges[is_own_step(trace.ranges)]
    row_of = dict(zip(marks["name"].astype(str), marks.index, strict=True))
    if wall_ns is None:
        raise PassesDifferError("its trace does not tell its wall time")
    return [
        SameStep(row_of[str(one)], str(two.index), two.start_ns - wall_ns, two.end_ns - wall_ns)
        for one, two in zip(full, others, strict=True)
        if str(one) in row_of
    ]


def newest_windows(raw: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return each process's folder with its window, and the names of other windows.

    The newest one that all processes have, so that they were recorded together; else of each its
    own newest. Windows of one process are no ranks, and the time between them is not idle time.
    """
    parts = sorted(path.parent for path in raw.glob("rank*-pid*/recorder.json"))
    numbered = {part: own for part in parts if (own := _windows_of(part))}
    shared = set.intersection(*map(set, numbered.values())) if numbered else set()
    chosen = [(part, own[max(shared or own)]) for part, own in numbered.items()]
    left = {window for own in numbered.values() for window in own.values()}
    left -= {window for _, window in chosen}
    return chosen, sorted(window.relative_to(raw).as_posix() for window in left)


def _windows_of(part: Path) -> dict[int, Path]:
    """Return a process's windows by their numbers, which grow with time."""
    found = ((_WINDOW.fullmatch(path.name), path) for path in sorted(part.iterdir()))
    return {int(match[1]): path for match, path in found if match}


def _of_rank(trace: Trace, recorder: Recorder) -> Trace:
    """Return the trace with its rank, and with ranges of those steps only that lie in it whole."""
    number = np.int32(recorder.rank or 0)
    recorded = [str(step.index) for step in recorder.steps if step.recorded]
    is_cut = is_own_step(trace.ranges) & ~trace.ranges["name"].isin(recorded).to_numpy(bool)
    ranges = trace.ranges[~is_cut].reset_index(drop=True).assign(rank=number)
    samples = trace.samples.assign(rank=number)
    hosts = ((int(number), recorder.host),) if recorder.host else ()
    nodes = ((int(number), recorder.node),) if recorder.node is not None else ()
    memory = tuple(replace(peak, rank=int(number)) for peak in trace.meta.memory)
    used = {int(one) for one in trace.kernels["device"].unique()}
    uuids = (uuid for device, uuid in enumerate(recorder.gpu_uuids) if device in used)
    meta = replace(
        trace.meta,
        hosts=hosts,
        nodes=nodes,
        gpu_uuids=tuple((int(number), uuid) for uuid in uuids if uuid is not None),
        process_groups=tuple(recorder.process_groups) or trace.meta.process_groups,
        memory=memory,
    )
    return replace(trace.with_kernels(rank=number), ranges=ranges, samples=samples, meta=meta)


def add_captures(trace: Trace, part: Path) -> Trace:
    """Add the host's ranges of every capture to the process's own, on its clock.

    Ids that Kineto counts anew in every recording are left out of them, and those of activities:
    what is captured runs nothing, so that a step among them is none either.
    """
    captures = [
        with_times_of_calls(kineto.read(path)) for path in sorted(part.glob("graph-*.json*"))
    ]
    if not captures:
        return trace
    base_time_ns = trace.meta.base_time_ns
    traces = [trace]
    for capture in captures:
        capture_base_ns = capture.meta.base_time_ns
        if base_time_ns is None or capture_base_ns is None:
            continue
        moved = shifted(capture, capture_base_ns - base_time_ns)
        is_step = (moved.ranges["kind"] == "step").to_numpy(bool)
        moved = replace(moved, ranges=moved.ranges[~is_step].reset_index(drop=True))
        missing = pd.array([pd.NA] * len(moved.ranges), dtype="Int64")
        traces.append(moved.with_ranges(external_id=missing, correlation=missing))
    return replace(trace, ranges=concatenated(traces, "ranges"))


def with_times_of_calls(capture: Trace) -> Trace:
    """Give calls into CUDA a time, where the profiler gave them none (torch 2.11 in a capture).

    A call's operator is recorded, and so is the order of calls. A call gets the earliest moment
    that fits both: inside its operator but in none inside that, and behind the call before. What
    else it did there is not told.
    """
    ranges = capture.ranges
    is_call = (ranges["kind"] == "runtime").to_numpy(bool)
    start = ranges["start_ns"].to_numpy().copy()
    is_operator = (ranges["kind"] == "op").to_numpy(bool)
    is_lost = is_call & (start < start[is_operator].min(initial=np.iinfo(np.int64).max))
    operators = ranges.index[is_operator & ranges["external_id"].notna().to_numpy()]
    row_of = dict(zip(ranges["external_id"].loc[operators], operators, strict=True))
    lost = ranges[is_lost & ranges["external_id"].isin(row_of.keys()).to_numpy(bool)]
    # Launches just before it are in the recording, but not in the graph.
    begins = ranges.loc[(ranges["name"] == BEGIN).to_numpy(bool), "correlation"]
    if begins.notna().any():
        lost = lost[(lost["correlation"] > begins.min()).to_numpy(bool)]
    if lost.empty:
        return capture
    end = start + ranges["duration_ns"].to_numpy()
    thread = ranges["thread"].to_numpy().copy()
    rows = np.flatnonzero(is_operator)
    now = 0
    for call, identity in lost.sort_values("correlation")["external_id"].items():
        operator = row_of[identity]
        within = rows[
            (thread[rows] == thread[operator])
            & (start[rows] >= start[operator])
            & (end[rows] <= end[operator])
            & (end[rows] - start[rows] < end[operator] - start[operator])
        ]
        now = _outside(max(now + 1, start[operator]), start[within], end[within])
        start[call], thread[call] = now, thread[operator]
    return capture.with_ranges(start_ns=start, thread=thread)


def _outside(moment: int, start: np.ndarray, end: np.ndarray) -> int:
    """Return the first moment from this one on that lies in no range from `start` to `end`."""
    while (is_around := (start <= moment) & (moment < end)).any():
        moment = int(end[is_around].max())
    return moment


def _versions(recorder: Recorder) -> dict[str, str]:
    told = {"python": recorder.python, "torch": recorder.torch, "cuda": recorder.cuda}
    return {name: version for name, version in told.items() if version}


def _driver(path: Path) -> dict[str, str]:
    """Return the driver's version, which the list of devices on top of the samples tells."""
    try:
        with path.open("rb") as file:
            devices = msgspec.json.decode(file.readline(), type=Devices).devices
    except (OSError, *UNREADABLE):
        return {}
    return {"driver": devices[0].driver} if devices and devices[0].driver else {}


def _recording(launch: Launch, recorder: Recorder, light: LightPass | None) -> Recording:
    """Return how the run was recorded; of several processes the first one's steps speak."""
    full = [step for step in recorder.steps if step.recorded]
    recorded = [step for step in recorder.steps if step.light] if light else full
    reference = _reference_steps(recorder.steps, skip=recorder.skip or 0)
    on_device = all(any(s.device_ns is not None for s in steps) for steps in (recorded, reference))
    timed = [step for step in reference if on_device and step.device_ns is not None]
    started, ended, seen = launch.started_ns, launch.ended_ns, recorder.num_steps_seen
    return Recording(
        step_rule=recorder.step_rule or "",
        num_steps_seen=len(recorder.steps) if seen is None else seen,
        is_count_final=recorder.is_count_final,
        steps_recorded=tuple(step.index for step in recorded),
        step_clock="device" if on_device else "host",
        recorded_step_ns=_durations(recorded, on_device=on_device),
        unrecorded_step_ns=_durations(reference, on_device=on_device),
        wall_ns=ended - started if started is not None and ended is not None else None,
        exit_code=launch.exit_code,
        unrecorded_host_ns=_durations(timed, on_device=False),
    )


def _reference_steps(steps: list[Step], *, skip: int) -> list[Step]:
    """Return the steps that show what a step costs unrecorded.

    Those after the recording, without the first, which may still pay for its end; if the run
    ended before, those between the warm-up and the recording, without the last, which pays for
    its preparation.
    """
    places = [place for place, step in enumerate(steps) if step.recorded or step.light]
    if not places:
        return []
    before = steps[: max(places[0] - 1, 0)]
    return steps[places[-1] + 2 :] or [step for step in before if step.index >= skip]


def _durations(steps: list[Step], *, on_device: bool) -> tuple[int, ...]:
    """Return the steps' durations by the device's clock, where that was read, or the host's."""
    if on_device:
        return tuple(int(step.device_ns) for step in steps if step.device_ns is not None)
    return tuple(step.end_ns - step.start_ns for step in steps)


def _dry_run(raw: Path) -> DryRun | None:
    """Return the dry run of a swap, of all processes; None: none was made."""
    paths = sorted(raw.glob(f"rank*-pid*/{DRY_RUN}"))
    found = [_decoded(path, DryRun) for path in paths]
    if not found:
        return None
    kernels = {kernel: None for one in found for kernel in one.kernels}
    rows = tuple(row for one in found for row in one.rows)
    why_not = next((one.why_not for one in found if one.why_not), "")
    took_ns = max(one.took_ns for one in found)
    why_others = next((one.why_others for one in found if one.why_others), "")
    return DryRun(tuple(kernels), rows, "" if kernels else why_not, took_ns, why_others)


def _ceilings(raw: Path) -> Device | None:
    try:
        return kept_ceilings(raw)
    except (OSError, *UNREADABLE) as error:
        raise _damaged(raw / FILE, error) from error


def _nvml_samples(path: Path, base_time_ns: int | None) -> pd.DataFrame:
    """Return the samples on the trace's clock; without its wall time they cannot be placed."""
    if not path.is_file() or base_time_ns is None:
        return empty("samples")
    rows = []
    for line in path.read_bytes().splitlines():
        # The first line lists the devices; a killed run may leave half a line at the end.
        if b'"time_ns"' not in line or not line.endswith(b"}"):
            continue
        sample = _sample(line, path)
        time_ns, device = int(sample.pop("time_ns")) - base_time_ns, int(sample.pop("device", -1))
        rows += [(time_ns, -1, device, "nvml", name, value) for name, value in sample.items()]
    if not rows:
        return empty("samples")
    table = pd.DataFrame(rows, columns=list(empty("samples").columns))
    dtypes = {c: empty("samples")[c].dtype for c in ("time_ns", "rank", "device", "value")}
    typed: pd.DataFrame = table.astype(dtypes)
    return typed


def _sample(line: bytes, path: Path) -> dict[str, int | float]:
    try:
        return msgspec.json.decode(line, type=dict[str, int | float])
    except UNREADABLE as error:
        raise _damaged(path, error) from error
