"""Ranks of which not all fit into the tables: sums and collectives of all, some in detail.

Every rank is read and analyzed by itself, and condensed to what it does to the others and its sums.
From these follow who waits for whom, and which ranks are read once more for all else. Late ranks
that are not among those are read once more for what made them late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from kprof.analyze.condense import condensed
from kprof.analyze.late_causes import late_time
from kprof.analyze.late_ranks import find_lateness, waits_by_unit
from kprof.analyze.passes import attributed
from kprof.collect.cluster import Scheduler
from kprof.collect.merge import by_order_of_files, merge, ranks_of, renumbered, tell_their_ranks
from kprof.collect.ranks import Outcome, left_out, outcomes_of, read_rank
from kprof.collect.sources import Source
from kprof.collect.trace_file import PACKED
from kprof.errors import TraceError, counted
from kprof.trace import Caveat, LateTime, RankTotals, Trace

# So much of JSON, unpacked, is read in detail; its tables and what is computed of them take about
# four times as much memory. Of few ranks all are, whatever their size; of more than fit some.
IN_DETAIL_BYTES = 400_000_000
FEWEST_IN_DETAIL, MOST_IN_DETAIL = 8, 16
# Of so many late ranks the cause is looked for.
MOST_EXPLAINED = 64
# Traces are packed to about so small a part.
PACKED_TO = 16


def fit(sources: list[Source]) -> bool:
    """Tell whether all these files can be read in detail."""
    return len(sources) <= FEWEST_IN_DETAIL or sum(map(_unpacked, sources)) <= IN_DETAIL_BYTES


def read_many(
    sources: list[Source],
    name: str,
    ranks: Collection[int] | None = None,
    scheduler: Scheduler = None,
) -> Trace:
    """Read all files, and `ranks` in detail, or those that tell most; `all_ranks` holds the others.

    A `scheduler` is that of a Dask cluster, which reads them.

    Raises:
        TraceError: no file can be read, or one of the `ranks` is in none.
    """
    outcomes = outcomes_of(sources, condensed_rank, scheduler)
    files = [s for s, one in zip(sources, outcomes, strict=True) if isinstance(one, Trace)]
    traces = [one for one in outcomes if isinstance(one, Trace)]
    everyone = merge(traces, name)
    if not tell_their_ranks(traces):
        traces = by_order_of_files(traces)
    at = {rank: place for place, trace in enumerate(traces) for rank in ranks_of(trace)}
    places = _asked(ranks, at) if ranks is not None else _telling(everyone, at, files)
    again = outcomes_of([files[place] for place in places], read_rank, scheduler)
    detail = [
        _as_numbered(one, ranks_of(traces[place])[0])
        for place, one in zip(places, again, strict=True)
        if isinstance(one, Trace)
    ]
    trace = merge(detail, name)
    meta = everyone.meta
    shown = sorted({rank for one in detail for rank in ranks_of(one)})
    told = (*_in_detail(shown, len(at)), *_not_asked(shown, ranks))
    caveats = (*told, *trace.meta.caveats, *meta.caveats, *left_out(outcomes), *left_out(again))
    return replace(
        trace,
        all_ranks=everyone,
        meta=replace(
            trace.meta,
            clocks=meta.clocks,
            clocks_grade=meta.clocks_grade,
            totals=meta.totals,
            late_times=_late_times(everyone, (traces, files), shown, scheduler),
            world_size=meta.world_size,
            caveats=tuple(dict.fromkeys(caveats)),
        ),
    )


def condensed_rank(source: Source) -> Outcome:
    """Read and analyze one file, and keep what concerns other ranks, and its sums."""
    outcome = read_rank(source)
    return condensed(attributed(outcome)) if isinstance(outcome, Trace) else outcome


@dataclass(frozen=True)
class LateRanks:
    """Reads a file with late ranks again, and keeps how each spent the units it was late in."""

    waits: pd.DataFrame
    """Of these ranks, by unit."""
    late_in: dict[int, tuple[int, ...]]
    """Units by rank."""
    first_rank: dict[Path, int]
    """Of each file, as numbered among all."""

    def __call__(self, source: Source) -> Outcome:
        """Return a trace without rows, with the `late_times` of the ranks of the file."""
        outcome = read_rank(source)
        if not isinstance(outcome, Trace):
            return outcome
        trace = attributed(_as_numbered(outcome, self.first_rank[source.path.absolute()]))
        late = [rank for rank in ranks_of(trace) if rank in self.late_in]
        found = [late_time(trace, self.waits, rank, self.late_in[rank]) for rank in late]
        times = tuple(one for one in found if one is not None)
        return Trace(
            trace.kernels.iloc[:0],
            trace.ranges.iloc[:0],
            trace.samples.iloc[:0],
            replace(trace.meta, late_times=times),
        )


def _late_times(
    everyone: Trace,
    read: tuple[list[Trace], list[Source]],
    shown: list[int],
    scheduler: Scheduler,
) -> tuple[LateTime, ...]:
    """Return the time of ranks that others wait for and that are not in detail, the latest ones."""
    found, waits = find_lateness(everyone), waits_by_unit(everyone)
    if found is None or waits is None:
        return ()
    others = {*found.stragglers} - {*shown}
    latest = sorted(
        (one for one in found.ranks if one.rank in others), key=lambda one: -one.late_ns
    )
    late_in = {one.rank: one.late_in for one in latest[:MOST_EXPLAINED]}
    if not late_in:
        return ()
    files = {
        source.path.absolute(): (source, ranks_of(trace)[0])
        for trace, source in zip(*read, strict=True)
        if late_in.keys() & {*ranks_of(trace)}
    }
    of_late = waits[0][waits[0]["rank"].isin([*late_in])].reset_index(drop=True)
    reading = LateRanks(of_late, late_in, {path: first for path, (_, first) in files.items()})
    again = outcomes_of([source for source, _ in files.values()], reading, scheduler)
    return tuple(time for one in again if isinstance(one, Trace) for time in one.meta.late_times)


def _as_numbered(trace: Trace, first: int) -> Trace:
    """Return a trace under the ranks that it has among all, as one that does not tell their number.

    How many ranks of the job are in no file is told of all together.
    """
    trace = trace if ranks_of(trace)[0] == first else renumbered(trace, first)
    return replace(trace, meta=replace(trace.meta, world_size=None))


def _asked(ranks: Collection[int], at: dict[int, int]) -> list[int]:
    """Return the places of the files that hold these ranks, each once, in the ranks' order."""
    if unknown := sorted(set(ranks) - at.keys()):
        raise TraceError(
            f"rank {unknown[0]} is in no file that was read",
            fix=f"there are {counted(len(at), 'rank')}, from {min(at)} to {max(at)}",
        )
    return list(dict.fromkeys(at[rank] for rank in sorted(ranks)))


def _telling(everyone: Trace, at: dict[int, int], files: list[Source]) -> list[int]:
    """Return the places of the files that tell most, as many as fit, in the ranks' order."""
    chosen: dict[int, None] = {}
    num_bytes = 0
    for rank in _in_order(everyone, sorted(at)):
        place = at[rank]
        if place in chosen:
            continue
        num_bytes += _unpacked(files[place])
        is_much = num_bytes > IN_DETAIL_BYTES and len(chosen) >= FEWEST_IN_DETAIL
        if is_much or len(chosen) >= MOST_IN_DETAIL:
            break
        chosen[place] = None
    first_rank = {place: rank for rank, place in sorted(at.items(), reverse=True)}
    return sorted(chosen, key=first_rank.__getitem__)


def _in_order(everyone: Trace, ranks: list[int]) -> Iterator[int]:
    """Yield ranks, those first that tell most: the slowest, some that are late, then a spread."""
    yield max(everyone.meta.totals, key=_time_ns).rank
    yield ranks[0]
    found = find_lateness(everyone)
    if found is not None:
        late = sorted(found.ranks, key=lambda one: -one.late_ns)
        yield from (one.rank for one in late if one.rank in found.stragglers[:FEWEST_IN_DETAIL])
    # Of every part of the ranks first the one in its middle, then of halves of the parts.
    number = 2
    while number <= 2 * len(ranks):
        yield from (ranks[place * len(ranks) // number] for place in range(1, number, 2))
        number *= 2
    yield from ranks


def _time_ns(of_rank: RankTotals) -> float:
    """Return a rank's mean step, or its window where no step is marked."""
    return of_rank.steps_ns / of_rank.num_steps if of_rank.num_steps else of_rank.window_ns


def _in_detail(ranks: list[int], number: int) -> list[Caveat]:
    if len(ranks) == number:
        return []
    text = (
        f"Of {number:,} ranks {len(ranks):,} are shown in detail: {named(ranks)}. Who waits for "
        "whom, and the sums by rank, are of all. `kprof open --ranks` shows others."
    )
    return [Caveat("ranks_in_detail", text)]


def _not_asked(shown: list[int], asked: Collection[int] | None) -> list[Caveat]:
    """Say which ranks are shown because they share a file with those that were asked for."""
    others = [] if asked is None else sorted({*shown} - {*asked})
    if not others:
        return []
    text = f"Also shown, as their files hold ranks that were asked for: {named(others)}."
    return [Caveat("ranks_not_asked", text)]


def named(ranks: list[int]) -> str:
    """Return ranks as people write them: 0, 8-15."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _unpacked(source: Source) -> int:
    """Return about how much text a file holds."""
    size = source.path.stat().st_size if source.path.is_file() else 0
    return size * (PACKED_TO if source.path.name.endswith(tuple(PACKED)) else 1)
