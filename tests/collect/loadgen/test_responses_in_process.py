"""Generation in this process: what counts as a chunk, a token, a failure."""

import itertools
import time

import pytest

from kprof.analyze.sla.targets import read_targets
from kprof.collect import generation
from kprof.collect.generation import measure_generation
from kprof.commands.sla import judge_responses
from kprof.errors import KprofError
from tests.responses import MS, judged


class Tensor:
    """What is used of a tensor, without torch."""

    is_cuda = False

    def __init__(self, num):
        self.num = num

    def numel(self):
        return self.num


def generate(prompt):
    """Yield as many numbers as the prompt says."""
    yield from range(prompt)


def test_numbers_are_tokens_and_prompts_go_one_by_one():
    run = measure_generation(generate, [3, 5])
    assert [row.output_tokens for row in run.rows] == [3, 5]
    assert [row.tokens.tolist() for row in run.rows] == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert run.rows[1].sent_ns >= run.rows[0].end_ns
    assert run.load.kind == "closed"


def test_waiting_before_a_chunk_is_its_time():
    def slowly(prompt):
        time.sleep(0.02)
        yield 1

    (row,) = measure_generation(slowly, ["x"]).rows
    assert row.chunk_ns[0] - row.sent_ns >= 20 * MS


def test_a_list_or_a_tensor_holds_several_tokens():
    (row,) = measure_generation(lambda prompt: iter([[1, 2], Tensor(3)]), ["x"]).rows
    assert row.tokens.tolist() == [2, 5]


def test_tokens_of_text_are_unknown_unless_counted():
    (row,) = measure_generation(lambda prompt: iter(["a b", "c"]), ["x"]).rows
    assert (row.tokens, row.output_tokens) == (None, None)
    counted = measure_generation(
        lambda prompt: iter(["a b", "c"]), ["x"], count_tokens=lambda text: len(text.split())
    )
    assert counted.rows[0].tokens.tolist() == [2, 3]


def test_a_streamer_gets_the_prompt_first_and_that_is_no_output():
    def like_hugging_face(input_ids, max_new_tokens, streamer):
        streamer.put(Tensor(len(input_ids)))
        for _ in range(max_new_tokens):
            streamer.put(Tensor(1))
        streamer.end()
        return "all of it"

    prompt = {"input_ids": [1, 2, 3], "max_new_tokens": 4}
    (row,) = measure_generation(like_hugging_face, [prompt]).rows
    assert (len(row.chunk_ns), row.output_tokens) == (4, 4)


def test_prompts_are_repeated_until_enough_time_has_passed(monkeypatch):
    # The clock is looked at before each round but the first, at 0, 1, 2, ... seconds.
    clock = itertools.count(0.0)
    monkeypatch.setattr(generation.time, "perf_counter", lambda: next(clock))
    run = measure_generation(lambda prompt: iter([1]), ["a", "b"], least_s=2.5)
    assert len(run.rows) == 2 * 3


def test_an_error_of_the_device_is_a_failed_request_and_the_rest_goes_on():
    error = RuntimeError("out of memory")

    def fragile(prompt):
        yield 1
        if prompt == "long":
            raise error

    run = measure_generation(fragile, ["short", "long", "short"])
    assert [row.outcome for row in run.rows] == ["answered", "failed", "answered"]
    assert run.rows[1].error == f"RuntimeError: {error}"


def test_nothing_generated_is_a_failed_request():
    run = measure_generation(generate, [0, 2])
    assert [row.outcome for row in run.rows] == ["failed", "answered"]


def test_a_bug_in_the_function_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        measure_generation(lambda prompt: iter([1 // prompt]), [0])


def test_a_function_that_returns_all_at_once_is_refused_with_the_fix():
    with pytest.raises(KprofError, match="yields chunks"):
        measure_generation(lambda prompt: [1, 2, 3], ["x"])


def test_no_prompt_and_no_answer_are_refused():
    with pytest.raises(KprofError, match="no prompt"):
        measure_generation(generate, [])
    with pytest.raises(KprofError, match="2 prompts"):
        measure_generation(generate, [0, 0])


def test_warming_up_is_not_measured():
    calls = []

    def counting(prompt):
        calls.append(prompt)
        yield 1

    assert len(measure_generation(counting, ["a", "b"], num_warm_up=1).rows) == 2
    assert calls == ["a", "a", "b"]


def test_what_was_measured_can_be_judged():
    run = measure_generation(generate, [4] * 9)
    assert judged("ttf4_p50<=10s", run).verdict == "MET"
    assessment = judge_responses([run], read_targets(["ttf4_p50<=10s"]), None, 0).assessment
    assert assessment.exit_code == 0
    assert "closed_loop" in [doubt.id for doubt in assessment.doubts]
