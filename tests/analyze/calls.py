"""Builders of recorded operator calls, as Kineto writes them."""

from __future__ import annotations

import json

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Inputs, Work, parse_inputs

_RECORDED = {
    "bf16": "c10::BFloat16",
    "fp16": "c10::Half",
    "fp32": "float",
    "fp64": "double",
    "fp8": "c10::Float8_e4m3fn",
    "int64": "long int",
    "int32": "int",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
    "complex64": "c10::complex<float>",
    "fp4x2": "c10::Float4_e2m1fn_x2",
}


def tensor(dtype, *shape, strides=None):
    """A tensor argument; contiguous unless strides are given."""
    if strides is None:
        strides, step = [], 1
        for length in reversed(shape):
            strides.insert(0, step)
            step *= max(length, 1)
    return {"type": _RECORDED[dtype], "shape": list(shape), "strides": list(strides)}


def tensors(*shapes):
    """A list of tensors: recorders write its shapes but no types."""
    return {"type": "TensorList", "shape": [list(s) for s in shapes], "strides": []}


def _argument(value):
    if isinstance(value, dict):
        return value["type"], value["shape"], value["strides"], ""
    if value is None:
        return "", [], [], ""
    return ("ScalarList" if isinstance(value, list) else "Scalar"), [], [], str(value)


def recorded(*arguments) -> dict[str, str]:
    """The columns of `ranges` that record a call with these arguments."""
    types, shapes, strides, values = zip(*map(_argument, arguments), strict=True)
    return {
        "input_dtypes": json.dumps(types),
        "input_shapes": json.dumps(shapes),
        "input_strides": json.dumps(strides),
        "input_values": json.dumps(values),
    }


def inputs(*arguments, element_bytes=None) -> Inputs:
    """The arguments as a work model gets them."""
    texts = recorded(*arguments)
    return parse_inputs(
        texts["input_shapes"],
        texts["input_dtypes"],
        texts["input_strides"],
        texts["input_values"],
        element_bytes,
    )


def work_of(name, *arguments, element_bytes=None) -> Work | None:
    """The work of operator `name` on these arguments."""
    family, model = find_model(name)
    assert family
    return model(inputs(*arguments, element_bytes=element_bytes))
