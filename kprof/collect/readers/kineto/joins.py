"""Joins of activities to the calls that launched them, where ids alone do not tell.

An id stands for one call of one process of one recording. In files that hold several of these the
same ids come again, ROCm writes ids of its own, and events may stand twice. Here each call gets an
id of its own, and each activity that of its call, so that rank and id are enough from here on.
Arrows (flow events) lead from a call of the host to the activity that it started.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kprof.collect.readers.kineto.blocks import Merger, Rows
from kprof.collect.readers.kineto.columns import known_ns
from kprof.collect.readers.kineto.cuts import BARE_LIST, BLOCK_BYTES, LIST_OF_EVENTS
from kprof.collect.readers.kineto.damage import UNREADABLE
from kprof.collect.readers.kineto.events import MISSING, Role
from kprof.collect.readers.kineto.repair import repaired_parts
from kprof.trace import Caveat

# Forward to backward: an arrow from host to host.
_BETWEEN_OPERATORS = ("fwdbwd", "forward_backward")


class _Flow(msgspec.Struct, gc=False):
    """The fields of an event that may be the begin or end of an arrow."""

    ph: str = ""
    cat: str = ""
    id: msgspec.Raw = msgspec.Raw()
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: Decimal | None = None


@dataclass(frozen=True)
class Arrow:
    """An end of an arrow: its id, the track and the time at which it lies."""

    id: bytes
    is_begin: bool
    process: str
    thread: str
    time_ns: int


Numbers = NDArray[np.int64]
NO_ROW = -1
# Ids share an int64 with the rank in keys of the analysis.
LARGEST_ID = 1 << 43
EMPTY_IDS = (0, -1)
# Clocks of a device and its host are mostly off by less.
MOST_OFF_NS = 1_000_000
# A device is a process's where of the activities that one process alone can have launched so many
# are that one's.
MOST = 0.9
# Where so many of the events with ids stand twice, events without ids do as well.
MANY = 0.5
# Calls that put something on a device, by any vendor's name.
_LAUNCH = re.compile(r"launch|memcpy|memset|copy|fill", re.IGNORECASE)
_TOKEN = re.compile(r"\d+|[a-z]+", re.IGNORECASE)
# What two copies of an event have in common, and of its texts the vocabularies.
_NUMBERS_OF: dict[Rows, tuple[str, ...]] = {
    "device": (
        *("start_ns", "duration_ns", "correlation", "stream", "device", "graph_node", "role"),
    ),
    "host": ("start_ns", "duration_ns", "role", "correlation"),
}
_TEXTS_OF: dict[Rows, dict[str, str]] = {
    "device": {"name": "device_name", "pid": "pid"},
    "host": {"name": "host_name", "pid": "pid", "tid": "tid"},
}
# What one of them may lack: recorders and tools write more or fewer of an event's `args`.
_MORE_NUMBERS_OF: dict[Rows, tuple[str, ...]] = {
    "device": ("copied_bytes", "group_sequence"),
    "host": ("sequence", "forward_thread"),
}
_MORE_TEXTS_OF: dict[Rows, dict[str, str]] = {
    "device": {"grid": "grid", "block": "block"},
    "host": {"shapes": "shapes", "message": "message"},
}


@dataclass(frozen=True)
class Calls:
    """The calls into a device's runtime."""

    row: Numbers
    correlation: Numbers
    external_id: Numbers
    process: Numbers
    thread: Numbers
    start_ns: Numbers
    end_ns: Numbers
    is_launch: NDArray[np.bool_]


@dataclass(frozen=True)
class Activities:
    """Device activities; `process` is the file's own number, mostly the device's index."""

    correlation: Numbers
    external_id: Numbers
    process: Numbers
    stream: Numbers
    start_ns: Numbers


def arrows_in(text: mmap.mmap) -> list[Arrow]:
    """Read the arrows of a file; for the rare one whose events carry no ids that join."""
    start = BARE_LIST.match(text) or LIST_OF_EVENTS.search(text)
    if start is None:
        return []
    return list(_arrows(text, start.end()))


def _arrows(text: mmap.mmap, begin: int) -> Iterator[Arrow]:
    for part in repaired_parts(text, begin, BLOCK_BYTES):
        try:
            events = msgspec.json.decode(part.text, type=list[_Flow])
        except UNREADABLE:
            continue
        for event in events:
            if event.ph in ("s", "t", "f") and event.cat not in _BETWEEN_OPERATORS:
                (time_ns,) = known_ns([event.ts]).tolist()
                if time_ns != MISSING:
                    is_begin = event.ph == "s"
                    yield Arrow(bytes(event.id), is_begin, str(event.pid), str(event.tid), time_ns)


def settle(merger: Merger, arrows: Callable[[], list[Arrow]]) -> Counter[str]:
    """Take out events that stand twice, and give ids that join; return what was counted.

    `arrows` reads the file's flow events; they are asked for only where no id joins.
    """
    counts = _drop_copies(merger)
    calls, activities = _without_empty_ids(_calls(merger), _activities(merger))
    processes = merger.words("host", "pid", "pid", str)[1]
    known = np.sort(calls.correlation[calls.correlation != MISSING])
    is_reused = known[1:] == known[:-1]
    is_odd = not _are_plain(known)
    lacks = activities.correlation == MISSING
    has_processes = len(np.unique(calls.process)) > 1
    if is_reused.any() or is_odd or lacks.any() or has_processes:
        launch = _launches(calls, activities, processes)
        is_external = lacks & (launch != NO_ROW)
        if (lost := np.flatnonzero(lacks & (launch == NO_ROW))).size and len(calls.row):
            launch[lost] = _by_arrows(calls, activities, processes, arrows(), lost)
            counts["joined_by_arrow"] = int((launch[lost] != NO_ROW).sum())
        counts["reused_ids"] = len(np.unique(known[1:][is_reused]))
        counts["joined_by_external_id"] = int(is_external.sum())
        _put_ids(merger, calls, activities, launch)
        # The external ids that joined are calls' own, and no operators'.
        own = calls.external_id.copy()
        own[launch[is_external]] = MISSING
        if has_processes:
            _put_ranks(merger, calls, activities, launch, processes)
    else:
        own = calls.external_id
        correlation = activities.correlation
        if not _are_plain(correlation):
            merger.put("device", "correlation", _in_range(correlation))
    _put_operator_ids(merger, calls, own)
    return +counts


# Events that stand twice


def _drop_copies(merger: Merger) -> Counter[str]:
    """Keep one of the events that are equal in all that both say, the one that says most.

    Two activities of one stream cannot begin at one time, so that equal ones are one; except in a
    graph, all of which has one id, and where times are rounded. An event without an id is a copy
    where most others are.
    """
    counts: Counter[str] = Counter()
    device = _copies(merger, "device")
    number = len(device)
    if number and not device.any() and not _has_calls_twice(merger):
        return counts
    is_alone = _has_id_alone(merger.numbers("device", "correlation"), device)
    is_doubled = bool(number) and device.mean() >= MANY * 0.5
    host = _copies(merger, "host")
    has_id = merger.numbers("host", "correlation") != MISSING
    is_operator = merger.numbers("host", "role") == Role.OPERATOR
    has_id |= is_operator & (merger.numbers("host", "external_id") != MISSING)
    is_host_doubled = bool(has_id.any()) and host[has_id].mean() >= MANY * 0.5
    copies: dict[Rows, NDArray[np.bool_]] = {
        "device": device & (is_doubled | is_alone),
        "host": host & (is_doubled | is_host_doubled | (has_id & bool(number))),
    }
    for rows, is_copy in copies.items():
        if is_copy.any():
            merger.keep(rows, ~is_copy)
            counts["copied_events"] += int(is_copy.sum())
    return counts


def _copies(merger: Merger, rows: Rows) -> NDArray[np.bool_]:
    """Tell which rows are equal to another that says as much or more."""
    start_ns = merger.numbers(rows, "start_ns")
    correlation = merger.numbers(rows, "correlation")
    is_copy = np.zeros(len(start_ns), dtype=bool)
    if rows == "device" and not has_twice(start_ns, correlation):
        return is_copy
    external_id = merger.numbers(rows, "external_id")
    is_numbered = correlation != MISSING
    same = [merger.numbers(rows, column) for column in _NUMBERS_OF[rows]]
    same.append(np.where(is_numbered, MISSING, external_id))
    same += _codes(merger, rows, _TEXTS_OF[rows])
    more = [np.where(is_numbered, external_id, MISSING)]
    more += [merger.numbers(rows, column) for column in _MORE_NUMBERS_OF[rows]]
    more += [np.where(of < 0, MISSING, of) for of in _codes(merger, rows, _MORE_TEXTS_OF[rows])]
    # Inverted, what is missing comes last.
    order = np.lexsort([*(~key for key in more), *same])
    equal = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in same:
        equal &= key[order][1:] == key[order][:-1]
    for key in more:
        equal &= (key[order][1:] == key[order][:-1]) | (key[order][1:] == MISSING)
    is_copy[order[1:]] = equal
    return is_copy


def _codes(merger: Merger, rows: Rows, texts: dict[str, str]) -> list[Numbers]:
    return [merger.words(rows, *of, str)[0].astype(np.int64) for of in texts.items()]


def has_twice(start_ns: Numbers, ids: Numbers) -> bool:
    """Tell quickly whether any two events may begin at one time with one id; mostly none do."""
    mixed = np.sort(start_ns ^ (ids << np.int64(20)))
    return bool((mixed[1:] == mixed[:-1]).any())


def _has_calls_twice(merger: Merger) -> bool:
    correlation = merger.numbers("host", "correlation")
    at = np.flatnonzero(correlation != MISSING)
    return has_twice(merger.numbers("host", "start_ns")[at], correlation[at])


def _has_id_alone(correlation: Numbers, is_copy: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which activities have an id, and share it with copies of themselves alone."""
    ids, inverse = np.unique(correlation, return_inverse=True)
    num_distinct = np.bincount(inverse, weights=~is_copy, minlength=len(ids))
    return np.asarray((num_distinct[inverse] == 1) & (correlation != MISSING))


def _calls(merger: Merger) -> Calls:
    role = merger.numbers("host", "role")
    row = np.flatnonzero(role == Role.RUNTIME)
    name, names = merger.words("host", "name", "host_name", str)
    is_launch = np.array([bool(_LAUNCH.search(text)) for text in names] + [False])
    start_ns = merger.numbers("host", "start_ns")[row]
    return Calls(
        row=row,
        correlation=merger.numbers("host", "correlation")[row],
        external_id=merger.numbers("host", "external_id")[row],
        process=merger.words("host", "pid", "pid", str)[0][row].astype(np.int64),
        thread=merger.words("host", "tid", "tid", str)[0][row].astype(np.int64),
        start_ns=start_ns,
        end_ns=start_ns + merger.numbers("host", "duration_ns")[row],
        is_launch=is_launch[name[row]],
    )


def _activities(merger: Merger) -> Activities:
    return Activities(
        correlation=merger.numbers("device", "correlation"),
        external_id=merger.numbers("device", "external_id"),
        process=merger.words("device", "pid", "pid", str)[0].astype(np.int64),
        stream=merger.numbers("device", "stream"),
        start_ns=merger.numbers("device", "start_ns"),
    )


def _without_empty_ids(calls: Calls, activities: Activities) -> tuple[Calls, Activities]:
    """Return both without the ids that recorders write where they know none.

    That is 0 or -1 on several launches; a single launch may have it as its number.
    """
    of_launches = calls.correlation[calls.is_launch]
    empty = [one for one in EMPTY_IDS if np.count_nonzero(of_launches == one) > 1]
    if not empty:
        return calls, activities
    of_calls, of_activities = (
        np.where(np.isin(ids, empty), MISSING, ids)
        for ids in (calls.correlation, activities.correlation)
    )
    return replace(calls, correlation=of_calls), replace(activities, correlation=of_activities)


def _are_plain(ids: Numbers) -> bool:
    """Tell whether the ids can stay as they are."""
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < LARGEST_ID)


# Which call launched an activity


def _launches(calls: Calls, activities: Activities, processes: list[str]) -> Numbers:
    """Return the call of each activity, or `NO_ROW`.

    Of calls with its id one of its own process, where the file tells that, and of those the last
    that began before it. An activity without that id belongs to the call with its external id.
    """
    launch = np.full(len(activities.start_ns), NO_ROW, dtype=np.int64)
    owner, is_certain = _owners(calls, activities, processes)
    has = np.flatnonzero(activities.correlation != MISSING)
    of_owner = owner[activities.process]
    code, of_call = _shared_codes(activities.correlation, calls.correlation)
    is_of_several = _is_of_several(of_call, calls.process, 1 + int(code.max(initial=0)))
    width = len(processes) + 1
    known = has[of_owner[has] != NO_ROW]
    launch[known] = last_before(
        of_call * width + calls.process,
        calls.start_ns,
        code[known] * width + of_owner[known],
        activities.start_ns[known],
        is_valid=calls.correlation != MISSING,
    )
    is_open = (launch == NO_ROW) & ~is_certain[activities.process]
    rest = has[is_open[has]]
    launch[rest] = _in_order_or_last(
        of_call,
        calls.start_ns,
        code[rest],
        activities.start_ns[rest],
        is_valid=calls.correlation != MISSING,
        is_ordered=is_of_several[code[rest]],
    )
    lacks = np.flatnonzero(
        (activities.correlation == MISSING) & (activities.external_id != MISSING)
    )
    if len(lacks):
        launch[lacks] = _by_external_id(calls, activities, of_owner, lacks, width)
    return launch


# Which process a device is of


def _owners(
    calls: Calls, activities: Activities, processes: list[str]
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return for each process that activities name the one that launched them, or `NO_ROW`.

    And whether the names alone tell it. One more entry is for activities that name none.
    """
    owner = np.full(len(processes) + 1, NO_ROW, dtype=np.int64)
    is_certain = np.zeros(len(owner), dtype=bool)
    of_calls = np.unique(calls.process).tolist()
    named = [one for one in np.unique(activities.process).tolist() if one >= 0]
    if len(of_calls) < 2:
        return owner, is_certain
    for one in named:
        by_name = _by_name(processes[one], {each: processes[each] for each in of_calls})
        # Device activities may have their own calls on the device's track, as MTIA writes them.
        if by_name is not None and _share_known(calls, activities, one, by_name) >= MANY:
            owner[one], is_certain[one] = by_name, True
    unnamed = [one for one in named if owner[one] == NO_ROW]
    for one in unnamed:
        owner[one] = _by_ids(calls, activities, one)
    unnamed = [one for one in unnamed if owner[one] == NO_ROW]
    if len(unnamed) == len(of_calls):
        # Takes half a second to import, and few files need it.
        from scipy.optimize import linear_sum_assignment

        costs = [[_cost(calls, activities, one, each) for each in of_calls] for one in unnamed]
        for one, each in zip(*linear_sum_assignment(np.array(costs)), strict=True):
            owner[unnamed[one]] = of_calls[each]
    return owner, is_certain


def _by_name(text: str, callers: dict[int, str]) -> int | None:
    """Return the process with this name, or the one whose name shares most of its first words."""
    same = [code for code, name in callers.items() if name == text]
    if same:
        return same[0]
    words = _TOKEN.findall(text.lower())
    if all(word.isdigit() for word in words):
        return None
    shared = {
        code: _num_shared(words, _TOKEN.findall(name.lower())) for code, name in callers.items()
    }
    most = max(shared.values())
    best = [code for code, number in shared.items() if number == most]
    return best[0] if most and len(best) == 1 else None


def _num_shared(first: list[str], second: list[str]) -> int:
    number = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        number += 1
    return number


def _share_known(calls: Calls, activities: Activities, device: int, process: int) -> float:
    """Return how many of a device's activities with ids have one that is among a process's."""
    ids = activities.correlation[activities.process == device]
    ids = ids[ids != MISSING]
    known = np.isin(ids, calls.correlation[calls.process == process])
    return float(known.mean()) if len(ids) else 1.0


def _by_ids(calls: Calls, activities: Activities, process: int) -> int:
    """Return the process of nearly all activities of a device whose id one process alone has."""
    mine = activities.correlation[activities.process == process]
    code, of_call = _shared_codes(mine[mine != MISSING], calls.correlation)
    number = 1 + int(code.max(initial=0))
    caller = np.full(max(number, 1 + int(of_call.max(initial=0))), NO_ROW, dtype=np.int64)
    caller[of_call] = calls.process
    callers = caller[code[~_is_of_several(of_call, calls.process, number)[code]]]
    found, counts = np.unique(callers[callers != NO_ROW], return_counts=True)
    if not len(found) or counts.max() < MOST * counts.sum():
        return NO_ROW
    return int(found[counts.argmax()])


def _shared_codes(first: Numbers, second: Numbers) -> tuple[Numbers, Numbers]:
    """Number the distinct values of both from 0 on."""
    _, codes = np.unique(np.concatenate([first, second]), return_inverse=True)
    return codes[: len(first)].astype(np.int64), codes[len(first) :].astype(np.int64)


def _is_of_several(code: Numbers, process: Numbers, number: int) -> NDArray[np.bool_]:
    """Tell of each of so many codes whether calls of several processes have it."""
    pairs = np.unique(np.stack([code, process]), axis=1)
    return np.bincount(pairs[0], minlength=number) > 1


def _cost(calls: Calls, activities: Activities, device: int, process: int) -> float:
    """Return how badly a device's activities fit a process's calls: waits, contradictions, gaps."""
    mine = np.flatnonzero((activities.process == device) & (activities.correlation != MISSING))
    start_ns = activities.start_ns[mine]
    call = last_before(
        calls.correlation,
        calls.start_ns,
        activities.correlation[mine],
        start_ns,
        is_valid=(calls.process == process) & (calls.correlation != MISSING),
    )
    is_found = call != NO_ROW
    if not is_found.any():
        return 1e30
    wait_ns = (start_ns - calls.start_ns[call])[is_found]
    contradicted = float((wait_ns < 0).mean()) + float((~is_found).mean())
    # Squared, since the sum of waits is the same whichever process waits: processes wait alike.
    return float(np.median(np.abs(wait_ns))) ** 2 + 1e24 * contradicted


def last_before(
    call_keys: Numbers,
    call_ns: Numbers,
    keys: Numbers,
    start_ns: Numbers,
    *,
    is_valid: NDArray[np.bool_],
) -> Numbers:
    """Return for each key the last call with it that began by its start; else the first with it.

    Of several none began by then where all are later than clocks are off: the right one is lost.
    """
    result = np.full(len(keys), NO_ROW, dtype=np.int64)
    chosen = np.flatnonzero(is_valid)
    if not len(chosen) or not len(keys):
        return result
    chosen = chosen[np.lexsort([call_ns[chosen], call_keys[chosen]])]
    sorted_keys = call_keys[chosen]
    first = np.searchsorted(sorted_keys, keys, side="left")
    end = np.searchsorted(sorted_keys, keys, side="right")
    at = first.copy()
    # Steps of a search by halves within the calls of each key.
    several = np.flatnonzero(end - first > 1)
    low, high = first[several], end[several]
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_later = call_ns[chosen[middle]] <= start_ns[several]
        moves = high - low > 1
        low = np.where(moves & is_later, middle, low)
        high = np.where(moves & ~is_later, middle, high)
    at[several] = low
    hit = end > first
    hit[several] &= call_ns[chosen[low]] - start_ns[several] <= MOST_OFF_NS
    result[hit] = chosen[at[hit]]
    return result


def _in_order_or_last(
    call_keys: Numbers,
    call_ns: Numbers,
    keys: Numbers,
    start_ns: Numbers,
    *,
    is_valid: NDArray[np.bool_],
    is_ordered: NDArray[np.bool_],
) -> Numbers:
    """Return the call of each key: the first of the first where there are as many as activities.

    Elsewhere, where a call would then begin after its activity, and where it is not `is_ordered`,
    the last call before it.
    """
    result = last_before(call_keys, call_ns, keys, start_ns, is_valid=is_valid)
    chosen, asked = np.flatnonzero(is_valid), np.flatnonzero(is_ordered)
    chosen = chosen[np.lexsort([call_ns[chosen], call_keys[chosen]])]
    asked = asked[np.lexsort([start_ns[asked], keys[asked]])]
    unique, counts = np.unique(keys[asked], return_counts=True)
    of_calls = np.searchsorted(call_keys[chosen], [unique, unique + 1], side="left")
    is_equal = np.repeat(of_calls[1] - of_calls[0] == counts, counts)
    within = np.arange(len(asked)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = np.repeat(of_calls[0], counts)[is_equal] + within[is_equal]
    rows, matched = asked[is_equal], chosen[place.astype(np.int64)]
    is_early = call_ns[matched] > start_ns[rows]
    bad = np.isin(keys[rows], keys[rows[is_early]])
    result[rows[~bad]] = matched[~bad]
    return result


def _by_external_id(
    calls: Calls, activities: Activities, owner: Numbers, lacks: Numbers, width: int
) -> Numbers:
    code, of_call = _shared_codes(activities.external_id[lacks], calls.external_id)
    # The owner's calls alone, where the owner is known.
    code = code * width + np.where(owner[lacks] == NO_ROW, width - 1, owner[lacks])
    found = np.full(len(lacks), NO_ROW, dtype=np.int64)
    for is_valid in (calls.is_launch, np.ones(len(calls.row), dtype=bool)):
        for process in (calls.process, np.full(len(calls.row), width - 1)):
            rest = np.flatnonzero(found == NO_ROW)
            found[rest] = _in_order_or_last(
                of_call * width + process,
                calls.start_ns,
                code[rest],
                activities.start_ns[lacks[rest]],
                is_valid=is_valid & (calls.external_id != MISSING),
                is_ordered=np.ones(len(rest), dtype=bool),
            )
    return found


def _by_arrows(
    calls: Calls,
    activities: Activities,
    processes: list[str],
    arrows: list[Arrow],
    lost: Numbers,
) -> Numbers:
    """Return the calls from which the file's arrows lead to these activities, or `NO_ROW`."""
    code_of = {text: code for code, text in enumerate(processes)}
    begins: dict[object, list[Arrow]] = {}
    to: dict[tuple[int, int], list[Arrow]] = {}
    for arrow in sorted(arrows, key=lambda one: one.time_ns):
        if arrow.is_begin:
            begins.setdefault(arrow.id, []).append(arrow)
        else:
            to.setdefault((code_of.get(arrow.process, NO_ROW), arrow.time_ns), []).append(arrow)
    order = np.argsort(calls.start_ns, kind="stable")
    found = []
    for row in lost.tolist():
        ends = to.get((int(activities.process[row]), int(activities.start_ns[row])), [])
        if len(ends) > 1:
            stream = str(activities.stream[row])
            ends = [end for end in ends if end.thread == stream] or ends
        tails = (
            [a for a in begins.get(ends[0].id, ()) if a.time_ns <= ends[0].time_ns] if ends else []
        )
        found.append(_call_at(calls, order, tails[-1], code_of) if tails else NO_ROW)
    return np.array(found, dtype=np.int64)


def _call_at(calls: Calls, order: Numbers, arrow: Arrow, code_of: dict[str, int]) -> int:
    """Return the call of that process in which an arrow begins."""
    at = int(np.searchsorted(calls.start_ns[order], arrow.time_ns, side="right"))
    for call in order[max(at - 64, 0) : at][::-1].tolist():
        is_inside = calls.end_ns[call] >= arrow.time_ns
        if is_inside and calls.process[call] == code_of.get(arrow.process):
            return int(call)
    return NO_ROW


# What is written back


def _put_ids(merger: Merger, calls: Calls, activities: Activities, launch: Numbers) -> None:
    """Give each call an id of its own, the recorded one where it can stay, and its activities."""
    recorded = _in_range(calls.correlation)
    first = np.zeros(len(recorded), dtype=bool)
    first[np.unique(recorded, return_index=True)[1]] = True
    stays = (recorded != MISSING) & first
    is_needed = np.zeros(len(recorded), dtype=bool)
    is_needed[launch[launch != NO_ROW]] = True
    is_new = ~stays & (is_needed | (calls.correlation != MISSING))
    own = _in_range(activities.correlation)
    beyond = max(int(recorded.max(initial=0)), int(own.max(initial=0)), 0) + 1
    ids = np.where(stays, recorded, MISSING)
    ids[is_new] = beyond + np.arange(int(is_new.sum()))
    # An activity without a call keeps its id only where no call has it.
    own = np.where(np.isin(own, recorded), MISSING, own)
    column = merger.numbers("host", "correlation").copy()
    column[calls.row] = ids
    merger.put("host", "correlation", column)
    merger.put("device", "correlation", np.where(launch == NO_ROW, own, np.append(ids, 0)[launch]))


def _in_range(ids: Numbers) -> Numbers:
    return np.where((ids < 0) | (ids >= LARGEST_ID), MISSING, ids)


def _put_ranks(
    merger: Merger, calls: Calls, activities: Activities, launch: Numbers, processes: list[str]
) -> None:
    """Make ranks of processes that share no device, in the order of their names."""
    num = len(processes) + 1
    group = {code: code for code in range(-1, 2 * num)}

    def top(code: int) -> int:
        while group[code] != code:
            code = group[code]
        return code

    # Devices have numbers of their own: a process may be called as a device is.
    is_known = launch != NO_ROW
    pairs = np.stack([calls.process[launch[is_known]], activities.process[is_known]])
    for caller, device in np.unique(pairs, axis=1).T.tolist():
        group[top(device + num)] = top(caller)
    callers = sorted(np.unique(pairs[0]).tolist(), key=lambda code: _natural(processes[code]))
    rank_of_group: dict[int, int] = {}
    for caller in callers:
        rank_of_group.setdefault(top(caller), len(rank_of_group))
    if len(rank_of_group) < 2:
        return
    of_host = np.array([rank_of_group.get(top(c), 0) for c in [*range(len(processes)), -1]])
    of_device = np.array([rank_of_group.get(top(c + num), 0) for c in range(len(processes))] + [0])
    merger.put("host", "rank", of_host[merger.words("host", "pid", "pid", str)[0]])
    merger.put("device", "rank", of_device[activities.process])


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(t), "") if t.isdigit() else (0, t) for t in _TOKEN.findall(text.lower())]


def _put_operator_ids(merger: Merger, calls: Calls, external_id: Numbers) -> None:
    """Give each operator an external id of its own, and the calls that it made the same."""
    column = merger.numbers("host", "external_id")
    rows = np.flatnonzero(merger.numbers("host", "role") == Role.OPERATOR)
    ids = column[rows]
    known = np.sort(ids[ids != MISSING])
    is_unique = not (known[1:] == known[:-1]).any()
    if is_unique and _are_plain(known) and external_id is calls.external_id:
        if not _are_plain(external_id[external_id != MISSING]):
            column = column.copy()
            column[calls.row] = _in_range(external_id)
            merger.put("host", "external_id", column)
        return
    code, of_operator = _shared_codes(external_id, ids)
    process = merger.words("host", "pid", "pid", str)[0].astype(np.int64)
    width = int(process.max(initial=0)) + 2
    made_by = last_before(
        of_operator * width + process[rows],
        merger.numbers("host", "start_ns")[rows],
        code * width + calls.process,
        calls.start_ns,
        is_valid=ids != MISSING,
    )
    made_by = np.where(external_id == MISSING, NO_ROW, made_by)
    column = np.full(len(column), MISSING, dtype=np.int64)
    column[rows] = np.arange(len(rows)) + 1
    column[calls.row] = np.where(made_by == NO_ROW, MISSING, made_by + 1)
    merger.put("host", "external_id", column)


def told_of_joins(counts: dict[str, int]) -> Iterator[Caveat]:
    """Yield what the ids in the file did not tell by themselves."""
    if number := counts.get("copied_events", 0):
        yield Caveat(
            "repeated_events", f"Events that stand in the file twice, counted once: {number:,}."
        )
    if number := counts.get("reused_ids", 0):
        yield Caveat(
            "reused_ids",
            f"Correlation ids that several calls carry, as in a file of several processes or "
            f"recordings: {number:,}. An activity counts as launched by the last call of its "
            "process with its id that began before it.",
        )
    for how, what in (("external_id", "the external id alone"), ("arrow", "an arrow alone")):
        if number := counts.get(f"joined_by_{how}", 0):
            yield Caveat(
                f"joined_by_{how}",
                f"Activities that {what} joins to their call, for lack of another id: {number:,}.",
            )
