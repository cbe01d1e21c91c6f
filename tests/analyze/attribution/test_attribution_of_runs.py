"""Operators of real runs against the module, phase and step that their scripts put them in."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from kprof.analyze.passes import analyze
from kprof.collect.readers.recorded.reader import read
from tests.recorded import record

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

# Every product has a size of its own, so that its shape tells which line of the script ran it.
SCRIPT = """
import torch
from torch.utils.checkpoint import checkpoint

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(8, 11, bias=False)
        self.o = torch.nn.Linear(11, 8, bias=False)
    def forward(self, x):
        return self.o(self.q(x))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.shared = torch.nn.Linear(8, 8, bias=False)
        self.kept = torch.nn.Linear(8, 13, bias=False)
        self.twice = torch.nn.Sequential(torch.nn.Linear(13, 17, bias=False), torch.nn.ReLU(),
                                         torch.nn.Linear(17, 13, bias=False))
        self.old = torch.nn.Sequential(torch.nn.Linear(13, 19, bias=False), torch.nn.ReLU(),
                                       torch.nn.Linear(19, 13, bias=False))
    def forward(self, x):
        x = self.shared(self.attention(self.shared(x)))
        x = checkpoint(self.twice, self.kept(x), use_reentrant=False)
        return checkpoint(self.old, x, use_reentrant=True)

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        torch.ones(23, 23) @ torch.ones(23, 23)
        return 2 * x * grad

model = Model()
other = torch.nn.Linear(8, 29, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([torch.ones(8)] * 60, batch_size=2,
                                     collate_fn=lambda rows: torch.stack(rows) @ torch.ones(8, 8))
for step, batch in enumerate(loader):
    for part in range(2):
        loss = Square.apply(model(batch)).sum() + (torch.ones(31, 31, requires_grad=True)
                                                   @ torch.ones(31, 31)).sum()
        loss.backward()
    with torch.no_grad():
        other(torch.ones(5, 8))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """The matrix products of the recorded steps, a row each, with the shape of their inputs."""
    folder = tmp_path_factory.mktemp("attribution")
    record(folder, SCRIPT)
    trace = analyze(read(folder / "run.kprof"))
    rows = trace.kernels[trace.kernels["op"] == "aten::mm"]
    rows = rows[~rows["op_row"].duplicated()]
    shapes = trace.ranges["input_shapes"].astype(object).iloc[rows["op_row"].astype(int)]
    shapes = [tuple(map(tuple, shape[:2])) for shape in map(json.loads, shapes)]
    return rows.assign(shape=shapes)


def found(products, *shapes):
    """Where the products of these shapes were, each place once, with their number in a step."""
    of_shape = products[products["shape"].isin(shapes)]
    modules = of_shape["module"].astype(object).fillna("")
    places = zip(modules, of_shape["phase"], of_shape["recomputed"], strict=True)
    num_steps = products["step"].nunique()
    return {place: count / num_steps for place, count in Counter(places).items()}


@pytest.mark.slow
def test_a_product_is_of_the_innermost_module_around_it(products):
    assert found(products, ((2, 8), (8, 13))) == {("kept", "forward", False): 2}
    assert found(products, ((2, 13), (13, 8))) == {("kept", "backward", False): 2}


def test_a_gradient_is_of_the_module_that_it_is_the_gradient_of(products):
    # Both layers make a product of these sizes, one forward, the other in its gradient.
    assert found(products, ((2, 8), (8, 11))) == {
        ("attention.q", "forward", False): 2,
        ("attention.o", "backward", False): 2,
    }
    assert found(products, ((11, 2), (2, 8))) == {("attention.q", "backward", False): 2}
    assert found(products, ((8, 2), (2, 11))) == {("attention.o", "backward", False): 2}


def test_a_module_called_twice_has_the_gradients_of_both_calls(products):
    shared = products[products["module"] == "shared"]
    assert shared["phase"].value_counts().to_dict()["forward"] == 4 * shared["step"].nunique()
    assert found(products, ((8, 2), (2, 8))) == {("shared", "backward", False): 4}


@pytest.mark.parametrize(("module", "width"), [("twice", 17), ("old", 19)])
def test_what_checkpointing_runs_again_is_backward_and_recomputed(products, module, width):
    forward = found(products, ((2, 13), (13, width)))
    assert forward[(f"{module}.0", "forward", False)] == 2
    assert forward[(f"{module}.0", "backward", True)] == 2
    assert found(products, ((width, 2), (2, 13))) == {(f"{module}.0", "backward", False): 2}


def test_what_a_custom_function_runs_in_its_backward_is_backward(products):
    assert found(products, ((23, 23), (23, 23))) == {("", "backward", False): 2}


def test_a_loss_outside_every_module_is_forward_where_its_gradient_was_taken(products):
    places = found(products, ((31, 31), (31, 31)))
    assert places == {("", "forward", False): 2, ("", "backward", False): 2}


def test_data_loading_has_its_phase(products):
    assert found(products, ((2, 8), (8, 8)))[("", "data", False)] == 1


def test_an_evaluation_between_steps_is_forward(products):
    assert found(products, ((5, 8), (8, 29))) == {("Linear", "forward", False): 1}


def test_every_product_belongs_to_a_recorded_step(products):
    assert products["step"].notna().all()
    assert products["step"].value_counts().nunique() == 1
