"""unfused_activation: an activation takes more passes over memory than one kernel would.

Another projection is multiplied in by a pass of its own; or the activation is written out as
several operators; or its gradient is read once more for the gradient of a bias.
"""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import fused, in_words, item_size, percent
from kprof.analyze.findings.patterns import (
    Groups,
    finding_of,
    launch_order,
    matter,
    with_neighbours,
)
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


Sequences = tuple[tuple[tuple[str, ...], ...], ...]
MUL, SCALE, ADD = ("aten::mul",), ("aten::mul", "aten::div"), ("aten::add",)
RELU = ("aten::relu", "aten::clamp_min")
# Operators of an activation that is written out, one after the other, by the library's kernel. A
# tanh that caps logits is multiplied; one is added to that of a GELU.
WRITTEN_OUT: dict[str, Sequences] = {
    "gelu": (
        (SCALE, ("aten::tanh", "aten::erf"), ADD, MUL),
        (SCALE, ("aten::sigmoid",), MUL),
    ),
    "relu_squared": ((RELU, ("aten::pow",)),),
}
WRITTEN_OUT_BACKWARD: dict[str, Sequences] = {
    "gelu": (
        (MUL, ("aten::tanh_backward", "aten::sigmoid_backward"), SCALE),
        (("aten::neg",), ("aten::exp",), MUL),
    ),
    "relu_squared": ((MUL, ("aten::threshold_backward",)),),
}
PARTS = (
    *("aten::add", "aten::add_", "aten::copy_", "aten::div", "aten::mul", "aten::neg"),
    *("aten::pow", "aten::exp", "aten::tanh*", "aten::erf", "aten::sigmoid*", *RELU),
    "aten::threshold_backward",
)
# Before a GELU's last factor within the tanh: scale, cast, power, factor, sum. Behind it: tanh, sum
# and two factors.
REACH_ALONE = (5, 4)
REACH_ALONE_BACKWARD = (4, 13)
# Accesses of the whole tensor in one pass: x and y; backward the gradient, x, and its gradient.
FORWARD_ALONE, BACKWARD_ALONE = 2, 3
# Between the gradients of a linear layer's result and of its bias stand two GEMMs, each perhaps
# split into a few kernels.
REACH_BIAS = 5


def check(trace: Trace) -> list[Finding]:
    """Find activations whose passes over memory a kernel would join."""
    found, is_taken = [], np.zeros(len(trace.kernels), dtype=bool)
    for forward, backward, swap in GATED:
        found += _find(trace, forward, backward, swap)
    for kernel in WRITTEN_OUT:
        found += _find_written_out(trace, kernel)
    for one in found:
        is_taken[list(one.rows)] = True
    return found + _find_before_bias(trace, is_taken)


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
        f"a multiplication reads it again: {'with the backward pass ' if len(back[0]) else ''}"
        f"{_cost(trace, rows)}"
    )
    fix = fused(trace, rows, num_bytes, len(pairs[0]) + len(back[0]))
    return [finding_of(trace, "unfused_activation", claim, rows, fix, swap)]


def _find_written_out(trace: Trace, kernel: str) -> list[Finding]:
    """Find activations of several operators, with their backward passes."""
    forward = _runs(trace, WRITTEN_OUT[kernel], REACH_ALONE)
    if not forward.number:
        return []
    backward = _runs(trace, WRITTEN_OUT_BACKWARD[kernel], REACH_ALONE_BACKWARD)
    modules = trace.kernels["module"].cat.codes.to_numpy()
    backward = backward.take(backward.have(np.isin(modules, np.unique(modules[forward.rows]))))
    rows = np.sort(np.concatenate([forward.rows, backward.rows]))
    if not matter(trace, rows):
        return []
    elements, elements_back = (
        int(one.largest(elements_of(trace, one.rows)).sum()) for one in (forward, backward)
    )
    accesses = FORWARD_ALONE * elements + BACKWARD_ALONE * elements_back
    claim = (
        f"{counted(forward.number / count_steps(trace), 'time')} in {whole_of(trace)}, an "
        f"activation is written out as about {np.median(np.bincount(forward.of)):.0f} operators "
        f"that each read and write the whole tensor: {_cost(trace, rows)}"
    )
    launches = forward.number + backward.number
    fix = fused(trace, rows, accesses * item_size(trace, rows), launches)
    return [finding_of(trace, "unfused_activation", claim, rows, fix, kernel)]


def _runs(trace: Trace, sequences: Sequences, reach: tuple[int, int]) -> Groups:
    """Return the operators around each sequence, of those that pass over tensors of its size."""
    op, order = trace.kernels["op"], launch_order(trace)
    begins = np.zeros(len(order), dtype=bool)
    for sequence in sequences:
        number = max(len(order) - len(sequence) + 1, 0)
        is_there = np.ones(number, dtype=bool)
        for at, names in enumerate(sequence):
            is_there &= is_one_of(op, *names)[order[at : at + number]]
        rows = order[np.flatnonzero(is_there)[:, None] + np.arange(len(sequence))]
        size = elements_of(trace, rows.ravel()).reshape(rows.shape)
        begins[rows[(size == size[:, :1]).all(axis=1) & (size[:, 0] > 0), 0]] = True
    groups = with_neighbours(trace, begins, is_one_of(op, *PARTS), reach)
    size = elements_of(trace, groups.rows)
    is_alike = size == groups.largest(size * begins[groups.rows])[groups.of]
    return Groups(groups.rows[is_alike], groups.of[is_alike], groups.number)


def _find_before_bias(trace: Trace, is_taken: Bools) -> list[Finding]:
    """Find gradients of a GELU that are read again and summed up for the gradient of a bias."""
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], "aten::gelu_backward") & ~is_taken
    is_sum = is_one_of(kernels["op"], "aten::sum") & ~is_taken
    own, sums = _partners(trace, anchors, is_sum, range(1, REACH_BIAS + 1), 1)
    rows = np.unique(np.concatenate([own, sums]))
    if not len(own) or not matter(trace, rows):
        return []
    num_bytes = BACKWARD_ALONE * int(elements_of(trace, own).sum()) * item_size(trace, rows)
    claim = (
        f"{counted(len(own) / count_steps(trace), 'time')} in {whole_of(trace)}, "
        "aten::gelu_backward writes a gradient to memory and a sum reads it again for the gradient "
        f"of a bias: {_cost(trace, rows)}"
    )
    fix = fused(trace, rows, num_bytes, 2 * len(own))
    return [finding_of(trace, "unfused_activation", claim, rows, fix, "bias_gelu")]


def _cost(trace: Trace, rows: Int64s) -> str:
    """Say what rows take of a step, and of the device time."""
    return (
        f"{in_words(per_step(trace, total_ns(trace, rows)))} of {whole_of(trace)}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )


def _partners(
    trace: Trace, anchors: Bools, is_partner: Bools, offsets: range, most: int
) -> tuple[Int64s, Int64s]:
    """Return the anchors that have partners of their size near them, and those partners.

    Of each the first `most` count, in the order of the offsets.
    """
    order = launch_order(trace)
    near = anchors | is_partner
    size = np.zeros(len(order), dtype=np.int64)
    size[near] = elements_of(trace, np.flatnonzero(near))
    stream = trace.kernels["stream"].to_numpy()
    at = np.flatnonzero(anchors[order])
    own, number, partners = order[at], np.zeros(len(at), dtype=np.int64), []
    for offset in offsets:
        place = at + offset
        inside = (place >= 0) & (place < len(order))
        row = order[place.clip(0, len(order) - 1)]
        alike = inside & is_partner[row] & (size[row] == size[own]) & (size[own] > 0)
        alike &= (stream[row] == stream[own]) & (number < most)
        number += alike
        partners.append(row[alike])
    return own[number > 0], np.concatenate(partners)
