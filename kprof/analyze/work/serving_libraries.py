"""Work of the operators that serving libraries register for everything but products.

vLLM's stand under `_C`, SGLang's under `sgl_kernel`, mostly with the same arguments. What is
written comes first, or is one of the inputs.
"""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Work
from kprof.analyze.work.elementwise import elementwise_work


def _into(inputs: Inputs, flops_each: int = 1, out: int = 0, x: int = 1) -> Work | None:
    """Model a result that is given, from one tensor: an activation, a conversion with a scale."""
    result, source = inputs.tensor(out), inputs.tensor(x)
    if result is None or source is None:
        return None
    return elementwise_work([source], result.written_as(), flops_each * source.numel)


def _quantized(inputs: Inputs, out: int = 0, x: int = 1, scale: int = 2) -> Work | None:
    """Model a conversion that finds its scales (2 FLOPs each), and writes them too."""
    work, scales = _into(inputs, 2, out, x), inputs.tensor(scale)
    if work is None:
        return None
    return Work(work.flops, work.bytes + (scales.bytes if scales else 0), work.dtype)


def _normed(inputs: Inputs) -> Work | None:
    """Model an RMS norm whose result is the first argument."""
    out, x, weight = (inputs.tensor(i) for i in range(3))
    if out is None or x is None or weight is None:
        return None
    return Work(4 * x.numel, x.bytes + weight.bytes + out.written_as(), "fp32")


def _added_and_normed(inputs: Inputs) -> Work | None:
    """Model adding a residual, then RMS norm: both tensors are read and written."""
    x, residual, weight = (inputs.tensor(i) for i in range(3))
    if x is None or residual is None or weight is None:
        return None
    return Work(5 * x.numel, 2 * (x.bytes + residual.bytes) + weight.bytes, "fp32")


def _normed_and_quantized(inputs: Inputs, adds: bool) -> Work | None:
    """Model an RMS norm into a narrower type, of a sum with a residual or of a tensor alone."""
    out, x, third = (inputs.tensor(i) for i in range(3))
    if out is None or x is None or third is None:
        return None
    moved = out.written_as() + x.bytes + third.bytes * (2 if adds else 1)
    return Work((6 if adds else 5) * x.numel, moved, "fp32")


def _rotated(inputs: Inputs, positions: int, query: int, angles: int) -> Work | None:
    """Model rotary embedding in place: query and key read and written, angles read by position.

    Two products and an addition make each rotated element.
    """
    places, table = inputs.tensor(positions), inputs.tensor(angles)
    rotated = [t for i in (query, query + 1) if (t := inputs.tensor(i)) is not None]
    if places is None or table is None or not rotated:
        return None
    used = places.numel * table.shape[-1] * table.element_bytes
    moved = places.bytes + math.ceil(used) + sum(2 * t.bytes for t in rotated)
    return Work(3 * sum(t.numel for t in rotated), moved, "fp32")


def _stored(inputs: Inputs) -> Work | None:
    """Model storing new keys and values into a cache: both are read, and written in its type."""
    key, value, cache = (inputs.tensor(i) for i in range(3))
    if key is None or value is None or cache is None:
        return None
    return Work(0, sum(t.bytes + t.written_as(cache.dtype) for t in (key, value)))


_ACTIVATIONS = (
    "silu_and_mul mul_and_silu gelu_and_mul gelu_tanh_and_mul fatrelu_and_mul swigluoai_and_mul"
)
_SHAPED = "gelu_new gelu_fast gelu_quick"

MODELS: dict[str, Model] = {
    **{f"{lib}::{n}": _into for lib in ("_C", "sgl_kernel") for n in _ACTIVATIONS.split()},
    **{f"_C::{name}": _into for name in _SHAPED.split()},
    "_C::silu_and_mul_quant": _into,
    "_C::static_scaled_fp8_quant": partial(_into, flops_each=1),
    "_C::static_scaled_int8_quant": partial(_into, flops_each=1),
    "_C::dynamic_scaled_fp8_quant": _quantized,
    "_C::dynamic_per_token_scaled_fp8_quant": _quantized,
    "_C::dynamic_scaled_int8_quant": _quantized,
    "_C::per_token_group_fp8_quant": partial(_quantized, out=1, x=0),
    "_C::per_token_group_quant_int8": partial(_quantized, out=1, x=0),
    "_C::scaled_fp4_quant": partial(_quantized, scale=2),
    "sgl_kernel::sgl_per_token_quant_fp8": partial(_quantized, out=1, x=0),
    "sgl_kernel::sgl_per_tensor_quant_fp8": partial(_quantized, out=1, x=0),
    "sgl_kernel::sgl_per_token_group_quant_fp8": partial(_quantized, out=1, x=0),
    "sgl_kernel::sgl_per_token_group_quant_8bit": partial(_quantized, out=1, x=0),
    "sgl_kernel::sgl_per_token_group_quant_int8": partial(_quantized, out=1, x=0),
    "_C::rms_norm": _normed,
    "sgl_kernel::rmsnorm": _normed,
    "sgl_kernel::gemma_rmsnorm": _normed,
    "_C::fused_add_rms_norm": _added_and_normed,
    "sgl_kernel::fused_add_rmsnorm": _added_and_normed,
    "sgl_kernel::gemma_fused_add_rmsnorm": _added_and_normed,
    "_C::rms_norm_static_fp8_quant": partial(_normed_and_quantized, adds=False),
    "_C::fused_add_rms_norm_static_fp8_quant": partial(_normed_and_quantized, adds=True),
    "_C::rotary_embedding": partial(_rotated, positions=0, query=1, angles=4),
    "_C::batched_rotary_embedding": partial(_rotated, positions=0, query=1, angles=4),
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": partial(
        _rotated, positions=5, query=0, angles=4
    ),
    "_C_cache_ops::reshape_and_cache_flash": _stored,
    "_C_cache_ops::reshape_and_cache": _stored,
}
