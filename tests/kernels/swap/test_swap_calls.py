"""Which calls of a swapped module go to a kernel, to whose, and which to the original."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.swap.reasons import FORWARD_MODE, TRANSFORM
from kprof.kernels.bench.measure import Timed
from kprof.kernels.bench.choice import choose, keep
from kprof.kernels.norm import RMSNORM
from kprof.kernels.swap import providers
from kprof.kernels.swap.patches import TORCHS
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.swapping import swapped
from kprof.kernels.swap.translate import settings_of, translations_of
from tests.kernels.swap_models import NAMES, Mlp, Model, Norm, tokens


def test_what_the_kernel_refuses_goes_to_the_original_and_is_counted():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager") as swap:
        result = model(torch.ones(2, 16, dtype=torch.float64))
    (site,) = swap.sites
    assert result.dtype == torch.float64
    assert (site.num_replaced, site.num_fallen_back) == (0, 1)
    assert "float64" in site.calls[0].why


def test_an_mlp_that_falls_back_runs_each_layer_once():
    mlp = Mlp(16).double()
    seen = []
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.act_fn, mlp.down_proj):
        layer.register_forward_hook(lambda module, *_: seen.append(module))
    mlp.act_fn._forward_hooks.clear()
    x = torch.ones(2, 16, dtype=torch.float64)
    wanted = mlp(x)
    seen.clear()
    with swapped(mlp, "swiglu=eager") as swap:
        assert torch.equal(mlp(x), wanted)
    assert seen == [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    assert swap.sites[0].num_fallen_back == 1


def test_a_kernel_that_needs_a_gpu_falls_back_on_the_cpu(monkeypatch):
    monkeypatch.setattr(providers, "IS_INTERPRETED", False)
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm") as swap:
        model(torch.ones(2, 16))
    (call,) = swap.sites[0].calls
    assert (call.provider, call.why) == (None, providers.NEEDS_GPU)


def test_without_a_gpu_the_kernel_runs_in_tritons_interpreter():
    model, x = nn.Sequential(Norm(16)), torch.randn(2, 16)
    wanted = model(x)
    with swapped(model, "rmsnorm") as swap:
        torch.testing.assert_close(model(x), wanted)
    assert swap.sites[0].calls[0].provider == "kprof"


def test_who_was_measured_to_be_the_fastest_runs(monkeypatch):
    monkeypatch.setattr(Providers, "_fastest", lambda self, *_: "aten")
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm") as swap:
        model(torch.ones(2, 16))
    assert swap.sites[0].calls[0].provider == "aten"


def test_where_no_provider_is_faster_the_original_runs_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(Providers, "_fastest", lambda self, *_: "eager")
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm") as swap:
        model(torch.ones(2, 16))
    assert swap.sites[0].calls[0].why == providers.AS_FAST


def test_calls_with_and_without_gradients_each_go_to_their_fastest_provider(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "GPU")
    for direction, name in (("forward", "eager"), ("training", "aten")):
        timed = Timed("rmsnorm", name, (8, 8), "float32", direction, gpu_ns=9.0)
        keep(choose(RMSNORM, [timed], "GPU", "2026-01-01"))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    providers = Providers({"rmsnorm": RMSNORM}, {})
    assert providers._fastest(RMSNORM, on_gpu, (8, 8)) == "aten"
    with torch.no_grad():
        assert providers._fastest(RMSNORM, on_gpu, (8, 8)) == "eager"
        assert providers._fastest(RMSNORM, on_gpu, (8, 9)) is None


def test_inductor_runs_where_it_was_measured_and_compiles_for_no_other_rows(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "GPU")
    timed = Timed("rmsnorm", "inductor", (8, 8), "float32", "forward", gpu_ns=9.0)
    keep(choose(RMSNORM, [timed], "GPU", "2026-01-01"))
    # Nothing is compiled here.
    monkeypatch.setattr(Providers, "_load", lambda self, kernel, name: torch.rsqrt)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    providers = Providers({"rmsnorm": RMSNORM}, {})
    with torch.no_grad():
        for shape, wanted in (((8, 8), "inductor"), ((2, 4, 8), "inductor"), ((7, 8), "kprof")):
            _, name, why = providers.choose(RMSNORM, on_gpu, shape, is_default=True)
            assert (name, why) == (wanted, None)


def test_calls_with_other_arguments_go_to_the_original():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager"):
        torch.testing.assert_close(model[0](x=torch.ones(2, 16)), model[0](torch.ones(2, 16)))
        with pytest.raises(TypeError):
            model[0]()


def test_mixed_precision_gives_the_dtype_that_it_gave():
    model = Model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = model(tokens())
        with swapped(model, *NAMES):
            got = model(tokens())
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted)


def test_gradient_checkpointing_runs_the_replacement_again():
    model = nn.Sequential(nn.Linear(16, 16), Norm(16))
    with swapped(model, "rmsnorm=eager") as swap:
        checkpoint(model, torch.ones(2, 16), use_reentrant=False).sum().backward()
    assert swap.sites[0].num_replaced == 2


def test_frozen_parameters_get_no_gradients():
    model = nn.Sequential(nn.Linear(16, 16), Norm(16))
    model[1].weight.requires_grad_(False)
    with swapped(model, "rmsnorm=eager"):
        model(torch.ones(2, 16)).sum().backward()
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


def test_a_parameter_that_is_exchanged_meanwhile_is_used():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager"):
        model[0].weight = nn.Parameter(torch.full((16,), 2.0))
        assert model(torch.ones(1, 16))[0, 0].item() == pytest.approx(2.0, rel=1e-5)


def test_transforms_of_functions_go_to_the_original():
    norm = nn.Sequential(Norm(4))
    x = torch.randn(3, 4)
    wanted = torch.func.vmap(norm)(x)
    with swapped(norm, "rmsnorm=eager") as swap:
        torch.testing.assert_close(torch.func.vmap(norm)(x), wanted)
    assert swap.sites[0].calls[0].why == TRANSFORM


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_derivatives_in_forward_mode_go_to_the_original():
    norm = nn.Sequential(Norm(4))
    x = torch.randn(3, 4)
    _, wanted = torch.func.jvp(norm, (x,), (x,))
    with swapped(norm, "rmsnorm=eager") as swap:
        norm(x)
        with forward_ad.dual_level():
            got = forward_ad.unpack_dual(norm(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(got, wanted)
    reasons = [calls.why for calls in swap.sites[0].calls]
    assert FORWARD_MODE in reasons


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_derivatives_in_forward_mode_go_to_the_original():
    norm = nn.Sequential(Norm(4))
    x = torch.randn(3, 4)
    _, wanted = torch.func.jvp(norm, (x,), (x,))
    torch._dynamo.reset()
    derived = torch.compile(lambda x: torch.func.jvp(norm, (x,), (x,))[1], backend="eager")
    with swapped(norm, "rmsnorm=kprof"):
        torch.testing.assert_close(derived(x), wanted)


def as_under_autocast_on_a_gpu(logits, targets, weight=None, *others, **named):
    # torch.log_softmax of the logits' own dtype, then nll_loss in float32
    logarithms = functional.log_softmax(logits, 1, dtype=logits.dtype)
    return functional.nll_loss(logarithms.float(), targets)


def with_wrong_targets(logits, targets, *others, **named):
    return as_under_autocast_on_a_gpu(logits, targets.roll(1))


def test_a_kernel_may_round_less_than_torch_but_compute_nothing_else():
    (loss,) = translations_of(TORCHS.cross_entropy, {"cross_entropy"})
    bfloat16 = (torch.bfloat16, None)
    assert bfloat16 in settings_of(as_under_autocast_on_a_gpu, loss)
    assert isinstance(settings_of(with_wrong_targets, loss), str)
    # Its result is bfloat16, the kernel's float32
    assert bfloat16 not in settings_of(TORCHS.cross_entropy, loss)
    exact = dataclasses.replace(loss, is_more_exact=False)
    assert bfloat16 not in settings_of(as_under_autocast_on_a_gpu, exact)


def test_sites_are_found_in_torchs_inference_mode_as_outside_of_it():
    model = Model()
    wanted = model(tokens())

    def found():
        with swapped(model, *NAMES) as swap:
            torch.testing.assert_close(model(tokens()), wanted)
        return [(site.name, site.kernel, site.skipped, site.num_replaced) for site in swap.sites]

    outside = found()
    with torch.inference_mode():
        assert found() == outside
    assert len([one for one in outside if one[-1]]) == 9
