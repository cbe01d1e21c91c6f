"""Activations and their derivatives, element by element."""

from __future__ import annotations

import triton
import triton.language as tl

from kprof.kernels.tiles.exact import divide, exp

SILU: tl.constexpr = tl.constexpr(0)
GELU_TANH: tl.constexpr = tl.constexpr(1)
GELU_ERF: tl.constexpr = tl.constexpr(2)
# x * sigmoid(1.702 x), the GELU of CLIP.
GELU_SIGMOID: tl.constexpr = tl.constexpr(3)


@triton.jit
def activate(gate, KIND: tl.constexpr, IS_EXACT: tl.constexpr):
    """Return the activation of float32 numbers, and its derivative."""
    if KIND == GELU_ERF:
        power = exp(-0.5 * gate * gate, IS_EXACT)
        if IS_EXACT:
            cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        else:
            cdf = _normal_cdf(gate, power)
        return gate * cdf, cdf + gate * (0.3989422804014327 * power)
    # As tanh(u) = 2 sigmoid(2u) - 1, SiLU and these GELUs are the gate times a sigmoid.
    inner = gate
    slope = 1.0
    if KIND == GELU_SIGMOID:
        inner = 1.702 * gate
        slope = 1.702
    if KIND == GELU_TANH:
        square = gate * gate
        inner = 1.5957691216057308 * (gate + 0.044715 * square * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
    power = exp(-inner, IS_EXACT)
    sigmoid = divide(tl.full(gate.shape, 1.0, tl.float32), 1.0 + power, IS_EXACT)
    # 1 - sigmoid, without cancellation.
    rest = tl.where(inner < 0.0, 1.0 - sigmoid, power * sigmoid)
    return divide(gate, 1.0 + power, IS_EXACT), sigmoid + gate * sigmoid * rest * slope


@triton.jit
def _normal_cdf(x, power):
    """Return the normal distribution function of x, from exp(-x² / 2), within 8e-8.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; erf takes twice as long.
    """
    t = 1.0 / (1.0 + 0.23164188 * tl.abs(x))
    sum = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * power * t * (0.254829592 + t * (-0.284496736 + t * sum))
    return tl.where(x < 0.0, tail, 1.0 - tail)
