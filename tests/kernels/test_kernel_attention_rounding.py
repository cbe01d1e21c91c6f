"""Rounding to FP8 for attention: scales, how it is laid out, and who waits for whom."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import InterpreterError, interpreter_builder

from kprof.kernels.attention import attention_fp8
from kprof.kernels.attention.attention_fp8 import quantize_heads
from tests.kernels.kernel_checks import INTERPRETED
from tests.kernels.test_kernel_attention_hopper import order_of

BLOCK, APART = 128, 3


def whole(*shape, largest, seed=0):
    """Return whole numbers of heads whose largest is this, so that nothing is rounded."""
    numbers = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    numbers[:, :, -1, 0] = -448
    return (numbers * (largest / 448)).bfloat16()


def given(queries=200, keys=140, heads=4, group=2, dim=64):
    q = whole(2, heads, queries, dim, largest=448)
    k = whole(2, heads // group, keys, dim, largest=896, seed=1)
    v = whole(2, heads // group, keys, dim, largest=56, seed=2)
    return q, k, v


def as_laid_out(v):
    """Return values as the kernel for Hopper takes them."""
    batch, heads, keys, dim = v.shape
    blocks = -(-keys // BLOCK)
    padded = torch.nn.functional.pad(v, (0, 0, 0, blocks * BLOCK - keys))
    ordered = padded[:, :, order_of(blocks * BLOCK)].view(batch, heads, blocks, BLOCK, dim)
    return ordered.transpose(3, 4).reshape(batch, heads, blocks * dim, BLOCK)


class OrderError(Exception):
    """A program waits for what nobody does, as one runs after the other, or tells too early."""


@contextmanager
def programs_run(without=None, instead=None):
    """Run programs in their order, one of them replaced; watch who counts, and who waits."""
    set_index, change = interpreter_builder.set_grid_idx, interpreter_builder.create_atomic_rmw
    load, done = interpreter_builder.create_load, []

    def begin(x, y, z):
        done[:] = [x]
        set_index(instead if x == without else x, y, z)

    def changed(operation, at, by, mask, sem, scope):
        seen = change(operation, at, by, mask, sem, scope)
        kind = f"{operation}".split(".")[-1]
        waits = kind == "ADD" and not by.data.any()
        done.append("wait" if waits else kind)
        orders = {"wait": "ACQUIRE", "ADD": "RELEASE"}
        if done[1:] not in (["MAX"], ["MAX", "ADD"], ["wait"]) or (
            orders.get(done[-1], "RELAXED") not in f"{sem}" or "GPU" not in f"{scope}"
        ):
            raise OrderError(*done)
        return seen

    def loaded(at, cache, *others):
        # Past L1 is loaded what others may have changed meanwhile.
        if "CG" in f"{cache}" and done[1:] != ["wait"]:
            raise OrderError(*done)
        return load(at, cache, *others)

    with (
        patch.object(interpreter_builder, "set_grid_idx", begin),
        patch.object(interpreter_builder, "create_atomic_rmw", changed),
        patch.object(interpreter_builder, "create_load", loaded),
    ):
        yield


@pytest.fixture(autouse=True)
def watched():
    with programs_run():
        yield


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (200, 140), (128, 300), (700, 20)])
def test_heads_are_rounded_with_their_own_scale_and_values_are_turned_over(queries, keys, dim):
    q, k, v = given(queries, keys, dim=dim)
    narrow_q, narrow_k, narrow_v, largest = quantize_heads(q, k, v)
    assert torch.equal(narrow_q.float(), q.float())
    assert torch.equal(narrow_k.float(), k.float() / 2)
    assert torch.equal(narrow_v.float(), as_laid_out(v.float() * 8))
    assert largest.tolist() == 2 * [4 * [448.0] + 2 * [896.0] + 2 * [56.0]]


@INTERPRETED
def test_tensors_may_lie_in_any_way():
    q, k, v = given()
    expected = quantize_heads(q, k, v)
    apart = torch.stack([q, q], -1)[..., 0], k.mT.contiguous().mT, v.transpose(1, 2).contiguous()
    for one, other in zip(
        quantize_heads(*apart[:2], apart[2].transpose(1, 2)), expected, strict=True
    ):
        assert torch.equal(one.float(), other.float())


@INTERPRETED
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_head_of_zeros_stays_zeros_and_one_with_nan_is_known_by_its_largest():
    q, k, v = given()
    k[0, 0], v[1, 1, 3, 5], q[1, 2, 0, 0] = 0, math.nan, math.inf
    _, narrow_k, _, largest = quantize_heads(q, k, v)
    assert largest[0, 4] == 0
    assert not narrow_k[0, 0].float().any()
    assert largest[1, 7].isnan()
    assert largest[1, 2] == math.inf


@INTERPRETED
def test_each_dtype_has_a_binary_of_its_own():
    q, k, v = given()
    found = quantize_heads(q, k.half(), v.float())
    for one, other in zip(found, quantize_heads(q, k, v), strict=True):
        assert torch.equal(one.float(), other.float())


@INTERPRETED
@pytest.mark.parametrize("head", range(16))
def test_a_head_is_rounded_once_all_of_it_has_been_looked_through(head):
    # Two tiles of each head: programs of even numbers look, others round that much later.
    tile, waiting = 2 * head + head % 2, 2 * (2 * head + 2 + APART) + 1
    with (
        patch.object(attention_fp8, "TILES_BEHIND", APART),
        programs_run(without=2 * tile, instead=2 * 32),
        pytest.raises(InterpreterError, match=rf"OrderError\({waiting}, .*wait.*wait"),
    ):
        quantize_heads(*given())
