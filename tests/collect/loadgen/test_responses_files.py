"""Genuine result files of AIPerf and GuideLLM (tests/data/responses/README.md)."""

import json
import math
import shutil
from pathlib import Path

import pytest

from kprof.analyze.sla.samples import time_to_first, time_to_tokens
from kprof.collect.load_results import is_result, read_result
from kprof.errors import KprofError
from tests.quantities import quantities_in
from tests.responses import MS, judged, service

# The name of a closed load.
AT_A_TIME = "{} at a time"

DATA = Path(__file__).parents[2] / "data" / "responses"
AIPERF = DATA / "aiperf"
GUIDELLM = DATA / "guidellm.json"


def outcomes(run):
    """Return how every request ended, sorted."""
    return sorted(row.outcome for row in run.rows)


def records():
    """Return AIPerf's records as plain data."""
    lines = (AIPERF / "profile_export.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def edited(tmp_path):
    """Write AIPerf's records after an edit of each, without the summary."""

    def write(edit):
        rows = records()
        for row in rows:
            edit(row)
        path = tmp_path / "profile_export.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize("name", ["", "profile_export.jsonl", "profile_export_aiperf.json"])
def test_aiperf_is_read_from_its_folder_and_from_either_file(name):
    run = read_result(str(AIPERF / name))
    assert outcomes(run) == ["answered"] * 8 + ["cancelled"] * 2 + ["failed"] * 2
    assert (run.load.kind, run.load.name) == ("open", "20 requests/s, poisson")


def test_aiperfs_own_times_come_out_again():
    for record, row in zip(records(), read_result(str(AIPERF)).rows, strict=True):
        if row.outcome == "answered":
            metrics = record["metrics"]
            first, end = row.chunk_ns[0] - row.sent_ns, row.end_ns - row.sent_ns
            assert first / MS == pytest.approx(metrics["time_to_first_token"]["value"], abs=1e-6)
            assert end / MS == pytest.approx(metrics["request_latency"]["value"], abs=1e-6)
            assert abs(row.chunk_ns[-1] - row.end_ns) <= 1
            assert row.output_tokens == metrics["output_sequence_length"]["value"]


def test_aiperf_without_lists_of_chunks_leaves_the_times_of_tokens_open(edited):
    run = read_result(edited(lambda row: row["metrics"].pop("inter_chunk_latency", None)))
    row = next(row for row in run.rows if (row.output_tokens or 0) > 4)
    first, end = row.chunk_ns - row.sent_ns
    assert (row.has_every_chunk, row.num_chunks) == (False, None)
    assert time_to_first(row).low == first
    assert time_to_tokens(row, row.output_tokens) == (first, end)
    for target in ("ttf2_p50<=24ms", "gap_p50<=1ms", "stall_p50<=1ms"):
        assert judged(target, service(*[row] * 90)).verdict == "NOT MEASURED"
    assert judged("tpot_p50<=1s", service(*[row] * 90)).verdict == "MET"


@pytest.mark.parametrize("gaps", [[], [1.0, 1.0, 1.0]])
def test_a_list_of_aiperf_that_ends_before_the_answer_leaves_the_times_of_tokens_open(edited, gaps):
    def edit(row):
        if row["metrics"]:
            row["metrics"] = {
                "time_to_first_token": {"value": 50.0, "unit": "ms"},
                "request_latency": {"value": 5000.0, "unit": "ms"},
                "output_sequence_length": {"value": 64, "unit": "tokens"},
                "inter_chunk_latency": {"value": gaps, "unit": "ms"},
            }

    rows = [row for row in read_result(edited(edit)).rows if row.outcome == "answered"]
    assert time_to_tokens(rows[0], 8) == (50 * MS, 5000 * MS)
    for target in ("ttf8_p50<=100ms", "stall_p50<=5ms", "gap_p50<=5ms"):
        assert judged(target, service(*rows * 9)).verdict == "NOT MEASURED"


def test_aiperf_tells_when_a_request_was_released():
    first, row = records()[0]["metadata"], read_result(str(AIPERF)).rows[0]
    assert row.scheduled_ns == first["credit_issued_ns"]


def test_requests_of_aiperfs_warm_up_are_left_out_and_counted(edited):
    def warm_up(row):
        if row["metadata"]["session_num"] < 3:
            row["metadata"]["benchmark_phase"] = "warmup"

    run = read_result(edited(warm_up))
    assert len(run.rows) == 9
    (doubt,) = run.doubts
    assert (doubt.id, quantities_in(doubt.text)) == ("warm_up_left_out", ["3"])


def test_a_file_that_holds_its_requests_twice_is_refused(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    path.write_text((AIPERF / "profile_export.jsonl").read_text() * 2)
    with pytest.raises(KprofError, match=rf"{path.name}.*twice"):
        read_result(str(path))


def test_a_request_that_happens_to_repeat_another_is_no_reason_to_refuse(tmp_path):
    text = (AIPERF / "profile_export.jsonl").read_text()
    path = tmp_path / "profile_export.jsonl"
    path.write_text(text + text.splitlines()[0] + "\n")
    assert len(read_result(str(path)).rows) == 13


def test_without_its_summary_aiperfs_load_is_unknown(edited):
    assert read_result(edited(lambda row: None)).load.kind == "unknown"


def test_a_summary_without_records_says_what_to_name(tmp_path):
    shutil.copy(AIPERF / "profile_export_aiperf.json", tmp_path)
    with pytest.raises(KprofError, match=r"profile_export\.jsonl"):
        read_result(str(tmp_path / "profile_export_aiperf.json"))


def test_a_damaged_line_is_named(edited):
    path = Path(edited(lambda row: None))
    path.write_text(path.read_text()[:-30])
    with pytest.raises(KprofError, match="line 12"):
        read_result(str(path))


def test_guidellms_loads_are_chosen_by_number():
    with pytest.raises(KprofError, match="#2 40 requests/s, poisson"):
        read_result(str(GUIDELLM))
    run = read_result(f"{GUIDELLM}#2")
    assert outcomes(run) == ["answered"] * 6 + ["failed"] * 2


def test_guidellms_own_times_come_out_again():
    report = json.loads(GUIDELLM.read_text())["benchmarks"][0]["requests"]["successful"]
    for request, row in zip(report, read_result(f"{GUIDELLM}#1").rows, strict=True):
        first = (row.chunk_ns[0] - row.sent_ns) / MS
        assert first == pytest.approx(request["time_to_first_token_ms"], abs=1e-3)
        assert row.output_tokens == request["output_tokens"]
        timings = request["info"]["timings"]
        late = timings["request_start"] - timings["targeted_start"]
        assert (row.sent_ns - row.scheduled_ns) / 1e9 == pytest.approx(late, abs=1e-6)


def test_guidellm_lists_the_first_and_the_last_chunk_so_gaps_are_not_known():
    run = read_result(f"{GUIDELLM}#1")
    assert judged("gap_p50<=1s", run).verdict == "NOT MEASURED"
    assert judged("stall_p50<=1s", run).num_samples


def test_a_sample_of_guidellms_requests_is_refused(tmp_path):
    report = json.loads(GUIDELLM.read_text())
    report["benchmarks"][0]["requests"]["successful"].pop()
    path = tmp_path / "guidellm.json"
    path.write_text(json.dumps(report))
    with pytest.raises(KprofError, match="sample_requests"):
        read_result(f"{path}#1")


def test_what_another_tool_wrote_is_no_result(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    assert not is_result(str(path))
    assert is_result(f"{GUIDELLM}#2")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("metadata", "request_start_ns"), 10**25),
        (("metadata", "request_start_ns"), "soon"),
        (("metrics", "time_to_first_token"), {"value": 1e300, "unit": "ms"}),
        (("metrics", "time_to_first_token"), {"value": -5, "unit": "ms"}),
        (("metrics", "time_to_first_token"), {"value": "fast", "unit": "ms"}),
        (("metrics", "time_to_first_token"), {"value": 5, "unit": "fortnights"}),
        (("metrics", "inter_chunk_latency"), {"value": 5.0, "unit": "ms"}),
        (("metrics", "inter_chunk_latency"), {"value": [-5.0], "unit": "ms"}),
        (("metrics", "output_sequence_length"), {"value": [], "unit": "tokens"}),
        (("metrics", "output_sequence_length"), {"value": -1, "unit": "tokens"}),
    ],
)
def test_a_value_that_cannot_be_is_one_clear_error(edited, place, value):
    def damage(row):
        if row.get("error") is None:
            row[place[0]][place[1]] = value

    with pytest.raises(KprofError, match=r"profile_export\.jsonl"):
        read_result(edited(damage))


@pytest.fixture
def with_phases(edited, tmp_path):
    """Write AIPerf's records beside a summary with these phases, after an edit of each record."""

    def write(*phases, edit=lambda row: None):
        path = edited(edit)
        summary = {"aiperf_version": "0.13.0", "input_config": {"phases": list(phases)}}
        (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary))
        return path

    return write


def test_each_phase_that_aiperf_measured_is_a_load(with_phases):
    def edit(row):
        row["metadata"]["phase_index"] = 1 + row["metadata"]["session_num"] // 6

    path = with_phases(
        {"kind": "warmup", "type": "concurrency", "concurrency": 1},
        {"kind": "profiling", "type": "concurrency", "concurrency": 4},
        {"kind": "profiling", "type": "poisson", "rate": 20.0},
        edit=edit,
    )
    with pytest.raises(KprofError, match="2 loads"):
        read_result(path)
    first, second = (read_result(f"{path}#{place}") for place in (1, 2))
    assert (first.load.kind, quantities_in(first.load.name)) == ("closed", ["4"])
    assert len(first.rows) == 6
    assert (second.load.kind, second.load.name) == ("open", "20 requests/s, poisson")


@pytest.mark.parametrize(("limit", "is_known"), [(1, False), (50, True)])
def test_a_limit_of_aiperf_that_was_reached_hides_how_long_requests_waited(
    with_phases, limit, is_known
):
    phase = {"kind": "profiling", "type": "poisson", "rate": 20.0, "concurrency": limit}
    run = read_result(with_phases(phase))
    assert (run.load.kind, run.load.name.split(",")[0]) == ("open", "20 requests/s")
    assert quantities_in(run.load.name) == ["20", str(limit)]
    assert {row.is_due_known for row in run.rows} == {is_known}


@pytest.mark.parametrize(
    ("phase", "load"),
    [
        ({"type": "fixed_schedule"}, ("open", "fixed_schedule")),
        ({"type": "constant", "rate": 5.0}, ("open", "5 requests/s, constant")),
        ({"type": "user_centric", "rate": 5.0}, ("closed", "5 requests/s, user_centric")),
        ({"type": "concurrency", "concurrency": 8}, ("closed", AT_A_TIME.format(8))),
    ],
)
def test_the_kind_of_an_aiperf_phase_is_the_load(with_phases, phase, load):
    run = read_result(with_phases({"kind": "profiling", **phase}))
    assert (run.load.kind, run.load.name) == load


@pytest.mark.parametrize(
    "growth",
    [
        {"type": "poisson", "rate": 9.0, "rate_ramp": {"duration": 30}},
        {"type": "poisson", "rate_series": [[0, 1], [60, 20]]},
        {"type": "concurrency", "concurrency": 8, "concurrency_ramp": {"duration": 30}},
    ],
)
def test_a_load_of_aiperf_that_grows_says_so(with_phases, growth):
    assert "mixture" in read_result(with_phases({"kind": "profiling", **growth})).load.why


def without(tree, name):
    """Return plain data without the fields of this name."""
    if isinstance(tree, dict):
        return {key: without(each, name) for key, each in tree.items() if key != name}
    return [without(each, name) for each in tree] if isinstance(tree, list) else tree


SCHEDULED = [
    (AIPERF, "profile_export.jsonl", "credit_issued_ns", ""),
    (GUIDELLM.parent, GUIDELLM.name, "targeted_start", "#2"),
    (DATA / "inference_perf", "stage_0_lifecycle_metrics.json", "schedule_delay", "#1"),
]


@pytest.mark.parametrize(("folder", "name", "field", "place"), SCHEDULED)
def test_a_scheduled_request_without_its_due_time_meets_no_time_from_it(
    tmp_path, folder, name, field, place
):
    copied = tmp_path / "results"
    shutil.copytree(folder, copied)
    lines = (copied / name).read_text().splitlines()
    rows = lines if name.endswith("l") else ["".join(lines)]
    (copied / name).write_text("\n".join(json.dumps(without(json.loads(r), field)) for r in rows))
    path = copied / name if folder == GUIDELLM.parent else copied
    before, after = (read_result(f"{one}{place}") for one in (_named(folder, path), path))
    assert before.load.kind == after.load.kind == "open"
    answers = [row for row in after.rows if row.outcome == "answered"]
    assert {time_to_first(row).high for row in answers} == {math.inf}
    assert min(time_to_first(row).high for row in before.rows) < math.inf


def _named(folder, path):
    return folder / path.name if path.is_file() else folder
