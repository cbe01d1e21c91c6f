"""Our attention in torch's registry: torch's dispatcher calls it, until it is restored."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional

import kprof.flash
from kprof.errors import KprofError
from kprof.flash import FlashAttention, Operator, register_flash_attention
from kprof.kernels.attention_forward import attention_forward
from kprof.sites._providers import UNMEASURED
from tests.kernel_checks import INTERPRETED, quiet_numpy  # noqa: F401

attention = pytest.importorskip("torch.nn.attention")
pytestmark = [
    INTERPRETED,
    pytest.mark.skipif(
        not hasattr(attention, "register_flash_attention_impl"), reason="torch has no registry"
    ),
]


def _asked(q, k, v, dropout_p=0.0, is_causal=False, **options):
    return kprof.flash._asked(q, k, v, dropout_p, is_causal, options.get("scale"))


def _asked_back(dy, q, k, v, *others, **options):
    y, lse, dropout_p, is_causal = others
    about = (None, None, q.shape[2], k.shape[2], dropout_p, is_causal, None, None)
    return kprof.flash._flash_back(dy, q, k, v, y, lse, *about, scale=options.get("scale"))


# What torch calls on this machine.
ON_CPU = (
    Operator(
        "_scaled_dot_product_flash_attention_for_cpu", "CPU", _asked, lambda call, y, lse: (y, lse)
    ),
    Operator("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _asked_back, None),
)


OF_CUDA = kprof.flash.OPERATORS


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(kprof.flash, "OPERATORS", ON_CPU)
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def drawn(*shape, seed=0):
    """Return values that lie tokens first, as those of models do."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def call_of(tokens=20, keys=None):
    keys = tokens if keys is None else keys
    return drawn(1, 2, tokens, 64), drawn(1, 2, keys, 64, seed=1), drawn(1, 2, keys, 64, seed=2)


def attend(*call, **options):
    with torch.no_grad():
        return functional.scaled_dot_product_attention(*call, **options)


def ways_of(registered):
    (site,) = registered.report.sites
    return [(one.num_calls, one.provider, one.why) for one in site.calls]


@pytest.mark.parametrize("is_causal", [True, False])
def test_torchs_attention_is_ours_while_it_is_on(is_causal):
    call, registered = call_of(), register_flash_attention("kprof")
    wanted = attend(*call, is_causal=is_causal)
    assert ways_of(registered) == []
    attention.activate_flash_attention_impl("kprof")
    found = attend(*call, is_causal=is_causal)
    assert torch.equal(found, attention_forward(*call, is_causal=is_causal)[0])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert attention.current_flash_attention_impl() == "kprof"
    attention.restore_flash_attention_impl()
    assert torch.equal(attend(*call, is_causal=is_causal), wanted)
    assert ways_of(registered) == [(1, "kprof", None)]


def test_it_may_be_turned_on_again():
    call, registered = call_of(), register_flash_attention("kprof")
    for _ in range(2):
        attention.activate_flash_attention_impl("kprof")
        attend(*call)
        attention.restore_flash_attention_impl()
    assert ways_of(registered) == [(2, "kprof", None)]


def test_modules_of_torch_call_it():
    module = nn.MultiheadAttention(128, 2, batch_first=True).half().train()
    x = torch.randn(1, 20, 128).half()
    registered = register_flash_attention("kprof")
    attention.activate_flash_attention_impl("kprof")
    with torch.no_grad():
        module(x, x, x, need_weights=False)
    assert sum(calls for calls, _, _ in ways_of(registered)) == 1


def test_what_nobody_measured_goes_where_it_went():
    call, registered = call_of(), register_flash_attention()
    wanted = attend(*call)
    attention.activate_flash_attention_impl("kprof")
    assert torch.equal(attend(*call), wanted)
    assert ways_of(registered) == [(1, None, UNMEASURED)]


@pytest.mark.parametrize(
    ("call", "options", "why"),
    [
        (call_of(8), {}, "8 tokens or fewer"),
        (call_of(), {"scale": 0.3}, "another scale"),
        (call_of(20, 33), {"is_causal": True}, "causal, of more keys than queries or fewer"),
        (tuple(x.contiguous() for x in call_of()), {}, "queries that do not lie tokens first"),
    ],
)
def test_what_it_does_not_take_goes_where_it_went_and_is_counted(call, options, why):
    registered = register_flash_attention("kprof")
    wanted = attend(*call, **options)
    attention.activate_flash_attention_impl("kprof")
    assert torch.equal(attend(*call, **options), wanted)
    assert ways_of(registered) == [(1, None, why)]


def gradients_of(call, attend=functional.scaled_dot_product_attention):
    call = [one.detach().requires_grad_() for one in call]
    y = attend(*call, is_causal=True)
    # Of a sum of squares, so that what arrives depends on the result.
    return torch.autograd.grad(y, call, y.detach())


def test_gradients_are_ours_too():
    call, registered = call_of(), register_flash_attention("kprof")
    wanted = gradients_of(call)
    attention.activate_flash_attention_impl("kprof")
    found = gradients_of(call)
    attention.restore_flash_attention_impl()
    assert ways_of(registered) == [(2, "kprof", None)]
    for ours, torchs in zip(found, wanted, strict=True):
        assert ours.stride() == torchs.stride()
        assert not torch.equal(ours, torchs)
        torch.testing.assert_close(ours, torchs, rtol=1e-2, atol=1e-2)
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(call), wanted, strict=True))


def test_keys_that_lie_otherwise_leave_the_gradients_to_torch():
    (q, k, v), registered = call_of(), register_flash_attention("kprof")
    attention.activate_flash_attention_impl("kprof")
    found = gradients_of((q, k.contiguous(), v))
    torch.testing.assert_close(found[1], gradients_of((q, k, v))[1], rtol=1e-2, atol=1e-2)
    assert ways_of(registered) == [
        *[(3, "kprof", None), (1, None, "keys that do not lie tokens first")]
    ]


def test_gradients_that_nobody_measured_are_torchs():
    call, registered = call_of(), register_flash_attention()
    wanted = gradients_of(call)
    attention.activate_flash_attention_impl("kprof")
    found = gradients_of(call)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert ways_of(registered) == [(2, None, UNMEASURED)]


@pytest.mark.slow
def test_training_is_ours_in_a_compiled_graph():
    call, registered = call_of(), register_flash_attention("kprof")
    attention.activate_flash_attention_impl("kprof")
    wanted = gradients_of(call)
    torch._dynamo.reset()
    compiled = torch.compile(functional.scaled_dot_product_attention, backend="aot_eager")
    found = gradients_of(call, compiled)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert ways_of(registered) == [(4, "kprof", None)]


def test_a_provider_that_is_faster_leaves_the_call_to_torch(monkeypatch):
    monkeypatch.setattr("kprof.sites._providers.Providers._fastest", lambda *about: "sdpa-math")
    monkeypatch.setattr("kprof.sites._providers.Providers._runs", lambda *about: True)
    call, registered = call_of(), register_flash_attention()
    attention.activate_flash_attention_impl("kprof")
    attend(*call)
    assert ways_of(registered) == [(1, None, "sdpa-math was measured to be the fastest")]


def test_results_are_those_of_torchs_operators():
    call = (*call_of(), True, 0)
    y, lse = attention_forward(*call[:3])
    for operator in OF_CUDA:
        if operator.results is None:
            continue
        function = getattr(torch.ops.aten, operator.name).default
        more = (None, False) if "cudnn" in operator.name else ()
        wanted = function(*(x.to("meta") for x in call[:3]), *more, 0.0, True)
        found = operator.results(call, y, lse)
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert type(ours) is type(theirs)
            if isinstance(theirs, torch.Tensor):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert found[0].stride() == wanted[0].stride()


@pytest.mark.parametrize("operator", OF_CUDA, ids=lambda one: one.name)
def test_calls_are_read_by_the_names_that_torch_has(operator):
    schema = getattr(torch.ops.aten, operator.name).default._schema
    ours = list(inspect.signature(operator.asked).parameters)
    assert ours == [one.name for one in schema.arguments]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, None),
        ({"attn_bias": torch.zeros(1)}, "a mask"),
        ({"compute_log_sumexp": True}, "gradients are asked for"),
        ({"dropout_p": 0.1}, "dropout"),
    ],
)
def test_cudnns_calls_are_taken_without_masks_dropout_and_gradients(options, why):
    call = {"attn_bias": None, "compute_log_sumexp": False, **options}
    found = kprof.flash._cudnn(*call_of(), **call)
    assert found == why if why else isinstance(found, tuple)


def test_other_providers_cannot_be_registered():
    with pytest.raises(KprofError, match="sdpa-cudnn cannot be registered"):
        register_flash_attention("sdpa-cudnn")


def test_without_a_registry_it_says_what_to_do(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(KprofError, match="no registry") as caught:
        register_flash_attention()
    assert "swapped" in caught.value.fix


def test_the_registry_knows_it_by_the_name_of_kprof():
    assert isinstance(register_flash_attention("kprof"), FlashAttention)
    assert "kprof" in attention.list_flash_attention_impls()
