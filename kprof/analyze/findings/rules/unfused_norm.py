"""unfused_norm: a normalisation in operators that each move the whole tensor."""

from __future__ import annotations

import numpy as np

from kprof.analyze.findings.claims import fused, in_words, item_size, percent
from kprof.analyze.findings.patterns import finding_of, matter, with_neighbours
from kprof.analyze.findings.queries import (
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

PARTS = (
    *("aten::copy_", "aten::pow", "aten::square", "aten::mean", "aten::var", "aten::var_mean"),
    *("aten::sub", "aten::add", "aten::mul", "aten::div", "aten::rsqrt"),
)
MEANS = ("aten::mean", "aten::var", "aten::var_mean")
CENTRES = ("aten::var", "aten::var_mean", "aten::sub")
KINDS = ("elementwise", "reduction", "copy", "set", "norm")
# Before the reciprocal root: cast, power, mean, epsilon; after it: product, cast, weight, bias.
REACH = (5, 4)
# Accesses of the whole tensor: forward x and y; backward x, the gradient, and that of x.
FORWARD, BACKWARD = 2, 3


def check(trace: Trace) -> list[Finding]:
    """Find RMSNorm and LayerNorm made of single operators, with their backward passes."""
    kernels = trace.kernels
    anchors = is_one_of(kernels["op"], "aten::rsqrt")
    if not anchors.any():
        return []
    is_mean = is_one_of(kernels["op"], *MEANS)
    groups = with_neighbours(trace, anchors, is_one_of(kernels["op"], *PARTS), REACH)
    groups = groups.take(groups.have(is_mean) & (np.bincount(groups.of) > 2))
    if not groups.number:
        return []
    forward = groups.rows
    backward = backward_of(trace, forward)
    rows = np.sort(np.concatenate([forward, backward]))
    if not matter(trace, rows):
        return []
    is_centred = is_one_of(kernels["op"], *CENTRES)[forward].any()
    name = "LayerNorm" if is_centred else "RMSNorm"
    swap = "layernorm" if is_centred else "rmsnorm"
    elements = int(groups.largest(elements_of(trace, forward)).sum())
    accesses = FORWARD + (BACKWARD if len(backward) else 0)
    launches = groups.number * (3 if len(backward) else 1)
    num_bytes = accesses * elements * item_size(trace, rows)
    times, parts = groups.number / count_steps(trace), np.median(np.bincount(groups.of))
    claim = (
        f"{name} runs unfused {counted(times, 'time')} in {whole_of(trace)}, as about {parts:.0f} "
        "operators that each read and write the whole tensor: "
        f"{in_words(per_step(trace, total_ns(trace, rows)))} of {whole_of(trace)}, "
        f"{percent(share_of_device(trace, rows))} of the device time"
    )
    fix = fused(trace, rows, num_bytes, launches)
    return [finding_of(trace, "unfused_norm", claim, rows, fix, swap)]


def backward_of(trace: Trace, forward: Int64s) -> Int64s:
    """Return what runs in the backward pass of the modules that `forward` lies in, matrices apart.

    Modules that hold others are left out: what runs in them is more than the norm's.
    """
    kernels = trace.kernels
    modules = kernels["module"].cat
    mine = set(modules.codes.to_numpy()[forward].tolist()) - {-1}
    codes = modules.codes.to_numpy()
    others = set(codes[is_one_of(kernels["kind"], "gemm", "attention")].tolist())
    is_mine = np.isin(codes, list(mine - others))
    is_mine &= is_one_of(kernels["phase"], "backward") & is_one_of(kernels["kind"], *KINDS)
    return np.asarray(np.flatnonzero(is_mine), dtype=np.int64)
