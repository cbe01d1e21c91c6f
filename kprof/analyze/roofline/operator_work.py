"""The work of operators, each given to the operator that carries it.

The carrier is the innermost operator around the launch whose work is known, or the nearest
enclosing one. Nested operators must not count the same work twice: `aten::addmm` carries it, and
the `aten::linear` around it carries none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW, holding, nearest
from kprof.analyze.element_type import SIZE_BYTES, size_in_name
from kprof.analyze.work import Bound, Inputs, Model, Work, may_repeat, parse_inputs, written_by
from kprof.analyze.work.triton import hand_written
from kprof.errors import modules_in
from kprof.trace import Trace

_NUMBER = re.compile(r"(_\d+)?")
_COLLECTIVE, _ANNOTATION = "record_param_comms", "nccl:"


def described_by(ranges: pd.DataFrame) -> np.ndarray:
    """Return for each range the one that tells its arguments: mostly itself.

    Before PyTorch recorded the messages of collectives, only an annotation inside the operator
    told their shapes.
    """
    described = np.arange(len(ranges))
    names = ranges["name"].cat
    code = names.codes.to_numpy()
    is_collective = np.asarray(names.categories == _COLLECTIVE)
    is_annotation = np.array([str(n).startswith(_ANNOTATION) for n in names.categories], bool)
    rows = np.flatnonzero(is_annotation[code])
    around = ranges["parent"].to_numpy(np.int64, na_value=NO_ROW)[rows]
    tells = ranges["input_shapes"].notna().to_numpy()[rows] & (around != NO_ROW)
    is_silent = is_collective[code[around]] & ranges["message"].isna().to_numpy()[around]
    described[around[tells & is_silent]] = rows[tells & is_silent]
    return described


def has_list(ranges: pd.DataFrame) -> np.ndarray:
    """Tell which operators were given lists of tensors, whose types are not recorded."""
    column = ranges["input_dtypes"].cat
    of_category = np.array(["TensorList" in str(t) for t in column.categories] + [False])
    return np.asarray(of_category[column.codes.to_numpy()])


def element_sizes(trace: Trace, op_row: np.ndarray) -> np.ndarray:
    """Return for each range the size of an element as its first kernel's name tells it, else 0."""
    names = trace.kernels["name"].cat
    of_category = np.array([size_in_name(str(n)) or 0.0 for n in names.categories] + [0.0])
    size = of_category[names.codes.to_numpy()]
    told = np.flatnonzero((op_row != NO_ROW) & (size > 0) & (trace.kernels["activity"] == "kernel"))
    sizes = np.zeros(len(trace.ranges))
    sizes[op_row[told][::-1]] = size[told][::-1]
    return sizes


def is_kernels_name(trace: Trace, op_row: np.ndarray) -> np.ndarray:
    """Tell which operators are named after a kernel that they launched, as those in Triton are.

    Compilers may number the launches: `scale_kernel_0` launches `scale_kernel`.
    """
    launched = np.flatnonzero((op_row != NO_ROW) & (trace.kernels["activity"] == "kernel"))
    kernels, operators = trace.kernels["name"].cat, trace.ranges["name"].cat
    num_operators = len(operators.categories)
    kernel = kernels.codes.to_numpy()[launched].astype(np.int64)
    pair = kernel * num_operators + operators.codes.to_numpy()[op_row[launched]]
    same = [
        number
        for number in np.unique(pair).tolist()
        if _is_launch_of(
            str(operators.categories[number % num_operators]),
            str(kernels.categories[number // num_operators]),
        )
    ]
    is_named = np.zeros(len(trace.ranges), dtype=bool)
    is_named[op_row[launched[np.isin(pair, same)]]] = True
    return is_named


def _is_launch_of(operator: str, kernel: str) -> bool:
    return operator.startswith(kernel) and bool(_NUMBER.fullmatch(operator, len(kernel)))


# A product inside a product does the outer one's work; filling a buffer inside it does not.
HEAVY_FAMILIES = frozenset(
    {
        "attention",
        "convolution",
        "experts",
        "gemm",
        "packed_attention",
        "quantized_gemm",
        "recurrent",
    }
)
# A device activity that such an operator launched is not explained by it.
HOST_FAMILIES = frozenset({"view"})
# What it has done element by element comes before or after its own work: the backward pass of a
# softmax multiplies first, a safe softmax looks for infinities.
BETWEEN_FAMILIES = frozenset({"softmax"})
PREPARING_FAMILIES = frozenset({"copy", "offsets", "view"})

# What a model meets in a record that does not fit its operator (another version's arguments).
_MISFITS = (ArithmeticError, LookupError, TypeError, ValueError)

DTYPES = tuple(SIZE_BYTES)
WORK_BOUNDS: tuple[Bound, ...] = get_args(Bound)

_SIGNATURE = ("name", "input_shapes", "input_dtypes", "input_strides", "input_values", "message")
_MAX_COUNT = 2**62
_PREPARING, _USUAL = 0, 1


@dataclass(frozen=True)
class OperatorWork:
    """Work of operators, and the carrier of each activity's work."""

    carrier: np.ndarray
    """Row in `ranges` for each row of `kernels`, `NO_ROW` where no work is known."""
    flops: np.ndarray
    """For each row of `ranges`, meaningful where `has_flops`."""
    has_flops: np.ndarray
    bytes: np.ndarray
    written: np.ndarray
    """How many of the bytes are written, the others are read."""
    may_repeat: np.ndarray
    """How many of those read are none if operands that look alike are one tensor."""
    dtype: np.ndarray
    """Place in `DTYPES` of the type whose peak limits the FLOPs, -1 for none."""
    bound: np.ndarray
    """Place in `WORK_BOUNDS`, -1 where the work is exact."""


@lru_cache(maxsize=1)
def _families() -> tuple[dict[str, tuple[str, Model]], dict[str, tuple[str, Model]]]:
    """Return (family, model) by operator name, and by the beginning of a name."""
    by_name: dict[str, tuple[str, Model]] = {}
    by_prefix: dict[str, tuple[str, Model]] = {}
    for module in modules_in("kprof.analyze.work"):
        family = module.__name__.rpartition(".")[2]
        by_name |= {n: (family, model) for n, model in getattr(module, "MODELS", {}).items()}
        by_prefix |= {p: (family, model) for p, model in getattr(module, "PREFIXES", {}).items()}
    return by_name, by_prefix


def find_model(name: str) -> tuple[str, Model] | None:
    """Return the family and the work model of an operator, or None."""
    by_name, by_prefix = _families()
    found = by_name.get(name)
    if found is None:
        found = next((f for prefix, f in by_prefix.items() if name.startswith(prefix)), None)
    return found


def find_work(trace: Trace) -> OperatorWork:
    """Return the known work of all operators that launched something."""
    ranges = trace.ranges
    op_row = trace.kernels["op_row"].fillna(NO_ROW).to_numpy(dtype=np.int64)
    is_used = np.zeros(len(ranges), dtype=bool)
    is_used[op_row[op_row != NO_ROW]] = True
    used = np.flatnonzero(is_used)
    parent = _op_parents(ranges)
    asked = np.flatnonzero(holding(used, parent))
    families, works, work_of = _evaluate(trace, asked, op_row)

    has_work = np.zeros(len(ranges), dtype=bool)
    has_work[asked] = np.array([w is not None for w in works], dtype=bool)[work_of]
    family = np.full(len(ranges), NO_ROW, dtype=np.int16)
    family_names = sorted({f for f in families if f is not None})
    code_of = {f: i for i, f in enumerate(family_names)}
    family[asked] = np.array([NO_ROW if f is None else code_of[f] for f in families])[work_of]
    is_bound = np.zeros(len(ranges), dtype=bool)
    is_bound[asked] = np.array([w is not None and w.bound is not None for w in works])[work_of]
    has_work &= ~_yields(asked, parent, has_work, family, is_bound)
    carrier_of_used = nearest(used, parent, has_work)
    displaced = _displaced(carrier_of_used, parent, has_work, family, family_names)
    kept = (carrier_of_used != NO_ROW) & ~displaced[carrier_of_used]
    carrier_of_used = np.where(kept, carrier_of_used, NO_ROW)
    carrier = np.full(len(op_row), NO_ROW, dtype=np.int64)
    launched = op_row != NO_ROW
    if len(used):
        carrier[launched] = carrier_of_used[np.searchsorted(used, op_row[launched])]
    return _collect(carrier, len(ranges), asked, works, work_of)


def _op_parents(ranges: pd.DataFrame) -> np.ndarray:
    """Return the enclosing operator's row where the enclosing range is an operator."""
    parent = ranges["parent"].fillna(NO_ROW).to_numpy(dtype=np.int64)
    is_op = (ranges["kind"] == "op").to_numpy(dtype=bool)
    inside_op = (parent != NO_ROW) & is_op[parent] if len(parent) else parent.astype(bool)
    return np.where(inside_op, parent, NO_ROW)


def _evaluate(
    trace: Trace, rows: np.ndarray, op_row: np.ndarray
) -> tuple[list[str | None], list[Work | None], np.ndarray]:
    """Return family and work of each distinct call, and for each of `rows` which call it is."""
    ranges = trace.ranges
    described = described_by(ranges)[rows]
    keys = pd.DataFrame({c: ranges[c].cat.codes.to_numpy()[described] for c in _SIGNATURE})
    sizes = element_sizes(trace, op_row)
    keys["element_bytes"] = np.where(has_list(ranges)[rows], sizes[rows], 0.0)
    keys["is_kernels_name"] = is_kernels_name(trace, op_row)[rows]
    group = keys.groupby(list(keys.columns), sort=False).ngroup().to_numpy()
    _, first = np.unique(group, return_index=True)
    texts = {c: [*ranges[c].cat.categories, None] for c in _SIGNATURE}
    families: list[str | None] = []
    works: list[Work | None] = []
    for record in keys.iloc[first].itertuples(index=False):
        *codes, element_bytes, named = record
        name, *arguments = (texts[c][code] for c, code in zip(_SIGNATURE, codes, strict=True))
        found = find_model(str(name)) or (("triton", hand_written) if named else None)
        if found and found[0] in HOST_FAMILIES and not trace.is_host_only:
            found = None
        families.append(found[0] if found else None)
        works.append(_work(found[1], arguments, element_bytes or None) if found else None)
    return families, works, group


def _work(
    model: Callable[[Inputs], Work | None], arguments: list[str | None], element_bytes: float | None
) -> Work | None:
    """Return what `model` says of the recorded arguments, None where they do not fit it."""
    shapes, dtypes, strides, values, message = arguments
    if message is None and (shapes is None or dtypes is None):
        return None
    given = shapes or "[]", dtypes or "[]", strides, values, element_bytes, message
    try:
        inputs = parse_inputs(*given)
        work = model(inputs)
    except _MISFITS:
        return None
    if work is None or not 0 <= work.bytes < _MAX_COUNT or not 0 <= (work.flops or 0) < _MAX_COUNT:
        return None
    written = min(written_by(work, inputs), work.bytes)
    return replace(work, written=written, may_repeat=may_repeat(work, inputs))


def _yields(
    asked: np.ndarray,
    parent: np.ndarray,
    has_work: np.ndarray,
    family: np.ndarray,
    is_bound: np.ndarray,
) -> np.ndarray:
    """Tell which operators know only a bound of what the one around them knows exactly."""
    yields = np.zeros(len(parent), dtype=bool)
    inner = asked[is_bound[asked]]
    around = nearest(parent[inner], parent, has_work)
    inner, around = inner[around != NO_ROW], around[around != NO_ROW]
    yields[inner] = ~is_bound[around] & (family[around] == family[inner])
    return yields


def _displaced(
    carriers: np.ndarray,
    parent: np.ndarray,
    has_work: np.ndarray,
    family: np.ndarray,
    family_names: list[str],
) -> np.ndarray:
    """Tell which operators' work is done by another carrier inside them.

    A heavy operator is displaced by a heavy one only: what adds up a bias gradient inside a
    convolution's backward is not the convolution. Preparation displaces nothing.
    """
    weight = np.array([_weight(f) for f in family_names] + [_USUAL])[family]
    displaced, carries = np.zeros((2, len(parent)), dtype=bool)
    carries[carriers[carriers != NO_ROW]] = True
    inner = np.flatnonzero(carries)
    outer = parent[inner]
    while len(inner := inner[outer != NO_ROW]):
        outer = outer[outer != NO_ROW]
        replaces = (weight[inner] >= weight[outer]) & (weight[inner] > _PREPARING)
        displaced[outer[replaces & has_work[outer]]] = True
        outer = parent[outer]
    return displaced


def _weight(family: str) -> int:
    """Return how much of the work around it an operator of a family does."""
    if family in PREPARING_FAMILIES:
        return _PREPARING
    return _USUAL + (family in BETWEEN_FAMILIES) + 2 * (family in HEAVY_FAMILIES)


def _collect(
    carrier: np.ndarray,
    num_ranges: int,
    asked: np.ndarray,
    works: list[Work | None],
    work_of: np.ndarray,
) -> OperatorWork:
    """Spread the work of distinct calls over the rows of `ranges`."""
    known = [w or Work(None, 0) for w in works]
    flops, num_bytes, written, repeat = (np.zeros(num_ranges, np.int64) for _ in range(4))
    has_flops = np.zeros(num_ranges, dtype=bool)
    dtype = np.full(num_ranges, -1, dtype=np.int8)
    bound = np.full(num_ranges, -1, dtype=np.int8)
    if len(asked):
        flops[asked] = np.array([w.flops or 0 for w in known], dtype=np.int64)[work_of]
        num_bytes[asked] = np.array([w.bytes for w in known], dtype=np.int64)[work_of]
        has_flops[asked] = np.array([w.flops is not None for w in known], dtype=bool)[work_of]
        written[asked] = np.array([w.written or 0 for w in known], dtype=np.int64)[work_of]
        repeat[asked] = np.array([w.may_repeat for w in known], dtype=np.int64)[work_of]
        codes = [DTYPES.index(w.dtype) if w.dtype else -1 for w in known]
        dtype[asked] = np.array(codes, dtype=np.int8)[work_of]
        bounds = [WORK_BOUNDS.index(w.bound) if w.bound else -1 for w in known]
        bound[asked] = np.array(bounds, dtype=np.int8)[work_of]
    return OperatorWork(carrier, flops, has_flops, num_bytes, written, repeat, dtype, bound)
