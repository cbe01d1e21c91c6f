"""Steps with what the rules look for, and steps that only resemble them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd

from kprof.analyze.idle.assign import add_idle
from kprof.analyze.passes import PASSES
from kprof.collect.readers.kineto.reader import read
from kprof.trace import Trace
from tests.analyze.findings.rule_traces import (
    MS,
    US,
    X,
    product,
    ran,
    repeated,
    rest,
    trace_of_work,
    work,
)
from tests.planted.machine import Machine
from tests.planted.workloads import PLANTED, forward, train
from tests.traces import analyzed_trace_of

Build = Callable[[], Trace]


@cache
def planted(name: str, *, is_faulty: bool) -> Trace:
    """Return the attributed trace of a planted workload, with its idle time explained."""
    workload = PLANTED[name]
    machine = Machine(1, stacks=workload.stacks)
    workload.run(machine, is_faulty)
    return explained(machine)


def explained(machine: Machine) -> Trace:
    """Return a machine's trace after all passes up to the one that explains idle time."""
    with tempfile.TemporaryDirectory() as folder:
        trace = read(machine.write(Path(folder) / "trace.json"))
    for add in PASSES[: PASSES.index(add_idle) + 1]:
        trace = add(trace)
    return trace


def trained(**places) -> Build:
    """Return how to simulate training with something at these places of each step."""

    def build() -> Trace:
        machine = Machine(1)
        train(machine, **places)
        return explained(machine)

    return build


def uploads(*, pinned):
    """Return what brings many small tensors to the GPU."""

    def upload(machine) -> None:
        for _ in range(20):
            machine.upload(5 * US, pinned=pinned)

    return upload


def pause(ns, cause="launch-bound", at=600 * US, **more):
    """Return one piece of idle time that could be recovered."""
    return {"cause": cause, "start_ns": at, "duration_ns": ns, "recoverable_ns": ns, **more}


def decoding(rows_of_product, ns=3 * US) -> Trace:
    """Return the forward passes of a model whose products have so many rows and take so long."""
    machine = Machine(1)
    for number in range(4):
        with machine.step(number):
            forward(machine, 60, ns)
    trace = explained(machine)
    is_product = (trace.ranges["name"] == "aten::mm").to_numpy(bool)
    shapes = f"[[{rows_of_product}, 4096], [4096, 4096]]"
    told = pd.Series([shapes if one else None for one in is_product], dtype="category")
    return trace.with_ranges(input_shapes=told)


NORM = "model.layers.0.norm"
RMS_NORM = [
    work("aten::copy_", 20 * US, "copy", 0.5, shapes=[X, X, []], module=NORM, dtype="fp32"),
    work("aten::pow", 15 * US, "elementwise", 0.8, shapes=[X, []], module=NORM, dtype="fp32"),
    work("aten::mean", 12 * US, "reduction", 0.6, shapes=[X, []], module=NORM, dtype="fp32"),
    ran("aten::add", 1 * US, shapes=[[4, 1024, 1]], module=NORM, dtype="fp32"),
    ran("aten::rsqrt", 1 * US, shapes=[[4, 1024, 1]], module=NORM, dtype="fp32"),
    work("aten::mul", 25 * US, "elementwise", 0.5, shapes=[X, []], module=NORM, dtype="fp32"),
    work("aten::mul", 20 * US, "elementwise", 0.4, shapes=[[2048], X], module=NORM),
]
GATE = [4, 1024, 8192]
HEADS, HALF = [4, 32, 1024, 64], [4, 32, 1024, 32]
LOGITS = [4096, 32000]
LARGE_LOGITS = [16384, 64000]


def loss_of(logits, *, softmax="aten::_log_softmax", backward=True):
    """Return the operators of a cross-entropy over logits of this shape."""
    item = logits[0] * logits[1]
    ns = max(item // 300, 1000)
    forward = [
        work("aten::copy_", ns, "copy", 0.5, shapes=[logits, logits], dtype="fp32"),
        work(softmax, ns, "softmax", 0.5, shapes=[logits, []], dtype="fp32"),
        ran("aten::nll_loss_forward", 20 * US, "loss", shapes=[logits, logits[:1]]),
    ]
    back = [
        work("aten::_log_softmax_backward_data", ns, "softmax", 0.5, shapes=[logits, logits]),
        work("aten::copy_", ns, "copy", 0.5, shapes=[logits, logits]),
    ]
    return forward + [{**row, "phase": "backward"} for row in back if backward]


def updated(op, ns, number=12, **more):
    """Return the optimizer's operators."""
    row = work(op, ns, "optimizer", 0.8, phase="optimizer", **more)
    return repeated([row], number)


def attention(*, first="aten::bmm", softmax="aten::_softmax"):
    """Return two products with a softmax between them."""
    scores = [[32, 1024, 1024]]
    return [
        ran(first, 100 * US, "gemm", shapes=[[32, 1024, 64], [32, 64, 1024]], flops=10**10),
        ran("aten::div", 60 * US, shapes=scores),
        ran(softmax, 80 * US, "softmax", shapes=scores),
        ran("aten::bmm", 100 * US, "gemm", shapes=[[32, 1024, 1024]], flops=10**10),
    ]


def joined(lengths, new=1, op="aten::cat"):
    """Return a cache of these lengths that new tokens are appended to."""
    rows = []
    for length in lengths:
        shapes = [[[1, 8, length, 64], [1, 8, new, 64]], []]
        rows += [ran(op, 50 * US, "copy", shapes=shapes, bytes=10**6), rest(100 * US)]
    return rows


def checkpointed(used_bytes, *, recomputed=True) -> Trace:
    """Return a step that computes something again, on a GPU with so much of its memory in use."""
    again = product(300 * US, recomputed=recomputed)
    sample = {"quantity": "memory_used_bytes", "value": float(used_bytes)}
    return trace_of_work(rest(), again, samples=[sample])


def clocked(reason, clock_mhz=1400.0) -> Trace:
    """Return a trace with a reason in every sample near it, and a faster clock long before."""
    near = [
        {"time_ns": i * 100 * US, "quantity": name, "value": value}
        for i in range(4)
        for name, value in (("throttle_reasons", float(reason)), ("sm_clock_mhz", clock_mhz))
    ]
    before = {"time_ns": -(10**11), "quantity": "sm_clock_mhz", "value": 1980.0}
    return trace_of_work(rest(), samples=[before, *near])


def turned(times) -> Trace:
    """Return convolutions with so many changes of layout."""
    turning = ran("aten::convolution", 20 * US, "copy", name="cudnn::ops::nchwToNhwcKernel<half>")
    convolution = ran("aten::cudnn_convolution", 100 * US, "convolution")
    return trace_of_work(*repeated([turning], times), *repeated([convolution], 4), rest())


def tiny(ns, *, late=False) -> Trace:
    """Return kernels of a length with pauses between them: the device's own, or the host's."""
    rows = repeated([ran("aten::add", ns, shapes=[[64]])], 100)
    between = [
        {
            "cause": "launch-bound" if late else "between kernels",
            "start_ns": (ns + 1400) * i + ns,
            "duration_ns": 1400,
            "recoverable_ns": 1400 if late else 0,
            "kernel_row": i + 1,
        }
        for i in range(99)
    ]
    return trace_of_work(*rows, rest(), idle=between)


def chained(*sizes, name=None) -> Trace:
    """Return element-wise operators over tensors of these sizes, one behind the other."""
    rows = [work("aten::mul", 60 * US, "elementwise", 0.8, shapes=[[size]]) for size in sizes]
    rows = [{**row, **({"name": name} if name else {})} for row in rows]
    return trace_of_work(*rows, rest(100 * US))


def moved_between_kernels(*ways, times=4, num_bytes=(1 << 20,) * 2) -> Trace:
    """Return kernels with copies of these ways between each and the next."""
    copies = [
        ran(None, 100 * US, "copy", name=f"Memcpy {way} (Pinned)", activity="memcpy")
        | {"copied_bytes": size}
        for way, size in zip(ways, num_bytes, strict=False)
    ]
    return trace_of_work(*repeated([rest(), *copies], times), rest())


def communicating(*, beside) -> Trace:
    """Return a collective of 200 µs, with another kernel beside it for a share of that time."""
    row = ran(None, 200 * US, "collective", name="ncclDevKernel_AllReduce", stream=20)
    return trace_of_work(
        rest(),
        {**row, "start_ns": 500 * US},
        {**rest(round(200 * US * beside) + 1), "start_ns": 500 * US},
    )


def waiting(late_by_rank) -> Trace:
    """Return collectives of three ranks that begin so late, and end together."""
    rows = []
    for sequence in range(10):
        for rank, late in enumerate(late_by_rank):
            start_ns = sequence * 2 * MS + late
            rows.append(
                {
                    "rank": rank,
                    "name": "ncclDevKernel_AllReduce",
                    "kind": "collective",
                    "start_ns": start_ns,
                    "duration_ns": sequence * 2 * MS + 800 * US - start_ns,
                    "collective": "allreduce",
                    "group": "0 [0, 1, 2]",
                    "group_sequence": sequence,
                }
            )
    return trace_of_work(*rows, num_ranks=3)


def compiling(*names) -> Trace:
    """Return a step in which ranges of these names were open for 200 of 700 µs."""
    ranges = [{"name": name, "start_ns": 500 * US, "duration_ns": 200 * US} for name in names]
    piece = pause(190 * US, at=505 * US, kernel_row=1)
    return trace_of_work(
        rest(), {**rest(10 * US), "start_ns": 700 * US}, ranges=ranges, idle=[piece]
    )


def migrating(number: int, name="UVM DtoH", kernel_ns=400 * US) -> Trace:
    """Return a recording in which so many pages move between the work of the host."""
    moved = {"activity": "memcpy", "copied_bytes": 65_536, "duration_ns": 6 * US}
    pages = [
        moved | {"name": f"Memcpy {name} (Managed -> Managed)", "start_ns": at * 100 * US}
        for at in range(number)
    ]
    kernel = {"start_ns": number * 100 * US, "duration_ns": kernel_ns, "name": "add"}
    idle = [
        {"cause": None, "start_ns": (at - 1) * 100 * US + 6 * US, "duration_ns": 94 * US}
        | {"kernel_row": at}
        for at in range(1, number)
    ]
    return analyzed_trace_of(*pages, kernel, idle=idle)
