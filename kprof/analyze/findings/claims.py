"""The parts of a finding: numbers in words, places, the proving command, the kernel fix."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kprof.analyze.findings.queries import (
    Int64s,
    count_steps,
    is_of_torch,
    is_one_of,
    per_step,
    total_ns,
    whole_of,
)
from kprof.analyze.groupings import collapse_layers
from kprof.analyze.idle.causes import worst_places
from kprof.analyze.whatif.changes import SHORTEST_KERNEL_NS
from kprof.errors import counted, three_digits
from kprof.findings import NOT_CALLED, Fix, Grade
from kprof.trace import Trace

NUM_PLACES = 3
# Reasons why a kernel does not run, the most frequent ones.
NUM_REASONS = 2
LONGEST_NAME = 100
TIME_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))
SCRIPT = "SCRIPT"


def idle_places(trace: Trace, rows: Int64s) -> tuple[str, ...]:
    """Return where pieces of idle time lie: line, operator and module, costliest first."""
    worst = worst_places(trace.idle.iloc[rows], NUM_PLACES)
    found = []
    for row in worst.to_dict("records"):
        known = (row[c] for c in ("line", "place", "module") if isinstance(row[c], str))
        said = ", ".join(dict.fromkeys(clipped(name) for name in known))
        found.append(f"{said}: {in_words(per_step(trace, row['time_ns']))} of {whole_of(trace)}")
    return tuple(found)


def work_places(trace: Trace, rows: Int64s) -> tuple[str, ...]:
    """Return where activities lie: modules, alike layers as one, or operators; longest first."""
    kernels = trace.kernels[["module", "op", "duration_ns"]].iloc[rows]
    column = "module" if kernels["module"].notna().any() else "op"
    named = collapse_layers(kernels[column])
    is_known = named.notna().to_numpy(bool)
    code = named.cat.codes.to_numpy()[is_known]
    names = named.cat.categories.tolist()
    time_ns = np.zeros(len(names), dtype=np.int64)
    np.add.at(time_ns, code, kernels["duration_ns"].to_numpy(np.int64)[is_known])
    count = np.bincount(code, minlength=len(names))
    found = np.flatnonzero(count)
    steps, whole = count_steps(trace), whole_of(trace)
    return tuple(
        f"{clipped(str(names[at]))}: {in_words(time_ns[at] / steps)} of {whole}, "
        f"{launches_in_words(count[at] / steps)}"
        for at in found[np.argsort(-time_ns[found], kind="stable")][:NUM_PLACES].tolist()
    )


def clipped(name: str) -> str:
    """Return a name, cut where it is longer than anybody reads: a file may hold any."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def launches_in_words(number: float) -> str:
    """Return a number of launches with its noun."""
    text = f"{number:,.0f}" if number >= 9.5 else f"{number:.3g}"
    return f"{text} {'launch' if text == '1' else 'launches'}"


def times_in_words(number: float) -> str:
    """Return how often something happens in a step: once, 2 times, 0.33 times, 5,480 times."""
    text = three_digits(number)
    return "once" if text == "1" else f"{text} times"


def in_words(time_ns: float) -> str:
    """Return a time with its unit, in three digits."""
    for size, unit in TIME_UNITS:
        # Three digits of the next smaller unit would read 1000.
        if abs(time_ns) >= 0.9995 * size:
            return f"{three_digits(time_ns / size)} {unit}"
    return f"{time_ns:.0f} ns"


def percent(share: float) -> str:
    """Return a share of one in percent, in no more digits than such a share is worth."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def size_in_words(num_bytes: float) -> str:
    """Return a size of memory in powers of 1024."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{three_digits(num_bytes / 2**power)} {unit}"
    return f"{num_bytes:.0f} B"


def proof(trace: Trace, *difference: str) -> str:
    """Return the command that would prove a change: the recorded one as A, with `difference` as B.

    Where the command is unknown, SCRIPT stands for it.
    """
    words, is_python = _recorded_words(trace)
    return shlex.join(["kprof", "ab", *difference, *([] if is_python else ["--"]), *words])


@dataclass(frozen=True)
class Recommended:
    """What a finding says of a kernel of the library, by the dry run of the recorded workload."""

    swap: str | None
    """The kernel; None: it would not run."""
    command: str
    """The command that proves the gain; empty: the kernel would not run."""
    dry_run: str
    effort: Grade


def recommend(trace: Trace, kernel: str, effort: Grade = "low") -> Recommended:
    """Return whether a swap of this kernel would run in the workload, or what prevents it.

    Where it would not, the fix is left to the reader, with `effort` "medium" at the least.
    """
    outcome = trace.meta.dry_run
    command = proof(trace, "--swap", kernel)
    if outcome is None or outcome.why_not or kernel not in outcome.kernels:
        told = "" if outcome is None else outcome.why_not or outcome.why_others
        why = f": {told}" if told else ""
        return Recommended(kernel, command, f"not checked{why}", effort)
    rows = [row for row in outcome.rows if row.kernel == kernel]
    fitting = sum(row.num_sites for row in rows if row.provider is not None)
    others = [row for row in rows if row.provider is None and row.why != NOT_CALLED]
    uncalled = sum(row.num_sites for row in rows if row.why == NOT_CALLED)
    reasons = "; ".join(
        f"{row.why} ({counted(row.num_sites, 'call site')})" for row in others[:NUM_REASONS]
    )
    if fitting:
        said = f"{kernel} fits {counted(fitting, 'call site')}"
        return Recommended(
            kernel, command, f"{said}; elsewhere: {reasons}" if reasons else said, effort
        )
    if uncalled and not others:
        said = f"{counted(uncalled, 'call site')} of {kernel}, not called after the recording"
        return Recommended(kernel, command, f"not checked: {said}", effort)
    why = reasons or "no call site was found"
    return Recommended(
        None, "", f"{kernel} would not run: {why}", "medium" if effort == "low" else effort
    )


def proof_by_copy(trace: Trace, ending: str) -> str:
    """Return the command that compares the script with a changed copy of it: `train_ENDING.py`.

    Empty where a program that does not use torch was recorded, or what is no script.
    """
    words, is_python = _recorded_words(trace)
    if (
        not is_python
        or not is_of_torch(trace)
        or not (words[0] == SCRIPT or words[0].endswith(".py"))
    ):
        return ""
    other = f"{words[0].removesuffix('.py')}_{ending}.py"
    return shlex.join(["kprof", "ab", "--python", words[0], other, *words[1:]])


def _recorded_words(trace: Trace) -> tuple[list[str], bool]:
    """Return the recorded command without its interpreter, and whether Python runs it."""
    words = list(trace.meta.command)
    if not words:
        return [SCRIPT], True
    if re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?", Path(words[0]).name) and words[1:]:
        return words[1:], True
    return words, words[0].endswith(".py")


# Share of a large copy's bandwidth that good kernels reach.
WELL_USED, POORLY_USED = 0.9, 1 / 3
LEFT_OVER = 0.1


def fused(trace: Trace, rows: Int64s, num_bytes: float, launches: int) -> Fix:
    """Return the fix of doing with `launches` what the rows do, in one pass over `num_bytes`.

    At best that is done at nine tenths of the memory's bandwidth; modestly at a third of it, or no
    better than the rows use it now, and a tenth of their time remains, which the kernel does not
    reach. Where the bytes are not known (0), anything from no gain to all of it.
    """
    took = total_ns(trace, rows)
    shortest = launches * SHORTEST_KERNEL_NS
    at_best = memory_ns(trace, num_bytes)
    moved = int(trace.kernels["bytes"].to_numpy(np.int64, na_value=0)[rows].sum())
    if not num_bytes or at_best is None or moved <= 0:
        return Fix(best_ns=min(shortest, took), modest_ns=took, launches=launches)
    best = min(max(round(at_best / WELL_USED), shortest), took)
    slowly = max(took * num_bytes / moved, at_best / POORLY_USED, shortest)
    modest = min(round(slowly + LEFT_OVER * took), took)
    return Fix(best_ns=best, modest_ns=modest, launches=launches)


def item_size(trace: Trace, rows: Int64s) -> int:
    """Return the bytes of an element of the model's type: 2 where some rows are of 16 bits."""
    is_half = is_one_of(trace.kernels["dtype"], "bf16", "fp16")[rows]
    return 2 if is_half.any() else 4


def memory_ns(trace: Trace, num_bytes: float) -> int | None:
    """Return how long moving so many bytes takes at the memory's bandwidth; None if not known."""
    device = trace.meta.device
    return round(num_bytes / device.memory_bytes_per_s * 1e9) if device else None
