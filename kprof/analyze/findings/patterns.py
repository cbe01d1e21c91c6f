"""Patterns of activities that several rules look for.

They cover neighbours on a stream, throttled clocks, decoding, the logits of a loss over a large
vocabulary, the sizes of matrix multiplications, allocations, and operators that the library has a
kernel for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kprof.analyze.capture_quality.unanswered import Unanswered
from kprof.analyze.energy import Series, around, devices_in, readings
from kprof.analyze.findings.claims import (
    idle_places,
    in_words,
    percent,
    recommend,
    work_places,
)
from kprof.analyze.findings.queries import (
    Bools,
    Int64s,
    by_shapes,
    count_host_steps,
    durations,
    elements_of,
    is_one_of,
    matches,
    per_step,
    shape_of,
    share_of_device,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.analyze.groupings import count_gpus
from kprof.analyze.idle.causes import ALLOCATOR, PINNING_CALL
from kprof.errors import three_digits
from kprof.findings import Finding, Fix
from kprof.trace import Trace


@dataclass(frozen=True)
class Groups:
    """Activities in groups: rows of `kernels`, group by group, each in the order of launches."""

    rows: Int64s
    of: Int64s
    """The group that each row is of."""
    number: int

    def have(self, chosen: Bools) -> Bools:
        """Tell which groups have at least one of the chosen rows."""
        return np.bincount(self.of, chosen[self.rows], self.number) > 0

    def take(self, wanted: Bools) -> Groups:
        """Return the wanted groups, numbered anew."""
        number = np.cumsum(wanted) - 1
        kept = wanted[self.of] if len(self.of) else np.zeros(0, dtype=bool)
        return Groups(self.rows[kept], number[self.of[kept]], int(wanted.sum()))

    def largest(self, values: Int64s) -> Int64s:
        """Return the largest of `values`, one for each row, in each group."""
        result = np.zeros(self.number, dtype=np.int64)
        np.maximum.at(result, self.of, values)
        return result


def launch_order(trace: Trace) -> Int64s:
    """Return the activities stream by stream in the order of their starts."""
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy(np.int64)
    lanes = [kernels[name].to_numpy() for name in ("stream", "device", "rank")]
    if all((lane == lane[0]).all() for lane in lanes if len(lane)):
        return np.asarray(np.argsort(start, kind="stable"), dtype=np.int64)
    return np.asarray(np.lexsort([start, *lanes]), dtype=np.int64)


def with_neighbours(trace: Trace, anchors: Bools, allowed: Bools, reach: tuple[int, int]) -> Groups:
    """Return for each anchor the activities around it: the unbroken run of allowed ones.

    It goes back by at most `reach[0]` activities of the stream and on by at most `reach[1]`, and
    stays within the anchor's module and phase. No activity belongs to two anchors.
    """
    if not anchors.any():
        return Groups(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    order = launch_order(trace)
    keys = [trace.kernels[name].cat.codes.to_numpy()[order] for name in ("module", "phase")]
    keys.append(trace.kernels["stream"].to_numpy()[order])
    at, is_allowed = np.flatnonzero(anchors[order]), allowed[order]
    places, of = [at], [np.arange(len(at))]
    for ahead, steps in ((-1, reach[0]), (1, reach[1])):
        alive = np.ones(len(at), dtype=bool)
        for step in range(1, steps + 1):
            place = at + ahead * step
            alive &= (place >= 0) & (place < len(order))
            place = place.clip(0, len(order) - 1)
            alive &= is_allowed[place]
            for key in keys:
                alive &= key[place] == key[at]
            places.append(place[alive])
            of.append(np.flatnonzero(alive))
    every, first = np.unique(np.concatenate(places), return_index=True)
    owner = np.concatenate(of)[first]
    by_group = np.argsort(owner, kind="stable")
    return Groups(order[every[by_group]], owner[by_group], len(at))


# Kernels that wait for memory do not care for the SMs' clock.
COMPUTING = ("gemm", "attention", "convolution")
NEAR_NS = 500_000_000


@dataclass(frozen=True)
class Held:
    """How the clock of a GPU was held back around the window."""

    share: float
    """Share of the samples around the window with a lowered clock."""
    mean_mhz: float | None
    most_mhz: float | None
    """The highest clock of all samples; None where none was sampled."""

    @property
    def slowdown(self) -> float:
        """The mean clock's distance to the highest, as a share; 0 where it is unknown."""
        if not self.mean_mhz or not self.most_mhz:
            return 0.0
        return max(1 - self.mean_mhz / self.most_mhz, 0.0)

    @property
    def words(self) -> str:
        """Say how fast the clock ran, or nothing where it was not sampled."""
        if not self.mean_mhz or not self.most_mhz:
            return ""
        return f", at {self.mean_mhz:,.0f} MHz on average instead of {self.most_mhz:,.0f}"


def why_no_clock(trace: Trace) -> Unanswered | None:
    """Return why it is unknown whether the clock was lowered; None where it is known."""
    if held_back(trace, 0) is not None:
        return None
    return Unanswered(
        "Was the clock held back?",
        "no sample of the GPU's clock lies near the window, or more GPUs were sampled than it used",
        "record with `kprof run`, which samples the GPU through NVML, on that GPU alone",
    )


def held_back(trace: Trace, reasons: int) -> Held | None:
    """Return how often one of `reasons`, a set of bits, held back the GPU that it did most."""
    devices = devices_in(trace.samples, "nvml")
    if len(devices) > count_gpus(trace.kernels):
        return None
    found = []
    for device in devices:
        bits = _near(trace, device, "throttle_reasons")
        if not len(bits.value):
            continue
        clock = _near(trace, device, "sm_clock_mhz").value
        every = readings(trace.samples, "nvml", "sm_clock_mhz", device).value
        share = float(((bits.value.astype(np.int64) & reasons) > 0).mean())
        mean = float(clock.mean()) if len(clock) else None
        found.append(Held(share, mean, float(every.max()) if len(every) else None))
    return max(found, key=lambda held: held.share, default=None)


def _near(trace: Trace, device: int, quantity: str) -> Series:
    """Return the readings within the window, and the nearest on either side, if they are near."""
    start = trace.kernels["start_ns"]
    begin, end = int(start.min()), int((start + trace.kernels["duration_ns"]).max())
    near = around(readings(trace.samples, "nvml", quantity, device), begin, end)
    is_near = (near.time_ns >= begin - NEAR_NS) & (near.time_ns <= end + NEAR_NS)
    return Series(near.time_ns[is_near], near.value[is_near])


def computing_rows(trace: Trace) -> Int64s:
    """Return the kernels whose speed follows the clock."""
    return np.asarray(np.flatnonzero(is_one_of(trace.kernels["kind"], *COMPUTING)), dtype=np.int64)


def at_full_clock(trace: Trace, rows: Int64s, held: Held) -> Fix:
    """Return what the rows take at the highest clock that was sampled, or nothing if unknown."""
    took = total_ns(trace, rows)
    if not held.slowdown or not took:
        return Fix()
    return Fix(best_ns=round(took * (1 - held.slowdown)), modest_ns=took)


# A batch of more sequences than this keeps tensor cores busy, and a host has time to launch.
MOST_ROWS = 64
LEAST_THIN_SHARE = 0.5
FEW = 8


def is_decoding(trace: Trace) -> bool:
    """Tell whether most products are of a few rows, with no backward pass."""
    kernels = trace.kernels
    if is_one_of(kernels["phase"], "backward", "optimizer").any():
        return False
    products = np.flatnonzero(is_one_of(kernels["op"], "aten::mm", "aten::addmm", "aten::linear"))
    if len(products) < FEW:
        return False
    return bool(_is_thin(trace, products).mean() >= LEAST_THIN_SHARE)


def _is_thin(trace: Trace, products: np.ndarray) -> Bools:
    """Tell which products have few rows on their left side."""
    rows = by_shapes(trace, products, lambda shapes: [rows_of_product(shapes)], 1)[:, 0]
    return np.asarray((rows > 0) & (rows <= MOST_ROWS))


def rows_of_product(shapes: list[object]) -> int:
    """Return the rows of a product's left side from the shapes of its inputs; 0 where unknown."""
    matrices = [shape for shape in map(shape_of, shapes) if len(shape) >= 2]
    # In addmm the bias may come first as a matrix; the two factors come last.
    return math.prod(matrices[-2][:-1]) if len(matrices) >= 2 else 0


ANCHORS = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
LOSSES = ("aten::nll_loss*", "aten::cross_entropy*")
PARTS = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::mul", "aten::div", *LOSSES, *ANCHORS)
# Casts, labels and the loss itself stand between.
REACH = (4, 4)
# Smaller ones stay in a cache and cost nothing worth naming.
LEAST_ELEMENTS = 4_000_000


def rows_of_logits(trace: Trace) -> tuple[Int64s, int, int]:
    """Return what passes over the logits of a loss, their number, and the elements of the largest.

    Empty where no loss follows the softmax, or the logits are few.
    """
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], *ANCHORS)
    nothing = np.zeros(0, dtype=np.int64)
    if not anchors.any() or not is_one_of(kernels["op"], *LOSSES).any():
        return nothing, 0, 0
    rows = with_neighbours(trace, anchors, is_one_of(kernels["op"], *PARTS), REACH).rows
    elements = elements_of(trace, rows)
    largest = int(elements[anchors[rows]].max(initial=0))
    if largest < LEAST_ELEMENTS:
        return nothing, 0, 0
    # Chunked losses have smaller parts: what is a tenth of the largest still is of the logits.
    is_logits = elements >= largest / 10
    is_loss = is_one_of(kernels["op"], *LOSSES)[rows]
    number = int((anchors[rows] & is_logits).sum())
    return np.sort(rows[is_logits | is_loss]), number, largest


# Share of the tensor core peak that large GEMMs and attention reach.
WELL = 0.7
OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


@dataclass(frozen=True)
class Products:
    """Rows of `kernels` that multiply matrices of known sizes: (batch of) M x K times K x N."""

    rows: Int64s
    batch: Int64s
    m: Int64s
    n: Int64s
    k: Int64s
    is_transposed: Bools
    """Whether the left matrix lies in memory by columns: its rows there have M elements."""


def find_products(trace: Trace) -> Products:
    """Return the products whose sizes were recorded; what else operators launch is left out."""
    kernels = trace.kernels
    is_product = is_one_of(kernels["kind"], "gemm") & is_one_of(kernels["op"], *OPERATORS)
    rows = np.flatnonzero(is_product)
    sizes = by_shapes(trace, rows, _sizes, 4)
    known = sizes.all(axis=1)
    strides = by_shapes(trace, rows[known], _left_strides, 2, column="input_strides")
    is_transposed = (strides[:, 0] == 1) & (strides[:, 1] > 1)
    batch, m, n, k = sizes[known].T
    return Products(rows[known], batch, m, n, k, is_transposed)


def in_type_ns(trace: Trace, rows: Int64s, now: str, then: str, *, bytes_share: float = 1) -> int:
    """Return how long rows of type `now` take in type `then`, but for what memory takes, in ns.

    `bytes_share`: of the bytes that they move now. What has no known work takes as much less as
    the peak of `then` is higher.
    """
    device, took = trace.meta.device, durations(trace)[rows]
    assert device is not None
    flops, num_bytes = (
        trace.kernels[name].to_numpy(float, na_value=np.nan)[rows] for name in ("flops", "bytes")
    )
    rate = device.flops_per_s[then]
    compute = flops / (WELL * rate) * 1e9
    compute = np.where(~(flops > 0), took * device.flops_per_s.get(now, rate) / rate, compute)
    memory = np.nan_to_num(num_bytes) * bytes_share / device.memory_bytes_per_s * 1e9
    return int(np.minimum(np.maximum(compute, memory), took).sum())


def _left_strides(strides: list[object]) -> tuple[int, int]:
    """Return the last two strides of the left matrix; zeros where they do not tell."""
    matrices = [stride for stride in map(shape_of, strides) if len(stride) in (2, 3)]
    # Before the two factors addmm has its bias; behind them a scaled product has its scales.
    if len(matrices) not in (2, 3):
        return 0, 0
    return matrices[-2][-2], matrices[-2][-1]


def _sizes(shapes: list[object]) -> tuple[int, int, int, int]:
    """Return batch, M, N and K; zeros where the shapes do not tell."""
    matrices = [shape for shape in map(shape_of, shapes) if len(shape) in (2, 3)]
    # In addmm the bias may come first as a matrix; in a scaled GEMM scales come last.
    pairs = [(a, b) for a, b in pairwise(matrices) if a[-1] == b[-2]]
    if not pairs:
        return 0, 0, 0, 0
    left, right = pairs[-1]
    return math.prod(left[:-2]), left[-2], right[-1], left[-1]


# Of what a fix gains at best: what a modest success gains. For loaders, allocations, graphs and
# types of products, the truth was at least 0.86 of the upper end in 14 real runs, and 0.69 in 48
# simulated ones.
MODEST = 2 / 3


# Below this share of the device time even a perfect kernel saves less than a run varies.
LEAST_SHARE = 0.01


def matter(trace: Trace, rows: Int64s) -> bool:
    """Tell whether a kernel in the place of these rows could be felt."""
    return share_of_device(trace, rows) >= LEAST_SHARE


def finding_of(trace: Trace, rule: str, claim: str, rows: Int64s, fix: Fix, swap: str) -> Finding:
    """Return a rule's finding that the library's kernel `swap` would do what these rows do."""
    kernel = recommend(trace, swap)
    return Finding(
        rule=rule,
        claim=claim,
        confidence="high",
        effort=kernel.effort,
        rows=tuple(rows.tolist()),
        details=work_places(trace, rows),
        fix=fix,
        swap=kernel.swap,
        dry_run=kernel.dry_run,
        command=kernel.command,
    )


def in_pinned_memory(trace: Trace, idle_rows: Int64s) -> Bools:
    """Tell which pieces of idle time lie behind an allocation of pinned memory of the host."""
    calls = trace.idle["evidence_row"].to_numpy(np.int64, na_value=-1)[idle_rows]
    is_pinning = np.append(matches(trace.ranges["name"], PINNING_CALL), False)
    return np.asarray(is_pinning[calls])


def of_allocations(trace: Trace, rule: str, idle_rows: Int64s, command: str = "") -> list[Finding]:
    """Return a rule's finding about these pieces of idle time behind allocations, if they matter.

    After a warm-up a program asks for no memory; a hundredth of the step is a habit.
    """
    lost_ns = int(trace.idle["duration_ns"].to_numpy(np.int64)[idle_rows].sum())
    share = share_of_whole(trace, lost_ns)
    if share < LEAST_SHARE:
        return []
    calls = np.unique(trace.idle["evidence_row"].iloc[idle_rows].dropna().to_numpy(np.int64))
    names = trace.ranges["name"].iloc[calls].astype(str).value_counts()
    steps = count_host_steps(trace)
    said = ", ".join(f"{three_digits(n / steps)} {name}" for name, n in names.head(3).items())
    claim = (
        f"In {whole_of(trace)} the driver is asked for memory ({said}), and the GPU idles for "
        f"{in_words(per_step(trace, lost_ns))} ({percent(share)} of {whole_of(trace)})"
    )
    return [
        Finding(
            rule=rule,
            claim=claim,
            confidence="high",
            effort="low",
            idle_rows=tuple(idle_rows.tolist()),
            range_rows=tuple(calls.tolist()),
            details=idle_places(trace, idle_rows),
            fix=Fix(idle_cause=ALLOCATOR),
            command=command,
        )
    ]
