"""The sum before a norm in one pass with it: layers as people write them, and what they do else."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kprof.sites._promise import Promise
from kprof.swap import swapped
from tests.kernel_checks import COMPILED, INTERPRETED, compiled
from tests.swap_models import GemmaNorm, Mlp, Model, Norm, snapshot, tokens

EAGER = ("add_rmsnorm=eager", "add_layernorm=eager")


class Attention(nn.Module):
    """As in Hugging Face: its result, and nothing beside it."""

    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.proj(hidden_states), None


class Layer(nn.Module):
    """As in a Llama of Hugging Face."""

    def __init__(self, size=16, norm=Norm):
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = Mlp(size)
        self.input_layernorm = norm(size)
        self.post_attention_layernorm = norm(size)

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=None)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class GemmaLayer(Layer):
    """As in Gemma 2: what is added is a norm's result."""

    def __init__(self, size=16):
        super().__init__(size, GemmaNorm)
        self.pre_feedforward_layernorm = GemmaNorm(size)

    def forward(self, x):
        attended, _ = self.self_attn(self.input_layernorm(x))
        x = x + self.post_attention_layernorm(attended)
        return x + self.mlp(self.pre_feedforward_layernorm(x))


class ParallelLayer(Layer):
    """As in GPT-J: there is nothing to norm but what came in."""

    def forward(self, x):
        normed = self.input_layernorm(x)
        return x + self.self_attn(normed)[0] + self.mlp(self.post_attention_layernorm(x))


class ScalingLayer(Layer):
    def forward(self, x):
        x = x + 0.5 * self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class LookingLayer(Layer):
    """Looks at what it adds and at the sum, in ways that were not there when it was probed."""

    looks = False

    def forward(self, x):
        attended, _ = self.self_attn(self.input_layernorm(x))
        if self.looks:
            attended = 2 * attended.clamp(-1, 1) - torch.abs(attended)
        x = x + attended
        if self.looks:
            x = torch.where(x > 0, x, -x[..., :16])
        return x + self.mlp(self.post_attention_layernorm(x)), x


class CountingLayer(Layer):
    def forward(self, x):
        self.num_calls = 1
        return super().forward(x)


def x_of(size=16):
    return torch.randn(2, 5, size, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model, x):
    found = model(x)
    found = found[0] if isinstance(found, tuple) else found
    parameters = [one for one in model.parameters() if one.requires_grad]
    return [found, *torch.autograd.grad(found.square().sum(), [x, *parameters], allow_unused=True)]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize(
    "layer",
    [Layer(), Layer(norm=nn.LayerNorm), Layer(norm=nn.RMSNorm), GemmaLayer(), LookingLayer()],
    ids=["llama", "layernorm", "torch", "gemma", "looking"],
)
def test_the_sum_and_its_norm_are_one_call_with_the_same_results(layer):
    x = x_of()
    expected = gradients(layer, x)
    before = snapshot(layer)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients(layer, x), expected)
    assert snapshot(layer) == before
    ((site,), ()) = swap.replaced, swap.skipped
    assert (site.num_replaced, site.num_fallen_back) == (1, 0)
    assert site.kernel == (
        "add_layernorm" if layer.input_layernorm.__class__ is nn.LayerNorm else "add_rmsnorm"
    )


@INTERPRETED
def test_our_own_kernel_agrees():
    layer, x = Layer(), x_of()
    expected = gradients(layer, x)
    with swapped(layer, "add_rmsnorm") as swap:
        for one, other in zip(gradients(layer, x), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert swap.replaced[0].calls[0].provider == "kprof"


def test_every_layer_of_a_model_is_a_site_beside_its_norms_and_mlps():
    model = Model()
    expected = model(tokens())
    with swapped(model, "add_rmsnorm=eager", "rmsnorm=eager", "swiglu=eager", "rope=eager") as swap:
        assert torch.equal(model(tokens()), expected)
    names = [site.name for site in swap.replaced if site.kernel == "add_rmsnorm"]
    assert names == ["layers.0", "layers.1"]


@pytest.mark.parametrize("layer", [ParallelLayer(), ScalingLayer()], ids=["parallel", "scaling"])
def test_a_layer_that_norms_something_else_is_no_site(layer):
    with swapped(layer, *EAGER) as swap:
        layer(x_of())
    assert swap.sites == ()


def test_a_layer_that_writes_attributes_is_left_alone():
    with swapped(CountingLayer(), *EAGER) as swap:
        pass
    assert "writes attributes" in swap.skipped[0].skipped


def test_who_looks_at_the_sum_or_at_what_is_added_finds_a_tensor():
    layer, x = LookingLayer(), x_of()
    with swapped(layer, *EAGER) as swap:
        assert [type(one) for one in layer(x)] == [torch.Tensor, torch.Tensor]
        layer.looks = True
        looking = layer(x)
    for one, other in zip(looking, layer(x), strict=True):
        assert type(one) is torch.Tensor
        assert torch.equal(one, other)
    assert swap.sites[0].num_replaced == 1


def test_hooks_see_tensors():
    layer, x = Layer(), x_of()
    seen = []
    for module in (layer, layer.self_attn, layer.post_attention_layernorm):
        module.register_forward_hook(lambda module, given, result: seen.append((given, result)))
    layer(x)
    expected, seen[:] = list(seen), []
    with swapped(layer, *EAGER):
        layer(x)
    assert [len(given) for given, _ in seen] == [len(given) for given, _ in expected]
    for (_, one), (_, other) in zip(seen, expected, strict=True):
        one, other = (o[0] if isinstance(o, tuple) else o for o in (one, other))
        assert torch.equal(one, other)


def test_what_cannot_be_added_in_one_pass_falls_back():
    layer = Layer().half()
    x = x_of().detach()
    layer.self_attn.double()
    layer.mlp.double()
    layer.input_layernorm.double()
    with swapped(layer, *EAGER) as swap:
        found = layer(x.double())
    assert torch.equal(found, layer(x.double()))
    assert swap.sites[0].num_fallen_back == 1


def test_a_checkpointed_layer_has_the_same_gradients():
    layer, x = Layer(), x_of()
    expected = gradients(layer, x)
    with swapped(layer, *EAGER) as swap:
        y = checkpoint(layer, x, use_reentrant=False)
        found = [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    assert_same(found, expected)
    assert swap.sites[0].num_replaced == 2


@COMPILED
def test_a_compiled_layer_runs_the_original_in_one_graph():
    layer, x = Layer(), x_of()
    with swapped(layer, *EAGER) as swap:
        assert torch.equal(compiled(layer)(x), layer(x))
    compiled_calls = [one for one in swap.sites[0].calls if one.is_compiled]
    assert [one.provider for one in compiled_calls] == [None]


class Asking(Layer):
    """Looks at its sum before it norms it, where nobody wants gradients, and keeps what it saw."""

    def note(self, x):
        self.seen = x.abs().mean()

    def forward(self, hidden_states):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        with torch.no_grad():
            self.note(hidden_states)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_a_sum_that_was_looked_at_without_gradients_has_them_all_the_same():
    layer, x = Asking(), tokens().float()[..., None].expand(-1, -1, 16).clone().requires_grad_()
    layer(x).sum().backward()
    wanted = [x.grad, *(one.grad for one in layer.parameters())]
    seen, x.grad = layer.seen, None
    layer.zero_grad()
    layer.seen = None
    with swapped(layer, *EAGER) as swap:
        layer(x).sum().backward()
    found = [x.grad, *(one.grad for one in layer.parameters())]
    for new, old in zip(found, wanted, strict=True):
        torch.testing.assert_close(new, old)
    assert torch.equal(layer.seen, seen)
    assert [one.why for one in swap.sites[0].calls] == [
        "what it norms is no sum that nobody looked at before"
    ]


class InNoGrad(Layer):
    def forward(self, hidden_states):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        with torch.no_grad():
            normed = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp(normed)


def test_a_sum_that_is_normed_without_gradients_has_them_all_the_same():
    layer, x = InNoGrad(), torch.randn(2, 3, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    with swapped(layer, *EAGER):
        (found,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, wanted)


class Checkpointing(Layer):
    def forward(self, hidden_states):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + checkpoint(self.rest, hidden_states, use_reentrant=True)

    def rest(self, x):
        return self.mlp(self.post_attention_layernorm(x))


class Typed(Layer):
    def forward(self, hidden_states):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        assert isinstance(hidden_states, torch.Tensor)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Checkpointing, "its forward checkpoints a part of itself"),
        (Typed, "its forward asks of what type something is"),
    ],
)
def test_a_layer_that_could_tell_a_promise_from_a_tensor_is_left_alone(layer, why):
    with swapped(layer(), *EAGER) as swap:
        pass
    assert [site.skipped for site in swap.sites] == [why]


class Returning(Layer):
    def forward(self, hidden_states):
        attended, _ = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        normed = self.post_attention_layernorm(hidden_states)
        return {"y": self.mlp(normed), "sums": [hidden_states, (hidden_states,)]}


def test_what_is_returned_within_something_is_a_tensor():
    layer, x = Returning(), torch.randn(2, 3, 16)
    wanted = layer(x)
    with swapped(layer, *EAGER) as swap:
        found = layer(x)
    assert swap.sites[0].num_replaced == 1
    assert type(found["sums"][0]) is type(found["sums"][1][0]) is torch.Tensor
    torch.testing.assert_close(found, wanted)


def test_a_norm_that_is_exchanged_or_patched_is_called():
    layer, x = Layer(), torch.randn(2, 3, 16)
    with swapped(layer, *EAGER) as swap:
        layer(x)
        layer.post_attention_layernorm.forward = torch.tanh
        patched = layer(x)
        layer.post_attention_layernorm = nn.Identity()
        exchanged = layer(x)
    assert torch.equal(exchanged, layer(x))
    layer.post_attention_layernorm.forward = torch.tanh
    torch.testing.assert_close(patched, layer(x))
    assert [one.num_calls for one in swap.sites[0].calls] == [1, 1, 1]


def test_sums_compare_and_count_as_tensors_do():
    promise = Promise(torch.tensor([1.0, -2.0]), torch.tensor([1.0, 1.0]))
    assert (promise == 2).tolist() == [True, False]
    assert (promise != 2).tolist() == [False, True]
    assert abs(promise).tolist() == [2.0, 1.0]
    assert (promise // 2).tolist() == [1.0, -1.0]
    promise[0] = 7.0
    assert promise.tensor().tolist() == [7.0, -1.0]
    assert promise in {promise}


def test_what_a_hook_writes_to_a_layer_stays():
    layer, x = Layer(), torch.randn(2, 3, 16)
    layer.seen = 0

    def note(*_):
        layer.seen = layer.seen + 1

    layer.self_attn.register_forward_hook(note)
    with swapped(layer, *EAGER):
        layer(x)
        layer(x)
    assert layer.seen == 2


def test_a_norm_that_was_pickled_within_a_swap_is_passed_over():
    layer, x = Layer(), torch.randn(2, 3, 16)
    with swapped(layer, "rmsnorm=eager"):
        copied = pickle.loads(pickle.dumps(layer))
    with swapped(copied, *EAGER) as swap:
        copied(x)
    assert [site.num_replaced for site in swap.replaced] == [1]
