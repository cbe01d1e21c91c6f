"""Bounds of the work of launches whose operators' shapes were not recorded."""

from __future__ import annotations

import re

from kprof.analyze.element_type import SIZE_BYTES, type_in_name
from kprof.analyze.work import Work
from kprof.analyze.work.optimizer import ADAGRAD_FLOPS, ADAM_FLOPS, SGD_FLOPS

# PyTorch's kernels on lists of tensors give each block one chunk of one tensor:
# kChunkSize in ATen/native/cuda/MultiTensorApply.cuh. The last chunk of a tensor is shorter.
CHUNK_ELEMENTS = 65536

# Lists that are only read, and FLOPs of an element, by what the kernel's name says; first match
# wins. The others of its lists are read and written.
_UPDATES: tuple[tuple[str, int, int], ...] = (
    ("Adam", 1, ADAM_FLOPS),
    ("Sgd|SGD", 1, SGD_FLOPS),
    ("Adagrad", 1, ADAGRAD_FLOPS),
)
_NUM_LISTS = re.compile(r"TensorList\w*Metadata<(\d+)")


def bound_list_kernel(name: str, grid: str) -> Work | None:
    """Return the most work that a kernel over lists of tensors may have had, or None.

    Every block is taken to have a full chunk, so short tensors (biases, norms) count too much:
    an upper bound, close where large tensors dominate.
    """
    lists = _NUM_LISTS.search(name)
    element_type = type_in_name(name)
    if "at::native" not in name or lists is None or element_type is None:
        return None
    num_lists = int(lists.group(1))
    num_elements = int(grid.split(",")[0]) * CHUNK_ELEMENTS
    num_touched, flops_each = _touched(name, num_lists)
    num_bytes = int(num_elements * SIZE_BYTES[element_type] * num_touched)
    return Work(num_elements * flops_each, num_bytes, "fp32")


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
