"""A block of events as plain arrays, one a column."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers._kineto import events as kineto
from kprof.collect.readers._kineto.damage import DamageError
from kprof.collect.readers._kineto.events import MISSING, NO_ARGS, Args, Event, Role
from kprof.collect.readers._kineto.times import NeedsTextError, NotATimeError, exact_ns

Columns = dict[str, NDArray[np.generic]]
_DIGIT = re.compile(rb"[0-9]")
INPUTS = ("shapes", "dtypes", "strides", "values")


class Vocabulary(dict[object, int]):
    """Numbers every distinct value from 0 on; no text at all is -1."""

    def __init__(self) -> None:
        super().__init__({b"": -1})

    def __missing__(self, value: object) -> int:
        self[value] = number = len(self) - 1
        return number

    def codes(self, values: Iterable[object]) -> NDArray[np.int32]:
        """Return the number of each value."""
        return np.asarray(array("i", [self[value] for value in values]), dtype=np.int32)

    def values_in_order(self) -> list[object]:
        """Return the values that have a number, by number."""
        return list(self)[1:]


@dataclass
class Block:
    """The rows that one block of the file holds, in the order of the file."""

    host: Columns
    device: Columns
    memory: Columns
    counts: Counter[str]


@dataclass
class BlockDecoder:
    """Decodes blocks; codes refer to its vocabularies, which grow from block to block."""

    words: dict[str, Vocabulary] = field(
        default_factory=lambda: {
            name: Vocabulary()
            for name in (
                *("category", "host_name", "device_name", "pid", "tid"),
                *("grid", "block", "collective", "group", "message", "note", *INPUTS),
            )
        }
    )

    def decode(self, text: bytes | bytearray) -> Block:
        """Return the columns of a JSON list of events.

        Raises:
            msgspec.DecodeError: `text` is no list of events.
            DamageError: an event has no time, or a negative duration.
        """
        try:
            return self._block(kineto.FAST_DECODER.decode(text))
        except NeedsTextError:
            return self._block(kineto.EXACT_DECODER.decode(text))

    def _block(self, events: Sequence[Event]) -> Block:
        category = self.words["category"].codes([event.cat for event in events])
        categories = [str(name) for name in self.words["category"].values_in_order()]
        roles = [kineto.ROLE_OF_CATEGORY.get(name, Role.OTHER) for name in categories]
        role = np.array(roles, dtype=np.int8)[category]
        host, at_host = _spans(events, role, kineto.HOST_ROLES)
        device, at_device = _spans(events, role, kineto.DEVICE_ROLES)
        rest = np.ones(len(events), dtype=bool)
        rest[at_host] = rest[at_device] = False
        others = [events[i] for i in np.flatnonzero(rest).tolist()]
        block = Block(
            self._host_columns(host, role[at_host]),
            self._device_columns(device, role[at_device]),
            _memory_columns(others),
            _counts_of(others),
        )
        numbers = np.bincount(category, minlength=len(categories)).tolist()
        named = zip(categories, numbers, strict=True)
        block.counts.update({f"cat:{name}": n for name, n in named if name and n})
        block.counts["events"] = len(events)
        num_device = int(np.sum(_is_one_of(role, kineto.DEVICE_ROLES)))
        if num_device > len(device):
            block.counts["device_events_not_timed"] = num_device - len(device)
        block.counts["seq_ops"] += int(np.sum(block.host["sequence"] != MISSING))
        is_overhead = role[at_host] == Role.OVERHEAD
        if is_overhead.any():
            block.counts["profiler_overhead_ns"] = int(block.host["duration_ns"][is_overhead].sum())
        return block

    def _host_columns(self, host: list[Event], role: NDArray[np.int8]) -> Columns:
        columns: Columns = {
            "role": role,
            "name": self.words["host_name"].codes([event.name for event in host]),
            "pid": self.words["pid"].codes([event.pid for event in host]),
            "tid": self.words["tid"].codes([event.tid for event in host]),
            **_times_of(host),
        }
        at_operators = np.flatnonzero(_is_one_of(role, kineto.OPERATOR_ROLES))
        operators = [host[i].args or NO_ARGS for i in at_operators.tolist()]
        at_calls = np.flatnonzero(role == Role.RUNTIME)
        calls = [host[i].args or NO_ARGS for i in at_calls.tolist()]
        for name in INPUTS:
            texts = [bytes(text) for text in map(attrgetter(name), operators)]
            columns[name] = spread(-1, len(host), (at_operators, self.words[name].codes(texts)))
        messages = self.words["message"].codes(map(_message, operators))
        columns["message"] = spread(-1, len(host), (at_operators, messages))
        return columns | {
            name: spread(MISSING, len(host), *parts)
            for name, parts in {
                "correlation": [(at_calls, ids_of([a.correlation for a in calls]))],
                "external_id": [(at_calls, _external(calls)), (at_operators, _external(operators))],
                "sequence": [(at_operators, ids_of([a.sequence for a in operators]))],
                "forward_thread": [(at_operators, ids_of([a.forward_thread for a in operators]))],
            }.items()
        }

    def _device_columns(self, device: list[Event], role: NDArray[np.int8]) -> Columns:
        args = [event.args or NO_ARGS for event in device]
        return {
            "role": role,
            "name": self.words["device_name"].codes([event.name for event in device]),
            "device": _or_else(ids_of([a.device for a in args]), [e.pid for e in device]),
            "stream": _or_else(ids_of([a.stream for a in args]), [e.tid for e in device]),
            **_times_of(device),
            "correlation": ids_of([a.correlation for a in args]),
            "graph_node": ids_of([a.graph_node for a in args]),
            "note": self.words["note"].codes(map(_note, args)),
            "copied_bytes": ids_of([a.bytes for a in args]),
            "grid": self.words["grid"].codes([bytes(a.grid) for a in args]),
            "block": self.words["block"].codes([bytes(a.block) for a in args]),
            "collective": self.words["collective"].codes([bytes(a.collective) for a in args]),
            "group": self.words["group"].codes([_group(a) for a in args]),
            "group_sequence": ids_of([a.group_sequence for a in args]),
        }


def spread(
    fill: int, length: int, *parts: tuple[NDArray[np.intp], NDArray[np.generic]]
) -> NDArray[np.generic]:
    """Return a column that holds each part's values at its places, and `fill` elsewhere."""
    column = np.full(length, fill, dtype=parts[0][1].dtype)
    for places, values in parts:
        column[places] = values
    return column


def ids_of(values: Sequence[Any]) -> NDArray[np.int64]:
    """Return ids as int64: a numeric text becomes its number, anything else `MISSING`."""
    try:
        return np.asarray(array("q", values), dtype=np.int64)
    except (TypeError, OverflowError):
        return np.array([_id_of(value) for value in values], dtype=np.int64)


def _id_of(value: object) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return MISSING
    return number if -(2**63) < number < 2**63 else MISSING


def _spans(
    events: Sequence[Event], role: NDArray[np.int8], roles: tuple[Role, ...]
) -> tuple[list[Event], NDArray[np.intp]]:
    """Return the events of these roles that have a duration, and their places in the block."""
    places = np.flatnonzero(_is_one_of(role, roles))
    chosen = [events[i] for i in places.tolist()]
    if {event.ph for event in chosen} - {"X"}:
        keep = np.array([event.ph == "X" for event in chosen], dtype=bool)
        places = places[keep]
        chosen = [events[i] for i in places.tolist()]
    return chosen, places


def _is_one_of(role: NDArray[np.int8], roles: tuple[Role, ...]) -> NDArray[np.bool_]:
    table = np.zeros(len(Role), dtype=bool)
    table[list(roles)] = True
    return table[role]


def _external(args: list[Args]) -> NDArray[np.int64]:
    ids = ids_of([a.external_id for a in args])
    if (ids == MISSING).any():
        return np.where(ids == MISSING, ids_of([a.old_external_id for a in args]), ids)
    return ids


def _message(args: Args) -> bytes:
    """Return what a collective says of its message, as a JSON list; nothing for other operators."""
    if args.message_in is NO_ARGS.message_in:
        return b""
    sizes = args.message_in, args.message_out, args.message_dtype, args.group_size
    return b"[" + b",".join(bytes(part) or b"null" for part in (args.collective, *sizes)) + b"]"


def _group(args: Args) -> bytes:
    """Return the texts of a process group's name and ranks; a name alone may stand for several."""
    name, ranks = bytes(args.group_name), bytes(args.group_ranks)
    return name + b" " + ranks if name and _DIGIT.search(ranks) else b""


def _note(args: Args) -> bytes:
    """Return the range and the module that torch noted of a graph's node, as a JSON list.

    Its tool writes them into the event: a marked text as `name`, before torch 2.14 as `str`, and
    whatever else was marked under its own key, as torchtitan does a module.
    """
    if not args.graph_node or args.graph_node == MISSING:
        return b""
    parts = args.noted_range or args.noted_range_before_2_14, args.noted_module
    if not any(map(bytes, parts)):
        return b""
    return b"[" + b",".join(bytes(part) or b"null" for part in parts) + b"]"


def _or_else(ids: NDArray[np.int64], names: list[object]) -> NDArray[np.int64]:
    """Fill missing ids from the number at the end of a name such as "stream 7"."""
    if not (ids == MISSING).any():
        return ids
    digits = (str(name).rpartition(" ")[2] for name in names)
    return np.where(ids == MISSING, ids_of(list(digits)), ids)


def _times_of(events: list[Event]) -> Columns:
    start_ns = _ns_of(events, "ts")
    duration_ns = _ns_of(events, "dur")
    if len(events) and duration_ns.min() < 0:
        event = events[int(duration_ns.argmin())]
        raise DamageError(
            f"the {event.cat} {event.name!r} at ts {event.ts} has a negative duration "
            f"({duration_ns.min()} ns)",
            fix="the recorder lost events; record fewer steps, or take that event out of the file",
        )
    return {"start_ns": start_ns, "duration_ns": duration_ns}


def _ns_of(events: list[Event], key: str) -> NDArray[np.int64]:
    values = list(map(attrgetter(key), events))
    try:
        return exact_ns(values)
    except NotATimeError as error:
        event, value = events[error.position], values[error.position]
    said = f"no {key!r}" if value is None else f"{value!r} as its {key!r}, which is no time in µs"
    raise DamageError(f"the {event.cat} {event.name!r} at ts {event.ts} has {said}")


def _memory_columns(events: Iterable[Event]) -> Columns:
    marks = [e for e in events if e.name == "[memory]" and e.cat == "cpu_instant_event" and e.args]
    args = [mark.args or NO_ARGS for mark in marks]
    return {
        "time_ns": _ns_of(marks, "ts"),
        "device": ids_of([a.device_id for a in args]),
        "device_type": ids_of([a.device_type for a in args]),
        "allocated_bytes": ids_of([a.allocated_bytes for a in args]),
        "reserved_bytes": ids_of([a.reserved_bytes for a in args]),
    }


def _counts_of(others: list[Event]) -> Counter[str]:
    """Count what becomes no row, by kind where it has no category."""
    counts = Counter(f"ph:{event.ph}" for event in others if not event.cat)
    counts["nn_module_events"] = sum(event.name.startswith("nn.Module") for event in others)
    counts["seq_ops"] = sum(
        event.args is not None and event.args.sequence != MISSING for event in others
    )
    return counts
