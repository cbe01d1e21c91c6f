"""Reports of earlier versions of GuideLLM and AIPerf, in their form, with made-up numbers."""

import json

import pytest

from kprof.collect.load_results import read_result
from kprof.errors import KprofError
from tests.quantities import quantities_in
from tests.responses import MS

# The name of a closed load.
AT_A_TIME = "{} at a time"


def write(tmp_path, benchmark):
    """Write a report of one benchmark."""
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps({"benchmarks": [{"type_": "generative_benchmark", **benchmark}]}))
    return str(path)


def test_guidellm_0_2_has_flat_requests(tmp_path):
    request = {
        "type_": "generative_text_response",
        "prompt_tokens": 8,
        "output_tokens": 4,
        "start_time": 1000.0,
        "end_time": 1000.060,
        "first_token_time": 1000.020,
        "last_token_time": 1000.050,
    }
    failed = {**request, "first_token_time": None, "last_token_time": None, "error": "refused"}
    path = write(
        tmp_path,
        {
            "args": {"strategy": {"type_": "concurrent", "streams": 4}},
            "requests": {"successful": [request], "incomplete": [request], "errored": [failed]},
        },
    )
    run = read_result(path)
    answered, cancelled, error = run.rows
    assert (answered.chunk_ns - answered.sent_ns).tolist() == pytest.approx(
        [20 * MS, 50 * MS], abs=1000
    )
    assert not answered.has_every_chunk
    assert (cancelled.outcome, error.outcome, error.error) == ("cancelled", "failed", "refused")
    assert (run.load.kind, quantities_in(run.load.name)) == ("closed", ["4"])


def test_guidellm_0_3_nests_its_timings_under_the_scheduler(tmp_path):
    timings = {
        "request_start": 1000.0,
        "first_iteration": 1000.020,
        "last_iteration": 1000.050,
        "request_end": 1000.060,
    }
    request = {
        "iterations": 4,
        "prompt_tokens": 8,
        "output_tokens": 4,
        "scheduler_info": {
            "request_timings": timings,
            "scheduler_timings": {"targeted_start": 999.99},
        },
    }
    path = write(
        tmp_path,
        {
            "scheduler": {"strategy": {"type_": "constant", "rate": 5.0}},
            "request_totals": {"total": 1},
            "requests": {"successful": [request], "incomplete": None, "errored": []},
        },
    )
    run = read_result(path)
    (row,) = run.rows
    assert (row.num_chunks, row.output_tokens) == (4, 4)
    assert row.sent_ns - row.scheduled_ns == pytest.approx(10 * MS, abs=1000)
    assert run.load.name == "5 requests/s, constant"


def test_a_request_that_was_never_sent_is_left_out_and_told(tmp_path):
    sent = {"info": {"timings": {"request_start": 1000.0, "resolve_end": 1000.5}}}
    queued = {"info": {"timings": {"targeted_start": 1001.0}}}
    path = write(tmp_path, {"requests": {"incomplete": [sent, queued]}})
    run = read_result(path)
    assert [row.outcome for row in run.rows] == ["cancelled"]
    (doubt,) = run.doubts
    assert (doubt.id, quantities_in(doubt.text)) == ("unsent_left_out", ["1"])


def test_a_request_that_failed_before_it_was_sent_is_a_failure(tmp_path):
    sent = {"info": {"timings": {"request_start": 1000.0, "resolve_end": 1000.5}}}
    refused = {"info": {"timings": {"targeted_start": 1001.0}, "error": "no route"}}
    run = read_result(write(tmp_path, {"requests": {"errored": [sent, refused]}}))
    assert [row.outcome for row in run.rows] == ["failed", "failed"]
    assert run.doubts == ()


@pytest.mark.parametrize("outcome", ["successful", "errored"])
def test_a_request_that_ended_without_any_time_is_a_damaged_report(tmp_path, outcome):
    sent = {"info": {"timings": {"request_start": 1000.0, "resolve_end": 1000.5}}}
    timeless = {"info": {"timings": {}}}
    path = write(tmp_path, {"requests": {"incomplete": [sent], outcome: [timeless]}})
    with pytest.raises(KprofError, match="has no start"):
        read_result(path)


@pytest.mark.parametrize(
    ("generator", "kind", "name"),
    [
        ({"request_rate": 10, "arrival_pattern": "poisson"}, "open", "10 requests/s, poisson"),
        ({"request_rate": 10, "request_rate_mode": "constant"}, "open", "10 requests/s, constant"),
        ({"concurrency": 8}, "closed", AT_A_TIME.format(8)),
    ],
)
def test_earlier_versions_of_aiperf_name_the_load_otherwise(tmp_path, generator, kind, name):
    record = {
        "metadata": {"request_start_ns": 10, "request_end_ns": 40, "benchmark_phase": "profiling"},
        "metrics": {
            "time_to_first_token": {"value": 2.0, "unit": "ms"},
            "request_latency": {"value": 5.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [1.0, 2.0], "unit": "ms"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
        },
        "error": None,
    }
    (tmp_path / "profile_export.jsonl").write_text(json.dumps(record) + "\n")
    summary = {"input_config": {"loadgen": generator}}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary))
    run = read_result(str(tmp_path))
    assert (run.load.kind, run.load.name) == (kind, name)
    assert run.rows[0].chunk_ns.tolist() == [2 * MS + 10, 3 * MS + 10, 5 * MS + 10]
