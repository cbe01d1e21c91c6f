"""Results of `vllm bench serve`: written out in its form, with made-up numbers."""

import json
from pathlib import Path

import pytest

from kprof.collect.results import is_result, read_result
from kprof.errors import KprofError
from tests.responses import MS, judged

SUMMARY = {
    "date": "20261120-120000",
    "backend": "openai-chat",
    "model_id": "mock",
    "num_prompts": 3,
    "request_rate": 10.0,
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 1.0,
    "completed": 2,
    "request_throughput": 2.0,
    "mean_ttft_ms": 20.0,
}
DETAILS = {
    "input_lens": [8, 9, 10],
    "output_lens": [3, 1, 0],
    "ttfts": [0.020, 0.030, 0.0],
    "itls": [[0.005, 0.006], [], []],
    "start_times": [100.0, 100.1, 100.2],
    "generated_texts": ["a b c", "a", ""],
    "errors": ["", "", "Traceback: refused"],
}


@pytest.fixture
def result(tmp_path):
    """Write a result with changes; None takes a key out."""

    def write(**changes):
        path = tmp_path / "vllm.json"
        whole = {**SUMMARY, **DETAILS, **changes}
        path.write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))
        return str(path)

    return write


def test_times_of_chunks_add_up_from_the_sending(result):
    run = read_result(result())
    first = run.rows[0]
    assert (first.chunk_ns - first.sent_ns).tolist() == [20 * MS, 25 * MS, 31 * MS]
    assert (first.output_tokens, first.input_tokens, first.outcome) == (3, 8, "answered")
    assert first.end_ns == first.chunk_ns[-1]


def test_requests_lie_as_far_apart_as_they_were_sent(result):
    rows = read_result(result()).rows
    assert rows[1].sent_ns - rows[0].sent_ns == 100 * MS


def test_an_error_is_a_failed_request(result):
    failed = read_result(result()).rows[2]
    assert (failed.outcome, failed.error, failed.output_tokens) == (
        "failed",
        "Traceback: refused",
        None,
    )


def test_a_failure_without_a_message_is_one_as_well(result):
    assert read_result(result(errors=["", "", ""])).rows[2].outcome == "failed"


def test_an_error_in_the_middle_of_an_answer_is_a_failed_request(result):
    assert read_result(result(errors=["", "reset by peer", ""])).rows[1].outcome == "failed"


def test_the_load_is_told(result):
    assert read_result(result()).load.name == "10 requests/s, Poisson"
    assert read_result(result()).load.kind == "open"
    closed = read_result(result(request_rate="inf", max_concurrency=8)).load
    assert (closed.kind, closed.name) == ("closed", "8 at a time")
    assert "burst" in read_result(result(request_rate="inf")).load.why


def test_time_in_the_clients_queue_counts(result):
    rows = read_result(result(max_concurrency=1, queue_times=[0.0, 0.5, 0.5])).rows
    assert rows[1].sent_ns - rows[1].scheduled_ns == 500 * MS


def test_a_capped_client_of_an_older_version_is_told(result):
    assert "how long others waited" in read_result(result(max_concurrency=1)).load.why


def test_in_a_closed_loop_the_queue_is_the_load_itself(result):
    path = result(request_rate="inf", max_concurrency=1, queue_times=[0.0, 0.5, 0.5])
    assert read_result(path).rows[1].scheduled_ns is None


def test_a_version_without_start_times_still_has_latencies(result):
    run = read_result(result(start_times=None))
    assert judged("ttft_p50<=100ms", run).num_samples == 3
    assert "does not record when" in run.doubts[0]


def test_a_count_that_differs_from_the_lists_is_told(result):
    assert "3 requests were completed" in read_result(result(completed=3)).doubts[0]


def test_a_result_without_details_says_which_option_to_use(result):
    path = result(**dict.fromkeys(DETAILS))
    with pytest.raises(KprofError, match="--save-detailed"):
        read_result(path)


@pytest.mark.parametrize(
    "changes",
    [{"itls": [[0.1]]}, {"errors": [""]}, {"start_times": [100.0, 100.1]}, {"input_lens": [8]}],
)
def test_lists_of_different_length_are_a_damaged_file(result, changes):
    with pytest.raises(KprofError, match="damaged"):
        read_result(result(**changes))


def test_a_file_cut_short_is_one_clear_error(result):
    path = Path(result())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(KprofError, match="damaged result of vllm bench serve"):
        read_result(str(path))


def test_appended_results_are_loads_to_choose_from(result):
    path = Path(result())
    second = json.dumps({**SUMMARY, **DETAILS, "request_rate": 20.0})
    path.write_text(path.read_text() + "\n" + second)
    with pytest.raises(KprofError, match="#2 20 requests/s"):
        read_result(str(path))
    assert read_result(f"{path}#2").load.name == "20 requests/s, Poisson"
    with pytest.raises(KprofError, match="no load #3"):
        read_result(f"{path}#3")


def test_a_file_of_something_else_is_refused_with_what_is_known(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"hello": 1}')
    assert not is_result(str(other))
    with pytest.raises(KprofError, match="AIPerf"):
        read_result(str(other))


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(KprofError, match="does not exist"):
        read_result(str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    "damage",
    [
        {"ttfts": [1e300, 0.03, 0.0]},
        {"ttfts": [0.02, 0.03, 0.0], "itls": [[-1.0], [], []]},
        {"output_lens": [10**15, 1, 0]},
        {"start_times": [1e300, 1.0, 2.0]},
    ],
)
def test_a_value_that_cannot_be_is_one_clear_error(result, damage):
    with pytest.raises(KprofError, match=r"vllm\.json"):
        read_result(result(**damage))


def test_a_client_that_was_early_was_not_late(result):
    row = read_result(result(queue_times=[-0.001, 0.0, 0.0])).rows[0]
    assert row.due_ns == row.sent_ns
