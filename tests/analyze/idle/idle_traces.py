"""Traces of two kernels with a gap between them, and what its causes are."""

from kprof.analyze.attribution.attribute import add_attribution, add_host_activity
from kprof.analyze.attribution.kinds import add_kind
from kprof.analyze.idle.assign import add_idle
from tests.traces import trace_of

US = 1_000
LAUNCH = {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": 1, "duration_ns": 5 * US}
WAIT = {"kind": "runtime", "name": "cudaStreamSynchronize"}


def analyzed(*kernels, ranges=(), **meta):
    trace = trace_of(*kernels, ranges=ranges, **meta)
    return add_idle(add_kind(add_attribution(add_host_activity(trace))))


def idle_of(*ranges, launched_at=990 * US, call_ns=5 * US, **second):
    """Return the idle time of a device that did nothing from 100 to 1,000 µs."""
    trace = analyzed(
        {"duration_ns": 100 * US},
        {"start_ns": 1000 * US, "correlation": 1, **second},
        ranges=[{**LAUNCH, "start_ns": launched_at, "duration_ns": call_ns}, *ranges],
    )
    return trace.idle


def causes(*ranges, **options):
    """Return the idle time by cause, in µs, in the order of its pieces."""
    idle = idle_of(*ranges, **options)
    cause = idle["cause"].astype(object).where(idle["cause"].notna(), None)
    return [(c, ns / US) for c, ns in zip(cause, idle["duration_ns"], strict=True)]


def spent(start_us, end_us, **row):
    return {**row, "start_ns": start_us * US, "duration_ns": (end_us - start_us) * US}
