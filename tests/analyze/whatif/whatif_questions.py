"""Asks what a step of a simulated program would take after changes."""

from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import FASTER, GRAPHED, Change, Target
from kprof.analyze.whatif.predict import predict
from tests.analyze.simulated import record

MM, NORM = Target("kernel", "mm"), Target("kernel", "norm")
GRAPHS = Change(GRAPHED)


def ask(program, *changes):
    return predict(changes, find_baseline(record(program)))


def doubled(target):
    return Change(FASTER, target, 2.0)
