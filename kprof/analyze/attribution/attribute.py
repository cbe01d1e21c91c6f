"""The launch, operator, module, phase, step of each device activity.

A launch is found by correlation id. Its operator is the innermost one open on the calling thread,
or the recorded external id where no range is open. A backward operator reaches the module of its
forward operator through the autograd sequence number. Where no device was recorded, the self time
of host operators is the activity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kprof.analyze.attribution.call_tree import (
    NO_ROW,
    is_evaluation,
    is_node,
    look_up,
    made_by,
    nearest,
    nesting_order,
    parents,
)
from kprof.analyze.attribution.compiled_modules import Compiled, Places, find_compiled
from kprof.analyze.attribution.cuda_graphs import captured_calls, noted_names
from kprof.analyze.attribution.ledger import is_graph_launch_name
from kprof.analyze.attribution.steps import add_marks, number_in, step_rows
from kprof.trace import Trace, empty

# Ranges that PyTorch itself writes and the phase that they stand for; first match wins.
PHASE_OF_RANGE = (
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
    ("enumerate(DataPipe)#", "data"),
    ("DistributedDataParallel.forward", "forward"),
    ("FullyShardedDataParallel.forward", "forward"),
    ("torch.distributed.ddp.reducer::", "backward"),
)
PHASES = ("data", "forward", "backward", "optimizer")

# Keys are (rank, id) packed into one int64: ranks stay far below 2**20, ids below 2**43.
_RANK_SHIFT = 43


def add_attribution(trace: Trace) -> Trace:
    """Add each device activity's launch; `bucket` marks rows whose launch is unknown."""
    launch = _launch_rows(trace)
    trace = add_marks(trace, launch)
    ranges = trace.ranges
    tree = _call_tree(ranges)
    parent = tree.parent
    captured = captured_calls(trace, parent, launch)
    # A graph's nodes were made at its capture; their times come from its replay.
    maker = np.where(captured == NO_ROW, launch, captured)
    inner, by_external_id = _innermost(ranges, parent, maker)
    op = nearest(inner, parent, _has_kind(ranges, "op"))
    module = _module_rows(tree, inner)
    user_range = nearest(inner, parent, _has_kind(ranges, "range"))

    is_graph = _is_graph_launch(ranges, maker)
    is_named = (op != NO_ROW) | (module != NO_ROW) | (user_range != NO_ROW)
    around = _names(ranges, module)
    compiled = _find_compiled(trace, tree, launch, np.where(captured == NO_ROW, inner, launch))
    launched = compiled.launched.copy()
    launched[~is_graph] = None
    is_compiled = pd.notna(compiled.module) | pd.notna(launched)
    noted_range, noted_module = noted_names(trace, is_graph & pd.isna(launched))
    is_noted = pd.notna(noted_range) | pd.notna(noted_module)
    bucket = _first_that_holds(
        {
            "orphan": launch == NO_ROW,
            "graph": is_graph & pd.isna(launched) & ~is_noted,
            "attributed": is_named | is_graph,
            "unlinked": np.ones(len(launch), dtype=bool),
        }
    )
    is_attributed = np.asarray(bucket == "attributed")
    attributed_by = _first_that_holds(
        {
            "annotation": is_noted & is_attributed,
            "compiled": is_compiled & is_attributed,
            "capture": (captured != NO_ROW) & is_attributed,
            "external id": by_external_id & is_attributed,
            "nesting": is_attributed,
        }
    )
    op = np.where(is_graph, NO_ROW, op)
    # A graph may hold a whole step, and a sum all of a run: neither's place tells a phase.
    phase = _phases(ranges, tree, inner, maker)
    phase[is_graph | (not trace.has_timeline)] = None
    return trace.with_ranges(parent=_nullable(parent)).with_kernels(
        launch_row=_nullable(launch),
        op_row=_nullable(op),
        op=_or_told(_names(ranges, op), launched),
        module=_or_told(_or_told(around, compiled.module), noted_module),
        fused_modules=pd.Categorical(compiled.fused),
        phase=phase,
        step=_steps(ranges, launch),
        recomputed=_is_recomputed(ranges, tree, inner),
        range=_or_told(_names(ranges, user_range), noted_range),
        bucket=bucket,
        attributed_by=attributed_by,
    )


def _first_that_holds(told: dict[str, np.ndarray]) -> pd.Categorical:
    """Return the first of the names that is true of each row; missing where none is."""
    names = sorted(told)
    codes = np.select(list(told.values()), [names.index(name) for name in told], NO_ROW)
    column: pd.Categorical = pd.Categorical.from_codes(
        codes, categories=pd.Index(names)
    ).remove_unused_categories()
    return column


def _launch_rows(trace: Trace) -> np.ndarray:
    """Return the row of the runtime call with each activity's correlation id, or `NO_ROW`.

    A piece of an operator's self time in host mode was launched by that operator's row.
    """
    if trace.is_host_only:
        return trace.kernels["op_row"].to_numpy(dtype=np.int64, na_value=NO_ROW)
    calls = np.flatnonzero(
        _has_kind(trace.ranges, "runtime") & trace.ranges["correlation"].notna().to_numpy()
    )
    return look_up(
        _keys(trace.ranges["rank"], trace.ranges["correlation"])[calls],
        calls,
        _keys(trace.kernels["rank"], trace.kernels["correlation"]),
    )


def _find_compiled(trace: Trace, tree: _Tree, launch: np.ndarray, inner: np.ndarray) -> Compiled:
    """Find what compiled code launched, replays of CUDA graphs where they are replayed."""
    is_place = ~_has_kind(trace.ranges, "runtime") & ~_has_kind(trace.ranges, "graph")
    inner = nearest(inner, tree.parent, is_place)
    around = _names(trace.ranges, _module_rows(tree, inner))
    return find_compiled(trace, Places(tree.parent, launch, inner), around)


def _innermost(
    ranges: pd.DataFrame, parent: np.ndarray, launch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the innermost range around each launch, and whether the external id named it."""
    if not len(ranges):
        return launch, np.zeros(len(launch), dtype=bool)
    is_call = _has_kind(ranges, "runtime")
    inner = np.where(is_call[launch], parent[launch], launch)
    inner = np.where(launch == NO_ROW, NO_ROW, inner)
    lost = np.flatnonzero((inner == NO_ROW) & (launch != NO_ROW))
    if not len(lost):
        return inner, np.zeros(len(launch), dtype=bool)
    ids = _keys(ranges["rank"], ranges["external_id"])
    ops = np.flatnonzero(_has_kind(ranges, "op") & (ids != NO_ROW))
    inner[lost] = look_up(ids[ops], ops, ids[launch[lost]])
    by_external_id = np.zeros(len(launch), dtype=bool)
    by_external_id[lost] = inner[lost] != NO_ROW
    return inner, by_external_id


@dataclass(frozen=True)
class _Tree:
    """The call tree of the host's ranges; every array has an entry for each row of `ranges`."""

    parent: np.ndarray
    is_module: np.ndarray
    is_node: np.ndarray
    """Whether autograd ran it for a forward operator."""
    made_by: np.ndarray
    """For a node, the forward operator that made it."""
    is_backward: np.ndarray
    """Whether autograd's engine ran it, for any purpose."""


def _call_tree(ranges: pd.DataFrame) -> _Tree:
    node = is_node(ranges)
    return _Tree(
        parent=parents(ranges, np.flatnonzero(_has_kind(ranges, "python", invert=True))),
        is_module=_has_kind(ranges, "module"),
        is_node=node,
        made_by=made_by(ranges, node),
        is_backward=node | is_evaluation(ranges),
    )


def _module_rows(tree: _Tree, inner: np.ndarray) -> np.ndarray:
    """Return the module around each launch, for a backward launch the module of its forward.

    A module that runs inside a node (again, for a checkpoint) comes before that of the node.
    """
    knows = tree.is_module | (tree.is_node & (tree.made_by != NO_ROW))
    row = nearest(inner, tree.parent, knows)
    # A launch without a row picks the entry appended at the end: nothing to climb to.
    is_module = np.append(tree.is_module, True)
    # The forward of a gradient's gradient is itself in a node; each began before its own.
    while len(at_node := np.flatnonzero(~is_module[row])):
        row[at_node] = nearest(tree.made_by[row[at_node]], tree.parent, knows)
    around = nearest(inner, tree.parent, tree.is_module)
    return np.where(row == NO_ROW, around, row)


def _is_recomputed(ranges: pd.DataFrame, tree: _Tree, inner: np.ndarray) -> np.ndarray:
    """Tell which launches were made again inside the backward pass, for a checkpoint.

    A module's are. So are those of a function: of operators that autograd records anew, which have
    a number, inside a node where a module ran again. A backward operator has none.
    """
    modules = np.flatnonzero(tree.is_module)
    reruns = np.zeros(len(ranges) + 1, dtype=bool)
    reruns[nearest(modules, tree.parent, tree.is_backward)] = True
    reruns[NO_ROW] = False
    is_op = _has_kind(ranges, "op") & ~tree.is_backward
    is_forward = tree.is_module | (is_op & ranges["sequence"].notna().to_numpy(bool))
    row = nearest(inner, tree.parent, is_forward | tree.is_backward)
    is_again = np.append(is_forward, False)[row]
    result = np.zeros(len(inner), dtype=bool)
    result[is_again] = reruns[nearest(row[is_again], tree.parent, tree.is_backward)]
    return result


def _phases(
    ranges: pd.DataFrame, tree: _Tree, inner: np.ndarray, launch: np.ndarray
) -> pd.Categorical:
    """Return each launch's phase, or missing.

    The nearest range that tells it: a recorded phase, one of PyTorch's own ranges, autograd's
    engine. Where none does: forward inside a module or the maker of a node; backward on another
    thread during a recorded backward pass, which may run hooks there.
    """
    told = _told_phases(ranges)
    told[tree.is_backward] = PHASES.index("backward")
    row = nearest(inner, tree.parent, told != NO_ROW)
    result = np.where(row == NO_ROW, NO_ROW, np.append(told, NO_ROW)[row])
    makes_node = np.zeros(len(ranges), dtype=bool)
    makes_node[tree.made_by[tree.made_by != NO_ROW]] = True
    unknown = np.flatnonzero(row == NO_ROW)
    in_forward = nearest(inner[unknown], tree.parent, tree.is_module | makes_node) != NO_ROW
    result[unknown[in_forward]] = PHASES.index("forward")
    unknown = unknown[~in_forward]
    is_pass = _has_kind(ranges, "phase") & (told == PHASES.index("backward"))
    running = _running(ranges, np.flatnonzero(is_pass), launch[unknown])
    result[unknown[running != NO_ROW]] = PHASES.index("backward")
    return pd.Categorical.from_codes(result, categories=pd.Index(PHASES))


def _told_phases(ranges: pd.DataFrame) -> np.ndarray:
    """Return the place in `PHASES` of the phase that each range tells by its name, or `NO_ROW`."""
    names = [str(name) for name in ranges["name"].cat.categories]
    told_by = [next((p for start, p in PHASE_OF_RANGE if n.startswith(start)), None) for n in names]
    place = {phase: place for place, phase in enumerate(PHASES)}
    of_torch = np.array([NO_ROW if p is None else place[p] for p in told_by] + [NO_ROW], np.int8)
    recorded = np.array([place.get(name, NO_ROW) for name in names] + [NO_ROW], np.int8)
    codes = ranges["name"].cat.codes.to_numpy()
    by_name = np.where(_has_kind(ranges, "phase"), recorded[codes], of_torch[codes])
    tells = _has_kind(ranges, "phase") | _has_kind(ranges, "range") | _has_kind(ranges, "op")
    return np.where(tells, by_name, NO_ROW)


def _steps(ranges: pd.DataFrame, launch: np.ndarray) -> pd.arrays.IntegerArray:
    """Return the step during which each launch was made, on any thread."""
    row = _running(ranges, step_rows(ranges), launch)
    names = ranges["name"].cat
    number = np.array([number_in(str(name)) for name in names.categories] + [NO_ROW])
    codes = np.append(names.codes.to_numpy(), -1)
    return _nullable(number[codes[row]])


def _running(ranges: pd.DataFrame, rows: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Return which of `rows`, one after another, its rank was in at each launch, or `NO_ROW`.

    Of rows that lie in one another the outermost counts.
    """
    result = np.full(len(launch), NO_ROW, dtype=np.int64)
    start, rank = ranges["start_ns"].to_numpy(), ranges["rank"].to_numpy()
    end = start + ranges["duration_ns"].to_numpy()
    for one in np.unique(rank[rows]):
        mine = rows[rank[rows] == one]
        mine = mine[np.lexsort([-end[mine], start[mine]])]
        seen_until = np.maximum.accumulate(end[mine])
        mine = mine[np.append(True, end[mine][1:] > seen_until[:-1])]
        asked = np.flatnonzero((launch != NO_ROW) & (rank[launch] == one))
        moment = start[launch[asked]]
        at = np.searchsorted(start[mine], moment, side="right") - 1
        inside = (at >= 0) & (moment < end[mine[at]])
        result[asked[inside]] = mine[at[inside]]
    return result


def _is_graph_launch(ranges: pd.DataFrame, launch: np.ndarray) -> np.ndarray:
    if not len(ranges):
        return np.zeros(len(launch), dtype=bool)
    named = is_graph_launch_name(ranges["name"].cat.categories)
    return np.asarray(named[ranges["name"].cat.codes.to_numpy()[launch]] & (launch != NO_ROW))


def _has_kind(ranges: pd.DataFrame, kind: str, *, invert: bool = False) -> np.ndarray:
    found = (ranges["kind"] == kind).to_numpy(dtype=bool)
    return ~found if invert else found


def _keys(rank: pd.Series[int], ids: pd.Series[int]) -> np.ndarray:
    """Pack (rank, id) into one integer; a missing id is `NO_ROW`."""
    packed = (rank.to_numpy(dtype=np.int64) << _RANK_SHIFT) + ids.fillna(0).to_numpy(dtype=np.int64)
    return np.where(ids.notna().to_numpy(dtype=bool), packed, NO_ROW)


def _names(ranges: pd.DataFrame, rows: np.ndarray) -> pd.Categorical:
    """Return the names of rows of `ranges`, missing where there is no row."""
    if not len(ranges):
        return pd.Categorical([None] * len(rows))
    names = ranges["name"].cat
    codes = np.append(names.codes.to_numpy(), NO_ROW)[rows]
    is_used = np.bincount(codes + 1, minlength=len(names.categories) + 1)[1:] > 0
    compact = np.append(np.cumsum(is_used) - 1, NO_ROW)[codes]
    return pd.Categorical.from_codes(compact, categories=names.categories[is_used])


def _or_told(names: pd.Categorical, told: np.ndarray) -> pd.Categorical:
    """Return the names, and where the compiler or torch told another, that one."""
    if pd.isna(told).all():
        return names
    return pd.Categorical(np.where(pd.notna(told), told, names))


def _nullable(rows: np.ndarray) -> pd.arrays.IntegerArray:
    return pd.arrays.IntegerArray(rows.astype(np.int64), rows == NO_ROW)


def add_host_activity(trace: Trace) -> Trace:
    """Fill `kernels` from the operators' self time if the trace has no device rows.

    A row is one uninterrupted piece of an operator's own time, so the pieces of a thread never
    overlap and add up to the time in which any operator ran there. Traces with device rows
    come back as they are.
    """
    if len(trace.kernels):
        return trace
    ranges = trace.ranges
    ops = np.flatnonzero((ranges["kind"] == "op").to_numpy())
    row, start_ns, end_ns = _self_time(ranges, nesting_order(ranges, ops))
    table = empty("kernels").reindex(range(len(row)))
    table["name"] = ranges["name"].take(row).reset_index(drop=True)
    table["activity"] = pd.Categorical(["host"]).repeat(len(row))
    table["rank"] = ranges["rank"].to_numpy()[row]
    table["device"] = np.full(len(row), -1, dtype=np.int32)
    table["stream"] = ranges["thread"].to_numpy()[row]
    table["start_ns"] = start_ns
    table["duration_ns"] = end_ns - start_ns
    table["op_row"] = row
    return replace(trace, kernels=table, ranges=ranges)


def _self_time(
    ranges: pd.DataFrame, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, start and end of every piece of self time, walking each thread once."""
    start = ranges["start_ns"].to_numpy()[order]
    end = start + ranges["duration_ns"].to_numpy()[order]
    thread = ranges["thread"].to_numpy()[order]
    rank = ranges["rank"].to_numpy()[order]
    pieces: list[tuple[int, int, int]] = []
    open_ops: list[tuple[int, int]] = []
    clock = 0

    def run_until(moment: int | None) -> None:
        """Close what ends by `moment` and give the time up to it to the innermost open one."""
        nonlocal clock
        while open_ops and (moment is None or open_ops[-1][1] <= moment):
            op, op_end = open_ops.pop()
            if op_end > clock:
                pieces.append((op, clock, op_end))
                clock = op_end
        if open_ops and moment is not None and moment > clock:
            pieces.append((open_ops[-1][0], clock, moment))

    last: tuple[int, int] | None = None
    for op, begin, finish, on in zip(
        order.tolist(),
        start.tolist(),
        end.tolist(),
        zip(rank.tolist(), thread.tolist(), strict=True),
        strict=True,
    ):
        if on != last:
            run_until(None)
            last, clock = on, begin
        run_until(begin)
        clock = max(clock, begin)
        open_ops.append((op, finish))
    run_until(None)
    if not pieces:
        nothing = np.array([], dtype=np.int64)
        return nothing, nothing, nothing
    table = np.array(pieces, dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2]
