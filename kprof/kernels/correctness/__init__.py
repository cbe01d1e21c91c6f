"""The quality gate: whether a replacement computes what the code it replaces computes.

`check(subject)` runs levels L0 to L6 and says which class of equivalence was reached. Importing
this package imports no torch; the modules of the levels do.
"""

from kprof.kernels.correctness.check import check
from kprof.kernels.correctness.levels import GateReport, Level, Measure
from kprof.kernels.correctness.scope import Scope
from kprof.kernels.correctness.subject import Case, Curve, Generation, Model, Subject, Timing

__all__ = [
    "Case",
    "Curve",
    "GateReport",
    "Generation",
    "Level",
    "Measure",
    "Model",
    "Scope",
    "Subject",
    "Timing",
    "check",
]
