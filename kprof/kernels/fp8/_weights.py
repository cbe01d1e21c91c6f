"""FP8 weights: quantised once for each version of a parameter, kept as long as it lives.

`quantized(weight)` returns values and scales; `ByVersion` does the same for any other form of a
weight. `forget` is for weights written past torch's version counter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kprof.kernels.fp8.quantize_fp8 import quantize_fp8

T = TypeVar("T")
# Version of an entry that is no longer valid.
INVALID = -1


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """A form of a weight, and the identity and version of that weight."""

    weight: weakref.ref[Tensor]
    version: int
    address: int
    layout: tuple[object, ...]
    made: T

    def is_of(self, weight: Tensor) -> bool:
        """Tell whether it is the form of this weight's current version."""
        is_same = self.weight() is weight
        return is_same and (self.version, self.address) == (weight._version, weight.data_ptr())

    def has_room_for(self, weight: Tensor) -> bool:
        """Tell whether it is of any version of this weight, with the same shape and dtype."""
        return self.weight() is weight and self.layout == _layout_of(weight)


def _layout_of(weight: Tensor) -> tuple[object, ...]:
    return weight.shape, weight.dtype, weight.device


class ByVersion(Generic[T]):
    """Computes a form of a weight once for each version of the weight.

    Nothing is kept for tensors of inference mode, which have no version; for any weight while FSDP2
    is in use, which writes gathered weights uncounted; and for a weight that is first seen during a
    graph capture, as captured work has no result before a replay.
    """

    _all: ClassVar[weakref.WeakSet[ByVersion[Any]]] = weakref.WeakSet()

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        """Take the function that computes one tensor of a weight, or several."""
        self._make = make
        # By id: comparing tensors takes a kernel, and torch's WeakIdKeyDictionary microseconds.
        self._kept: dict[int, _Kept[T]] = {}
        self._all.add(self)

    def __call__(self, weight: Tensor, *, is_kept: bool = True) -> T:
        """Return the form of a weight.

        A new version overwrites the last one in place, as captured graphs read from there.

        Args:
            weight: A write into it is a new version, unless it goes through `.data`, past torch's
                version counter: then call `forget`.
            is_kept: Whether to keep the result for this version. False where gradients are
                recorded, as some optimizers write past the counter; it also drops the kept result.
        """
        is_kept = is_kept and not _is_fsdp2_in_use()
        known = self._kept.get(id(weight))
        # Looked up first: a kept result is valid in a capture, too.
        if is_kept and known is not None and known.is_of(weight):
            return known.made
        if not is_kept:
            self.invalidate(id(weight))
        if not is_kept or weight.is_inference() or _is_captured(weight):
            return self._make(weight.detach())
        return self._keep(weight, known)

    def _keep(self, weight: Tensor, known: _Kept[T] | None) -> T:
        if known is not None and known.has_room_for(weight):
            made, fresh = known.made, self._make(weight.detach())
            for place, values in zip(tree_leaves(made), tree_leaves(fresh), strict=True):
                place.copy_(values)
        else:
            made = _compute_apart(self._make, weight)
        # Once for each version, as the next call may be on any stream, and does not wait.
        _wait_for(weight)
        key, kept = id(weight), self._kept
        mark = weakref.ref(weight, lambda _: kept.pop(key, None))
        kept[key] = _Kept(mark, weight._version, weight.data_ptr(), _layout_of(weight), made)
        return made

    def invalidate(self, key: int | None = None) -> None:
        """Invalidate the result for the weight with this id, or all results."""
        for one in list(self._kept) if key is None else [key]:
            known = self._kept.get(one)
            if known is not None:
                self._kept[one] = replace(known, version=INVALID)


def _is_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _compute_apart(make: Callable[[Tensor], T], weight: Tensor) -> T:
    """Compute in another thread, as this thread's memory may come from a CUDA graph's pool."""
    _wait_for(weight)
    with ThreadPoolExecutor(1) as other:
        return other.submit(_compute, make, weight.detach()).result()


def _compute(make: Callable[[Tensor], T], weight: Tensor) -> T:
    # A new thread has no CUDA context before its first call of the runtime.
    if weight.is_cuda:
        torch.cuda.set_device(weight.device)
    _wait_for(weight)
    # Modes of torch and the current stream are thread-local.
    with torch.no_grad():
        made = make(weight)
    _wait_for(weight)
    return made


def _is_fsdp2_in_use() -> bool:
    """Tell whether FSDP2 is in use: it overwrites gathered weights, uncounted."""
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return sharded is not None and bool(sharded.__subclasses__())


def _wait_for(weight: Tensor) -> None:
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()


def forget(module: torch.nn.Module | None = None) -> None:
    """Invalidate what is kept of a module's parameters, or of all parameters."""
    keys = [None] if module is None else [id(one) for one in module.parameters()]
    for made in list(ByVersion._all):
        for key in keys:
            made.invalidate(key)


# Values of a weight (N, K) in FP8, and its scales, one for each row.
quantized = ByVersion(quantize_fp8)
