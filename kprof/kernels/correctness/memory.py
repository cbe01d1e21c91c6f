"""Poisoned memory with guard bands, which shows reads or writes out of bounds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_BYTES = 4096
NAN_BYTE = 0xFF
"""Repeated, it is NaN in every floating-point format and -1 in every integer."""
LARGE_BYTE = 0x5B
"""Repeated, it is 6e16 in float32 and bfloat16, and 235 in float16."""

_EMPTIES = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


class Guarded(TorchDispatchMode):
    """While this is on, memory that is asked for uninitialised comes poisoned, between guards.

    What an operator of torch allocates inside itself, and what compiled code allocates past the
    dispatcher, is not seen; `poison_freed` reaches that.
    """

    def __init__(self, byte: int = NAN_BYTE) -> None:
        super().__init__()
        self.byte = byte
        self._bands: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Do what was asked for; uninitialised memory is replaced by a view between guards."""
        made = func(*args, **(kwargs or {}))
        is_guarded = func.overloadpacket in _EMPTIES and _can_be_guarded(made)
        return self._guard(made) if is_guarded else made

    def was_overrun(self) -> list[Tensor]:
        """Tell, for each device, whether anything was written past the ends of an allocation."""
        devices = {band.device for band in self._bands}
        own = ([band for band in self._bands if band.device == one] for one in devices)
        return [(torch.cat(bands) != self.byte).any() for bands in own]

    def _guard(self, tensor: Tensor) -> Tensor:
        num_bytes = tensor.untyped_storage().nbytes()
        size = (num_bytes + -num_bytes % 16 + 2 * GUARD_BYTES,)
        buffer = torch.full(size, self.byte, dtype=torch.uint8, device=tensor.device)
        self._bands += [buffer[:GUARD_BYTES], buffer[GUARD_BYTES + num_bytes :]]
        # A storage of its own: autograd expects what it allocates to begin where its storage does.
        storage = buffer.untyped_storage()[GUARD_BYTES:]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, 0, tensor.shape, tensor.stride())


def _can_be_guarded(made: Tensor) -> bool:
    return (
        type(made) is Tensor
        and made.layout == torch.strided
        and made.device.type in ("cpu", "cuda")
        and made.numel() > 0
    )


@contextmanager
def large_calls(device: str) -> Iterator[None]:
    """Wait until no other process makes its largest calls on a GPU: together they do not fit.

    At the end, memory that nothing lies in is given back, unless a call broke the GPU: it refuses
    that too, and the error of the call says more.
    """
    if not device.startswith("cuda"):
        yield
        return
    import fcntl

    path = Path(tempfile.gettempdir()) / f"kprof_gate_{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


def poison_freed(like: Iterable[Tensor], byte: int = NAN_BYTE) -> None:
    """Fill memory of these tensors' sizes and free it, for the allocator to hand out next."""
    buffers = []
    for tensor in like:
        num_bytes = max(tensor.numel() * tensor.element_size(), 1)
        for _ in range(2):
            buffers.append(torch.full((num_bytes,), byte, dtype=torch.uint8, device=tensor.device))
    del buffers
