"""The schedule of the persistent kernel: a queue of instructions for each SM, and its checks.

An instruction computes some outputs of an operator. It waits until a counter has all its arrivals,
and then arrives at one. The loads of weights follow from the queue. `why_wrong` proves that a
schedule computes each value once and reads none too early; nothing runs that it has not checked.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# As in `kernel.cu`: rows with partial sums that are kept together, and rows of a tile at most.
PARTS = 128
MOST_ROWS = 8
WARP = 32
# Largest logits of an SM: one of each warp that finishes outputs.
BESTS = PARTS // WARP
# No counter.
NONE = -1
# Bytes of a stage at least: a copy long enough for the rate of memory.
LEAST_STAGE = 16_384
MOST_SPLITS = 8


class Op(IntEnum):
    """What an instruction computes, numbered as in `kernel.cu`."""

    QKV = 0
    ATTEND = 1
    O = 2  # noqa: E741 - the name of the projection
    GATED = 3
    DOWN = 4
    HEAD = 5
    NEXT = 6


class Instruction(NamedTuple):
    """One entry of a queue: outputs `first` to `first + outputs` of an operator of a layer."""

    op: Op
    layer: int
    first: int
    outputs: int
    wait: int
    """The counter to wait for; NONE: no wait."""
    arrivals: int
    """How many arrivals of a step to wait for."""
    signal: int
    """The counter to arrive at; NONE: none."""


@dataclass(frozen=True)
class Sizes:
    """The dimensions of a model, and how attention is split."""

    layers: int
    hidden: int
    inner: int
    heads: int
    """Key heads."""
    group: int
    """Query heads of a key head."""
    dim: int
    vocabulary: int
    splits: int
    """Parts of the keys of a query head at most."""

    @property
    def q_width(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.group * self.dim

    @property
    def qkv_width(self) -> int:
        """Columns of all queries, keys and values."""
        return self.q_width + 2 * self.heads * self.dim

    @property
    def units(self) -> int:
        """Parts of attention: each query head with each split."""
        return self.heads * self.group * self.splits

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: the longest row of weights fits."""
        longest = 2 * max(self.hidden, self.q_width, self.inner)
        return -(-max(LEAST_STAGE, longest) // 128) * 128

    def columns(self, op: Op) -> int:
        """Return the inputs of a product."""
        return {Op.O: self.q_width, Op.DOWN: self.inner}.get(op, self.hidden)

    def outputs(self, op: Op) -> int:
        """Return the outputs of an operator in all."""
        return {
            Op.QKV: self.qkv_width,
            Op.ATTEND: self.units,
            Op.O: self.hidden,
            Op.GATED: self.inner,
            Op.DOWN: self.hidden,
            Op.HEAD: self.vocabulary,
            Op.NEXT: 1,
        }[op]

    def rows(self, op: Op) -> int:
        """Return the rows of a tile."""
        return min(MOST_ROWS, self.stage_bytes // (2 * self.columns(op)))

    def arrivals(self, one: Instruction) -> int:
        """Return how often an instruction arrives: each warp that finishes outputs, once."""
        if one.op == Op.NEXT:
            return 0
        if one.op == Op.HEAD:
            return BESTS
        if one.op == Op.ATTEND:
            return -(-self.dim // WARP)
        rows = self.rows(one.op)
        kept = PARTS // 2 if one.op == Op.GATED else PARTS
        segment = kept // rows * rows
        whole, rest = divmod(one.outputs, segment)
        return whole * -(-segment // WARP) + -(-rest // WARP)

    def row_bytes(self, op: Op) -> int:
        """Return the bytes of the weights of an output."""
        return 2 * self.columns(op) * (2 if op == Op.GATED else 1)


@dataclass(frozen=True)
class Schedule:
    """A queue of instructions for each SM, run once a token."""

    sizes: Sizes
    queues: tuple[tuple[Instruction, ...], ...]

    @property
    def num_counters(self) -> int:
        """The counters that are used."""
        return 1 + max(
            (max(one.wait, one.signal) for queue in self.queues for one in queue), default=NONE
        )

    @property
    def length(self) -> int:
        """Instructions of the longest queue."""
        return max(len(queue) for queue in self.queues)

    def table(self) -> NDArray[np.int32]:
        """Return what the kernel reads: (SMs, length, 8), padded with no operation."""
        found = np.zeros((len(self.queues), self.length, 8), dtype=np.int32)
        found[:, :, 0] = len(Op)
        found[:, :, [4, 6]] = NONE
        for sm, queue in enumerate(self.queues):
            if queue:
                found[sm, : len(queue), :7] = np.array(queue)
        return found

    def bytes_of(self, sm: int) -> int:
        """Return the bytes of weights that an SM reads for a token."""
        sizes = self.sizes
        return sum(
            one.outputs * sizes.row_bytes(one.op)
            for one in self.queues[sm]
            if one.op not in (Op.ATTEND, Op.NEXT)
        )


def schedule_of(sizes: Sizes, speeds: Sequence[float]) -> Schedule:
    """Return a schedule for a model: the bytes of an SM are in proportion to its speed.

    Speeds are the rates at which SMs read, in any unit. The sums over operators are within the
    bytes of an output of that.
    """
    queues: list[list[Instruction]] = [[] for _ in speeds]
    num_bytes = [0] * len(speeds)
    counter, arrivals = NONE, 0
    for op, layer in _operators(sizes):
        signal = NONE if op == Op.NEXT else counter + 1
        arrived, first = 0, 0
        for sm, count in enumerate(_shares(sizes, op, num_bytes, speeds)):
            for start, size in _pieces(op, first, count):
                one = Instruction(op, layer, start, size, counter, arrivals, signal)
                queues[sm].append(one)
                arrived += sizes.arrivals(one)
            first += count
            if op not in (Op.ATTEND, Op.NEXT):
                num_bytes[sm] += count * sizes.row_bytes(op)
        counter, arrivals = signal, arrived
    return Schedule(sizes, tuple(map(tuple, queues)))


def _shares(sizes: Sizes, op: Op, num_bytes: list[int], speeds: Sequence[float]) -> list[int]:
    """Return how many outputs of an operator each SM has, after so many bytes."""
    total, row_bytes = sizes.outputs(op), sizes.row_bytes(op)
    goals = np.full(len(speeds), total / len(speeds))
    if op not in (Op.ATTEND, Op.NEXT):
        share = np.array(speeds) / sum(speeds)
        goals = ((sum(num_bytes) + total * row_bytes) * share - num_bytes) / row_bytes
    counts = np.floor(goals.clip(min=0)).astype(int)
    while counts.sum() != total:
        # An SM is at most one output from its goal.
        rest = total - int(counts.sum())
        missing = np.where(counts > 0, goals - counts, np.inf) if rest < 0 else counts - goals
        counts[np.argsort(missing, kind="stable")[: abs(rest)]] += np.sign(rest)
    found: list[int] = counts.tolist()
    return found


def _pieces(op: Op, first: int, count: int) -> list[tuple[int, int]]:
    """Return the instructions of the outputs of an SM: where they start, and how many they have."""
    if op == Op.NEXT:
        return [(0, 1)]
    if op == Op.ATTEND:
        return [(first + i, 1) for i in range(count)]
    # Each SM has a largest logit, if only of none.
    return [(first, count)] if count or op == Op.HEAD else []


def _operators(sizes: Sizes) -> Iterator[tuple[Op, int]]:
    for layer in range(sizes.layers):
        for op in (Op.QKV, Op.ATTEND, Op.O, Op.GATED, Op.DOWN):
            yield op, layer
    yield Op.HEAD, 0
    yield Op.NEXT, 0


class Access(NamedTuple):
    """A range of a buffer that an instruction reads or writes."""

    buffer: tuple[str, int]
    start: int
    stop: int
    is_early: bool = False
    """It is read before the instruction waits."""
    is_earlier: bool = False
    """The step before wrote it."""


def reads_of(sizes: Sizes, sm: int, one: Instruction, num_sms: int) -> list[Access]:
    """Return what an instruction reads, apart from weights."""
    layer, end = one.layer, one.first + one.outputs
    # The token and its slot are known to each SM by its own.
    token = Access(("token", sm), 0, 1, is_early=True, is_earlier=True)
    if one.op == Op.QKV:
        before = ("output", layer - 1), 0, sizes.hidden
        return [token if layer == 0 else Access(*before)]
    if one.op == Op.ATTEND:
        return [token, *_attended(sizes, one)]
    if one.op == Op.O:
        found = [token, Access(("partial", layer), 0, sizes.units)]
        if layer > 0:
            found.append(Access(("output", layer - 1), one.first, end, is_early=True))
        return found
    if one.op == Op.GATED:
        return [Access(("middle", layer), 0, sizes.hidden)]
    if one.op == Op.DOWN:
        return [
            Access(("gated", layer), 0, sizes.inner),
            Access(("middle", layer), one.first, end, is_early=True),
        ]
    if one.op == Op.HEAD:
        return [Access(("output", sizes.layers - 1), 0, sizes.hidden)]
    return [Access(("bests", 0), 0, BESTS * num_sms)]


def _attended(sizes: Sizes, one: Instruction) -> list[Access]:
    dim, kv_width = sizes.dim, sizes.heads * sizes.dim
    head = one.first // sizes.splits
    key_head = head // sizes.group
    key = sizes.q_width + key_head * dim
    qkv = ("qkv", one.layer)
    cached = key_head * sizes.splits
    return [
        Access(qkv, head * dim, (head + 1) * dim),
        Access(qkv, key, key + dim),
        Access(qkv, key + kv_width, key + kv_width + dim),
        Access(("cache", one.layer), cached, cached + sizes.splits, is_early=True, is_earlier=True),
    ]


def writes_of(sizes: Sizes, sm: int, one: Instruction) -> list[Access]:
    """Return what an instruction writes."""
    end = one.first + one.outputs
    if one.op == Op.ATTEND:
        found = [Access(("partial", one.layer), one.first, end)]
        head, split = divmod(one.first, sizes.splits)
        if head % sizes.group == 0:
            # The split with the newest key appends it: which one, depends on the length.
            at = head // sizes.group * sizes.splits + split
            found.append(Access(("cache", one.layer), at, at + 1))
        return found
    if one.op == Op.HEAD:
        # Each logit once, and the largest ones of the SM.
        return [
            Access(("logits", 0), one.first, end),
            Access(("bests", 0), BESTS * sm, BESTS * (sm + 1)),
        ]
    if one.op == Op.NEXT:
        return [Access(("token", sm), 0, 1)]
    name = {Op.QKV: "qkv", Op.O: "middle", Op.GATED: "gated", Op.DOWN: "output"}[one.op]
    return [Access((name, one.layer), one.first, end)]


def _buffers(sizes: Sizes, num_sms: int) -> dict[tuple[str, int], int]:
    """Return the size of each buffer that a step must write."""
    found = {("logits", 0): sizes.vocabulary, ("bests", 0): BESTS * num_sms}
    found |= {("token", sm): 1 for sm in range(num_sms)}
    widths = {
        "qkv": sizes.qkv_width,
        "partial": sizes.units,
        "cache": sizes.heads * sizes.splits,
        "middle": sizes.hidden,
        "gated": sizes.inner,
        "output": sizes.hidden,
    }
    for layer in range(sizes.layers):
        found |= {(name, layer): width for name, width in widths.items()}
    return found


def why_wrong(schedule: Schedule) -> str | None:
    """Return why a schedule must not run; None: it is correct.

    Two steps are ordered by the queues and the counters. In each, every value is written once,
    every read is behind the write of its value, and no value is written over before its last read.
    """
    why = _why_malformed(schedule)
    if why is not None:
        return why
    sizes, num_sms = schedule.sizes, len(schedule.queues)
    writers: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}
    for sm, queue in enumerate(schedule.queues):
        for at, one in enumerate(queue):
            for access in writes_of(sizes, sm, one):
                entry = (access.start, access.stop, sm, at)
                writers.setdefault(access.buffer, []).append(entry)
    why = _why_not_once(writers, _buffers(sizes, num_sms))
    if why is not None:
        return why
    known = _known(schedule)
    if isinstance(known, str):
        return known
    return _why_unordered(schedule, writers, known)


def _why_malformed(schedule: Schedule) -> str | None:
    sizes = schedule.sizes
    everywhere = [
        (f"SM {sm}, instruction {at}", one)
        for sm, queue in enumerate(schedule.queues)
        for at, one in enumerate(queue)
    ]
    arrivals: dict[int, int] = {}
    for where, one in everywhere:
        why = _why_not_an_instruction(sizes, one)
        if why is not None:
            return f"{where}: {why}"
        arrivals[one.signal] = arrivals.get(one.signal, 0) + sizes.arrivals(one)
    for where, one in everywhere:
        found = arrivals.get(one.wait, 0)
        if one.wait != NONE and one.arrivals != found:
            return f"{where} waits for {one.arrivals} arrivals of {found} at counter {one.wait}"
    return None


def _why_not_an_instruction(sizes: Sizes, one: Instruction) -> str | None:
    if one.op not in Op._value2member_map_:
        return f"unknown operator {one.op}"
    if not 0 <= one.layer < sizes.layers:
        return f"layer {one.layer} of {sizes.layers}"
    # Each SM has a largest logit, if only of none.
    least = 0 if one.op == Op.HEAD else 1
    most = 1 if one.op == Op.ATTEND else sizes.outputs(one.op)
    if not least <= one.outputs <= most:
        return f"{one.outputs} outputs"
    if not 0 <= one.first <= sizes.outputs(one.op) - one.outputs:
        return f"outputs {one.first} to {one.first + one.outputs}"
    if one.wait < NONE or (one.signal < 0) != (one.op == Op.NEXT):
        return f"counters {one.wait} and {one.signal}"
    return None


def _why_not_once(
    writers: dict[tuple[str, int], list[tuple[int, int, int, int]]],
    buffers: dict[tuple[str, int], int],
) -> str | None:
    for buffer, size in buffers.items():
        end = 0
        entries = writers.get(buffer, [])
        entries.sort()
        for start, stop, sm, at in entries:
            if start != end and stop > start:
                how = "not" if start > end else "twice"
                return f"{buffer} is {how} written from {min(start, end)}: SM {sm}, {at}"
            end = max(end, stop)
        if end != size:
            return f"{buffer} is not written from {end} to {size}"
    return None


class Known(NamedTuple):
    """How many instructions of each SM have ended, (steps, SMs, length, SMs), over both steps."""

    before_wait: NDArray[np.int32]
    after_wait: NDArray[np.int32]


def _known(schedule: Schedule) -> Known | str:  # noqa: C901
    """Return what each instruction can know to have ended; or where a queue stands for ever."""
    queues, num_sms = schedule.queues, len(schedule.queues)
    shape = (2, num_sms, schedule.length, num_sms)
    known = Known(np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32))
    counters = np.zeros((2, schedule.num_counters, num_sms), dtype=np.int32)
    # Arrivals that are missing, of each step.
    missing = [[0] * schedule.num_counters for _ in range(2)]
    for queue in queues:
        for one in queue:
            if one.signal != NONE:
                missing[0][one.signal] += 1
                missing[1][one.signal] += 1
    latest = np.zeros((num_sms, num_sms), dtype=np.int32)
    waiting: dict[tuple[int, int], list[int]] = {}
    places = [(0, 0)] * num_sms
    ready = list(range(num_sms))
    while ready:
        sm = ready.pop()
        step, at = places[sm]
        queue, mine = queues[sm], latest[sm]
        while True:
            if at == len(queue):
                step, at = step + 1, 0
                if step == 2 or not queue:
                    break
            one = queue[at]
            known.before_wait[step, sm, at] = mine
            if one.wait != NONE:
                if missing[step][one.wait]:
                    waiting.setdefault((step, one.wait), []).append(sm)
                    break
                np.maximum(mine, counters[step, one.wait], out=mine)
            known.after_wait[step, sm, at] = mine
            mine[sm] = step * len(queue) + at + 1
            if one.signal != NONE:
                at_counter = counters[step, one.signal]
                np.maximum(at_counter, mine, out=at_counter)
                missing[step][one.signal] -= 1
                if not missing[step][one.signal]:
                    ready += waiting.pop((step, one.signal), [])
            at += 1
        places[sm] = (step, at)
    for sm, (step, at) in enumerate(places):
        if step < 2 and queues[sm]:
            return f"SM {sm}, instruction {at} waits for ever at counter {queues[sm][at].wait}"
    return known


class _Writers:
    """The writers of a buffer, in the order of what they write."""

    def __init__(self, entries: list[tuple[int, int, int, int]]) -> None:
        entries = [one for one in entries if one[1] > one[0]]
        self.starts = [one[0] for one in entries]
        self.sms = np.array([one[2] for one in entries], dtype=np.intp)
        self.places = np.array([one[3] for one in entries], dtype=np.int32)

    def of(self, start: int, stop: int) -> slice:
        return slice(
            bisect.bisect_right(self.starts, start) - 1, bisect.bisect_left(self.starts, stop)
        )


def _why_unordered(
    schedule: Schedule,
    writers: dict[tuple[str, int], list[tuple[int, int, int, int]]],
    known: Known,
) -> str | None:
    sizes, num_sms = schedule.sizes, len(schedule.queues)
    lengths = np.array([len(queue) for queue in schedule.queues], dtype=np.int32)
    by_buffer = {buffer: _Writers(entries) for buffer, entries in writers.items()}
    for sm, queue in enumerate(schedule.queues):
        for at, one in enumerate(queue):
            for read in reads_of(sizes, sm, one, num_sms):
                found = by_buffer[read.buffer]
                some = found.of(read.start, read.stop)
                sms, places = found.sms[some], found.places[some]
                # The second step, which has one before it.
                ends = places + 1 + (0 if read.is_earlier else lengths[sms])
                of_reader = (known.before_wait if read.is_early else known.after_wait)[1, sm, at]
                if (of_reader[sms] < ends).any():
                    return f"SM {sm}, instruction {at} reads {read.buffer} too early"
                if read.buffer[0] == "cache":
                    # The next step writes another slot.
                    continue
                # The reader ends before the value of the next step is written.
                last = at + 1 + (len(queue) if read.is_earlier else 0)
                if (known.after_wait[1, sms, places, sm] < last).any():
                    return f"SM {sm}, instruction {at}: {read.buffer} is overwritten too early"
    return None
