"""AdamW over many tensors in one launch, in Triton's interpreter, against torch's own."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import copy

import pytest
import torch

import kprof.kernels.adamw as tables
from kprof.kernels.adamw import KERNEL, OptimizerError, adamw, adamw_step
from tests.kernels.kernel_checks import (
    INTERPRETED,
    binaries_of,
    compiled,
    why_inaccurate,
    why_untrusted,
)

pytestmark = INTERPRETED
SHAPES = ((), (37,), (5, 7), (2_000, 9), (16, 16), (0, 4))


def drawn(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def trained(step, num_steps=10, dtype=torch.float32, **options):
    """Return the optimizer after some steps that `step` did."""
    params = [one.clone().requires_grad_() for one in drawn(dtype)]
    optimizer = torch.optim.AdamW(params, **options)
    for number in range(num_steps):
        for param, gradient in zip(params, drawn(dtype, seed=number + 1), strict=True):
            param.grad = gradient
        step(optimizer)
    return optimizer


def values_of(optimizer):
    """Return all parameters, averages, squares and steps as float64, each in one row."""
    params = optimizer.param_groups[0]["params"]
    states = [optimizer.state[one] for one in params]
    names = ("exp_avg", "exp_avg_sq", "step")
    groups = [params, *([state[name] for state in states] for name in names)]
    return [torch.cat([one.detach().double().flatten() for one in group]) for group in groups]


def plain_step(optimizer):
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fused": True},
        {"weight_decay": 0.0, "maximize": True},
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    ],
    ids=str,
)
def test_ten_steps_are_as_near_to_float64_as_those_of_torch(options):
    ours = values_of(trained(adamw_step, **options))
    theirs = values_of(trained(plain_step, **{"foreach": False, **options}))
    in_doubles = {name: value for name, value in options.items() if name != "fused"}
    exact = values_of(trained(plain_step, dtype=torch.float64, foreach=False, **in_doubles))
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert error_of(one, true) <= 1.05 * error_of(other, true) + 1e-8


def error_of(found, true):
    """Return the relative L2 error."""
    return ((found - true).norm() / true.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_step_differs_from_that_of_the_fused_optimizer_by_two_last_bits_at_most(dtype):
    ours, theirs = (
        trained(step, num_steps=1, dtype=dtype, fused=True, weight_decay=0.0)
        for step in (adamw_step, plain_step)
    )
    for one, other in zip(values_of(ours), values_of(theirs), strict=True):
        allowed = 2 * torch.finfo(dtype).eps * (other.abs() + 1e-3)
        assert bool(((one - other).abs() <= allowed).all())


def test_a_learning_rate_in_a_tensor_is_read_where_it_is():
    found, expected = one_tensor(), one_tensor()
    adamw(*found, torch.tensor(0.25))
    adamw(*expected, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_state_is_what_torch_keeps_and_either_goes_on_with_it():
    ours, theirs = trained(adamw_step), trained(plain_step)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert {i: list(one) for i, one in state["state"].items()} == {
        i: list(one) for i, one in expected["state"].items()
    }
    assert [one["step"].item() for one in state["state"].values()] == [10.0] * len(SHAPES)
    theirs.load_state_dict(copy.deepcopy(state))
    plain_step(theirs)
    assert theirs.state_dict()["state"][1]["step"].item() == 11.0


def test_hooks_of_the_optimizer_run():
    seen = []
    optimizer = trained(adamw_step, num_steps=1)
    optimizer.register_step_pre_hook(lambda *inputs: seen.append("before"))
    optimizer.register_step_post_hook(lambda *inputs: seen.append("after"))
    adamw_step(optimizer)
    assert seen == ["before", "after"]


def test_parameters_without_a_gradient_stay_as_they_are():
    optimizer = trained(adamw_step, num_steps=1)
    param = optimizer.param_groups[0]["params"][1]
    kept, param.grad = param.detach().clone(), None
    adamw_step(optimizer)
    assert torch.equal(param.detach(), kept)
    assert optimizer.state[param]["step"].item() == 1.0


def one_tensor(n=40, dtype=torch.float32):
    param, gradient, average = drawn(dtype, [(n,)] * 3)
    return [param, gradient, average, average.square(), torch.tensor(3.0)]


def test_an_infinity_that_the_scaler_found_stops_everything():
    tensors = one_tensor()
    kept = [one.clone() for one in tensors]
    adamw(*tensors, found_inf=torch.ones(1), grad_scale=torch.tensor([2.0]))
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def test_gradients_are_divided_by_the_scale_in_place():
    scaled, plain = one_tensor(), one_tensor()
    scaled[1] *= 8
    adamw(*scaled, grad_scale=torch.tensor([8.0]), found_inf=torch.zeros(1))
    adamw(*plain)
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 2_047, 2_064, 16_383, 16_385, 32_800])
def test_no_element_around_the_edges_of_a_chunk_is_left_out_or_updated_twice(n):
    found, expected = one_tensor(n), one_tensor(n)
    adamw(*found)
    KERNEL.reference(*expected)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)


def test_tensors_that_lie_otherwise_than_their_states_are_updated_where_they_are():
    found, expected = one_tensor(48), one_tensor(48)
    found[:4] = [one.view(6, 8) for one in found[:4]]
    found[1] = found[1].t().contiguous().t()
    wide = torch.zeros(6, 16)
    wide[:, ::2] = found[0]
    found[0] = wide[:, ::2]
    adamw(*found)
    KERNEL.reference(*expected)
    torch.testing.assert_close(found[0], expected[0].view(6, 8), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(found[3], expected[3].view(6, 8), rtol=2e-6, atol=1e-7)
    assert not wide[:, 1::2].any()


def test_the_table_is_made_again_only_when_something_moved():
    tables._keep_table.cache_clear()
    tensors = one_tensor()
    adamw(*tensors)
    adamw(*tensors)
    tensors[1] = tensors[1].clone()
    adamw(*tensors)
    assert tables._keep_table.cache_info().misses == 2
    assert tables._keep_table.cache_info().hits == 1


def test_tensors_that_moved_are_not_cut_into_chunks_anew():
    tables._keep_chunks.cache_clear()
    tensors = one_tensor()
    adamw(*tensors)
    tensors[1] = tensors[1].clone()
    adamw(*tensors)
    assert tables._keep_chunks.cache_info().misses == 1


def test_a_chunk_tells_its_tensor_and_its_place_there():
    chunks = tables._make_chunks(torch.device("cpu"), (5, 0, 7), 3).tolist()
    assert [(one >> 32, one & 0xFFFFFFFF) for one in chunks] == [
        *((0, 0), (0, 1)),
        *((2, 0), (2, 1), (2, 2)),
    ]


def test_steps_on_the_host_give_what_steps_on_the_device_give():
    found, expected = one_tensor(), one_tensor()
    numbers = tables.Numbers(1e-3, 0.9, 0.999, 1e-2, 1e-8, False)
    table = tables._table_of([[one] for one in found])
    tables._correct_on_host([found[4]], numbers, table)
    corrections = table.corrections_T2.clone()
    adamw(*expected)
    on_device = tables._table_of([[one] for one in expected]).corrections_T2
    torch.testing.assert_close(corrections, on_device, rtol=1e-12, atol=0)
    assert found[4].item() == expected[4].item() == 4.0


def test_the_versions_of_what_is_written_count_on():
    tensors = one_tensor()
    before = [one._version for one in tensors]
    adamw(*tensors)
    changed = [one._version > then for one, then in zip(tensors, before, strict=True)]
    assert changed[0]
    assert changed[2]
    assert changed[3]


def test_what_it_replaces_is_right_between_gaps_where_torchs_own_is_not():
    draw = torch.Generator().manual_seed(0)
    dense = [torch.rand(40, generator=draw) for _ in range(4)]
    apart = [torch.stack([one, torch.full_like(one, 7.0)], 1)[:, 0] for one in dense]
    assert not any(one.is_contiguous() for one in apart)
    for states in (dense, apart):
        KERNEL.reference(*states, torch.tensor(3.0))
    for one, other in zip(dense, apart, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)
        assert other.as_strided((40,), (2,), 1).eq(7.0).all()


@pytest.mark.slow
def test_the_gate_trusts_it():
    assert why_untrusted(KERNEL, (37,)) == ""


def test_it_is_no_less_accurate_than_what_it_replaces():
    assert why_inaccurate(KERNEL, (401,)) == ""


def test_it_compiles_without_a_graph_break_to_the_same_bits():
    found, expected = one_tensor(), one_tensor()
    compiled(adamw)(*found)
    adamw(*expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_that_it_does_not_have_are_refused(option):
    optimizer = torch.optim.AdamW(drawn(), **{option: True})
    with pytest.raises(OptimizerError, match=option):
        adamw_step(optimizer)


def test_what_it_cannot_take_is_refused_with_a_reason():
    assert "float64" in KERNEL.refuses(*one_tensor(dtype=torch.float64))
    assert "step" in KERNEL.refuses(*one_tensor()[:4], torch.tensor(3))
    assert KERNEL.refuses(*one_tensor()) is None


@pytest.mark.slow
def test_ahead_of_time_nothing_spills():
    binaries = binaries_of(KERNEL, *(((20_000,), dtype) for dtype in KERNEL.dtypes))
    assert not [one for one in binaries if one["spilled_bytes"]]
    # Four programs of 256 threads share the 65,536 registers of an SM.
    updates = [one for one in binaries if one["name"] == "update_kernel"]
    assert {one["dtype"]: one["num_registers"] <= 64 for one in updates}["bfloat16"]
