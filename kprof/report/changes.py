"""How the report writes a value of A or of B, and how far the two are apart."""

from __future__ import annotations

from kprof.comparison import Interval, Metric
from kprof.report.units import format_amount, format_time


def format_value(value: float, metric: Metric) -> str:
    """Format a value of a metric with its unit."""
    if metric.unit == "J" and 0 < abs(value) < 1:
        return format_amount(1000 * value, "mJ")
    return format_time(value) if metric.unit == "ns" else format_amount(value, metric.unit)


def format_change(ratio: float, metric: Metric) -> str:
    """Say what a ratio of B to A means: 'takes 3.1 % less', or 'takes 3.42 times as much'."""
    verb = "takes" if metric.better == "lower" else "reaches"
    if ratio >= 1.5 or ratio <= 1 / 1.5:
        return f"{verb} {ratio:.3g} times A's {metric.name}"
    if abs(ratio - 1) < 5e-5:
        return f"{verb} as much as A"
    return f"{verb} {format_percent(ratio).lstrip('+-')} {'more' if ratio > 1 else 'less'}"


def format_percent(ratio: float) -> str:
    """Return how far a ratio is from 1, in percent with its sign."""
    percent = 100 * (ratio - 1)
    digits = 2 if abs(percent) < 9.95 else 1
    return f"{percent:+.{digits}f} %"


def format_interval(interval: Interval) -> str:
    """Return an interval as changes in percent."""
    return f"{format_percent(interval.low)} to {format_percent(interval.high)}"
