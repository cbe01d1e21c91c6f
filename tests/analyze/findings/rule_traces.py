"""Traces for rules: activities one after another, each launched by an operator with its shapes."""

from __future__ import annotations

import json

from kprof.device import Device
from kprof.trace import Gpu
from tests.traces import analyzed_trace_of

US, MS = 1_000, 1_000_000
BETWEEN_NS = 1_400
GPU = Gpu(0, "Test GPU", num_sms=132, memory_bytes=80 << 30)
DEVICE = Device(
    name="Test GPU",
    memory_bytes_per_s=4e12,
    flops_per_s={"bf16": 1000e12, "fp16": 1000e12, "tf32": 500e12, "fp8": 2000e12, "fp32": 60e12},
    source="made up: round figures for tests",
    num_sms=132,
)
X = [4, 1024, 2048]


def ran(op, ns, kind="elementwise", *, shapes=None, **more):
    """Return one activity of an operator; `shapes` are those of its inputs."""
    return {
        "name": f"{op}_kernel",
        "op": op,
        "kind": kind,
        "dtype": "bf16",
        "phase": "forward",
        "duration_ns": ns,
        "shapes": shapes,
        **more,
    }


def work(op, ns, kind, share, *, shapes=None, **more):
    """Return an activity that reaches this share of its roofline, which is the memory's."""
    limit_ns = round(ns * share)
    known = {"limit_ns": limit_ns, "bytes": limit_ns * 4_000, "work_from": "shapes"}
    return ran(op, ns, kind, shapes=shapes, **known, **more)


def product(ns, m=4096, n=4096, k=4096, share=0.8, op="aten::mm", **more):
    """Return a product of (M, K) and (K, N) that reaches this share of its roofline."""
    known = {"limit_ns": round(ns * share), "bound": "compute", "flops": 2 * m * n * k}
    return ran(op, ns, "gemm", shapes=[[m, k], [k, n]], **{**known, **more})


def rest(ns=500 * US):
    """Return what else a step does: a large product that nothing is wrong with."""
    return product(ns, dtype="fp8", op="aten::_scaled_mm")


def trace_of_work(*rows, idle=(), ranges=(), samples=(), **meta):
    """Return an analyzed trace in which these rows run one after another on one stream.

    A row with a `start_ns` stands where it says; what follows goes on from where it ends.
    """
    kernels, operators, now = [], [], 0
    for row in rows:
        shapes, strides = row.get("shapes"), row.get("strides")
        kept = {key: value for key, value in row.items() if key not in ("shapes", "strides")}
        start_ns = kept.get("start_ns", now)
        # Of a compiled or replayed kernel no operator is known.
        if kept.get("op"):
            text = None if shapes is None else json.dumps(shapes)
            operators.append(
                {
                    "name": kept["op"],
                    "start_ns": start_ns,
                    "duration_ns": 2_000,
                    "input_shapes": text,
                    "input_strides": strides and json.dumps(strides),
                }
            )
            kept["op_row"] = len(operators) - 1
        kernels.append({**kept, "start_ns": start_ns, "recomputed": kept.get("recomputed", False)})
        now = start_ns + kept["duration_ns"] + BETWEEN_NS
    # The host is through with the step at once; the device is not.
    mark = {"kind": "step", "name": "0", "duration_ns": 1_000}
    for kernel in kernels:
        kernel["step"] = 0
    return analyzed_trace_of(
        *kernels,
        ranges=[*operators, mark, *ranges],
        idle=idle,
        samples=samples,
        **{"gpus": (GPU,), "device": DEVICE, **meta},
    )


def repeated(rows, times):
    """Return the rows again and again."""
    return [row for _ in range(times) for row in rows]
