"""`kprof diff`: two captures side by side, on the terminal, as JSON and as a page."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.diff.comparability import find_doubts, find_obstacle
from kprof.commands.diff import diff_runs
from kprof.errors import KprofError
from kprof.report.difference import (
    ONE_CAPTURE,
    Compared,
    result_of_difference,
    sections_of_difference,
)
from kprof.report.section import Table, Text
from kprof.report.terminal import print_summary
from kprof.trace import Gpu, Recording
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of

H200 = Path(__file__).parents[1] / "data" / "h200"
EAGER, COMPILED = H200 / "llama_train.json.gz", H200 / "compiled.json.gz"
SMALL = H200 / "cudagraph.json.gz"
STEP = {"kind": "step", "name": "0"}


def run_of(*kernels, **meta):
    """Build an analyzed run of one step, whose kernels follow one another."""
    rows = [{"step": 0, "start_ns": 100 * i, **kernel} for i, kernel in enumerate(kernels)]
    ranges = meta.pop("ranges", [STEP])
    return analyzed_trace_of(*rows, ranges=ranges, **meta)


def compared(a, b):
    return Compared(a, b, find_differences(a, b), tuple(find_doubts(a, b)))


def printed(both, width):
    buffer = io.StringIO()
    print_summary("A against B", sections_of_difference(both, 8), Console(file=buffer, width=width))
    return buffer.getvalue()


def tables(both, num_rows):
    sections = sections_of_difference(both, num_rows)[1:]
    return [part for section in sections for part in section.parts if isinstance(part, Table)]


def number(text):
    return round(1000 * float(text.replace(",", "")))


def test_each_side_says_what_recording_cost_lost_and_attributed():
    steps = {"recorded_step_ns": (110,), "unrecorded_step_ns": (100, 100)}
    a = run_of({}, recording=Recording("a rule", 9, (5,), "device", **steps))
    summary = sections_of_difference(compared(a, run_of({}, counts={"dropped_records": 3})), 8)[0]
    table = [part for part in summary.parts if isinstance(part, Table)][-1]
    assert [column.header for column in table.columns[1:3]] == [
        "Recording overhead",
        "Dropped records",
    ]
    assert [row[:3] for row in table.rows] == [
        ("A", "+10.0 %", "not known"),
        ("B", "not known", "3"),
    ]


@pytest.fixture(scope="module")
def real():
    return diff_runs(EAGER, COMPILED)


@pytest.mark.parametrize("num_rows", [3, 60])
def test_every_table_of_two_real_runs_adds_up_as_it_is_shown(real, num_rows):
    for table in tables(real, num_rows):
        whole, *parts = [[number(cell) for cell in row[1:4]] for row in table.rows]
        assert [sum(column) for column in zip(*parts, strict=True)] == whole
        assert all(b - a == change for a, b, change in [whole, *parts])


def test_the_tables_of_two_real_runs_add_up_to_the_same_difference(real):
    (sums,) = {table.rows[0][1:4] for table in tables(real, 5)}
    assert number(sums[2]) == pytest.approx(real.difference.difference_ns / 1000, abs=1)


@pytest.mark.parametrize("width", [80, 200])
def test_two_real_runs_fit_the_terminal(real, width):
    text = printed(real, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert f"= {real.difference.difference_ns:+,} ns" in text.replace("\n  ", " ")


def test_the_output_says_that_one_capture_each_proves_nothing(real):
    assert Text(ONE_CAPTURE) in sections_of_difference(real)[0].parts


def test_the_result_as_json_adds_up(real):
    result = result_of_difference(real)
    sums = {sum(row["difference_ns"] for row in rows) for rows in result["layouts"].values()}
    assert sums == {result["difference_ns"]}
    assert result["a"]["step_ns"] + result["difference_ns"] == result["b"]["step_ns"]


def test_runs_that_are_alike_show_no_table():
    run = run_of({"name": "gemm"})
    assert tables(compared(run, run), 8) == []
    _, *layouts = sections_of_difference(compared(run, run), 8)
    assert [len(section.parts) for section in layouts] == [1] * 5


def test_what_replaced_a_kernel_stands_beside_it():
    place = {"op": "aten::mm", "module": "mlp"}
    both = compared(run_of({"name": "old", **place}), run_of({"name": "new", **place}))
    text = printed(both, 200)
    assert "replaced" in text
    assert "operator and module" in text


def test_two_runs_on_hosts_name_idle_time_as_their_reports_do_and_list_operators_once():
    host = {"activity": "host", "device": -1}
    # Operators after the step would be in none.
    steps = {gap: {**STEP, "duration_ns": gap + 100} for gap in (100, 350)}
    both = compared(
        *(
            run_of(host, {**host, "start_ns": gap}, gpus=(), ranges=[step])
            for gap, step in steps.items()
        )
    )
    titles = [section.title for section in sections_of_difference(both, 8)]
    assert titles[-1] == "By operator"
    told = printed(both, 100)
    assert "between operators" in told
    assert "cause unknown" not in told


def test_a_gpu_and_a_host_are_not_compared():
    host = run_of({"activity": "host", "device": -1}, gpus=())
    problem, fix = find_obstacle(run_of({}), host)
    assert 0 < problem.index("A ") + 1 < problem.index("GPU") < problem.index("B ")
    assert fix


def test_steps_are_not_compared_with_a_window_without_any():
    assert find_obstacle(run_of({}), run_of({})) is None
    _, fix = find_obstacle(run_of({}), run_of({}, ranges=[]))
    assert "kprof.range" in fix


def test_two_windows_without_steps_are_compared_as_they_are():
    both = compared(run_of({}, ranges=[]), run_of({}, {}, ranges=[]))
    assert both.difference.difference_ns == 100
    assert both.unit == "window"
    stepped = compared(run_of({}), run_of({}, {})).doubts
    assert len([doubt for doubt in both.doubts if doubt not in stepped]) == 1


CLOCKED = [{"quantity": "sm_clock_mhz", "value": 1980.0}]


def doubts(a, b):
    """Return the doubts about two runs that there would not be about the first one twice."""
    alone = find_doubts(a, a)
    return [doubt.text for doubt in find_doubts(a, b) if doubt not in alone]


def test_runs_under_the_same_conditions_leave_no_doubt():
    rows = {"bucket": "attributed", "bytes": 5, "flops": 100, "op": "aten::mm"}
    samples = [
        {"quantity": quantity, "value": value, "time_ns": time_ns}
        for time_ns in (0, 90)
        for quantity, value in (("sm_clock_mhz", 1980.0), ("throttle_reasons", 0.0))
    ]
    a = run_of(rows, samples=samples)
    assert find_doubts(a, a) == []


@pytest.mark.parametrize(
    ("changes", "of_a", "of_b"),
    [
        ({"gpus": (Gpu(0, "Square GPU"),)}, "Round GPU", "Square GPU"),
        ({"num_ranks": 4}, "A has 1", "B 4"),
        ({"tool": "nsys"}, "kineto", "nsys"),
        ({"samples": [{**CLOCKED[0], "value": 1500.0}]}, "1,980 MHz", "1,500 MHz"),
        ({"samples": []}, "clock", "of B"),
        ({"recording": Recording("One call.", 1, (0,))}, "A:", "B: One call"),
    ],
)
def test_other_conditions_are_named(changes, of_a, of_b):
    a = run_of({}, samples=CLOCKED)
    (doubt, *_) = doubts(a, run_of({}, **{"samples": CLOCKED, **changes}))
    assert 0 < doubt.index(of_a) + 1 < doubt.index(of_b)


def test_a_clock_that_is_almost_the_same_is_not_named():
    a, b = (run_of({}, samples=[{**CLOCKED[0], "value": mhz}]) for mhz in (1980.0, 1960.0))
    assert doubts(a, b) == []


def test_products_in_another_type_are_named():
    a, b = (run_of({"kind": "gemm", "dtype": dtype}) for dtype in ("bf16", "fp8"))
    (doubt,) = doubts(a, b)
    assert re.findall(r"100 % (\w+)", doubt) == ["bf16", "fp8"]


def test_a_step_that_does_other_work_is_named():
    a, b = (run_of({"flops": flops, "bytes": 1}) for flops in (100, 150))
    (doubt,) = doubts(a, b)
    assert quantities_in(doubt) == ["1.50"]


def products(**ns_of_type):
    """Return a run of matrix multiplications, of each type for so long."""
    return run_of(
        *({"kind": "gemm", "dtype": name, "duration_ns": ns} for name, ns in ns_of_type.items())
    )


def test_the_type_that_differs_most_tells_that_products_differ():
    (doubt,) = doubts(products(bf16=60, fp32=30), products(fp8=60, fp32=30))
    assert re.findall(r"(\d+) % (\w+)", doubt) == [
        *(("67", "bf16"), ("33", "fp32")),
        *(("67", "fp8"), ("33", "fp32")),
    ]
    assert doubts(products(bf16=60, fp32=40), products(bf16=62, fp32=38)) == []


def test_products_of_one_run_alone_are_no_other_types():
    assert doubts(products(bf16=60), run_of({"duration_ns": 60})) == []


def test_as_much_work_in_each_of_more_steps_is_the_same_work():
    kernels = [{"flops": 100, "bytes": 1, "step": step} for step in (0, 1)]
    ranges = [{**STEP, "name": name, "start_ns": 100 * int(name)} for name in "01"]
    one, two = run_of(kernels[0]), run_of(*kernels, ranges=ranges)
    assert "work_differs" not in {told.id for told in find_doubts(one, two)}


def test_the_work_of_runs_is_not_compared_where_most_of_it_is_unknown():
    unknown = {"flops": None, "bytes": None, "duration_ns": 90}
    a, b = (
        run_of({"flops": flops, "bytes": 1, "duration_ns": 10}, unknown) for flops in (100, 150)
    )
    assert doubts(a, b) == []


def test_what_the_audit_finds_of_either_run_is_named():
    b = run_of({"bucket": "orphan"})
    (doubt,) = doubts(run_of({}), b)
    (orphans,) = [check for check in audit(b) if check.name == "Orphans"]
    assert f"{orphans.name}, bad: {orphans.evidence}" in doubt
    assert "B" in doubt.partition(orphans.name)[0]


def test_steps_that_overlap_in_length_are_named():
    def run(*steps_ns):
        recording = Recording("Training.", 9, (0, 1), "device", steps_ns)
        return run_of({}, recording=recording)

    overlapping, apart = doubts(run(100, 120), run(90, 100)), doubts(run(100, 120), run(90, 99))
    assert [len([one for one in all_ if "slower" in one]) for all_ in (overlapping, apart)] == [
        1,
        0,
    ]


def test_tables_of_more_or_less_time_than_the_steps_took_are_named():
    def run(step_ns):
        recording = Recording("Training.", 9, (0,), "device", (step_ns,), ())
        return run_of({"duration_ns": 100}, recording=recording)

    found = [doubts(run(100), run(ns)) for ns in (100, 80, 125)]
    assert [[quantities_in(one) for one in told] for told in found] == [
        [],
        [["25.0 %"]],
        [["20.0 %"]],
    ]


def test_the_tables_of_several_steps_are_held_against_their_mean():
    def run(*steps_ns):
        ranges = [{**STEP, "name": name, "start_ns": 100 * int(name)} for name in "01"]
        recording = Recording("Training.", 9, (0, 1), "device", steps_ns)
        kernels = [{"step": step, "start_ns": 100 * step} for step in (0, 1)]
        return run_of(*kernels, ranges=ranges, recording=recording)

    found = find_doubts(run(100, 100), run(60, 100))
    tables = [quantities_in(one.text) for one in found if one.id == "tables_and_steps"]
    assert tables == [["25.0 %"]]
    assert "tables_and_steps" not in {one.id for one in find_doubts(run(90, 110), run(90, 110))}


def test_idle_time_at_the_edges_of_steps_is_in_the_tables_and_raises_no_doubt():
    late = run_of({"start_ns": 900}, ranges=[{**STEP, "duration_ns": 1000}])
    assert find_differences(late, late).a.step_ns == 1000
    assert doubts(run_of({}), late) == []


def test_a_difference_opens_runs_and_traces_alike(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    kprof("open", SMALL, "--out", tmp_path / "a.kprof")
    capfdbinary.readouterr()
    assert kprof("diff", tmp_path / "a.kprof", SMALL, "--json") == 0
    result = json.loads(capfdbinary.readouterr().out)
    assert result["difference_ns"] == 0
    assert {row["fate"] for rows in result["layouts"].values() for row in rows} == {"same"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.kprof"]


def test_a_page_is_written_where_it_is_asked_for_and_never_over_another(
    tmp_path, monkeypatch, capfd
):
    page = tmp_path / "difference.html"
    assert kprof("diff", SMALL, COMPILED, "--out", page) == 0
    assert "By kernel" in page.read_text()
    monkeypatch.setattr("kprof.opened.open_trace", lambda path, progress: run_of({}))
    assert kprof("diff", SMALL, COMPILED, "--out", page) == 2
    assert "pass --force" in capfd.readouterr().err
    assert kprof("diff", SMALL, COMPILED, "--out", tmp_path) == 2


def test_the_last_line_is_the_command_that_writes_the_page(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("kprof.opened.open_trace", lambda path, progress: run_of({}))
    assert kprof("diff", tmp_path / "a", tmp_path / "b c") == 0
    line = capfd.readouterr().out.splitlines()[-1]
    _, *words = shlex.split(line[line.index("kprof ") :])
    assert words == ["diff", f"{tmp_path / 'a'}", f"{tmp_path / 'b c'}", "--out", "difference.html"]


def test_what_cannot_be_compared_is_one_error_with_a_fix(tmp_path, monkeypatch, capfd):
    host = run_of({"activity": "host", "device": -1}, gpus=())
    monkeypatch.setattr(
        "kprof.opened.open_trace",
        lambda path, progress: {"a": host, "b": run_of({})}[path.name],
    )
    assert kprof("diff", tmp_path / "a", tmp_path / "b") == 2
    problem, fix = find_obstacle(host, run_of({}))
    told = " ".join(capfd.readouterr().err.split())
    assert problem in told and fix in told


def test_a_path_that_is_not_there_is_the_users_error(tmp_path):
    with pytest.raises(KprofError, match=r"gone\.kprof"):
        diff_runs(tmp_path / "gone.kprof", EAGER)


def test_two_real_captures_of_other_work_say_so(real):
    assert "work_differs" in {doubt.id for doubt in real.doubts}


def test_a_doubt_stands_in_the_summary():
    both = compared(run_of({}), run_of({}, num_ranks=2))
    texts = [p for p in sections_of_difference(both, 8)[0].parts if isinstance(p, Text)]
    assert [t.text for t in texts if t.tone == "warning"][:1] == [both.doubts[0].text]


def test_a_trace_named_twice_differs_in_nothing(real):
    again = replace(real, b=real.a, difference=find_differences(real.a, real.a))
    assert tables(again, 8) == []


def test_another_device_is_said_before_any_percentage():
    both = compared(run_of({}), run_of({}, gpus=(Gpu(0, "Square GPU"),)))
    first, lead, *_ = sections_of_difference(both, 8)[0].parts
    assert (first.tone, first.text) == ("warning", both.doubts[0].text)
    assert both.doubts[0].id == "devices_differ"
    assert lead.tone == "plain"


@pytest.mark.parametrize(
    ("b_ns", "fate", "is_unchanged"), [(10_100, "unchanged", True), (10_300, "changed", False)]
)
def test_times_within_the_tolerance_are_unchanged(b_ns, fate, is_unchanged):
    runs = [
        run_of(
            {"name": "gemm", "duration_ns": ns},
            ranges=[{**STEP, "duration_ns": ns}],
        )
        for ns in (10_000, b_ns)
    ]
    both = compared(*runs)
    assert both.difference.is_unchanged == is_unchanged
    (row,) = both.difference.layouts["kernel"]
    assert row.fate == fate
    assert bool(tables(both, 8)) != is_unchanged


def test_bars_of_a_difference_have_its_sign(real):
    for table in tables(real, 8):
        place = next(i for i, one in enumerate(table.columns) if one.header.startswith("Change"))
        of_rows = list(zip(table.rows, table.share, strict=True))[1:]
        signs = {
            (number(row[place]) > 0) - (number(row[place]) < 0) == (share > 0) - (share < 0)
            for row, share in of_rows
            if share and number(row[place])
        }
        assert signs == {True}
