"""gemm_shapes: products whose sizes fit neither the tensor cores' alignment nor the GPU's SMs."""

from __future__ import annotations

import re

import numpy as np

from kprof.analyze.capture_quality.unanswered import why_no_ceilings, why_no_work
from kprof.analyze.findings.claims import in_words, percent
from kprof.analyze.findings.patterns import Products, find_products
from kprof.analyze.findings.queries import (
    Int64s,
    durations,
    limits,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
    why_no_device,
)
from kprof.findings import Finding, Fix
from kprof.trace import Trace

NEEDS = (why_no_device, why_no_work, why_no_ceilings)

# Rows of a matrix must begin at multiples of 16 bytes for the fast loads of tensor cores.
ALIGNMENT_BYTES = 16
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "tf32": 4}
# A product that reaches three fifths of its roofline is not hurt by its shape.
REACHED = 0.6
# Below this the last wave leaves more than a quarter of the SMs idle.
LEAST_FILL = 0.75
# Below this share of the device time no shape is worth changing.
LEAST_SHARE = 0.02
WELL = 0.8
_TILE = re.compile(r"(?<![\dx])(\d{2,3})x(\d{2,3})(?:x\d+)?(?=_)")


def check(trace: Trace) -> list[Finding]:
    """Find products with sizes that are no multiples of 16 bytes, or of a fraction of a wave."""
    products = find_products(trace)
    slow = limits(trace)[products.rows] < REACHED * durations(trace)[products.rows]
    found = []
    unaligned = slow & is_unaligned(trace, products)
    if share_of_device(trace, products.rows[unaligned]) >= LEAST_SHARE:
        found.append(_unaligned(trace, products, unaligned))
    fill = wave_fill(trace, products)
    partial = slow & ~unaligned & (fill < LEAST_FILL)
    if share_of_device(trace, products.rows[partial]) >= LEAST_SHARE:
        found.append(_partial(trace, products, partial, fill))
    return found


def is_unaligned(trace: Trace, products: Products) -> np.ndarray:
    """Tell which products have rows that do not begin at multiples of 16 bytes."""
    types = trace.kernels["dtype"].iloc[products.rows].astype(object)
    item = np.array([ITEM_BYTES.get(str(name), ALIGNMENT_BYTES) for name in types], dtype=np.int64)
    multiple = ALIGNMENT_BYTES // np.maximum(item, 1)
    is_odd = ((products.n % multiple) != 0) | ((products.k % multiple) != 0)
    # A transposed left matrix has rows of M: of a weight's gradient, M is the layer's width.
    return np.asarray(is_odd | (products.is_transposed & ((products.m % multiple) != 0)))


def wave_fill(trace: Trace, products: Products) -> np.ndarray:
    """Return the share of the SMs that each product's tiles keep busy on average; 1 if unknown.

    Tiles are as the kernel's name says, laid whichever way leaves fewer SMs idle.
    """
    gpu = trace.gpus[0] if trace.gpus else None
    num_sms = (gpu and gpu.num_sms) or (trace.meta.device and trace.meta.device.num_sms) or 0
    fill = np.ones(len(products.rows))
    if not num_sms:
        return fill
    names = trace.kernels["name"].cat
    found = [_TILE.search(str(name)) for name in names.categories]
    sizes = np.array([(int(t[1]), int(t[2])) if t else (0, 0) for t in found]).reshape(-1, 2)
    tiles = sizes[names.codes.to_numpy()[products.rows]]
    known = tiles.min(axis=1) > 0
    best = np.zeros(int(known.sum()))
    for a, b in ((0, 1), (1, 0)):
        down = -(-products.m[known] // tiles[known, a])
        waves = products.batch[known] * down * -(-products.n[known] // tiles[known, b]) / num_sms
        best = np.maximum(best, waves / np.ceil(waves))
    fill[known] = best
    return fill


def _unaligned(trace: Trace, products: Products, chosen: np.ndarray) -> Finding:
    rows = products.rows[chosen]
    took = total_ns(trace, rows)
    claim = (
        f"GEMMs with dimensions that are not multiples of {ALIGNMENT_BYTES} bytes take "
        f"{in_words(per_step(trace, took))} of {whole_of(trace)}, "
        f"{percent(share_of_device(trace, rows))} of the device time, and reach "
        f"{percent(limits(trace)[rows].sum() / max(took, 1))} of their roofline"
    )
    limit = int(limits(trace)[rows].sum())
    fix = Fix(min(round(limit / WELL), took), min(round(limit / REACHED), took))
    return _finding(claim, rows, fix, _sizes(trace, products, chosen))


def _partial(trace: Trace, products: Products, chosen: np.ndarray, fill: np.ndarray) -> Finding:
    rows, took = products.rows[chosen], durations(trace)[products.rows[chosen]]
    mean = float((fill[chosen] * took).sum() / max(took.sum(), 1))
    claim = (
        f"GEMMs whose tiles fill {percent(mean)} of the SMs on average take "
        f"{in_words(per_step(trace, took.sum()))} of {whole_of(trace)}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    limit = limits(trace)[rows]
    best = np.maximum(limit / WELL, fill[chosen] * took)
    best_ns = int(np.minimum(best, took).sum())
    fix = Fix(best_ns, (best_ns + int(took.sum())) // 2)
    return _finding(claim, rows, fix, _sizes(trace, products, chosen))


def _finding(claim: str, rows: Int64s, fix: Fix, details: tuple[str, ...]) -> Finding:
    return Finding(
        rule="gemm_shapes",
        claim=claim,
        confidence="medium",
        effort="medium",
        rows=tuple(rows.tolist()),
        details=details,
        fix=fix,
    )


def _sizes(trace: Trace, products: Products, chosen: np.ndarray) -> tuple[str, ...]:
    """Return the sizes that take most of the time."""
    took = durations(trace)[products.rows]
    times: dict[tuple[int, int, int], int] = {}
    for i in np.flatnonzero(chosen).tolist():
        size = int(products.m[i]), int(products.n[i]), int(products.k[i])
        times[size] = times.get(size, 0) + int(took[i])
    longest = sorted(times.items(), key=lambda pair: -pair[1])[:3]
    return tuple(
        f"M {m:,}, N {n:,}, K {k:,}: {in_words(per_step(trace, ns))}" for (m, n, k), ns in longest
    )
