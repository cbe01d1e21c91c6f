"""The Trace: the tables that every part of kprof reads, with every column declared once.

Times are integer nanoseconds on the clock of the recorder, between -2**62 and 2**62, so that the
sum of two fits an int64; `Meta.base_time_ns` turns them into wall time. Passes add columns and
never rewrite a measured one. Unknown is missing, never 0.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Literal, TypeVar
from weakref import ReferenceType, ref

import numpy as np
import pandas as pd

from kprof.device import Device
from kprof.findings import Caveat as Caveat
from kprof.findings import Diagnosis, DryRun

Table = Literal["kernels", "ranges", "samples", "idle"]

# In `device` and `stream`, by which activities are grouped: not recorded. CUDA numbers from 0.
NOT_RECORDED = -1


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
    Column("activity", "category", "", "reader", "kernel, memcpy, memset, graph (a CUDA graph's replay that was recorded as a whole), or host (one piece of an operator's self time)."),
    Column("rank", "int32", "", "reader", "Rank of the process that launched it; 0 in a run of one process."),
    Column("device", "int32", "", "reader", "Index of the GPU as the process saw it; -1 for the host, and where not recorded."),
    Column("stream", "int64", "", "reader", "CUDA stream; in host mode the thread; -1 where not recorded."),
    Column("start_ns", "int64", "ns", "reader", "Start on the recorder's clock."),
    Column("duration_ns", "int64", "ns", "reader", "Time on the device, as recorded."),
    Column("correlation", "Int64", "", "reader", "Joins the activity to the runtime call that launched it, within its rank."),
    Column("graph_node", "Int64", "", "reader", "Node of the CUDA graph that was replayed; missing outside graphs and in old files."),
    Column("copied_bytes", "Int64", "B", "reader", "What a copy or a set moved, as recorded; missing for kernels."),
    Column("grid", "category", "", "reader", "Blocks in the grid, 'x,y,z'; missing for copies."),
    Column("block", "category", "", "reader", "Threads in a block, 'x,y,z'; missing for copies."),
    Column("collective", "category", "", "reader", "What a kernel of a collective does, as recorded: allreduce, _allgather_base, …; missing for other kernels and in files that do not tell."),
    Column("group", "category", "", "reader", "Process group of that collective: its name and the ranks in it."),
    Column("group_sequence", "Int64", "", "reader", "Number of that collective in its process group, the same on every rank: as recorded, or by its order where ranks that were read together recorded none; else missing."),
    Column("launches", "Int64", "", "reader", "How many launches the row adds up, where the recorder kept nothing but their sums; missing for a single one."),
    Column("declared_flops", "Int64", "flop", "reader", "Floating-point operations of the row as the workload's author declared them to the recorder."),
    Column("declared_type", "category", "", "reader", "Type at whose peak those run: fp8, fp16, fp32, fp64."),
    Column("declared_bytes", "Int64", "B", "reader", "Bytes that the row moves as the author declared them."),
    Column("dram_read_bytes", "Int64", "B", "reader", "What the row read from the device's memory, by hardware counters."),
    Column("dram_written_bytes", "Int64", "B", "reader", "What it wrote to the device's memory, by hardware counters."),
    Column("counted_ns", "Int64", "ns", "reader", "Duration in the run in which hardware counters were read, each kernel alone."),
    Column("dram_percent", "float64", "%", "reader", "Throughput of the device's memory, of its peak, by hardware counters; NaN is missing, here and below."),
    Column("sm_percent", "float64", "%", "reader", "Throughput of the SMs, that of their busiest part, of its peak."),
    Column("tensor_percent", "float64", "%", "reader", "Throughput of the tensor cores, of its peak."),
    Column("occupancy_percent", "float64", "%", "reader", "Warps that were active on an SM, of those that it can hold."),
    Column("registers", "Int64", "", "reader", "Registers of a thread."),
    Column("launch_row", "Int64", "", "attribute", "Row in `ranges` of the runtime call that launched it."),
    Column("op_row", "Int64", "", "attribute", "Row in `ranges` of the innermost operator around the launch."),
    Column("op", "category", "", "attribute", "Name of that operator."),
    Column("module", "category", "", "attribute", "Fully qualified name of the innermost module; for a backward kernel that of its forward, for a compiled one the innermost that holds all whose operators it runs."),
    Column("fused_modules", "category", "", "attribute", "Of a compiled kernel every module whose operators it runs, as JSON text; missing where the compiler noted none."),
    Column("phase", "category", "", "attribute", "data, forward, backward or optimizer."),
    Column("recomputed", "bool", "", "attribute", "Whether a module ran again inside the backward pass, for a checkpoint: its work is executed, not useful."),
    Column("step", "Int64", "", "attribute", "Number of the step as the workload counts them, from 0."),
    Column("range", "category", "", "attribute", "Innermost range that a user or a library named."),
    Column("bucket", "category", "", "attribute", "attributed, orphan (no launch record), graph (replayed, node not named) or unlinked (launched outside every operator and range)."),
    Column("attributed_by", "category", "", "attribute", "How the operator or range was found: nesting (open on the thread that launched it), external id (recorded), capture (nesting where its CUDA graph was captured), annotation (range or module, by what torch noted of the graph's node), or the compiler's notes: of the module, and of the operator too where a CUDA graph replayed it (compiled); missing when not attributed."),
    Column("kind", "category", "", "classify", "gemm, attention, convolution, norm, softmax, elementwise, reduction, embedding, indexing, copy, set, optimizer, collective, loss, sort, random, other."),
    Column("dtype", "category", "", "classify", "Type of the operands: bf16, fp16, fp32, tf32, fp8, int8, …; missing when nothing tells."),
    Column("flops", "Int64", "flop", "roofline", "This row's part of what its operator needs mathematically."),
    Column("bytes", "Int64", "B", "roofline", "This row's part of the minimum memory traffic of its operator."),
    Column("work_from", "category", "", "roofline", "Source of flops and bytes: shapes (of its operator, or a collective's message), recorded (a copy's own size), declared (by the workload's author), counters (measured traffic), bounds, alike (of launches of the same kernel over the same grid, or in the same place of a sequence that repeats)."),
    Column("work_bound", "category", "", "roofline", "Where work_from is bounds, whether the work is at least or at most this; missing elsewhere."),
    Column("limit_ns", "Int64", "ns", "roofline", "Time at the roofline: the larger of bytes and flops over their ceilings."),
    Column("bound", "category", "", "roofline", "memory, compute, issue or latency; missing where none is shown."),
    Column("counted_bound", "category", "", "roofline", "The bound, by the same work, of the run in which counters were read; missing where they were not."),
    Column("message", "category", "", "condense", "Of a collective the message of its operator, as in `ranges`, where the ranges are left out."),
    Column("gap_before_ns", "Int64", "ns", "idle", "Idle time of the device before it; missing for the first."),
    Column("gap_cause", "category", "", "idle", "Cause of the longest part of that gap, as in `idle`; missing when there is none or it is unknown."),
)

RANGES: tuple[Column, ...] = (
    Column("kind", "category", "", "reader", "op, runtime, system (a call of the operating system by a thread that launches work), range (a user's or a library's), step (a mark of one; which marks are the steps, `analyze/attribution/steps.py` decides), phase, module, capture (of a CUDA graph), graph (a replay of one), python, or overhead (the profiler's own work, or the driver's as the profiler saw it)."),
    Column("name", "category", "", "reader", "As recorded; for step, phase and module without kprof's prefix. Torch's own steps keep theirs, `ProfilerStep#`."),
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
    Column("message", "category", "", "reader", "Of a collective its name, the elements that this rank gives and gets, their type and the number of ranks, as JSON text; missing for other ranges and where not recorded."),
    Column("parent", "Int64", "", "attribute", "Row of the innermost range around it on its thread; missing at the top and for runtime and python rows."),
)

SAMPLES: tuple[Column, ...] = (
    Column("time_ns", "int64", "ns", "reader", "When, on the recorder's clock."),
    Column("rank", "int32", "", "reader", "Rank; -1 for a sample of the whole machine."),
    Column("device", "int32", "", "reader", "Index of the GPU in NVML's order (nvml) or the process's (profiler, counters)."),
    Column("source", "category", "", "reader", "nvml, profiler or counters."),
    Column("quantity", "category", "", "reader", "What was sampled, with its unit at the end: power_w, energy_mj, sm_clock_mhz, memory_clock_mhz, temperature_c, utilization_percent, memory_used_bytes, throttle_reasons (a bit set), allocated_bytes, reserved_bytes; of the counters dram_read_bytes, dram_written_bytes, l2_bytes, sm_active_cycles and tensor_active_cycles, in the time from this sample to the next."),
    Column("value", "float64", "", "reader", "The reading."),
)

IDLE: tuple[Column, ...] = (
    Column("rank", "int32", "", "idle", "Rank of the process whose device it is."),
    Column("device", "int32", "", "idle", "Index of the GPU as the process saw it; -1 for the host."),
    Column("start_ns", "int64", "ns", "idle", "Start of this piece of idle time. The pieces of a device never overlap and are all of its idle time."),
    Column("duration_ns", "int64", "ns", "idle", "Length of the piece."),
    Column("cause", "category", "", "idle", "launch-bound, data loading, synchronization, pageable copy, allocator, collective wait, dependency wait, between kernels, profiler or no work; missing where the trace does not tell."),
    Column("recoverable_ns", "Int64", "ns", "idle", "What would be gained without the cause, at most: all of the piece or nothing; missing where unknown."),
    Column("edge", "category", "", "idle", "before or after: outside the rank's window, between its first activity and the begin of its first step or its last and the end of its last; missing inside."),
    Column("kernel_row", "Int64", "", "idle", "Row in `kernels` of the activity that ended the idle time; missing at the end."),
    Column("evidence_row", "Int64", "", "idle", "Row in `ranges` that shows the cause: the call that blocked, the data loading, what the host ran."),
    Column("place", "category", "", "idle", "Where to look: the operator, module or range around the evidence, else its own name."),
    Column("module", "category", "", "idle", "Innermost module around the evidence."),
    Column("line", "category", "", "idle", "Python function of the workload that ran, with its file and line; missing without stacks."),
)

# fmt: on

SCHEMA: dict[Table, tuple[Column, ...]] = {
    "kernels": KERNELS,
    "ranges": RANGES,
    "samples": SAMPLES,
    "idle": IDLE,
}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the trace names it; sizes in bytes, None where the trace does not say."""

    index: int | None
    name: str
    num_sms: int | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    rank: int | None = None
    """Rank of the process that calls it by this index; None in a trace of one process."""

    @property
    def device(self) -> int:
        """The index as the column `device` has it."""
        return NOT_RECORDED if self.index is None else self.index


@dataclass(frozen=True)
class LightPass:
    """The steps recorded without operators, from which all times come, against the full pass."""

    device_ns: int
    """Durations of its activities, added up."""
    full_device_ns: int
    """Those of the same activities in the full pass, from which all names come."""


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
    is_count_final: bool = True
    """Whether `num_steps_seen` counts to the end of the process; False where it was killed."""
    unrecorded_host_ns: tuple[int, ...] = ()
    """The host's time in the steps of `unrecorded_step_ns`, where the device's clock timed them."""


@dataclass(frozen=True)
class Prediction:
    """A step's time after a change, in ns, as a replay of the recording tells it."""

    target: str
    """The target: `kernel:…`, `op:…`, `module:…`, `kind:…`, launches, or `idle:` and a cause."""
    change: str
    """How: 2x faster, at its roofline, removed, in CUDA graphs, gone."""
    step_ns: int
    """Mean of the recorded steps of the slowest rank; the whole window where there are none."""
    predicted_step_ns: int | None = None
    amdahl_step_ns: int | None = None
    """The step less the time taken off its activities, without any other bound."""
    uncertainty_ns: int | None = None
    """At least the error of replaying the unchanged recording on the measured steps, and the change
    of the predicted step with the host's time, as that varies in unrecorded steps."""
    shortest_step_ns: int | None = None
    """The shortest step that the recording allows: under each reading of what it does not hold
    (which stream waits for which, what the host does with results), less the uncertainty."""
    longest_step_ns: int | None = None
    """The longest one, with the uncertainty."""
    known_share: float = 1.0
    """The share of the target's time that has a known roofline."""
    is_without_recording: bool = False
    """Whether all figures are of an unrecorded step, as such steps were timed."""
    reason: str | None = None
    """Why nothing could be predicted."""
    what: str = ""
    """The sort of change: faster, roofline, removed, replaced, graphed, without, filled, or
    together for several; across ranks: in time or hidden; empty in runs of earlier versions."""


@dataclass(frozen=True)
class CompiledLaunch:
    """A kernel or an operator that generated code launches."""

    name: str
    stacks: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """For each operator in it the modules around it, outermost first: once for each module that the
    code may serve, as one piece does for all layers of a class. Empty where nothing was noted."""


@dataclass(frozen=True)
class CompiledCode:
    """The code that a compiler generated for one graph; ranges of its calls name it by a key."""

    keys: tuple[str, ...]
    launches: tuple[CompiledLaunch, ...]
    is_in_order: bool
    """Whether a call launches all of them, one after another as listed."""


@dataclass(frozen=True)
class NodeNote:
    """torch's notes on a node of a CUDA graph, made during its capture (`mark_kernels`)."""

    rank: int
    node: int
    """Its number, as in `graph_node`."""
    range: str | None = None
    """Innermost range that the workload marked around it."""
    module: str | None = None


@dataclass(frozen=True)
class MemoryHolder:
    """Bytes at the peak of a device's memory that one owner asked for."""

    category: str
    """parameters, gradients, optimizer state, activations, workspaces, …"""
    place: str
    """Module, or file and line; empty where the category is all that is known."""
    num_bytes: int
    num_allocations: int
    basis: str
    """What tells the owner: address (noted by the recorder), time (ranges of the host), stack (of
    Python), size (of a workspace) or unknown."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment of a recording at which tensors asked for most bytes of a device."""

    device: int
    requested_bytes: int
    """The sum of what was asked for: that of all holders, to the byte."""
    reserved_bytes: int
    """What the allocator had from the driver then."""
    holders: tuple[MemoryHolder, ...] = ()
    rounded_bytes: int = 0
    """The least that the allocator needs for them, in blocks of 512 bytes."""
    allocated_bytes: int | None = None
    """The sum of its blocks then, where it was recorded."""
    capacity_bytes: int | None = None
    """The device's memory; None where not recorded."""
    highest_requested_bytes: int | None = None
    """The highest since the process began, by the allocator's own counter; None: not recorded."""
    highest_allocated_bytes: int | None = None
    num_events: int = 0
    """Allocations and frees in the history."""
    rank: int = 0


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that communicate with one another, as `torch.distributed` has them."""

    name: str
    ranks: tuple[int, ...]
    """Ranks of the job, in the group's order."""
    description: str = ""
    """Its maker's words: `mesh_` and the dimension of a DeviceMesh, `TENSOR_MODEL_PARALLEL_GROUP`
    of Megatron, `undefined`; empty where not recorded."""


@dataclass(frozen=True)
class RankTotals:
    """What the time of one rank adds up to, in ns; of several GPUs together."""

    rank: int
    host: str | None
    num_activities: int
    num_steps: int
    steps_ns: int
    """Durations of the marked steps, added up."""
    window_ns: int
    """From the first activity to the end of the last, once for each GPU."""
    busy_ns: int
    exposed_communication_ns: int
    """Time in which collectives ran and nothing else; a part of the busy time."""
    idle_ns: int
    """The rest of the window."""
    idle_by_cause_ns: dict[str, int] = field(default_factory=dict)
    """Its parts by cause; `unknown` where the recording does not tell."""
    node: int | None = None
    """The number of its machine in the job, where the launcher told it."""
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs that it used, where that was recorded."""
    place: dict[str, int] = field(default_factory=dict)
    """Its place in its process group along each dimension: data, tensor, pipeline, expert, …"""


@dataclass(frozen=True)
class LaunchTime:
    """Launches of one kernel over one grid, added up."""

    name: str
    grid: str | None
    block: str | None
    number: int
    time_ns: int


@dataclass(frozen=True)
class LateTime:
    """How a late rank that is not in detail spent the time of the units in which it was late."""

    rank: int
    units: tuple[int, ...]
    """Their numbers: of steps, or of parts of the window."""
    time_ns: dict[str, tuple[int, ...]]
    """By part (computation, communication, a cause of idle time), of each of the units."""
    launches: tuple[LaunchTime, ...]
    """Its computation in all of these units together."""


@dataclass(frozen=True)
class Meta:
    """The recording's facts: source, tool, host, GPUs, and the questions that it leaves open."""

    source: str
    """Name of the file or folder that was read, without the folders above it."""
    tool: str
    """kineto, nsys, ncu, proton: what wrote the trace."""
    gpus: tuple[Gpu, ...] = ()
    command: tuple[str, ...] = ()
    host: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    untimed: str | None = None
    """Why starts were not measured, only durations: activities then lie one after another."""
    base_time_ns: int | None = None
    """Wall time (ns since 1970) at the clock's zero; None where the file does not say."""
    num_ranks: int = 1
    world_size: int | None = None
    """Ranks of the job, recorded or not; None where the files do not tell."""
    hosts: tuple[tuple[int, str], ...] = ()
    """Ranks and the machines that they ran on, where that was recorded."""
    nodes: tuple[tuple[int, int], ...] = ()
    """Ranks and the numbers of their machines in the job, where the launcher told them."""
    gpu_uuids: tuple[tuple[int, str], ...] = ()
    """Ranks and the UUIDs of the GPUs that each used, where that was recorded."""
    process_groups: tuple[ProcessGroup, ...] = ()
    """Those of the recorded ranks, each once, where that was recorded."""
    clocks: str | None = None
    """How far the clocks of several ranks agree, in words for the report; None for one rank."""
    clocks_grade: Literal["good", "limited"] | None = None
    """Whether those clocks agree, or were moved, drift or contradict themselves; None: unknown."""
    counts: dict[str, int] = field(default_factory=dict)
    """The reader's counts of the file: events, nn_module_events, seq_ops, …"""
    recording: Recording | None = None
    light: LightPass | None = None
    """The light pass, whose steps the recorded ones then are; None: all is of the full pass."""
    compiled: tuple[CompiledCode, ...] = ()
    """The compiler's notes on the code that it generated."""
    graph_notes: tuple[NodeNote, ...] = ()
    """torch's notes on the nodes of CUDA graphs, where the trace has them."""
    device: Device | None = None
    """Ceilings that the roofline is drawn against; None for an unknown device."""
    dry_run: DryRun | None = None
    """The calls that kernels would take; None: it was not checked, as in an imported trace."""
    memory: tuple[MemoryPeak, ...] = ()
    """Peaks of the devices' memory, where the allocator's history was recorded."""
    what_if: tuple[Prediction, ...] = ()
    """The predictions of the analysis, and those asked for since."""
    totals: tuple[RankTotals, ...] = ()
    """The sums of each rank, where the tables do not hold all of them in detail."""
    late_times: tuple[LateTime, ...] = ()
    """Of late ranks that are not in detail, for the cause of their lateness."""
    caveats: tuple[Caveat, ...] = ()
    """What is missing, dropped or uncertain."""

    @property
    def num_all_ranks(self) -> int:
        """How many ranks were read, in detail or not."""
        return len(self.totals) or self.num_ranks

    @property
    def command_line(self) -> str:
        """The command as people write it in a shell: where the program lies is left out."""
        return shlex.join([*(Path(word).name for word in self.command[:1]), *self.command[1:]])


def columns_of(table: Table, added_by: str) -> tuple[Column, ...]:
    """Return the columns that `added_by` adds to `table`, in their order."""
    return tuple(c for c in SCHEMA[table] if c.added_by == added_by)


@cache
def empty(table: Table, added_by: str = "reader") -> pd.DataFrame:
    """Return `table` without rows, with the columns that `added_by` adds; the same one each time."""
    columns = columns_of(table, added_by)
    frame: pd.DataFrame = pd.DataFrame({c.name: pd.Series(dtype=c.dtype) for c in columns})
    return frame


def pairs_in(table: pd.DataFrame, *columns: str) -> tuple[tuple[int, int], ...]:
    """Return the distinct pairs of numbers in two columns, in the order of their first rows."""
    first, second = (table[column].to_numpy(np.int64) for column in columns)
    # Neighbours are mostly alike.
    is_new = np.append(True, (np.diff(first) != 0) | (np.diff(second) != 0))[: len(first)]
    pairs = zip(first[is_new].tolist(), second[is_new].tolist(), strict=True)
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True)
class Trace:
    """Device activities, host ranges and samples of one run."""

    kernels: pd.DataFrame
    ranges: pd.DataFrame
    samples: pd.DataFrame
    meta: Meta
    idle: pd.DataFrame = field(default_factory=lambda: empty("idle", "idle"))
    """The devices' idle time in pieces; empty before the pass that finds it."""
    diagnosis: Diagnosis | None = None
    """The findings of the rules; None before the rules were applied."""
    all_ranks: Trace | None = None
    """Collectives and steps of all ranks, where the tables hold some of the ranks in detail."""

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that did something; a trace may list all that the machine has."""
        pairs = pairs_in(self.kernels, "rank", "device")
        used = {(rank, device) for place, device in pairs for rank in (None, place)}
        return tuple(g for g in self.meta.gpus if (g.rank, g.device) in used) or self.meta.gpus

    @cached_property
    def is_host_only(self) -> bool:
        """Whether the activities are host operators because no device row was recorded."""
        return len(self.kernels) > 0 and bool((self.kernels["activity"] == "host").all())

    @property
    def has_timeline(self) -> bool:
        """Whether it was recorded when activities started, so that idle time is known."""
        return self.meta.untimed is None

    def with_kernels(self, **columns: object) -> Trace:
        """Return a trace whose `kernels` carry these further columns."""
        return replace(self, kernels=self.kernels.assign(**columns))  # type: ignore[arg-type]

    def with_ranges(self, **columns: object) -> Trace:
        """Return a trace whose `ranges` carry these further columns."""
        return replace(self, ranges=self.ranges.assign(**columns))  # type: ignore[arg-type]

    def with_conclusions(self, what_if: tuple[Prediction, ...], diagnosis: Diagnosis) -> Trace:
        """Return the trace with its predictions and findings, and the answers kept with it.

        An answer that is kept once per trace depends on neither.
        """
        told = replace(self, meta=replace(self.meta, what_if=what_if), diagnosis=diagnosis)
        kept = {name: answer for name, answer in vars(self).items() if name not in vars(told)}
        vars(told).update(kept)
        return told


_Answer = TypeVar("_Answer")
_TABLES_KEPT = 4


def once_per_trace(function: Callable[[Trace], _Answer]) -> Callable[[Trace], _Answer]:
    """Compute an answer about a trace once and keep it with the trace.

    The tables of a trace never change: a pass returns another trace, which keeps no answers. Only
    `with_conclusions` passes them on, so no answer may depend on the predictions or the findings.
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(trace: Trace) -> _Answer:
        known = vars(trace)
        if key not in known:
            known[key] = function(trace)
        found: _Answer = known[key]
        return found

    return answer


def once_per_table(
    function: Callable[[pd.DataFrame], _Answer],
) -> Callable[[pd.DataFrame], _Answer]:
    """Compute an answer about a table of a trace once, and keep it as long as the table is asked.

    Of the last few tables: traces after several passes share theirs.
    """
    known: list[tuple[tuple[ReferenceType[pd.DataFrame], ...], _Answer]] = []

    @wraps(function)
    def answer(table: pd.DataFrame) -> _Answer:
        return _known_or_new(known, (table,), lambda: function(table))

    return answer


def once_per_tables(
    *names: Table,
) -> Callable[[Callable[[Trace], _Answer]], Callable[[Trace], _Answer]]:
    """Compute an answer about a trace once for all traces that share the tables it depends on.

    Unlike `once_per_trace`, for answers that neither other tables nor what the trace says of
    itself can change.
    """

    def of(function: Callable[[Trace], _Answer]) -> Callable[[Trace], _Answer]:
        known: list[tuple[tuple[ReferenceType[pd.DataFrame], ...], _Answer]] = []

        @wraps(function)
        def answer(trace: Trace) -> _Answer:
            tables = tuple(getattr(trace, name) for name in names)
            return _known_or_new(known, tables, lambda: function(trace))

        return answer

    return of


def _known_or_new(
    known: list[tuple[tuple[ReferenceType[pd.DataFrame], ...], _Answer]],
    tables: tuple[pd.DataFrame, ...],
    find: Callable[[], _Answer],
) -> _Answer:
    """Return the answer known of these tables, or find it and forget the oldest of too many."""
    for references, found in known:
        if all(one() is table for one, table in zip(references, tables, strict=True)):
            return found
    known[_TABLES_KEPT - 1 :] = []
    found = find()
    known.insert(0, (tuple(map(ref, tables)), found))
    return found
