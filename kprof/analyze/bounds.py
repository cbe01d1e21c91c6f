"""Bounds of the work of launches whose operators' shapes were not recorded."""

from __future__ import annotations

import re

from kprof.analyze.element_type import SIZE_BYTES, least_size_in_name, type_in_name
from kprof.analyze.work import Work
from kprof.analyze.work.optimizer import ADAGRAD_FLOPS, ADAM_FLOPS, SGD_FLOPS

# Kernels on lists of tensors give each block one chunk of one tensor: kChunkSize in PyTorch's
# ATen/native/cuda/MultiTensorApply.cuh, 2048 * 32 where Apex and DeepSpeed launch theirs. The last
# chunk of a tensor is shorter.
CHUNK_ELEMENTS = 65536

# Lists that are only read, and FLOPs of an element, by what the kernel's name says; first match
# wins. The others of its lists are read and written.
_UPDATES: tuple[tuple[str, int, int], ...] = (
    ("Adam", 1, ADAM_FLOPS),
    ("Sgd|SGD", 1, SGD_FLOPS),
    ("Adagrad", 1, ADAGRAD_FLOPS),
    ("LAMB", 0, ADAM_FLOPS),
)
_LIST_KERNEL = re.compile(r"at::native|^void multi_tensor_apply_kernel<TensorListMetadata")
_NUM_LISTS = re.compile(r"TensorList\w*Metadata<(?:\w+, )?(\d+)")


# PyTorch's kernels on every element: how many each thread has stands in front of the functor, for
# vectorized ones at least four (later versions give some of those eight).
_STRIDED = re.compile(
    r"^void at::native::(?:index_|_scatter_gather_)?elementwise_kernel<(\d+), (\d+),"
)
_VECTORIZED = re.compile(
    r"^void at::native::vectorized_elementwise_kernel<(\d+), .*[Aa]rray<char ?\*, (\d+)"
)
_LEAST_EACH = 4
# What compares or selects has results, or inputs, of one byte.
_OF_TRUTHS = re.compile(r"bool|compare|logical|isnan|isinf|signbit", re.IGNORECASE)


def bound_kernel(name: str, grid: str, block: str) -> Work | None:
    """Return a bound of a launch's work from its kernel's name and its blocks, or None."""
    return bound_list_kernel(name, grid) or bound_pointwise_kernel(name, grid, block)


def bound_pointwise_kernel(name: str, grid: str, block: str) -> Work | None:
    """Return the least work that a kernel of PyTorch on every element may have had, or None.

    All blocks but the last are full. Where operands have strides, inputs may repeat elements, so
    that only the result counts; else all operands have as many.
    """
    size = least_size_in_name(name)
    strided, vectorized = _STRIDED.match(name), _VECTORIZED.match(name)
    if size is None or _OF_TRUTHS.search(name):
        return None
    if strided:
        in_block, num_operands = int(strided.group(1)) * int(strided.group(2)), 1
    elif vectorized and block:
        num_threads = int(block.split(",")[0])
        in_block = num_threads * max(int(vectorized.group(1)), _LEAST_EACH)
        num_operands = int(vectorized.group(2))
    else:
        return None
    num_elements = (int(grid.split(",")[0]) - 1) * in_block + 1
    return Work(None, int(num_elements * num_operands * size), bound="at least")


def bound_list_kernel(name: str, grid: str) -> Work | None:
    """Return the most work that a kernel over lists of tensors may have had, or None.

    Every block is taken to have a full chunk, so short tensors (biases, norms) count too much:
    an upper bound, close where large tensors dominate.
    """
    lists = _NUM_LISTS.search(name)
    element_type = type_in_name(name)
    if lists is None or element_type is None or not _LIST_KERNEL.search(name):
        return None
    num_lists = int(lists.group(1))
    num_elements = int(grid.split(",")[0]) * CHUNK_ELEMENTS
    num_touched, flops_each = _touched(name, num_lists)
    # Apex keeps moments and main parameters in fp32 beside narrower ones.
    is_native = "at::native" in name
    each = SIZE_BYTES[element_type] if is_native else max(SIZE_BYTES[element_type], 4)
    num_bytes = int(num_elements * each * num_touched)
    return Work(num_elements * flops_each, num_bytes, "fp32", "at most")


def _touched(name: str, num_lists: int) -> tuple[int, int]:
    """Return how often the lists' elements move, and the FLOPs of one."""
    for pattern, num_only_read, flops in _UPDATES:
        if re.search(pattern, name):
            return 2 * num_lists - num_only_read, flops
    if re.search(r"Norm|Max", name):
        return num_lists, 1
    if "Zero" in name:
        return 1, 0
    # One list is changed in place; of more lists one takes the result or is changed.
    return 2 if num_lists == 1 else _touches_of_list_functor(name, num_lists), 1


def _touches_of_list_functor(name: str, num_lists: int) -> int:
    """Return reads and writes: the functor's arguments name how many lists it reads and where.

    PyTorch spells depth, number of read lists and place of the result at the end of a functor's
    template arguments: `BinaryOpListAlphaFunctor<float, 2, 2, 0>`.
    """
    spelled = re.search(r"Functor<[^<>]*?, (\d), (\d), (\d)>", name)
    num_read = int(spelled.group(2)) if spelled else num_lists
    return num_read + 1
