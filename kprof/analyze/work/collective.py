"""Work of collectives on one rank.

A rank reads its input and writes its output once. A reduction needs (ranks - 1) additions for each
element; every rank does an equal part. The traffic between GPUs depends on the algorithm and is not
counted; a collective has no limit, because no ceiling of the links is known.
"""

from __future__ import annotations

import json
import math
from functools import partial

from kprof.analyze.element_type import size_bytes
from kprof.analyze.work import Inputs, Model, Work, at_least, vector_dtype

# As PyTorch names a message's type.
TYPES = {
    "Double": "fp64",
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Float8_e4m3fn": "fp8",
    "Float8_e5m2": "fp8",
    "Float8_e4m3fnuz": "fp8",
    "Float8_e5m2fnuz": "fp8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


def collective_work(name: str, given: int, got: int, dtype: str, num_ranks: int | None) -> Work:
    """Return the work of one rank from the elements that it gives and those that it gets.

    In a broadcast a rank either reads or writes; only the root of a reduction writes, and which
    one that is was not recorded.
    """
    num_moved = given + got
    if "broadcast" in name or name.startswith("send"):
        num_moved = given
    elif name.startswith("recv"):
        num_moved = got
    is_to_one = name in ("reduce", "_reduce_oop", "gather", "scatter")
    moved = math.ceil((given if is_to_one else num_moved) * size_bytes(dtype))
    flops: int | None = 0
    if "reduce" in name:
        flops = given * (num_ranks - 1) // num_ranks if num_ranks else None
    work = Work(flops, moved, vector_dtype(dtype))
    return (at_least(work) or work) if is_to_one else work


def _recorded(inputs: Inputs) -> Work | None:
    """Model a collective by what its record says of its message."""
    if inputs.message is None:
        return None
    name, given, got, dtype, num_ranks = json.loads(inputs.message)
    if dtype not in TYPES or not isinstance(given, int) or not isinstance(got, int):
        return None
    ranks = num_ranks if isinstance(num_ranks, int) and num_ranks > 0 else None
    return collective_work(str(name), given, got, TYPES[dtype], ranks)


def _into(inputs: Inputs, name: str, out: int = 0, given: int = 1) -> Work | None:
    """Model a collective whose result is one of its arguments."""
    result, x = inputs.tensor(out), inputs.tensor(given)
    if result is None or x is None:
        return None
    num_ranks = x.numel // max(result.numel, 1) if name == "reduce_scatter" else None
    return collective_work(name, x.numel, result.numel, x.dtype, num_ranks)


def _of_equal_size(inputs: Inputs, name: str, given: int = 0) -> Work | None:
    """Model a collective that gets as many elements as it gives."""
    x = inputs.tensor(given)
    return None if x is None else collective_work(name, x.numel, x.numel, x.dtype, None)


def _given_only(inputs: Inputs) -> Work | None:
    """Model a collective of which only what a rank gives was recorded."""
    x = inputs.tensor(0)
    return None if x is None else at_least(Work(None, x.bytes))


_all_reduce = partial(_of_equal_size, name="allreduce")

MODELS: dict[str, Model] = {
    "record_param_comms": _recorded,
    "c10d::_allgather_base_": partial(_into, name="all_gather"),
    "c10d::_reduce_scatter_base_": partial(_into, name="reduce_scatter"),
    "c10d::alltoall_base_": partial(_into, name="all_to_all"),
    "nccl:all_reduce": _all_reduce,
    "nccl:broadcast": partial(_of_equal_size, name="broadcast"),
    "symm_mem::multimem_all_reduce_": _all_reduce,
    "symm_mem::multimem_one_shot_all_reduce": _all_reduce,
    "symm_mem::one_shot_all_reduce": _all_reduce,
    "symm_mem::two_shot_all_reduce_": _all_reduce,
    "vllm::all_reduce": _all_reduce,
    "vllm::all_gather": _given_only,
    "vllm::reduce_scatter": _given_only,
    "sglang::inplace_all_reduce": _all_reduce,
    "sglang::outplace_all_reduce": _all_reduce,
    "_C_custom_ar::all_reduce": partial(_of_equal_size, name="allreduce", given=1),
    "_C_custom_ar::qr_all_reduce": partial(_of_equal_size, name="allreduce", given=1),
    "sgl_kernel::all_reduce": partial(_of_equal_size, name="allreduce", given=1),
}

# Annotations of older versions of PyTorch, which name what is given and not what is got.
PREFIXES: dict[str, Model] = {"nccl:": _given_only}
