"""The tile kit: online softmax, parts, counters; and other GPUs, as compiling ahead tells."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import math

import pytest
import torch
import triton
import triton.language as tl

from kprof.kernels.tiles.online_softmax import finish, merge, store_part, weigh
from kprof.kernels.tiles.splits import Counters, is_last_to_arrive, part_length
from tests.kernels.kernel_checks import INTERPRETED
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED


@triton.jit
def weigh_two_tiles(score_MN, value_ND, mean_MD, lse_M, M: tl.constexpr, N: tl.constexpr):
    row_M, column_N = tl.arange(0, M), tl.arange(0, N)
    largest_M = tl.full([M], float("-inf"), tl.float32)
    total_MN = tl.zeros([M, N], tl.float32)
    sum_MN = tl.zeros([M, N], tl.float32)
    for tile in range(2):
        at_N = tile * N + column_N
        score = tl.load(score_MN + row_M[:, None] * 2 * N + at_N[None, :])
        value = tl.load(value_ND + at_N)
        weight_MN, shrink_M, largest_M, total_MN = weigh(score, largest_M, total_MN)
        sum_MN = sum_MN * shrink_M[:, None] + weight_MN * value[None, :]
    sum_MD = tl.sum(sum_MN, axis=1)[:, None]
    mean, lse = finish(sum_MD, largest_M, tl.sum(total_MN, axis=1))
    tl.store(mean_MD + row_M[:, None], mean)
    tl.store(lse_M + row_M, lse)


def test_two_tiles_weigh_as_one_does_and_a_row_without_any_key_has_nothing():
    scores = torch.tensor([[0.0, 1.0, 9.0, -math.inf], 4 * [-math.inf]])
    values, mean, lse = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2, 1), torch.empty(2)
    weigh_two_tiles[(1,)](scores, values, mean, lse, 2, 2)
    powers = torch.tensor([1.0, 2.0, 512.0])
    torch.testing.assert_close(mean[:, 0], torch.tensor([(1 + 4 + 1536) / 515, 0.0]))
    torch.testing.assert_close(lse, torch.tensor([math.log2(powers.sum()), -math.inf]))


@triton.jit
def leave_and_merge(  # noqa: PLR0913 - as many as it reads and writes
    mean_SMD, lse_SM, means, lses, y, z, counter, COUNT: tl.constexpr, S: tl.constexpr
):
    row_M, column_D = tl.arange(0, 2), tl.arange(0, 4)
    part = tl.program_id(0)
    at_MD = part * 8 + row_M[:, None] * 4 + column_D[None, :]
    mean_MD, lse_M = tl.load(mean_SMD + at_MD), tl.load(lse_SM + part * 2 + row_M)
    store_part(mean_MD, lse_M, means, lses, part, 2)
    if is_last_to_arrive(counter, COUNT):
        mean, lse = merge(means, lses, COUNT, 2, 4, 2, S)
        tl.store(y + row_M[:, None] * 4 + column_D[None, :], mean)
        tl.store(z + row_M, lse)


@pytest.mark.parametrize("at_a_time", [1, 2, 4])
def test_the_last_program_merges_parts_by_their_weights_and_leaves_the_counter_at_zero(at_a_time):
    means = torch.arange(24.0).reshape(3, 2, 4)
    lses = torch.tensor([[0.0, -math.inf], [1.0, -math.inf], [-math.inf, -math.inf]])
    # A part that saw nothing has 0.
    means[2], means[:, 1] = 0.0, 0.0
    y, z = torch.full((2, 4), 7.0), torch.full((2,), 7.0)
    counter = torch.zeros(4, dtype=torch.int32)
    kept = torch.empty(3, 2, 4), torch.empty(3, 2)
    leave_and_merge[(3,)](means, lses, *kept, y, z, counter, 3, at_a_time)
    torch.testing.assert_close(y[0], (means[0, 0] + 2 * means[1, 0]) / 3)
    assert y[1].tolist() == [0.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(z, torch.tensor([math.log2(3), -math.inf]))
    assert counter.tolist() == [0, 0, 0, 0]


@triton.jit
def length_of_parts(y, length, most, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    tl.store(y, part_length(length, most, BLOCK, LEAST))


@pytest.mark.parametrize(
    ("length", "most", "least", "expected"),
    [(100, 3, 16, 48), (96, 3, 16, 32), (97, 3, 16, 48), (10, 3, 16, 16), (10, 3, 64, 64)],
)
def test_parts_are_whole_blocks_and_cover_everything(length, most, least, expected):
    y = torch.empty(1, dtype=torch.int32)
    length_of_parts[(1,)](y, length, most, 16, least)
    assert y.tolist() == [expected]


def test_counters_are_zeros():
    assert Counters(torch.device("cpu")).take(5).count_nonzero() == 0


AHEAD = """
import json, torch
from kprof.kernels.bench.ahead import BLACKWELL, HOPPER, compile_ahead
from kprof.kernels.decode_attention.decode_attention import decode_attention

found = []
bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
short = (1_024, bf16)
for target, (keys, dtype) in (
    (HOPPER, short), (BLACKWELL, short), (BLACKWELL, (16_384, bf16)), (BLACKWELL, (4_096, fp8))
):
    q = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 8, keys, 128, dtype=dtype)
    found += compile_ahead(lambda: decode_attention(q, k, k), target)
print(json.dumps([[one.capability, one.spilled_bytes] for one in found]))
"""


@pytest.mark.slow
def test_the_same_sources_spill_nothing_on_blackwell():
    assert json.loads(on_hopper(AHEAD)) == [[90, 0], [100, 0], [100, 0], [100, 0]]
