"""Captures of CUDA graphs under the recorder; without a GPU, a stand-in is captured."""

import gzip
import json

import pytest

from kprof.collect.readers.recorded import reader as recorded
from tests.quantities import quantities_in
from tests.recorded import MODEL, record

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

# What kprof puts around the methods of torch.cuda.CUDAGraph, around those of one without a GPU.
CAPTURING = """
import kprof
graphs = sys.modules["kprof_recorder.start"].session.outcome.graphs
class Graph:
    def capture_begin(self):
        self.is_capturing = True
    def capture_end(self):
        self.is_capturing = False
    def replay(self):
        pass
torch.cuda.CUDAGraph = Graph
graphs.listen()
model(torch.ones(2, 4))  # The warm-up that every capture needs.
def captured():
    graph = Graph()
    graph.capture_begin()
    model(torch.ones(2, 4)).sum().backward()
    graph.capture_end()
    assert not graph.is_capturing
    return graph
# Steps that the user names: an optimizer would have torch import its compiler.
def train(num, graph):
    for _ in range(num):
        with kprof.range("step"): graph.replay()
"""
# The warm-up was step 0, as the call of a model, before there were steps that the user named.
RECORDED = [6, 7, 8]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    script = MODEL + CAPTURING + "first, unused = captured(), captured()\ntrain(12, first)\n"
    return record(folder, script)


def names_in(path):
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_a_capture_that_was_replayed_in_the_window_lies_beside_it(run):
    (part,) = run.result.parts
    assert [path.name for path in part.glob("graph-*")] == ["graph-0.json.gz"]
    names = names_in(part / "graph-0.json.gz")
    assert {"kprof.capture#0", "kprof.module#layers.1.attn", "aten::addmm"} <= names
    assert run.recorded_steps() == RECORDED
    assert run.count("kprof.graph#0") == 3


def test_the_reader_puts_the_capture_before_the_window_on_one_clock(run):
    ranges = recorded.read(run.result.raw).ranges
    capture = ranges[ranges["kind"] == "capture"].iloc[0]
    captured = ranges[ranges["name"] == "layers.1.attn"].iloc[0]
    first_step = ranges.loc[ranges["kind"] == "step", "start_ns"].min()
    assert capture["start_ns"] < captured["start_ns"] < capture["start_ns"] + capture["duration_ns"]
    assert 0 < first_step - capture["start_ns"] < 60 * 10**9


def test_of_thousands_of_captures_the_first_are_recorded_and_the_rest_told(tmp_path):
    many = "from kprof_recorder import graphs as module\nmodule.MOST_GRAPHS = 1\n"
    script = MODEL + CAPTURING + many + "captured(); train(12, captured())\n"
    run = record(tmp_path, script)
    (unknown,) = [text for text in run.description["caveats"] if "CUDA graphs hold" in text]
    assert quantities_in(unknown)[0] == "1"
    assert run.recorded_steps() == RECORDED


def test_a_capture_that_cannot_be_recorded_leaves_those_of_other_graphs_alone(tmp_path):
    failing = "\n".join(
        [
            "from kprof_recorder.graphs import Capture",
            "start = Capture.start",
            "def fail(capture):",
            "    Capture.start = start",
            "    raise RuntimeError('not running')",
            "first = captured()",
            "Capture.start = fail",
            "second, third = captured(), captured()",
            "second.replay()",
        ]
    )
    run = record(tmp_path, MODEL + CAPTURING + failing + "\ntrain(12, third)\n")
    assert [path.name for path in run.result.parts[0].glob("graph-*")] == ["graph-2.json.gz"]
    (unknown,) = [text for text in run.description["caveats"] if "CUDA graphs hold" in text]
    assert (quantities_in(unknown)[0], "not running" in unknown) == ("1", True)


def test_a_capture_inside_the_window_is_recorded_with_it(tmp_path):
    late = "\n".join(
        [
            "graph = None",
            "for step in range(12):",
            "    with kprof.range('step'):",
            "        graph = captured() if step == 6 else graph",
            "        graph and graph.replay()",
        ]
    )
    run = record(tmp_path, MODEL + CAPTURING + late + "\n")
    assert run.recorded_steps() == RECORDED
    assert run.count("kprof.capture#0") == 1
    assert not list(run.result.parts[0].glob("graph-*"))


@pytest.mark.slow
def test_a_capture_right_before_the_window_borrows_what_is_set_up_for_it(tmp_path):
    late = "\n".join(
        [
            "graph = None",
            "for step in range(12):",
            "    with kprof.range('step'):",
            "        graph = captured() if step == 4 else graph",
            "        graph and graph.replay()",
        ]
    )
    run = record(tmp_path, MODEL + CAPTURING + late + "\n")
    assert run.recorded_steps() == RECORDED
    assert "kprof.capture#0" in names_in(run.result.parts[0] / "graph-0.json.gz")
    assert not any("CUDA graphs hold" in text for text in run.description["caveats"])


def test_a_later_window_of_a_service_has_the_capture_as_well(tmp_path):
    graphs = pytest.importorskip("kprof.collect.recorder.kprof_recorder.graphs")
    first, later = tmp_path / "first", tmp_path / "later"
    first.mkdir()
    later.mkdir()
    (first / "graph-0.json.gz").write_text("compressed since")
    kept = graphs.Graphs(None)
    kept._written, kept._replayed = {0: first / "graph-0.json"}, {0}
    kept.write(later)
    assert (later / "graph-0.json.gz").read_text() == "compressed since"
    assert kept.has_recorded
