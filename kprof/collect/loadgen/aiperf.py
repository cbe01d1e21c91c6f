"""AIPerf: `profile_export.jsonl` has a line for every request, the summary beside it the load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kprof.analyze.sla.responses import NO_TIMES, Load, Response, Responses
from kprof.collect.load_results import (
    RECORD_AGAIN,
    ResultError,
    arrivals,
    decode,
    read_bytes,
    took_ns,
    without_details,
)
from kprof.errors import KprofError, counted
from kprof.trace import Caveat

TOOL = "AIPerf"
RECORDS = "profile_export.jsonl"
SUMMARY = "profile_export_aiperf.json"
OPTION = f"name the {RECORDS} beside it, which `--export-level records` writes"
SCHEDULED = ("fixed_schedule", "poisson", "gamma", "constant")
AS_RELEASED = "a request's due time is when AIPerf released it: a late release would not show"
NO_WAIT = (
    "as many requests as may run at a time did, and the file does not say how long others waited "
    "for a place, so no time from when they were due is met"
)
GROWS = "the load grows at the beginning, so percentiles are of a mixture of loads"
SAME_TIME_NS = 1_000
"""Gaps and latencies are rounded apart, to ns."""
IN_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "sec": 1e9, "s": 1e9}


class _Metric(msgspec.Struct):
    value: Any
    unit: str = ""


class _Metadata(msgspec.Struct):
    request_start_ns: int
    request_end_ns: int | None = None
    credit_issued_ns: int | None = None
    benchmark_phase: str = "profiling"
    phase_index: int | None = None
    was_cancelled: bool = False


class _Error(msgspec.Struct):
    message: str | None = None
    type: str | None = None


class _Record(msgspec.Struct):
    metadata: _Metadata
    metrics: dict[str, _Metric] = {}
    error: _Error | None = None


class _Phase(msgspec.Struct):
    """A phase of the load, as version 0.9 and later write it."""

    kind: str = "profiling"
    type: str | None = None
    rate: float | None = None
    rate_series: Any = None
    concurrency: float | None = None
    rate_ramp: Any = None
    concurrency_ramp: Any = None


class _Generator(msgspec.Struct):
    """The load, as versions before 0.9 write it."""

    request_rate: float | None = None
    request_rate_mode: str | None = None
    arrival_pattern: str | None = None
    concurrency: int | None = None


class _Config(msgspec.Struct):
    phases: list[_Phase] = []
    loadgen: _Generator | None = None


class _Summary(msgspec.Struct):
    input_config: _Config | None = None


def knows(path: Path, head: bytes) -> bool:
    """Tell whether a path is AIPerf's records, its summary, or the folder of both."""
    if path.is_dir():
        return (path / RECORDS).is_file()
    is_record = b'"metadata"' in head and b'"request_start_ns"' in head
    return is_record or b'"aiperf_version"' in head or path.name == SUMMARY


def read(path: Path) -> list[Responses]:
    """Read the requests of the measured phase.

    Raises:
        KprofError: the file is damaged, or there is only a summary.
    """
    records = path / RECORDS if path.is_dir() else path
    if records.suffix == ".json":
        records = records.with_name(RECORDS)
        if not records.is_file():
            raise without_details(path, TOOL, OPTION)
    by_phase: dict[int | None, list[_Record]] = {}
    num_warm_up = 0
    for number, line in enumerate(read_bytes(records).splitlines(), start=1):
        if not line.strip():
            continue
        record = _decode_line(line, records, number)
        if record.metadata.benchmark_phase == "warmup":
            num_warm_up += 1
        else:
            by_phase.setdefault(record.metadata.phase_index, []).append(record)
    if not by_phase:
        raise without_details(records, TOOL, "record it again: no request of it was measured")
    config = _config_of(records.with_name(SUMMARY))
    left_out = f"left out: {counted(num_warm_up, 'request')} of the warm-up"
    doubts = (Caveat("warm_up_left_out", left_out),) if num_warm_up else ()
    places = sorted(by_phase, key=lambda place: -1 if place is None else place)
    return [_run_of(by_phase[place], config, place, records.name, doubts) for place in places]


def _decode_line(line: bytes, path: Path, number: int) -> _Record:
    return decode(line, path, _Record, f"{TOOL}, line {number}")


def _config_of(summary: Path) -> _Config:
    try:
        return decode(read_bytes(summary), summary, _Summary, TOOL).input_config or _Config()
    except KprofError:
        return _Config()


def _run_of(
    rows: list[_Record], config: _Config, place: int | None, source: str, doubts: tuple[Caveat, ...]
) -> Responses:
    """Return the requests of one phase: a load of its own."""
    phase = _phase_at(config, place)
    load, is_due_known = _load(config, phase), True
    if load.kind == "open" and phase and phase.concurrency and _is_full(rows, phase.concurrency):
        load, is_due_known = Load(load.kind, load.name, NO_WAIT), False
    responses = tuple(_response(record, load, is_due_known=is_due_known) for record in rows)
    return Responses(source, TOOL, load, responses, doubts)


def _phase_at(config: _Config, place: int | None) -> _Phase | None:
    """Return the phase of that place among all, or the first one that was measured."""
    if place is not None and place < len(config.phases):
        return config.phases[place]
    return next((phase for phase in config.phases if phase.kind == "profiling"), None)


def _load(config: _Config, phase: _Phase | None) -> Load:
    if phase is not None:
        grows = GROWS if phase.rate_ramp or phase.rate_series or phase.concurrency_ramp else ""
        at_most = phase.concurrency
        capped = f", {at_most:g} at a time at most" if at_most else ""
        rate = f"{phase.rate:g} requests/s, " if phase.rate is not None else ""
        if phase.type in SCHEDULED or (phase.rate is not None and phase.type is None):
            return Load("open", f"{rate}{phase.type}{capped}", grows or AS_RELEASED)
        if phase.type == "user_centric":
            # The next turn of a user follows an answer.
            return Load("closed", f"{rate}{phase.type}", grows)
        if at_most is not None:
            return Load("closed", f"{at_most:g} at a time", grows)
    generator = config.loadgen
    if generator and generator.request_rate:
        pattern = generator.arrival_pattern or generator.request_rate_mode or "Poisson"
        return Load("open", f"{generator.request_rate:g} requests/s, {pattern}", AS_RELEASED)
    if generator and generator.concurrency:
        return Load("closed", f"{generator.concurrency} at a time")
    return Load("unknown", f"load not recorded (no {SUMMARY} beside the records tells it)")


def _is_full(rows: Sequence[_Record], limit: float) -> bool:
    """Tell whether so many requests were under way that the next one had to wait."""
    begins = np.sort([row.metadata.request_start_ns for row in rows])
    ends = np.sort([row.metadata.request_end_ns or row.metadata.request_start_ns for row in rows])
    under_way = np.arange(1, len(rows) + 1) - np.searchsorted(ends, begins, side="right")
    return bool(under_way.max() >= limit)


def _response(record: _Record, load: Load, *, is_due_known: bool = True) -> Response:
    about, metrics = record.metadata, record.metrics
    sent_ns = about.request_start_ns
    first_ns = _time_ns(metrics, "time_to_first_token")
    took_ns = _time_ns(metrics, "request_latency")
    end_ns = about.request_end_ns if took_ns is None else sent_ns + took_ns
    chunk_ns, gaps, has_every_chunk = NO_TIMES, metrics.get("inter_chunk_latency"), True
    if first_ns is not None:
        chunk_ns = arrivals(sent_ns + first_ns, gaps.value if gaps else [], _gap_unit_ns(gaps))
        # Records hold no lists unless AIPerf was asked for them, and a list may be cut short: the
        # last chunk with content is the end.
        is_forward = (np.diff(chunk_ns) >= 0).all()
        if is_forward and end_ns is not None and end_ns - chunk_ns[-1] > SAME_TIME_NS:
            chunk_ns = np.array([chunk_ns[0], end_ns], np.int64)
            has_every_chunk = False
    is_failed = record.error is not None or took_ns is None
    error = (record.error.message or record.error.type or "error") if record.error else ""
    outcome = "cancelled" if about.was_cancelled else "failed" if is_failed else "answered"
    return Response(
        sent_ns,
        outcome,  # type: ignore[arg-type]
        about.credit_issued_ns if load.kind == "open" else None,
        chunk_ns,
        has_every_chunk=has_every_chunk,
        is_due_known=is_due_known and (load.kind != "open" or about.credit_issued_ns is not None),
        end_ns=end_ns,
        input_tokens=_count(metrics, "input_sequence_length"),
        output_tokens=_count(metrics, "output_sequence_length"),
        error=error or ("no time recorded" if is_failed else ""),
    )


def _time_ns(metrics: dict[str, _Metric], name: str) -> int | None:
    metric = metrics.get(name)
    return None if metric is None else took_ns(metric.value, _unit_ns(metric))


def _unit_ns(metric: _Metric) -> float:
    if metric.unit not in IN_NS:
        raise ResultError(f"{metric.unit!r} stands where a unit of time belongs", fix=RECORD_AGAIN)
    return IN_NS[metric.unit]


def _gap_unit_ns(gaps: _Metric | None) -> float:
    return _unit_ns(gaps) if gaps else 1.0


def _count(metrics: dict[str, _Metric], name: str) -> int | None:
    metric = metrics.get(name)
    if metric is None:
        return None
    if not isinstance(metric.value, int | float):
        raise ResultError(f"{metric.value!r} stands where a count belongs", fix=RECORD_AGAIN)
    return int(metric.value)
