"""Rotations of any signature: which are recognised, and what their calls compute."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kprof.kernels.swap.reads import COMPARES
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, INTERPRETED

pytestmark = INTERPRETED
HEADS, COLUMNS, TOKENS = 2, 8, 5


def turned(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def turned_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def rope_alone(x, cos, sin):
    """One tensor, and a table of angles that is longer than the text."""
    tokens = x.shape[2]
    cos, sin = cos[:tokens].unsqueeze(0).unsqueeze(0), sin[:tokens].unsqueeze(0).unsqueeze(0)
    return (x * cos + turned(x) * sin).to(x.dtype)


def rope_pairs(q, k, cos, sin):
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + turned_pairs(q) * sin, k * cos + turned_pairs(k) * sin


def rope_wide(q, k, cos, sin):
    cos, sin, dtype = cos[:, None], sin[:, None], q.dtype
    q, k = q.float(), k.float()
    q, k = q * cos + turned_pairs(q) * sin, k * cos + turned_pairs(k) * sin
    return q.to(dtype), k.to(dtype)


def rope_sin_first(x, sin, cos):
    """Tokens before heads, one angle for each pair."""
    cos, sin = (one[:, :, None].repeat_interleave(2, dim=-1) for one in (cos, sin))
    return x * cos + turned_pairs(x) * sin


def rope_complex(xq, xk, freqs_cis):
    freqs_cis = freqs_cis[None, :, None]
    q, k = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (xq, xk))
    q, k = (torch.view_as_real(one * freqs_cis).flatten(3) for one in (q, k))
    return q.type_as(xq), k.type_as(xk)


def rope_by_dimensions(x, cos, sin):
    """Compares numbers of dimensions, as LitGPT does."""
    missing = x.dim() - cos.dim()
    if missing > 0:
        shape = cos.shape[:1] + (1,) * missing + cos.shape[1:]
        cos, sin = cos.view(*shape), sin.view(*shape)
    return (x * cos + turned(x) * sin).to(x.dtype)


def rope_checking(xq, xk, freqs_cis):
    """Checks a number of dimensions by an order, as the first Llama does."""
    num_dims = xq.ndim
    if not 0 <= 1 < num_dims:
        raise ValueError(num_dims)
    kept = [size if i in (1, num_dims - 1) else 1 for i, size in enumerate(xq.shape)]
    return rope_complex(xq, xk, freqs_cis.view(kept[1], -1))


def rope_neighbours(x, freqs_cis):
    """Cosine and sine are neighbours, as in gpt-fast, and float32 beside 16 bits."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = freqs_cis.float()[None, :, None].unbind(-1)
    real, other = pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos
    return torch.stack((real, other + pairs[..., 0] * sin), dim=-1).flatten(3).type_as(x)


def rope_from_pairs(q, k, cos, sin):
    """Neighbours come out as halves, as in DeepSeek."""
    half = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]

    def turn(x):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    return turn(q), turn(k)


def rope_backwards(x, cos, sin):
    return rope_alone(x, cos, -sin)


def rope_clamped(x, cos, sin):
    return rope_alone(x, cos, sin).clamp(-1e4, 1e4)


def rope_detached(x, cos, sin):
    return rope_alone(x.detach() + 0 * x, cos, sin)


def rope_long(x, cos, sin):
    return rope_alone(x, cos, sin) * (1 + (len(x[0, 0]) // 1_000))


def rope_comparing(x, cos, sin):
    return rope_alone(x, cos, sin) if x.shape[2] > 0 else x


def rope_of_many(x, cos, sin):
    return rope_alone(x, cos, sin) if len(x) > 0 and x.dim() > 2 else x


def rope_of_least(x, cos, sin):
    least = min(x.shape[2], 2_000)
    return rope_alone(x, cos, sin)[:, :, :least]


def rope_of_number(x, cos, sin):
    return rope_alone(x, cos, sin) if int(x.size(2)) < 2_000 else x


def rope_of_tokens(x, cos, sin):
    return rope_alone(x, cos, sin) if x.shape[2] * 2 - 1 < 4_000 else x


def rope_in_place(x, cos, sin):
    x.copy_(rope_alone(x, cos, sin))
    return x * 1


def full(*lead):
    return lambda: (torch.randn(*lead, COLUMNS), torch.randn(*lead, COLUMNS))


def halves(*lead):
    return lambda: (torch.randn(*lead, COLUMNS // 2), torch.randn(*lead, COLUMNS // 2))


def complex_numbers():
    return (torch.view_as_complex(torch.randn(TOKENS, COLUMNS // 2, 2)),)


def neighbours():
    return (torch.randn(TOKENS, COLUMNS // 2, 2),)


class Attention(nn.Module):
    """Queries and keys, rotated by a function of this module."""

    function, angles, is_token_first = None, None, False

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(COLUMNS, HEADS * COLUMNS) for _ in range(2))

    def heads(self, x):
        found = [one(x).unflatten(-1, (HEADS, COLUMNS)) for one in (self.q, self.k)]
        return found if self.is_token_first else [one.transpose(1, 2) for one in found]


class Alone(Attention):
    angles = staticmethod(full(TOKENS + 4))

    def forward(self, x, *angles):
        q, k = self.heads(x)
        return rope_alone(q, *angles) + rope_alone(k, *angles)


class Pairs(Attention):
    angles = staticmethod(full(2, TOKENS))

    def forward(self, x, *angles):
        q, k = rope_pairs(*self.heads(x), *angles)
        return q + k


class Wide(Attention):
    angles = staticmethod(full(1, TOKENS))

    def forward(self, x, *angles):
        q, k = rope_wide(*self.heads(x), *angles)
        return q + k


class SinFirst(Attention):
    angles, is_token_first = staticmethod(halves(2, TOKENS)), True

    def forward(self, x, *angles):
        q, k = self.heads(x)
        return rope_sin_first(q, *angles) + rope_sin_first(k, *angles)


class Complex(Attention):
    angles, is_token_first = staticmethod(complex_numbers), True

    def forward(self, x, *angles):
        q, k = rope_complex(*self.heads(x), *angles)
        return q + k


class ByDimensions(Attention):
    angles = staticmethod(full(1, TOKENS))

    def forward(self, x, *angles):
        q, k = self.heads(x)
        return rope_by_dimensions(q, *angles) + rope_by_dimensions(k, *angles)


class Checking(Complex):
    def forward(self, x, *angles):
        q, k = rope_checking(*self.heads(x), *angles)
        return q + k


class Neighbours(Attention):
    angles, is_token_first = staticmethod(neighbours), True

    def forward(self, x, *angles):
        q, k = self.heads(x)
        return rope_neighbours(q, *angles) + rope_neighbours(k, *angles)


class FromPairs(Attention):
    angles = staticmethod(full(1, TOKENS))

    def forward(self, x, *angles):
        q, k = rope_from_pairs(*self.heads(x), *angles)
        return q + k


class Backwards(Alone):
    def forward(self, x, *angles):
        return rope_backwards(self.heads(x)[0], *angles)


class Clamped(Alone):
    def forward(self, x, *angles):
        return rope_clamped(self.heads(x)[0], *angles)


class Detached(Alone):
    def forward(self, x, *angles):
        return rope_detached(self.heads(x)[0], *angles)


class Long(Alone):
    def forward(self, x, *angles):
        return rope_long(self.heads(x)[0], *angles)


class Comparing(Alone):
    def forward(self, x, *angles):
        return rope_comparing(self.heads(x)[0], *angles)


class OfMany(Alone):
    def forward(self, x, *angles):
        return rope_of_many(self.heads(x)[0], *angles)


class OfLeast(Alone):
    def forward(self, x, *angles):
        return rope_of_least(self.heads(x)[0], *angles)


class OfNumber(Alone):
    def forward(self, x, *angles):
        return rope_of_number(self.heads(x)[0], *angles)


class OfTokens(Alone):
    def forward(self, x, *angles):
        return rope_of_tokens(self.heads(x)[0], *angles)


class InPlace(Alone):
    def forward(self, x, *angles):
        return rope_in_place(self.heads(x)[0], *angles)


FORMS = (Alone, Pairs, Wide, SinFirst, Complex, ByDimensions, Checking, Neighbours, FromPairs)


def made(cls, dtype=torch.float32):
    torch.manual_seed(3)
    model, x = cls().to(dtype), torch.randn(2, TOKENS, COLUMNS, dtype=dtype)
    return model, (x, *(one if one.is_complex() else one.to(dtype) for one in cls.angles()))


def trained(model, given, run=None):
    result = model(*given) if run is None else run(*given)
    weights = torch.linspace(-1, 2, result.numel()).view(result.shape).to(result.dtype)
    return result, *torch.autograd.grad((result * weights).sum(), list(model.parameters()))


@pytest.mark.parametrize("cls", FORMS)
def test_a_rotation_of_each_form_is_swapped_with_its_gradients(cls):
    model, given = made(cls)
    wanted = trained(model, given)
    with swapped(model, "rope") as swap:
        found = trained(model, given)
    (site,) = swap.replaced
    assert site.num_replaced in (1, 2)
    assert site.num_fallen_back == 0
    assert [one.stride() for one in found] == [one.stride() for one in wanted]
    torch.testing.assert_close([*found], [*wanted])


@pytest.mark.parametrize("cls", FORMS)
def test_sixteen_bits_are_rounded_as_often_as_in_the_original(cls):
    model, given = made(cls, torch.float16)
    wanted = model(*given)
    with swapped(model, "rope") as swap:
        found = model(*given)
    assert swap.replaced
    assert torch.equal(found, wanted)


def test_angles_in_float32_beside_sixteen_bits_are_rounded_once():
    model, (x, *angles) = made(Alone, torch.float16)
    given = (x, *(one.float() for one in angles))
    wanted = model(*given)
    with swapped(model, "rope") as swap:
        found = model(*given)
    assert swap.sites[0].num_replaced == 2
    assert torch.equal(found, wanted)


def test_a_result_in_the_wider_dtype_stays_the_originals():
    model, (x, *angles) = made(Pairs, torch.float16)
    given = (x, *(one.float() for one in angles))
    with swapped(model, "rope") as swap:
        assert model(*given).dtype == torch.float32
    assert swap.sites[0].num_fallen_back == 1


def test_angles_of_another_shape_go_to_the_original():
    model, (x, cos, sin) = made(Alone)
    given = (x, cos[:1], sin[:1])
    wanted = model(*given)
    with swapped(model, "rope") as swap:
        assert torch.equal(model(*given), wanted)
    assert swap.sites[0].num_fallen_back == 2


@pytest.mark.parametrize("cls", [Backwards, Clamped, Detached, Long, InPlace])
def test_a_function_that_does_something_else_is_left_alone(cls):
    model, _ = made(cls)
    with swapped(model, "rope") as swap:
        pass
    assert swap.skipped
    assert not swap.replaced


@pytest.mark.parametrize("cls", [Comparing, OfMany, OfLeast, OfNumber, OfTokens])
def test_a_rotation_that_compares_sizes_has_this_as_its_reason(cls):
    model, _ = made(cls)
    with swapped(model, "rope") as swap:
        pass
    assert [site.skipped.partition(": ")[2] for site in swap.skipped] == [COMPARES]


@pytest.mark.parametrize("cls", [ByDimensions, Neighbours, Wide])
def test_angles_in_float32_are_taken_under_autocast_where_the_original_rounds_once(cls):
    model, given = made(cls)

    def cast(*given):
        with torch.autocast("cpu", torch.float16):
            return model(*given)

    wanted = trained(model, given, cast)
    with swapped(model, "rope") as swap:
        found = trained(model, given, cast)
    assert swap.sites[0].num_fallen_back == 0
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1:], wanted[1:], rtol=0.05, atol=0.05)


def test_a_deepseek_is_rotated_with_the_same_loss_and_gradients():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "n_routed_experts": 4}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = transformers.DeepseekV3Config(**sizes, intermediate_size=64, rope_interleave=True)
    torch.manual_seed(0)
    model, ids = transformers.DeepseekV3ForCausalLM(config), torch.arange(20).view(2, 10)
    wanted = model(ids, labels=ids).loss
    wanted.backward()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    with swapped(model, "rope") as swap:
        found = model(ids, labels=ids).loss
        found.backward()
    assert sum(site.num_replaced for site in swap.sites) == 1
    assert sum(site.num_fallen_back for site in swap.sites) == 0
    torch.testing.assert_close(found, wanted)
    again = [one.grad for one in model.parameters() if one.grad is not None]
    torch.testing.assert_close(again, gradients)


@pytest.mark.parametrize("cls", FORMS)
def test_checkpoints_autocast_and_inference_have_the_originals_results(cls):
    model, given = made(cls)

    def again(*given):
        return checkpoint(model, *given, use_reentrant=False)

    def cast(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*given)

    wanted = [trained(model, given, run) for run in (again, cast)]
    with swapped(model, "rope"):
        found = [trained(model, given, run) for run in (again, cast)]
        with torch.inference_mode():
            inferred = model(*given)
    torch.testing.assert_close(inferred, wanted[0][0].detach())
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=0.05, atol=0.05)
    assert [one.dtype for one in found[1]] == [one.dtype for one in wanted[1]]


def assert_compiled_it_is_one_graph(model, given, *, is_dynamic):
    torch.compiler.reset()
    wanted = trained(model, given)
    with swapped(model, "rope") as swap:
        graph = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
        found = trained(model, given, graph)
    torch.testing.assert_close([*found], [*wanted])
    assert [call.is_compiled for call in swap.sites[0].calls] == [True]
    assert swap.sites[0].calls[0].provider == "kprof"


@COMPILED
@pytest.mark.parametrize("cls", FORMS)
def test_compiled_it_is_one_graph_with_the_same_gradients(cls):
    assert_compiled_it_is_one_graph(*made(cls), is_dynamic=False)


@COMPILED
@pytest.mark.parametrize(("cls", "of_tokens"), [(Alone, [1]), (SinFirst, [1, 1, 1])])
def test_compiled_for_any_number_of_tokens_it_is_one_graph(cls, of_tokens):
    model, given = made(cls)
    for one, dimension in zip(given, of_tokens, strict=False):
        torch._dynamo.mark_dynamic(one, dimension)
    assert_compiled_it_is_one_graph(model, given, is_dynamic=None)


# Half a minute each: the compiler proves relations of all sizes.
@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("cls", [Alone, SinFirst])
def test_compiled_for_any_sizes_it_is_one_graph(cls):
    assert_compiled_it_is_one_graph(*made(cls), is_dynamic=True)
