"""Gradients of attention on Hopper, run by threads: who waits for whom, which keys, which rows."""

import json
import math

import numpy as np
import pytest

from tests.kernels.kernel_hopper import on_hopper
from tests.kernels.kernel_threads import Descriptor, Told, run_in_threads, tile

MODULES = ("tiles/key_range", "tiles/pipeline", "attention/_hopper_backward_kernel")
CLOSE = 3e-3
ROWS = 64
# Queries of a block, by columns of a head.
QUERIES = {64: 128, 128: 64}
SCALE = 0.1


def drawn(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def numbers_of(lse, delta, block):
    """Return both numbers of each query, block by block, as they are prepared on the GPU."""
    batch, heads, queries = lse.shape
    blocks = -(-queries // block)
    found = np.zeros((2, batch, heads, blocks * block), np.float32)
    with np.errstate(invalid="ignore"):
        found[:, :, :, :queries] = -lse * math.log2(math.e), -delta
    found = np.moveaxis(found.reshape(2, batch, heads, blocks, block), 0, 3)
    return np.ascontiguousarray(found).reshape(batch, heads, blocks, 2 * block)


def gradients_of(queries, keys, left=None, right=0, **how):
    """Return the gradients that the kernel makes, and what they should be."""
    heads, group, batch = how.get("heads", 2), how.get("group", 1), how.get("batch", 1)
    dim = how.get("dim", 128)
    block = QUERIES[dim]
    q, dy = (drawn(batch, heads, queries, dim, seed=seed) for seed in (0, 3))
    k, v = (drawn(batch, heads // group, keys, dim, seed=seed) for seed in (1, 2))
    q, k = q + np.float16(how.get("apart", 0)), k - np.float16(how.get("apart", 0))
    expected, lse, delta = exact((q, k, v, dy), group, left, right)
    dq = np.zeros(q.shape, np.float32)
    dk, dv = (np.full_like(k, np.nan) for _ in range(2))
    descs = [Descriptor(tile(one), block) for one in (q, dy)]
    descs += [Descriptor(tile(one), ROWS) for one in (k, v)]
    descs += [Descriptor(tile(dq), ROWS, ROWS), *(Descriptor(tile(one), ROWS) for one in (dk, dv))]
    num_heads = batch * heads // group
    sizes = (queries, keys, left or 0, right or 0, heads // group, num_heads)
    constants = (left is not None, right is not None, group, block)
    programs = -(-keys // (2 * ROWS)) * num_heads
    numbers = Descriptor(numbers_of(lse, delta, block), 1)
    constants += (how.get("is_ordered", False), how.get("stages", 2), 240)
    told = Told(np.zeros(batch * heads * -(-queries // block), np.int32))
    arguments = (told, numbers, *descs, SCALE, *sizes, how.get("together", 2), *constants)
    run_in_threads(MODULES, "attention_backward_hopper_kernel", programs, *arguments)
    dq = dq.reshape(*dq.shape[:3], -1, 2, 4, 4).swapaxes(4, 5).reshape(dq.shape)
    return (SCALE * dq, dk, dv), expected


def exact(given, group, left, right):
    """Return the gradients, and of each query log-sum-exp and delta."""
    q, k, v, dy = (one.astype(np.float64) for one in given)
    shape = k.shape
    k, v = (one.repeat(group, 1) for one in (k, v))
    scores = SCALE * q @ k.transpose(0, 1, 3, 2)
    queries, keys = scores.shape[2:]
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    is_seen = np.ones_like(ahead, bool)
    if left is not None:
        is_seen &= ahead >= -left
    if right is not None:
        is_seen &= ahead <= right
    powers = np.where(is_seen, np.exp(scores), 0.0)
    totals = powers.sum(-1, keepdims=True)
    weights = powers / np.where(totals == 0, 1, totals)
    delta = (weights @ v * dy).sum(-1)
    dscores = weights * (dy @ v.transpose(0, 1, 3, 2) - delta[..., None])
    dq = SCALE * dscores @ k
    dk, dv = SCALE * dscores.transpose(0, 1, 3, 2) @ q, weights.transpose(0, 1, 3, 2) @ dy
    parts = [one.reshape(*shape[:2], group, *shape[2:]).sum(2) for one in (dk, dv)]
    with np.errstate(divide="ignore"):
        return (dq, *parts), np.log(totals[..., 0]), delta


def check(*about, **how):
    for found, expected in zip(*gradients_of(*about, **how), strict=True):
        error = np.linalg.norm(found.astype(np.float64) - expected)
        assert error <= CLOSE * max(np.linalg.norm(expected), 0.1)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("queries", [1, 64, 65, 300])
def test_gradients_are_those_of_the_weighted_mean(queries, right, dim):
    check(queries, queries, right=right, dim=dim)


@pytest.mark.parametrize(("queries", "keys"), [(5, 200), (130, 200), (200, 130), (200, 5)])
def test_queries_are_the_last_ones_where_lengths_differ(queries, keys):
    check(queries, keys)
    check(queries, keys, right=None)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (20, 0), (64, 0), (200, 0), (9, 9)])
def test_a_window_hides_what_is_not_near(left, right):
    check(260, 260, left, right)
    check(140, 260, left, right, dim=64)


@pytest.mark.parametrize(("dim", "apart"), [(64, 2.0), (128, 1.5)])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (40, 40)])
def test_keys_that_are_not_there_weigh_nothing_however_low_the_scores_are(dim, apart, left, right):
    # Beside scores of about -28, the 0 of a key that is not there has a power no half can hold.
    check(140, 200, left, right, dim=dim, apart=apart)
    check(200, 70, left, right, dim=dim, apart=apart)


@pytest.mark.parametrize("together", [1, 3])
def test_heads_share_keys_and_are_worked_off_in_sections(together):
    check(200, 200, heads=6, group=2, batch=2, together=together)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (70, 0), (200, None), (9, 9)])
def test_sums_may_be_added_in_one_order(left, right, dim):
    check(400, 400, left, right, dim=dim, is_ordered=True)
    check(130, 600, left, right, dim=dim, is_ordered=True, heads=1)
    check(600, 130, left, right, dim=dim, is_ordered=True, heads=1)


@pytest.mark.parametrize("together", [1, 3])
def test_the_order_is_that_of_each_head(together):
    check(300, 300, heads=6, group=2, batch=2, together=together, is_ordered=True)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_it_is_right_with_any_number_of_blocks_in_flight(stages):
    check(300, 300, stages=stages, heads=1)


ON_HOPPER = """
import json, re, subprocess, tempfile, torch, triton
from pathlib import Path
from unittest.mock import patch
from kprof.kernels.bench import ahead
from kprof.kernels.attention.attention_forward import attention_forward

read, found = ahead._read, []

def kept(*given):
    binary = read(*given)
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        command = [str(program), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    steps = re.findall(r"/\\*([0-9a-f]{4,})\\*/ +(.*?);", text)
    places = {int(at, 16): i for i, (at, _) in enumerate(steps)}
    ends = [(i, re.search(r"BRA.* 0x([0-9a-f]+)", step)) for i, (_, step) in enumerate(steps)]
    loops = [(places[int(to[1], 16)], i) for i, to in ends if to and int(to[1], 16) in places]
    loops = [(a, b) for a, b in loops if a < b]
    inner = [one for one in loops if not any(a >= one[0] and b < one[1] for a, b in loops)]
    bodies = [" ".join(step for _, step in steps[a:b + 1]) for a, b in inner]
    kinds = ("HGMMA", "UTMAREDG", "MUFU.EX2", "STL", "LDL", "DEPBAR.LE gsb0")
    counts = [[one.count(kind) for kind in kinds] for one in bodies if "HGMMA" in one]
    about = [binary.num_registers, binary.spilled_bytes, binary.shared_bytes]
    found.append([binary.name, *about, counts])
    return binary

given = [torch.zeros(1, h, 300, 128, dtype=torch.bfloat16).requires_grad_() for h in (4, 4, 4)]
how = {"is_for_hopper": True, "is_ordered": is_ordered}
with patch.object(ahead, "_read", kept):
    ahead.compile_ahead(lambda: attention_forward(*given, **how)[0].sum().backward())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_ordered", [False, True])
def test_on_hopper_warps_are_specialised_and_loops_store_nothing_that_spilled(is_ordered):
    found = json.loads(on_hopper(ON_HOPPER, is_ordered=is_ordered))
    assert [name for name, *_ in found] == [
        "attention_forward_hopper_kernel",
        "attention_backward_prepare_kernel",
        "attention_backward_hopper_kernel",
        "attention_backward_round_kernel",
    ]
    _, num_registers, spilled_bytes, shared_bytes, loops = found[2]
    assert num_registers == 168
    assert spilled_bytes <= 8
    assert shared_bytes <= 227 * 1024
    # One for each warpgroup: 32 products, all powers of a thread, and no wait for each product.
    assert len(loops) == 2
    for products, additions, powers, stores, loads, waits in loops:
        assert (products, additions, powers, stores, loads) == (32, 0, 32, 0, 0)
        assert waits <= 5
