"""unfused_activation: a gated activation is computed in two passes over memory instead of one."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import fused, in_words, item_size, percent
from kprof.analyze.findings.patterns import finding_of, launch_order, matter
from kprof.analyze.findings.queries import (
    Bools,
    Int64s,
    count_steps,
    elements_of,
    is_one_of,
    per_step,
    share_of_device,
    total_ns,
    whole_of,
)
from kprof.errors import counted
from kprof.findings import Finding
from kprof.trace import Trace

# (activation, its backward operator, the library's kernel).
GATED = (
    ("aten::silu", "aten::silu_backward", "swiglu"),
    ("aten::gelu", "aten::gelu_backward", "geglu"),
)
# Between activation and product stands the other projection, perhaps split into a few kernels.
REACH = 4
REACH_BACKWARD = 9
# Accesses of the whole tensor in one pass: gate, up and their product; backward the gradient, both
# inputs, and the gradients of both.
FORWARD, BACKWARD = 3, 5


def check(trace: Trace) -> list[Finding]:
    """Find activations whose result is multiplied by a tensor of the same size."""
    found = []
    for forward, backward, swap in GATED:
        found += _find(trace, forward, backward, swap)
    return found


def _find(trace: Trace, forward: str, backward: str, swap: str) -> list[Finding]:
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], forward)
    if not anchors.any():
        return []
    is_product = is_one_of(kernels["op"], "aten::mul")
    pairs = _partners(trace, anchors, is_product, range(1, REACH + 1), 1)
    anchors = is_one_of(kernels["op"], backward)
    back = _partners(trace, anchors, is_product, range(-1, -REACH_BACKWARD - 1, -1), 2)
    rows = np.unique(np.concatenate([*pairs, *back]))
    if not len(pairs[0]) or not matter(trace, rows):
        return []
    of_pairs, of_back = (int(elements_of(trace, found[0]).sum()) for found in (pairs, back))
    num_bytes = (FORWARD * of_pairs + BACKWARD * of_back) * item_size(trace, rows)
    times = len(pairs[0]) / count_steps(trace)
    claim = (
        f"{counted(times, 'time')} in {whole_of(trace)}, {forward} writes its result to memory and "
        "a "
        "multiplication reads it again: with the backward pass "
        f"{in_words(per_step(trace, total_ns(trace, rows)))} of {whole_of(trace)}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    if not len(back[0]):
        claim = claim.replace("with the backward pass ", "")
    fix = fused(trace, rows, num_bytes, len(pairs[0]) + len(back[0]))
    return [finding_of(trace, "unfused_activation", claim, rows, fix, swap)]


def _partners(
    trace: Trace, anchors: Bools, is_product: Bools, offsets: range, most: int
) -> tuple[Int64s, Int64s]:
    """Return the anchors that have products of their size near them, and those products.

    Of each the first `most` count, in the order of the offsets.
    """
    order = launch_order(trace)
    near = anchors | is_product
    size = np.zeros(len(order), dtype=np.int64)
    size[near] = elements_of(trace, np.flatnonzero(near))
    stream = trace.kernels["stream"].to_numpy()
    at = np.flatnonzero(anchors[order])
    own, number, partners = order[at], np.zeros(len(at), dtype=np.int64), []
    for offset in offsets:
        place = at + offset
        inside = (place >= 0) & (place < len(order))
        row = order[place.clip(0, len(order) - 1)]
        alike = inside & is_product[row] & (size[row] == size[own]) & (size[own] > 0)
        alike &= (stream[row] == stream[own]) & (number < most)
        number += alike
        partners.append(row[alike])
    return own[number > 0], np.concatenate(partners)
