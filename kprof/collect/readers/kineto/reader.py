"""Traces of Kineto, the recorder inside PyTorch: Chrome JSON, plain or gzipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kprof.collect.readers.kineto.blocks import Merger
from kprof.collect.readers.kineto.damage import DamageError, NotATraceError
from kprof.collect.readers.kineto.document import Document, read_document
from kprof.collect.readers.kineto.events import role_of
from kprof.collect.readers.kineto.joins import arrows_in, settle, told_of_joins
from kprof.collect.readers.kineto.tables import (
    kernels_of,
    notes_of,
    num_module_ranges,
    ranges_of,
    samples_of,
)
from kprof.collect.trace_file import json_text_of, mapped
from kprof.errors import TraceError, counted
from kprof.trace import Caveat, Gpu, Meta, ProcessGroup, Trace

# For the message about a file that no reader knows.
OPENS = "a Kineto (torch.profiler) trace: *.json or *.json.gz"

_RECORD = "record the workload with `kprof run`, or with torch.profiler and export_chrome_trace"
# Ranks share an int64 with the ids of a trace; no machine has so many.
MAX_RANKS = 1 << 20
# How Kineto words it in its own messages, which it may write into the file.
_DROPPED = re.compile(r"Dropped ([0-9]{1,18}) activity records")
_BUFFERS_FULL = "Exceeded max GPU buffer count"
LANES = Caveat(
    "graph_lanes",
    "torch's tool noted names in what CUDA graphs replayed, and laid it on streams of its own "
    "choice: what ran beside what in a replay is not as recorded.",
)
# The first keys of Proton's tree and of its timeline; both are JSON as well.
_PROTON = re.compile(
    rb'\s*\[\s*\{\s*"(?:children|frame|metrics)"'
    rb'|\s*\{[^\[]{0,200}"traceEvents":\s*\[\s*\{\s*"args":\s*\{\s*"call_stack"'
)


def knows(path: Path, head: bytes) -> bool:
    """Say whether the file could be a trace of Kineto: JSON by its name or by what it holds."""
    if path.is_dir() or _PROTON.match(head):
        return False
    is_named_json = path.name.endswith((".json", ".json.gz", ".json.zst"))
    is_json = head.lstrip()[:1] in (b"{", b"[")
    return is_named_json or (is_json and (b'"traceEvents"' in head or b'"ph"' in head))


def read(path: Path) -> Trace:
    """Read a trace, exact to the nanosecond.

    Raises:
        TraceError: the file is damaged, is another tool's, or holds nothing to analyze.
    """
    losses: list[str] = []
    try:
        with json_text_of(path, losses) as text:
            _refuse_other_formats(path, text.read(64))
            document = read_document(text)
            raw_json_bytes = text.seek(0, 2)
            merger = Merger(document.shares)
            settled = settle(merger, lambda: arrows_in(mapped(text)))
    except DamageError as error:
        raise TraceError(f"{path.name}: {error.problem}", fix=error.fix) from None
    except NotATraceError as error:
        raise TraceError(
            f"{path.name} is JSON without a list of `traceEvents`; it holds {error}",
            fix=_RECORD,
        ) from None
    sizes = {"file_bytes": path.stat().st_size, "raw_json_bytes": raw_json_bytes}
    counts = {**merger.counts(), **settled, **sizes}
    _require_activities(path, counts)
    trace = _trace_of(path, document, merger, counts)
    caveats = (
        *trace.meta.caveats,
        *_damage_in(document, losses, counts),
        *told_of_joins(counts),
        *_unread(counts),
    )
    return replace(trace, meta=replace(trace.meta, caveats=caveats))


def _refuse_other_formats(path: Path, head: bytes) -> None:
    if head.lstrip()[:1] not in (b"{", b"["):
        raise TraceError(
            f"{path.name} is not JSON; it begins with {head[:16]!r}",
            fix="give the .json or .json.gz that the recorder wrote; " + _RECORD,
        )
    if _PROTON.match(head):
        raise TraceError(
            f"{path.name} looks like a profile of Proton: a tree of frames without times",
            fix=_RECORD,
        )


def _require_activities(path: Path, counts: dict[str, int]) -> None:
    if counts["events"] == 0:
        raise TraceError(
            f"{path.name} holds an empty list of events: there is nothing to analyze",
            fix="let the workload do some work while the recorder is on; " + _RECORD,
        )
    categories = [key.removeprefix("cat:") for key in counts if key.startswith("cat:")]
    # Kineto marks its own start and end as "Trace", also where nothing happened between them.
    if not any(role_of(category) is not None or category == "Trace" for category in categories):
        seen = ", ".join(sorted(categories)[:5]) or "none"
        raise TraceError(
            f"{path.name} looks like a Chrome trace of another program: none of its categories "
            f"is one of Kineto's (seen: {seen})",
            fix=_RECORD,
        )


def _trace_of(path: Path, document: Document, merger: Merger, counts: dict[str, int]) -> Trace:
    distributed = _mapping(document.around.get("distributedInfo"))
    rank, world_size = (_whole(distributed.get(key)) for key in ("rank", "world_size"))
    rank = rank if rank is not None and 0 <= rank < MAX_RANKS else 0
    kernels, ranges = kernels_of(merger, rank), ranges_of(merger, rank)
    if len(kernels) == 0 and (ranges["kind"] == "overhead").all():
        raise TraceError(
            f"{path.name} holds no operator of the host and no activity of a device: there is "
            "nothing to analyze",
            fix="record CPU and CUDA activities both; " + _RECORD,
        )
    counts["nn_module_events"] = counts.get("nn_module_events", 0) + num_module_ranges(merger)
    if dropped := _num_dropped(document.around):
        counts["dropped_records"] = dropped
    notes = notes_of(merger, rank)
    groups = tuple(_process_groups(distributed.get("pg_config")))
    meta = Meta(
        source=path.name,
        tool="kineto",
        graph_notes=notes,
        gpus=_gpus(document.around.get("deviceProperties")),
        versions=_versions(document.around),
        num_ranks=max(int(kernels["rank"].nunique()), 1),
        world_size=world_size,
        process_groups=groups,
        base_time_ns=_whole(document.around.get("baseTimeNanoseconds")),
        counts=counts,
        caveats=(
            *_caveats(kernels),
            *_losses(document.around),
            *((LANES,) if notes else ()),
        ),
    )
    return Trace(kernels, ranges, samples_of(merger, rank), meta)


def _whole(value: object) -> int | None:
    """Return a whole number of 64 bits, also one written as text; None for anything else."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _num_dropped(around: dict[str, Any]) -> int:
    return sum(map(int, _DROPPED.findall(_messages(around))))


def _messages(around: dict[str, Any]) -> str:
    return " ".join(str(around.get(level, "")) for level in ("WARNING", "ERROR"))


def _gpus(properties: object) -> tuple[Gpu, ...]:
    if not isinstance(properties, list):
        return ()
    entries = [entry for entry in properties if isinstance(entry, dict)]
    return tuple(
        Gpu(
            index=_whole(entry.get("id")) or 0,
            name=name if isinstance(name := entry.get("name"), str) else "",
            num_sms=_whole(entry.get("numSms")),
            memory_bytes=_whole(entry.get("totalGlobalMem")),
            compute_capability=_capability(entry),
        )
        for entry in entries
    )


def _process_groups(listed: object) -> Iterator[ProcessGroup]:
    """Yield the process groups that torch's profiler lists; damaged entries are left out."""
    for entry in listed if isinstance(listed, list) else []:
        found = _mapping(entry)
        ranks = found.get("ranks")
        if isinstance(ranks, list) and all(_whole(one) is not None for one in ranks):
            name, description = (str(found.get(key, "")) for key in ("pg_name", "pg_desc"))
            yield ProcessGroup(name, tuple(map(int, ranks)), description)


def _capability(entry: dict[str, Any]) -> str | None:
    major, minor = _whole(entry.get("computeMajor")), _whole(entry.get("computeMinor"))
    return None if major is None or minor is None else f"{major}.{minor}"


def _versions(around: dict[str, Any]) -> dict[str, str]:
    """Return what the file says about versions; CUDA's 13020 is written as 13.2."""
    found = {**around, **_mapping(around.get("distributedInfo"))}
    versions = {}
    for key, value in found.items():
        if key.endswith("_version") and isinstance(value, str | int):
            number = _whole(value)
            is_cuda = key.startswith("cuda_") and number is not None
            versions[key.removesuffix("_version")] = (
                f"{number // 1000}.{number % 1000 // 10}" if number and is_cuda else str(value)
            )
    return versions


def _caveats(kernels: pd.DataFrame) -> Iterator[Caveat]:
    if len(kernels) and bool((kernels["duration_ns"] % 1000 == 0).all()):
        yield Caveat(
            "whole_microseconds",
            "Times are whole microseconds in this file, so short kernels are coarse.",
        )
    if num_empty := int((kernels["duration_ns"] == 0).sum()):
        yield Caveat("no_duration", f"Device activities recorded with no duration: {num_empty:,}.")


def _losses(around: dict[str, Any]) -> Iterator[Caveat]:
    """Yield what Kineto's own messages in the file say of lost records."""
    if dropped := _num_dropped(around):
        yield Caveat(
            "dropped_records",
            f"The profiler dropped {counted(dropped, 'record')} of the GPU, by its own count.",
        )
    if _BUFFERS_FULL in _messages(around):
        yield Caveat(
            "full_buffers",
            "The profiler's buffers were full before the end: the last activities are missing.",
        )


def _damage_in(document: Document, losses: list[str], counts: dict[str, int]) -> Iterator[Caveat]:
    """Yield what is damaged in the file, and how much is left out for it."""
    yield from (Caveat("cut_off", f"{loss}. What comes before is read.") for loss in losses)
    if document.damage:
        yield Caveat("invalid_json", f"The file is damaged and read on: {document.damage}.")
    lost = {
        "events that cannot be read": "damaged_events",
        "device activities without a valid time or duration": "damaged_activities",
        "values beside the events": "damaged_keys",
        "begins or ends without the other (ph B and E)": "unmatched_edges",
    }
    told = [f"{what}: {counts[key]:,}" for what, key in lost.items() if counts.get(key)]
    if told:
        yield Caveat("damaged_records", f"Left out for damage: {'; '.join(told)}.")
    if number := counts.get("open_ranges", 0):
        yield Caveat(
            "open_ranges",
            f"Ranges that begin and do not end (ph B), taken to last to the end: {number:,}.",
        )
    if number := counts.get("repaired_events", 0):
        yield Caveat(
            "repaired_events",
            f"Events that are no valid JSON as written, read as far as they can be: {number:,} "
            "(numbers that are none, bytes that are not UTF-8, control characters, stray commas).",
        )


def _unread(counts: dict[str, int]) -> Iterator[Caveat]:
    """Yield the categories whose events took time and are not read."""
    found = [
        (category or "none", number, counts[f"unread_ns:{category}"])
        for key, number in counts.items()
        if key.startswith("unread:")
        for category in [key.removeprefix("unread:")]
    ]
    if found:
        listed = ", ".join(
            f"{category} ({number:,} events, {ns / 1e6:,.3f} ms)"
            for category, number, ns in sorted(found, key=lambda one: -one[2])
        )
        yield Caveat(
            "unread_categories", f"Categories that kprof does not read, left out: {listed}."
        )
