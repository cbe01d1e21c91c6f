"""What attention of many queries is measured and judged against: torch's own, where it is right."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch
from torch.nn import functional

from kprof.kernels.attention.attention_forward import KERNEL

ATTEND = functional.scaled_dot_product_attention


def call_of(queries, keys, heads=2):
    made = torch.Generator().manual_seed(0)
    shapes = ((1, heads, queries, 16), (1, 1, keys, 16), (1, 1, keys, 16))
    return [torch.randn(shape, generator=made).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "window"),
    [(9, 9, True, 0), (5, 9, True, 0), (9, 5, True, 0), (9, 9, False, 3), (30, 5, False, 2)],
)
def test_it_is_the_mathematics(queries, keys, is_causal, window):
    call = call_of(queries, keys)
    exact = [one.detach().double().requires_grad_() for one in call]
    y = KERNEL.reference(*call, is_causal, window)
    expected = KERNEL.truth(*exact, is_causal, window)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(y.sum(), call)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_no_query_is_left_without_any_key_to_torch(monkeypatch):
    def attend(*tensors, attn_mask, **options):
        assert attn_mask.any(-1).all()
        return ATTEND(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    y = KERNEL.reference(*call_of(9, 5))
    assert not y[:, :, :4].any()
    assert y[:, :, 4:].any(-1).all()


def test_what_arrives_at_torchs_backward_pass_lies_as_the_results_do(monkeypatch):
    arrived = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            arrived.append(gradient.stride())
            return gradient

    attend = lambda *tensors, **options: Watched.apply(ATTEND(*tensors, **options))  # noqa: E731
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    call = call_of(4, 4)
    y = KERNEL.reference(*call)
    plain = torch.randn(y.shape)
    turned = plain.transpose(1, 2).contiguous().transpose(1, 2)
    found = [torch.autograd.grad(y, call, dy, retain_graph=True) for dy in (plain, turned)]
    torch.autograd.grad(y, call, torch.ones(()).expand(y.shape))
    assert arrived == 3 * [y.stride()]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
