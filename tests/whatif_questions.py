"""Asks what a step of a simulated program would take after changes."""

from kprof.analyze.what_if.baseline import find_baseline
from kprof.analyze.what_if.changes import FASTER, GRAPHED, Change
from kprof.analyze.what_if.predict import predict
from kprof.analyze.what_if.targets import Target
from tests.simulated import record

MM, NORM = Target("kernel", "mm"), Target("kernel", "norm")
GRAPHS = Change(GRAPHED)


def ask(program, *changes):
    return predict(changes, find_baseline(record(program)))


def doubled(target):
    return Change(FASTER, target, 2.0)
