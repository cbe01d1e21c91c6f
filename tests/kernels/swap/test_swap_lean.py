"""Gated MLPs whose product is computed again for gradients, not kept: swiglu=kprof-lean."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from kprof.errors import KprofError
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Mlp


@pytest.fixture
def given(monkeypatch):
    """Return a dictionary that gets a reference to the input of the last layer."""
    found, linear = {}, nn.functional.linear

    def watching(x, weight, bias=None):
        if weight.shape == (8, 16):
            found["storage"] = StorageWeakRef(x.untyped_storage())
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", watching)
    return found


def made(activation=None, down=nn.Linear):
    torch.manual_seed(0)
    mlp = Mlp(8, activation, bias=True)
    layer = down(16, 8)
    layer.load_state_dict(mlp.down_proj.state_dict())
    mlp.down_proj = layer
    return mlp, torch.randn(2, 3, 8, requires_grad=True)


def is_gone(storage):
    # Triton's interpreter leaves cycles behind.
    gc.collect()
    return storage.expired()


def gradients_of(mlp, x, result):
    return torch.autograd.grad(result.square().sum(), [x, *mlp.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "activation"), [("swiglu", None), ("geglu", nn.GELU(approximate="tanh"))]
)
def test_the_product_is_not_kept_and_gradients_have_the_same_bits(kernel, activation, given):
    mlp, x = made(activation)
    with swapped(mlp, f"{kernel}=kprof"):
        kept = mlp(x)
        assert not is_gone(given["storage"])
        wanted = gradients_of(mlp, x, kept)
    with swapped(mlp, f"{kernel}=kprof-lean") as swap:
        found = mlp(x)
        assert is_gone(given["storage"])
        gradients = gradients_of(mlp, x, found)
    assert [call.provider for site in swap.sites for call in site.calls] == ["kprof-lean"]
    assert torch.equal(found, kept)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    mlp, x = made()
    with swapped(mlp, "swiglu=kprof-lean"):
        loss = mlp(x).square().sum()
    first = torch.autograd.grad(loss, mlp.down_proj.weight, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, mlp.down_proj.weight)[0], first[0])


def test_what_was_written_over_meanwhile_is_an_error_as_ever():
    mlp, x = made()
    seen = []
    mlp.gate_proj.register_forward_hook(lambda *about: seen.append(about[2]))
    with swapped(mlp, "swiglu=kprof-lean"):
        loss = mlp(x).square().sum()
    with torch.no_grad():
        seen[0].zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_nothing_is_held_once_gradients_are_there():
    mlp, x = made()
    seen = []
    mlp.gate_proj.register_forward_hook(
        lambda *about: seen.append(StorageWeakRef(about[2].untyped_storage()))
    )
    with swapped(mlp, "swiglu=kprof-lean"):
        result = mlp(x)
        assert not is_gone(seen[0])
        gradients_of(mlp, x, result)
    assert is_gone(seen[0])


def test_hooks_of_others_see_what_they_would(given):
    mlp, x = made()
    packed = []
    with swapped(mlp, "swiglu=kprof-lean"), saved_tensors_hooks(packed.append, lambda one: one):
        mlp(x)
    assert not is_gone(given["storage"])


def test_checkpointing_gives_the_same_gradients():
    mlp, x = made()
    with swapped(mlp, "swiglu=kprof-lean"):
        wanted = gradients_of(mlp, x, mlp(x))
        found = gradients_of(mlp, x, checkpoint(mlp, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_layer_of_its_own_kind_keeps_what_it_likes(given):
    class Own(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    mlp, x = made(down=Own)
    with swapped(mlp, "swiglu=kprof-lean"):
        result = mlp(x)
    assert not is_gone(given["storage"])
    assert result.requires_grad


def test_without_gradients_it_is_as_ever():
    mlp, x = made()
    with torch.no_grad(), swapped(mlp, "swiglu=kprof-lean"):
        assert torch.equal(mlp(x), mlp(x))


def test_a_kernel_without_such_a_site_has_no_such_provider():
    with pytest.raises(KprofError, match=r"^rmsnorm .*provider kprof-lean"):
        swapped(nn.RMSNorm(8), "rmsnorm=kprof-lean")


def test_what_a_hook_changes_in_place_is_kept():
    (mlp, *_), x = made(down=nn.Linear), torch.randn(4, 8)
    mlp.down_proj.register_forward_pre_hook(lambda layer, given: (given[0].mul_(0.5),))

    def gradient():
        mlp.zero_grad()
        mlp(x).square().sum().backward()
        return mlp.down_proj.weight.grad.clone()

    wanted = gradient()
    with swapped(mlp, "swiglu=kprof-lean"):
        torch.testing.assert_close(gradient(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "quantize_fp8"])
def test_a_kernel_without_call_sites_is_refused_before_anything_runs(name):
    with pytest.raises(KprofError, match=name) as error:
        swapped(nn.Sequential(), name)
    assert "rmsnorm" in error.value.fix
