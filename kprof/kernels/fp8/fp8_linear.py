"""Linear layer in FP8: y = x w' + bias, x (..., K), w (N, K), with gradients.

`fp8_linear` is the public function. Weights are quantised by rows, once for each version; x is, in
every call, where that is faster. Few rows of x take the kernel of `_gemm`, many take cuBLASLt
(`route_of`). In float16, which cuBLASLt does not return, x stays as it is, and weights are
converted as they are read. Gradients are quantised to e4m3, too: with a scale for each row, the
three more binades of e5m2 are not needed, and its one bit less of mantissa would double the error.

Order: routes, GEMMs, operators, public function, providers, KERNEL.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.fp8._gemm import MULTIPLE, gemm_operator, multiply
from kprof.kernels.fp8._weights import ByVersion, quantized
from kprof.kernels.fp8.fp8_gemm import LLAMA, WIDE
from kprof.kernels.fp8.quantize_fp8 import MOST_COLUMNS, quantize_fp8, quantize_transposed
from kprof.kernels.runtime import applied, define

Route = Literal["wide", "tiles", "library", "plain"]
# Most rows for which the kernel of `_gemm` is faster than cuBLASLt; the second where K is more than
# DEEP times N, so that cuBLASLt does not fill the GPU.
MOST_TILED_ROWS, MOST_DEEP_ROWS = 64, 128
DEEP = 2
# Elements of weights above which FP8 is faster than 16 bits at 65 to 128 rows, too.
MANY_WEIGHTS = 1 << 24
# Least rows for which quantised gradients are faster: their operands are transposed first.
MIN_BACKWARD_ROWS = 4_096
# Least N K / (N + K) for a quantised gradient of weights (N, K): FLOPs over transposed elements.
MIN_BACKWARD_INTENSITY = 3_072
# cuBLAS counts elements in 32 bits, and reads out of bounds beyond (pytorch/pytorch#31708).
MOST_SPAN = 2**31


def route_of(num_rows: int, num_columns: int, depth: int, x: Tensor) -> Route:
    """Return the fastest route for a GEMM of this size, as measured on an H200."""
    if depth > MOST_COLUMNS:
        return "plain"
    is_few = num_rows <= MOST_TILED_ROWS
    is_few |= num_rows <= MOST_DEEP_ROWS and depth > DEEP * num_columns
    if x.dtype != torch.bfloat16 or not x.is_cuda:
        return "wide" if is_few or not x.is_cuda else "plain"
    if is_few:
        return "tiles"
    is_small = num_rows <= MOST_DEEP_ROWS and num_columns * depth <= MANY_WEIGHTS
    is_odd = num_columns % MULTIPLE or depth % MULTIPLE
    return "plain" if is_small or is_odd or not has_library(x.device) else "library"


@cache
def has_library(device: torch.device) -> bool:
    """Tell whether torch's GEMMs with row scales are those of cuBLASLt.

    Otherwise they are CUTLASS's, some of which read past the scales (pytorch/pytorch#133334) or run
    on another stream than the current one (pytorch/pytorch#177651).
    """
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9


def _backward_route(
    num_tokens: int, num_rows: int, num_columns: int, depth: int, x: Tensor
) -> Route:
    """Return the route of a GEMM of a backward pass."""
    is_large = num_tokens >= MIN_BACKWARD_ROWS
    return route_of(num_rows, num_columns, depth, x) if is_large else "plain"


def addressable(x: Tensor) -> Tensor:
    """Return a tensor that cuBLAS can address: a copy, if strides take it beyond 32 bits."""
    if x.is_contiguous():
        return x
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x if last < MOST_SPAN else x.contiguous()


Quantized = tuple[Tensor, Tensor]


def gemm_by_rows(x: Tensor, w: Quantized, bias: Tensor | None, route: Route) -> Tensor:
    """Return x times quantised weights (N, K), by rows, on a route other than "plain"."""
    if route == "wide":
        return multiply(x, w[0], None, w[1], bias, "none")
    y = _gemm_of_quantized(quantize_fp8(x), w, bias, route, is_behind_cast=True)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _gemm_of_quantized(
    x: Quantized, w: Quantized, bias: Tensor | None, route: Route, *, is_behind_cast: bool = False
) -> Tensor:
    if route == "library":
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        y: Tensor = torch._scaled_mm(x[0], w[0].t(), x[1], w[1].t(), bias=bias, **options)
        return y
    if is_behind_cast:
        return multiply(x[0], w[0], x[1], w[1], bias, "none", is_behind_cast=True)
    return gemm_operator(x[0], w[0], x[1], w[1], bias, "none")


def run_on(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_kept: bool, route: Route | None = None
) -> Tensor:
    """Return the linear layer's result on a route; None: the fastest one that is known."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    (num_rows, depth), (num_columns, met_depth) = rows.shape, weight.shape
    # Torch raises for shapes that do not match; our kernels would read out of bounds.
    is_wrong = met_depth != depth or weight.device != x.device
    route = route or route_of(num_rows, num_columns, depth, x)
    if route == "plain" or not num_rows or is_wrong:
        return functional.linear(addressable(x), addressable(weight), bias)
    y = gemm_by_rows(rows, quantized(weight, is_kept=is_kept), bias, route)
    return y if x is rows else y.view(*x.shape[:-1], num_columns)


def route_by_rows(x: Tensor, weight: Tensor, route: Route | None = None) -> Route | None:
    """Return the route of a forward pass if it quantises rows of x, else None.

    Args:
        x: (..., K).
        weight: (N, K).
        route: A fixed one; None: the fastest one that is known.
    """
    num_columns, depth = weight.shape
    if x.shape[-1] != depth or weight.device != x.device or not x.numel():
        return None
    route = route or route_of(x.numel() // depth, num_columns, depth, x)
    return route if route in ("tiles", "library") else None


def linear_of_copy(
    x: Tensor, values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None, route: Route
) -> Tensor:
    """Return the layer's result on this route, from an FP8 copy of x; without gradients.

    It is no torch operator itself, as both GEMMs that it may call are.
    """
    y = _gemm_of_quantized((values, scales), quantized(weight), bias, route)
    y = y if y.dtype == x.dtype else y.to(x.dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


def _run_to_input(dy: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x: a GEMM that sums over the rows of the weights."""
    rows = dy.reshape(-1, dy.shape[-1])
    num_rows, (num_columns, depth) = rows.shape[0], weight.shape
    route = _backward_route(num_rows, num_rows, depth, num_columns, dy)
    if route == "plain":
        return (addressable(rows) @ addressable(weight)).view(*dy.shape[:-1], depth)
    return gemm_by_rows(rows, quantize_transposed(weight), None, route).view(*dy.shape[:-1], depth)


def _run_to_weight(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weights: a GEMM that sums over rows, in FP8 where that pays."""
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    num_tokens, num_rows = dy.shape
    depth = x.shape[1]
    route = _backward_route(num_tokens, num_rows, depth, num_tokens, x)
    if route == "plain" or num_rows * depth < MIN_BACKWARD_INTENSITY * (num_rows + depth):
        return addressable(dy).t() @ addressable(x)
    y = _gemm_of_quantized(quantize_transposed(dy), quantize_transposed(x), None, route)
    return y.to(x.dtype)


forward = define(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias, bool is_kept) -> Tensor",
    run_on,
    lambda x, weight, bias, is_kept: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
to_input = define(
    "fp8_linear_to_input(Tensor dy, Tensor weight) -> Tensor",
    _run_to_input,
    lambda dy, weight: dy.new_empty((*dy.shape[:-1], weight.shape[1])),
)
to_weight = define(
    "fp8_linear_to_weight(Tensor dy, Tensor x) -> Tensor",
    _run_to_weight,
    lambda dy, x: dy.new_empty((dy.shape[-1], x.shape[-1])),
)

# Relative error of the forward pass: both operands have three bits of mantissa.
STATED_ERROR = 0.05


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight' + bias, with the weights in float8_e4m3fn, a scale for each row of them.

    Weights are quantised once for each version; where their gradients are recorded, in every
    forward pass.

    Args:
        x: (..., K); bfloat16 or float16.
        weight: (N, K), of the same dtype.
        bias: (N,).
    """
    is_recorded = torch.is_grad_enabled()
    is_kept = not (is_recorded and weight.requires_grad)
    if is_recorded and (x.requires_grad or weight.requires_grad or _needs_gradient(bias)):
        y: Tensor = _with_gradient(x, weight, bias, is_kept)
    else:
        y = forward(x, weight, bias, is_kept)
    return y


def _needs_gradient(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_kept: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        y: Tensor = forward(x, weight, bias, is_kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        is_x, is_weight, is_bias, _ = ctx.needs_input_grad
        return (
            to_input(dy, weight) if is_x else None,
            to_weight(dy, x) if is_weight else None,
            dy.reshape(-1, dy.shape[-1]).sum(0) if is_bias else None,
            None,
        )


_with_gradient = applied(_Linear)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias)


def _on(route: Route) -> Any:
    """Return the layer on one route, forward alone."""

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return run_on(x, weight, bias, True, route)

    return call


# Providers that quantise rows of x, and can therefore take an FP8 copy of x, with their routes;
# None: the fastest one that is known.
BY_ROWS: dict[str, Route | None] = {OURS: None, f"{OURS}-tiles": "tiles", "scaled-mm": "library"}


def _library() -> Any:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ImportError("a GPU that multiplies FP8")
    return _on("library")


def _torchao() -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    # A wrapper in C is not compiled; a Python function is.
    multiply = torch.compile(_reference, dynamic=False)

    def quantize(weight: Tensor) -> Tensor:
        layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        quantize_(layer, config)
        return layer.weight

    quantized = ByVersion(quantize)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return multiply(x, quantized(weight), bias)

    return call


def _deep_gemm() -> Any:
    from deep_gemm import fp8_gemm_nt

    quantized = ByVersion(lambda weight: quantize_fp8(weight, "128x128"))

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
        fp8_gemm_nt(quantize_fp8(rows, "1x128"), quantized(weight), y)
        y = y if bias is None else y + bias
        y = y if y.dtype == x.dtype else y.to(x.dtype)
        return y if x is rows else y.view(*x.shape[:-1], weight.shape[0])

    return call


def _refuses(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return f"{tuple(x.shape)} by {tuple(weight.shape)}, which are not (..., K) and (N, K)"
    dtypes = {one.dtype for one in (x, weight, bias) if one is not None}
    if x.dtype not in WIDE or len(dtypes) > 1:
        return f"tensors in {', '.join(map(str, dtypes))}: not all in float16, or in bfloat16"
    if not weight.numel():
        return "there are no weights"
    return None


def _work(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Work:
    """Count x and the weights in FP8 read once, and the result written."""
    num_rows = x.numel() // x.shape[-1]
    moved = x.element_size() * (x.numel() + num_rows * weight.shape[0])
    return Work(2 * x.numel() * weight.shape[0], moved + weight.numel())


def _backward_work(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Work:
    """Count both GEMMs: dy, x and the weights read, two gradients written."""
    arriving = x.numel() // x.shape[-1] * weight.shape[0]
    moved = x.element_size() * (2 * x.numel() + 2 * weight.numel() + arriving)
    return Work(4 * x.numel() * weight.shape[0], moved)


KERNEL = Kernel(
    name="fp8_linear",
    replaces="torch's linear layer, in less precision: its weights in float8_e4m3fn",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: fp8_linear, "kprof", is_varying=True),
        Provider(f"{OURS}-wide", lambda: _on("wide"), "kprof", is_varying=True),
        Provider(f"{OURS}-tiles", lambda: _on("tiles"), "kprof", is_varying=True),
        Provider("eager", lambda: _reference, is_varying=True),
        Provider("scaled-mm", _library, is_varying=True),
        Provider("torchao", _torchao, "torchao", is_varying=True),
        Provider("deep-gemm", _deep_gemm, "sgl-deep-gemm", is_varying=True),
    ),
    refuses=_refuses,
    inputs=lambda shape, draw: (
        draw(shape[0], shape[2]),
        draw.plain(shape[1], shape[2], scale=shape[2] ** -0.5),
    ),
    work=_work,
    backward_work=_backward_work,
    shapes=tuple((m, *shape) for shape in LLAMA for m in (1, 8, 64, 512, 4_096)),
    edges=((5, 48, 80), (130, 64, 256), (4_096, 128, 256)),
    reach=(2**17,),
    dtypes=("bfloat16", "float16"),
    differentiable=(0, 1),
    stated_error=STATED_ERROR,
    constant=(1,),
    exact=2,
    rows=(0,),
    needs_gpu="Triton's interpreter rounds to float8 wrongly",
    sources=(
        "Micikevicius and others, FP8 formats for deep learning, arXiv 2209.05433",
        "PyTorch, Float8 training with scales for rows: e4m3 for gradients, too",
    ),
)
