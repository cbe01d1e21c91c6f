"""What `kprof run` left in a run folder's `raw/`, before it was analyzed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kprof.collect.ceilings import kept_ceilings
from kprof.collect.merge import merge
from kprof.collect.readers import kineto
from kprof.errors import TraceError
from kprof.trace import Recording, Trace, empty


def knows(path: Path, head: bytes) -> bool:
    """Tell a run folder by its launch record."""
    return path.is_dir() and _raw(path).joinpath("launch.json").is_file()


def read(path: Path) -> Trace:
    """Read every process's window and the NVML samples of one run."""
    raw = _raw(path)
    launch = _json(raw / "launch.json")
    parts = sorted(p.parent for p in raw.glob("rank*-pid*/recorder.json"))
    windows = [(part, window) for part in parts for window in sorted(part.glob("window-*.json.gz"))]
    if not windows:
        raise TraceError(
            f"{path.name}: no process of this run recorded anything",
            fix="see the messages of `kprof run`; does the script import torch?",
        )
    traces = []
    for part, window in windows:
        trace = kineto.read(window)
        traces.append(_of_rank(trace, _json(part / "recorder.json")))
    trace = merge(traces, path.name)
    recorders = [_json(part / "recorder.json") for part, _ in windows]
    caveats = [*trace.meta.caveats, *(c for r in recorders for c in r.get("caveats", []))]
    meta = replace(
        trace.meta,
        source=path.name,
        command=tuple(launch.get("command", ())),
        host=launch.get("host"),
        versions={**trace.meta.versions, **launch.get("versions", {}), **_versions(recorders[0])},
        recording=_recording(launch, recorders[0]),
        device=kept_ceilings(raw),
        caveats=tuple(dict.fromkeys(caveats)),
    )
    samples = _nvml_samples(raw / "nvml.jsonl", meta.base_time_ns)
    if len(samples):
        both = pd.concat([trace.samples, samples], ignore_index=True)
        trace = replace(trace, samples=both.astype({"source": "category", "quantity": "category"}))
    return replace(trace, meta=meta)


def _raw(path: Path) -> Path:
    return path if path.name == "raw" else path / "raw"


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path.parent.name}/{path.name} cannot be read: {error}",
            fix="record the run again; the process may have been killed while writing",
        ) from error
    if not isinstance(content, dict):
        raise TraceError(f"{path.name} is not a JSON object", fix="record the run again")
    return content


def _of_rank(trace: Trace, recorder: dict[str, Any]) -> Trace:
    rank = np.int32(recorder.get("rank") or 0)
    return trace.with_kernels(rank=rank).with_ranges(rank=rank)


def _versions(recorder: dict[str, Any]) -> dict[str, str]:
    return {name: str(recorder[name]) for name in ("python", "torch", "cuda") if recorder.get(name)}


def _recording(launch: dict[str, Any], recorder: dict[str, Any]) -> Recording:
    """Return how the run was recorded; of several processes the first one's steps speak."""
    steps: list[dict[str, Any]] = recorder.get("steps", [])
    recorded = [step for step in steps if step.get("recorded")]
    reference = _reference_steps(steps, skip=int(recorder.get("skip") or 0))
    on_device = any("device_ns" in s for s in recorded) and any("device_ns" in s for s in reference)
    started, ended = launch.get("started_ns"), launch.get("ended_ns")
    return Recording(
        step_rule=str(recorder.get("step_rule", "")),
        num_steps_seen=int(recorder.get("num_steps_seen", len(steps))),
        steps_recorded=tuple(int(step["index"]) for step in recorded),
        step_clock="device" if on_device else "host",
        recorded_step_ns=_durations(recorded, on_device=on_device),
        unrecorded_step_ns=_durations(reference, on_device=on_device),
        wall_ns=ended - started if started is not None and ended is not None else None,
        exit_code=launch.get("exit_code"),
    )


def _reference_steps(steps: list[dict[str, Any]], *, skip: int) -> list[dict[str, Any]]:
    """Return the steps that show what a step costs unrecorded.

    Those after the recording, without the first, which may still pay for its end; if the run
    ended before, those between the warm-up and the recording, without the last, which pays for
    its preparation.
    """
    places = [place for place, step in enumerate(steps) if step.get("recorded")]
    if not places:
        return []
    return steps[places[-1] + 2 :] or steps[skip : max(places[0] - 1, 0)]


def _durations(steps: list[dict[str, Any]], *, on_device: bool) -> tuple[int, ...]:
    """Return the steps' durations by the device's clock, where that was read, or the host's."""
    if on_device:
        return tuple(int(step["device_ns"]) for step in steps if "device_ns" in step)
    return tuple(int(step["end_ns"] - step["start_ns"]) for step in steps)


def _nvml_samples(path: Path, base_time_ns: int | None) -> pd.DataFrame:
    """Return the samples on the trace's clock; without its wall time they cannot be placed."""
    if not path.is_file() or base_time_ns is None:
        return empty("samples")
    rows = []
    for line in path.read_text().splitlines():
        if not line.endswith("}"):
            continue  # A killed run may leave half a line at the end.
        sample = json.loads(line)
        if "time_ns" not in sample:
            continue
        time_ns, device = sample.pop("time_ns") - base_time_ns, sample.pop("device")
        rows += [
            (time_ns, -1, device, "nvml", name, float(value)) for name, value in sample.items()
        ]
    if not rows:
        return empty("samples")
    table = pd.DataFrame(rows, columns=list(empty("samples").columns))
    dtypes = {c: empty("samples")[c].dtype for c in ("time_ns", "rank", "device")}
    typed: pd.DataFrame = table.astype(dtypes)
    return typed
