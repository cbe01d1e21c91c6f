"""Attention's kernel for Hopper, run by threads: who waits for whom, which keys, which rows."""

import math

import numpy as np
import pytest

from tests.kernel_threads import Descriptor, Results, run_in_threads, tile

MODULES = (
    *("_tile_reach", "_tile_order", "_tile_softmax", "_tile_scores", "_tile_ring"),
    *("_attention_results", "_attention_hopper"),
)
CLOSE = 2e-3
BLOCK = 32


def drawn(*shape, seed):
    return tile(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def attend(queries, keys, left=None, right=0, **how):
    """Return results and log-sum-exps, and what they should be."""
    heads, group, batch = how.get("heads", 2), how.get("group", 1), how.get("batch", 1)
    q = drawn(batch, heads, queries, 16, seed=0)
    k, v = (drawn(batch, heads // group, keys, 16, seed=seed) for seed in (1, 2))
    y = np.full_like(q, np.nan)
    lse = np.full(batch * heads * queries, np.nan, np.float32)
    descs = [Descriptor(x, rows) for x, rows in ((q, 64), (k, BLOCK), (v, BLOCK), (y, 64))]
    bounds = (left or 0, right or 0, batch * heads, how.get("together", 2), heads)
    constants = (group, left is not None, right is not None, BLOCK, how.get("stages", 2))
    ways = (
        how.get("groups", 2),
        how.get("takes_turns", True),
        how.get("has_room", True),
        True,
        240,
    )
    scale = 0.25 * math.log2(math.e)
    given = (Results(lse), *descs, scale, queries, keys, *bounds, *constants, *ways)
    run_in_threads(MODULES, "attend", how.get("programs", 3), *given)
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
    powers = np.where(is_seen, np.exp(scores), 0.0)
    totals = powers.sum(-1, keepdims=True)
    with np.errstate(all="ignore"):
        return powers @ v / np.where(totals == 0, 1, totals), np.log(totals[..., 0])


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


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_it_is_right_whatever_the_schedule(stages, takes_turns, has_room):
    check(300, 300, stages=stages, takes_turns=takes_turns, has_room=has_room)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("queries", "left"), [(1, None), (192, None), (400, None), (400, 50)])
def test_three_warpgroups_may_take_turns(queries, left, programs):
    check(queries, 400, left, groups=3, programs=programs)
    check(queries, 400, left, groups=3, programs=programs, takes_turns=False)
