"""The Trace: four tables that every part of kprof reads, and the one place where columns are declared.

Times are integer nanoseconds on the clock of the recorder; `Meta.base_time_ns` turns them into
wall time. Passes add columns and never rewrite a measured one. Unknown is missing, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pandas as pd

from kprof.device import Device

Table = Literal["kernels", "ranges", "samples"]


@dataclass(frozen=True)
class Column:
    """One column: its dtype in memory, its unit, who adds it, what it means."""

    name: str
    dtype: str
    unit: str
    added_by: str
    doc: str


# fmt: off
KERNELS: tuple[Column, ...] = (
    Column("name", "category", "", "reader", "As recorded: a kernel's or a copy's name; in host mode the operator's."),
    Column("activity", "category", "", "reader", "kernel, memcpy, memset, or host (one piece of an operator's self time)."),
    Column("rank", "int32", "", "reader", "Rank of the process that launched it; 0 in a run of one process."),
    Column("device", "int32", "", "reader", "Index of the GPU as the process saw it; -1 for the host."),
    Column("stream", "int64", "", "reader", "CUDA stream; in host mode the thread."),
    Column("start_ns", "int64", "ns", "reader", "Start on the recorder's clock."),
    Column("duration_ns", "int64", "ns", "reader", "Time on the device, as recorded."),
    Column("correlation", "Int64", "", "reader", "Joins the activity to the runtime call that launched it, within its rank."),
    Column("graph_node", "Int64", "", "reader", "Node of the CUDA graph that was replayed; missing outside graphs and in old files."),
    Column("copied_bytes", "Int64", "B", "reader", "What a copy or a set moved, as recorded; missing for kernels."),
    Column("grid", "category", "", "reader", "Blocks in the grid, 'x,y,z'; missing for copies."),
    Column("block", "category", "", "reader", "Threads in a block, 'x,y,z'; missing for copies."),
    Column("launch_row", "Int64", "", "attribute", "Row in `ranges` of the runtime call that launched it."),
    Column("op_row", "Int64", "", "attribute", "Row in `ranges` of the innermost operator around the launch."),
    Column("op", "category", "", "attribute", "Name of that operator."),
    Column("module", "category", "", "attribute", "Fully qualified name of the innermost module; for a backward kernel that of its forward."),
    Column("phase", "category", "", "attribute", "data, forward, backward or optimizer."),
    Column("recomputed", "bool", "", "attribute", "Whether a module ran again inside the backward pass, for a checkpoint: its work is executed, not useful."),
    Column("step", "Int64", "", "attribute", "Number of the step as the workload counts them, from 0."),
    Column("range", "category", "", "attribute", "Innermost range that a user or a library named."),
    Column("bucket", "category", "", "attribute", "attributed, orphan (no launch record), graph (replayed, node not named) or unlinked (launched outside every operator and range)."),
    Column("attributed_by", "category", "", "attribute", "How the operator or range was found: nesting (open on the thread that launched it) or external id (recorded); missing when not attributed."),
    Column("kind", "category", "", "classify", "gemm, attention, convolution, norm, softmax, elementwise, reduction, embedding, indexing, copy, set, optimizer, collective, loss, sort, random, other."),
    Column("dtype", "category", "", "classify", "Type of the operands: bf16, fp16, fp32, tf32, fp8, int8, …; missing when nothing tells."),
    Column("flops", "Int64", "flop", "roofline", "This row's part of what its operator needs mathematically."),
    Column("bytes", "Int64", "B", "roofline", "This row's part of the least bytes its operator must move through memory."),
    Column("work_from", "category", "", "roofline", "Source of flops and bytes: shapes, recorded (a copy's own size), bounds."),
    Column("limit_ns", "Int64", "ns", "roofline", "Time at the roofline: the larger of bytes and flops over their ceilings."),
    Column("bound", "category", "", "roofline", "memory, compute or latency; missing where no work is known."),
    Column("gap_before_ns", "Int64", "ns", "idle", "Idle time of the device before it; missing for the first."),
    Column("gap_cause", "category", "", "idle", "What the host did in that gap; missing when there is none or nobody knows."),
)

RANGES: tuple[Column, ...] = (
    Column("kind", "category", "", "reader", "op, runtime, range (a user's or a library's), step, phase, module or python."),
    Column("name", "category", "", "reader", "As recorded; for step, phase and module without kprof's prefix."),
    Column("rank", "int32", "", "reader", "Rank of the process."),
    Column("thread", "int64", "", "reader", "Thread id; distinct for every thread of a rank."),
    Column("start_ns", "int64", "ns", "reader", "Start on the recorder's clock."),
    Column("duration_ns", "int64", "ns", "reader", "Wall time between entry and exit."),
    Column("correlation", "Int64", "", "reader", "Of a runtime call: joins it to the device activities it launched."),
    Column("external_id", "Int64", "", "reader", "Of an operator its own id; of a runtime call the id of the operator around it."),
    Column("sequence", "Int64", "", "reader", "Autograd sequence number, shared by a forward operator and its backward."),
    Column("forward_thread", "Int64", "", "reader", "Autograd's id of the forward thread: above 0 on a backward operator, else 0 or missing."),
    Column("input_shapes", "category", "", "reader", "JSON text of the inputs' dimensions; missing when not recorded."),
    Column("input_dtypes", "category", "", "reader", "JSON text of the inputs' types."),
    Column("input_strides", "category", "", "reader", "JSON text of the inputs' strides, in elements."),
    Column("input_values", "category", "", "reader", "JSON text of the scalar inputs."),
    Column("parent", "Int64", "", "attribute", "Row of the innermost range around it on its thread; missing at the top and for runtime and python rows."),
)

SAMPLES: tuple[Column, ...] = (
    Column("time_ns", "int64", "ns", "reader", "When, on the recorder's clock."),
    Column("rank", "int32", "", "reader", "Rank; -1 for a sample of the whole machine."),
    Column("device", "int32", "", "reader", "Index of the GPU in NVML's order (nvml) or the process's (profiler)."),
    Column("source", "category", "", "reader", "nvml or profiler."),
    Column("quantity", "category", "", "reader", "What was sampled, with its unit at the end: power_w, energy_mj, sm_clock_mhz, memory_clock_mhz, temperature_c, utilization_percent, memory_used_bytes, throttle_reasons (a bit set), allocated_bytes, reserved_bytes."),
    Column("value", "float64", "", "reader", "The reading."),
)

# fmt: on

SCHEMA: dict[Table, tuple[Column, ...]] = {"kernels": KERNELS, "ranges": RANGES, "samples": SAMPLES}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the trace names it; sizes in bytes, None where the trace does not say."""

    index: int
    name: str
    num_sms: int | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Recording:
    """How kprof itself recorded the run, and what that cost the workload."""

    step_rule: str
    """Which rule delimits a step, in words for the report."""
    num_steps_seen: int
    steps_recorded: tuple[int, ...]
    step_clock: Literal["device", "host"] = "host"
    """Whose clock timed the steps below: marks on the device's timeline, or the host's calls."""
    recorded_step_ns: tuple[int, ...] = ()
    """Duration of each recorded step."""
    unrecorded_step_ns: tuple[int, ...] = ()
    """Durations of steps after the warm-up that were not recorded."""
    wall_ns: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Meta:
    """What was recorded, on what, by whom, and what this trace cannot answer."""

    source: str
    """Name of the file or folder that was read, without the folders above it."""
    tool: str
    """kineto, …: what wrote the trace."""
    gpus: tuple[Gpu, ...] = ()
    command: tuple[str, ...] = ()
    host: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    base_time_ns: int | None = None
    """Wall time (ns since 1970) at the clock's zero; None where the file does not say."""
    num_ranks: int = 1
    counts: dict[str, int] = field(default_factory=dict)
    """What the reader counted in the file: events, nn_module_events, seq_ops, …"""
    recording: Recording | None = None
    device: Device | None = None
    """Ceilings that the roofline is drawn against; None where nobody knows the device."""
    caveats: tuple[str, ...] = ()
    """Sentences for the report: what is missing, dropped or uncertain."""

    @property
    def command_line(self) -> str:
        """The command as people write it: where the program lies is left out."""
        return " ".join([*(Path(word).name for word in self.command[:1]), *self.command[1:]])


@dataclass(frozen=True)
class Trace:
    """Device activities, host ranges and samples of one run."""

    kernels: pd.DataFrame
    ranges: pd.DataFrame
    samples: pd.DataFrame
    meta: Meta

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that did something; a trace may list all that the machine has."""
        used = set(self.kernels["device"].unique().tolist())
        return tuple(gpu for gpu in self.meta.gpus if gpu.index in used) or self.meta.gpus

    @property
    def is_host_only(self) -> bool:
        """Whether the activities are host operators because no device row was recorded."""
        return len(self.kernels) > 0 and bool((self.kernels["activity"] == "host").all())

    def with_kernels(self, **columns: object) -> Trace:
        """Return a trace whose `kernels` carry these further columns."""
        return replace(self, kernels=self.kernels.assign(**columns))  # type: ignore[arg-type]

    def with_ranges(self, **columns: object) -> Trace:
        """Return a trace whose `ranges` carry these further columns."""
        return replace(self, ranges=self.ranges.assign(**columns))  # type: ignore[arg-type]


def columns_of(table: Table, added_by: str) -> tuple[Column, ...]:
    """Return the columns that `added_by` adds to `table`, in their order."""
    return tuple(c for c in SCHEMA[table] if c.added_by == added_by)


def empty(table: Table, added_by: str = "reader") -> pd.DataFrame:
    """Return `table` without rows, with the columns that `added_by` adds."""
    columns = columns_of(table, added_by)
    frame: pd.DataFrame = pd.DataFrame({c.name: pd.Series(dtype=c.dtype) for c in columns})
    return frame
