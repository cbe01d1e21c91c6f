"""The recorder's notes of what torch.compile traced, and what it makes of those it cannot read."""

import gzip
import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder.compiled import (  # noqa: E402
    CompilerNotes,
    Stacks,
)
from kprof.collect.recorder.kprof_recorder.named_ranges import Models  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))


def stacks_of(*modules):
    """Return stacks that know these modules, by their place as key."""
    stacks = Stacks(Models())
    for place, module in enumerate(modules):
        stacks.trace(str(place), module)
    return stacks


def graph_of(*metas):
    """Return a chain of operators with this `meta` each."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for meta in metas:
        node = graph.call_function(torch.relu, (node,))
        node.meta.update(meta)
    return torch.fx.GraphModule({}, graph)


def traced(name, *keys):
    return {"from_node": [SimpleNamespace(name=name)], "nn_module_stack": dict.fromkeys(keys)}


def test_a_stack_is_named_for_every_module_that_the_code_may_serve():
    net = Net()
    stacks = Stacks(Models())
    stacks.models.range_name_of(net)
    stack = (stacks.identify(net.layers[0]), stacks.identify(net.layers[0].fc))
    assert stacks.names_of(stack) == [["layers.0", "layers.0.fc"], ["layers.1", "layers.1.fc"]]


def test_a_model_that_only_compiled_code_calls_gets_its_names_here():
    net = Net()
    stacks = Stacks(Models())
    stack = (stacks.identify(net), stacks.identify(net.layers[1].fc))
    assert stacks.names_of(stack) == [["Net", "layers.1.fc"]]


def test_of_two_models_with_one_name_only_that_name_is_known():
    first, second = Net(), Net()
    stacks = Stacks(Models())
    for net in (first, second):
        stacks.models.range_name_of(net)
    stack = (stacks.identify(first), stacks.identify(first.layers[1]))
    assert stacks.names_of(stack) == [["Net"]]


def test_modules_that_are_gone_have_no_names():
    stacks = Stacks(Models())
    assert stacks.names_of((stacks.identify(Net()),)) is None
    assert stacks.names_of(()) == []


def test_a_second_call_of_a_module_is_the_same_modules():
    block = Block()
    notes = stacks_of(block).of_compiled(graph_of(traced("x", "0@1")), (), {})
    assert notes == {"x": (id(block),)}


def test_of_nodes_with_one_name_the_modules_around_both_are_known():
    net = Net()
    stacks = stacks_of(net, *net.layers)
    graph = graph_of(traced("x", "0", "1"), traced("x", "0", "2"))
    assert stacks.of_compiled(graph, (), {}) == {"x": (id(net),)}


def test_a_backward_node_serves_the_module_of_its_forward_and_a_sum_of_gradients_none():
    block = Block()
    backward = {"partitioner_tag": "is_backward"}
    graph = graph_of({**backward, "fwd_nn_module_stack": {"0": None}}, backward)
    notes = stacks_of(block).of_compiled(graph, (), {})
    assert notes == {"relu": (id(block),), "relu_1": None}


def test_a_node_in_the_place_of_others_serves_what_those_served():
    block = Block()
    stacks = stacks_of(block)
    before = {"x": (None, frozenset()), "mm": ((id(block),), frozenset({"x"}))}
    notes = stacks.of_compiled(graph_of({"partitioner_tag": "is_backward"}), (), before)
    assert notes == {"relu": (id(block),)}


def test_an_input_belongs_to_what_alone_uses_it():
    block, other = Block(), Block()
    stacks = stacks_of(block, other)
    graph = torch.fx.Graph()
    alone, shared = graph.placeholder("alone"), graph.placeholder("shared")
    alone.meta["example_value"] = torch.ones(2, 3)
    for key, inputs in (("0", (alone, shared)), ("1", (shared,))):
        node = graph.call_function(torch.relu, inputs)
        node.meta["nn_module_stack"] = {key: None}
    first, second = stacks.of_inputs(torch.fx.GraphModule({}, graph), ())
    assert (first.stack, first.shape) == ((id(block),), [2, 3])
    assert (second.stack, second.shape) == (None, None)


def noted(monkeypatch, folder, *, has_file=True):
    """Return notes of one compiled frame, whose code is in `folder`."""
    net = Net()
    notes = CompilerNotes(Models())
    frame = SimpleNamespace(local_scope={"self": net})
    notes.module_is_traced("1", None, None, net.layers[1])
    notes.graph_is_traced(frame, graph_of({"nn_module_stack": {"1": None}}))
    compiled = SimpleNamespace(cache_key="code", _fx_graph_cache_key="key", fx_kwargs={})
    path = folder / "code.py"
    monkeypatch.setattr("torch._inductor.codecache.get_path", lambda *name: ("", "", str(path)))
    notes.code_is_loaded(None, compiled)
    if has_file:
        path.write_text("def call(): pass")
    return net, notes


def test_notes_hold_the_code_its_keys_and_the_names_of_its_modules(monkeypatch, tmp_path):
    _net, notes = noted(monkeypatch, tmp_path)
    notes.write(tmp_path)
    with gzip.open(tmp_path / "compiled.json.gz") as file:
        (code,) = json.load(file)["codes"]
    assert code["keys"] == ["key"]
    assert code["text"] == "def call(): pass"
    assert code["stacks"][code["notes"]["relu"]] == [["Net", "layers.1"]]
    assert notes.caveats() == []


def test_code_that_is_gone_is_left_out(monkeypatch, tmp_path):
    _net, notes = noted(monkeypatch, tmp_path, has_file=False)
    notes.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_notes_that_cannot_be_written_are_said_and_leave_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError("no space left")

    _net, notes = noted(monkeypatch, tmp_path)
    monkeypatch.setattr(json, "dump", full)
    notes.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["code.py"]
    assert "no space left" in notes.caveats()[0]


def test_a_compiler_of_another_form_is_left_alone():
    notes = CompilerNotes(Models())
    notes.graph_is_traced(object(), object())
    notes.code_is_generated(object(), object())
    (caveat,) = notes.caveats()
    assert "graph_is_traced (AttributeError" in caveat
