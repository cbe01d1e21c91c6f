"""Tiles of attention: which keys rows reach, who does which tile, and in what order."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

import kprof.kernels.attention._hopper_backward as back
import kprof.kernels.attention._hopper as hopper
from kprof.kernels.attention._triton import Options
from kprof.kernels.attention._triton import BackwardInputs
from kprof.kernels.attention._hopper import schedule_for
from kprof.kernels.attention._hopper import (
    TILE_COST,
    _makespan,
    assign_tiles,
    tile_lengths,
    num_ctas_for,
    tile_table,
)
from kprof.kernels.tiles.key_range import tile_at, snake_tile, num_snake_tiles
from kprof.kernels.tiles.key_range import key_ranges
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED


def test_a_query_sees_so_many_keys_before_and_after_its_own():
    expected = {
        (0, True): (None, 0),
        (0, False): (None, None),
        (9, True): (8, 0),
        (9, False): (8, 8),
    }
    assert {
        (window, is_causal): Options(1.0, is_causal, window, 0).bounds(30, 30)
        for window, is_causal in expected
    } == expected


def test_a_bound_beyond_both_lengths_is_none():
    assert Options(1.0, False, 30, 0).bounds(30, 5) == (None, None)
    assert Options(1.0, False, 29, 0).bounds(30, 5) == (28, 28)


@triton.jit
def _list_tiles(found, num_tiles, num_blocks, heads, together, FALLS: tl.constexpr):
    for turn in range(num_snake_tiles(num_tiles, tl.program_id(0), tl.num_programs(0))):
        place = snake_tile(turn, tl.program_id(0), tl.num_programs(0))
        block, head = tile_at(place, num_blocks, heads, together, FALLS)
        at = found + 3 * place
        tl.store(at, tl.load(at) + 1)
        tl.store(at + 1, head * num_blocks + block)
        tl.store(at + 2, tl.program_id(0))


@pytest.mark.parametrize(("heads", "together"), [(5, 5), (5, 2), (1, 1), (7, 3)])
@pytest.mark.parametrize("falls", [True, False])
def test_every_tile_has_one_program(heads, together, falls):
    found = torch.zeros(heads * 3, 3, dtype=torch.int32)
    _list_tiles[(4,)](found, heads * 3, 3, heads, together, falls)
    assert found[:, 0].eq(1).all()
    assert sorted(found[:, 1].tolist()) == list(range(heads * 3))


def test_the_longest_tiles_come_first_and_programs_share_them_out_evenly():
    found = torch.zeros(32, 3, dtype=torch.int32)
    _list_tiles[(8,)](found, 32, 8, 4, 4, True)
    lengths = found[:, 1] % 8 + 1
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
    totals = torch.zeros(8, dtype=torch.int32).index_add_(0, found[:, 2].long(), lengths)
    assert totals.tolist() == 8 * [18]


@triton.jit
def _store_reach(found, own, keys, left, right, HAS: tl.constexpr):
    begin, inner_begin, inner_end, end = key_ranges(own, 32, keys, left, right, 16, HAS[0], HAS[1])
    tl.store(found, begin)
    tl.store(found + 1, inner_begin)
    tl.store(found + 2, inner_end)
    tl.store(found + 3, end)


@pytest.mark.parametrize(
    ("own", "keys", "left", "right", "expected"),
    [
        *((0, 100, None, None, [0, 0, 96, 100]), (32, 100, None, 0, [0, 0, 32, 64])),
        *((90, 100, None, 0, [0, 0, 80, 100]), (-50, 100, None, 0, [0, 0, 0, 0])),
        *((64, 200, 40, 0, [16, 64, 64, 96]), (64, 200, 3, 3, [48, 96, 96, 99])),
        (300, 100, 10, 0, [288, 288, 288, 288]),
    ],
)
def test_masks_are_needed_where_not_all_rows_see_a_block(own, keys, left, right, expected):
    found = torch.zeros(4, dtype=torch.int32)
    has = (left is not None, right is not None)
    _store_reach[(1,)](found, own, keys, left or 0, right or 0, has)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("queries", "keys", "left", "right", "lengths"),
    [
        *((300, 400, None, 0, (8, 12, 13)), (300, 400, None, None, (13, 13, 13))),
        *((300, 400, 40, 0, (7, 7, 4)), (200, 5, None, 0, (1, 1))),
    ],
)
def test_a_tile_is_as_long_as_the_blocks_of_keys_that_it_sees(queries, keys, left, right, lengths):
    assert tile_lengths(queries, keys, 128, 32, left, right) == lengths


def test_as_many_programs_run_as_end_soonest():
    # In turns of 8, sections of 4 heads and 4 lengths are to and fro alike; not in turns of 9.
    assert num_ctas_for((1, 2, 3, 4), 16, 4, 9) == 8
    assert num_ctas_for((4, 4, 4, 4), 16, 4, 9) == 9
    assert num_ctas_for((1, 2), 2, 2, 9) == 4


def test_three_warpgroups_compute_heads_of_64_columns_that_are_long_or_see_all():
    assert [schedule_for(64, queries, queries, False).warpgroups for queries in (4_095, 4_096)] == [
        2,
        3,
    ]
    assert [schedule_for(64, queries, 512, True).warpgroups for queries in (197, 511, 512)] == [
        2,
        2,
        3,
    ]
    assert [schedule_for(64, 512, keys, True).warpgroups for keys in (511, 640)] == [2, 3]


def test_two_programs_of_one_warpgroup_compute_short_heads_of_64_columns():
    calls = (512, 512), (1_024, 1_024), (1_025, 1_025), (512, 1_025)
    rings = [schedule_for(64, *call, False) for call in calls]
    assert [(one.warpgroups, one.ctas_per_sm) for one in rings] == [(1, 2), (1, 2), (2, 1), (2, 1)]
    assert not any(one.is_pingpong for one in rings[:2])
    assert schedule_for(64, 512, 512, True).warpgroups == 3


def test_heads_of_128_columns_have_two_warpgroups():
    assert [schedule_for(128, 8_192, 8_192, sees_all).warpgroups for sees_all in (True, False)] == [
        2,
        2,
    ]


def test_fewer_heads_share_the_cache_where_they_are_short_or_every_query_sees_every_key():
    calls = (2_048, True), (4_095, False), (4_096, False)
    kept = [schedule_for(128, queries, queries, sees_all).l2_bytes for queries, sees_all in calls]
    assert kept == sorted(set(kept))
    assert [
        schedule_for(128, 2_048, 2_048, sees_all).exp_before_wait for sees_all in (True, False)
    ] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("num_queries", "is_causal", "together"),
    [(1_024, False, 16), (8_192, False, 2), (4_095, True, 4), (4_096, True, 8), (8_192, True, 4)],
)
def test_gradients_work_off_as_many_heads_together_as_the_cache_holds(
    monkeypatch, num_queries, is_causal, together
):
    asked = []
    monkeypatch.setattr(back, "_launcher", lambda: lambda *launched: asked.append(launched[2]))
    monkeypatch.setattr(back, "tensor_descriptor", lambda *words, **named: "described")
    q = torch.empty(2, 16, num_queries, 128, dtype=torch.bfloat16, device="meta")
    given = BackwardInputs(q, None, q, q, q, q, q, None, None)
    options = Options(0.1, is_causal, 0, num_queries)
    back._launch_backward(given, options, ("numbers", "told", "sums"), (q, q), False)
    (_, *others) = asked[0]
    num_heads, found = others[others.index(0.1) + 6 :][:2]
    assert (num_heads, found) == (32, together)


def test_tiles_of_long_sequences_are_dealt_out_where_they_differ_in_length():
    for dim, least in ((64, 1_024), (128, 2_048), (256, 2_048)):
        calls = [(dim, queries, queries, False) for queries in (least - 1, least, 9_000)]
        assert [schedule_for(*call).uses_table for call in calls] == [False, True, True]
    assert not schedule_for(128, 8_192, 8_192, True).uses_table


def test_queries_of_the_next_tile_come_early_where_sequences_are_short():
    cases = (64, False, 1_024), (64, True, 512), (128, False, 512), (128, True, 1_024)
    for dim, sees_all, most in cases:
        calls = [(dim, queries, queries, sees_all) for queries in (512, most, most + 1, 2_048)]
        assert [schedule_for(*call).prefetches_q for call in calls] == [True, True, False, False]
    calls = [(256, queries, queries, one) for queries in (1, 512, 2_048) for one in (True, False)]
    assert not any(schedule_for(*call).prefetches_q for call in calls)


def test_a_call_gets_the_schedule_for_what_its_queries_see(monkeypatch):
    found = []
    monkeypatch.setattr(hopper, "launch_forward", lambda *about: found.append(about[-1]))
    q = torch.zeros(1, 2, 70, 128)
    for is_causal, window in ((True, 0), (False, 0), (False, 9), (False, 70)):
        hopper.run_on_hopper(q, q, q, None, None, Options(1.0, is_causal, window, 70))
    assert found == [schedule_for(128, 70, 70, sees_all) for sees_all in (False, True, False, True)]


@pytest.fixture
def launched(monkeypatch):
    """Return the constants of all that is launched."""
    found = []
    launch = lambda key, grid, arguments, options: found.append(arguments[-13:])  # noqa: E731
    monkeypatch.setattr(hopper, "_launcher", lambda: launch)
    monkeypatch.setattr(hopper, "tensor_descriptor", lambda *about: None)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 4)
    return found


def attend(
    keys=70, is_causal=False, window=0, largest=None, has_output_buffer=True, prefetches_q=False
):
    q, k = torch.zeros(1, 2, 70, 64), torch.zeros(1, 2, keys, 64)
    options = Options(1.0, is_causal, window, 70)
    schedule = hopper.HopperSchedule(
        128, 4, has_output_buffer=has_output_buffer, prefetches_q=prefetches_q
    )
    hopper.launch_forward(q, k, k, largest, q, q, options, schedule)


def test_results_of_queries_of_8_bits_have_room_of_their_own(launched):
    for largest in (None, torch.zeros(1)):
        attend(largest=largest, has_output_buffer=False)
    assert [constants[7] for constants in launched] == [False, True]


def test_results_have_room_where_queries_come_early(launched):
    for prefetches_q in (False, True):
        attend(has_output_buffer=False, prefetches_q=prefetches_q)
    assert [constants[7] for constants in launched] == [False, True]
    assert [constants[12] for constants in launched] == [False, True]


def test_something_is_hidden_but_where_all_is_seen_and_keys_fill_their_blocks(launched):
    for keys, is_causal, window in (
        (256, False, 0),
        (256, True, 0),
        (256, False, 9),
        (257, False, 0),
    ):
        attend(keys, is_causal, window)
    assert [constants[9] for constants in launched] == [False, True, True, True]


@pytest.mark.parametrize(
    ("lengths", "heads", "together", "programs"),
    [((1, 2, 3, 4), 16, 4, 9), (tuple(range(1, 65)), 32, 8, 132), ((2, 5), 1, 1, 4)],
)
def test_tiles_that_are_dealt_out_all_have_one_program_and_end_as_soon_as_any_order_could(
    lengths, heads, together, programs
):
    each = assign_tiles(lengths, heads, together, programs)
    assert sorted(place for one in each for place in one) == list(range(len(lengths) * heads))
    assert all(one == sorted(one) for one in each)
    ordered = [
        n
        for first in range(0, heads, together)
        for n in section_of(lengths, first, heads, together)
    ]
    totals = [sum(ordered[place] + TILE_COST for place in one) for one in each]
    even = sum(n + TILE_COST for n in ordered) / programs
    assert max(totals) <= even + max(lengths) + TILE_COST


def section_of(lengths, first, heads, together):
    """Return the lengths of a section's tiles, as the kernel counts their places."""
    return [n for n in reversed(lengths) for _ in range(min(together, heads - first))]


def test_causal_tiles_dealt_out_end_sooner_than_to_and_fro():
    lengths = tile_lengths(8_192, 8_192, 128, 128, None, 0)
    each = assign_tiles(lengths, 32, 8, 132)
    ordered = [n for first in range(0, 32, 8) for n in section_of(lengths, first, 32, 8)]
    last = max(sum(ordered[place] + TILE_COST for place in one) for one in each)
    tiles = [n + TILE_COST for n in ordered]
    assert last < 0.98 * _makespan(tiles, num_ctas_for(lengths, 32, 8, 132))


def test_a_table_says_where_each_programs_tiles_begin():
    cpu = torch.device("cpu")
    table = tile_table((1, 2, 3), 4, 2, 5, cpu).tolist()
    begins, each = table[:6], assign_tiles((1, 2, 3), 4, 2, 5)
    parts = [table[a:b] for a, b in pairwise(begins)]
    assert parts == each
    # The turn behind the last one of the last program asks for a place, too.
    assert len(table) == begins[-1] + 1
    # As long as each other, or too few: nothing to deal.
    assert tile_table((2, 2, 2), 4, 2, 5, cpu) is None
    assert tile_table((1, 2), 2, 2, 5, cpu) is None
