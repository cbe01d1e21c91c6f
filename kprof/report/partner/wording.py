"""Plain words for what kprof calls by its technical name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kprof.comparison import Claim, Interval, Metric
from kprof.report.partner.digits import across, rounded, within

KINDS = {
    "gemm": "Matrix multiplication",
    "attention": "Attention",
    "convolution": "Convolution",
    "norm": "Normalisation",
    "softmax": "Softmax",
    "elementwise": "Element by element",
    "reduction": "Sums and maxima",
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
    "launch-bound": "Idle: the host hands out work too slowly",
    "data loading": "Idle: waiting for data",
    "synchronization": "Idle: host and GPU wait for each other",
    "pageable copy": "Idle: a slow copy from the host",
    "allocator": "Idle: memory is being allocated",
    "collective wait": "Idle: waiting for another GPU",
    "dependency wait": "Idle: waiting for an earlier result",
    "between kernels": "Idle: between two pieces of work",
    "profiler": "Idle: the recorder itself",
    "no work": "Idle: the program asked for nothing",
}
BOUNDS = {
    "memory": "limited by memory",
    "compute": "limited by arithmetic",
    "latency": "limited by neither",
}
VERDICTS = {
    "FASTER": "Faster, proven",
    "SLOWER": "Slower, proven",
    "SAME": "No difference that matters",
    "INCONCLUSIVE": "Cannot tell yet",
    "INVALID": "Not a valid measurement",
}
OF_OTHERS = {"FASTER": "Better, proven", "SLOWER": "Worse, proven"}
"""What the verdicts are called on what is no time."""
SLA_VERDICTS = {
    "MET": "Kept, proven",
    "MISSED": "Broken, proven",
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
GRADES = {"low": "low", "medium": "medium", "high": "high"}

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
        if metric.unit == "ns" and interval.ratio < 1:
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
    """Name a gain: of a step where no figure beside it is of tokens, as then nobody gave them."""
    return name if any("token" in unit for unit in units) else name.replace("token", "step")


def without_letters(doubt: str) -> str:
    """Name the sides of a comparison as the page does: a reader has not met A and B yet."""
    return doubt.replace("While B ran ", "With the change ").replace(
        " than under A", " than without"
    )
