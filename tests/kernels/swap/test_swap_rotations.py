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


def rope_in_place(x, cos, sin):
    x.copy_(rope_alone(x, cos, sin))
    return x * 1


def full(*lead):
    return lambda: (torch.randn(*lead, COLUMNS), torch.randn(*lead, COLUMNS))


def halves(*lead):
    return lambda: (torch.randn(*lead, COLUMNS // 2), torch.randn(*lead, COLUMNS // 2))


def complex_numbers():
    return (torch.view_as_complex(torch.randn(TOKENS, COLUMNS // 2, 2)),)


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


class InPlace(Alone):
    def forward(self, x, *angles):
        return rope_in_place(self.heads(x)[0], *angles)


FORMS = (Alone, Pairs, Wide, SinFirst, Complex)


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


def test_a_rotation_that_compares_sizes_has_this_as_its_reason():
    model, _ = made(Comparing)
    with swapped(model, "rope") as swap:
        pass
    assert [site.skipped for site in swap.skipped] == [f"rope_comparing: {COMPARES}"]


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
