"""Results of `vllm bench serve`: written out in its form, and genuine ones of 0.33.0."""

import json
from pathlib import Path

import pytest

from kprof.analyze.sla.samples import NEVER, time_to_end, time_to_first, time_to_tokens
from kprof.collect.load_results import is_result, read_result
from kprof.errors import KprofError
from tests.quantities import quantities_in
from tests.responses import MS, judged, service, verdict

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
# One begins as soon as the one before it has ended, 31 ms and 30 ms later.
FULL = [100.0, 100.032, 100.063]
DETAILS = {
    "input_lens": [8, 9, 10],
    "output_lens": [3, 1, 0],
    "ttfts": [0.020, 0.030, 0.0],
    "itls": [[0.005, 0.006], [], []],
    "start_times": [100.0, 100.1, 100.2],
    "generated_texts": ["a b c", "a", ""],
    "errors": ["", "", "Traceback: refused"],
}


DATA = Path(__file__).parents[2] / "data" / "responses"


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


def test_a_genuine_result_behind_a_limit_counts_from_when_requests_were_due():
    run = read_result(str(DATA / "vllm.json"))
    assert (run.load.kind, run.doubts) == ("open", ())
    assert run.load.name.startswith("20 requests/s, Poisson, ")
    assert quantities_in(run.load.name) == ["20", "3"]
    assert [row.outcome for row in run.rows].count("failed") == 1
    # The seventh waited 52.542 ms for a place, and its only chunk came 25.569 ms later.
    assert time_to_first(run.rows[6]).high == pytest.approx(78_111_272, abs=2)
    # Five tokens in three chunks: the third may have come with the first of them.
    first = run.rows[0]
    assert (first.output_tokens, len(first.chunk_ns)) == (5, 3)
    assert time_to_tokens(first, 3) == pytest.approx((25_231_663, 65_972_237), abs=2)


def test_a_genuine_burst_behind_a_limit_is_a_closed_loop():
    run = read_result(str(DATA / "vllm_closed.json"))
    assert (run.load.kind, quantities_in(run.load.name)) == ("closed", ["3"])
    assert all(row.scheduled_ns is None for row in run.rows)


def test_a_time_a_tenth_of_a_nanosecond_beyond_the_limit_breaks_it(result):
    ties = [verdict("ttft_p20<=200ms", read_run(result, at)) for at in (0.2, 0.2000000001)]
    assert ties == ["MET", "MISSED"]
    # Floats of seconds: 0.1 + 0.2 is not beyond 0.3.
    assert verdict("ttft_p20<=300ms", read_run(result, 0.1 + 0.2)) == "MET"


def read_run(result, ttft):
    """Return a run whose answers all have this time to the first token, in s."""
    return service(*read_result(result(ttfts=[ttft, ttft, 0.0])).rows[:2] * 30)


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
    closed = read_result(result(request_rate="inf", max_concurrency=1, start_times=FULL)).load
    assert (closed.kind, quantities_in(closed.name)) == ("closed", ["1"])
    burst = read_result(result(request_rate="inf", start_times=[100.0, 100.001, 100.002])).load
    assert (burst.kind, "at once" in burst.name) == ("open", True)


def test_requests_of_a_rate_of_inf_that_were_due_apart_are_a_timed_trace(result):
    trace = read_result(result(request_rate="inf", queue_times=[0.0, 0.0, 0.0])).load
    assert (trace.kind, trace.name) == ("open", "a timed trace")


def test_a_timed_trace_behind_a_limit_counts_from_when_requests_were_due(result):
    waits = [5.0, 5.0, 5.0]
    run = read_result(result(request_rate="inf", max_concurrency=64, queue_times=waits))
    assert (run.load.kind, quantities_in(run.load.name)) == ("open", ["64"])
    assert "timed trace" in run.load.name
    assert time_to_first(run.rows[0]) == (5020 * MS, 5020 * MS)


@pytest.mark.parametrize("lost", ["queue_times", "start_times"])
@pytest.mark.parametrize("rate", ["inf", 10.0])
def test_a_time_is_not_met_where_the_wait_behind_a_limit_is_not_recorded(result, rate, lost):
    columns = {"queue_times": [0.0, 0.0, 0.0], "start_times": [100.0, 100.1, 100.2], lost: None}
    run = read_result(result(request_rate=rate, max_concurrency=2, **columns))
    assert not run.rows[0].is_due_known
    assert verdict("ttft_p20<=4s", service(*run.rows[:2] * 20)) == "NOT MEASURED"


def test_a_first_chunk_that_came_long_before_the_end_leaves_the_tokens_after_it_open(result):
    path = result(itls=[[], [], []], output_lens=[64, 1, 0], latencies=[5.0, 0.03, 0.0])
    first = read_result(path).rows[0]
    assert (first.has_every_chunk, first.end_ns - first.sent_ns) == (False, 5000 * MS)
    assert time_to_tokens(first, 64) == (20 * MS, 5000 * MS)
    assert time_to_first(first) == (20 * MS, 20 * MS)


def test_one_chunk_of_many_tokens_without_a_latency_has_no_known_end(result):
    first = read_result(result(itls=[[], [], []], output_lens=[64, 1, 0])).rows[0]
    assert time_to_tokens(first, 64) == (20 * MS, NEVER)
    assert time_to_end(first) == (0, NEVER)


def test_time_in_the_clients_queue_counts(result):
    rows = read_result(result(max_concurrency=1, queue_times=[0.0, 0.5, 0.5])).rows
    assert rows[1].chunk_ns[0] - rows[1].due_ns == 530 * MS


def test_in_a_closed_loop_the_queue_is_the_load_itself(result):
    path = result(request_rate="inf", max_concurrency=1, queue_times=[0.0, 0.1, 0.2])
    assert read_result(path).rows[1].scheduled_ns is None


def test_a_version_without_start_times_still_has_latencies(result):
    run = read_result(result(start_times=None))
    assert judged("ttft_p50<=100ms", run).num_samples == 3
    (doubt,) = run.doubts
    assert doubt.id == "no_sending_times"


def test_a_count_that_differs_from_the_lists_is_told(result):
    (doubt,) = read_result(result(completed=3)).doubts
    assert (doubt.id, quantities_in(doubt.text)) == ("counts_differ", ["3", "2"])


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
    with pytest.raises(KprofError, match=r"damaged .*vllm"):
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
