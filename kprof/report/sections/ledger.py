"""The books: every nanosecond of device time in one place, and the identities that prove it."""

from __future__ import annotations

from kprof.analyze.ledger import Ledger, balance
from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import format_exact, format_share
from kprof.trace import Trace

TITLE = "Ledger"
ORDER = 100

BUCKETS = {
    "attributed": "traced to the operator or range that launched it",
    "orphan": "no launch record: launched before the recording began, or none are kept",
    "graph": "replayed by a CUDA graph whose nodes have no names",
    "unlinked": "launched outside every operator and range",
}


def render(trace: Trace) -> Section:
    """Render the three identities in nanoseconds and the buckets of device time."""
    ledger = balance(trace)
    tone = "good" if ledger.balances else "warning"
    verdict = (
        "The books balance to the nanosecond."
        if ledger.balances
        else "The books do not balance: this is a defect of kprof, please report it."
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
        untold = "What overlapped, and how long the device was idle, is not known."
        identities = (identities[0], untold)
    parts = (Text(verdict, tone), *(Text(identity) for identity in identities))
    return Section(TITLE, ORDER, (*parts, _bucket_table(ledger)))


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
        # One bucket alone says nothing that the identities don't.
        terminal_rows=len(rows) if len(rows) > 1 else 0,
    )
