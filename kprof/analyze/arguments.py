"""Arguments of operators, as far as other records than their own tell them."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from kprof.analyze.element_type import size_in_name
from kprof.analyze.nesting import NO_ROW
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
    is_collective = np.array([*(names.categories == _COLLECTIVE), False])
    is_annotation = np.array([*(str(n).startswith(_ANNOTATION) for n in names.categories), False])
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
