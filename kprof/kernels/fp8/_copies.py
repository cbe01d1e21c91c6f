"""FP8 copies of activations, made together with them, found by the layer that reads them.

A norm or SwiGLU ahead of an FP8 linear layer writes its result twice in one launch: as it is, and
quantised by rows as `quantize_fp8` would. The layer then skips its own cast. In bfloat16 both have
the bits of the separate kernels. In other dtypes the compiler fuses other multiplications: last
bits differ for LayerNorm in float16, and for all in float32, which no FP8 layer takes.

A `CopyMaker` wraps the function at one stream of a model and makes copies while they are read. A
layer asks `find_activation(id(x))` for its input. A copy is valid for that tensor object alone,
unchanged, on the stream where it was made, and in the same capture of a CUDA graph or outside all.

Order: kernels, launches and operators, public functions by what they wrap, finding copies.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.kernels.fp8.quantize_fp8 import (
    FP8,
    LARGEST,
    LEAST,
    rows_of_program,
    store_quantized_rows,
)
from kprof.kernels.gated import halves_of, swiglu
from kprof.kernels.norm import (
    FEW_COLUMNS,
    FORMS,
    add_layernorm,
    add_rmsnorm,
    layernorm,
    norm_forward,
    plan_forward,
    rmsnorm,
)
from kprof.kernels.runtime import (
    Launcher,
    alignments,
    count_rows,
    define,
    empty_like,
    kind_of,
    rows_of,
)
from kprof.kernels.tiles.exact import divide, exp


class Fp8Copy(NamedTuple):
    """The rows of an activation in FP8, as `quantize_fp8` returns them."""

    values: Tensor
    """(M, N), where the activation is (..., N) of M rows."""
    scales: Tensor
    """(M, 1)."""


@triton.jit(do_not_specialize=["num_rows"])
def norm_quantize_fp8_kernel(
    x_MN,
    residual_MN,
    weight_N,
    bias_N,
    y_MN,
    sum_MN,
    values_MN,
    scale_M,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    num_rows,
    eps,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WEIGHT_EARLY: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Normalise rows, and quantise the stored result, with one scale a row."""
    norm_forward(
        x_MN,
        residual_MN,
        weight_N,
        bias_N,
        y_MN,
        sum_MN,
        None,
        None,
        x_stride,
        residual_stride,
        num_rows,
        eps,
        FORM,
        COLUMNS,
        ROWS,
        BLOCK,
        IS_WEIGHT_EARLY,
    )
    # Makes the stores of all threads of this CTA visible to its loads.
    tl.debug_barrier()
    rows = tl.arange(0, ROWS).to(tl.int64) + tl.program_id(0) * ROWS
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < COLUMNS)[None, :]
    y = tl.load(y_MN + rows[:, None] * COLUMNS + columns[None, :], mask, other=0.0)
    y32 = y.to(tl.float32)
    store_quantized_rows(y32, values_MN, scale_M, rows, num_rows, COLUMNS, LARGEST, LEAST, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_quantize_fp8_kernel(
    gate_MN,
    up_MN,
    y_MN,
    values_MN,
    scale_M,
    gate_stride: tl.int64,
    up_stride: tl.int64,
    num_rows,
    num_columns,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute SwiGLU, and quantise the rounded result, with one scale a row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    gate = tl.load(gate_MN + rows[:, None] * gate_stride + columns[None, :], mask, other=0.0)
    up = tl.load(up_MN + rows[:, None] * up_stride + columns[None, :], mask, other=0.0)
    gate32, is_exact = gate.to(tl.float32), gate.dtype == tl.float32
    activated = divide(gate32, 1.0 + exp(-gate32, is_exact), is_exact)
    y = (activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(y_MN + rows[:, None] * num_columns + columns[None, :], y, mask)
    y32 = y.to(tl.float32)
    store_quantized_rows(
        y32, values_MN, scale_M, rows, num_rows, num_columns, LARGEST, LEAST, BLOCK
    )


_launch_norm, _launch_swiglu = (
    Launcher(norm_quantize_fp8_kernel),
    Launcher(swiglu_quantize_fp8_kernel),
)


def _empty_copy(x: Tensor) -> list[Tensor]:
    num_rows, columns = count_rows(x), x.shape[-1]
    values = torch.empty(num_rows, columns, dtype=FP8, device=x.device)
    return [values, torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)]


def _empty_norm(x, residual, weight, bias, eps, form) -> list[Tensor]:
    """Return memory for y, the sum if there is a residual, and the copy's values and scales."""
    like = [empty_like(x)] if residual is None else [empty_like(x), empty_like(x)]
    return [*like, *_empty_copy(x)]


def _run_norm(x, residual, weight, bias, eps, form) -> list[Tensor]:
    results = _empty_norm(x, residual, weight, bias, eps, form)
    added = None if residual is None else results[1]
    tensors = (x, residual, weight, bias, results[0], added, *results[-2:])
    call = kind_of(x, residual, weight, bias), eps, form
    if _launch_norm.again(call, tensors) or not count_rows(x):
        return results
    num_rows, columns = count_rows(x), x.shape[-1]
    rows, stride = rows_of(x)
    others, other_stride = (None, stride) if residual is None else rows_of(residual)
    weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))
    rows_each, block, warps = plan_forward(columns)
    key = (
        *(x.device, x.dtype, columns, form, residual is None, weight is None, bias is None),
        alignments((rows, others, weight, bias), stride, other_stride),
    )
    arguments = (
        *(rows, others, weight, bias, *tensors[4:], stride, other_stride, num_rows, eps),
        *(form, columns, rows_each, block, block > FEW_COLUMNS, LARGEST, LEAST),
    )
    programs, options = -(-num_rows // rows_each), {"num_warps": warps}
    _launch_norm(key, programs, arguments, options, call=call, tensors=tensors)
    return results


def _empty_swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    return [empty_like(gate), *_empty_copy(gate)]


def _run_swiglu(gate: Tensor, up: Tensor) -> list[Tensor]:
    results = _empty_swiglu(gate, up)
    tensors, call = (gate, up, *results), kind_of(gate, up)
    if _launch_swiglu.again(call, tensors) or not count_rows(gate):
        return results
    num_rows, columns = count_rows(gate), gate.shape[-1]
    (gates, gate_stride), (ups, up_stride) = rows_of(gate), rows_of(up)
    rows_each, block, num_warps = rows_of_program(columns)
    steps = alignments((gates, ups), gate_stride, up_stride, columns)
    key = gate.device, gate.dtype, columns, steps
    sizes = gate_stride, up_stride, num_rows, columns
    arguments = (gates, ups, *results, *sizes, LARGEST, LEAST, rows_each, block)
    programs, options = -(-num_rows // rows_each), {"num_warps": num_warps}
    _launch_swiglu(key, programs, arguments, options, call=call, tensors=tensors)
    return results


_norm = define(
    "norm_quantize_fp8(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, "
    "int form) -> Tensor[]",
    _run_norm,
    _empty_norm,
)
_swiglu = define("glu_quantize_fp8(Tensor gate, Tensor up) -> Tensor[]", _run_swiglu, _empty_swiglu)


def _normed(form: str, x, residual, weight, bias, eps: float) -> tuple[Any, Fp8Copy]:
    y, *added, values, scales = _norm(x, residual, weight, bias, float(eps), FORMS[form])
    return (y if residual is None else (y, *added)), Fp8Copy(values, scales)


def _gated(
    gate: Tensor, up: Tensor | None = None, is_up_first: bool = False
) -> tuple[Tensor, Fp8Copy]:
    y, values, scales = _swiglu(*halves_of(gate, up, is_up_first))
    return y, Fp8Copy(values, scales)


# By function, a function of the same arguments that returns the same results and an FP8 copy of the
# first. All tensors have one dtype; there are no gradients.
WITH_COPY: dict[Callable[..., Any], Callable[..., tuple[Any, Fp8Copy]]] = {
    rmsnorm: lambda x, weight, eps=1e-6, form="llama": _normed(form, x, None, weight, None, eps),
    add_rmsnorm: lambda x, residual, weight, eps=1e-6, form="llama": _normed(
        form, x, residual, weight, None, eps
    ),
    layernorm: lambda x, weight=None, bias=None, eps=1e-5: _normed(
        "layer", x, None, weight, bias, eps
    ),
    add_layernorm: lambda x, residual, weight=None, bias=None, eps=1e-5: _normed(
        "layer", x, residual, weight, bias, eps
    ),
    swiglu: _gated,
}

CAPTURING = 1
HALF_PRECISION = {torch.bfloat16, torch.float16}


class CopyMaker:
    """Makes FP8 copies at one stream of a model, as long as a layer reads them."""

    __slots__ = ("is_wanted",)

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether an FP8 layer read the last activation."""

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with the same results that makes copies; or the function itself."""
        with_copy = WITH_COPY.get(function)
        if with_copy is None:
            return function

        @wraps(function)
        def make(*arguments: Any) -> Any:
            # Tensors of inference mode have no version counter.
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                return function(*arguments)
            x = arguments[0]
            stream = _stream_of(x) if self.is_wanted and _are_half_precision(arguments) else None
            self.is_wanted = False
            results, copy = (
                (function(*arguments), None) if stream is None else with_copy(*arguments)
            )
            _remember(results[0] if type(results) is tuple else results, self, copy, stream)
            return results

        return make


class Activation(NamedTuple):
    """A result of a wrapped function."""

    tensor: weakref.ref[Tensor]
    maker: CopyMaker
    copy: Fp8Copy | None
    made_as: tuple[object, ...]
    """Version, address and layout of the activation, and its stream, when the copy was made."""

    def copy_of(self, x: Tensor) -> Fp8Copy | None:
        """Return the copy, if x still is this activation and the copy is valid on this stream.

        In any case its maker learns that a copy is wanted.
        """
        if torch.is_grad_enabled():
            return None
        self.maker.is_wanted = True
        is_valid = self.copy is not None and self.made_as == (*_state_of(x), _stream_of(x))
        return self.copy if is_valid else None


# By id, as long as the activation lives.
_activations: dict[int, Activation] = {}
find_activation = _activations.get


def _remember(y: Tensor, maker: CopyMaker, copy: Fp8Copy | None, stream: Stream | None) -> None:
    key = id(y)
    mark = weakref.ref(y, lambda _: _activations.pop(key, None))
    _activations[key] = Activation(
        mark, maker, copy, () if copy is None else (*_state_of(y), stream)
    )


def _state_of(x: Tensor) -> tuple[object, ...]:
    return x._version, x.data_ptr(), x.shape, x.is_contiguous(), x.dtype


def _are_half_precision(arguments: tuple[Any, ...]) -> bool:
    """Tell whether all tensors are in the same 16 bits.

    In float32 the kernel with a copy differs in the last bit from the one without, and no FP8 layer
    takes float32.
    """
    dtypes = {one.dtype for one in arguments if isinstance(one, Tensor)}
    return len(dtypes) == 1 and dtypes <= HALF_PRECISION


Stream = tuple[int, int]
"""A stream, and the id of the capture in progress there; 0: none."""


def _stream_of(x: Tensor) -> Stream | None:
    """Return where a kernel on x would run; None: unknown."""
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
    """Return the driver's id of the capture in progress; None: unknown."""
    ask = _capture_info()
    if ask is None:
        return None
    status, capture = ctypes.c_int(), ctypes.c_ulonglong()
    failed = ask(stream, ctypes.byref(status), ctypes.byref(capture), None, None, None)
    return capture.value if not failed and status.value == CAPTURING else None


@cache
def _capture_info() -> Callable[..., int] | None:
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    ask.argtypes = [ctypes.c_void_p] * 6
    return ask
