"""The tile kit's cache: where a block of keys lies, who sees it, and numbers in e4m3."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch
import triton
import triton.language as tl

from kprof.kernels.decode_attention._kernel import (
    block_of,
    bytes_of,
    fit_float16,
    is_visible,
    start_of,
)
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED
KEYS, HEADS, COLUMNS, BLOCK = 24, 2, 4, 8


@triton.jit
def copy_blocks(  # noqa: PLR0913 - as many as it reads and writes
    cache,
    table,
    y,
    num_keys,
    page_step,
    head_step,
    step,
    table_step,
    STEP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FP8: tl.constexpr = False,
):
    """Copy every block of one head of one sequence, keys in order; of e4m3, pairs of columns."""
    x = start_of(cache, page_step, head_step, PAGE, IS_FP8)
    PAIR: tl.constexpr = 2 if IS_FP8 else 1
    head, sequence = tl.program_id(1), tl.program_id(2)
    place = (sequence * tl.num_programs(1) + head) * num_keys
    for start in range(0, num_keys, BLOCK):
        key_N = start + tl.arange(0, BLOCK)
        is_key_N = key_N < num_keys
        at = block_of(
            *(x, table + sequence * table_step, start, is_key_N, page_step // PAIR, step // PAIR),
            *(STEP // PAIR, PAGE, BLOCK, COLUMNS),
        )
        values = tl.load(at, is_key_N[:, None], other=0)
        to = y + (place + key_N)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(to, values, is_key_N[:, None])


def copied(cache, num_keys, table=None, page=0, known_step=0):
    """Return (B, heads, num_keys, D) as the blocks of a cache are read."""
    batch = cache.shape[0] if table is None else table.shape[0]
    y = torch.full((batch, HEADS, num_keys, COLUMNS), torch.nan)
    table_step = 0 if table is None else table.stride(0)
    steps = (*cache.stride()[:3], table_step)
    copy_blocks[1, HEADS, batch](
        *(cache, cache if table is None else table, y, num_keys, *steps),
        *(known_step, page, BLOCK, COLUMNS),
    )
    return y


def cache_of(batch=3, num_keys=KEYS):
    size = batch * HEADS * num_keys * COLUMNS
    return torch.arange(float(size)).reshape(batch, HEADS, num_keys, COLUMNS)


@pytest.mark.parametrize("num_keys", [KEYS, 21, 3])
def test_a_cache_in_one_piece_is_read_in_order(num_keys):
    cache = cache_of()
    assert torch.equal(copied(cache, num_keys), cache[:, :, :num_keys])


def test_keys_may_be_apart_and_their_step_be_known_when_compiled():
    wide = torch.full((3, KEYS, HEADS, COLUMNS + 3), torch.nan)
    apart = wide[..., :COLUMNS].transpose(1, 2)
    apart.copy_(cache_of())
    for known_step in (0, apart.stride(2)):
        assert torch.equal(copied(apart, KEYS, known_step=known_step), cache_of())


@pytest.mark.parametrize("page", [2, 8, 24, 48], ids=lambda page: f"pages of {page}")
@pytest.mark.parametrize("num_keys", [48, 43, 5])
def test_pages_are_read_in_the_order_of_the_table(page, num_keys):
    cache, each = cache_of(2, 48), 48 // page
    order = torch.randperm(2 * each, generator=torch.Generator().manual_seed(page))
    pages = torch.full((2 * each + 1, HEADS, page, COLUMNS), torch.nan)
    of_sequences = cache.reshape(2, HEADS, each, page, COLUMNS).transpose(1, 2)
    pages[order] = of_sequences.reshape(2 * each, HEADS, page, COLUMNS)
    found = copied(pages, num_keys, order.view(2, each), page)
    assert torch.equal(found, cache[:, :, :num_keys])


@pytest.mark.parametrize(
    ("page", "is_step_known"),
    [(0, False), (0, True), (8, False), (2, False)],
    ids=["one piece", "a known step", "pages of a block", "small pages"],
)
def test_a_cache_in_e4m3_is_read_two_columns_at_a_time(page, is_step_known):
    bytes_BHND = (torch.arange(512) % 251).to(torch.uint8).reshape(2, HEADS, 16, 2 * COLUMNS)
    size = page or 16
    of_sequences = bytes_BHND.reshape(2, HEADS, 16 // size, size, 2 * COLUMNS).transpose(1, 2)
    # The last page comes first.
    pages = of_sequences.reshape(-1, HEADS, size, 2 * COLUMNS).flip(0).contiguous()
    table = torch.arange(pages.shape[0]).flip(0).view(2, -1)
    cache = (pages if page else bytes_BHND).view(torch.float8_e4m3fn)
    y = torch.zeros(2, HEADS, 13, COLUMNS, dtype=torch.int16)
    known_step = is_step_known * cache.stride(2)
    copy_blocks[1, HEADS, 2](
        *(cache, table, y, 13, *cache.stride()[:3], table.stride(0)),
        *(known_step, page, BLOCK, COLUMNS, True),
    )
    assert torch.equal(y.view(torch.uint8), bytes_BHND[:, :, :13])


@triton.jit
def tell_who_sees(  # noqa: PLR0913 - as many as it is given
    y, end, oldest, lowest_M, limit_M, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    key_N, row_M = tl.arange(0, 8), tl.arange(0, 2)
    lowest, limit = tl.load(lowest_M + row_M), tl.load(limit_M + row_M)
    is_key_N, is_seen_MN = is_visible(key_N, end, oldest, lowest, limit, CAUSAL, WINDOW)
    tl.store(y + row_M[:, None] * 8 + key_N[None, :], is_seen_MN.to(tl.int8))
    tl.store(y + 16 + key_N, is_key_N.to(tl.int8))


@pytest.mark.parametrize(
    ("is_causal", "has_window", "expected"),
    [
        (False, False, ["11111100", "11111100"]),
        (True, False, ["11111000", "11111100"]),
        (False, True, ["01111100", "00111100"]),
        (True, True, ["01111000", "00111100"]),
    ],
)
def test_a_row_sees_keys_up_to_its_own_and_within_its_window(is_causal, has_window, expected):
    y = torch.zeros(3, 8, dtype=torch.int8)
    lowest, limit = torch.tensor([1, 2]), torch.tensor([5, 6])
    tell_who_sees[1,](y, 6, 1, lowest, limit, is_causal, has_window)
    rows = ["".join(map(str, row)) for row in y.tolist()]
    assert rows == [*expected, "01111100" if has_window else "11111100"]


@triton.jit
def widen(pairs, low, high):
    place = tl.arange(0, 128)
    pair = tl.load(pairs + place)
    tl.store(low + place, bytes_of(pair, False, True))
    tl.store(high + place, bytes_of(pair, True, True))


def test_each_number_of_e4m3_is_what_torch_takes_it_for():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = torch.empty(2, 128, dtype=torch.float16)
    widen[1,](numbers.view(torch.int16), *found)
    expected = numbers.to(torch.float16).view(128, 2).t()
    # Triton's interpreter takes NaN for a number.
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], expected[is_number])


@triton.jit
def fit(q_MD, y_MD, power_M):
    row_M, column_D = tl.arange(0, 4), tl.arange(0, 2)
    at_MD = row_M[:, None] * 2 + column_D[None, :]
    y, power = fit_float16(tl.load(q_MD + at_MD))
    tl.store(y_MD + at_MD, y)
    tl.store(power_M + row_M, power)


def test_queries_that_float16_has_no_room_for_fit_by_a_power_of_two_of_their_row():
    q = torch.tensor([[1e30, -3e29], [1e-30, 2e-31], [3.0, -1.0], [0.0, 0.0]])
    y, power = torch.empty(4, 2, dtype=torch.float16), torch.empty(4)
    fit[1,](q, y, power)
    assert y.isfinite().all()
    assert y[:3].abs().amax(1).ge(1).all()
    assert y.abs().max() < 2
    assert power[:3].log2().frac().eq(0).all()
    torch.testing.assert_close(y.float() * power[:, None], q, rtol=1e-3, atol=0)


def test_an_infinite_query_stays_infinite_and_its_power_is_a_number():
    q = torch.tensor([[torch.inf, 1.0], [1.0, -torch.inf], [1.0, 1.0], [0.0, 0.0]])
    y, power = torch.empty(4, 2, dtype=torch.float16), torch.empty(4)
    fit[1,](q, y, power)
    assert power.isfinite().all()
    assert torch.equal(y[:2].float(), torch.tensor([[torch.inf, 0.0], [0.0, -torch.inf]]))
