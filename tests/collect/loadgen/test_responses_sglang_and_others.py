"""Result files of SGLang, inference-perf and genai-bench (tests/data/responses/README.md)."""

import json
from pathlib import Path

import pytest

from kprof.analyze.sla.samples import NEVER, time_to_end, time_to_first, time_to_tokens
from kprof.collect.load_results import read_result
from kprof.errors import KprofError
from tests.quantities import quantities_in
from tests.responses import MS, service, verdict

DATA = Path(__file__).parents[2] / "data" / "responses"
SGLANG, OPENAI = DATA / "sglang.jsonl", DATA / "sglang_openai.jsonl"
LENGTHS = [0, 2, 5, 7, 8, 12, 13, 15, 1, 2]
GENAI, GENAI_RUN = DATA / "genai_bench.json", DATA / "genai_bench_run.json"
INFERENCE_PERF = DATA / "inference_perf" / "per_request_lifecycle_metrics.json"


def edited(source, tmp_path, **changes):
    """Write a result with changes, as Python writes JSON."""
    path = tmp_path / source.name
    path.write_text(json.dumps({**json.loads(source.read_text()), **changes}) + "\n")
    return str(path)


def test_sglang_tells_how_many_tokens_came_with_each_chunk():
    run = read_result(str(SGLANG))
    assert (run.load.kind, run.load.name) == ("open", "20 requests/s, Poisson")
    assert [row.outcome for row in run.rows] == ["failed"] + ["answered"] * 9
    # One token after 27.833 ms, one 19.999 ms later and three after three times 8.0155 ms.
    third = run.rows[2]
    assert third.tokens.tolist() == [1, 2, 5]
    assert (third.chunk_ns - third.sent_ns).tolist() == [27_833_233, 47_831_831, 71_878_346]
    assert time_to_tokens(third, 3) == (71_878_346, 71_878_346)
    assert verdict("gap_p50<=15ms", service(*[third] * 20)) == "MISSED"


def test_a_first_chunk_of_several_sglang_tokens_is_counted(tmp_path):
    row = read_result(edited(SGLANG, tmp_path, output_lens=[0, 9, *LENGTHS[2:]])).rows[1]
    assert row.tokens.tolist() == [8, 9]


def test_equal_gaps_in_several_sglang_requests_are_no_chunks(tmp_path):
    itls = [[], [0.01], [0.01] * 4, *json.loads(SGLANG.read_text())["itls"][3:]]
    row = read_result(edited(SGLANG, tmp_path, itls=itls)).rows[2]
    assert time_to_tokens(row, 3) == (27_833_233, 67_833_233)


def test_an_sglang_answer_of_an_openai_backend_keeps_a_gap_a_chunk(tmp_path):
    even = [[], [0.01], [0.01] * 4, *json.loads(SGLANG.read_text())["itls"][3:]]
    path = edited(SGLANG, tmp_path, itls=even, backend="sglang-oai")
    assert len(read_result(path).rows[2].chunk_ns) == 5


def test_lengths_that_sglang_asked_for_are_no_lengths_of_answers():
    run = read_result(str(OPENAI))
    assert run.doubts[1].id == "no_usage"
    assert [row.outcome for row in run.rows].count("failed") == 1
    # Five chunks of an answer of eight tokens, of which SGLang records twenty.
    assert (len(run.rows[0].chunk_ns), run.rows[0].output_tokens) == (5, None)
    answered = [row for row in run.rows if row.outcome == "answered"]
    assert verdict("tpot_p20<=1s", service(*answered * 9)) == "NOT MEASURED"
    assert verdict("ttft_p20<=1s", service(*answered * 9)) == "MET"


def test_an_empty_sglang_answer_is_a_failure(tmp_path):
    empty = {"ttfts": [0.0] * 10, "itls": [[]] * 10, "generated_texts": [""] * 10}
    run = read_result(edited(SGLANG, tmp_path, **empty, errors=[""] * 10))
    assert {row.outcome for row in run.rows} == {"failed"}


def test_one_chunk_of_an_sglang_answer_leaves_its_end_open(tmp_path):
    row = read_result(edited(SGLANG, tmp_path, itls=[[]] * 10)).rows[2]
    assert time_to_first(row) == (27_833_233, 27_833_233)
    assert time_to_tokens(row, 4) == (27_833_233, NEVER)
    assert time_to_end(row) == (0, NEVER)


def test_sglang_requests_of_a_rate_behind_a_limit_meet_no_time(tmp_path):
    run = read_result(edited(SGLANG, tmp_path, max_concurrency=2))
    assert run.load.kind == "open"
    assert verdict("ttft_p20<=1s", service(*run.rows[1:] * 9)) == "NOT MEASURED"
    assert verdict("ttft_p20<=1s", service(*read_result(str(SGLANG)).rows[1:] * 9)) == "MET"


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
    "damage", [{"ttfts": [0.1]}, {"itls": [[-0.1], *[[]] * 9]}, {"ttfts": [float("nan")] * 10}]
)
def test_a_damaged_sglang_result_is_one_clear_error(tmp_path, damage):
    with pytest.raises(KprofError, match=r"sglang\.jsonl"):
        read_result(edited(SGLANG, tmp_path, **damage))


@pytest.mark.parametrize("path", [INFERENCE_PERF, INFERENCE_PERF.parent])
def test_inference_perf_is_read_from_its_folder_and_its_file_a_stage_a_load(path):
    first, second = (read_result(f"{path}#{place}") for place in (1, 2))
    assert [run.load.name for run in (first, second)] == ["5 requests/s", "10 requests/s"]
    outcomes = [[row.outcome for row in run.rows] for run in (first, second)]
    assert [each.count("answered") for each in outcomes] == [9, 9]
    assert [each.count("failed") for each in outcomes] == [1, 1]
    assert max(row.sent_ns for row in first.rows) < min(row.sent_ns for row in second.rows)


def test_every_request_of_inference_perf_may_be_as_late_as_the_latest_of_its_stage():
    run = read_result(f"{INFERENCE_PERF}#1")
    assert {row.sent_ns - row.due_ns for row in run.rows} == {85_566_752}
    first = run.rows[0]
    # Sent at 3048.089394935 s, the first chunk at 3048.296981768 s.
    assert time_to_first(first) == (207_586_833, 207_586_833 + 85_566_752)


def test_inference_perf_tells_how_many_tokens_came_with_each_chunk():
    first = read_result(f"{INFERENCE_PERF}#1").rows[0]
    assert first.tokens.tolist() == [1, 2, 5, 7, 8, 12]
    # The third to the fifth token came with the third chunk, at 3048.346471541 s.
    assert time_to_tokens(first, 4).low == 257_076_606
    assert time_to_end(first).low == 393_403_747


def alone(tmp_path, rows):
    """Write requests of inference-perf without the reports of their stages."""
    path = tmp_path / INFERENCE_PERF.name
    path.write_text(json.dumps(rows))
    return str(path)


def test_without_its_stages_the_load_of_inference_perf_is_not_known(tmp_path):
    run = read_result(alone(tmp_path, json.loads(INFERENCE_PERF.read_text())))
    assert (run.load.kind, len(run.rows)) == ("unknown", 20)
    assert run.doubts[0].id == "no_stages"


def test_stages_of_other_requests_do_not_split_those_of_inference_perf(tmp_path):
    path = alone(tmp_path, json.loads(INFERENCE_PERF.read_text())[:7])
    for stage in INFERENCE_PERF.parent.glob("stage_*"):
        (tmp_path / stage.name).write_bytes(stage.read_bytes())
    assert read_result(path).load.kind == "unknown"


def test_tokens_without_times_lie_between_the_chunks_of_inference_perf(tmp_path):
    answer = {"output_tokens": 4, "chunk_times": [100.04, 100.06], "output_token_times": [100.04]}
    row = {"start_time": 100.0, "end_time": 100.07, "info": {"response_metrics": answer}}
    first = read_result(alone(tmp_path, [row])).rows[0]
    # Four tokens in two chunks: the first holds one to three of them.
    assert time_to_tokens(first, 3) == (40 * MS, 60 * MS)


def test_the_tokens_of_inference_perf_are_those_of_the_server_in_either_spelling(tmp_path):
    answer = {"output_tokens": 4, "server_usage": {"output_tokens": 6}, "chunk_times": [100.04]}
    row = {"start_time": 100.0, "end_time": 100.07, "info": {"response_metrics": answer}}
    assert read_result(alone(tmp_path, [row])).rows[0].output_tokens == 6


def test_an_older_inference_perf_has_its_times_in_the_info(tmp_path):
    info = {"output_tokens": 3, "output_token_times": [100.05, 100.06, 100.07]}
    row = {"start_time": 100.0, "end_time": 100.08, "info": info}
    assert len(read_result(alone(tmp_path, [row])).rows[0].chunk_ns) == 3


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (None, "failed"),
        ({"output_tokens": 0, "chunk_times": [], "output_token_times": []}, "failed"),
        ({"output_tokens": 0, "server_usage": {"completion_tokens": 7}}, "answered"),
        ({"output_tokens": 7}, "answered"),
    ],
)
def test_an_empty_answer_of_inference_perf_is_a_failure(tmp_path, answer, outcome):
    info = {"input_tokens": 10, "response_metrics": answer}
    row = {"start_time": 100.0, "end_time": 100.07, "info": info, "error": None}
    assert read_result(alone(tmp_path, [row])).rows[0].outcome == outcome


def test_a_summary_of_inference_perf_says_which_option_to_use(tmp_path):
    path = tmp_path / "summary_lifecycle_metrics.json"
    path.write_text('{"load_summary": {"count": 3}, "successes": {}, "failures": {}}')
    with pytest.raises(KprofError) as error:
        read_result(str(path))
    assert "per_request" in error.value.fix


def test_genai_bench_keeps_the_first_token_and_the_end():
    run = read_result(str(GENAI))
    assert (run.load.kind, quantities_in(run.load.name)) == ("closed", ["2"])
    row = run.rows[0]
    assert time_to_first(row) == pytest.approx((50 * MS, 50 * MS))
    assert time_to_end(row) == pytest.approx((500 * MS, 500 * MS))
    assert time_to_tokens(row, 8) == pytest.approx((50 * MS, 500 * MS))
    assert run.rows[5].outcome == "failed"


def test_an_experiment_of_genai_bench_keeps_every_request():
    run = read_result(str(GENAI_RUN))
    assert (len(run.rows), quantities_in(run.load.name)) == (21, ["2"])
    assert [row.outcome for row in run.rows].count("failed") == 2
    first = run.rows[0]
    assert (time_to_first(first).low, time_to_end(first).low) == (179_087_798, 323_137_366)


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


@pytest.mark.parametrize("path", [SGLANG, INFERENCE_PERF, GENAI, GENAI_RUN])
def test_fields_that_nothing_is_read_of_change_nothing(path, tmp_path):
    text = path.read_text().replace("{", '{"not_known": [1, {"x": null}], ', 1)
    other = tmp_path / path.name
    if path == INFERENCE_PERF:
        text = path.read_text().replace('"labels": {}', '"labels": {"team": "x"}')
    other.write_text(text)
    for stage in path.parent.glob("stage_*"):
        (tmp_path / stage.name).write_bytes(stage.read_bytes())
    names = [f"{p}#1" for p in (path, other)]
    times = [[row.chunk_ns.tolist() for row in read_result(name).rows] for name in names]
    assert times[0] == times[1]
