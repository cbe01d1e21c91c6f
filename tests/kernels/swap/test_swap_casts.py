"""Weights of linear layers that are cast once for each backward pass under autocast."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import kprof
import kprof.kernels.cast_weights
from kprof.kernels.swap.sites import casts
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
CAST = "cast_weights"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = x + self.down(self.act(self.up(x)))
        return self.head(x)


class Twice(Model):
    def forward(self, x):
        return super().forward(x) + super().forward(2 * x)


class Checkpointed(Model):
    is_reentrant = False

    def forward(self, x):
        return self.head(checkpoint(self.part, x, use_reentrant=self.is_reentrant))

    def part(self, x):
        return x + self.down(self.act(self.up(x)))


class Reentrant(Checkpointed):
    is_reentrant = True


class Casts(TorchDispatchMode):
    """Counts casts by `to`."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_to_copy":
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def rows(seed=1):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def trained(model, dtype=torch.bfloat16, seeds=(1,)):
    """Return the results of some steps of accumulation, and the gradients."""
    model.zero_grad()
    results = []
    for seed in seeds:
        x = rows(seed).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        y.float().square().sum().backward()
        results += [y.detach(), x.grad]
    return [*results, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def are_same(found, expected):
    return all(map(torch.equal, found, expected)) and len(found) == len(expected)


def outcomes(swap):
    return {(calls.provider, calls.why): calls.num_calls for calls in swap.report.sites[0].calls}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_results_and_gradients_have_the_same_bits(dtype, seeds):
    model = Model()
    expected = trained(model, dtype, seeds)
    with kprof.swapped(model, CAST) as swap:
        found = trained(model, dtype, seeds)
    assert are_same(found, expected)
    assert [site.num_replaced for site in swap.report.sites] == [len(seeds)] * 3
    assert not any("forward" in one.__dict__ for one in model.modules())


def test_no_weight_and_no_gradient_of_one_is_cast_alone():
    model = Model()
    with kprof.swapped(model, CAST), Casts() as seen:
        trained(model)
    shapes = {tuple(one.shape) for one in model.parameters()}
    assert not shapes & set(seen.shapes)


def test_a_weight_that_changes_is_cast_again():
    model, other = Model(), Model()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, other)]
    with kprof.swapped(model, CAST):
        for step in range(3):
            for one, optimizer in zip((model, other), optimizers, strict=True):
                trained(one, seeds=(step,))
                optimizer.step()
            # A write that no version counts.
            for one in (model, other):
                one.head.weight.data.mul_(1.5)
        assert are_same(trained(model), trained(other))


def test_a_weight_that_changes_between_the_cast_and_its_use_is_not_taken():
    model = Model()

    def shrink(*_):
        with torch.no_grad():
            model.head.weight.mul_(0.5)

    model.act.register_forward_hook(shrink)
    expected = trained(model)[0]
    with torch.no_grad():
        model.head.weight.mul_(2)
    with kprof.swapped(model, CAST):
        assert torch.equal(trained(model)[0], expected)


def shrink(model):
    """Write to a weight so that no version counts it."""
    model.head.weight.data.mul_(0.5)


class Shrinking(Model):
    def forward(self, x):
        x = x + self.down(self.act(self.up(x)))
        self.shrink()
        return self.head(x)

    def shrink(self):
        shrink(self)


class Partial(Model):
    """Some of its layers may be left out."""

    def forward(self, x, is_whole=True):
        x = x + self.down(self.act(self.up(x)))
        return self.head(x) if is_whole else x


def test_a_model_that_writes_through_data_in_its_forward_is_left_alone():
    expected = trained(Shrinking())
    model = Shrinking()
    with kprof.swapped(model, CAST) as swap:
        assert are_same(trained(model), expected)
    assert len(swap.skipped) == 3


def test_a_hook_that_writes_through_data_lets_the_originals_run():
    models = Model(), Model()
    expected, found = (
        one.act.register_forward_hook(lambda *_, one=one: shrink(one)) and one for one in models
    )
    with kprof.swapped(found, CAST) as swap:
        assert are_same(trained(found), trained(expected))
    assert outcomes(swap) == {(None, casts.WRITES): 1}


@pytest.mark.parametrize("write", [lambda one: one * 0.5, lambda one: one.mul_(0.5)])
def test_copies_that_a_pass_without_gradients_left_are_not_taken_by_the_next_pass(write):
    model, other = Partial(), Partial()
    with kprof.swapped(model, CAST):
        for one in (model, other):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                one(rows(), is_whole=False)
            for weight in one.parameters():
                weight.data = write(weight.data)
        assert are_same(trained(model), trained(other))


def test_weights_of_inference_mode_run_the_original():
    with torch.inference_mode():
        model = Model().requires_grad_(False)
    with kprof.swapped(model, CAST), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(rows())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(found, model(rows()))


def test_a_layer_that_runs_twice_takes_its_copy_once():
    model = Twice()
    expected = trained(model)
    with kprof.swapped(model, CAST) as swap:
        found = trained(model)
    assert outcomes(swap) == {("kprof", None): 1, (None, casts.AGAIN): 1}
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
def test_checkpointing_has_the_same_bits(kind):
    model = kind()
    expected = trained(model)
    with kprof.swapped(model, CAST):
        assert are_same(trained(model), expected)


def test_frozen_layers_get_no_gradient_and_are_cast_beside_the_others():
    model = Model()
    model.up.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    expected = trained(model)
    with kprof.swapped(model, CAST) as swap:
        found = trained(model)
    assert are_same(found, expected)
    assert model.up.weight.grad is None
    assert [site.num_replaced for site in swap.report.sites] == [1, 1, 1]


def test_a_model_without_weights_to_train_is_left_alone():
    model = Model().requires_grad_(False)
    with kprof.swapped(model, CAST) as swap:
        trained(model)
    assert outcomes(swap) == {(None, casts.FROZEN): 1}


def test_without_autocast_or_without_gradients_the_original_runs():
    model, x = Model(), rows()
    with kprof.swapped(model, CAST) as swap:
        model(x)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
    assert outcomes(swap) == {(None, casts.UNUSUAL): 2}


def test_weights_in_16_bits_are_no_sites():
    with kprof.swapped(Model().bfloat16(), CAST) as swap:
        assert not swap.replaced
    assert len(swap.skipped) == 3


def test_of_several_ranks_no_layer_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = Model()
    with kprof.swapped(model, CAST) as swap:
        trained(model)
    assert outcomes(swap) == {(None, casts.RANKS): 1}


def test_groups_are_no_larger_than_their_limit(monkeypatch):
    monkeypatch.setattr(casts, "MOST_ELEMENTS", 100)
    model = Model()
    expected = trained(model)
    made = []
    monkeypatch.setattr(
        casts,
        "cast_until",
        lambda *given, **named: made.append(len(given)) or cast(*given, **named),
    )
    cast = kprof.kernels.cast_weights.cast_until
    with kprof.swapped(model, CAST):
        assert are_same(trained(model), expected)
    assert len(made) == 3


def test_the_gradient_of_a_bias_may_still_come_from_the_gelu():
    model = Model()
    expected = trained(model)
    with kprof.swapped(model, CAST, "bias_gelu") as swap:
        found = trained(model)
    counts = {site.kernel: site.num_replaced for site in swap.report.sites}
    assert counts == {CAST: 1, "bias_gelu": 1}
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


def test_leaving_and_entering_between_forward_and_backward_changes_nothing():
    model = Model()
    expected = trained(model)
    swap = kprof.swapped(model, CAST)
    for _ in range(2):
        with swap, torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(rows())
        model.zero_grad()
        y.float().square().sum().backward()
        assert are_same([one.grad for one in model.parameters()], expected[2:])


def test_a_compiled_model_is_one_graph_and_runs_the_original():
    model, x = Model(), rows()
    with kprof.swapped(model, CAST), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = functional.linear(
            x + model.down(model.act(model.up(x))), model.head.weight, model.head.bias
        )
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
