"""Plain words for kprof's technical names, with numbers rounded to their interval.

A number has no more digits than its interval allows, and its unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kprof.comparison import Claim, Interval, Metric
from kprof.report.units import MISSING

_TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
MOST_DECIMALS = 4


def decimals_for(uncertainty: float) -> int:
    """Return how many decimals a number deserves: one digit of its uncertainty, two of a 1 or 2.

    Negative: it is to be rounded to tens, hundreds and so on.
    """
    if not 0 < uncertainty < math.inf:
        return MOST_DECIMALS
    place = math.floor(math.log10(uncertainty))
    leading = uncertainty / 10.0**place
    return min(-place + (leading < 2.95), MOST_DECIMALS)


def rounded(value: float, decimals: int) -> str:
    """Write a number with so many decimals, thousands separated; none below zero."""
    shown = round(value, decimals)
    return f"{shown + 0.0:,.{max(decimals, 0)}f}"


def within(low: float, middle: float, high: float, most_digits: int = 4) -> tuple[str, str, str]:
    """Return low, middle and high, all with the decimals that half their distance allows."""
    decimals = min(decimals_for((high - low) / 2), _limit(middle, most_digits))
    shown = [rounded(value, decimals) for value in (low, middle, high)]
    return shown[0], shown[1], shown[2]


def across(low: float, high: float) -> tuple[str, str]:
    """Return the ends of an interval around zero, with digits enough that neither looks like it."""
    decimals = decimals_for((high - low) / 2)
    for end in (low, high):
        if end:
            decimals = max(decimals, _limit(end, 1))
    decimals = min(decimals, 3)
    return rounded(low, decimals), rounded(high, decimals)


def _limit(value: float, most_digits: int) -> int:
    """Return the decimals at which a value has so many significant digits."""
    if not value or not math.isfinite(value):
        return most_digits - 1
    return most_digits - 1 - math.floor(math.log10(abs(value)))


def percent_range(low: float, high: float) -> str:
    """Write a range of shares of one in percent, as in '11 to 13 %'."""
    width = 100 * (high - low)
    decimals = min(max(-math.floor(math.log10(width)), 0), 2) if width > 0 else 1
    few, many = rounded(100 * low, decimals), rounded(100 * high, decimals)
    return f"{few} %" if few == many else f"{few} to {many} %"


def gain_range(low: float, high: float) -> str:
    """Write a range of savings: what may be nothing is written as 'up to'."""
    if low > 0:
        return percent_range(low, high)
    decimals = min(max(_limit(100 * high, 2), 0), 2)
    return f"up to {rounded(100 * high, decimals)} %"


def time_within(time_ns: float | None, share: float = 0.005) -> str:
    """Write a time that is known to this share of itself."""
    if time_ns is None or math.isnan(time_ns):
        return MISSING
    if not time_ns or not share:
        return exact_time(time_ns)
    place = math.floor(math.log10(abs(time_ns) * share))
    place = max(place, math.floor(math.log10(abs(time_ns))) - 3)
    # Rounded before a unit is chosen: 999.6 µs is 1 ms.
    nearest = round(time_ns, -place)
    size, unit = _unit_of(nearest)
    return f"{rounded(nearest / size, round(math.log10(size)) - place)} {unit}"


def _unit_of(time_ns: float) -> tuple[float, str]:
    return next((u for u in _TIME_UNITS if abs(time_ns) >= u[0]), _TIME_UNITS[-1])


def exact_time(time_ns: float) -> str:
    """Write a time that the user set, with all its digits."""
    size, unit = _unit_of(time_ns)
    return f"{time_ns / size:,.12g} {unit}"


def dollars(low: float, middle: float, high: float) -> str:
    """Write an amount of money in the middle of its band, with the band where there is one.

    A band is of price lists more than of measurements, so two digits stay however wide it is.
    """
    if low == high:
        return _dollar_sign(rounded(middle, _decimals_of_money(middle)))
    least = _limit(middle, 2)
    decimals = min(max(decimals_for((high - low) / 2), least), _limit(middle, 3))
    # Dollars and cents, never dimes.
    decimals = 2 if decimals == 1 else decimals
    few, shown, many = (_dollar_sign(rounded(value, decimals)) for value in (low, middle, high))
    return shown if few == many else f"{shown} ({few} to {many})"


def _decimals_of_money(value: float) -> int:
    """Return the decimals of an amount that has no band: cents, or two digits below a dollar."""
    if abs(value) >= 100 or not value:
        return 0
    return 2 if abs(value) >= 1 else min(_limit(value, 2), 6)


def _dollar_sign(shown: str) -> str:
    return f"-${shown[1:]}" if shown.startswith("-") else f"${shown}"


KINDS = {
    "gemm": "Matrix multiplication",
    "attention": "Attention",
    "convolution": "Convolution",
    "norm": "Normalisation",
    "softmax": "Softmax",
    "elementwise": "Elementwise operations",
    "reduction": "Reductions (sums, maxima)",
    "embedding": "Embedding",
    "indexing": "Indexing",
    "copy": "Copying",
    "set": "Clearing memory",
    "optimizer": "Optimizer",
    "collective": "Exchange between GPUs",
    "loss": "Loss",
    "sort": "Sorting",
    "random": "Random numbers",
    "other": "Other work",
}
WAITS = {
    "launch-bound": "Idle: the CPU launches work too slowly",
    "data loading": "Idle: waiting for data",
    "synchronization": "Idle: CPU and GPU wait for each other",
    "pageable copy": "Idle: a slow copy from CPU memory",
    "allocator": "Idle: memory is being allocated",
    "collective wait": "Idle: waiting for another GPU",
    "dependency wait": "Idle: waiting for an earlier result",
    "between kernels": "Idle: gaps between kernels",
    "profiler": "Idle: the recorder itself",
    "no work": "Idle: no work was requested",
    "load imbalance": "Not recorded: steps of other GPUs take longer",
}
BOUNDS = {
    "memory": "limited by memory",
    "compute": "limited by arithmetic",
    "issue": "limited by other instructions",
    "latency": "too small to fill the GPU",
}
VERDICTS = {
    "FASTER": "Faster, proven",
    "SLOWER": "Slower, proven",
    "SAME": "No difference that matters",
    "INCONCLUSIVE": "Inconclusive",
    "INVALID": "Not a valid measurement",
}
OF_OTHERS = {"FASTER": "Better, proven", "SLOWER": "Worse, proven"}
"""The verdicts' names for metrics other than time."""
SLA_VERDICTS = {
    "MET": "Met, proven",
    "MISSED": "Missed, proven",
    "NOT PROVEN": "Not proven",
    "NOT MEASURED": "Not measured",
}
STATES = {
    "passed": "Passed",
    "failed": "Failed",
    "undecided": "Undecided",
    "not run": "Not run",
}
SYMBOLS = {"good": "✓", "warning": "✗", "plain": "?"}

MANY_TIMES = 1.5
_SWAP, _INSIDE = re.compile(r"--swap (\S+)"), re.compile(r"inside (\S+):(\w+)")


def marked(tone: str, text: str) -> str:
    """Put the symbol of a tone before a text, so that colour is never all there is."""
    return f"{SYMBOLS[tone]} {text}"


def verdict_in_words(claim: Claim) -> str:
    """Say a verdict on time, or on energy or a rate, which are not faster but better."""
    is_time = claim.metric.unit == "ns"
    words = VERDICTS[claim.verdict]
    return words if is_time else OF_OTHERS.get(claim.verdict, words)


def change_in_words(interval: Interval, metric: Metric) -> str:
    """Say a change with its interval: '12 % less time (11 % to 13 %)', '24 times as fast'."""
    what = "time" if metric.unit == "ns" else metric.name.removesuffix(" of a step")
    if interval.ratio <= 1 / MANY_TIMES or interval.ratio >= MANY_TIMES:
        if is_many_times_as_fast(interval, metric):
            low, middle, high = within(1 / interval.high, 1 / interval.ratio, 1 / interval.low)
            return f"{middle} times as fast ({low} to {high})"
        low, middle, high = within(interval.low, interval.ratio, interval.high)
        return f"{middle} times the {what} ({low} to {high})"
    ends = 100 * (interval.low - 1), 100 * (interval.high - 1)
    low, middle, high = within(ends[0], 100 * (interval.ratio - 1), ends[1])
    if interval.low <= 1 <= interval.high:
        low, high = across(*ends)
        return f"between {_signed(low)} and {_signed(high)} {what}"
    if interval.ratio < 1:
        low, middle, high = (text.lstrip("-") for text in (high, middle, low))
        return f"{middle} % less {what} ({low} % to {high} %)"
    return f"{middle} % more {what} ({low} % to {high} %)"


def is_many_times_as_fast(interval: Interval, metric: Metric) -> bool:
    """Tell whether `change_in_words` says a gain as 'N times as fast'."""
    return metric.unit == "ns" and interval.ratio <= 1 / MANY_TIMES


def _signed(percent: str) -> str:
    if percent.startswith("-"):
        return f"{percent[1:]} % less"
    return f"{percent} % more"


def changed_in_words(difference: str) -> str:
    """Say how B differs from A in plain words; what is not known stays as it was typed."""
    if swapped := _SWAP.fullmatch(difference):
        return f"kernels swapped in: {swapped[1].replace(',', ', ')}"
    if inside := _INSIDE.fullmatch(difference):
        name = inside[2].replace("_", " ").replace("cuda", "CUDA")
        return f"{name}, switched on by {inside[1]}"
    words = difference.split()
    for option, what in (("--arg", "with the arguments"), ("--env", "with the variables")):
        if words[::2] and set(words[::2]) == {option} and len(words) % 2 == 0:
            return f"{what} {' '.join(words[1::2])}"
    return difference


def share_in_words(share: float) -> str:
    """Write a share of one in percent with two digits, as in '0.12 %' or '34 %'."""
    percent = 100 * share
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.01:
        return "less than 0.01 %"
    return f"{rounded(percent, 0 if abs(percent) >= 9.5 else 1 if abs(percent) >= 0.95 else 2)} %"


def gained(name: str, units: Iterable[str]) -> str:
    """Name a gain: per step where no other figure is per token, because no tokens were given."""
    return name if any("token" in unit for unit in units) else name.replace("token", "step")


def without_letters(doubt: str) -> str:
    """Replace A and B by the words of the page, which has not introduced them yet."""
    return doubt.replace("While B ran ", "With the change ").replace(
        " than under A", " than without"
    )
