"""Numbers as text: the only place where a time, a rate or a share is formatted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kprof.analyze.attribution.steps import find_lead
from kprof.analyze.groupings import count_gpus
from kprof.errors import counted, three_digits
from kprof.findings import Worth
from kprof.trace import Trace

MISSING = "—"
UNKNOWN = "not known"

_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


# From here on three digits of the next smaller unit would read 1000.
ROUNDED_UP = 0.9995


def format_time(time_ns: float | None) -> str:
    """Format a duration with three or four digits and its unit, a missing one as a dash."""
    if time_ns is None or pd.isna(time_ns):
        return MISSING
    for unit_ns, unit in _TIME_UNITS:
        if abs(time_ns) >= ROUNDED_UP * unit_ns:
            return f"{three_digits(time_ns / unit_ns)} {unit}"
    return f"{time_ns:.0f} ns"


def whose_time(*, is_host_only: bool) -> str:
    """Name the time that is accounted for: a device's, or in host mode the operators' own."""
    return "the operators' own time" if is_host_only else "device time"


def and_before(trace: Trace) -> str:
    """Return that a sum of device time holds what was launched before the first step, too."""
    lead = find_lead(trace)
    if not lead.kernels.any():
        return ""
    before_ns = int(trace.kernels["duration_ns"].to_numpy(np.int64)[lead.kernels].sum())
    return f", with {format_time(before_ns)} outside of the steps"


def format_exact(time_ns: int) -> str:
    """Format a duration to the nanosecond."""
    return f"{time_ns:,} ns"


def format_amount(amount: float | None, unit: str) -> str:
    """Format an amount with a decimal prefix, as in 1.98 TB/s; a missing one as a dash."""
    if amount is None or pd.isna(amount):
        return MISSING
    for factor, prefix in _PREFIXES:
        if abs(amount) >= factor:
            return f"{three_digits(amount / factor)} {prefix}{unit}"
    return f"{three_digits(amount)} {unit}"


def format_memory(num_bytes: float) -> str:
    """Format the size of a memory in powers of 1024, as in 80 GiB."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{three_digits(num_bytes / 2**power)} {unit}"
    return f"{num_bytes:.0f} B"


def format_range(low: str, high: str) -> str:
    """Format two ends of an interval; one where both read the same."""
    return low if low == high else f"{low} to {high}"


def format_share(share: float | None) -> str:
    """Format a share of one in percent; a missing one as a dash."""
    if share is None or pd.isna(share):
        return MISSING
    if 0 < share < 0.00005:
        return "< 0.01 %"
    if 0 < share < 0.001:
        return f"{100 * share:.2f} %"
    return f"{100 * share:.1f} %"


def format_worth(worth: Worth | None) -> str:
    """Format dollars a month from the least to the most, in two digits; missing as a dash."""
    if worth is None:
        return MISSING
    most = _two_digits(worth.high_usd)
    return f"{_two_digits(worth.low_usd)} to {most}" if worth.low_usd > 0 else f"up to {most}"


def _two_digits(usd: float) -> str:
    if usd <= 0:
        return "$0"
    place = math.floor(math.log10(usd))
    # Dollars and cents, never dimes.
    decimals = max(1 - place, 0)
    return f"${round(usd, 1 - place):,.{2 if decimals == 1 else decimals}f}"


def format_share_of_limit(group: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    """Format time at the roofline over the time taken by the rows of a group that have a limit."""
    if not group.limited_time_ns or pd.isna(group.limit_ns):
        return MISSING
    share = format_share(group.limit_ns / group.limited_time_ns)
    return f"≥ {share}" if group.is_least else share


def format_saving(group: Any) -> str:  # noqa: ANN401 - a named tuple of pandas
    """Format what a group would save at its roofline."""
    if not group.limited_time_ns:
        return MISSING
    saving = format_time(group.saving_ns)
    return f"≤ {saving}" if group.is_least and group.saving_ns else saving


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun, as in '1 step' or '12,000 steps'."""
    return counted(count, noun, plural)


def round_shares(amounts: Sequence[int]) -> list[str]:
    """Format each amount's share in tenths of a percent so that those shown add up to 100.0."""
    tenths = tenths_of_a_percent(amounts)
    return [format_tenths(one) for one in tenths] if tenths else [MISSING] * len(amounts)


def tenths_of_a_percent(amounts: Sequence[int]) -> list[int]:
    """Return each amount's share in tenths of a percent, rounded so that they add up to 1,000.

    Empty where the amounts add up to nothing.
    """
    total = sum(amounts)
    if total <= 0:
        return []
    exact = [1000 * amount / total for amount in amounts]
    tenths = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: tenths[i] - exact[i])
    for i in by_remainder[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return tenths


def format_tenths(tenths: int) -> str:
    """Format a share given in tenths of a percent."""
    return f"{tenths / 10:.1f} %"


def or_missing(value: Any) -> str:  # noqa: ANN401 - a cell of pandas
    """Return the text of a value of a table, a dash for a missing one."""
    return MISSING if value is None or pd.isna(value) else str(value)


def shorten(name: str, width: int) -> str:
    """Cut a long name in its middle, where kernel names differ least."""
    if len(name) <= width:
        return name
    tail = max((width - 1) // 3, 0)
    return name[: width - 1 - tail] + "…" + (name[-tail:] if tail else "")


def of_all(trace: Trace) -> str:
    """Return that times are of all GPUs, or ranks, together; nothing where there is one of them."""
    if has_several_gpus_a_rank(trace):
        return " of all GPUs together"
    return " of all ranks together" if trace.meta.num_ranks > 1 else ""


def has_several_gpus_a_rank(trace: Trace) -> bool:
    """Tell whether one process drove several GPUs."""
    return count_gpus(trace.kernels) > max(int(trace.kernels["rank"].nunique()), 1)
