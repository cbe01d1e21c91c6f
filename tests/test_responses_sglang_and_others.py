"""Result files of SGLang, inference-perf and genai-bench (tests/data/responses/README.md)."""

import json
from pathlib import Path

import pytest

from kprof.analyze.sla.times import NEVER, time_to_end, time_to_first, time_to_tokens
from kprof.collect.results import read_result
from kprof.errors import KprofError
from tests.responses import MS, verdict

DATA = Path(__file__).parent / "data" / "responses"
SGLANG, GENAI = DATA / "sglang.jsonl", DATA / "genai_bench.json"
INFERENCE_PERF = DATA / "inference_perf" / "per_request_lifecycle_metrics.json"


def edited(source, tmp_path, **changes):
    """Write a result with changes, as Python writes JSON."""
    path = tmp_path / source.name
    path.write_text(json.dumps({**json.loads(source.read_text()), **changes}) + "\n")
    return str(path)


def test_sglang_times_add_up_from_the_sending():
    run = read_result(str(SGLANG))
    assert (run.load.kind, run.load.name) == ("closed", "2 at a time")
    first = run.rows[0]
    assert (first.chunk_ns - first.sent_ns).tolist() == [50 * MS, 55 * MS, 61 * MS, 65 * MS]
    assert [row.outcome for row in run.rows] == ["answered"] * 5 + ["failed"]


def test_gaps_that_sglang_spread_over_the_tokens_of_a_chunk_end_together():
    even = read_result(str(SGLANG)).rows[1]
    assert (even.chunk_ns - even.sent_ns).tolist() == [51 * MS, 66 * MS, 66 * MS, 66 * MS]


def test_one_chunk_of_an_sglang_answer_leaves_its_end_open():
    single = read_result(str(SGLANG)).rows[2]
    assert time_to_first(single) == (52 * MS, 52 * MS)
    assert time_to_tokens(single, 4) == (52 * MS, NEVER)
    assert time_to_end(single) == (0, NEVER)


def test_sglang_requests_of_a_rate_behind_a_limit_meet_no_time(tmp_path):
    run = read_result(edited(SGLANG, tmp_path, request_rate=5.0))
    assert run.load.kind == "open"
    assert verdict("ttft_p20<=1s", run) != "MET"
    free = read_result(edited(SGLANG, tmp_path, request_rate=5.0, max_concurrency=None))
    assert free.rows[0].is_due_known


def test_an_sglang_result_without_details_says_which_option_to_use(tmp_path):
    with pytest.raises(KprofError, match="request") as error:
        read_result(edited(SGLANG, tmp_path, ttfts=None))
    assert "--output-details" in error.value.fix


def test_every_line_of_sglang_is_a_run(tmp_path):
    path = Path(edited(SGLANG, tmp_path))
    path.write_text(path.read_text() * 2)
    with pytest.raises(KprofError, match="2 loads"):
        read_result(str(path))


@pytest.mark.parametrize(
    "damage", [{"ttfts": [0.1]}, {"itls": [[-0.1], [], [], [], [], []]}, {"ttfts": [float("nan")]}]
)
def test_a_damaged_sglang_result_is_one_clear_error(tmp_path, damage):
    with pytest.raises(KprofError, match=r"sglang\.jsonl"):
        read_result(edited(SGLANG, tmp_path, **damage))


@pytest.mark.parametrize("path", [INFERENCE_PERF, INFERENCE_PERF.parent])
def test_inference_perf_is_read_from_its_folder_and_its_file(path):
    run = read_result(str(path))
    assert [row.outcome for row in run.rows] == ["answered", "answered", "failed", "answered"]
    assert run.load.kind == "unknown"


def test_times_of_inference_perf_are_those_of_its_chunks():
    first, second, *_ = read_result(str(INFERENCE_PERF)).rows
    assert (first.chunk_ns - first.sent_ns).tolist() == [50 * MS, 60 * MS, 70 * MS]
    assert time_to_end(first) == (70 * MS, 70 * MS)
    # Four tokens in two chunks: the first holds one to three of them.
    assert (second.output_tokens, time_to_tokens(second, 3)) == (4, (40 * MS, 60 * MS))


def test_an_older_inference_perf_has_its_times_in_the_info(tmp_path):
    rows = json.loads(INFERENCE_PERF.read_text())[:1]
    answer = rows[0]["info"].pop("response_metrics")
    rows[0]["info"] |= {"output_tokens": 3, "output_token_times": answer["output_token_times"]}
    path = tmp_path / INFERENCE_PERF.name
    path.write_text(json.dumps(rows))
    assert len(read_result(str(path)).rows[0].chunk_ns) == 3


def test_a_summary_of_inference_perf_says_which_option_to_use(tmp_path):
    path = tmp_path / "summary_lifecycle_metrics.json"
    path.write_text('{"load_summary": {"count": 3}, "successes": {}, "failures": {}}')
    with pytest.raises(KprofError) as error:
        read_result(str(path))
    assert "per_request" in error.value.fix


def test_genai_bench_keeps_the_first_token_and_the_end():
    run = read_result(str(GENAI))
    assert (run.load.kind, run.load.name) == ("closed", "2 at a time")
    row = run.rows[0]
    assert time_to_first(row) == pytest.approx((50 * MS, 50 * MS))
    assert time_to_end(row) == pytest.approx((500 * MS, 500 * MS))
    assert time_to_tokens(row, 8) == pytest.approx((50 * MS, 500 * MS))
    assert run.rows[5].outcome == "failed"


def test_a_unit_of_seconds_gives_the_same_times(tmp_path):
    whole = json.loads(GENAI.read_text())
    for row in whole["individual_request_metrics"]:
        for name in ("ttft", "e2e_latency"):
            row[name] = row[name] and row[name] / 1000
    path = tmp_path / "seconds.json"
    path.write_text(json.dumps({**whole, "_time_unit": "s"}))
    assert read_result(str(path)).rows[0].end_ns == read_result(str(GENAI)).rows[0].end_ns
    path.write_text(json.dumps({**whole, "_time_unit": "min"}))
    with pytest.raises(KprofError, match="s or ms"):
        read_result(str(path))


@pytest.mark.parametrize("path", [SGLANG, INFERENCE_PERF, GENAI])
def test_fields_that_nothing_is_read_of_change_nothing(path, tmp_path):
    text = path.read_text().replace("{", '{"not_known": [1, {"x": null}], ', 1)
    other = tmp_path / path.name
    if path == INFERENCE_PERF:
        text = path.read_text().replace('"labels": {}', '"labels": {"team": "x"}')
    other.write_text(text)
    times = [[row.chunk_ns.tolist() for row in read_result(str(p)).rows] for p in (path, other)]
    assert times[0] == times[1]
