"""Launches whose work and ceilings are easy to reckon, and what the roofline says of them."""

from dataclasses import replace

from kprof.analyze.roofline.bound import add_roofline
from tests.analyze.calls import recorded, tensor
from tests.traces import ROUND_DEVICE, trace_of

# 1 us for whatever, and 4 TB/s more; the memory of ROUND_DEVICE does 1 TB/s.
CACHED = replace(
    ROUND_DEVICE, cache_bytes=16_000_000, cached_copies=((4_000_000, 2000.0), (8_000_000, 3000.0))
)
# In bf16: 2*1000*1000*1000 = 2e9 FLOPs, 20 us at 100 TFLOP/s; 6 MB, 6 us at 1 TB/s.
SQUARE = tensor("bf16", 1000, 1000)
PRODUCT = {"name": "aten::mm", **recorded(SQUARE, SQUARE)}
# 1 MB read, 1 MB written: 2 us at 1 TB/s.
COPY = {
    "name": "aten::copy_",
    **recorded(tensor("bf16", 500, 1000), tensor("bf16", 500, 1000), False),
}
GPU_COPY = "Memcpy DtoD (Device -> Device)"
LIST_KERNEL = (
    "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<1>, "
    "at::native::BinaryOpScalarFunctor<float, 1, 1, 0>"
)


def measured(*kernels, ranges=(), device=ROUND_DEVICE):
    """The roofline columns of `kernels`, which carry attribution and kinds."""
    trace = trace_of(*kernels, ranges=ranges, passes=("attribute", "classify"), device=device)
    return add_roofline(trace)


def columns(trace, *names):
    """The rows of some columns as tuples, with None for what is missing."""
    table = trace.kernels[list(names)].astype(object)
    return [tuple(row) for row in table.where(table.notna(), None).itertuples(index=False)]
