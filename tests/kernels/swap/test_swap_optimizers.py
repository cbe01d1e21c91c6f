"""The step of an AdamW, by the kernel in Triton's interpreter."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.kernels.swap.reasons import (
    DECAYS_BY_GRADIENTS,
    FLOAT64_STEPS,
    NO_PARAMETERS,
    SEVERAL_DEVICES,
)
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.swapping import swapped


def made():
    torch.manual_seed(5)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    return model, optimizer


def test_a_step_by_the_kernel_is_a_step_by_torch_and_keeps_its_states():
    (model, optimizer), (other, theirs) = made(), made()
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
    optimizer.step()
    for _ in range(2):
        theirs.step()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
    torch.testing.assert_close(optimizer.state_dict(), theirs.state_dict())
    assert swap.sites[0].num_replaced == 1
    assert "step" not in optimizer.__dict__


def test_a_scheduler_counts_steps_and_warns_about_none():
    _, optimizer = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapper = optimizer.__dict__["step"]
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
        scheduler.step()
    assert optimizer.__dict__["step"] is wrapper
    assert swap.sites[0].num_replaced == 1


def test_hooks_on_steps_fire():
    _, optimizer = made()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with swapped(optimizer, "adamw"):
        optimizer.step()
    assert seen == ["before", "after"]


def test_a_step_that_computes_the_loss_anew_is_torchs():
    _, optimizer = made()
    with swapped(optimizer, "adamw") as swap:
        assert optimizer.step(lambda: 3.0) == 3.0
    assert swap.sites[0].num_fallen_back == 1


def test_what_the_kernel_does_not_do_is_torchs():
    model, _ = made()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
    assert "amsgrad" in swap.sites[0].calls[0].why
    assert "max_exp_avg_sq" in optimizer.state[model.weight]


def test_a_step_replaced_by_other_code_is_left_alone():
    _, optimizer = made()
    optimizer.step = lambda: 1
    with swapped(optimizer, "adamw") as swap:
        assert optimizer.step() == 1
    assert "was replaced by" in swap.sites[0].skipped


def test_a_class_with_a_step_of_its_own_is_left_alone():
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return None

    with swapped(Own([torch.zeros(2, requires_grad=True)]), "adamw") as swap:
        pass
    why = swap.sites[0].skipped
    assert (why.split()[0], "of its own" in why) == ("Own", True)


def test_a_copy_of_a_swapped_optimizer_steps_as_torch_does():
    _, optimizer = made()
    with swapped(optimizer, "adamw") as swap:
        other = copy.deepcopy(optimizer)
        other.step()
    assert swap.sites[0].num_replaced == 0


@pytest.mark.parametrize("names", [("adamw=aten",), ("adamw=eager",)])
def test_providers_that_take_no_optimizer_leave_it_alone(names):
    _, optimizer = made()
    with swapped(optimizer, *names) as swap:
        optimizer.step()
    assert "whole optimizer" in swap.sites[0].skipped


@pytest.mark.parametrize("fastest", ["inductor", "aten"])
def test_who_is_faster_and_takes_no_optimizer_does_not_give_it_to_torch(monkeypatch, fastest):
    _, optimizer = made()
    monkeypatch.setattr(Providers, "_fastest", lambda self, *_: fastest)
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
    assert [(one.provider, one.why) for one in swap.sites[0].calls] == [("kprof", None)]


def test_parameters_that_become_of_a_dtype_that_is_not_taken_are_torchs():
    model, optimizer = made()
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
        optimizer.state.clear()
        model.double()
        optimizer.step()
    assert [one.num_calls for one in swap.sites[0].calls] == [1, 1]
    assert "torch.float64" in swap.sites[0].calls[1].why


def test_norms_run_in_the_interpreter_within_a_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8, eps=1e-6))
    x = torch.randn(3, 8)
    wanted = model(x)
    with swapped(model, "rmsnorm", "layernorm") as swap:
        torch.testing.assert_close(model(x), wanted)
    assert [site.calls[0].provider for site in swap.replaced] == ["kprof", "kprof"]


def stepped(optimizer):
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
    return [(one.num_calls, one.why) for one in swap.sites[0].calls]


def test_parameters_on_several_devices_are_updated_by_torch():
    _, optimizer = made()
    other = nn.Parameter(torch.ones(2, device="meta"))
    other.grad = torch.ones(2, device="meta")
    optimizer.add_param_group({"params": [other]})
    before = optimizer.param_groups[0]["params"][0].clone()
    assert stepped(optimizer) == [(1, SEVERAL_DEVICES)]
    assert not torch.equal(optimizer.param_groups[0]["params"][0], before)


def test_a_group_without_parameters_is_passed_over():
    _, optimizer = made()
    optimizer.param_groups.insert(0, {**optimizer.param_groups[0], "params": []})
    assert stepped(optimizer) == [(1, None)]
    del optimizer.param_groups[1]
    assert stepped(optimizer) == [(1, NO_PARAMETERS)]


def test_what_no_adamw_does_is_torchs():
    _, optimizer = made()
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    assert stepped(optimizer) == [(1, DECAYS_BY_GRADIENTS)]
    _, optimizer = made()
    torch.set_default_dtype(torch.float64)
    try:
        assert stepped(optimizer) == [(1, FLOAT64_STEPS)]
    finally:
        torch.set_default_dtype(torch.float32)


def odd(kind):
    """Return an AdamW of two groups, the second of which has an odd gradient or state."""
    first, second = (nn.Parameter(torch.ones(5, 7)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=0.1)
    for one in (first, second):
        one.grad = torch.linspace(-1, 1, 35).view(5, 7)
    optimizer.step()
    ODD[kind](second, optimizer.state[second])
    return optimizer


def _gives(gradient):
    return lambda parameter, state: setattr(parameter, "grad", gradient)


def _another_dtype(parameter, state):
    parameter.grad_dtype = None
    parameter.grad = torch.ones(5, 7, dtype=torch.float64)


ODD = {
    "expanded": _gives(torch.ones(7).expand(5, 7)),
    "transposed": _gives(torch.linspace(-1, 1, 35).view(7, 5).t()),
    "gaps": _gives(torch.linspace(-1, 1, 70).view(5, 14)[:, ::2]),
    "none": _gives(None),
    "sparse": _gives(torch.ones(5, 7).to_sparse()),
    "dtype": _another_dtype,
    "states": lambda _, state: state.update(exp_avg=state["exp_avg"].half()),
    "squares": lambda _, state: state.pop("exp_avg_sq"),
    "steps": lambda _, state: state.update(step=state["step"].double()),
    "parameter": lambda one, _: setattr(one, "data", torch.ones(()).expand(5, 7)),
}


def after(optimizer, *names):
    """Return what a step leaves, and its error."""
    error = None
    with swapped(optimizer, *names) if names else contextlib.nullcontext() as swap:
        try:
            optimizer.step()
        except (RuntimeError, KeyError) as raised:
            error = type(raised)
    params = [one for group in optimizer.param_groups for one in group["params"]]
    return [error, params, [optimizer.state[one] for one in params], params[1].grad], swap


@pytest.mark.parametrize(
    ("kind", "num_replaced"),
    [
        *(("expanded", 1), ("transposed", 1), ("gaps", 1), ("none", 1)),
        *(("sparse", 0), ("dtype", 0), ("states", 0), ("squares", 0), ("steps", 0)),
        ("parameter", 0),
    ],
)
def test_a_step_with_odd_gradients_or_states_leaves_what_torchs_leaves(kind, num_replaced):
    (wanted, _), (found, swap) = after(odd(kind)), after(odd(kind), "adamw")
    assert found[0] == wanted[0]
    torch.testing.assert_close(found[1:], wanted[1:])
    assert swap.sites[0].num_replaced == num_replaced
    assert swap.sites[0].num_fallen_back == 1 - num_replaced


def test_gradients_that_become_odd_are_seen_at_that_step():
    _, optimizer = made()
    with swapped(optimizer, "adamw") as swap:
        optimizer.step()
        weight = optimizer.param_groups[0]["params"][0]
        weight.grad = weight.grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse gradients"):
            optimizer.step()
    assert [(one.provider, one.num_calls) for one in swap.sites[0].calls] == [
        ("kprof", 1),
        (None, 1),
    ]
