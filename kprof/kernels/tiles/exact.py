"""exp, division in float32 as exact as torch's; Triton's own are approximate.

The approximate ones suffice where results are rounded to 16 bits; IS_EXACT selects.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# ln(2) in two parts: products of the first one with integers are exact.
LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)
LN2_LOW: tl.constexpr = tl.constexpr(-2.1219444005469057e-4)
# Above it, 2 to this power is not a normal number.
MOST_POWER: tl.constexpr = tl.constexpr(126.0)


@triton.jit
def exp(x, IS_EXACT: tl.constexpr):
    """Return the exponential of x: an integer power of two times exp of a small rest."""
    if not IS_EXACT:
        return tl.exp(x)
    power = tl.floor(x * LOG2E + 0.5)
    rest = x - power * LN2_HIGH - power * LN2_LOW
    result = tl.exp2(rest * LOG2E) * tl.exp2(power)
    return tl.where(tl.abs(power) <= MOST_POWER, result, tl.exp(x))


@triton.jit
def divide(x, y, IS_EXACT: tl.constexpr):
    """Return x / y."""
    return tl.div_rn(x, y) if IS_EXACT else x / y
