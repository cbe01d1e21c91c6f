"""Targets: the part of a recording that a question is about, by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from kprof.analyze.nesting import NO_ROW, nearest
from kprof.errors import KprofError
from kprof.trace import Trace

SORTS = ("kernel", "op", "module", "kind", "phase")
NUM_SUGGESTED = 3


@dataclass(frozen=True)
class Target:
    """A sort of thing, one of `SORTS`, and a name, in which `*` stands for anything."""

    sort: str
    name: str

    def __str__(self) -> str:
        return f"{self.sort}:{self.name}"


def parse_target(text: str, trace: Trace) -> Target:
    """Read `module:layers.0.attn`, `op:aten::mm`, `kernel:*gemm*`, `kind:norm`, or a name alone.

    Raises:
        KprofError: nothing in the trace has that name.
    """
    sort, _, name = text.partition(":")
    asked = [Target(sort, name)] if sort in SORTS else [Target(one, text) for one in SORTS]
    for target in asked:
        if rows_of(target, trace).any():
            return target
    known = [f"{one.sort}:{known}" for one in asked for known in names_of(one.sort, trace)]
    near = difflib.get_close_matches(str(asked[0]), known, NUM_SUGGESTED, cutoff=0.0)
    raise KprofError(
        f"nothing that ran on the device belongs to {text!r}",
        fix=f"the nearest names: {', '.join(near)}; * in a name stands for anything"
        if near
        else "nothing in this trace has a name of that sort; try kernel:NAME",
    )


def rows_of(target: Target, trace: Trace) -> np.ndarray:
    """Tell which rows of `kernels` belong to a target.

    A module or an operator has all that runs inside it.
    """
    kernels = trace.kernels
    if target.sort == "op":
        return _inside_operator(target.name, trace)
    column = kernels["name" if target.sort == "kernel" else target.sort].cat
    matches = [_matches(target, str(name)) for name in column.categories]
    return np.asarray(np.append(matches, False)[column.codes.to_numpy()], dtype=bool)


def names_of(sort: str, trace: Trace) -> list[str]:
    """Return the names of a sort that occur in a trace."""
    if sort == "op":
        is_op = (trace.ranges["kind"] == "op").to_numpy(bool)
        return sorted(set(trace.ranges["name"][is_op].dropna().astype(str)))
    return sorted(set(trace.kernels["name" if sort == "kernel" else sort].dropna().astype(str)))


def _matches(target: Target, name: str) -> bool:
    is_inside = target.sort == "module" and fnmatchcase(name, f"{_literal(target.name)}.*")
    return is_inside or name == target.name or fnmatchcase(name, _literal(target.name))


def _literal(name: str) -> str:
    """Leave only the stars of a pattern their meaning: names of kernels hold brackets."""
    return name.replace("[", "[[]").replace("?", "[?]")


def _inside_operator(name: str, trace: Trace) -> np.ndarray:
    ranges = trace.ranges
    if not len(ranges):
        return np.zeros(len(trace.kernels), dtype=bool)
    names = ranges["name"].cat
    matches = [fnmatchcase(str(one), _literal(name)) for one in names.categories]
    is_op = (ranges["kind"] == "op").to_numpy(bool)
    is_named = np.append(matches, False)[names.codes.to_numpy()].astype(bool) & is_op
    op = trace.kernels["op_row"].to_numpy(np.int64, na_value=NO_ROW)
    parent = ranges["parent"].to_numpy(np.int64, na_value=NO_ROW)
    return np.asarray(nearest(op, parent, is_named) != NO_ROW)


def largest_names(sort: str, saved_ns: np.ndarray, trace: Trace, number: int) -> list[str]:
    """Return the names of a sort with most of `saved_ns`, one value for each row of `kernels`."""
    column = trace.kernels["name" if sort == "kernel" else sort].cat
    codes = column.codes.to_numpy()
    known = codes >= 0
    sums = np.bincount(codes[known], saved_ns[known], len(column.categories))
    largest = np.argsort(-sums, kind="stable")[:number]
    return [str(column.categories[at]) for at in largest if sums[at] > 0]
