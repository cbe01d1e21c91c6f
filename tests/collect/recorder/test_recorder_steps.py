"""What counts as a step, decided from what a workload does."""

import re
import threading

import pytest

from kprof.collect.recorder.kprof_recorder import step_counter
from kprof.collect.recorder.kprof_recorder.step_counter import REPLAY, Rule, Source, StepCounter

ADAM = Source("adam", "Adam", 100)
SMALL = Source("small", "SGD", 10)
MODEL = Source("model", "Llama", 100)
LOSS = Source("loss", "CrossEntropyLoss", 0)
REPLAYS = Source(REPLAY, REPLAY)


def call(counter, source, begin_ns, end_ns, *, is_training=False):
    counter.call_begins(source, begin_ns, is_training=is_training)
    counter.call_ends(source, end_ns)


def train(counter, optimizer, begin_ns, end_ns):
    call(counter, MODEL, begin_ns, begin_ns + 1, is_training=True)
    counter.backward()
    counter.optimizer_ends(optimizer, end_ns)


def edges(counter):
    return [(step.index, step.start_ns, step.end_ns) for step in counter.steps]


def test_a_training_step_lasts_from_one_optimizer_step_to_the_next():
    counter = StepCounter()
    train(counter, ADAM, 10, 20)
    train(counter, ADAM, 25, 40)
    assert counter.rule is Rule.OPTIMIZER
    assert edges(counter) == [(0, 10, 20), (1, 20, 40)]


def test_gradient_accumulation_is_one_step():
    counter = StepCounter()
    train(counter, ADAM, 0, 10)
    call(counter, MODEL, 11, 12, is_training=True)
    call(counter, MODEL, 13, 14, is_training=True)
    train(counter, ADAM, 15, 30)
    assert edges(counter)[1:] == [(1, 10, 30)]


def test_the_optimizer_with_most_parameters_sets_the_pace():
    counter = StepCounter()
    for start_ns in (0, 100, 200):
        train(counter, SMALL, start_ns, start_ns + 10)
        train(counter, ADAM, start_ns + 20, start_ns + 50)
    assert counter.leader == ADAM
    assert edges(counter)[-2:] == [(2, 50, 150), (3, 150, 250)]


def test_an_inference_step_is_one_outermost_call():
    counter = StepCounter()
    call(counter, MODEL, 5, 8)
    call(counter, MODEL, 20, 26)
    assert counter.rule is Rule.CALL
    assert edges(counter) == [(0, 5, 8), (1, 20, 26)]


def test_a_smaller_model_beside_the_leader_makes_no_steps():
    counter = StepCounter()
    call(counter, MODEL, 0, 1)
    call(counter, LOSS, 2, 3)
    call(counter, MODEL, 4, 5)
    assert edges(counter) == [(0, 0, 1), (1, 4, 5)]


def test_a_call_in_training_mode_waits_for_an_optimizer():
    counter = StepCounter()
    call(counter, MODEL, 0, 1, is_training=True)
    assert counter.rule is None
    assert counter.is_under_way


def test_four_calls_in_training_mode_without_a_backward_pass_are_inference():
    counter = StepCounter()
    for start_ns in (0, 10, 20, 30):
        call(counter, MODEL, start_ns, start_ns + 1, is_training=True)
    assert counter.rule is Rule.CALL
    assert edges(counter) == [(0, 0, 1), (1, 10, 11), (2, 20, 21), (3, 30, 31)]


def test_calls_of_a_smaller_model_are_no_steps_of_the_one_that_is_decided_for():
    counter = StepCounter()
    for start_ns in (0, 10, 20, 30):
        call(counter, LOSS, start_ns, start_ns + 1, is_training=True)
        call(counter, MODEL, start_ns + 2, start_ns + 3, is_training=True)
    call(counter, MODEL, 40, 41, is_training=True)
    assert counter.leader == MODEL
    assert [start for _, start, _ in edges(counter)][-2:] == [32, 40]
    assert counter.num_counted == 5


@pytest.mark.parametrize(("num_calls", "num_counted"), [(1, 1), (20, 20), (32, 32), (40, 40)])
def test_training_without_an_optimizer_counts_every_call_from_the_first(num_calls, num_counted):
    counter = StepCounter()
    for start_ns in range(num_calls):
        call(counter, MODEL, start_ns, start_ns, is_training=True)
        counter.backward()
    counter.conclude()
    assert counter.num_counted == num_counted
    assert [index for index, _, _ in edges(counter)] == list(range(num_counted))


def test_a_process_that_ends_amid_its_first_training_step_has_taken_its_calls():
    counter = StepCounter()
    call(counter, MODEL, 0, 1, is_training=True)
    counter.conclude()
    counter.conclude()
    assert (counter.rule, edges(counter)) == (Rule.CALL, [(0, 0, 1)])


def test_calls_before_the_first_optimizer_step_are_parts_of_it():
    counter = StepCounter()
    call(counter, MODEL, 0, 1, is_training=True)
    call(counter, MODEL, 2, 3, is_training=True)
    train(counter, ADAM, 4, 9)
    counter.conclude()
    assert edges(counter) == [(0, 0, 9)]


def test_the_marked_step_of_calls_that_were_undecided_is_not_one_that_was_completed():
    counter = StepCounter()
    for start_ns in (0, 10, 20):
        call(counter, MODEL, start_ns, start_ns + 1, is_training=True)
    counter.call_begins(MODEL, 30, is_training=True)
    assert (counter.last_completed, counter.index, counter.num_counted) == (None, 3, 3)


def test_a_step_that_is_kept_stays_among_the_steps_however_many_follow(monkeypatch):
    monkeypatch.setattr(step_counter, "LONGEST_LOG", 2)
    counter = StepCounter()
    for start_ns in range(9):
        call(counter, MODEL, start_ns, start_ns)
        if start_ns == 4:
            counter.keep_last()
    assert [index for index, _, _ in edges(counter)] == [0, 1, 4, 7, 8]


def test_evaluation_before_training_gives_way_to_training():
    counter = StepCounter()
    call(counter, MODEL, 0, 1)
    train(counter, ADAM, 10, 20)
    train(counter, ADAM, 21, 30)
    assert counter.rule is Rule.OPTIMIZER
    assert edges(counter)[-1][1:] == (20, 30)


def test_a_few_evaluations_between_training_steps_change_nothing():
    counter = StepCounter()
    train(counter, ADAM, 0, 10)
    for start_ns in range(20, 30):
        call(counter, MODEL, start_ns, start_ns)
    assert counter.rule is Rule.OPTIMIZER


def test_replays_of_a_graph_take_over_after_its_eager_warm_up():
    counter = StepCounter()
    train(counter, ADAM, 0, 10)
    for start_ns in (20, 30, 40, 50):
        call(counter, REPLAYS, start_ns, start_ns + 5)
    assert REPLAY in counter.describe()
    assert [step[1:] for step in edges(counter)] == [(40, 45), (50, 55)]


def test_a_range_named_step_wins_over_everything():
    counter = StepCounter()
    call(counter, MODEL, 0, 1)
    counter.range_begins(10)
    train(counter, ADAM, 11, 12)
    counter.range_ends(20)
    assert [step[1:] for step in edges(counter)] == [(10, 20)]


def test_a_step_that_waited_for_the_recorder_begins_after_it():
    counter = StepCounter()
    train(counter, ADAM, 0, 10)
    counter.rebase(15)
    train(counter, ADAM, 16, 20)
    assert edges(counter)[-1] == (1, 15, 20)


def test_without_any_step_the_rule_says_so():
    assert StepCounter().describe().startswith("No step ")


def test_an_optimizer_whose_time_is_over_makes_way_for_one_of_its_size():
    counter = StepCounter()
    train(counter, ADAM, 0, 10)
    for start_ns in range(20, 110, 10):
        train(counter, Source("next", "Adam", 100), start_ns, start_ns + 5)
    assert counter.leader.key == "next"
    assert edges(counter) == [(2, 95, 105)]


def test_the_smaller_optimizer_of_two_that_alternate_never_takes_over():
    counter = StepCounter()
    for start_ns in range(0, 1000, 100):
        train(counter, ADAM, start_ns, start_ns + 10)
        for critic_ns in range(start_ns + 20, start_ns + 70, 10):
            train(counter, SMALL, critic_ns, critic_ns + 1)
    assert counter.leader == ADAM
    assert counter.num_counted == 10


def test_once_settled_a_larger_optimizer_changes_nothing():
    counter = StepCounter()
    train(counter, SMALL, 0, 10)
    train(counter, SMALL, 11, 20)
    counter.is_settled = True
    train(counter, ADAM, 30, 40)
    assert counter.leader == SMALL
    assert edges(counter) == [(0, 0, 10), (1, 10, 20)]


def test_training_without_an_optimizer_is_counted_by_calls_and_called_training():
    counter = StepCounter()
    for start_ns in range(40):
        call(counter, MODEL, start_ns, start_ns, is_training=True)
        counter.backward()
    assert counter.num_counted == 40
    assert re.fullmatch("Training .*optimizer.* Llama.", counter.describe())


def test_the_rule_of_inference_names_the_call():
    counter = StepCounter()
    call(counter, MODEL, 0, 1)
    assert re.fullmatch("Inference: .* Llama.", counter.describe())


def test_whatever_fails_in_the_recorder_stops_the_recorder_and_not_the_workload():
    pytest.importorskip("torch")
    from kprof.collect.recorder.kprof_recorder.softly import softly

    class Recorder:
        is_broken, lock, told = False, threading.RLock(), ""

        def give_up(self, reason):
            self.is_broken, self.told = True, reason

        @softly
        def step(self):
            return {}["no such key"]

    recorder = Recorder()
    assert recorder.step() is None
    assert recorder.is_broken
    assert "KeyError" in recorder.told
