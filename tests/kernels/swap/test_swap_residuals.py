"""A sum and the norm after it in one call: layers that are taken and layers that are not."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as again

from kprof.kernels.swap.sites import residuals
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, INTERPRETED, compiled
from tests.kernels.swap_models import GemmaNorm, Mlp, Model, Norm, snapshot, tokens

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


class CountingLayer(Layer):
    num_calls = 0

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        self.num_calls += 1
        return x + y


class BranchingLayer(Layer):
    """As in GPT-2: another branch between the sum and its norm, seldom taken."""

    def forward(self, x, memory=None):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        if memory is not None:
            x = x + memory
        residual = x
        x = self.post_attention_layernorm(x)
        return residual + self.mlp(x)


class CastingLayer(Layer):
    """Calls a method of the norm's result, on one line with the norm."""

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x).to(torch.float32).mul(2.0))


class TwoSumsLayer(Layer):
    def __init__(self, size=16):
        super().__init__(size)
        self.last_norm = Norm(size)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.last_norm(x)


class PostNormLayer(nn.Module):
    """As in BERT: norms of sums that nothing else sees, with dropouts before them."""

    def __init__(self, size=16):
        super().__init__()
        self.dense, self.output = nn.Linear(size, size), nn.Linear(size, size)
        self.dropout = nn.Dropout(0.1)
        self.norm_1, self.norm_2 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x):
        x = self.norm_1(self.dropout(self.dense(x)) + x)
        return self.norm_2(x + self.dropout(self.output(x)))


class NestedLayer(PostNormLayer):
    def forward(self, x):
        return self.norm_2(self.output(self.norm_1(x + self.dense(x))) + x)


class OnePlusLayer(PostNormLayer):
    """Adds what is no tensor, and a product that is assigned."""

    def forward(self, x):
        return self.norm_2(self.norm_1(x + 1) + (y := self.dense(x))) + y


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
    [
        *(Layer(), Layer(norm=nn.LayerNorm), Layer(norm=nn.RMSNorm), GemmaLayer()),
        *(ScalingLayer(), CountingLayer(), BranchingLayer(), CastingLayer()),
    ],
    ids=["llama", "layernorm", "torch", "gemma", "scaling", "counting", "branching", "casting"],
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


@pytest.mark.parametrize("layer", [PostNormLayer(), NestedLayer()], ids=["bert", "nested"])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_norms_argument_that_is_a_sum_is_added_by_its_kernel(layer, is_training):
    layer.train(is_training)
    x = x_of()
    torch.manual_seed(3)
    expected, drawn = gradients(layer, x), torch.rand(4)
    before = snapshot(layer)
    with swapped(layer, *EAGER) as swap:
        torch.manual_seed(3)
        assert_same(gradients(layer, x), expected)
        # As many random numbers were drawn.
        assert torch.equal(torch.rand(4), drawn)
    assert snapshot(layer) == before
    assert [(site.kernel, site.what, site.num_replaced) for site in swap.sites] == [
        ("add_layernorm", f"{type(layer).__name__}: {norm}", 1) for norm in NORMS_OF[type(layer)]
    ]


NORMS_OF = {PostNormLayer: ("norm_1", "norm_2"), NestedLayer: ("norm_2", "norm_1")}


class AttendingLayer(PostNormLayer):
    """As in ALBERT: attention, and the norm of a sum."""

    def forward(self, x):
        attended = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.norm_1(x + self.dense(attended))


def test_a_layer_that_attends_itself_is_left_to_the_kernel_of_attention():
    with swapped(AttendingLayer(), *EAGER, "attention_forward=eager") as swap:
        pass
    assert {site.kernel: site.skipped is None for site in swap.sites} == {
        "add_layernorm": False,
        "attention_forward": True,
    }
    with swapped(AttendingLayer(), *EAGER) as swap:
        pass
    assert [site.skipped for site in swap.sites] == [None]


class FeedForward(PostNormLayer):
    """As in BART: a GELU behind a linear layer, and the norm of a sum."""

    def __init__(self, size=16):
        super().__init__(size)
        self.act = nn.GELU()

    def forward(self, x):
        residual = x
        x = residual + self.output(self.act(self.dense(x)))
        return self.norm_1(x)


class PostNormFeedForward(FeedForward):
    def forward(self, x):
        return self.norm_1(self.output(self.act(self.dense(x))) + x)


@pytest.mark.parametrize("layer", [FeedForward(), PostNormFeedForward()], ids=["bart", "inside"])
def test_a_sum_and_a_bias_of_one_forward_are_both_replaced(layer):
    x = x_of()
    expected = gradients(layer, x)
    before = snapshot(layer)
    with swapped(layer, *EAGER, "bias_gelu=eager") as swap:
        for one, other in zip(gradients(layer, x), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert snapshot(layer) == before
    found = {site.kernel: site.num_replaced for site in swap.sites}
    assert found == {"add_layernorm": 1, "bias_gelu": 1}


def test_torchs_own_layer_adds_and_norms_at_once():
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), x_of()
    expected = gradients(layer, x)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients(layer, x), expected)
    assert {site.what: site.num_replaced for site in swap.sites if site.num_replaced} == {
        "TransformerEncoderLayer: norm1": 1,
        "TransformerEncoderLayer: norm2": 1,
    }


def test_an_argument_that_is_no_sum_of_two_tensors_is_added_by_torch():
    layer, x = OnePlusLayer(), x_of()
    expected = gradients(layer, x)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients(layer, x), expected)
    assert [site.num_fallen_back for site in swap.sites] == [1]


@INTERPRETED
@pytest.mark.parametrize("layer", [Layer(), PostNormLayer().eval()], ids=["llama", "bert"])
def test_our_own_kernel_agrees(layer):
    x = x_of()
    expected = gradients(layer, x)
    with swapped(layer, "add_rmsnorm", "add_layernorm") as swap:
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


def test_a_layer_that_norms_its_input_twice_is_no_site():
    with swapped(ParallelLayer(), *EAGER) as swap:
        pass
    assert swap.sites == ()


def test_another_branch_between_a_sum_and_its_norm_gets_what_it_asks_for():
    layer, x = BranchingLayer(), x_of()
    memory = torch.ones(16)
    wanted = layer(x, memory)
    with swapped(layer, *EAGER) as swap:
        assert torch.equal(layer(x, memory), wanted)
        assert swap.sites[0].calls == ()
        layer(x)
    assert swap.sites[0].num_replaced == 1


def test_each_sum_of_a_layer_is_a_part_of_its_site():
    layer, x = TwoSumsLayer(), x_of()
    expected = gradients(layer, x)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients(layer, x), expected)
    assert [(site.what, site.num_replaced) for site in swap.sites] == [
        ("TwoSumsLayer: post_attention_layernorm", 1),
        ("TwoSumsLayer: last_norm", 1),
    ]


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


class Keeping(Layer):
    """Keeps its sum where anybody can see it."""

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        kept.append(x)
        return x + self.mlp(self.post_attention_layernorm(x))


kept = []


class KeepingLater(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        kept.append([x])
        return x + y


class Returning(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        return {"y": x + y, "sums": [x]}


class Hooked(Layer):
    """Its sum has a hook: gradients of the sum are those of all that is made of it."""

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x + y


class InPlace(Layer):
    def forward(self, x):
        x = x.clone()
        x += self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class InPlaceLater(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        residual = x + 0
        x[..., 0] = 0
        return residual + y


class InNoGrad(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        with torch.no_grad():
            normed = self.post_attention_layernorm(x)
        return x + self.mlp(normed)


class Checkpointing(Layer):
    def rest(self, x):
        return self.mlp(self.post_attention_layernorm(x))

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return x + again(self.rest, x, use_reentrant=True)


class Calling(Layer):
    """As a mixture with a block of its own."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Closing(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        return (lambda: x + y)()


class Typed(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        if not torch.is_tensor(x):
            raise TypeError
        return x + self.mlp(self.post_attention_layernorm(x))


class Looping(Layer):
    def forward(self, x):
        for _ in range(2):
            y = x
            x = x + self.self_attn(self.input_layernorm(x))[0]
            x = x + self.mlp(self.post_attention_layernorm(x))
            kept.append(y)
        return x


class Looking(Layer):
    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        y = self.mlp(self.post_attention_layernorm(x))
        return locals()["x"] + y


BETWEEN, BESIDE = (
    reason.partition(" (line")[0] for reason in (residuals.BETWEEN, residuals.BESIDE)
)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        *((Keeping, BETWEEN), (KeepingLater, BESIDE), (Returning, BESIDE), (Hooked, BESIDE)),
        *((InPlace, residuals.IN_PLACE), (InPlaceLater, BESIDE), (InNoGrad, BETWEEN)),
        *((Checkpointing, residuals.ELSEWHERE), (Calling, residuals.ELSEWHERE)),
        *((Closing, BESIDE), (Typed, BETWEEN), (Looking, residuals.LOCALS)),
    ],
)
def test_a_layer_that_does_more_with_its_sum_is_left_alone(layer, why):
    torch.manual_seed(0)
    with swapped(layer(), *EAGER) as swap:
        pass
    ((site,), ()) = swap.skipped, swap.replaced
    assert site.skipped.startswith(why)


def test_a_loop_whose_sums_are_kept_nowhere_is_taken():
    layer, x = Looping(), x_of()
    expected = gradients(layer, x)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients(layer, x), expected)
    assert [site.num_replaced for site in swap.sites] == [2]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.1 * gradient


class Scaled(Layer):
    def forward(self, x):
        x = x + Scale.apply(self.self_attn(self.input_layernorm(x))[0])
        return x + again(self.mlp, self.post_attention_layernorm(x), use_reentrant=True)


def test_a_function_of_autograd_around_a_part_keeps_its_gradients():
    layer, x = Scaled(), x_of()
    expected = gradients_by_backward(layer, x)
    with swapped(layer, *EAGER) as swap:
        assert_same(gradients_by_backward(layer, x), expected)
    assert [site.num_replaced for site in swap.sites] == [1]


def gradients_by_backward(layer, x):
    layer.zero_grad()
    x.grad = None
    layer(x).square().sum().backward()
    return [x.grad, *(one.grad for one in layer.parameters())]


class Private(Layer):
    """Has a private name, a closure, defaults and keywords."""

    def __init__(self, size=16):
        super().__init__(size)
        self.__scale = 2.0

    def forward(self, x, /, scale=1.0, *, shift: float = 0.5, **others):
        x = x + scale * self.self_attn(self.input_layernorm(x))[0] * self.__scale
        return torch.add(x, self.mlp(self.post_attention_layernorm(x))) + shift


def test_names_defaults_and_keywords_of_a_forward_stay():
    layer, x = Private(), x_of()
    wanted = layer(x), layer(x, 3.0, shift=1.0, more=1)
    with swapped(layer, *EAGER) as swap:
        assert_same((layer(x), layer(x, 3.0, shift=1.0, more=1)), wanted)
    assert swap.sites[0].skipped is not None


def test_a_forward_without_source_is_left_alone():
    names = {"Layer": Layer}
    exec(
        "class Hidden(Layer):\n"
        "    def forward(self, x):\n"
        "        x = x + self.self_attn(self.input_layernorm(x))[0]\n"
        "        return x + self.mlp(self.post_attention_layernorm(x))\n",
        names,
    )
    with swapped(names["Hidden"](), *EAGER) as swap:
        pass
    assert swap.skipped[0].skipped == residuals.NO_SOURCE


def test_a_global_that_is_patched_within_the_swap_counts_at_once(monkeypatch):
    layer, x = Scaled(), x_of()
    with swapped(layer, *EAGER):
        layer(x)
        monkeypatch.setattr(Scale, "apply", lambda x: 0 * x)
        inside = layer(x)
    assert torch.equal(inside, layer(x))


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


@pytest.mark.parametrize("norm", [Norm, nn.LayerNorm])
def test_under_autocast_a_wide_residual_and_a_narrow_branch_are_added(norm):
    torch.manual_seed(0)
    layer = Layer(norm=norm)
    found = []
    for kernels in (None, EAGER):
        layer.zero_grad()
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if kernels is None:
                y = layer(x)
            else:
                with swapped(layer, *kernels) as swap:
                    y = layer(x)
        y.sum().backward()
        found.append([y, x.grad, *(one.grad for one in layer.parameters())])
    assert sum(one.num_replaced for one in swap.sites) == 1
    for new, old in zip(*found, strict=True):
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, old, rtol=2e-2, atol=2e-2)
