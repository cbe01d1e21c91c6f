"""Attention's kernel for Hopper, run by threads: who waits for whom, which keys, which rows."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math

import numpy as np
import pytest
import torch

from kprof.kernels.attention._hopper import tile_lengths, tile_table
from tests.kernels.kernel_threads import Address, Descriptor, Results, run_in_threads, tile

MODULES = (
    *("tiles/key_range", "tiles/online_softmax", "tiles/pipeline"),
    "attention/_hopper_kernel",
)
CLOSE = 2e-3
BLOCK = 32


def drawn(*shape, seed):
    return tile(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def hides(left, right, keys):
    """Tell whether anything is hidden, as the host does."""
    return left is not None or right is not None or keys % BLOCK > 0


def attend(queries, keys, left=None, right=0, **how):
    """Return results and log-sum-exps, and what they should be."""
    heads, group, batch = how.get("heads", 2), how.get("group", 1), how.get("batch", 1)
    q = drawn(batch, heads, queries, 16, seed=0)
    k, v = (drawn(batch, heads // group, keys, 16, seed=seed) for seed in (1, 2))
    q, k = q * how.get("times", 1), k * how.get("times", 1)
    y = np.full_like(q, np.nan)
    lse = np.full(batch * heads * queries, np.nan, np.float32)
    descs = [Descriptor(x, rows) for x, rows in ((q, 64), (k, BLOCK), (v, BLOCK), (y, 64))]
    bounds = (left or 0, right or 0, batch * heads, how.get("together", 2), heads)
    constants = (group, left is not None, right is not None, BLOCK, how.get("stages", 2))
    ways = (
        how.get("groups", 2),
        how.get("is_pingpong", True),
        how.get("has_output_buffer", True),
        *(how.get("exp_before_wait", True), hides(left, right, keys), False, 240),
        how.get("prefetches_q", False),
    )
    scale = 0.25 * math.log2(math.e)
    table = how.get("dealt")
    given = (
        Results(lse),
        None,
        table if table is None else Address(table),
        *descs,
        scale,
        queries,
        keys,
        *bounds,
        *constants,
        *ways,
    )
    run_in_threads(MODULES, "attention_forward_hopper_kernel", how.get("programs", 3), *given)
    return y, lse.reshape(batch, heads, queries), *expected(q, k, v, group, left, right)


def expected(q, k, v, group, left, right):
    q, k, v = (one.astype(np.float64) for one in (q, k, v))
    k, v = (one.repeat(group, 1) for one in (k, v))
    scores = 0.25 * q @ k.transpose(0, 1, 3, 2)
    queries, keys = scores.shape[2:]
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    is_seen = np.ones_like(ahead, bool)
    if left is not None:
        is_seen &= ahead >= -left
    if right is not None:
        is_seen &= ahead <= right
    largest = np.where(is_seen, scores, -1e9).max(-1, keepdims=True)
    powers = np.where(is_seen, np.exp(np.minimum(scores - largest, 0)), 0.0)
    totals = powers.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        lse = np.log(totals[..., 0]) + largest[..., 0]
        return powers @ v / np.where(totals == 0, 1, totals), lse


def check(*about, **how):
    y, lse, expected_y, expected_lse = attend(*about, **how)
    np.testing.assert_allclose(y.astype(np.float64), expected_y, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("queries", [1, 63, 64, 65, 300])
def test_every_query_has_the_weighted_mean_of_what_it_sees(queries, right):
    check(queries, queries, right=right)


@pytest.mark.parametrize(("queries", "keys"), [(5, 200), (130, 200), (200, 130), (200, 5)])
def test_queries_are_the_last_ones_where_lengths_differ(queries, keys):
    check(queries, keys)
    check(queries, keys, right=None)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (20, 0), (64, 0), (200, 0), (9, 9)])
def test_a_window_hides_what_is_not_near(left, right):
    check(260, 260, left, right)
    check(140, 260, left, right)


@pytest.mark.parametrize("programs", [1, 2, 5, 12])
def test_any_number_of_programs_may_share_the_tiles(programs):
    check(300, 300, heads=4, group=2, batch=2, programs=programs)


@pytest.mark.parametrize("together", [1, 3, 4])
def test_heads_may_be_worked_off_in_sections(together):
    check(200, 200, heads=4, together=together)


@pytest.mark.parametrize("has_output_buffer", [True, False])
@pytest.mark.parametrize("is_pingpong", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_it_is_right_whatever_the_schedule(stages, is_pingpong, has_output_buffer):
    check(300, 300, stages=stages, is_pingpong=is_pingpong, has_output_buffer=has_output_buffer)


@pytest.mark.parametrize("exp_before_wait", [True, False])
def test_it_is_right_whatever_is_held_before_the_values_are_waited_for(exp_before_wait):
    check(300, 300, exp_before_wait=exp_before_wait)
    check(300, 300, 40, exp_before_wait=exp_before_wait, groups=3)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(("queries", "keys"), [(130, 4 * BLOCK), (5, BLOCK), (130, 3 * BLOCK + 1)])
def test_masks_are_left_out_where_keys_fill_their_blocks_and_all_are_seen(queries, keys, groups):
    check(queries, keys, right=None, groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("prefetches_q", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(("heads", "together", "left"), [(4, 4, None), (6, 4, None), (4, 1, 70)])
def test_tiles_may_be_dealt_out(heads, together, left, groups, prefetches_q):
    lengths = tile_lengths(500, 500, 64 * groups, BLOCK, left, 0)
    table = tile_table(lengths, heads, together, 5, torch.device("cpu")).numpy()
    how = {"heads": heads, "together": together, "groups": groups, "prefetches_q": prefetches_q}
    check(500, 500, left, dealt=table, programs=5, **how)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("queries", "left"), [(1, None), (192, None), (400, None), (400, 50)])
def test_three_warpgroups_may_take_turns(queries, left, programs):
    check(queries, 400, left, groups=3, programs=programs)
    check(queries, 400, left, groups=3, programs=programs, is_pingpong=False)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("programs", [1, 3, 12])
@pytest.mark.parametrize(("queries", "left"), [(1, None), (300, None), (600, 0), (400, 50)])
def test_queries_of_the_next_tile_may_come_early(queries, left, programs, groups):
    how = {"groups": groups, "programs": programs, "prefetches_q": True}
    check(queries, queries, left, **how)
    check(queries, queries, left, **how, stages=4, batch=2)
    check(queries, 40, None, None, **how, stages=3, is_pingpong=False)


@pytest.mark.parametrize("right", [None, 0])
def test_a_query_for_which_one_key_counts_has_its_value_to_the_last_bit(right):
    y, _, expected_y, _ = attend(200, 200, right=right, times=1000)
    is_value = (expected_y == expected_y.astype(np.float16)).all(-1)
    assert is_value.mean() > 0.99
    np.testing.assert_array_equal(y[is_value], expected_y[is_value])


def order_of(keys):
    """Return which key stands where, of whole groups of sixteen."""
    group = [8 * half + 2 * pair + one for pair in range(4) for half in (0, 1) for one in (0, 1)]
    return [16 * (place // 16) + group[place % 16] for place in range(keys)]


def turned_over(v):
    """Return values in blocks of keys, columns first, in the order in which weights are packed."""
    batch, heads, keys, columns = v.shape
    blocks = -(-keys // BLOCK)
    whole = np.zeros((batch, heads, blocks * BLOCK, columns), v.dtype)
    whole[:, :, :keys] = v
    ordered = whole[:, :, order_of(blocks * BLOCK)].reshape(batch, heads, blocks, BLOCK, columns)
    return tile(ordered.swapaxes(3, 4).reshape(batch, heads, blocks * columns, BLOCK))


def attend_narrow(queries, keys, left=None, right=0, group=1, batch=1, **how):
    """Return results and log-sum-exps of 8 bits, and what they are exactly.

    Scores are whole, and powers of 2, so that nothing is rounded but the results.
    """
    heads, columns, draw = 4, 16, np.random.default_rng(3)
    q = draw.integers(0, 2, (batch, heads, queries, columns)) * (np.arange(columns) < 2)
    shape = (batch, heads // group, keys, columns)
    k, v = draw.integers(-2, 3, shape), draw.integers(-4, 5, shape)
    q, k, v = (one.astype(np.float32) for one in (q, k, v))
    scales = 2.0 ** draw.integers(-1, 2, (batch, heads + 2 * heads // group))
    # Scores stay whole.
    scales[:, : heads + heads // group] = np.maximum(scales[:, : heads + heads // group], 1)
    if how.get("zeros"):
        k[:, 1], scales[:, heads + 1] = 0, 0
    if how.get("nan"):
        scales[:, 1] = np.nan
    # Values below the least have its scale.
    scales[:, heads + heads // group :] *= how.get("value_scale", 1)
    y = tile(np.full(q.shape, np.nan, np.float16 if "value_scale" not in how else np.float32))
    lse = np.full(batch * heads * queries, np.nan, np.float32)
    into = ((tile(q), 64), (tile(k), BLOCK), (turned_over(v), columns), (y, 64))
    descs = [Descriptor(x, rows) for x, rows in into]
    bounds = (left or 0, right or 0, batch * heads, 2, heads)
    constants = (group, left is not None, right is not None, BLOCK, 2, how.get("groups", 2))
    exp_before_wait = how.get("exp_before_wait", True)
    ways = (
        how.get("is_pingpong", True),
        True,
        exp_before_wait,
        hides(left, right, keys),
        True,
        240,
    )
    ways = (*ways, how.get("prefetches_q", False))
    largest = Address(448 * scales.astype(np.float32).reshape(-1))
    given = (Results(lse), largest, None, *descs, 1.0, queries, keys, *bounds, *constants, *ways)
    run_in_threads(MODULES, "attention_forward_hopper_kernel", 3, *given)
    of_q, of_k, of_v = np.split(scales, [heads, heads + heads // group], axis=1)
    # By powers of 2, where `expected` takes those of e, and by its scale.
    q, k, v = (x * s[..., None, None] for x, s in ((q, of_q), (k, of_k), (v, of_v)))
    wanted = expected(q * 4 * math.log(2), k, v, group, left, right)
    return y, lse.reshape(batch, heads, queries), *wanted


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "left", "right"),
    [
        *((1, 1, None, 0), (65, 65, None, 0), (130, 200, None, 0), (200, 130, None, 0)),
        *((100, 100, None, None), (140, 260, 20, 0), (90, 90, 9, 9)),
    ],
)
def test_of_8_bits_values_meet_their_own_weights(queries, keys, left, right, group):
    ways = ({}, {"groups": 3, "batch": 2}, {"is_pingpong": False}, {"exp_before_wait": False})
    for how in (*ways, {"prefetches_q": True}):
        y, lse, wanted_y, wanted_lse = attend_narrow(queries, keys, left, right, group=group, **how)
        np.testing.assert_allclose(y.astype(np.float64), wanted_y, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-4)


def test_of_8_bits_values_that_are_nearly_0_have_the_least_scale():
    y, *_ = attend_narrow(70, 70, value_scale=1e-18)
    usual, *_ = attend_narrow(70, 70, value_scale=1.0)
    largest = np.abs(y[0, 0]).max() / np.abs(usual[0, 0]).max()
    assert 1e-12 / 896 <= largest <= 1e-12 / 224
    assert np.isfinite(y).all()


def test_of_8_bits_heads_of_zeros_are_means_and_nan_is_not_lost():
    y, lse, wanted_y, wanted_lse = attend_narrow(70, 70, zeros=True)
    np.testing.assert_allclose(y[0, 1].astype(np.float64), wanted_y[0, 1], rtol=0, atol=2e-3)
    np.testing.assert_allclose(lse[0, 1], wanted_lse[0, 1], rtol=0, atol=1e-4)
    y, *_ = attend_narrow(70, 70, nan=True)
    assert np.isnan(y[0, 1]).all()
    assert not np.isnan(y[0, 0]).any()
