"""round_trips: data goes from the GPU to the host and back between two kernels."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kprof.analyze.findings.claims import in_words, size_in_words, times_in_words, work_places
from kprof.analyze.findings.queries import (
    Bools,
    Int64s,
    count_steps,
    matches,
    per_step,
    share_of_whole,
    total_ns,
    whole_of,
)
from kprof.findings import Finding, Fix
from kprof.trace import Trace

# Less than a hundredth of the step is not worth an edit.
LEAST_SHARE = 0.01
# Smaller copies are results that the host reads, and parameters.
LEAST_BYTES = 64 << 10
# Between so many pairs of kernels; fewer may be the end of one phase and the begin of another.
OFTEN = 3
TO_HOST, TO_DEVICE = r"\bDtoH\b", r"\bHtoD\b"


def check(trace: Trace) -> list[Finding]:
    """Find copies to the host that are followed by one of the same size back, without a kernel."""
    rows = _round_trips(trace)
    took = total_ns(trace, rows)
    if not len(rows) or share_of_whole(trace, took) < LEAST_SHARE:
        return []
    moved = int(trace.kernels["copied_bytes"].to_numpy(np.int64, na_value=0)[rows].sum())
    pairs = len(rows) / 2
    claim = (
        f"{times_in_words(pairs / count_steps(trace))} in {whole_of(trace)} data goes to the host, "
        "and as many bytes come back before the next kernel: "
        f"{in_words(per_step(trace, took))} for {size_in_words(moved / count_steps(trace))}, "
        f"{size_in_words(moved / len(rows))} a copy in the mean"
    )
    return [
        Finding(
            rule="round_trips",
            claim=claim[:1].upper() + claim[1:],
            # The sizes are the same; whether the host changes the data was not recorded.
            confidence="medium",
            effort="medium",
            rows=tuple(rows.tolist()),
            details=work_places(trace, rows),
            # Waits of the host for such copies are those of `pageable_copies`.
            fix=Fix(best_ns=0, modest_ns=took),
        )
    ]


def _round_trips(trace: Trace) -> Int64s:
    """Return the copies, in pairs of one size; each pair lies between the same two kernels."""
    kernels = trace.kernels
    size = kernels["copied_bytes"].to_numpy(np.int64, na_value=0)
    to_host, to_device = (matches(kernels["name"], way) for way in (TO_HOST, TO_DEVICE))
    columns = ["rank", "device", "start_ns"]
    order = kernels[columns].sort_values(columns, kind="stable").index.to_numpy()
    is_kernel = (kernels["activity"] == "kernel").to_numpy(bool)
    between = np.zeros(len(kernels), dtype=np.int64)
    between[order] = np.cumsum(is_kernel[order])
    is_copy = (to_host | to_device) & (size >= LEAST_BYTES) & ~_are_beside_a_kernel(trace)
    at = order[is_copy[order]]
    table = pd.DataFrame({"row": at, "size": size[at], "back": to_device[at]})
    keys = kernels[["rank", "device"]].iloc[at].reset_index(drop=True)
    table = table.join(keys).assign(between=between[at])
    found: list[pd.DataFrame] = []
    for _, copies in table.groupby(["rank", "device", "between", "size"], sort=False):
        out = copies[~copies["back"].to_numpy(bool)]
        back = copies[copies["back"].to_numpy(bool) & (copies.index >= out.index.min())]
        number = min(len(out), len(back))
        found += [out.iloc[:number], back.iloc[:number]] if number else []
    if not found:
        return np.zeros(0, dtype=np.int64)
    pairs = pd.concat(found)
    times = pairs.groupby(["rank", "device", "size"])["between"].transform("nunique")
    return np.sort(pairs["row"][(times >= OFTEN).to_numpy(bool)].to_numpy(np.int64))


def _are_beside_a_kernel(trace: Trace) -> Bools:
    """Return which activities run while a kernel of their device does, which needs none of them."""
    kernels = trace.kernels
    begin = kernels["start_ns"].to_numpy(np.int64)
    end = begin + kernels["duration_ns"].to_numpy(np.int64)
    is_kernel = (kernels["activity"] == "kernel").to_numpy(bool)
    found = np.zeros(len(kernels), dtype=bool)
    of_device = kernels.groupby(["rank", "device"], dropna=False).ngroup().to_numpy(np.int64)
    for rows in (np.flatnonzero(of_device == number) for number in np.unique(of_device)):
        computing = rows[is_kernel[rows]]
        computing = computing[np.argsort(begin[computing], kind="stable")]
        if not len(computing):
            continue
        latest_ns = np.maximum.accumulate(end[computing])
        # Of the kernels that begin before an activity ends, whether one ends after it begins.
        number = np.searchsorted(begin[computing], end[rows], side="left")
        found[rows] = (number > 0) & (latest_ns[np.maximum(number - 1, 0)] > begin[rows])
    return found
