"""Results of attention of many queries on Hopper: from registers by way of shared memory, by TMA.

B batch, H heads, T queries of a sequence, D columns of a head, M rows of a warpgroup; `sizes`
as in `_attention_hopper`.
"""

from __future__ import annotations

from kprof.kernels._gluon import fence_async_shared, gl, gluon, tma
from kprof.kernels._tile_softmax import finish

# The log-sum-exp comes in powers of 2.
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def store(sum_MD, largest_M, total_M, y, y_desc, lse_BHT, sizes, batch, head, row):
    """Store the results of these rows, by way of shared memory."""
    R: gl.constexpr = gl.SliceLayout(1, sum_MD.type.layout)
    largest_M, total_M = gl.convert_layout(largest_M, R), gl.convert_layout(total_M, R)
    mean_MD, lse_M = finish(sum_MD, largest_M, total_M)
    tma.store_wait(0)
    y.reshape([sum_MD.shape[0], sum_MD.shape[1]]).store(mean_MD.to(y.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [batch, head, row, 0], y)
    row_M = row + gl.arange(0, sum_MD.shape[0], R)
    lse_at_M = (batch * sizes[6] + head).to(gl.int64) * sizes[0] + row_M
    gl.store(lse_BHT + lse_at_M, lse_M * LN_2, row_M < sizes[0])
