"""A trace of which every section has something to say, and what a section says."""

from __future__ import annotations

from functools import cache

from kprof.analyze.passes import analyze
from kprof.report.section import Facts, Section, Table, Text, sections_of
from kprof.trace import Caveat, Recording
from tests.traces import analyzed_trace_of, trace_of

STEP_MS = 1_000_000

RICH = analyzed_trace_of(
    {
        "name": "gemm_kernel",
        "kind": "gemm",
        "dtype": "bf16",
        "flops": 5_000_000,
        "bytes": 10_000,
        "limit_ns": 50,
        "bound": "compute",
        "phase": "forward",
        "module": "layers.0.mlp",
        "op": "aten::mm",
        "op_row": 0,
        "step": 3,
        "bucket": "attributed",
    },
    {
        "name": "copy_kernel",
        "start_ns": 150,
        "kind": "copy",
        "bytes": 50_000,
        "limit_ns": 50,
        "bound": "memory",
        "phase": "backward",
        "module": "layers.1.mlp",
        "gap_before_ns": 50,
        "gap_cause": "launch-bound",
        "step": 3,
    },
    {"name": "strange_kernel", "start_ns": 250, "kind": "other", "gap_before_ns": 0},
    idle=[
        {
            "start_ns": 100,
            "duration_ns": 50,
            "cause": "launch-bound",
            "recoverable_ns": 49,
            "kernel_row": 1,
            "place": "aten::copy_",
            "module": "layers.1.mlp",
        },
        {"start_ns": 350, "duration_ns": 50, "edge": "after"},
    ],
    ranges=[
        {"input_shapes": "[[10, 10], [10, 10]]"},
        {"kind": "step", "name": "3", "duration_ns": 400},
        {"kind": "phase", "name": "forward", "duration_ns": 120},
        {"kind": "module", "name": "layers.0.mlp", "duration_ns": 90},
    ],
    samples=[
        {"time_ns": time_ns, "quantity": quantity, "value": value}
        for time_ns in (0, 200, 400)
        for quantity, value in (
            ("power_w", 300.0),
            ("energy_mj", 1000.0 + 10 * time_ns),
            ("throttle_reasons", 4.0),
        )
    ]
    + [{"source": "profiler", "quantity": "allocated_bytes", "value": 2.0**30}],
    command=("python", "train.py"),
    versions={"torch": "2.13.0"},
    caveats=(Caveat("dropped_records", "12 records were dropped."),),
    recording=Recording(
        step_rule="Training: from one optimizer step's end to the next.",
        num_steps_seen=10,
        steps_recorded=(3,),
        step_clock="device",
        recorded_step_ns=(110 * STEP_MS,),
        unrecorded_step_ns=(100 * STEP_MS, 99 * STEP_MS, 101 * STEP_MS),
    ),
)

HOST_ONLY = analyze(
    trace_of(
        ranges=[{"name": "aten::linear", "duration_ns": 300}, {"start_ns": 50}],
        gpus=(),
    )
)


@cache
def sections_of_rich():
    return sections_of(RICH)


def section(title, trace=RICH) -> Section:
    sections = sections_of_rich() if trace is RICH else sections_of(trace)
    return next(section for section in sections if section.title == title)


def texts(section: Section) -> str:
    return "\n".join(part.text for part in section.parts if isinstance(part, Text))


def warnings(section: Section) -> list[str]:
    told = [part for part in section.parts if isinstance(part, Text)]
    return [text.text for text in told if text.tone == "warning"]


def fact(section: Section, label: str) -> tuple[str, str]:
    items = [item for part in section.parts if isinstance(part, Facts) for item in part.items]
    return next((value, why) for name, value, why in items if name == label)


def tables(section: Section) -> list[Table]:
    return [part for part in section.parts if isinstance(part, Table)]
