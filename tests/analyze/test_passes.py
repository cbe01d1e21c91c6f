"""What holds for every pass: its columns, the columns before it, and a second run."""

from functools import cache
from pathlib import Path

import pytest

from kprof.analyze.attribution.attribute import add_attribution, add_host_activity
from kprof.analyze.attribution.kinds import add_kind
from kprof.analyze.idle.assign import add_idle
from kprof.analyze.passes import PASSES
from kprof.analyze.roofline.bound import add_roofline
from kprof.opened import read
from kprof.trace import SCHEMA, columns_of

# Kernels, replays of a CUDA graph, steps.
RECORDED = Path(__file__).parents[1] / "data" / "h200" / "cudagraph.json.gz"
NAMES = {
    add_attribution: "attribute",
    add_kind: "classify",
    add_roofline: "roofline",
    add_idle: "idle",
}
TABLES = ("kernels", "ranges", "samples", "idle")
of_every_pass = pytest.mark.parametrize("add", PASSES, ids=lambda add: add.__name__)


@cache
def before(add):
    """Return the recorded trace after the passes that come before one."""
    trace = read([RECORDED])
    for earlier in PASSES[: PASSES.index(add)]:
        trace = earlier(trace)
    return trace


@cache
def after(add):
    return add(before(add))


def test_every_pass_but_that_of_the_host_has_columns_of_its_own():
    declared = {column.added_by for columns in SCHEMA.values() for column in columns}
    assert declared - {"reader", "condense"} == set(NAMES.values())
    assert set(PASSES) == {add_host_activity, *NAMES}


@of_every_pass
def test_a_pass_adds_exactly_the_columns_that_are_declared_for_it(add):
    for table in ("kernels", "ranges", "samples"):
        added = set(getattr(after(add), table)) - set(getattr(before(add), table))
        assert added == {column.name for column in columns_of(table, NAMES.get(add, ""))}


@of_every_pass
def test_the_columns_of_a_pass_have_their_declared_types(add):
    for table in TABLES:
        for column in columns_of(table, NAMES.get(add, "")):
            assert str(getattr(after(add), table)[column.name].dtype) == column.dtype


@of_every_pass
def test_a_pass_leaves_the_columns_before_it_as_they_were(add):
    for table in ("kernels", "ranges", "samples"):
        earlier = getattr(before(add), table)
        assert getattr(after(add), table)[list(earlier)].equals(earlier)


@of_every_pass
def test_a_pass_that_runs_twice_changes_nothing(add):
    twice = add(after(add))
    for table in TABLES:
        assert getattr(twice, table).equals(getattr(after(add), table))
