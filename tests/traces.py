"""Builders of tiny traces, so that a test shows only the values it is about."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pandas as pd

from kprof.analyze import passes as every
from kprof.device import Device
from kprof.trace import SCHEMA, Gpu, Meta, Recording, Table, Trace

PASSES = ("attribute", "classify", "roofline", "idle")

ROUND_DEVICE = Device(
    name="Round GPU",
    memory_bytes_per_s=1e12,
    flops_per_s={"bf16": 100e12, "fp32": 10e12},
    source="made up: round figures for tests",
    num_sms=100,
)

_DEFAULTS: dict[Table, dict[str, object]] = {
    "kernels": {
        "name": "kernel",
        "activity": "kernel",
        "rank": 0,
        "device": 0,
        "stream": 7,
        "start_ns": 0,
        "duration_ns": 100,
    },
    "ranges": {
        "kind": "op",
        "name": "aten::mm",
        "rank": 0,
        "thread": 1,
        "start_ns": 0,
        "duration_ns": 100,
    },
    "samples": {
        "time_ns": 0,
        "rank": -1,
        "device": 0,
        "source": "nvml",
        "quantity": "power_w",
        "value": 0.0,
    },
    "idle": {"rank": 0, "device": 0, "start_ns": 0, "duration_ns": 100},
}


def table_of(table: Table, rows: Iterable[dict[str, object]], passes: Iterable[str] = ()):
    """Build `table`: a reader's columns, those of `passes`, and those that a row mentions.

    A key that no column has is an error; a column that a row leaves out has its default where
    there is one (a kernel of 100 ns at 0 on stream 7 of GPU 0) and is missing otherwise.
    """
    rows = list(rows)
    declared = {column.name: column for column in SCHEMA[table]}
    mentioned = {key for row in rows for key in row}
    assert mentioned <= declared.keys(), f"no such column in {table}: {mentioned - declared.keys()}"
    wanted = [
        column
        for column in declared.values()
        if column.added_by in {"reader", *passes} or column.name in mentioned
    ]
    filled = [{**_DEFAULTS[table], **row} for row in rows]
    told = mentioned | _DEFAULTS[table].keys()
    return pd.DataFrame(
        {
            column.name: pd.array([row.get(column.name) for row in filled], column.dtype)
            if rows and column.name in told
            else _missing(column.dtype, len(rows))
            for column in wanted
        }
    )


@cache
def _missing(dtype, num_rows):
    """Return a column without a value, of which most tables have most: the same one each time."""
    return pd.array([None] * num_rows, dtype)


def trace_of(*kernels, ranges=(), samples=(), idle=(), passes=(), **meta) -> Trace:
    """Build a trace from one dict per kernel; `meta` goes to `Meta`.

    Kernels have the columns of a reader, of the `passes` named, and those that a row mentions.
    """
    defaults = {"source": "tiny.json", "tool": "kineto", "gpus": (Gpu(0, "Round GPU"),)}
    return Trace(
        kernels=table_of("kernels", kernels, passes),
        ranges=table_of("ranges", ranges, passes),
        samples=table_of("samples", samples),
        idle=table_of("idle", idle, ["idle"]),
        meta=Meta(**{**defaults, **meta}),
    )


def analyzed_trace_of(*kernels, ranges=(), samples=(), idle=(), **meta) -> Trace:
    """Build a trace that has the columns of every pass, missing where a row leaves them out.

    Its device is `ROUND_DEVICE` (1 TB/s, 100 TFLOP/s in bf16) unless `meta` says otherwise, and
    a kernel without a `bucket` is unlinked: nothing is claimed that no row says.
    """
    return trace_of(
        *({"bucket": "unlinked", **row} for row in kernels),
        ranges=ranges,
        samples=samples,
        idle=idle,
        passes=PASSES,
        **{"device": ROUND_DEVICE, **meta},
    )


def measured(trace: Trace) -> Trace:
    """Run every pass but those that foretell, which take most of the time."""
    for add in every.PASSES:
        trace = add(trace)
    return trace


def recorded(recorded_ns, unrecorded_ns, clock="device"):
    """Return the trace of a recording whose steps took so long with the recorder and without."""
    recording = Recording(
        step_rule="Training.",
        num_steps_seen=9,
        steps_recorded=tuple(range(len(recorded_ns))),
        step_clock=clock,
        recorded_step_ns=recorded_ns,
        unrecorded_step_ns=unrecorded_ns,
    )
    return analyzed_trace_of({}, recording=recording)
