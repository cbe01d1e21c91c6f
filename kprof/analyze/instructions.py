"""Instructions that launches issue at least, where those rather than FLOPs keep an SM busy.

PyTorch's kernel for operands that are strided, broadcast or cast finds every element by itself: it
divides the element's number by the length of each dimension. Another converts to FP8 in software.

The counts are of machine code for compute capability 9.0, made of PyTorch's own headers
(benchmarks/count_instructions.py, benchmarks/results/instructions_sm90_*.json). They are least
ones: what the function does itself is not in them, unless it divides, nor are dimensions that only
the result's layout keeps apart.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from itertools import permutations

import numpy as np

from kprof.analyze.nesting import NO_ROW
from kprof.device import Device
from kprof.trace import Trace

_ELEMENT = 8
"""Instructions for its number, whether there is one, and branches."""
_OPERAND = 5
"""An address of 64 bits, and a load or a store."""
_DIMENSION = 10
"""A division by a magic number, a remainder, and the way out of the loop."""
_CAST = 12
"""Finding an operand's type among those of PyTorch."""
_DIVISION = 10
"""A reciprocal, its refinement, and whether that was exact."""
_TO_FP8 = 21
"""From a float; one more makes that of 16 bits."""

_COUNTED_FOR = r"\b(H20|G?H200|H100|H800)\b"
_EACH_BY_ITSELF = re.compile(
    r"elementwise_kernel<(\d+), (\d+), at::native::gpu_kernel_impl(_nocast)?<"
)
_CONVERTS = "float8_copy_kernel_cuda"
_ARGUMENTS = re.compile(r"\{lambda\(([^()]+)\)#")
# Without dimensions; a number in Python is a "double" or a "long int" there.
_TYPES_OF_TENSORS = ("float", "c10::BFloat16", "c10::Half")
_TOLD = ("input_shapes", "input_strides", "input_dtypes")


def issue_ns(trace: Trace, device: Device) -> np.ndarray:
    """Return how long each row's least instructions take at one per scheduler and clock.

    0 where nothing is known, and on GPUs for which they were not counted.
    """
    kernels, ranges = trace.kernels, trace.ranges
    fp32 = device.flops_per_s.get("fp32")
    number = np.zeros(len(kernels))
    if fp32 is None or not re.search(_COUNTED_FOR, device.name):
        return number
    names = kernels["name"].cat
    is_told = [
        bool(_EACH_BY_ITSELF.search(n) or _CONVERTS in n) for n in map(str, names.categories)
    ]
    rows = np.flatnonzero(np.array([*is_told, False])[names.codes.to_numpy()])
    op_row = kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)[rows]
    calls = kernels.iloc[rows][["name", "grid"]].astype(object).reset_index(drop=True)
    for column in _TOLD:
        calls[column] = "[]"
        told = ranges[column].iloc[op_row[op_row != NO_ROW]].astype(object).fillna("[]")
        calls.loc[op_row != NO_ROW, column] = told.to_numpy()
    for call, places in calls.groupby([*calls.columns], dropna=False).indices.items():
        number[rows[places]] = least_instructions(*map(str, call))
    # A multiply-add on each of an SM's 128 lanes is one instruction of each of its schedulers.
    return np.asarray(number * 2 / fp32 * 1e9)


def least_instructions(name: str, grid: str, shapes: str, strides: str, dtypes: str) -> int:
    """Return how many instructions all threads of a launch issue at least, 0 if not known."""
    sizes = _tensors(shapes)
    kernel = _EACH_BY_ITSELF.search(name)
    if kernel is None:
        is_fp8 = dtypes.startswith('["c10::Float8_e4m3fn"') and len(sizes) > 0
        each = _TO_FP8 + ("lambda(float)" not in name)
        return math.prod(sizes[0]) * each if is_fp8 else 0
    blocks = grid.partition(",")[0]
    threads, unrolled, is_uncast = kernel.groups()
    elements = (int(blocks) - 1) * int(threads) * int(unrolled) + 1 if blocks.isdigit() else 0
    each = instructions_each(
        operands=1 + _num_arguments(name),
        dimensions=num_dimensions(sizes, _tensors(strides)),
        # Older PyTorch has one name for both kernels; with one type there is nothing to cast.
        are_cast=not is_uncast and len(_types(sizes, json.loads(dtypes))) > 1,
        is_division="DivFunctor" in name,
    )
    return elements * each


def instructions_each(
    operands: int, dimensions: int, *, are_cast: bool = False, is_division: bool = False
) -> int:
    """Return how many instructions one element takes at least; the result is an operand, too."""
    # Constants of two operands are loaded together.
    of_dimension = _DIMENSION + operands + (operands - 1) // 2
    number = _ELEMENT + operands * _OPERAND + dimensions * of_dimension
    return number + are_cast * operands * _CAST + is_division * _DIVISION


def _tensors(text: str) -> list[list[int]]:
    """Return a recorded list of lists of integers, of which others are empty."""
    found = json.loads(text)
    given = found if isinstance(found, list) else []
    return [
        one if isinstance(one, list) and all(isinstance(n, int) for n in one) else []
        for one in given
    ]


def _types(sizes: list[list[int]], types: list[str]) -> set[str]:
    """Return the types of tensors; those of numbers, which Python made, are none."""
    named = zip(sizes, types, strict=False)
    return {name for size, name in named if size or name in _TYPES_OF_TENSORS}


def _num_arguments(name: str) -> int:
    """Return how many operands the function that a kernel applies reads, as its name tells."""
    if "FillFunctor" in name:
        return 0
    if re.search(r"BinaryFunctor|CUDAFunctor_add\b", name):
        return 2
    return max((len(found.split(",")) for found in _ARGUMENTS.findall(name)), default=1)


def num_dimensions(shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> int:
    """Return how many dimensions are left, at least, of those in which operands can be stepped.

    Two are one if in every operand a step in the outer is a walk through the inner.
    """
    both = [(s, t) for s, t in zip(shapes, strides, strict=False) if s and len(s) == len(t)]
    width = max((len(s) for s, _ in both), default=0)
    lengths = np.ones((len(both), width), dtype=np.int64)
    steps = np.zeros((len(both), width), dtype=np.int64)
    for row, (shape, stride) in enumerate(both):
        lengths[row, width - len(shape) :], steps[row, width - len(shape) :] = shape, stride
    steps[lengths == 1] = 0
    length = lengths.max(axis=0, initial=1)
    group = {place: place for place in np.flatnonzero(length > 1).tolist()}
    for inner, outer in permutations(group, 2):
        if (steps[:, outer] == steps[:, inner] * length[inner]).all():
            old, new = group[inner], group[outer]
            group = {place: new if its == old else its for place, its in group.items()}
    return max(len(set(group.values())), 1)
