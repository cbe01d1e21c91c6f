"""The light pass of the recorder: over the steps that come after its window."""

import gzip
import json

import pytest

pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import graphs, recorder
from kprof.collect.recorder.kprof_recorder.settings import Settings
from kprof.collect.recorder.kprof_recorder.step_counter import Source
from tests.recorded import MODEL, record

ADAM = Source("adam", "Adam", 100)


class Capture:
    """A capture that notes what happens to it."""

    can_be_provisional = can_be_stopped_here = can_start_here = has_cuda = True
    is_cut_short = False

    def __init__(self, name, log):
        self.name, self.log = name, log

    def prepare(self):
        self.log.append(f"{self.name} prepared")

    def start(self):
        self.log.append(f"{self.name} starts")

    def cancel(self):
        self.log.append(f"{self.name} is dropped")

    def stop(self, *, is_last=False):
        self.log.append(f"{self.name} ends" + " for good" * is_last)


@pytest.fixture
def log():
    return []


@pytest.fixture
def made(monkeypatch, log, tmp_path):
    """A recorder whose captures note what happens to them."""
    monkeypatch.setattr(recorder, "new_capture", lambda settings: Capture("early", log))
    monkeypatch.setattr(recorder, "can_start", lambda: True)
    monkeypatch.setattr("kprof.collect.recorder.kprof_recorder.capture.can_start", lambda: True)

    def make(**settings):
        one = recorder.Recorder(Settings(tmp_path, **{"skip": 1, "steps": 2, **settings}))
        one.ahead._make = lambda settings: Capture("window", log)
        one.light._make = lambda settings: Capture("light", log)
        one.on_finished = lambda recording: log.append(f"window {recording.steps}")
        one.on_light = lambda recording: log.append(f"light {recording.steps}")
        one.begin()
        return one

    return make


def train(one, log, number):
    for _ in range(number):
        one.optimizer_ends(ADAM)
        log.append("step")


def steps_after(log, event):
    """Return how many steps ended between the end of the window and an event."""
    begin = log.index("window [1, 2]")
    return log[begin : log.index(event)].count("step")


def test_the_light_pass_takes_as_many_steps_as_the_window_two_steps_later(made, log):
    one = made(light=True)
    train(one, log, 12)
    assert "light [5, 6]" in log
    assert one.light_steps == [5, 6]
    assert steps_after(log, "light prepared") == 1
    assert steps_after(log, "light starts") == 2


def test_the_profiler_leaves_the_gpu_after_the_last_pass_alone(made, log):
    train(made(light=True), log, 12)
    assert [event for event in log if event.endswith("for good")] == ["light ends for good"]


def test_without_a_light_pass_the_window_is_the_last(made, log):
    train(made(), log, 12)
    assert [event for event in log if event.endswith("for good")] == ["window ends for good"]
    assert not [event for event in log if event.startswith("light")]


def test_no_ranges_are_recorded_in_the_light_pass(made, log):
    one = made(light=True)
    while "light starts" not in log:
        train(one, log, 1)
    assert one.running.is_light
    assert not one.is_capturing


def test_a_light_pass_that_the_end_cuts_is_dropped(made, log):
    one = made(light=True)
    while "light starts" not in log:
        train(one, log, 1)
    train(one, log, 1)
    one.end_capture()
    assert one.light_steps == []
    assert one.kept.steps == [1, 2]


def test_a_window_that_was_cut_has_no_light_pass(made, log):
    one = made(light=True)
    train(one, log, 3)
    one.running.caveats.append("The recording was cut.")
    train(one, log, 9)
    assert not [event for event in log if event.startswith("light")]


def test_the_workloads_own_profiler_ends_the_light_pass(made, log):
    one = made(light=True)
    while "light starts" not in log:
        train(one, log, 1)
    one.make_way()
    assert one.running is None
    assert not one.is_broken


def test_the_workloads_own_profiler_finds_nothing_prepared(made, log):
    one = made(light=True)
    while "light prepared" not in log:
        train(one, log, 1)
    one.make_way()
    train(one, log, 9)
    assert "light is dropped" in log
    assert "light starts" not in log


def test_a_capture_of_a_graph_finds_nothing_prepared(made, log, monkeypatch):
    one = made(light=True)
    while "light prepared" not in log:
        train(one, log, 1)
    monkeypatch.setattr(graphs, "can_start", lambda: True)
    monkeypatch.setattr(graphs, "Capture", lambda settings: Capture("graph", log))
    graphs.Graphs(one).begin(Capture("captured", log))
    assert log.index("light is dropped") < log.index("graph starts")


def test_training_after_evaluation_has_a_light_pass_of_its_own(made, log):
    one = made(light=True)
    model = Source("model", "Llama", 100)
    for _ in range(9):
        one.call_begins(model, is_training=False)
        one.call_ends(model)
    assert one.light_steps
    train(one, log, 12)
    assert one.counter.leader == ADAM
    assert one.light_steps[0] > one.kept.steps[-1]


@pytest.mark.slow
def test_the_trace_of_the_light_pass_lies_beside_the_windows_and_holds_no_ranges(tmp_path):
    # Without a GPU, torch records the operators in its place.
    script = """
from kprof_recorder.capture import Capture, LightCapture
Capture.has_cuda = property(lambda self: True, lambda self, value: None)
LightCapture._activities = lambda self: [torch.profiler.ProfilerActivity.CPU]
optimizer = SGD(model.parameters(), lr=0.1)
for _ in range(15):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    run = record(tmp_path, MODEL + script, skip=2, steps=3, light=True)
    (path,) = run.result.raw.glob("rank0-pid*/light-0.json.gz")
    with gzip.open(path) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    light = [step["index"] for step in run.description["steps"] if step.get("light")]
    assert len(light) == len(run.recorded_steps()) == 3
    assert light[0] == run.recorded_steps()[-1] + 3
    assert names.count("aten::linear") == 6
    assert not [name for name in names if name.startswith("kprof.")]
    assert run.description["is_light_pass_due"] is False
    assert run.result.messages == ()
