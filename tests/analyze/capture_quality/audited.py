"""Asks the audit of a trace."""

from kprof.analyze.capture_quality.audit import audit

HOST_AND_GPU = "Clocks of host and GPU"


def check(trace, name):
    """Return the one check of this name."""
    (found,) = [check for check in audit(trace) if check.name == name]
    return found


def names_of(trace):
    return {check.name for check in audit(trace)}
