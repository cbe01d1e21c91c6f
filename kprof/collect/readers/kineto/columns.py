"""A block of events as plain arrays, one a column; decimal microseconds as exact nanoseconds."""

from __future__ import annotations

import contextlib
import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from functools import cached_property
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers.kineto import events as kineto
from kprof.collect.readers.kineto.events import MISSING, NO_ARGS, WITHOUT_TIME, Args, Event, Role

# Half a unit in the last place of a double is below 0.49 ns up to here, so that its nearest
# whole nanosecond is the one that was written; from here on only the text of a fraction will do.
EXACT_BELOW_US = 2.0**43
# The largest whole microseconds (146 years) that leave room in an int64 of nanoseconds for the end
# of what starts then.
LIMIT_US = (2**62 - 1) // 1000


class NeedsTextError(ValueError):
    """A fraction so large that its double has lost nanoseconds: decode it as a Decimal."""


class NotATimeError(ValueError):
    """A value that is no number of microseconds; `position` is its place in the sequence."""

    def __init__(self, position: int) -> None:
        super().__init__(f"value {position} is no time")
        self.position = position


Columns = dict[str, NDArray[np.generic]]
_DIGIT = re.compile(rb"[0-9]")
_HEX = re.compile(r"[-+]?0[xX][0-9a-fA-F]+$")
# How an unsigned int of 32 bits says that there is no stream.
_NO_STREAM = 2**32 - 1
INPUTS = ("shapes", "dtypes", "strides", "values")
# JSON holds no such byte outside of an escape.
JOINT = b"\0"


class Vocabulary(dict[object, int]):
    """Numbers every distinct value from 0 on; no text at all is -1."""

    def __init__(self) -> None:
        super().__init__({b"": -1})

    def __missing__(self, value: object) -> int:
        self[value] = number = len(self) - 1
        return number

    def codes(self, values: Sequence[object]) -> NDArray[np.int32]:
        """Return the number of each value."""
        return np.fromiter(map(self.__getitem__, values), np.int32, len(values))

    def codes_of_few(self, values: list[object]) -> NDArray[np.int32]:
        """Return the number of each value, as `codes` does; quicker where all are equal."""
        if values and values.count(values[0]) == len(values):
            return np.full(len(values), self[values[0]], np.int32)
        return self.codes(values)

    def values_in_order(self) -> list[object]:
        """Return the values that have a number, by number."""
        return list(self)[1:]


@dataclass
class Combinations:
    """Numbers several texts of an event by one look-up, of which each has a vocabulary.

    Events repeat few combinations of them, and texts take longer to make than to look up.
    """

    vocabularies: tuple[Vocabulary, ...]
    of_texts: Callable[[tuple[bytes, ...]], Sequence[bytes]] = tuple
    """The texts that the vocabularies number, made from the recorded ones."""
    known: Vocabulary = field(default_factory=Vocabulary)

    def __post_init__(self) -> None:
        self._table = np.empty((len(self.vocabularies), 0), dtype=np.int32)

    def codes(self, joined: Sequence[bytes]) -> NDArray[np.int32]:
        """Return the numbers of the texts that JOINT joins, a row for each vocabulary."""
        codes = self.known.codes(joined)
        new: list[list[int]] = []
        for combination in islice(self.known, 1 + self._table.shape[1], None):
            texts = self.of_texts(tuple(combination.split(JOINT)))  # type: ignore[attr-defined]
            numbered = zip(self.vocabularies, texts, strict=True)
            new.append([vocabulary[text] for vocabulary, text in numbered])
        if new:
            # By the number of a combination, the number of each of its texts.
            self._table = np.append(self._table, np.array(new, dtype=np.int32).T, axis=1)
        return self._table[:, codes]


@dataclass
class Block:
    """The rows that one block of the file holds, in the order of the file."""

    host: Columns
    device: Columns
    memory: Columns
    counts: Counter[str]
    edges: Columns
    """Begins and ends (ph B and E), of which another block may hold the other half."""
    begun_host: Columns
    """The rows that begin at these edges, without a duration."""
    begun_device: Columns


# The columns of a block.
TABLES = ("host", "device", "memory", "edges", "begun_host", "begun_device")


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

    def __post_init__(self) -> None:
        words = self.words
        self._inputs = Combinations(tuple(words[name] for name in INPUTS))
        self._are_known = True
        self._types = Vocabulary()
        launch = ("grid", "block", "collective", "group")
        self._launch = Combinations(tuple(words[name] for name in launch), _launch_texts)

    def decode(self, text: bytes | bytearray | memoryview) -> Block:
        """Return the columns of a JSON list of events.

        Events whose times are none, or whose duration is negative, are left out and counted.

        Raises:
            msgspec.DecodeError: `text` is no list of events.
        """
        try:
            return self._block(*self._decoded(text))
        except NeedsTextError:
            events = kineto.EXACT_DECODER.decode(text)
            return self._block(events, self._categories_of(events))

    def _decoded(
        self, text: bytes | bytearray | memoryview
    ) -> tuple[Sequence[Event], NDArray[np.int32]]:
        """Return the events whose times may be doubles, and the number of each one's category."""
        if self._are_known:
            # Another category, or none, is no type of this decoder's.
            with contextlib.suppress(msgspec.ValidationError):
                events = kineto.KNOWN_DECODER.decode(text)
                return events, self._categories_by_type(events)
        events = kineto.FAST_DECODER.decode(text)
        # The next block is mostly like this one.
        self._are_known = kineto.KNOWN_CATEGORIES.issuperset(event.cat for event in events)
        return events, self._categories_of(events)

    def _categories_of(self, events: Sequence[Event]) -> NDArray[np.int32]:
        return self.words["category"].codes([event.cat for event in events])

    def _categories_by_type(self, events: Sequence[Event]) -> NDArray[np.int32]:
        """Return the number of each event's category, where every category has its own type."""
        types = self._types.codes(list(map(type, events)))
        categories = [one.cat for one in self._types.values_in_order()]  # type: ignore[attr-defined]
        numbers = [self.words["category"][name] for name in categories]
        return np.array(numbers, dtype=np.int32)[types]

    def _block(self, events: Sequence[Event], category: NDArray[np.int32]) -> Block:
        categories = [str(name) for name in self.words["category"].values_in_order()]
        roles = [kineto.role_of(name) or Role.OTHER for name in categories]
        # An event without a category has the code -1, which reads the last.
        role = np.array([*roles, Role.OTHER], dtype=np.int8)[category]
        if kineto.MTIA_EVENTS in categories:
            of_mtia = np.flatnonzero(category == categories.index(kineto.MTIA_EVENTS))
            for i in of_mtia.tolist():
                role[i] = kineto.ROLE_OF_MTIA_NAME.get(events[i].name, role[i])
        counts = Counter[str](events=len(events))
        host, at_host = _spans(events, role, kineto.HOST_ROLES)
        device, at_device = _spans(events, role, kineto.DEVICE_ROLES)
        rest = np.ones(len(events), dtype=bool)
        rest[at_host] = rest[at_device] = False
        at_rest = [
            i
            for i in np.flatnonzero(rest).tolist()
            if events[i].ph not in kineto.ARROWS or not events[i].cat
        ]
        others = [events[i] for i in at_rest]
        at_edges = [i for i in at_rest if events[i].ph in ("B", "E")]
        edges = (
            self._edges([events[i] for i in at_edges], role[at_edges])
            if at_edges
            else self._no_edges
        )
        host, at_host, host_times = _timed(host, at_host, counts, "damaged_events")
        device, at_device, device_times = _timed(device, at_device, counts, "damaged_activities")
        counts.update(_counts_of(others))
        block = Block(
            self._host_columns(host, role[at_host], host_times),
            self._device_columns(device, role[at_device], device_times),
            _memory_columns(others),
            counts,
            *edges,
        )
        numbers = np.bincount(category[category >= 0], minlength=len(categories)).tolist()
        named = zip(categories, numbers, strict=True)
        block.counts.update({f"cat:{name}": n for name, n in named if name and n})
        block.counts["seq_ops"] += int(np.sum(block.host["sequence"] != MISSING))
        is_overhead = role[at_host] == Role.OVERHEAD
        if is_overhead.any():
            block.counts["profiler_overhead_ns"] = int(block.host["duration_ns"][is_overhead].sum())
        return block

    @cached_property
    def _no_edges(self) -> tuple[Columns, Columns, Columns]:
        """What most blocks hold of edges, so that it is made and sent once."""
        return self._edges([], np.empty(0, dtype=np.int8))

    def _edges(
        self, edges: list[Event], role: NDArray[np.int8]
    ) -> tuple[Columns, Columns, Columns]:
        """Return the edges, and the rows of the host and the device that begin there.

        An edge's `row` is its place among those of its role; -1 for an end, and for a begin that
        makes no row, which still takes its end.
        """
        time_ns = known_ns([event.ts for event in edges])
        is_known = time_ns != MISSING
        edges = [event for event, known in zip(edges, is_known.tolist(), strict=True) if known]
        role, time_ns = role[is_known], time_ns[is_known]
        is_begin = np.array([event.ph == "B" for event in edges], dtype=bool)
        row = np.full(len(edges), -1, dtype=np.int64)
        begun = []
        for roles in (kineto.HOST_ROLES, kineto.DEVICE_ROLES):
            at = np.flatnonzero(is_begin & _is_one_of(role, roles))
            row[at] = np.arange(len(at))
            begun.append(([edges[i] for i in at.tolist()], at))
        times = [
            {"start_ns": time_ns[at], "duration_ns": np.full(len(at), MISSING, dtype=np.int64)}
            for _, at in begun
        ]
        (host, at_host), (device, at_device) = begun
        columns: Columns = {
            "time_ns": time_ns,
            "is_begin": is_begin,
            "is_device": _is_one_of(role, kineto.DEVICE_ROLES),
            "row": row,
            "pid": self.words["pid"].codes([event.pid for event in edges]),
            "tid": self.words["tid"].codes([event.tid for event in edges]),
            "name": self.words["host_name"].codes([event.name for event in edges]),
        }
        return (
            columns,
            self._host_columns(host, role[at_host], times[0]),
            self._device_columns(device, role[at_device], times[1]),
        )

    def _host_columns(self, host: list[Event], role: NDArray[np.int8], times: Columns) -> Columns:
        columns: Columns = {
            "role": role,
            "name": self.words["host_name"].codes([event.name for event in host]),
            "pid": self.words["pid"].codes_of_few([event.pid for event in host]),
            "tid": self.words["tid"].codes_of_few([event.tid for event in host]),
            **times,
        }
        at_operators = np.flatnonzero(_is_one_of(role, kineto.OPERATOR_ROLES))
        operators = [host[i].args or NO_ARGS for i in at_operators.tolist()]
        at_calls = np.flatnonzero(role == Role.RUNTIME)
        calls = [host[i].args or NO_ARGS for i in at_calls.tolist()]
        inputs = [JOINT.join((a.shapes, a.dtypes, a.strides, a.values)) for a in operators]
        for name, codes in zip(INPUTS, self._inputs.codes(inputs), strict=True):
            columns[name] = spread(-1, len(host), (at_operators, codes))
        nothing = NO_ARGS.message_in
        with_message = [i for i, a in enumerate(operators) if a.message_in is not nothing]
        codes = self.words["message"].codes([_message(operators[i]) for i in with_message])
        columns["message"] = spread(-1, len(host), (at_operators[with_message], codes))
        return columns | {
            name: spread(MISSING, len(host), *parts)
            for name, parts in {
                "correlation": [(at_calls, keys_of([a.correlation for a in calls]))],
                "external_id": [(at_calls, _external(calls)), (at_operators, _external(operators))],
                "sequence": [(at_operators, ids_of([a.sequence for a in operators]))],
                "forward_thread": [(at_operators, ids_of([a.forward_thread for a in operators]))],
            }.items()
        }

    def _device_columns(
        self, device: list[Event], role: NDArray[np.int8], times: Columns
    ) -> Columns:
        args = [event.args or NO_ARGS for event in device]
        launch = [
            JOINT.join((a.grid, a.block, a.collective, a.group_name, a.group_ranks)) for a in args
        ]
        grid, block, collective, group = self._launch.codes(launch)
        graph_node = ids_of([a.graph_node for a in args])
        at_nodes = np.flatnonzero((graph_node != MISSING) & (graph_node != 0))
        notes = [_note(args[i]) for i in at_nodes.tolist()]
        return {
            "role": role,
            "name": self.words["device_name"].codes([event.name for event in device]),
            "device": _or_else(ids_of([a.device for a in args]), [e.pid for e in device]),
            "stream": _streams(device, args),
            **times,
            "pid": self.words["pid"].codes([event.pid for event in device]),
            "correlation": keys_of([a.correlation for a in args]),
            "external_id": _external(args),
            "graph_node": graph_node,
            "note": spread(-1, len(device), (at_nodes, self.words["note"].codes(notes))),
            "copied_bytes": ids_of([a.bytes for a in args]),
            "grid": grid,
            "block": block,
            "collective": collective,
            "group": group,
            "group_sequence": ids_of([a.group_sequence for a in args]),
        }


def exact_ns(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Return whole nanoseconds, a thousandth of a microsecond at a time, without rounding errors.

    Digits beyond the third decimal are rounded to the nearest nanosecond.

    Raises:
        NeedsTextError: a float is too large to be exact.
        NotATimeError: a value is missing, not a number, or beyond 64 bits.
    """
    try:
        values = np.asarray(array("d", microseconds), dtype=np.float64)
    except (TypeError, OverflowError):
        return _one_by_one(microseconds)
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    if not np.abs(values).max() < EXACT_BELOW_US:  # also where one of them is not a number
        return _one_by_one(microseconds)
    # An array takes `true` and `false` for 1 and 0.
    places = np.flatnonzero((values == 0) | (values == 1)).tolist()
    if any(isinstance(microseconds[place], bool) for place in places):
        return _one_by_one(microseconds)
    whole = np.floor(values)
    rest_ns: np.ndarray = np.rint((values - whole) * 1000)
    return np.asarray(whole.astype(np.int64) * 1000 + rest_ns.astype(np.int64))


def _one_by_one(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    if all(type(value) is int for value in microseconds):
        whole = np.array(microseconds)
        if whole.dtype == np.int64 and np.abs(whole).max() <= LIMIT_US:
            return whole * 1000
    return np.array([_ns(value, i) for i, value in enumerate(microseconds)], dtype=np.int64)


def _ns(value: object, position: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise NotATimeError(position)
    try:
        # Some writers give numbers as texts.
        number = Decimal(value)
        if not abs(number) <= LIMIT_US:
            raise NotATimeError(position)
        if isinstance(value, float) and abs(value) >= EXACT_BELOW_US:
            raise NeedsTextError
        return int((number * 1000).to_integral_value(rounding=ROUND_HALF_EVEN))
    except InvalidOperation:  # NaN has no order
        raise NotATimeError(position) from None


def known_ns(microseconds: Sequence[Any]) -> NDArray[np.int64]:
    """Return whole nanoseconds as `exact_ns` does, and `MISSING` for what is no time.

    Raises:
        NeedsTextError: a float is too large to be exact.
    """
    try:
        return exact_ns(microseconds)
    except NotATimeError:
        return np.array([_ns_or_missing(value) for value in microseconds], dtype=np.int64)


def _ns_or_missing(value: object) -> int:
    try:
        return _ns(value, 0)
    except NotATimeError:
        return MISSING


def spread(
    fill: int, length: int, *parts: tuple[NDArray[np.intp], NDArray[np.generic]]
) -> NDArray[np.generic]:
    """Return a column that holds each part's values at its places, and `fill` elsewhere."""
    column = np.full(length, fill, dtype=parts[0][1].dtype)
    for places, values in parts:
        column[places] = values
    return column


def ids_of(values: Sequence[Any]) -> NDArray[np.int64]:
    """Return numbers as int64: a numeric text becomes its number, anything else `MISSING`."""
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


def keys_of(values: Sequence[Any]) -> NDArray[np.int64]:
    """Return ids that join events as int64, equal ones for equal ids in any form.

    A number is itself, also as text, in hexadecimal and as a float. What does not fit, and any
    other text, becomes a negative number of its own.
    """
    try:
        return np.asarray(array("q", values), dtype=np.int64)
    except (TypeError, OverflowError):
        return np.array([_key_of(value) for value in values], dtype=np.int64)


def _key_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return MISSING
    if isinstance(value, float):
        return _key_of(int(value)) if value.is_integer() else MISSING
    number: int | None = value if isinstance(value, int) else None
    if isinstance(value, str):
        value = value.strip()
        if not value:
            return MISSING
        with contextlib.suppress(ValueError):
            number = int(value, 16 if _HEX.match(value) else 10)
    return number if number is not None and -(2**63) < number < 2**63 else _hashed(f"{value}")


def _hashed(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return -1 - int.from_bytes(digest, "little") // 2


def _spans(
    events: Sequence[Event], role: NDArray[np.int8], roles: tuple[Role, ...]
) -> tuple[list[Event], NDArray[np.intp]]:
    """Return the events of these roles that have a duration, and their places in the block."""
    places = np.flatnonzero(_is_one_of(role, roles))
    chosen = [events[i] for i in places.tolist()]
    phases = [event.ph for event in chosen]
    if phases.count("X") != len(phases):
        keep = np.array([phase == "X" for phase in phases], dtype=bool)
        places = places[keep]
        chosen = [events[i] for i in places.tolist()]
    return chosen, places


def _is_one_of(role: NDArray[np.int8], roles: tuple[Role, ...]) -> NDArray[np.bool_]:
    table = np.zeros(len(Role), dtype=bool)
    table[list(roles)] = True
    return table[role]


def _external(args: list[Args]) -> NDArray[np.int64]:
    ids = keys_of([a.external_id for a in args])
    if (ids == MISSING).any():
        return np.where(ids == MISSING, keys_of([a.old_external_id for a in args]), ids)
    return ids


def _message(args: Args) -> bytes:
    """Return what a collective says of its message, as a JSON list."""
    sizes = args.message_in, args.message_out, args.message_dtype, args.group_size
    return b"[" + b",".join(bytes(part) or b"null" for part in (args.collective, *sizes)) + b"]"


def _launch_texts(recorded: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return grid, block, collective, and the name and ranks of the process group as one text.

    A name alone may stand for several groups.
    """
    grid, block, collective, name, ranks = recorded
    group = name + b" " + ranks if name and _DIGIT.search(ranks) else b""
    return grid, block, collective, group


def _note(args: Args) -> bytes:
    """Return the range and the module that torch noted of a graph's node, as a JSON list.

    Its tool writes them into the event: a marked text as `name`, before torch 2.14 as `str`, and
    other marks under their own keys, as torchtitan marks a module.
    """
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


def _streams(device: list[Event], args: list[Args]) -> NDArray[np.int64]:
    """Return the streams, on an XPU the queues; `MISSING` where there is none."""
    ids = ids_of([a.stream for a in args])
    if not (ids == MISSING).any():
        return ids
    ids = np.where(ids == MISSING, ids_of([a.queue for a in args]), ids)
    ids = _or_else(ids, [event.tid for event in device])
    return np.where(ids == _NO_STREAM, MISSING, ids)


def _timed(
    events: list[Event], places: NDArray[np.intp], counts: Counter[str], damaged: str
) -> tuple[list[Event], NDArray[np.intp], Columns]:
    """Return the events that have a time and a duration, their places, and both in ns.

    The others are counted as `damaged`.
    """
    starts, durations = [e.ts for e in events], [e.dur for e in events]
    try:
        start_ns, duration_ns = exact_ns(starts), exact_ns(durations)
    except NotATimeError:
        start_ns, duration_ns = known_ns(starts), known_ns(durations)
    is_right = (start_ns != MISSING) & (duration_ns >= 0)
    if not is_right.all():
        at = np.flatnonzero(is_right)
        counts[damaged] += len(events) - len(at)
        events, places = [events[i] for i in at.tolist()], places[at]
        start_ns, duration_ns = start_ns[at], duration_ns[at]
    return events, places, {"start_ns": start_ns, "duration_ns": duration_ns}


def _memory_columns(events: Iterable[Event]) -> Columns:
    marks = [e for e in events if e.name == "[memory]" and e.cat == "cpu_instant_event" and e.args]
    time_ns = known_ns([mark.ts for mark in marks])
    if (time_ns == MISSING).any():
        marks = [m for m, ns in zip(marks, time_ns.tolist(), strict=True) if ns != MISSING]
        time_ns = time_ns[time_ns != MISSING]
    args = [mark.args or NO_ARGS for mark in marks]
    return {
        "time_ns": time_ns,
        "device": ids_of([a.device_id for a in args]),
        "device_type": ids_of([a.device_type for a in args]),
        "allocated_bytes": ids_of([a.allocated_bytes for a in args]),
        "reserved_bytes": ids_of([a.reserved_bytes for a in args]),
    }


def _counts_of(others: list[Event]) -> Counter[str]:
    """Count what becomes no row, by kind where it has no category, and the time that it takes."""
    phases = Counter([event.ph for event in others if not event.cat])
    counts = Counter({f"ph:{phase}": number for phase, number in phases.items()})
    names = Counter([event.name for event in others])
    counts["nn_module_events"] = sum(n for name, n in names.items() if name.startswith("nn.Module"))
    args = [event.args for event in others if event.args is not None]
    counts["seq_ops"] = len([a for a in args if a.sequence != MISSING])
    unread = [e for e in others if e.ph == "X" and (not e.cat or e.cat not in WITHOUT_TIME)]
    if unread:
        for event, ns in zip(unread, known_ns([e.dur for e in unread]).tolist(), strict=True):
            if kineto.role_of(event.cat) is None and ns > 0:
                counts[f"unread:{event.cat}"] += 1
                counts[f"unread_ns:{event.cat}"] += ns
    return counts
