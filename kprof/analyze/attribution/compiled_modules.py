"""Modules inside a compiled model: which of them each kernel of its generated code serves.

Every call of generated code is one range that names the code, and inside it the code's operators
and kernels run in the order in which the code launches them. So what ran is matched with what the
code launches, whole call by whole call; nothing is named where the two do not agree.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import NO_ROW, nearest
from kprof.analyze.attribution.ledger import is_graph_launch_name
from kprof.trace import CompiledCode, CompiledLaunch, Trace

_CALL = re.compile(r"## Call CompiledFxGraph (\S+) ##")
# Kernels of libraries that add up what the one before has left in parts.
_FINISHES = re.compile(r"split_?[kK]_?[rR]educe")
# The key of code that Inductor did not cache.
NO_KEY = "None"

# Launches of which one is meant: more than one where several codes fit a call.
_Launches = tuple[CompiledLaunch, ...]
# Names of what ran in a call, and whether a CUDA graph replayed it.
_Ran = tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Compiled:
    """The known facts on compiled kernels, an entry for every row of `kernels`."""

    module: np.ndarray
    """The innermost module that holds all it serves, as an object; None where not known."""
    fused: np.ndarray
    """All modules it serves, as JSON text; None where not known."""
    launched: np.ndarray
    """The name of the launch in the generated code: what a CUDA graph's replay does not show."""


@dataclass(frozen=True)
class Places:
    """Where launches stand in the call tree."""

    parent: np.ndarray
    """For each range, the row of the range around it."""
    launch: np.ndarray
    """For each kernel, the row of its launch."""
    inner: np.ndarray
    """For each kernel, the row of the innermost range around its launch."""


def find_compiled(trace: Trace, places: Places, around: pd.Categorical) -> Compiled:
    """Find the modules of compiled kernels; `around` holds each one's whole compiled call."""
    module = np.full(len(trace.kernels), None, dtype=object)
    fused, launched = module.copy(), module.copy()
    launches, of_kernel = _match(trace, places)
    found = np.flatnonzero(of_kernel != NO_ROW)
    names = [{launch.name for launch in candidates} for candidates in launches]
    told = np.array([each.pop() if len(each) == 1 else None for each in names], dtype=object)
    launched[found] = told[of_kernel[found]]
    known: dict[tuple[int, int], tuple[str | None, str | None]] = {}
    for row, place, code in zip(
        found.tolist(), of_kernel[found].tolist(), around.codes[found].tolist(), strict=True
    ):
        if (place, code) not in known:
            name = str(around.categories[code]) if code >= 0 else None
            known[place, code] = _modules_of(launches[place], name)
        module[row], fused[row] = known[place, code]
    return Compiled(module, fused, launched)


def _modules_of(candidates: _Launches, around: str | None) -> tuple[str | None, str | None]:
    """Return the innermost module around all operators of a launch, and each one's own module."""
    told = {_resolve(launch, around) for launch in candidates}
    if len(told) != 1 or not (stacks := told.pop()):
        return None, None
    shared = [levels[0] for levels in zip(*stacks, strict=False) if len(set(levels)) == 1]
    each = sorted({stack[-1] for stack in stacks})
    return (shared[-1] if shared else None), msgspec.json.encode(each).decode()


def _resolve(launch: CompiledLaunch, around: str | None) -> tuple[tuple[str, ...], ...] | None:
    """Return the stacks of a launch within the module `around`; None unless all are known."""
    found = [_served(stacks, around) for stacks in launch.stacks]
    known = [stack for stack in found if stack is not None]
    return tuple(dict.fromkeys(known)) if known and len(known) == len(found) else None


def _served(stacks: tuple[tuple[str, ...], ...], around: str | None) -> tuple[str, ...] | None:
    """Return which of the stacks that share a code the call was for; None if that is not clear."""
    for stack in stacks:
        if stack[0] == around:
            return stack
    below = [stack for stack in stacks if around and stack[0].startswith(f"{around}.")] or stacks
    return below[0] if len(below) == 1 else None


def _match(trace: Trace, places: Places) -> tuple[list[_Launches], np.ndarray]:
    """Return the launches that were found, and the place in them of each kernel's, or `NO_ROW`."""
    of_kernel = np.full(len(trace.kernels), NO_ROW, dtype=np.int64)
    of_range = np.full(len(trace.ranges), NO_ROW, dtype=np.int64)
    keys = _keys_of_calls(trace.ranges) if trace.meta.compiled else {}
    if not keys:
        return [], of_kernel
    codes: dict[str, list[CompiledCode]] = {}
    for code in trace.meta.compiled:
        for key in code.keys:
            codes.setdefault(key, []).append(code)
    known: dict[_Launches, int] = {}
    aligned: dict[tuple[str, _Ran], np.ndarray] = {}
    for call, inside in _what_ran(trace, places, np.array(list(keys))):
        key, ran = keys[call], tuple(zip(inside["name"], inside["is_replayed"], strict=True))
        if (key, ran) not in aligned:
            found = _align(ran, codes.get(key, []), is_sure=key != NO_KEY)
            at = [known.setdefault(each, len(known)) if each else NO_ROW for each in found]
            aligned[key, ran] = np.array(at)
        is_range, row = inside["is_range"].to_numpy(), inside["row"].to_numpy()
        of_range[row[is_range]] = aligned[key, ran][is_range]
        of_kernel[row[~is_range]] = aligned[key, ran][~is_range]
    row = nearest(places.inner, places.parent, of_range != NO_ROW)
    inside = (row != NO_ROW) & (of_kernel == NO_ROW)
    of_kernel[inside] = of_range[row[inside]]
    return list(known), of_kernel


def _keys_of_calls(ranges: pd.DataFrame) -> dict[int, str]:
    """Return the key of the code that each range around a call names, by the range's row."""
    names = ranges["name"].cat
    keys = {code: found[1] for code, n in enumerate(names.categories) if (found := _CALL.match(n))}
    rows = np.flatnonzero(np.isin(names.codes.to_numpy(), list(keys)))
    return dict(zip(rows.tolist(), (keys[c] for c in names.codes.to_numpy()[rows]), strict=True))


def _what_ran(
    trace: Trace, places: Places, calls: np.ndarray
) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield for each call the operators right inside it, and the kernels launched there by none.

    The columns are `name`, `is_replayed` by a CUDA graph, `is_range` (else a kernel) and `row`, in
    the order of launching.
    """
    ranges, kernels = trace.ranges, trace.kernels
    parent, inner = places.parent, places.inner
    is_op = (ranges["kind"] == "op").to_numpy(dtype=bool)
    ops = np.flatnonzero(is_op & np.isin(parent, calls))
    bare = np.flatnonzero(np.isin(inner, calls))
    launch = np.concatenate([ops, places.launch[bare]])
    is_graph = is_graph_launch_name(ranges["name"].cat.categories)
    ran = pd.DataFrame(
        {
            "call": np.concatenate([parent[ops], inner[bare]]),
            "launched_ns": ranges["start_ns"].to_numpy()[launch],
            "is_replayed": is_graph[ranges["name"].cat.codes.to_numpy()[launch]],
            "start_ns": np.concatenate([ops * 0, kernels["start_ns"].to_numpy()[bare]]),
            "name": [*ranges["name"].take(ops), *kernels["name"].take(bare)],
            "is_range": np.arange(len(ops) + len(bare)) < len(ops),
            "row": np.concatenate([ops, bare]),
        }
    )
    for call, inside in ran.sort_values(["launched_ns", "start_ns"]).groupby("call", sort=False):
        yield int(call), inside


def _align(ran: _Ran, codes: list[CompiledCode], *, is_sure: bool) -> list[_Launches]:
    """Return the launches that each of what ran may stand for, none where that is not known.

    Of several codes, or where it is not sure that one of them was called, only those count that
    launch all this. A single one also tells by name alone, where all its launches of a name serve
    the same modules.
    """
    is_one = is_sure and len(codes) == 1
    found = [
        [code.launches[place] if place != NO_ROW else None for place in places]
        for code in codes
        if (places := _in_order(ran, code, all_show=not is_one)) is not None
    ]
    if is_one and not found:
        found = [_by_name(ran, codes[0])]
    if not found:
        return [()] * len(ran)
    return [tuple(filter(None, e)) if all(e) else () for e in zip(*found, strict=True)]


def _in_order(ran: _Ran, code: CompiledCode, *, all_show: bool) -> list[int] | None:
    """Return the place in the code of what ran; None unless it ran as the code launches it.

    Not every launch shows by its name in a trace (compiled C++ never does), and not all that ran
    is a launch of the code's.
    """
    names = [name for name, _ in ran]
    shown = [place for place, launch in enumerate(code.launches) if launch.name in names]
    launched = [code.launches[place].name for place in shown]
    must_show = [launch for launch in code.launches if not launch.name.startswith("cpp_")]
    is_whole = len(shown) == len(must_show) or not all_show
    if not shown or not code.is_in_order or not is_whole:
        return None
    if [name for name in names if name in launched] != launched:
        return None
    rest = iter(shown)
    found = [next(rest) if name in launched else NO_ROW for name in names]
    return _fill_replayed(found, ran, len(code.launches))


def _fill_replayed(found: list[int], ran: _Ran, num_launches: int) -> list[int]:
    """Name what a CUDA graph replayed between two known launches, where it is clear what it is.

    A replay does not show which operator a kernel is of. But a single launch made all that lies
    between, and several made one kernel each where there are as many, each with what finishes it.
    """
    filled = list(found)
    known = [i for i, place in enumerate(found) if place != NO_ROW]
    edges = [(-1, -1), *((i, found[i]) for i in known), (len(found), num_launches)]
    for (begin, before), (end, after) in itertools.pairwise(edges):
        between = ran[begin + 1 : end]
        if not all(is_replayed for _, is_replayed in between):
            continue
        number = np.cumsum([not _FINISHES.search(name) for name, _ in between])
        if after - before == 2:
            filled[begin + 1 : end] = [before + 1] * len(between)
        elif len(number) and number[0] == 1 and number[-1] == after - before - 1:
            filled[begin + 1 : end] = (before + number).tolist()
    return filled


def _by_name(ran: _Ran, code: CompiledCode) -> list[CompiledLaunch | None]:
    of_name: dict[str, list[CompiledLaunch]] = {}
    for launch in code.launches:
        of_name.setdefault(launch.name, []).append(launch)
    sure = {
        name: each[0]
        for name, each in of_name.items()
        if all(launch.stacks == each[0].stacks for launch in each)
    }
    return [sure.get(name) for name, _ in ran]
