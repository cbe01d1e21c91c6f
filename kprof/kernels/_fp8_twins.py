"""Whose twin is whose: activations that were made together with their rows in FP8.

A layer that would quantise what it is given looks here first. A twin is as good as its activation
because one kernel writes both; it counts for that tensor object alone, as long as nobody writes to
it, on the stream where it was made, and in the same capture of a CUDA graph, or outside of all.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.kernels._fp8_beside import WITH_TWIN, Twin

CAPTURING = 1
NARROW = {torch.bfloat16, torch.float16}


class Maker:
    """A place that makes activations, with twins as long as somebody reads them."""

    __slots__ = ("is_wanted",)

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether a layer would have quantised, or did not need to, what was made last."""

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what gives the same results, whose twins can be found; or the function itself."""
        with_twin = WITH_TWIN.get(function)
        if with_twin is None:
            return function

        @wraps(function)
        def make(*arguments: Any) -> Any:
            # What is made in inference mode counts no versions.
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                return function(*arguments)
            x = arguments[0]
            place = _place_of(x) if self.is_wanted and _are_narrow(arguments) else None
            self.is_wanted = False
            results, twin = (function(*arguments), None) if place is None else with_twin(*arguments)
            _remember(results[0] if type(results) is tuple else results, self, twin, place)
            return results

        return make


class Made(NamedTuple):
    """An activation that a maker made."""

    tensor: weakref.ref[Tensor]
    maker: Maker
    twin: Twin | None
    proof: tuple[object, ...]
    """What of the activation, and of where it was made, must be the same where it is read."""

    def twin_of(self, x: Tensor) -> Twin | None:
        """Return the twin of what is this activation, if it counts here and now.

        None: it has none, or not any more; its maker hears that it is wanted.
        """
        if torch.is_grad_enabled():
            return None
        self.maker.is_wanted = True
        is_good = self.twin is not None and self.proof == (*_state_of(x), _place_of(x))
        return self.twin if is_good else None


# By identity, as long as the activation lives.
_made: dict[int, Made] = {}
find_made = _made.get


def _remember(y: Tensor, maker: Maker, twin: Twin | None, place: Place | None) -> None:
    key = id(y)
    mark = weakref.ref(y, lambda _: _made.pop(key, None))
    _made[key] = Made(mark, maker, twin, () if twin is None else (*_state_of(y), place))


def _state_of(x: Tensor) -> tuple[object, ...]:
    return x._version, x.data_ptr(), x.shape, x.is_contiguous(), x.dtype


def _are_narrow(arguments: tuple[Any, ...]) -> bool:
    """Tell whether all tensors are in the same 16 bits.

    In float32 the kernel with a twin rounds elsewhere in the last bit than the one without; and no
    layer in FP8 takes such.
    """
    dtypes = {one.dtype for one in arguments if isinstance(one, Tensor)}
    return len(dtypes) == 1 and dtypes <= NARROW


Place = tuple[int, int]
"""A stream, and the capture that is going on there; 0: none."""


def _place_of(x: Tensor) -> Place | None:
    """Return where a kernel on x would run; None: nobody knows."""
    if not x.is_cuda:
        return 0, 0
    device = x.get_device()
    if device != torch._C._cuda_getDevice():
        return None
    stream = torch._C._cuda_getCurrentRawStream(device)
    if not torch.cuda.is_current_stream_capturing():
        return stream, 0
    capture = _capture_on(stream)
    return None if capture is None else (stream, capture)


def _capture_on(stream: int) -> int | None:
    """Return what the driver calls the capture that is going on; None: it does not tell."""
    ask = _driver_tells()
    if ask is None:
        return None
    status, capture = ctypes.c_int(), ctypes.c_ulonglong()
    failed = ask(stream, ctypes.byref(status), ctypes.byref(capture), None, None, None)
    return capture.value if not failed and status.value == CAPTURING else None


@cache
def _driver_tells() -> Callable[..., int] | None:
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    ask.argtypes = [ctypes.c_void_p] * 6
    return ask
