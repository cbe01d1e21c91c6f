"""The work of each device activity, from the best available source.

An operator's work is split over its activities by their durations; kernels over lists of tensors
split it by their blocks, each of which has one chunk. The reduction of a split-K GEMM gets none. A
copy's own size is recorded. A launch without an operator (from before the recording began, or out
of a CUDA graph) gets the work of launches of the same kernel with the same grid, block and about
the same time, if all known ones agree. Where shapes are missing, the launch bounds the work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.attribution.ledger import is_graph_launch_name
from kprof.analyze.attribution.steps import find_recurring
from kprof.analyze.element_type import SIZE_BYTES, least_size_in_name, type_in_name
from kprof.analyze.roofline.hardware_counters import NOT_COUNTED, counted_bytes
from kprof.analyze.roofline.operator_work import DTYPES, WORK_BOUNDS, find_work
from kprof.analyze.work import Work
from kprof.analyze.work.optimizer import ADAGRAD_FLOPS, ADAM_FLOPS, SGD_FLOPS
from kprof.trace import Trace

SAME_WORK = 0.05
"""How far apart the work of launches may be that count as having the same, as a share of it."""

SAME_TIME, SAME_TIME_NS = 0.1, 1000
"""How far from its own duration a launch looks for its like: a share of it, or so many ns."""

_KEY = ("name", "grid", "block")

_LONGEST_NS = 1 << 40

# Kernels on lists of tensors give each block one chunk of one tensor: kChunkSize in PyTorch's
# ATen/native/cuda/MultiTensorApply.cuh, 2048 * 32 where Apex and DeepSpeed launch theirs. The last
# chunk of a tensor is shorter.
CHUNK_ELEMENTS = 65536

# Lists that are only read, and FLOPs of an element, by what the kernel's name says; first match
# wins. The others of its lists are read and written.
_UPDATES: tuple[tuple[str, int, int], ...] = (
    ("Adam", 1, ADAM_FLOPS),
    ("Sgd|SGD", 1, SGD_FLOPS),
    ("Adagrad", 1, ADAGRAD_FLOPS),
    ("LAMB", 0, ADAM_FLOPS),
)

_LIST_KERNEL = re.compile(r"at::native|^void multi_tensor_apply_kernel<TensorListMetadata")

_NUM_LISTS = re.compile(r"TensorList\w*Metadata<(?:\w+, )?(\d+)")

# PyTorch's kernels on every element: how many each thread has stands in front of the functor, for
# vectorized ones at least four (later versions give some of those eight).
_STRIDED = re.compile(
    r"^void at::native::(?:index_|_scatter_gather_)?elementwise_kernel<(\d+), (\d+),"
)

_VECTORIZED = re.compile(
    r"^void at::native::vectorized_elementwise_kernel<(\d+), .*[Aa]rray<char ?\*, (\d+)"
)

_LEAST_EACH = 4

# Comparisons and selections have results, or inputs, of one byte.
_OF_TRUTHS = re.compile(r"bool|compare|logical|isnan|isinf|signbit", re.IGNORECASE)

SOURCES = ("shapes", "recorded", "bounds", "alike", "declared", "counters")

_SHAPES, _RECORDED, _BOUNDS, _ALIKE, _DECLARED, COUNTERS = range(6)

UNKNOWN = -1

# Kernels that add the partial sums of a split GEMM: cuBLASLt, cuDNN, CUTLASS.
_FINISHING = r"(?i)split_?k_?reduce|reduce_?split_?k|reduce_wgrad"

# Types without a peak of their own run on the vector units: integers, bf16 before Ampere.
FALLBACK_DTYPE = "fp32"


@dataclass(frozen=True)
class RowWork:
    """Work of each row of `kernels`."""

    flops: np.ndarray
    has_flops: np.ndarray
    bytes: np.ndarray
    """-1 where an author declared FLOPs alone."""
    written: np.ndarray
    """Number of the bytes that are written; 0 where it is unknown."""
    may_repeat: np.ndarray
    """How many of those read are none if operands that look alike are one tensor."""
    source: np.ndarray
    """Place in `SOURCES`, `UNKNOWN` where no work is known."""
    dtype: np.ndarray
    """Place in `DTYPES` of the type whose peak limits the FLOPs, -1 for none."""
    bound: np.ndarray
    """Place in `WORK_BOUNDS`, `UNKNOWN` where the work is no bound."""
    group: np.ndarray
    """Rows with the same number share one operator's work, and so one bound."""


def find_row_work(trace: Trace) -> RowWork:
    """Return the work of every row from its best source: recorded, shapes, bounds."""
    kernels = trace.kernels
    operators = find_work(trace)
    recorded = _recorded_bytes(kernels)
    is_recorded = recorded >= 0
    carrier = np.where(is_recorded, NO_ROW, operators.carrier)
    is_shaped = carrier != NO_ROW
    group, carrier_of = _calls(trace, carrier)
    is_chunked = _name_holds(kernels["name"], "multi_tensor_apply")
    weight = _weights(kernels, group, is_chunked)
    is_finishing = _finishing(kernels, group)
    weight = np.where(is_finishing, 0, weight)
    shares = shares_by_duration(group, weight)
    num_bytes = shares.split(operators.bytes[carrier_of])
    num_bytes[is_recorded] = recorded[is_recorded]
    written = shares.split(operators.written[carrier_of])
    written[is_recorded] = _recorded_writes(kernels, recorded)[is_recorded]
    repeat = shares.split(operators.may_repeat[carrier_of])
    has_flops = is_recorded.copy()
    has_flops[is_shaped] = operators.has_flops[carrier[is_shaped]]
    dtype = np.full(len(kernels), -1, dtype=np.int8)
    dtype[is_shaped] = operators.dtype[carrier[is_shaped]]
    bound = np.full(len(kernels), UNKNOWN, dtype=np.int8)
    bound[is_shaped] = operators.bound[carrier[is_shaped]]
    is_bounded = is_shaped & (bound != UNKNOWN)
    # Rows that share no operator are groups of their own, numbered after the calls.
    alone = len(carrier_of) + np.arange(len(kernels))
    work = RowWork(
        flops=shares.split(operators.flops[carrier_of]),
        has_flops=has_flops,
        bytes=num_bytes,
        written=np.minimum(written, num_bytes),
        # Blocks tell about how much of a list is one launch's: too little to prove anything.
        may_repeat=np.where(is_chunked, 0, repeat),
        source=np.select(
            [is_bounded, is_shaped, is_recorded], [_BOUNDS, _SHAPES, _RECORDED], UNKNOWN
        ),
        dtype=dtype,
        bound=bound,
        # For chunks, it is known how many each launch has.
        group=np.where(is_shaped & ~is_chunked & ~is_finishing, group, alone),
    )
    _fill_alike(kernels, work)
    _fill_declared(kernels, work)
    _fill_counted(kernels, work)
    _fill_bounds(trace, work)
    return work


def _calls(trace: Trace, carrier: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the number of the call whose work it shares, and each call's operator.

    A call of an operator is that operator's row, but what a CUDA graph replays is another call
    of it with every replay.
    """
    kernels, names = trace.kernels, trace.ranges["name"].cat
    group = np.full(len(kernels), NO_ROW, dtype=np.int64)
    rows = np.flatnonzero(carrier != NO_ROW)
    launch = kernels["launch_row"].to_numpy(np.int64, na_value=NO_ROW)
    # Recorders do not all number the nodes of graphs, so the launching call tells, too.
    of_name = np.append(is_graph_launch_name(names.categories), False)
    is_launch = np.append(of_name[names.codes.to_numpy()], False)
    is_replayed = kernels["graph_node"].notna().to_numpy() | is_launch[launch]
    replay = np.where(is_replayed, launch, NO_ROW)[rows]
    calls = pd.DataFrame({"carrier": carrier[rows], "replay": replay})
    group[rows] = calls.groupby(["carrier", "replay"], sort=False).ngroup().to_numpy()
    _, first = np.unique(group[rows], return_index=True)
    return group, carrier[rows][first]


def _weights(kernels: pd.DataFrame, group: np.ndarray, is_chunked: np.ndarray) -> np.ndarray:
    """Return durations, in which each group's chunked launches share theirs by their blocks."""
    duration: np.ndarray = kernels["duration_ns"].to_numpy(dtype=np.int64)
    rows = np.flatnonzero(is_chunked & (group != NO_ROW))
    if not len(rows):
        return duration
    grids = kernels["grid"].cat
    lengths = [str(grid).partition(",")[0] for grid in grids.categories]
    sizes = np.array([int(text) if text.isdigit() else 0 for text in lengths] + [0])
    blocks = sizes[grids.codes.to_numpy()[rows]]
    _, member = np.unique(group[rows], return_inverse=True)
    of_group = np.bincount(member, weights=blocks)[member]
    time_ns = np.bincount(member, weights=duration[rows].astype(float))[member]
    is_told = np.bincount(member, weights=blocks == 0)[member] == 0
    weight: np.ndarray = duration.copy()
    shared = np.rint(time_ns * blocks / np.maximum(of_group, 1)).astype(np.int64)
    weight[rows[is_told]] = shared[is_told]
    return weight


def _finishing(kernels: pd.DataFrame, group: np.ndarray) -> np.ndarray:
    """Tell which launches only finish what others of their group did."""
    finishes = _name_holds(kernels["name"], _FINISHING) & (group != NO_ROW)
    does = (kernels["duration_ns"].to_numpy(dtype=np.int64) > 0) & ~finishes
    return np.asarray(finishes & np.isin(group, group[does & (group != NO_ROW)]))


@dataclass(frozen=True)
class Shares:
    """The shares of rows in what belongs to their groups, in proportion to their durations."""

    number: int
    rows: np.ndarray
    """The rows that are in a group; the fields below have an entry for each of these, or group."""
    groups: np.ndarray
    member: np.ndarray
    """The place in `groups` of each row's group."""
    share: np.ndarray
    longest: np.ndarray
    """The place in `rows` of each group's longest."""

    def split(self, total: np.ndarray) -> np.ndarray:
        """Split `total[g]` over the rows of each group g.

        Integers add up exactly: what rounding leaves goes to the group's longest row. Rows in no
        group get 0. Where all of a group lasted 0 ns its first row gets everything.
        """
        result = np.zeros(self.number, dtype=np.int64)
        wanted, member = total[self.groups], self.member
        of_group = wanted[member]
        part = np.minimum((of_group * self.share).astype(np.int64), of_group)
        given = np.zeros(len(wanted), dtype=np.int64)
        np.add.at(given, member, part)
        part[self.longest] += wanted - given
        result[self.rows] = part
        return result


def shares_by_duration(group: np.ndarray, duration: np.ndarray) -> Shares:
    """Return the share of each row in its group's time; rows of group `NO_ROW` are in none."""
    rows = np.flatnonzero(group != NO_ROW)
    groups, member = np.unique(group[rows], return_inverse=True)
    took = duration[rows]
    time = np.zeros(len(groups), dtype=np.int64)
    np.add.at(time, member, took)
    by_duration = np.lexsort([-rows, took, member])
    last = np.append(np.diff(member[by_duration]) != 0, True)[: len(rows)]
    share = took / np.maximum(time, 1)[member]
    return Shares(len(group), rows, groups, member, share, by_duration[np.flatnonzero(last)])


def _recorded_bytes(kernels: pd.DataFrame) -> np.ndarray:
    """Return what copies and sets moved through memory, -1 where that was not recorded.

    A copy within a device reads and writes each byte.
    """
    copied = kernels["copied_bytes"].fillna(-1).to_numpy(dtype=np.int64)
    is_copy = kernels["activity"].isin(["memcpy", "memset"]).to_numpy(dtype=bool)
    twice = is_within_device(kernels) & (copied > 0)
    return np.asarray(np.where(is_copy, np.where(twice, 2 * copied, copied), -1))


def _recorded_writes(kernels: pd.DataFrame, recorded: np.ndarray) -> np.ndarray:
    """Return what copies within a device and sets write of what they moved, 0 for other copies."""
    is_set = (kernels["activity"] == "memset").to_numpy(dtype=bool)
    halved = np.where(is_within_device(kernels), recorded // 2, 0)
    return np.where(is_set, recorded, halved)


def is_within_device(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows are copies from a device to itself, as their names say."""
    is_copy = (kernels["activity"] == "memcpy").to_numpy(dtype=bool)
    return np.asarray(is_copy & _name_holds(kernels["name"], "DtoD|DeviceToDevice"))


def _fill_alike(kernels: pd.DataFrame, work: RowWork) -> None:
    """Fill in the work of launches that are alike to one whose work is known.

    In the same place of what repeats comes first: of a collective nothing else tells the message.
    """
    is_known = (work.source == _SHAPES) | (work.source == _RECORDED)
    is_seen = (kernels["bucket"] == "attributed").to_numpy(dtype=bool)
    member, _ = pd.factorize(work.group)
    # How an operator's work falls on its launches changes with their durations.
    whole = np.bincount(member, weights=work.bytes)[member]
    like = find_recurring(kernels, is_seen, np.where(is_known, whole, UNKNOWN))
    like[(like != NO_ROW) & ~is_known[like]] = NO_ROW
    alike = find_alike(kernels, work.source == _SHAPES, work.bytes)
    like = np.where(like == NO_ROW, alike, like)
    like[work.source != UNKNOWN] = NO_ROW
    rows = np.flatnonzero(like != NO_ROW)
    known = work.flops, work.bytes, work.written, work.may_repeat, work.has_flops, work.dtype
    for values in known:
        values[rows] = values[like[rows]]
    work.source[rows] = _ALIKE


def _fill_declared(kernels: pd.DataFrame, work: RowWork) -> None:
    """Fill in the work that the workload's author declared to the recorder."""
    flops, num_bytes = (
        kernels[name].to_numpy(np.int64, na_value=-1)
        for name in ("declared_flops", "declared_bytes")
    )
    is_declared = (work.source == UNKNOWN) & ((flops >= 0) | (num_bytes >= 0))
    rows = np.flatnonzero(is_declared)
    work.flops[rows], work.bytes[rows] = np.maximum(flops, 0)[rows], num_bytes[rows]
    work.has_flops[rows], work.source[rows] = (flops >= 0)[rows], _DECLARED
    types = kernels["declared_type"].cat
    place = [DTYPES.index(name) if name in DTYPES else -1 for name in types.categories]
    work.dtype[rows] = np.array([*place, -1], dtype=np.int8)[types.codes.to_numpy()][rows]


def _fill_counted(kernels: pd.DataFrame, work: RowWork) -> None:
    """Fill in the traffic that counters measured where nothing else tells the work."""
    counted = counted_bytes(kernels)
    rows = np.flatnonzero((work.source == UNKNOWN) & (counted != NOT_COUNTED))
    work.bytes[rows], work.source[rows] = counted[rows], COUNTERS


def _fill_bounds(trace: Trace, work: RowWork) -> None:
    """Fill in bounds for launches whose work their kernel's name and blocks bound.

    An upper bound that the device could not even have moved in the time tells nothing.
    """
    kernels, device = trace.kernels, trace.meta.device
    most_bytes = np.full(len(kernels), np.inf)
    if device is not None:
        bytes_per_ns = device.memory_bytes_per_s / 1e9
        most_bytes = bytes_per_ns * kernels["duration_ns"].to_numpy(dtype=float)
    is_bounded = _name_holds(kernels["name"], "multi_tensor_apply|elementwise_kernel")
    rows = np.flatnonzero(is_bounded & (work.source == UNKNOWN))
    launches = kernels.iloc[rows].astype({"block": object}).fillna({"block": ""})
    groups = launches.groupby(["name", "grid", "block"], observed=True).indices
    for (name, grid, block), places in groups.items():
        bound = bound_kernel(str(name), str(grid), str(block))
        if bound is None:
            continue
        told = rows[places]
        if bound.bound == "at most":
            told = told[most_bytes[told] >= bound.bytes]
        work.flops[told], work.bytes[told] = bound.flops or 0, bound.bytes
        work.has_flops[told], work.source[told] = bound.flops is not None, _BOUNDS
        work.bound[told] = WORK_BOUNDS.index(bound.bound or "at least")
        work.dtype[told] = DTYPES.index(FALLBACK_DTYPE)


def crosses_link(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which copies and collectives go between memories, so that a link limits them."""
    is_copy = (kernels["activity"] == "memcpy").to_numpy(dtype=bool)
    is_collective = (kernels["kind"] == "collective").to_numpy(dtype=bool)
    return np.asarray((is_copy & ~is_within_device(kernels)) | is_collective)


def _name_holds(names: pd.Series[str], pattern: str) -> np.ndarray:
    """Tell which rows' names match, asking once per distinct name."""
    holds = [re.search(pattern, str(name)) is not None for name in names.cat.categories]
    return np.asarray(np.array([*holds, False])[names.cat.codes.to_numpy()])


def find_alike(kernels: pd.DataFrame, is_known: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Return for each row without known work a row that is alike, `NO_ROW` where there is none.

    `is_known` tells which rows' work, `num_bytes`, is exact.
    """
    found = np.full(len(kernels), NO_ROW, dtype=np.int64)
    # A collective takes as long as the others make it wait, with a message of any size.
    tells = (kernels["grid"].notna() & (kernels["kind"] != "collective")).to_numpy()
    asked, known = np.flatnonzero(~is_known & tells), np.flatnonzero(is_known & tells)
    if not len(asked) or not len(known):
        return found
    codes = pd.DataFrame({c: kernels[c].cat.codes.to_numpy() for c in _KEY})
    key = codes.groupby(list(_KEY), sort=False).ngroup().to_numpy()
    duration = np.minimum(kernels["duration_ns"].to_numpy(dtype=np.int64), _LONGEST_NS // 4)
    # One number orders by kernel and grid first, by time second.
    place = key * _LONGEST_NS + duration
    known = known[np.argsort(place[known], kind="stable")]
    reach_ns = np.maximum((SAME_TIME * duration[asked]).astype(np.int64), SAME_TIME_NS)
    shortest = place[asked] - np.minimum(reach_ns, duration[asked])
    low = np.searchsorted(place[known], shortest, side="left")
    high = np.searchsorted(place[known], place[asked] + reach_ns, side="right")
    has_near = low < high
    asked, low, last = asked[has_near], low[has_near], high[has_near] - 1
    change = _changes(num_bytes[known])
    has_like = change[low] == change[last]
    asked, low, last = asked[has_like], low[has_like], last[has_like]
    after = np.clip(np.searchsorted(place[known], place[asked]), low, last)
    before = np.maximum(after - 1, low)
    is_before = place[asked] - place[known[before]] < np.abs(place[known[after]] - place[asked])
    found[asked] = known[np.where(is_before, before, after)]
    return found


def _changes(values: np.ndarray) -> np.ndarray:
    """Count for each value how often two neighbours up to it were not about the same."""
    low, high = np.minimum(values[1:], values[:-1]), np.maximum(values[1:], values[:-1])
    return np.append(0, np.cumsum(high - low > SAME_WORK * high))


def bound_kernel(name: str, grid: str, block: str) -> Work | None:
    """Return a bound of a launch's work from its kernel's name and its blocks, or None."""
    return bound_list_kernel(name, grid) or bound_pointwise_kernel(name, grid, block)


def bound_pointwise_kernel(name: str, grid: str, block: str) -> Work | None:
    """Return the least work that a kernel of PyTorch on every element may have had, or None.

    All blocks but the last are full. Where operands have strides, inputs may repeat elements, so
    that only the result counts; else all operands have as many.
    """
    size = least_size_in_name(name)
    strided, vectorized = _STRIDED.match(name), _VECTORIZED.match(name)
    if size is None or _OF_TRUTHS.search(name):
        return None
    if strided:
        in_block, num_operands = int(strided.group(1)) * int(strided.group(2)), 1
    elif vectorized and block:
        num_threads = int(block.split(",")[0])
        in_block = num_threads * max(int(vectorized.group(1)), _LEAST_EACH)
        num_operands = int(vectorized.group(2))
    else:
        return None
    num_elements = (int(grid.split(",")[0]) - 1) * in_block + 1
    return Work(None, int(num_elements * num_operands * size), bound="at least")


def bound_list_kernel(name: str, grid: str) -> Work | None:
    """Return the most work that a kernel over lists of tensors may have had, or None.

    Every block is taken to have a full chunk, so short tensors (biases, norms) count too much:
    an upper bound, close where large tensors dominate.
    """
    lists = _NUM_LISTS.search(name)
    element_type = type_in_name(name)
    if lists is None or element_type is None or not _LIST_KERNEL.search(name):
        return None
    num_lists = int(lists.group(1))
    num_elements = int(grid.split(",")[0]) * CHUNK_ELEMENTS
    num_touched, flops_each = _touched(name, num_lists)
    # Apex keeps moments and main parameters in fp32 beside narrower ones.
    is_native = "at::native" in name
    each = SIZE_BYTES[element_type] if is_native else max(SIZE_BYTES[element_type], 4)
    num_bytes = int(num_elements * each * num_touched)
    return Work(num_elements * flops_each, num_bytes, "fp32", "at most")


def _touched(name: str, num_lists: int) -> tuple[int, int]:
    """Return how often the lists' elements move, and the FLOPs of one."""
    for pattern, num_only_read, flops in _UPDATES:
        if re.search(pattern, name):
            return 2 * num_lists - num_only_read, flops
    if re.search(r"Norm|Max", name):
        return num_lists, 1
    if "Zero" in name:
        return 1, 0
    # One list is changed in place; of more lists one takes the result or is changed.
    return 2 if num_lists == 1 else _touches_of_list_functor(name, num_lists), 1


def _touches_of_list_functor(name: str, num_lists: int) -> int:
    """Return reads and writes: the functor's arguments name how many lists it reads and where.

    PyTorch spells depth, number of read lists and place of the result at the end of a functor's
    template arguments: `BinaryOpListAlphaFunctor<float, 2, 2, 0>`.
    """
    spelled = re.search(r"Functor<[^<>]*?, (\d), (\d), (\d)>", name)
    num_read = int(spelled.group(2)) if spelled else num_lists
    return num_read + 1
