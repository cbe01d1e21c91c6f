"""Verdicts on pairs of samples: which of two variants is better, or that nobody can tell."""

from kprof.analyze.verdict.judge import is_enough, judge

__all__ = ["is_enough", "judge"]
