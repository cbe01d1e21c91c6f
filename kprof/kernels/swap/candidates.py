"""Candidates of `--swap auto`: swaps of one kernel each, entered one after the other.

`kprof ab` times windows of the workload with and without the patch `next_candidate`. Each entry
swaps the next candidate in; a log says when which of them was in, and what it replaced. Beside the
log, `kprof ab` writes the names of candidates that need no more windows.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kprof.errors import KprofError
from kprof.kernels import OURS, Provider, kernel_named
from kprof.kernels.swap.providers import WITH_SITES
from kprof.kernels.swap.swap_report import DECIDED, SwapReport
from kprof.kernels.swap.swapping import Swap


def candidate_names() -> list[str]:
    """Return KERNEL=PROVIDER of all kernels that keep the precision, by kprof and by torch.

    Providers whose results differ from run to run are left out.
    """
    found = []
    for name in sorted(WITH_SITES):
        kernel = kernel_named(name)
        if kernel.stated_error is None:
            found += [f"{name}={one.name}" for one in kernel.providers if _is_candidate(one)]
    return found


def _is_candidate(provider: Provider) -> bool:
    return provider.repeats and (provider.distribution == OURS or provider.name == ATEN)


# Torch's own fused operator.
ATEN = "aten"


class _Candidates:
    """The candidates of a process, and whose turn it is."""

    def __init__(self, names: list[str], log: Path) -> None:
        self._swaps: dict[str, Swap | None] = dict.fromkeys(names)
        self._log, self._decided = log, log.with_suffix(DECIDED)
        self._turn = 0

    def next(self) -> str | None:
        """Return the candidate whose turn it is; None: none is left."""
        decided = self._decided.read_text().split() if self._decided.exists() else ()
        for _ in range(len(self._swaps)):
            name = list(self._swaps)[self._turn % len(self._swaps)]
            self._turn += 1
            if name not in decided:
                return name
        return None

    def enter(self, name: str) -> Swap | None:
        """Swap a candidate in; None: it cannot run here, which is logged."""
        self._tell("enter", name)
        try:
            swap = self._swaps[name] or Swap(None, [name])
            swap.__enter__()
        except KprofError as error:
            self._drop(name, error.problem)
            return None
        if not swap.replaced:
            swap.__exit__(None, None, None)
            self._drop(name, _why_none(swap.report))
            return None
        self._swaps[name] = swap
        return swap

    def leave(self, name: str, swap: Swap) -> None:
        """Swap a candidate out; one that replaced no call never comes again."""
        swap.__exit__(None, None, None)
        report = swap.report
        num_calls = sum(one.num_replaced for one in report.sites)
        num_compiled = sum(1 for one in report.replaced if any(c.is_compiled for c in one.calls))
        self._tell("leave", name, num_calls=num_calls, num_compiled=num_compiled)
        if not num_calls and not num_compiled:
            self._drop(name, _why_none(report))

    def _drop(self, name: str, why: str) -> None:
        place = list(self._swaps).index(name)
        del self._swaps[name]
        # The one behind it takes its place.
        self._turn = place
        self._tell("drop", name, why=why)

    def _tell(self, event: str, name: str, **more: object) -> None:
        line = {"event": event, "name": name, "time_ns": time.time_ns(), **more}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _why_none(report: SwapReport) -> str:
    """Return the most frequent reason why a swap replaced no call."""
    reasons: Counter[str] = Counter()
    for site in report.sites:
        if site.skipped is not None:
            reasons[site.skipped] += 1
        for calls in site.calls:
            reasons[calls.why or ""] += calls.num_calls
    return reasons.most_common(1)[0][0] if reasons else "no call site in this workload"


_of_logs: dict[str, _Candidates] = {}


@contextmanager
def next_candidate(names: str, log: str) -> Iterator[None]:
    """Swap the next of these candidates in; after the last one the first comes again.

    Args:
        names: "KERNEL=PROVIDER,…"; empty: all of `candidate_names`.
        log: File of lines in JSON.
    """
    if log not in _of_logs:
        _of_logs[log] = _Candidates(names.split(",") if names else candidate_names(), Path(log))
    candidates = _of_logs[log]
    swap = None
    while swap is None and (name := candidates.next()) is not None:
        swap = candidates.enter(name)
    try:
        yield
    finally:
        if swap is not None and name is not None:
            candidates.leave(name, swap)
