"""Verdicts on pairs of samples: which of two variants is better, or that it is inconclusive."""

from kprof.analyze.verdict.judge import is_enough, judge

__all__ = ["is_enough", "judge"]
