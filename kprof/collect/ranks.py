"""The files of a run's ranks, each read by itself, by several processes where there are many.

What can be read of one file does not depend on the others. A file that cannot be read, or whose
reading kills its process, is left out with a caveat. The result has the order of the files, and
the same bits whichever process read which file.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from kprof.collect.cluster import Scheduler, results_of
from kprof.collect.device_clock import on_the_hosts_clock
from kprof.collect.lost_records import without_lost_records
from kprof.collect.processes import children_of, claimed, claims_of
from kprof.collect.sources import Source, read_source
from kprof.errors import TraceError, counted
from kprof.trace import Caveat, Trace

# Files that take less, as they are stored, are read sooner than a process starts (0.5 s).
PARALLEL_FROM_BYTES = 4 << 20
# A file whose process died is read by so many, one after another, before it is left out.
ATTEMPTS = 2
# The caveats of a reader that the file goes on after what was read.
DAMAGE = {"cut_off", "invalid_json"}
# More files than this are not named one by one.
NAMED = 4


@dataclass(frozen=True)
class Unread:
    """Why a file could not be read."""

    problem: str
    fix: str


Outcome = Trace | Unread
Reading = Callable[[Source], Outcome]


def read_ranks(
    sources: list[Source], scheduler: Scheduler = None
) -> tuple[list[Trace], list[Caveat]]:
    """Read every file; of several, those that cannot be read are left out with a caveat.

    Raises:
        TraceError: no file can be read.
    """
    outcomes = outcomes_of(sources, read_rank, scheduler)
    traces = [outcome for outcome in outcomes if isinstance(outcome, Trace)]
    return traces, left_out(outcomes)


def outcomes_of(sources: list[Source], read: Reading, scheduler: Scheduler = None) -> list[Outcome]:
    """Return what became of every file; a `scheduler` is that of a Dask cluster, which reads them.

    Raises:
        TraceError: no file can be read.
    """
    number = num_processes_for(sources)
    if scheduler is not None:
        outcomes = _on_cluster(sources, read, scheduler)
    elif number > 1:
        outcomes = read_in_processes(sources, number, read)
    else:
        outcomes = list(map(read, sources))
    outcomes = _without_those_cut_short(outcomes)
    first = outcomes[0]
    if isinstance(first, Unread) and all(isinstance(one, Unread) for one in outcomes):
        raise TraceError(first.problem, fix=first.fix)
    return outcomes


def _on_cluster(sources: list[Source], read: Reading, scheduler: Scheduler) -> list[Outcome]:
    """Read the files on a cluster; those whose workers die again and again are left out."""
    results = results_of(read, sources, scheduler, ATTEMPTS)
    return [
        result if isinstance(result, Trace | Unread) else _lost(source, result)
        for source, result in zip(sources, results, strict=True)
    ]


def _lost(source: Source, error: Exception) -> Unread:
    return Unread(
        f"{source.path.name}: its worker failed ({type(error).__name__}: {error})",
        "see the worker's log; it may lack memory, the file, or this version of kprof",
    )


def read_rank(source: Source) -> Outcome:
    """Read one file, without its damaged records and on the host's clock."""
    try:
        return on_the_hosts_clock(without_lost_records(read_source(source)))
    except TraceError as error:
        return Unread(error.problem, error.fix)


def num_processes_for(sources: list[Source]) -> int:
    """Return how many processes are worth their start: at most one for each core and file."""
    stored_bytes = sum(s.path.stat().st_size for s in sources if s.path.is_file())
    if stored_bytes < PARALLEL_FROM_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), len(sources))


def read_in_processes(
    sources: list[Source], number: int, read: Reading = read_rank
) -> list[Outcome]:
    """Read the files by `number` processes; each takes the next file as soon as it is free.

    A file whose process was killed is read by another one. This process reads what others failed
    to read otherwise, and so shows their error.
    """
    outcomes: dict[int, Outcome] = {}
    attempts: Counter[int] = Counter()
    while left := [place for place in range(len(sources)) if place not in outcomes]:
        killed: set[int] = set()
        with (
            claims_of(left) as claims,
            children_of(__name__, (claims,), (read, sources), min(number, len(left))) as children,
        ):
            for child in children:
                is_killed = child.ended() < 0
                begun, found = _results_in(child.output)
                outcomes |= found
                killed |= begun - found.keys() if is_killed else set()
        attempts.update(killed)
        outcomes |= {p: _deadly(sources[p]) for p in killed if attempts[p] >= ATTEMPTS}
        if not killed:
            outcomes |= {p: read(sources[p]) for p in left if p not in outcomes}
    return [outcomes[place] for place in range(len(sources))]


def _results_in(output: IO[bytes]) -> tuple[set[int], dict[int, Outcome]]:
    """Return which files a process began to read, and the outcomes that it wrote whole."""
    begun: set[int] = set()
    found: dict[int, Outcome] = {}
    try:
        while True:
            place = pickle.load(output)
            begun.add(place)
            found[place] = pickle.load(output)
    except (EOFError, pickle.UnpicklingError):
        return begun, found


def _deadly(source: Source) -> Unread:
    return Unread(
        f"{source.path.name}: the process that read it was killed, {ATTEMPTS} times",
        "it may need more memory than there is; open it alone, on a machine with more",
    )


def _without_those_cut_short(outcomes: list[Outcome]) -> list[Outcome]:
    """Leave out files that are damaged before their first GPU activity, where others have some."""
    traces = [one for one in outcomes if isinstance(one, Trace)]
    if not any(len(trace.kernels) for trace in traces):
        return outcomes
    return [_cut_short(one) if isinstance(one, Trace) else one for one in outcomes]


def _cut_short(trace: Trace) -> Outcome:
    damage = DAMAGE.intersection(caveat.id for caveat in trace.meta.caveats)
    if len(trace.kernels) or not damage:
        return trace
    problem = f"{trace.meta.source} is damaged before its first GPU activity"
    return Unread(problem, "copy it again in full, or record it again")


def left_out(outcomes: list[Outcome]) -> list[Caveat]:
    """Say which files could not be read; nothing where all could."""
    unread = sorted(one.problem for one in outcomes if isinstance(one, Unread))
    if not unread:
        return []
    named = "; ".join(unread[:NAMED])
    more = f"; and {len(unread) - NAMED:,} more" if len(unread) > NAMED else ""
    files = counted(len(outcomes), "file")
    return [Caveat("files_left_out", f"Left out, {len(unread):,} of {files}: {named}{more}.")]


def serve() -> None:
    """Read files in a child process: the pipe's number as its argument, the files on stdin."""
    (read, sources), out = pickle.load(sys.stdin.buffer), sys.stdout.buffer
    for place in claimed(int(sys.argv[1])):
        pickle.dump(place, out)
        out.flush()
        pickle.dump(read(sources[place]), out, protocol=5)
        out.flush()
