"""Simulates ranks that train together as recordings of kernels and launches, with the truth beside.

A host launches, its device computes, ranks meet in the collectives of their process groups. A
pattern makes some ranks late, in some steps, by one cause; nothing here knows the rule.
"""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kprof.analyze.passes import attributed
from kprof.collect.merge import merge
from kprof.trace import Gpu, Trace, empty
from tests.traces import trace_of

US, MS = 1_000, 1_000_000
PER_HOST = 8
PER_TENSOR_GROUP = 4
# A layer's kernels and their usual durations.
LAYER = (
    ("gemm_bf16", 1_000 * US),
    ("flash_fwd_kernel", 500 * US),
    ("elementwise_kernel", 300 * US),
)
NUM_PARTS, NUM_LAYERS = 3, 2
STEP_NS = NUM_PARTS * NUM_LAYERS * sum(ns for _, ns in LAYER)
NUM_LAUNCHES = NUM_PARTS * NUM_LAYERS * len(LAYER)
LAUNCH_NS = 8 * US
TRANSFER_NS = 200 * US
ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Pattern:
    """Ranks, the fault of some of them, and what is right to say of it."""

    name: str
    num_ranks: int
    ranks: frozenset = frozenset()
    """Ranks that are late again and again."""
    cause: str | None = None
    is_in_turn: bool = False
    slow_group: tuple | None = None
    """Members of the process group whose collectives are slow."""
    groups: tuple = ()
    """Process groups as tuples of ranks; a group of all meets at the end of a step."""
    late_ns: object = None
    """Extra time by rank and step, or None."""
    fault: str = "work"
    """Where it goes: work, data, host or clock."""
    jitter: float = 0.004
    num_steps: int = 12
    is_numbered: bool = True
    is_overlapped: bool = False
    """Whether the computation goes on beside the collectives of all ranks until the step's end."""
    clock_ns: object = None
    seed: int = field(default=0)


class _Rows:
    """Columns of a table, appended for all ranks at once."""

    def __init__(self):
        self.parts = []

    def add(self, rank, **columns):
        self.parts.append((rank, columns))

    def table(self, blank):
        names = {name for _, columns in self.parts for name in columns}
        lengths = [len(rank) for rank, _ in self.parts]
        dtypes = blank.dtypes
        table = {"rank": np.concatenate([rank for rank, _ in self.parts])}
        for name in names:
            values = [
                np.broadcast_to(np.asarray(columns.get(name), dtype=object), (length,))
                for (_, columns), length in zip(self.parts, lengths, strict=True)
            ]
            table[name] = np.concatenate(values)
        rows = pd.DataFrame(index=range(sum(lengths)))
        for name in blank.columns:
            dtype = "string" if dtypes[name] == "category" else dtypes[name]
            values = table.get(name, np.full(sum(lengths), None, dtype=object))
            column = pd.Series(pd.array(list(values), dtype=dtype))
            rows[name] = column.astype("category") if dtype == "string" else column
        return rows


@dataclass
class _State:
    host: np.ndarray
    device: np.ndarray
    network: np.ndarray
    correlation: int = 0


def simulate(pattern):
    """Return the trace of a pattern as a reader has it, on each rank's own clock."""
    rng = np.random.default_rng(pattern.seed)
    number = pattern.num_ranks
    everyone = np.arange(number)
    clock = np.zeros(number) if pattern.clock_ns is None else np.asarray(pattern.clock_ns)
    late = np.zeros((number, pattern.num_steps)) if pattern.late_ns is None else pattern.late_ns
    kernels, ranges = _Rows(), _Rows()
    zero = np.zeros(number)
    now = _State(zero + MS, zero + MS, zero + MS)
    meet = _Meeting(pattern, rng, kernels, ranges, clock)
    for step in range(pattern.num_steps):
        extra = late[:, step]
        begin = now.host.copy()
        loading = 50 * US + (extra if pattern.fault == "data" else 0)
        ranges.add(
            everyone, kind="range", name="enumerate(DataLoader)#_Iter.__next__", thread=1,
            start_ns=_whole(now.host + clock), duration_ns=_whole(zero + loading),
        )  # fmt: skip
        now.host = now.host + loading
        for part in range(NUM_PARTS):
            for _ in range(NUM_LAYERS):
                _layer(pattern, rng, now, extra, (kernels, ranges, clock))
            for group in pattern.groups:
                meet(now, group, is_last=False)
            if pattern.is_overlapped or part == NUM_PARTS - 1:
                meet(now, tuple(range(number)), is_last=part == NUM_PARTS - 1)
        ends = np.maximum(now.device, now.network)
        ranges.add(
            everyone, kind="runtime", name="cudaStreamSynchronize", thread=1,
            start_ns=_whole(now.host + clock),
            duration_ns=_whole(np.maximum(ends - now.host, 0) + 5 * US),
        )  # fmt: skip
        now.host = np.maximum(ends, now.host) + 5 * US
        now.device = ends
        ranges.add(
            everyone, kind="step", name=f"ProfilerStep#{step}", thread=1,
            start_ns=_whole(begin + clock), duration_ns=_whole(now.host - begin),
        )  # fmt: skip
        now.host = now.host + 2 * US
    hosts = tuple((rank, f"node{rank // PER_HOST}") for rank in range(number))
    base = trace_of(gpus=(Gpu(0, "Round GPU"),), num_ranks=number, hosts=hosts)
    return replace(
        base, kernels=kernels.table(empty("kernels")), ranges=ranges.table(empty("ranges"))
    )


def _layer(pattern, rng, now, extra, tables):
    kernels, ranges, clock = tables
    number = pattern.num_ranks
    per_launch = extra / NUM_LAUNCHES
    for name, usual in LAYER:
        share = usual / (STEP_NS / NUM_LAUNCHES)
        took = usual * np.maximum(1 + pattern.jitter * rng.standard_normal(number), 0.1)
        blocks = np.full(number, usual // US)
        if pattern.fault in ("work", "clock"):
            took = took + per_launch * share
        if pattern.fault == "work":
            blocks = np.rint(blocks * (1 + per_launch * share / usual)).astype(int)
        launching = LAUNCH_NS * rng.uniform(0.9, 1.2, number)
        if pattern.fault == "host":
            # A host-bound rank launches later than its device could begin.
            launching = np.where(extra > 0, usual + per_launch * share, launching)
        now.correlation += 1
        start = np.maximum(now.device + 1.5 * US, now.host + launching + 5 * US)
        _launch(ranges, now, launching, clock, name="cudaLaunchKernel")
        kernels.add(
            np.arange(number), name=name, activity="kernel", device=0, stream=7,
            start_ns=_whole(start + clock), duration_ns=_whole(took), correlation=now.correlation,
            grid=np.array([f"{n},1,1" for n in blocks], dtype=object), block="256,1,1",
        )  # fmt: skip
        now.device = start + np.rint(took)


def _launch(ranges, now, launching, clock, name, who=slice(None)):
    ranges.add(
        np.arange(len(clock))[who], kind="runtime", name=name, thread=1,
        start_ns=_whole((now.host + launching - 4 * US + clock)[who]), duration_ns=4 * US,
        correlation=now.correlation,
    )  # fmt: skip
    now.host = np.where(_chosen(len(clock), who), now.host + launching, now.host)


def _chosen(number, who):
    chosen = np.zeros(number, dtype=bool)
    chosen[who] = True
    return chosen


def _whole(values):
    return np.rint(values).astype(np.int64)


class _Meeting:
    """The collectives of a run, each of which ends on its members together."""

    def __init__(self, pattern, rng, kernels, ranges, clock):
        self.pattern, self.rng, self.clock = pattern, rng, clock
        self.kernels, self.ranges = kernels, ranges
        self.count = {}

    def __call__(self, now, group, *, is_last):
        members = np.array(group)
        count = self.count[group] = self.count.get(group, -1) + 1
        transfer = TRANSFER_NS * self.rng.uniform(0.97, 1.03)
        if group == self.pattern.slow_group:
            transfer *= 8
        launching = np.full(len(now.host), float(LAUNCH_NS))
        now.correlation += 1
        before = now.host.copy()
        ready = np.maximum(now.device, now.network) + 2 * US
        start = np.maximum(ready, now.host + launching + 5 * US)[members]
        _launch(self.ranges, now, launching, self.clock, "cudaLaunchKernelExC", members)
        end = start.max() + transfer + self.rng.uniform(0, 4 * US, len(members))
        place = "all" if len(group) == self.pattern.num_ranks else f"tp{group[0]}"
        message = json.dumps(["allreduce", ELEMENTS, ELEMENTS, "BFloat16", len(group)])
        self.ranges.add(
            members, kind="op", name="record_param_comms", thread=1,
            start_ns=_whole((before + self.clock)[members]), duration_ns=LAUNCH_NS,
            message=message,
        )  # fmt: skip
        self.kernels.add(
            members, name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL", activity="kernel", device=0,
            stream=30, start_ns=_whole(start + self.clock[members]),
            duration_ns=_whole(end) - _whole(start), correlation=now.correlation,
            collective="allreduce", group=f"{place} {list(group)}", grid="24,1,1", block="512,1,1",
            group_sequence=count if self.pattern.is_numbered else None,
        )  # fmt: skip
        now.network[members] = _whole(end)
        if not self.pattern.is_overlapped or is_last or len(group) < self.pattern.num_ranks:
            now.device[members] = _whole(end)


def opened(pattern) -> Trace:
    """Return a pattern as `kprof open` has it: each rank read by itself, one clock, attributed."""
    trace = simulate(pattern)
    ranges = dict(list(trace.ranges.groupby("rank")))
    found = []
    for rank, rows in trace.kernels.groupby("rank"):
        hosts = tuple(host for host in trace.meta.hosts if host[0] == rank)
        meta = replace(trace.meta, num_ranks=1, hosts=hosts)
        tables = {
            "kernels": rows.reset_index(drop=True),
            "ranges": ranges[rank].reset_index(drop=True),
        }
        found.append(replace(trace, meta=meta, **tables))
    return attributed(merge(found, "ranks"))


def _some(rng, pattern, number=1):
    return frozenset(rng.choice(pattern.num_ranks, size=number, replace=False).tolist())


def _plan(rng, pattern, ranks, steps=None, low=0.08, high=0.5):
    """Return the extra time of these ranks, in all steps or in some."""
    late = np.zeros((pattern.num_ranks, pattern.num_steps))
    which = range(pattern.num_steps) if steps is None else steps
    by_ns = rng.uniform(low, high) * STEP_NS
    for rank in ranks:
        for step in which:
            late[rank, step] = by_ns * rng.uniform(0.9, 1.1)
    return late


def _one(rng, plain):
    ranks = _some(rng, plain)
    return replace(plain, ranks=ranks, cause="compute", late_ns=_plan(rng, plain, ranks))


def _host(rng, plain):
    size = PER_HOST if plain.num_ranks > PER_HOST else plain.num_ranks // 2
    first = int(rng.integers(plain.num_ranks // size)) * size
    ranks = frozenset(range(first, first + size))
    return replace(plain, ranks=ranks, cause="host", fault="host", late_ns=_plan(rng, plain, ranks))


def _stage(rng, plain):
    size = plain.num_ranks // 4
    stages = tuple(tuple(range(first, first + size)) for first in range(0, plain.num_ranks, size))
    ranks = frozenset(stages[int(rng.integers(4))])
    late = _plan(rng, plain, ranks)
    return replace(
        plain, groups=stages, is_overlapped=False, ranks=ranks, cause="compute", late_ns=late
    )


def _rotating(rng, plain):
    plain = replace(plain, num_steps=16)
    late = np.zeros((plain.num_ranks, plain.num_steps))
    by_ns = rng.uniform(0.25, 0.6) * STEP_NS
    turn = rng.permutation(max(plain.num_ranks, 16)) % plain.num_ranks
    for step in range(plain.num_steps):
        late[turn[step], step] = by_ns
    fault, cause = (("data", "data"), ("host", "host"))[int(rng.integers(2))]
    return replace(plain, is_in_turn=True, fault=fault, cause=cause, late_ns=late)


def _bursty(rng, plain):
    plain = replace(plain, num_steps=20)
    ranks, first = _some(rng, plain), int(rng.integers(1, 14))
    steps = range(first, first + int(rng.integers(4, 7)))
    late = _plan(rng, plain, ranks, steps, low=0.4, high=0.8)
    return replace(plain, ranks=ranks, cause="compute", late_ns=late)


def _slow_link(rng, plain):
    plain = replace(plain, is_overlapped=False, groups=_tensor_groups(plain.num_ranks))
    slow = plain.groups[int(rng.integers(len(plain.groups)))]
    return replace(plain, ranks=frozenset(slow), cause="link", slow_group=slow)


def _skewed(rng, plain):
    plain = replace(plain, num_steps=16)
    late = np.abs(rng.normal(0, rng.uniform(0.25, 0.4), (plain.num_ranks, plain.num_steps)))
    return replace(plain, is_in_turn=True, cause="compute", late_ns=late * STEP_NS)


def _slow_clock(rng, plain):
    ranks = _some(rng, plain)
    return replace(
        plain, ranks=ranks, cause="clock", fault="clock", late_ns=_plan(rng, plain, ranks)
    )


def _data_loader(rng, plain):
    ranks = _some(rng, plain)
    return replace(plain, ranks=ranks, cause="data", fault="data", late_ns=_plan(rng, plain, ranks))


def _host_bound(rng, plain):
    ranks = _some(rng, plain)
    return replace(plain, ranks=ranks, cause="host", fault="host", late_ns=_plan(rng, plain, ranks))


def _two(rng, plain):
    ranks = _some(rng, plain, 2)
    return replace(plain, ranks=ranks, cause="compute", late_ns=_plan(rng, plain, ranks))


def _none(rng, plain):
    return replace(plain, jitter=rng.uniform(0.001, 0.02))


PATTERNS = {
    make.__name__.strip("_"): make
    for make in (
        _one, _host, _stage, _rotating, _bursty, _slow_link, _skewed, _slow_clock, _data_loader,
        _host_bound, _two, _none,
    )
}  # fmt: skip


def _tensor_groups(number):
    firsts = range(0, number, PER_TENSOR_GROUP)
    return tuple(tuple(range(first, first + PER_TENSOR_GROUP)) for first in firsts)


def pattern_of(name, num_ranks, seed):
    """Return one case of a pattern; layout, clocks, numbers and size of the fault by the seed."""
    rng = np.random.default_rng((seed, list(PATTERNS).index(name), num_ranks))
    layout = ("all", "overlapped", "tensor")[int(rng.integers(3))]
    plain = Pattern(
        name,
        num_ranks,
        groups=_tensor_groups(num_ranks) if layout == "tensor" else (),
        is_overlapped=layout == "overlapped",
        is_numbered=bool(rng.integers(2)),
        jitter=rng.uniform(0.001, 0.01),
        clock_ns=rng.integers(-2 * MS, 2 * MS, num_ranks) if rng.integers(2) else None,
        seed=int(rng.integers(2**31)),
    )
    return PATTERNS[name](rng, plain)
