"""Attention of many queries in the place of torch's, wherever a script calls it."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.


import pytest
import torch
from torch import nn
from torch.nn import functional

from kprof.kernels.swap.translate import FEW_TOKENS
from kprof.kernels.swap.providers import NEEDS_GPU
from kprof.kernels.swap.translate import MANY_TOKENS, OTHER_SCALE
from tests.kernels.swap.reasons import GRADIENTS
from kprof.kernels.attention.attention_forward import KERNEL as FORWARD
from kprof.kernels.swap.providers import AS_FAST, UNMEASURED, Providers
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, INTERPRETED
from tests.kernels.swap.attention_calls import KERNEL, NAME, Attention, call_of, ways_of

pytestmark = INTERPRETED
OTHERWISE = "it is called with options that the kernel does not have"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keys", [20, 33])
def test_a_module_that_calls_torchs_attention_calls_the_kernel(is_causal, keys):
    module, call = Attention(is_causal=is_causal), call_of(keys=keys)
    wanted = module(*call)
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        torch.testing.assert_close(module(*call), wanted, rtol=1e-3, atol=1e-3)
    assert ways_of(swap) == [(1, "kprof", None)]
    assert torch.equal(module(*call), wanted)


def test_less_precision_is_asked_for_by_name_and_refused_where_gradients_are_wanted():
    module, call = Attention(), call_of()
    wanted = module(*call)
    with torch.no_grad(), swapped(module, "attention_fp8=eager", KERNEL) as swap:
        torch.testing.assert_close(module(*call), wanted, rtol=1e-3, atol=1e-3)
    assert ways_of(swap, "attention_fp8") == [(1, "eager", None)]
    assert ways_of(swap) == []
    call[0].requires_grad_()
    with swapped(module, "attention_fp8=eager", KERNEL) as swap:
        module(*call).sum().backward()
    assert ways_of(swap, "attention_fp8") == [(1, None, GRADIENTS)]
    assert ways_of(swap) == [(1, "kprof", None)]


def test_unmeasured_calls_go_to_torch():
    module, call = Attention(), call_of()
    wanted = module(*call)
    with torch.no_grad(), swapped(module, "attention_forward") as swap:
        assert torch.equal(module(*call), wanted)
    assert ways_of(swap) == [(1, None, UNMEASURED)]


@pytest.mark.parametrize(
    ("fastest", "why"), [(None, UNMEASURED), ("eager", AS_FAST), ("kprof", NEEDS_GPU)]
)
def test_the_measured_provider_is_chosen_or_none(monkeypatch, fastest, why):
    providers = Providers({FORWARD.name: FORWARD}, {})
    monkeypatch.setattr(providers, "_fastest", lambda *about: fastest)
    monkeypatch.setattr("kprof.kernels.swap.providers.IS_INTERPRETED", False)
    function, provider, found = providers.choose(FORWARD, call_of()[0], (1,), is_default=True)
    assert (function, provider) == (None, None)
    assert why in found


def test_every_call_of_a_process_is_replaced_and_given_back():
    original, call = functional.scaled_dot_product_attention, call_of(heads=4)
    wanted = original(*call)
    with torch.no_grad(), swapped(None, KERNEL) as swap:
        found = functional.scaled_dot_product_attention(*call)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert functional.scaled_dot_product_attention is original
    assert [site.name for site in swap.replaced if site.num_replaced] == ["torch.nn.functional"]


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_a_process_swap_reaches_torchs_own_attention_module_in_training(wants_gradients):
    module = torch.nn.MultiheadAttention(128, 2, batch_first=True).half().train()
    x = torch.randn(1, 20, 128).half()
    with torch.set_grad_enabled(wants_gradients), swapped(None, KERNEL) as swap:
        module(x, x, x, need_weights=False)
    calls = {site.name: site.num_replaced for site in swap.replaced}
    assert calls["torch.nn.functional"] == 1


def test_few_and_many_tokens_go_to_two_kernels():
    module = Attention()
    with torch.no_grad(), swapped(module, KERNEL, "decode_attention") as swap:
        for tokens in (1, 20, 30):
            call = call_of(tokens, 30)
            wanted = Attention()(*call)
            torch.testing.assert_close(module(*call), wanted, rtol=1e-3, atol=1e-3)
    assert ways_of(swap) == [(2, "kprof", None)]
    assert ways_of(swap, "decode_attention") == [
        (1, "kprof", None),
        (2, None, MANY_TOKENS),
    ]


@pytest.mark.parametrize(
    ("options", "shape", "why"),
    [
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool)}, {}, OTHERWISE),
        ({"dropout_p": 0.5}, {}, OTHERWISE),
        ({"scale": -0.3}, {}, "a scale of -0.3"),
        ({}, {"tokens": 8}, FEW_TOKENS),
        # Its last queries would see all keys.
        ({"is_causal": True}, {"keys": 12}, "tokens than keys"),
        ({}, {"dim": 48}, "heads of 48"),
    ],
)
def test_calls_with_what_the_kernel_does_not_have_go_to_torch(options, shape, why):
    module, call = Attention(**options), call_of(**shape)
    torch.manual_seed(3)
    wanted = module(*call)
    with torch.no_grad(), swapped(module, KERNEL) as swap:
        torch.manual_seed(3)
        assert torch.equal(module(*call), wanted)
    ((num_calls, provider, found),) = ways_of(swap)
    assert (num_calls, provider) == (1, None)
    assert why in found


def test_another_scale_is_the_kernels_but_not_in_less_precision():
    module, call = Attention(scale=0.3), call_of()
    wanted = module(*call)
    with torch.no_grad(), swapped(module, "attention_fp8=eager", KERNEL) as swap:
        torch.testing.assert_close(module(*call), wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(Attention()(*call), wanted, rtol=1e-3, atol=1e-3)
    assert ways_of(swap) == [(1, "kprof", None)]
    assert ways_of(swap, "attention_fp8") == [(1, None, OTHER_SCALE)]


@pytest.mark.parametrize("options", [{}, {"scale": 1 / 16}])
def test_calls_that_want_gradients_are_replaced_too(options):
    module, call = Attention(is_causal=True, **options), call_of()
    call = [one.requires_grad_() for one in call]
    wanted = torch.autograd.grad(module(*call).float().square().sum(), call)
    with swapped(module, KERNEL) as swap:
        found = torch.autograd.grad(module(*call).float().square().sum(), call)
    assert ways_of(swap) == [(1, "kprof", None)]
    for ours, torchs in zip(found, wanted, strict=True):
        assert not torch.equal(ours, torchs)
        torch.testing.assert_close(ours, torchs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("aot_eager", marks=COMPILED)], ids=["eager", "compiled"]
)
def test_under_autocast_the_kernel_computes_in_the_dtype_that_torch_would(mode):
    torch.compiler.reset()
    module, (q, k, v) = Attention(is_causal=True), call_of()
    # As rotary embeddings leave them.
    call = [q.float().requires_grad_(), k.float().requires_grad_(), v.requires_grad_()]
    with torch.autocast("cpu", torch.float16):
        wanted = module(*call)
        with swapped(module, KERNEL) as swap:
            run = module if mode == "eager" else torch.compile(module, backend=mode, fullgraph=True)
            found = run(*call)
    assert [one[:2] for one in ways_of(swap)] == [(1, "kprof")]
    assert found.dtype == wanted.dtype == torch.float16
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    gradients = [torch.autograd.grad(one.float().square().sum(), call) for one in (found, wanted)]
    for ours, torchs in zip(*gradients, strict=True):
        assert ours.dtype == torchs.dtype
        torch.testing.assert_close(ours, torchs, rtol=1e-2, atol=1e-2)


def test_under_autocast_what_no_kernel_takes_gets_the_same_from_torch():
    mask = torch.ones(20, 20, dtype=torch.bool)
    module, call = Attention(attn_mask=mask), [one.float() for one in call_of()]
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        wanted = module(*call)
        with swapped(module, KERNEL) as swap:
            assert torch.equal(module(*call), wanted)
    assert ways_of(swap) == [(1, None, OTHERWISE)]


def test_causal_calls_and_others_are_chosen_for_apart(monkeypatch):
    def fastest(self, kernel, x, shape):
        return "kprof" if shape == (1, 4, 2, 20, 20, 1, 64) else None

    monkeypatch.setattr(Providers, "_fastest", fastest)
    module, call = Attention(), call_of()
    with torch.no_grad(), swapped(module, "attention_forward") as swap:
        for is_causal in (True, False):
            module.options["is_causal"] = is_causal
            module(*call)
    assert ways_of(swap) == [(1, "kprof", None), (1, None, UNMEASURED)]


@COMPILED
@pytest.mark.parametrize(("name", "replaced"), [(KERNEL, True), ("attention_forward", False)])
def test_a_compiled_module_calls_the_kernel_that_was_asked_for(name, replaced):
    torch.compiler.reset()
    module, call = Attention(is_causal=True), call_of()
    wanted = module(*call)
    with torch.no_grad(), swapped(module, name) as swap:
        found = torch.compile(module, backend="aot_eager", fullgraph=True)(*call)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    ours = [one for site in swap.sites for one in site.calls if one.provider == "kprof"]
    assert [one.is_compiled for one in ours] == [True] * replaced


@COMPILED
def test_a_compiled_function_may_be_replaced_by_torchs_own():
    torch.compiler.reset()
    call = call_of(heads=4)

    def attend(*call):
        return functional.scaled_dot_product_attention(*call)

    wanted = attend(*call)
    with torch.no_grad(), swapped(None, "attention_forward=eager", "decode_attention"):
        found = torch.compile(attend, backend="aot_eager", fullgraph=True)(*call)
    assert torch.equal(found, wanted)


def test_a_pattern_is_for_each_kernel_of_a_place():
    modules = nn.ModuleList([Attention(), Attention()])
    call = call_of()
    with torch.no_grad(), swapped(modules, "attention_fp8=eager@0", f"{NAME}=eager") as swap:
        for module in modules:
            module(*call)
    told = {(site.name, site.kernel): site for site in swap.sites}
    assert told["0", "attention_fp8"].num_replaced == 1
    assert "not among those" in told["1", "attention_fp8"].skipped
    assert told["1", NAME].num_replaced == 1
