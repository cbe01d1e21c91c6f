"""The ledger: every nanosecond of device time in one bucket, with the identities that prove it."""

from __future__ import annotations

from kprof.analyze.attribution.cuda_graphs import UNNAMED, Named, how_named
from kprof.analyze.attribution.ledger import Ledger, balance
from kprof.report.section import Column, Part, Section, Table, Text
from kprof.report.units import MISSING, format_exact, format_share, has_several_gpus_a_rank
from kprof.trace import Trace

TITLE = "Ledger"
ORDER = 100

SEVERAL_GPUS = (
    "One process used several GPUs. The window of the process counts for each GPU, and all times "
    "are sums over the GPUs."
)
BUCKETS = {
    "attributed": "traced to the operator or range that launched it",
    "orphan": "no launch record: launched before the recording began, or none are kept",
    "graph": "replayed by a CUDA graph whose nodes have no names",
    "unlinked": "launched outside every operator and range",
}


def render(trace: Trace) -> Section:
    """Render the three identities in nanoseconds, the buckets, and how replays were named."""
    ledger = balance(trace)
    tone = "good" if ledger.balances else "warning"
    verdict = (
        "The ledger balances to the nanosecond."
        if ledger.balances
        else "The ledger does not balance: this is a defect of kprof, please report it."
    )
    identities: tuple[str, ...] = (
        f"attributed {format_exact(ledger.attributed_ns)} + unattributed "
        f"{format_exact(ledger.unattributed_ns)} = sum {format_exact(ledger.sum_ns)}",
        f"sum {format_exact(ledger.sum_ns)} - overlapped {format_exact(ledger.overlapped_ns)} "
        f"= busy {format_exact(ledger.busy_ns)}",
        f"busy {format_exact(ledger.busy_ns)} + idle {format_exact(ledger.idle_ns)} "
        f"= window {format_exact(ledger.window_ns)}",
    )
    if not trace.has_timeline:
        untold = "Overlap and idle time are not known."
        identities = (identities[0], untold)
    parts: list[Part] = [Text(verdict, tone), *map(Text, identities), _bucket_table(ledger)]
    if has_several_gpus_a_rank(trace):
        parts.insert(1, Text(SEVERAL_GPUS))
    if named := how_named(trace):
        tone = "warning" if any(one.confidence == "low" for one in named) else "plain"
        parts += [Text(_replayed(named), tone), _replayed_table(named)]
    return Section(TITLE, ORDER, tuple(parts))


def _bucket_table(ledger: Ledger) -> Table:
    buckets = sorted(ledger.buckets.items(), key=lambda bucket: -bucket[1])
    total_ns = max(ledger.sum_ns, 1)
    rows = tuple(
        (name, format_share(time_ns / total_ns), format_exact(time_ns), BUCKETS.get(name, ""))
        for name, time_ns in buckets
    )
    columns = (
        Column("Bucket"),
        Column("Share", "right"),
        Column("Device time", "right"),
        Column("Meaning", "prose", essential=False),
    )
    return Table(
        columns,
        rows,
        caption="Device time by bucket, the share of its sum.",
        share=tuple(time_ns / total_ns for _, time_ns in buckets),
        # Without an unattributed bucket the table says nothing that the identities don't.
        terminal_rows=len(rows) if ledger.unattributed_ns else 0,
    )


def _replayed(named: list[Named]) -> str:
    parts = [
        f"{format_share(one.share)} by {one.way}"
        + (f" (confidence {one.confidence})" if one.confidence else "")
        for one in named
        if one.way != UNNAMED
    ]
    missing = [format_share(one.share) for one in named if one.way == UNNAMED]
    if not parts:
        return "Kernels replayed by CUDA graphs have no known operator or module."
    rest = f"; {missing[0]} have no known operator or module" if missing else ""
    return f"Kernels replayed by CUDA graphs were named: {', '.join(parts)}{rest}."


def _replayed_table(named: list[Named]) -> Table:
    rows = tuple(
        (
            one.way,
            one.confidence or MISSING,
            format_share(one.share),
            format_exact(one.time_ns),
            one.because,
        )
        for one in named
    )
    columns = (
        Column("Named by"),
        Column("Confidence"),
        Column("Share", "right"),
        Column("Device time", "right"),
        Column("Because", "prose"),
    )
    return Table(
        columns,
        rows,
        caption="Kernels replayed by CUDA graphs, by the source of their operator or module.",
        share=tuple(one.share for one in named),
        terminal_rows=0,
    )
