"""How much of the device time has known work, on recorded traces and as the result says it."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kprof.analyze.attribution.call_tree import NO_ROW
from kprof.analyze.attribution.ledger import balance
from kprof.analyze.passes import analyze
from kprof.device import find_device
from kprof.opened import read
from kprof.report.result import result_of
from tests.analyze.calls import recorded, tensor
from tests.traces import measured, trace_of

OWN = sorted((Path(__file__).parents[2] / "data" / "h200").glob("*.json.gz"))
SHARED = Path(__file__).parents[4] / "shared" / "traces"
OTHERS = sorted(SHARED.rglob("kineto/**/*.json.gz")) + sorted((SHARED / "h200").glob("*.json.gz"))
TRACES = [pytest.param(path, id=path.name) for path in OWN + OTHERS]

# Twice the largest L2 of the GPUs that these were recorded on. What an operator before left there
# beats the memory, one of three operands as well as all.
IN_CACHE_BYTES = 120 << 20


@cache
def opened(path):
    trace = read([path])
    device = find_device(trace.gpus[0].name) if trace.gpus else None
    return measured(replace(trace, meta=replace(trace.meta, device=device)))


def time_of(kernels, rows):
    return int(kernels["duration_ns"].to_numpy()[rows].sum())


def has_shapes(trace):
    """Tell of every activity whether the operator that launched it had its inputs recorded."""
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    ranges = trace.ranges
    is_recorded = ranges["input_shapes"].notna() | ranges["message"].notna()
    return (op != NO_ROW) & is_recorded.to_numpy()[op]


def modelled_share(trace):
    """Return the share of the time under operators with recorded inputs whose work is known."""
    rows, kernels = has_shapes(trace), trace.kernels
    is_known = kernels["bytes"].notna().to_numpy()
    return time_of(kernels, rows & is_known) / time_of(kernels, rows)


def carries_shapes(path):
    """Tell whether operators with recorded inputs launched at least half of the device time."""
    trace = opened(path)
    time_ns = time_of(trace.kernels, slice(None))
    return not trace.is_host_only and 2 * time_of(trace.kernels, has_shapes(trace)) >= time_ns


def check_coverage(paths):
    carrying = [path for path in paths if carries_shapes(path)]
    under_operators = [modelled_share(opened(path)) for path in carrying]
    of_all = [
        result_of(opened(path), balance(opened(path)))["coverage"]["modelled_share"]
        for path in carrying
    ]
    assert len(carrying) >= len(paths) // 2
    assert np.mean(under_operators) >= 0.99
    assert min(under_operators) >= 0.97
    assert np.mean(of_all) >= 0.95


def test_nearly_all_device_time_of_own_traces_has_known_work():
    check_coverage(OWN)


@pytest.mark.slow
@pytest.mark.skipif(not OTHERS, reason="the recorded traces of others are not here")
def test_nearly_all_device_time_of_traces_with_shapes_has_known_work():
    check_coverage(OWN + OTHERS)


@pytest.mark.parametrize("path", TRACES)
def test_no_ceiling_is_beaten_by_more_than_what_fits_a_cache(path):
    kernels = opened(path).kernels
    limit_ns = kernels["limit_ns"].to_numpy(np.int64, na_value=0)
    is_beaten = limit_ns > 1.02 * kernels["duration_ns"].to_numpy()
    is_large = kernels["bytes"].to_numpy(np.int64, na_value=0) > IN_CACHE_BYTES
    assert kernels[is_beaten & is_large].empty


def coverage(*kernels, ranges=()):
    trace = analyze(trace_of(*kernels, ranges=ranges))
    return result_of(trace, balance(trace))["coverage"]


PRODUCT = {"name": "aten::mm", **recorded(tensor("bf16", 8, 8), tensor("bf16", 8, 8))}
LAUNCH = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1, "duration_ns": 10}


def test_the_result_names_the_largest_kernels_without_known_work():
    found = coverage(
        {"name": "gemm", "duration_ns": 300, "correlation": 1},
        {"name": "odd", "start_ns": 300, "duration_ns": 60},
        {"name": "strange", "start_ns": 400, "duration_ns": 40},
        ranges=[PRODUCT, LAUNCH],
    )
    assert found["modelled_share"] == 0.75
    none = dict.fromkeys(("recorded", "bounds", "alike", "counters", "declared"), 0)
    assert found["share_by_source"] == {"shapes": 0.75, **none}
    assert found["largest_unmodelled"] == [
        {"name": "odd", "op": None, "calls": 1, "time_ns": 60},
        {"name": "strange", "op": None, "calls": 1, "time_ns": 40},
    ]
