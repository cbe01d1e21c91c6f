"""The summary fits the terminal it is printed on, and no name can steer that terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kprof.report.section import (
    Bar,
    Column,
    Facts,
    Figure,
    Section,
    Segment,
    Table,
    Text,
    sections_of,
)
from kprof.report.terminal import print_summary
from kprof.trace import Caveat
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of

LONG_NAME = "void at::native::vectorized_elementwise_kernel<4, at::native::" + "x" * 150 + "(tail)"


def printed(parts, width=80, encoding="utf-8", in_terminal=True) -> str:
    buffer = io.BytesIO()
    console = Console(file=io.TextIOWrapper(buffer, encoding=encoding), width=width)
    print_summary("tiny.json", [Section("Title", 1, parts, in_terminal)], console)
    console.file.flush()
    return buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_neighbours_in_a_bar_differ_without_colour(encoding):
    kinds = [(f"kind {number}", number > 4) for number in range(10)]
    segments = tuple(Segment(name, 0.1, "10 %", "1 s", "#777777", idle) for name, idle in kinds)
    bar, *legend = printed((Bar(segments),), 82, encoding).splitlines()[2:]
    assert [bar[2 + 8 * number] for number in range(10)] == [
        "\n".join(legend).partition(f" {name} ")[0][-1] for name, _ in kinds
    ]
    assert all(bar[1 + 8 * number] != bar[2 + 8 * number] for number in range(1, 10))


def kernel_table(number=3) -> Table:
    columns = (
        Column("Kernel", "name"),
        Column("Share", "right"),
        Column("Bound", essential=False),
        Column("Something long and optional", essential=False),
    )
    rows = tuple((LONG_NAME, "50.0 %", "memory", "y" * 30) for _ in range(number))
    return Table(columns, rows, share=(0.5,) * number)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    trace = analyzed_trace_of(
        {"name": LONG_NAME, "kind": "gemm", "phase": "forward", "module": LONG_NAME},
        caveats=(Caveat("recorder", LONG_NAME),),
    )
    buffer = io.StringIO()
    print_summary(trace.meta.source, sections_of(trace), Console(file=buffer, width=width))
    assert max(len(line) for line in buffer.getvalue().splitlines()) <= width


def test_a_narrow_terminal_drops_the_columns_that_are_not_essential():
    narrow, wide = printed((kernel_table(),), width=60), printed((kernel_table(),), width=200)
    assert "Bound" in narrow
    assert "Something long" not in narrow
    assert "Something long" in wide


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_a_kernel_could_save_stands_beside_it_at_every_width(width):
    trace = analyzed_trace_of({"name": LONG_NAME, "op": "aten::" + "y" * 40})
    (kernels,) = [one for one in sections_of(trace) if one.title == "Top kernels"]
    assert "Saving" in printed(kernels.parts, width=width)


def test_a_long_name_keeps_both_its_ends():
    line = printed((kernel_table(),)).splitlines()[3]
    assert line.strip().startswith("vectorized_")
    assert "…" in line
    assert "(tail)  50.0 %" in line


def test_names_that_leave_no_room_for_a_number_give_way_to_it():
    names = tuple(Column(header, "name") for header in ("Cause", "Where", "Module"))
    table = Table((*names, Column("Time", "right")), (("a" * 30, "b" * 30, "c" * 30, "1.06 ms"),))
    assert printed((table,)).rstrip().endswith("cccccc  1.06 ms")


def test_prose_takes_more_lines_and_is_never_cut():
    why = "no wheel of deep-gemm for this torch, and none of the 12 ms can be had without"
    columns = (Column("Provider"), Column("Time", "right"), Column("Why", "prose", essential=False))
    lines = printed((Table(columns, (("ours", "7 ms", ""), ("peer", "—", why))),), width=50)
    assert [line.rstrip() for line in lines.splitlines()[2:7]] == [
        "  Provider  Time  Why",
        "  ours      7 ms",
        "  peer         —  no wheel of deep-gemm for this",
        "                  torch, and none of the 12 ms",
        "                  can be had without",
    ]


def test_a_name_that_no_line_can_hold_breaks_after_a_dot():
    name = "torch.nn.functional.cross_entropy"
    columns = (Column("Kernel"), Column("Replaces", "prose"))
    lines = printed((Table(columns, (("a", f"{name} of logits"),)),), width=32).splitlines()
    assert [line.strip() for line in lines[3:6]] == [
        "a       torch.nn.functional.",
        "cross_entropy of",
        "logits",
    ]


def test_what_room_is_left_goes_to_the_narrowest_that_wants_more():
    names = tuple(Column(header, "name") for header in ("Where", "Module"))
    line = printed((Table(names, (("a" * 60, "b" * 60),)),)).splitlines()[3]
    assert [len(cell) for cell in line.split()] == [37, 37]


def test_rows_left_out_are_counted():
    *_, last = printed((kernel_table(15),)).rstrip().splitlines()
    assert quantities_in(last) == ["5"]


def test_a_line_does_not_break_between_a_number_and_its_unit():
    text = printed((Text("the share of it is 19.8 % now, after 7 ms"),), width=25)
    assert [line.strip() for line in text.splitlines()[2:5]] == [
        "the share of it is",
        "19.8 % now, after 7 ms",
        "",
    ]


def test_short_values_stand_below_each_other_beside_a_long_one():
    facts = Facts((("A", "9 ms", "first"), ("B", "12.5 ms", "next"), ("C", "x" * 20, "last")))
    assert [line.rstrip() for line in printed((facts,)).splitlines()[2:5]] == [
        "  A  9 ms     first",
        "  B  12.5 ms  next",
        "  C  xxxxxxxxxxxxxxxxxxxx  last",
    ]


def test_figures_asides_and_sections_for_the_page_stay_out():
    parts = (Figure([], {}, "A figure."), Text("An aside.", "muted"), Text("The point."))
    assert "A figure" not in printed(parts)
    assert "An aside" not in printed(parts)
    assert "The point." in printed(parts)
    assert "The point." not in printed(parts, in_terminal=False)


def test_escape_codes_in_a_name_do_not_reach_the_terminal():
    text = printed((Text("evil \x1b[2J\x07\u202e name [bold]kept[/bold]"),))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold]kept[/bold]" in text


def test_an_ascii_terminal_gets_ascii():
    parts = (Text("12 µs · done…"), kernel_table(), Facts((("Busy", "9 µs", "why"),)))
    text = printed(parts, width=120, encoding="ascii")
    assert "12 us - done~" in text
    assert "#" in text


def test_what_is_piped_has_no_colour(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b" not in printed((Text("A warning.", "warning"), kernel_table()))
