"""Simulates ranks that meet in collectives, some of them late, as a recording of all of them.

Every rank computes, then enters a collective, which ends on all of its members together. Each has
its clock. A case says which ranks are late, when and by how much; nothing here knows the rule.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kprof.collect.merge import merge
from kprof.trace import SCHEMA, Gpu
from tests.traces import trace_of

US = 1_000
STEP_NS = 10_000_000


@dataclass(frozen=True)
class Case:
    """Ranks, their lateness, and what is right to say: the stragglers, and whether it rotates."""

    name: str
    num_ranks: int
    stragglers: frozenset = frozenset()
    is_rotating: bool = False
    num_steps: int = 10
    per_step: int = 4
    late: object = lambda rng, rank, step: 0
    """Returns how much longer a rank works in a step, in ns."""
    work: object = lambda rank: 1.0
    """Returns a rank's work as a share of the usual."""
    jitter: float = 0.003
    """Standard deviation of a piece of work, as a share of it."""
    clock_ns: object = lambda rng, rank: 0
    slow_collective: int | None = None
    groups: tuple = ()
    """Process groups as tuples of ranks, met one after another; none: all ranks in one."""
    hosts: int | None = None
    """Ranks of a host; None: the recording names no hosts."""
    has_steps: bool = True
    is_numbered: bool = False
    hidden: float = 0.0
    """Share of the collective's usual time that other work runs beside."""
    seed: int = field(default=0)


def simulate(case):
    """Return the trace of a case, with steps as the attribution finds them."""
    rng = np.random.default_rng(case.seed)
    ranks = range(case.num_ranks)
    groups = case.groups or (tuple(ranks),)
    now = np.zeros(case.num_ranks)
    clock = np.array([case.clock_ns(rng, rank) for rank in ranks])
    rows = []
    count = dict.fromkeys(groups, 0)
    for step in range(case.num_steps):
        extra = np.array([case.late(rng, rank, step) for rank in ranks], dtype=float)
        for part in range(case.per_step):
            usual = STEP_NS / case.per_step * np.array([case.work(rank) for rank in ranks])
            took = usual * np.maximum(1 + case.jitter * rng.standard_normal(case.num_ranks), 0.1)
            took += extra if part == 0 else 0
            rows += [_row(rank, "gemm", now[rank], took[rank], step) for rank in ranks]
            now = now + took + 2 * US
            for group in groups:
                members = np.array(group)
                slow = 20_000 * US if case.slow_collective == step and part == 0 else 0
                end = now[members].max() + 300 * US + slow
                ends = end + rng.uniform(0, 5 * US, len(members))
                for rank, ended in zip(members, ends, strict=True):
                    number = count[group] if case.is_numbered else None
                    rows.append(
                        _row(rank, "collective", now[rank], ended - now[rank], step)
                        | {"group": f"{groups.index(group)} {list(group)}", "number": number}
                    )
                count[group] += 1
                now[members] = ends + 2 * US
    return _trace(rows, clock, case)


def _row(rank, kind, start, duration, step):
    return {
        "rank": rank, "kind": kind, "start_ns": start, "duration_ns": duration, "step": step
    }  # fmt: skip


def _trace(rows, clock, case):
    table = pd.DataFrame(rows)
    if "number" not in table:
        table["number"] = None
    is_collective = (table["kind"] == "collective").to_numpy()
    base = trace_of(gpus=(Gpu(0, "Round GPU"),), num_ranks=case.num_ranks)
    columns = {name: [None] * len(table) for name in base.kernels.columns}
    rank = table["rank"].to_numpy(np.int32)
    columns |= {
        "name": np.where(is_collective, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm"),
        "activity": ["kernel"] * len(table),
        "rank": rank,
        "device": np.zeros(len(table), np.int32),
        "stream": np.where(is_collective, 30, 7),
        "start_ns": np.rint(table["start_ns"].to_numpy()).astype(np.int64) + clock[rank] + 10**9,
        "duration_ns": np.rint(table["duration_ns"].to_numpy()).astype(np.int64),
        "collective": np.where(is_collective, "allreduce", None),
        "group": table["group"].to_numpy(object),
        "group_sequence": table["number"].to_numpy(object),
    }
    dtypes = {column.name: column.dtype for column in SCHEMA["kernels"]}
    columns["kind"] = table["kind"]
    kernels = pd.DataFrame(
        {
            name: pd.Categorical(values)
            if dtypes[name] == "category"
            else pd.array([None if pd.isna(v) else v for v in values], dtype=dtypes[name])
            for name, values in columns.items()
        }
    )
    steps = table["step"] if case.has_steps else [None] * len(table)
    kernels["step"] = pd.array(list(steps), "Int64")
    hosts = ()
    if case.hosts:
        hosts = tuple((rank, f"node{rank // case.hosts}") for rank in range(case.num_ranks))
    return replace(base, kernels=kernels, meta=replace(base.meta, hosts=hosts))


def recorded(case):
    """Return a case as `kprof open` has it: each rank read by itself, then put on one clock."""
    trace = simulate(case)
    found = []
    for rank, rows in trace.kernels.groupby("rank"):
        hosts = tuple(host for host in trace.meta.hosts if host[0] == rank)
        meta = replace(trace.meta, num_ranks=1, hosts=hosts)
        found.append(replace(trace, kernels=rows.reset_index(drop=True), meta=meta))
    merged = merge(found, "ranks")
    kinds = [pd.Series(one.kernels["kind"].astype(str)) for one in found]
    steps = [one.kernels["step"] for one in found]
    return merged.with_kernels(
        kind=pd.concat(kinds, ignore_index=True).astype("category"),
        step=pd.concat(steps, ignore_index=True),
    )


def _some(rng, num_ranks, number):
    return frozenset(rng.choice(num_ranks, size=number, replace=False).tolist())


def _always(late, by_ns):
    return lambda rng, rank, step: by_ns if rank in late else 0


def _one(rng, case):
    late = _some(rng, case.num_ranks, 1)
    return replace(case, stragglers=late, late=_always(late, rng.uniform(0.07, 0.6) * STEP_NS))


def _one_that_varies(rng, case):
    late, by_ns = _some(rng, case.num_ranks, 1), rng.uniform(0.15, 0.6) * STEP_NS
    return replace(
        case,
        stragglers=late,
        late=lambda rng, rank, step: by_ns * rng.gamma(3, 1 / 3) if rank in late else 0,
    )


def _sometimes(rng, case):
    late, by_ns = _some(rng, case.num_ranks, 1), rng.uniform(0.2, 0.8) * STEP_NS
    steps = set(rng.choice(20, size=rng.integers(6, 14), replace=False).tolist())
    return replace(
        case,
        num_steps=20,
        stragglers=late,
        late=lambda rng, rank, step: by_ns if rank in late and step in steps else 0,
    )


def _several(rng, case):
    late = _some(rng, case.num_ranks, int(rng.integers(2, max(3, case.num_ranks // 4 + 1))))
    by_ns = {rank: rng.uniform(0.15, 0.4) * STEP_NS for rank in late}
    return replace(
        case,
        stragglers=late,
        late=lambda rng, rank, step: by_ns.get(rank, 0) * rng.uniform(0.9, 1.1),
    )


def _two_alike(rng, case):
    late = _some(rng, case.num_ranks, 2)
    return replace(case, stragglers=late, late=_always(late, rng.uniform(0.1, 0.5) * STEP_NS))


def _host(rng, case):
    size = case.num_ranks // int(rng.choice([2, 4]))
    first = int(rng.integers(case.num_ranks // size)) * size
    late = frozenset(range(first, first + size))
    by_ns = rng.uniform(0.1, 0.5) * STEP_NS
    return replace(
        case,
        hosts=size,
        stragglers=late,
        late=lambda rng, rank, step: by_ns * rng.uniform(0.8, 1.2) if rank in late else 0,
    )


def _stage(rng, case):
    """Process groups of a quarter of the ranks each, one of them late to the group of all."""
    size = case.num_ranks // 4
    stages = tuple(tuple(range(first, first + size)) for first in range(0, case.num_ranks, size))
    late = frozenset(stages[int(rng.integers(4))])
    by_ns = rng.uniform(0.1, 0.5) * STEP_NS
    return replace(
        case,
        groups=(*stages, tuple(range(case.num_ranks))),
        stragglers=late,
        late=_always(late, by_ns),
    )


def _grid(rng, case):
    """Tensor-parallel pairs within data-parallel groups: whoever waits in a pair is not late."""
    ranks = range(case.num_ranks)
    pairs = tuple((rank, rank + 1) for rank in ranks[::2])
    late = _some(rng, case.num_ranks, 1)
    by_ns = rng.uniform(0.1, 0.5) * STEP_NS
    across = (tuple(ranks[::2]), tuple(ranks[1::2]))
    return replace(case, groups=(*pairs, *across), stragglers=late, late=_always(late, by_ns))


def _few_steps(rng, case):
    late = _some(rng, case.num_ranks, 1)
    return replace(
        case,
        num_steps=3,
        per_step=int(rng.integers(1, 4)),
        stragglers=late,
        late=_always(late, rng.uniform(0.15, 0.5) * STEP_NS),
    )


def _without_steps(rng, case):
    return replace(_one(rng, case), has_steps=False)


def _with_other_clocks(rng, case):
    offsets = rng.integers(-3_000_000, 3_000_000, case.num_ranks)
    return replace(_one(rng, case), clock_ns=lambda rng, rank: int(offsets[rank]))


def _nothing_but_clocks(rng, case):
    offsets = rng.integers(-3_000_000, 3_000_000, case.num_ranks)
    return replace(case, clock_ns=lambda rng, rank: int(offsets[rank]))


def _jitter(rng, case):
    return replace(case, jitter=rng.uniform(0.001, 0.02), num_steps=int(rng.integers(3, 20)))


def _slow_collective(rng, case):
    return replace(case, slow_collective=int(rng.integers(case.num_steps)))


def _one_slow_step(rng, case):
    late, slow = _some(rng, case.num_ranks, 1), int(rng.integers(case.num_steps))
    return replace(
        case, late=lambda rng, rank, step: STEP_NS if rank in late and step == slow else 0
    )


def _unequal_by_design(rng, case):
    """Work that grows from rank to rank, and no rank that stands apart."""
    spread, number = rng.uniform(0.05, 0.2), max(case.num_ranks, 8)
    return replace(
        case, num_ranks=number, work=lambda rank: 1 + spread * (rank / (number - 1) - 0.5)
    )


def _one_has_less_work(rng, case):
    early = _some(rng, case.num_ranks, 1)
    return replace(case, work=lambda rank: 0.8 if rank in early else 1.0)


def _rotating(rng, case):
    by_ns = rng.uniform(0.2, 0.6) * STEP_NS
    turn = rng.integers(case.num_ranks, size=40)
    return replace(
        case,
        num_steps=int(rng.integers(10, 30)),
        is_rotating=True,
        late=lambda rng, rank, step: by_ns if rank == turn[step] else 0,
    )


def _unequal_batches(rng, case):
    """Each rank's work differs from step to step, as with sequences of any length."""
    spread = rng.uniform(0.2, 0.4) * STEP_NS
    return replace(
        case,
        num_steps=int(rng.integers(10, 30)),
        is_rotating=None,
        late=lambda rng, rank, step: abs(rng.normal(0, spread)),
    )


KINDS = {
    make.__name__.strip("_"): make
    for make in (
        _one, _one_that_varies, _sometimes, _several, _two_alike, _host, _stage, _grid,
        _few_steps, _without_steps, _with_other_clocks, _nothing_but_clocks, _jitter,
        _slow_collective, _one_slow_step, _unequal_by_design, _one_has_less_work, _rotating,
        _unequal_batches,
    )
}  # fmt: skip
SIZES = (8, 16, 32, 64, 128)


def cases(number, seed=0, sizes=SIZES):
    """Return `number` cases of each kind, of these numbers of ranks in turn."""
    found = []
    for place, (name, make) in enumerate(KINDS.items()):
        for which in range(number):
            rng = np.random.default_rng((seed, place, which))
            plain = Case(
                f"{name}-{which}",
                sizes[which % len(sizes)],
                per_step=int(rng.integers(1, 5)),
                is_numbered=bool(rng.integers(2)),
                seed=int(rng.integers(2**31)),
                jitter=rng.uniform(0.001, 0.008),
            )
            found.append(make(rng, plain))
    return found
