"""Every section copes with every trace, and says what it knows in words and numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.capture_quality.unanswered import why_no_ceilings
from kprof.analyze.energy import measure_step_energy
from kprof.analyze.findings.one_offs import without_start_up
from kprof.analyze.passes import analyze
from kprof.analyze.roofline.utilisation import measure_known_work, measure_utilisation
from kprof.device import DERIVED, OF_ATTRIBUTES, THROTTLE_REASONS
from kprof.errors import modules_in
from kprof.findings import Diagnosis
from kprof.report.result import result_of
from kprof.report.section import Facts, Figure, Table, Text, sections_of
from kprof.report.sections import run
from kprof.trace import Gpu, Recording
from tests.quantities import quantities_in
from tests.section_traces import (
    HOST_ONLY,
    RICH,
    fact,
    section,
    tables,
    texts,
    warnings,
)
from tests.traces import ROUND_DEVICE, analyzed_trace_of, trace_of

TRACES = {
    "empty": analyzed_trace_of(),
    "one bare kernel": analyzed_trace_of({}),
    "no device known": analyzed_trace_of(
        {"flops": 5, "bytes": 5, "kind": "gemm"}, {}, device=None, gpus=()
    ),
    "kernels of no duration": analyzed_trace_of({"duration_ns": 0}, {"duration_ns": 0}),
    "host only": HOST_ONLY,
    "two ranks": analyzed_trace_of({}, {"rank": 1, "start_ns": 500}, num_ranks=2),
    "rich": RICH,
}


@pytest.mark.parametrize("module", modules_in("kprof.report.sections"), ids=lambda m: m.__name__)
def test_a_section_renders_any_trace_or_says_why_it_cannot(module):
    for name, trace in TRACES.items():
        section = module.render(trace)
        assert section.order == module.ORDER
        assert section.parts, f"an empty section says nothing: {name}"
        assert isinstance(section.parts[0], Text), f"a section begins with a sentence: {name}"
        assert section.parts[0].text.strip().endswith((".", "ns")), name
        for part in section.parts:
            check_part(part)


def check_part(part):
    if isinstance(part, Table):
        assert all(len(row) == len(part.columns) for row in part.rows)
        assert len(part.share) in (0, len(part.rows))
        assert all(isinstance(cell, str) for row in part.rows for cell in row)
        assert not any(cell in ("nan", "None", "<NA>") for row in part.rows for cell in row)
    if isinstance(part, Figure):
        json.dumps({"data": part.data, "layout": part.layout}, allow_nan=False)
        assert part.caption.endswith(".")
    if isinstance(part, Facts):
        assert all(value and explanation is not None for _, value, explanation in part.items)


def test_the_window_of_several_ranks_is_that_of_the_longest():
    trace = analyzed_trace_of(
        {"duration_ns": 100}, {"rank": 1, "start_ns": 40, "duration_ns": 300}, num_ranks=2
    )
    window, why = fact(section("Run", trace), "Window")
    assert window == "300 ns"
    assert quantities_in(why) == ["400 ns"]


GPU_OF_RANK = "GPU 0 of rank {}"
KNOWN_ORDER = [
    "Summary",
    "Run",
    "Utilisation",
    "Data quality",
    "Findings",
    "Where the time goes",
    "Roofline",
    "Top kernels",
    "Hardware counters",
    "Modules",
    "Timeline",
    "Idle time",
    "Ranks",
    "What if",
    "Power and clocks",
    "Memory",
    "Ledger",
    "Caveats",
]


def test_sections_come_in_their_order():
    titles = [section.title for section in sections_of(RICH)]
    assert [title for title in titles if title in KNOWN_ORDER] == KNOWN_ORDER


def test_a_section_has_a_place_and_a_title_of_its_own():
    modules = modules_in("kprof.report.sections")
    assert len({module.ORDER for module in modules}) == len(modules)
    assert len({module.TITLE for module in modules}) == len(modules)


def test_the_page_about_the_report_has_a_row_for_each_section_in_order():
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    table = page.split("## Sections")[1].split("## ")[0]
    modules = sorted(modules_in("kprof.report.sections"), key=lambda one: one.ORDER)
    rows = re.findall(r"^\| (\w[^|]*) \|", table, re.MULTILINE)
    assert rows[1:] == [module.TITLE for module in modules]


def test_a_host_only_trace_says_so_in_the_first_line():
    first = sections_of(HOST_ONLY)[0].parts[0]
    assert first == Text(run.HOST_ONLY, "warning")
    assert "GPU" in first.text and "host" in first.text


def test_the_headline_divides_by_the_steps():
    utilisation = section("Utilisation")
    # A step of 400 ns; 5 MFLOP at 100 TFLOP/s is 50 ns; 60 kB at 1 TB/s is 60 ns.
    assert fact(utilisation, "MFU")[0] == "≥ 12.5 %"
    assert fact(utilisation, "MBU")[0] == "≥ 15.0 %"
    assert fact(utilisation, "Roofline share")[0] == "≥ 25.0 %"
    assert fact(utilisation, "Busy")[0] == "75.0 %"


def test_without_a_known_device_the_headline_says_why_it_is_missing():
    utilisation = section("Utilisation", TRACES["no device known"])
    value, why = fact(utilisation, "Roofline share, MFU, MBU")
    assert value == "not known"
    assert why == why_no_ceilings(TRACES["no device known"]).reason
    assert "kprof run" in why


def test_an_unknown_gpu_is_named_as_the_reason():
    trace = analyzed_trace_of({}, device=None, gpus=(Gpu(0, "Strange 9000"),))
    why = fact(section("Utilisation", trace), "Roofline share, MFU, MBU")[1]
    assert "Strange 9000" in why and "kprof roofline" in why


def test_a_gpu_that_the_trace_lists_without_a_name_is_none_that_it_names():
    trace = analyzed_trace_of({}, device=None, gpus=(Gpu(0, ""),))
    unnamed = analyzed_trace_of({}, device=None, gpus=())
    assert why_no_ceilings(trace) == why_no_ceilings(unnamed)


def test_a_share_of_work_that_is_known_in_part_is_a_lower_bound():
    known = {"flops": 1_000_000, "bytes": 100, "dtype": "bf16", "limit_ns": 10, "kind": "gemm"}
    trace = analyzed_trace_of(known, {"start_ns": 100, "duration_ns": 300})
    value, basis = fact(section("Utilisation", trace), "MFU")
    assert value == "≥ 2.5 %"
    assert "25.0 %" in quantities_in(basis)


def test_a_lower_bound_that_reads_as_nothing_is_unknown_everywhere():
    tiny = {"flops": 1, "bytes": 1, "dtype": "bf16", "limit_ns": 0, "kind": "gemm"}
    trace = analyzed_trace_of(tiny, {"start_ns": 100, "duration_ns": 300}, device=ROUND_DEVICE)
    headline = measure_utilisation(trace)
    assert [one.value for one in (headline.mfu, headline.mbu, headline.roofline)] == [None] * 3
    assert fact(section("Utilisation", trace), "Roofline share, MFU, MBU")[0] == "not known"
    (check,) = [one for one in audit(trace) if one.name == "Known work"]
    assert "MFU" in check.meaning and "MBU" in check.meaning
    assert check.meaning != next(c for c in audit(RICH) if c.name == check.name).meaning


def test_known_work_is_one_number_on_every_part_of_the_page():
    """A quarter of the time has known work, half of it only a lower bound, a quarter none."""
    known = {"bytes": 100, "limit_ns": 10, "duration_ns": 100}
    bound = {**known, "work_bound": "at least", "start_ns": 100, "duration_ns": 200}
    trace = analyzed_trace_of(known, bound, {"start_ns": 300}, device=ROUND_DEVICE)
    work = measure_known_work(trace)
    assert (work.known, work.at_least, work.unknown, work.flops) == (0.25, 0.5, 0.25, 0.0)
    assert fact(section("Run", trace), "Known work")[0] == "25.0 %"
    (check,) = [one for one in audit(trace) if one.name == "Known work"]
    assert re.findall(r"[\d.]+ %", check.evidence) == ["25.0 %", "50.0 %"]
    assert "25.0 %" in measure_utilisation(trace).roofline.basis
    coverage = result_of(trace, balance(trace))["coverage"]
    assert (coverage["modelled_share"], coverage["at_least_share"]) == (0.75, 0.5)


def test_where_nothing_ran_in_the_steps_all_of_its_work_is_unknown():
    step = {"kind": "step", "name": "0", "start_ns": 0, "duration_ns": 100}
    late = {"activity": "host", "name": "aten::empty", "start_ns": 200, "bytes": 100}
    trace = analyzed_trace_of(late, ranges=[step])
    work = measure_known_work(trace)
    assert (work.known, work.at_least, work.unknown) == (0.0, 0.0, 1.0)
    (check,) = [one for one in audit(trace) if one.name == "Known work"]
    assert check.verdict == "bad"


def test_a_bound_of_next_to_nothing_is_not_told_as_none():
    known = {"bytes": 100, "limit_ns": 10, "duration_ns": 1_000_000}
    bound = {"bytes": 100, "limit_ns": 10, "work_bound": "at least", "start_ns": 1_000_000}
    trace = analyzed_trace_of(known, {**bound, "duration_ns": 100}, device=ROUND_DEVICE)
    assert 0 < measure_known_work(trace).at_least < 0.0005
    (check,) = [one for one in audit(trace) if one.name == "Known work"]
    assert re.findall(r"[\d.]+ %", check.evidence) == ["0.0 %"]


def test_one_damaged_record_is_told_in_the_singular():
    counts = {"damaged_activities": 1, "damaged_events": 2}
    (check,) = [o for o in audit(analyzed_trace_of({}, counts=counts)) if "Damaged" in o.name]
    assert re.findall(r"\d \w+", check.evidence) == ["1 activity", "2 events"]


def test_of_a_host_no_device_time_is_spoken_of_where_work_is_unknown():
    host = {"activity": "host", "device": -1}
    known = {"bytes": 100, "limit_ns": 10, "duration_ns": 100}
    rows = ({**host, **known}, {**host, "start_ns": 100, "duration_ns": 100})
    basis = measure_utilisation(analyzed_trace_of(*rows, device=ROUND_DEVICE)).mbu.basis
    assert quantities_in(basis)[-1] == "50.0 %"
    assert "device time" not in basis


def test_work_of_which_much_is_only_bounded_limits_the_data_quality():
    trace = analyzed_trace_of({"bytes": 100, "limit_ns": 10, "work_bound": "at least"})
    (check,) = [one for one in audit(trace) if one.name == "Known work"]
    assert measure_utilisation(trace).mbu.is_lower_bound
    assert check.verdict == "limited"


@pytest.mark.parametrize("name", TRACES)
def test_one_of_anything_is_said_in_the_singular(name):
    """A number of 1 before a plural, as in "1 launches"; what is named by a unit is none."""
    for each in sections_of(TRACES[name]):
        for part in each.parts:
            text = " ".join(str(one) for one in vars(part).values() if isinstance(one, str))
            if isinstance(part, Facts):
                text = " ".join(" ".join(item) for item in part.items)
            found = re.findall(r"(?<![\d.,-])1 (?!ms\b|µs\b|ns\b|is\b|has\b)[a-z-]+s\b", text)
            assert found == [], text


def test_the_lead_of_idle_time_has_the_share_of_its_table():
    """508, 1.2, 0.079 and 0.017 ms: exact shares do not add up to 100 % in tenths."""
    starts, at_ns = [], 0
    idle = []
    for row, (cause, took_ns) in enumerate(
        (("launch-bound", 508_000), ("between kernels", 1_200), ("allocator", 79), (None, 17))
    ):
        at_ns += 10
        idle.append(
            {"cause": cause, "start_ns": at_ns, "duration_ns": took_ns, "kernel_row": row + 1}
        )
        at_ns += took_ns
        starts.append(at_ns)
    kernels = [{"start_ns": start, "duration_ns": 10} for start in (0, *starts)]
    found = section("Idle time", analyzed_trace_of(*kernels, idle=idle))
    assert f"{tables(found)[0].rows[0][1]} of it" in texts(found)


def test_sums_of_device_time_say_how_much_of_it_lies_outside_of_the_steps():
    step = {"kind": "step", "name": "0", "start_ns": 500, "duration_ns": 1_000}
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": number, "start_ns": start}
        for number, start in ((1, 0), (2, 600))
    ]
    kernels = [
        {"correlation": 1, "start_ns": 20, "duration_ns": 70},
        {"correlation": 2, "start_ns": 700, "duration_ns": 100},
    ]
    (table,) = tables(section("Top kernels", analyze(trace_of(*kernels, ranges=[step, *calls]))))
    assert "70 ns outside of the steps" in table.caption
    assert "outside" not in tables(section("Top kernels"))[0].caption


def test_the_terminal_shows_the_ledgers_buckets_wherever_device_time_is_unattributed():
    for bucket, is_shown in (("unlinked", True), ("attributed", False)):
        (table,) = tables(section("Ledger", analyzed_trace_of({"bucket": bucket})))
        assert bool(table.terminal_rows) is is_shown


def test_the_time_table_adds_up_to_a_hundred_percent():
    table = tables(section("Where the time goes"))[0]
    assert [row[:3] for row in table.rows] == [
        ("copy", "25.0 %", "100 ns"),
        ("gemm", "25.0 %", "100 ns"),
        ("other", "25.0 %", "100 ns"),
        ("idle (cause unknown)", "12.5 %", "50 ns"),
        ("idle (launch-bound)", "12.5 %", "50 ns"),
        ("all", "100.0 %", "400 ns"),
    ]


def test_top_kernels_show_their_distance_to_the_roofline():
    rows = {row[0]: row[1:] for row in tables(section("Top kernels"))[0].rows}
    assert rows["gemm_kernel"] == (
        *("33.3 %", "100 ns", "50.0 %", "compute", "50 ns"),
        *("aten::mm", "gemm", "1", "bf16"),
    )
    assert rows["strange_kernel"] == (
        *("33.3 %", "100 ns", "—", "—", "—"),
        *("—", "other", "1", "—"),
    )


def test_where_the_work_is_at_least_so_much_the_share_is_at_least_and_the_saving_at_most():
    known = {"bytes": 100, "limit_ns": 10, "work_from": "bounds", "work_bound": "at least"}
    kernels = section("Top kernels", analyzed_trace_of({**known, "duration_ns": 40}))
    assert tables(kernels)[0].rows[0][3:6:2] == ("≥ 25.0 %", "≤ 30 ns")
    assert "30 ns" in quantities_in(texts(kernels))


def test_layers_of_one_kind_stand_together_before_each_by_itself():
    collapsed, detailed = tables(section("Modules"))
    assert [row[0] for row in collapsed.rows] == ["layers.*.mlp"]
    assert {row[0] for row in detailed.rows} == {"layers.0.mlp", "layers.1.mlp"}


def test_the_roofline_places_a_marker_at_intensity_and_speed():
    figure = next(part for part in section("Roofline").parts if isinstance(part, Figure))
    marker = next(data for data in figure.data if data["name"] == "compute-bound")
    assert marker["x"] == [500.0]
    assert marker["y"] == [5e13]
    ceiling = next(data for data in figure.data if data["name"] == "bf16 100 TFLOP/s")
    assert ceiling["x"][0] == 100.0


def test_the_ledger_prints_its_three_identities():
    lead, *identities = [part for part in section("Ledger").parts if isinstance(part, Text)]
    assert lead.tone == "good"
    assert [quantities_in(text.text) for text in identities] == [
        ["100 ns", "200 ns", "300 ns"],  # attributed, unattributed, sum
        ["300 ns", "0 ns", "300 ns"],  # sum, overlapped, busy
        ["300 ns", "50 ns", "350 ns"],  # busy, idle, window
    ]


def test_the_longest_gap_names_what_ended_it():
    longest = tables(section("Idle time"))[2]
    assert longest.rows == (
        ("50 ns", "launch-bound", "copy_kernel", "aten::copy_", "backward", "3", "100 ns"),
        ("50 ns", "not known", "—", "—", "—", "—", "350 ns"),
    )


def test_idle_time_says_its_cause_what_could_be_gained_and_where_to_look():
    causes, places, _ = tables(section("Idle time"))
    # A single wait in a single step may be start-up.
    assert causes.rows[0][:4] == ("launch-bound", "50.0 %", "50 ns", "—")
    assert places.rows == (("launch-bound", "aten::copy_", "layers.*.mlp", "50 ns", "1 time"),)
    lead = section("Idle time").parts[0].text
    assert quantities_in(lead) == ["100 ns", "25.0 %", "50.0 %", "50 ns"]


def test_start_up_is_one_number_in_findings_and_idle_time():
    kernels, ranges, idle = [], [], []
    for step, (late, waiting) in enumerate([(5_000, 140), *[(100, 10)] * 3]):
        begin = 10_000 * step
        ranges.append({"kind": "step", "start_ns": begin, "duration_ns": 10_000})
        kernels.append({"step": step, "start_ns": begin + 6_000, "duration_ns": 4_000})
        row = {"kernel_row": step, "start_ns": begin}
        idle.append({**row, "cause": "launch-bound", "duration_ns": late})
        idle.append({**row, "cause": "synchronization", "duration_ns": waiting})
    trace = analyzed_trace_of(*kernels, ranges=ranges, idle=idle)
    # 130 ns of the waits are too short for a line of their own.
    (listed,) = without_start_up(trace)[1]
    assert listed.time_ns == 4_900
    trace = replace(trace, diagnosis=Diagnosis(start_up=(listed,)))
    assert quantities_in(texts(section("Findings", trace)))[0] == "5.03 µs"
    assert quantities_in(section("Idle time", trace).parts[0].text)[-1] == "5.03 µs"
    assert "5.03 µs" in quantities_in(texts(section("Summary", trace)))


def test_idle_time_at_the_edges_of_the_steps_is_told():
    *_, edges = texts(section("Idle time")).splitlines()
    assert quantities_in(edges) == ["50 ns", "50 ns"]


def test_throttling_by_power_is_a_warning_and_energy_comes_from_the_counter():
    power = section("Power and clocks")
    assert power.parts[0].tone == "warning"
    assert THROTTLE_REASONS[4] in power.parts[0].text
    assert quantities_in(power.parts[0].text) == ["100.0 %"]
    # The counter rose by 4,000 mJ during the one step of 400 ns.
    assert fact(power, "Energy per step")[0] == "4 J"


def test_caveats_of_the_recording_and_of_the_numbers_stand_together():
    found = warnings(section("Caveats"))
    assert found[0] == RICH.meta.caveats[0].text
    assert [quantities_in(text) for text in found][1:3] == [["66.7 %"], ["33.3 %"]]
    assert tables(section("Caveats"))[0].rows[0][0] == "strange_kernel"


def test_a_kernel_that_beats_the_roofline_is_a_caveat():
    trace = analyzed_trace_of({"duration_ns": 100, "limit_ns": 106}, device=ROUND_DEVICE)
    assert ["1", "100.0 %"] in [quantities_in(text) for text in warnings(section("Caveats", trace))]


def test_the_memory_of_two_ranks_is_not_one_curve():
    sample = {"source": "profiler", "quantity": "allocated_bytes", "device": 0}
    samples = [{**sample, "rank": rank, "value": 2.0**30 * (rank + 1)} for rank in (0, 1)]
    memory = section("Memory", analyzed_trace_of({}, samples=samples, num_ranks=2))
    assert [row[:2] for row in tables(memory)[0].rows] == [
        (GPU_OF_RANK.format(0), "1 GiB"),
        (GPU_OF_RANK.format(1), "2 GiB"),
    ]
    (curve,) = (part for part in memory.parts if isinstance(part, Figure))
    assert curve.data[0]["y"] == [2.0]


def test_the_timeline_shows_the_step_of_median_duration():
    steps = [
        {"kind": "step", "name": str(number), "start_ns": start_ns, "duration_ns": duration_ns}
        for number, start_ns, duration_ns in ((0, 0, 900), (1, 1000, 500), (2, 2000, 400))
    ]
    trace = analyzed_trace_of({"start_ns": 1450, "step": 1}, {"start_ns": 2100}, ranges=steps)
    timeline = section("Timeline", trace)
    assert quantities_in(texts(timeline)) == ["1", "3", "1", "550 ns"]


def test_a_crowded_timeline_is_merged_and_says_how_much():
    rows = [{"start_ns": 200 * i} for i in range(4000)]
    figure = section("Timeline", analyzed_trace_of(*rows)).parts[1]
    assert sum(len(data["x"]) for data in figure.data) <= 3000
    assert quantities_in(figure.caption) == ["3,999", "4,000"]


def test_a_name_in_a_figure_cannot_be_markup():
    trace = analyzed_trace_of({"name": "<a href='http://x'>", "bytes": 9, "kind": "<b>"})
    written = json.dumps(
        [part.data for s in sections_of(trace) for part in s.parts if isinstance(part, Figure)]
    )
    assert "<a" not in written
    assert "<b>" not in written
    assert "&lt;a href" in written


def test_only_gpus_that_did_something_are_named():
    gpus = (Gpu(0, "Idle GPU"), Gpu(1, "Busy GPU"))
    trace = analyzed_trace_of({"device": 1}, gpus=gpus)
    assert fact(section("Run", trace), "GPU")[0] == "Busy GPU"


def slowed(unrecorded_step_ns=(200, 200), **kernel):
    recording = Recording(
        "a rule", 9, (5,), "device", recorded_step_ns=(300,), unrecorded_step_ns=unrecorded_step_ns
    )
    rows = ({"duration_ns": 50, **kernel}, {"start_ns": 150, **kernel})
    return analyzed_trace_of(*rows, recording=recording)


def test_the_headline_is_given_for_an_unrecorded_step_too_where_recording_slowed_it():
    # Busy for 150 of 250 ns: 60 % of a recorded step, 90 % of one that takes two thirds as long.
    assert fact(section("Utilisation", slowed()), "Busy")[0] == "60.0 %"
    assert quantities_in(texts(section("Utilisation", slowed())))[-1] == "90.0 %"
    assert ["50.0 %"] in [quantities_in(text) for text in warnings(section("Caveats", slowed()))]


def test_a_slowdown_that_the_spread_of_steps_hides_is_no_fact():
    trace = slowed(unrecorded_step_ns=(100, 200, 310))
    value, why = fact(section("Run", trace), "Recording overhead")
    assert value == "not known"
    assert quantities_in(why) == ["300 ns", "1", "200 ns", "3", "50.0 %", "105.0 %"]
    assert quantities_in(texts(section("Utilisation", trace)))[-1] == "60.0 %"
    assert ["50.0 %"] not in [quantities_in(text) for text in warnings(section("Caveats", trace))]


def test_in_host_mode_nothing_tells_how_much_recording_slowed_the_operators():
    trace = slowed(activity="host", device=-1)
    assert "unrecorded" not in texts(section("Utilisation", trace))


def test_in_host_mode_the_time_between_operators_is_told_once():
    rows = ({"duration_ns": 40, "kind": "gemm"}, {"start_ns": 100, "duration_ns": 20})
    trace = analyzed_trace_of(*({"activity": "host", "device": -1, **row} for row in rows))
    lead = section("Where the time goes", trace).parts[0].text
    # The largest first; the operators after it.
    assert quantities_in(lead) == ["50.0 %", "33.3 %", "16.7 %"]
    assert "GPU" not in lead


def test_in_host_mode_the_top_operators_are_named_once_and_no_device_is_spoken_of():
    table = tables(section("Top operators of the host", HOST_ONLY))[0]
    assert [column.header for column in table.columns].count("Operator") == 1
    assert "device" not in table.caption
    headers = [column.header for column in tables(section("Top kernels"))[0].columns]
    assert headers[:5] == ["Kernel", "Share", "Time", "Of roofline", "Bound"]
    assert headers[6] == "Operator"


def test_bandwidth_is_drawn_with_its_unit_and_says_what_a_bar_is():
    figure = section("Roofline", analyzed_trace_of({"bytes": 9, "limit_ns": 1})).parts[-1]
    assert figure.layout["xaxis"]["ticksuffix"] == "B/s"
    assert quantities_in(figure.caption)[:2] == ["1", "1"]


def test_the_source_of_measured_ceilings_is_said_once():
    measured = replace(ROUND_DEVICE, is_measured=True, source="measured after the run")
    said = section("Utilisation", analyzed_trace_of({}, device=measured)).parts[-1].text
    assert f"{measured.name}, {measured.source}" in said
    assert said.count("measured") == 1


@pytest.mark.parametrize("title", ["Utilisation", "Caveats"])
def test_rates_that_follow_from_the_gpus_attributes_are_none_of_a_datasheet(title):
    kernel = {"dtype": "bf16", "flops": 10**6, "bytes": 10**6, "limit_ns": 100}

    def told(source):
        trace = analyzed_trace_of(kernel, device=replace(ROUND_DEVICE, source=source))
        return str(section(title, trace))

    derived, listed = told(OF_ATTRIBUTES), told("a datasheet's revision")
    assert DERIVED in derived
    assert "datasheet" not in derived
    assert DERIVED not in listed
    assert "datasheet" in listed


def test_energy_is_unknown_where_gpus_were_sampled_that_the_run_did_not_use():
    idle = {"device": 1, "quantity": "energy_mj", "value": 1.0}
    samples = [{"quantity": "energy_mj", "value": 1.0}, idle]
    step = {"kind": "step", "name": "0", "duration_ns": 100}
    trace = analyzed_trace_of({"step": 0}, ranges=[step], samples=samples)
    value, why = fact(section("Power and clocks", trace), "Energy per step")
    assert value == "not known"
    assert why == measure_step_energy(trace).why
    assert measure_step_energy(replace(trace, samples=trace.samples[:1])).why != why


def test_launches_that_left_no_activity_are_a_caveat():
    calls = [
        {"kind": "runtime", "name": "cudaLaunchKernel", "correlation": i, "start_ns": i}
        for i in range(5)
    ]
    trace = analyzed_trace_of({"correlation": 2, "launch_row": 2}, ranges=calls)
    found = [quantities_in(text) for text in warnings(section("Caveats", trace))]
    assert ["4", "5", "2", "2"] in found


def test_the_clocks_of_several_ranks_are_told():
    trace = analyzed_trace_of({}, num_ranks=2, clocks="They agree.")
    assert fact(section("Run", trace), "Clocks") == ("2 ranks", "They agree.")


def test_the_summary_is_rendered_without_what_only_the_page_shows():
    of_page = [one.title for one in sections_of(RICH) if one.in_terminal]
    summary = sections_of(RICH, for_page=False)
    assert [one.title for one in summary if one.in_terminal] == of_page
    assert len(summary) < len(sections_of(RICH))
