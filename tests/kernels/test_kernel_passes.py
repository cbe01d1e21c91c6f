"""What runs when a pass of a kernel is timed."""

from types import SimpleNamespace

import pytest
import torch

from kprof.kernels.bench.measure import pass_of

# As much of a kernel as its passes look at.
KERNEL = SimpleNamespace(differentiable=(0,))


def ran(function, direction, times=1):
    run = pass_of(KERNEL, function, [(torch.ones(3),), (torch.ones(3),)], direction)
    for _ in range(times):
        run()


class Noted(torch.autograd.Function):
    """Notes in which order what runs."""

    order: list

    @staticmethod
    def forward(ctx, x):
        Noted.order.append("forward")
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        Noted.order.append("backward")
        return 2 * dy


def test_training_is_a_forward_and_a_backward_pass_each_time():
    Noted.order = []
    ran(Noted.apply, "training", times=2)
    assert Noted.order == ["forward", "backward"] * 2


def test_a_forward_pass_runs_without_gradients():
    seen = []
    ran(lambda x: seen.append(torch.is_grad_enabled()), "forward")
    assert seen == [False]


@pytest.mark.parametrize("function", [lambda x: 2 * x.detach(), torch.no_grad()(torch.square)])
def test_who_has_no_backward_pass_cannot_be_timed_in_training(function):
    ran(function, "forward")
    with pytest.raises(RuntimeError):
        ran(function, "training")
