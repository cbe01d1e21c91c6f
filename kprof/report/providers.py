"""The kernel library as sections: what there is, and who won where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kprof.report.section import Column, Section, Table, Text
from kprof.report.units import MISSING, format_amount, format_share, format_time

if TYPE_CHECKING:
    from kprof.kernels._bench import Timed
    from kprof.kernels._choice import Choice


# Of which calls the time of a pass is what users pay.
OF_CALLS = {"forward": "without gradients", "training": "with gradients"}


@dataclass(frozen=True)
class Listed:
    """One kernel of the library, as a reader wants to see it."""

    name: str
    replaces: str
    providers: tuple[tuple[str, str | None], ...]
    """Name and installed version of each; None: not installed."""
    dtypes: tuple[str, ...]


def section_of_kernels(listed: list[Listed]) -> Section:
    """List the kernels with who can do them here."""
    columns = (
        Column("Kernel"),
        Column("Can do it here", "prose"),
        Column("Takes the place of", "prose"),
        Column("Not installed", "prose", essential=False),
    )
    rows = tuple(
        (
            one.name,
            ", ".join(name for name, version in one.providers if version),
            one.replaces,
            ", ".join(name for name, version in one.providers if not version) or MISSING,
        )
        for one in listed
    )
    return Section("Kernels", 0, (Table(columns, rows, terminal_rows=len(rows)),))


def section_of_choice(choice: Choice, ranked: list[Timed]) -> Section:
    """Show the times of every provider on one shape in one pass, the chosen one first."""
    shape = "x".join(str(length) for length in ranked[0].shape)
    calls = f"such calls {OF_CALLS[choice.direction]}"
    lead = f"{choice.provider} runs {calls} on {choice.gpu}: {choice.why} ({choice.date})."
    columns = (
        Column("Provider"),
        Column("GPU time", "right"),
        Column("Rate", "right"),
        Column("Of a copy", "right"),
        Column("Host", "right"),
        Column("Does not run because", "prose", essential=False),
    )
    rows = tuple(_row(one) for one in ranked)
    title = f"{choice.kernel} {choice.direction}, {shape} {choice.dtype}"
    caption = "Of a copy: the time of a copy of the same bytes in the same harness, over this time."
    if choice.direction == "training":
        caption = f"Forward and backward pass as one. {caption}"
    return Section(title, 0, (Text(lead), Table(columns, rows, caption, terminal_rows=len(rows))))


def _row(one: Timed) -> tuple[str, ...]:
    return (
        one.provider,
        format_time(one.gpu_ns),
        MISSING if one.bytes_per_s is None else format_amount(one.bytes_per_s, "B/s"),
        format_share(one.share_of_copy),
        format_time(one.host_ns),
        one.problem,
    )
