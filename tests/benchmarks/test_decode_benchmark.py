"""`benchmarks/decode_attention.py`: what it takes for right, and which sources it depends on."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import importlib
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kprof.kernels.decode_attention.decode_attention import KERNEL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("decode_attention")


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_right_is_attention_whose_last_token_sees_all_keys(benchmark, tokens):
    q, k, v = (
        torch.randn(2, 32, tokens, 128),
        torch.randn(2, 8, 20, 128),
        torch.randn(2, 8, 20, 128),
    )
    expected = KERNEL.truth(q.double(), k.double(), v.double()).float()
    torch.testing.assert_close(benchmark.in_float32(q, k, v), expected, rtol=1e-4, atol=1e-5)


def test_torch_is_given_the_same_mask(benchmark):
    seen = benchmark.seen_by_last(2, 4, "cpu")
    assert seen.tolist() == [[True, True, True, False], [True, True, True, True]]
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 4, 8)
    first = functional.scaled_dot_product_attention(q, k, k, attn_mask=seen)[:, :, :1]
    alone = functional.scaled_dot_product_attention(q[:, :, :1], k[:, :, :3], k[:, :, :3])
    torch.testing.assert_close(first, alone)


def test_rows_are_called_after_all_that_a_call_is(benchmark):
    names = [one.name for one in benchmark.CALLS]
    assert len(set(names)) == len(names)
    assert {"256x1024", "32x4096-paged-fp8", "1x4096-4tokens"} <= set(names)
