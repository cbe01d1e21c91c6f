"""math_attention: attention writes its whole matrix of scores to memory."""

from __future__ import annotations

import numpy as np

from kprof.analyze.attribution.call_tree import NO_ROW, is_node, made_by, nearest
from kprof.analyze.findings.claims import in_words, percent, proof_by_copy, work_places
from kprof.analyze.findings.patterns import Groups, with_neighbours
from kprof.analyze.findings.queries import (
    Bools,
    Int64s,
    by_shapes,
    count_steps,
    durations,
    elements_of,
    inside_op,
    is_one_of,
    per_step,
    shape_of,
    share_of_device,
    total_ns,
    whole_of,
)
from kprof.errors import counted
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Below this share of the device time another attention saves less than a run varies.
LEAST_SHARE = 0.02
MATH = "aten::_scaled_dot_product_attention_math*"
SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data")
# Products of single matrices belong to layers; those of batches to attention.
PRODUCTS = ("aten::bmm", "aten::baddbmm")
BETWEEN = ("elementwise", "copy", "random", "set", "reduction")
REACH = (6, 6)
# Share of its type's peak that flash attention reaches: at best; backward or with short rows.
WELL, MODESTLY = 0.7, 0.35


def check(trace: Trace) -> list[Finding]:
    """Find softmaxes between two products of batches, and torch's own fallback for attention."""
    anchors = is_one_of(trace.kernels["op"], *SOFTMAX)
    rows = unfused_attention(trace)
    if not len(rows) or share_of_device(trace, rows) < LEAST_SHARE:
        return []
    scores = _largest_scores(trace, rows[anchors[rows]])
    claim = (
        f"Attention writes its score matrix{scores} to memory: "
        f"{counted(len(rows) / count_steps(trace), 'launch', 'launches')} of {whole_of(trace)}, "
        f"{in_words(per_step(trace, total_ns(trace, rows)))}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    return [
        Finding(
            rule="math_attention",
            claim=claim,
            confidence="high",
            effort="medium",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            fix=_fix(trace, rows, int(anchors[rows].sum())),
            command=proof_by_copy(trace, "flash"),
        )
    ]


def unfused_attention(trace: Trace) -> Int64s:
    """Return the rows of attention that is computed with its matrix of scores in memory."""
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], *SOFTMAX)
    is_product = is_one_of(kernels["op"], *PRODUCTS)
    rows = np.flatnonzero(inside_op(trace, MATH) | _backward_of(trace, MATH))
    if anchors.any() and is_product.any():
        parts = anchors | is_product | is_one_of(kernels["kind"], *BETWEEN)
        between = _between_products(with_neighbours(trace, anchors, parts, REACH), is_product)
        rows = np.union1d(rows, between)
    return rows


def _backward_of(trace: Trace, *names: str) -> Bools:
    """Tell which activities autograd launched for what operators of these names did."""
    ranges = trace.ranges
    nothing = np.zeros(len(trace.kernels), dtype=bool)
    if not len(ranges) or not (wanted := is_one_of(ranges["name"], *names)).any():
        return nothing
    nodes = is_node(ranges)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NO_ROW)
    is_theirs = nodes & (nearest(made_by(ranges, nodes), parent, wanted) != NO_ROW)
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    return np.asarray(nearest(op, parent, is_theirs) != NO_ROW)


def _between_products(groups: Groups, is_product: Bools) -> Int64s:
    """Return of each group with two products what runs from the first of them to the last."""
    at = np.flatnonzero(is_product[groups.rows])
    first = np.full(groups.number, len(groups.rows), dtype=np.int64)
    last = np.full(groups.number, -1, dtype=np.int64)
    np.minimum.at(first, groups.of[at], at)
    np.maximum.at(last, groups.of[at], at)
    place = np.arange(len(groups.rows))
    inside = (place >= first[groups.of]) & (place <= last[groups.of])
    return np.asarray(groups.rows[inside & (first < last)[groups.of]])


def _largest_scores(trace: Trace, softmaxes: Int64s) -> str:
    """Return the shape of the largest scores in words, or nothing where it was not recorded."""
    elements = elements_of(trace, softmaxes)
    if not elements.any():
        return ""
    sizes = by_shapes(trace, softmaxes[[int(elements.argmax())]], _last_dimensions, 4)[0]
    return f", {' x '.join(f'{n:,}' for n in sizes.tolist() if n)},"


def _last_dimensions(shapes: list[object]) -> list[int]:
    first = shape_of(shapes[0])[-4:] if shapes else ()
    return [0] * (4 - len(first)) + list(first)


def _fix(trace: Trace, rows: np.ndarray, launches: int) -> Fix:
    """Return what the products' operations take in one kernel, at what such kernels reach."""
    took, device = total_ns(trace, rows), trace.meta.device
    of_each = trace.kernels["flops"].to_numpy(np.int64, na_value=0)
    flops = of_each[rows].sum()
    if not flops:
        return Fix(best_ns=0, modest_ns=took, launches=launches)
    if device is None:
        # No peak is known: at best all of it is as fast as the fastest GEMM of the recording.
        rate = float((of_each / np.maximum(durations(trace), 1)).max())
        return Fix(best_ns=min(round(flops / rate), took), modest_ns=took, launches=launches)
    peak = device.flops_per_s.get(_main_type(trace, rows)) or max(device.flops_per_s.values())
    best, modest = (min(round(flops / (share * peak) * 1e9), took) for share in (WELL, MODESTLY))
    return Fix(best_ns=best, modest_ns=modest, launches=launches)


def _main_type(trace: Trace, rows: np.ndarray) -> str:
    """Return the type that another attention would compute in: 16 bits where any row has those.

    Torch's fallback computes in float32 what comes in 16 bits, so that most rows are of float32.
    """
    types = trace.kernels["dtype"].iloc[rows].dropna().astype(str)
    half = types[types.isin(["bf16", "fp16"])]
    common = (half if len(half) else types).mode()
    return str(common.iloc[0]) if len(common) else "bf16"
