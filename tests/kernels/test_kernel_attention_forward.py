"""Attention of many queries: numbers, masks, lengths, order of tiles, refusals, what compiles."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import kprof.kernels.attention._triton as host
from kprof.kernels.correctness import Case
from kprof.kernels.correctness.inputs import Draw
from kprof.kernels.correctness.integrity import count_variant_rows
from kprof.kernels.attention._triton import Schedule
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.attention.attention_forward import KERNEL, attention_forward, shape_of
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    are_same,
    compiled,
    errors_of,
    spills_of,
    why_inaccurate,
    why_untrusted,
)
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED
CLOSE = 5e-4


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """A GPU's tiles would hold all of these calls."""
    monkeypatch.setattr(host, "forward_schedule", lambda *about: Schedule(32, 16, 4, 2))


def drawn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call_of(queries=70, keys=None, batch=2, query_heads=2, heads=1, dim=64):
    keys = queries if keys is None else keys
    return (
        drawn(batch, query_heads, queries, dim),
        drawn(batch, heads, keys, dim, seed=1),
        drawn(batch, heads, keys, dim, seed=2),
    )


def expected_of(q, k, v, is_causal=True, window=0):
    return KERNEL.truth(q.double(), k.double(), v.double(), is_causal, window)


def error_of(call, **options):
    return errors_of([attention_forward(*call, **options)[0]], [expected_of(*call, **options)])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("queries", [1, 15, 16, 17, 33])
def test_a_query_has_the_weighted_mean_of_the_values_that_it_sees(queries, is_causal):
    assert error_of(call_of(queries), is_causal=is_causal) < CLOSE


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 50), (20, 50), (33, 34), (50, 33)])
def test_queries_are_the_last_ones_where_there_are_more_keys(queries, keys, is_causal):
    assert error_of(call_of(queries, keys), is_causal=is_causal) < CLOSE


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_of_every_dimension_are_right(dim):
    call = call_of(20, batch=1, dim=dim)
    assert error_of(call) < CLOSE


@pytest.mark.parametrize(("query_heads", "heads"), [(3, 3), (6, 2), (4, 1)])
def test_query_heads_share_heads_of_keys_in_order(query_heads, heads):
    assert error_of(call_of(20, query_heads=query_heads, heads=heads)) < CLOSE


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 69])
def test_a_window_hides_what_is_not_near(window, is_causal):
    assert error_of(call_of(70), is_causal=is_causal, window=window) < CLOSE


@pytest.mark.parametrize(("queries", "keys"), [(10, 60), (60, 10)])
def test_a_window_is_about_a_querys_own_key_whatever_the_lengths(queries, keys):
    assert error_of(call_of(queries, keys), window=20) < CLOSE
    call = call_of(queries, keys)
    found, expected = (
        attention_forward(*call, is_causal=False, window=20)[0],
        expected_of(*call, False, 20),
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_larger_than_the_sequence_hides_nothing(is_causal):
    call = call_of(40)
    wide = attention_forward(*call, is_causal=is_causal, window=1_000)
    assert are_same(wide, attention_forward(*call, is_causal=is_causal))


def test_a_query_that_sees_no_key_gets_nothing():
    call = call_of(50, 33)
    y, lse = attention_forward(*call)
    assert y[:, :, :17].eq(0).all()
    assert lse.isinf().sum(-1).tolist() == [[17, 17], [17, 17]]
    assert lse[:, :, :17].eq(-math.inf).all()
    assert y[:, :, 17:].ne(0).any(-1).all()


def test_no_key_gives_nothing():
    y, lse = attention_forward(*call_of(5, 0))
    assert y.eq(0).all()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_no_query_gives_no_result(batch, queries):
    y, lse = attention_forward(*call_of(queries, 9, batch=batch))
    assert (y.shape, lse.shape) == ((batch, 2, queries, 64), (batch, 2, queries))


def test_the_log_sum_exp_is_that_of_the_scaled_scores():
    q, k, v = call_of(40, heads=2)
    scores = 0.3 * q.double() @ k.double().transpose(-1, -2)
    found = attention_forward(q, k, v, scale=0.3, is_causal=False)[1]
    torch.testing.assert_close(found.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)


def test_scores_too_large_for_a_power_are_right():
    q, k, v = call_of(40)
    assert error_of((100 * q, 100 * k, v)) < CLOSE


def test_a_query_for_which_one_key_counts_has_its_value_to_the_last_bit(monkeypatch):
    round_once = lambda x, y, z: (np.float64(x) * y + z).astype(np.float32)  # noqa: E731
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_fma",
        lambda self, x, y, z: TensorHandle(round_once(x.data, y.data, z.data), z.dtype.scalar),
    )
    q, k, v = call_of()
    expected = expected_of(1000 * q, 1000 * k, v).half()
    found = attention_forward(1000 * q, 1000 * k, v)[0]
    assert are_same([found], [expected])


def test_sequences_of_several_lengths_lie_one_after_another():
    q, k, v = call_of(batch=1, queries=60, keys=80)
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, 20, 20, 21, 60]),
        torch.tensor([0, 20, 35, 66, 80]),
    )
    starts = {
        "cu_seqlens_q": cu_seqlens_q.int(),
        "cu_seqlens_k": cu_seqlens_k.int(),
        "max_seqlen_q": 39,
    }
    y, lse = attention_forward(q, k, v, **starts)
    for i in (0, 2, 3):
        a, b = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        c, d = cu_seqlens_k[i], cu_seqlens_k[i + 1]
        alone = attention_forward(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d])
        assert are_same((y[:, :, a:b], lse[:, :, a:b]), alone)


# Of the interpreter's maximum, for queries of which every score is no number.
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_nothing_of_the_next_sequence_gets_into_this_one():
    q, k, v = call_of(batch=1, queries=30)
    starts = torch.tensor([0, 9, 30], dtype=torch.int32)
    alone = attention_forward(q[:, :, :9], k[:, :, :9], v[:, :, :9])[0]
    k[:, :, 9:] = v[:, :, 9:] = math.nan
    found = attention_forward(q, k, v, starts, starts, max_seqlen_q=21)[0]
    assert are_same([found[:, :, :9]], [alone])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_key_that_is_no_number_spoils_the_queries_that_see_it_alone(bad):
    q, k, v = call_of(40)
    k[1, 0, 25, 3] = bad
    y, lse = attention_forward(q.abs(), k, v)
    expected = torch.zeros(2, 2, 40, dtype=torch.bool)
    expected[1, :, 25:] = True
    assert torch.equal(y.isnan().all(-1), expected)
    assert torch.equal(y.isnan().any(-1), expected)
    assert torch.equal(lse.isnan(), expected)


def test_a_value_that_is_no_number_spoils_all_who_see_it():
    q, k, v = call_of(40)
    v[0, 0, 25, 3] = math.nan
    y = attention_forward(q, k, v)[0]
    assert y[0, :, 25:, 3].isnan().all()
    assert not y[0, :, :, 4:].isnan().any()
    assert not y[1].isnan().any()


def test_tensors_may_lie_in_memory_in_any_way():
    q, k, v = call_of(20, heads=2)
    expected = attention_forward(q, k, v)
    apart = drawn(2, 20, 2, 3 * 64 + 5)
    views = [apart[..., 5 + i * 64 : 69 + i * 64].transpose(1, 2) for i in range(3)]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    assert are_same(attention_forward(*views), expected)
    swapped = [one.transpose(2, 3).contiguous().transpose(2, 3) for one in (q, k, v)]
    assert are_same(attention_forward(*swapped), expected)


def test_results_lie_as_the_next_layer_reads_them():
    y, _ = attention_forward(*call_of(20))
    assert y.transpose(1, 2).is_contiguous()


def test_a_sequence_has_the_same_bits_in_every_batch():
    subject = subject_of(KERNEL)
    assert subject.is_batch_invariant
    found = count_variant_rows(subject, [Case((4, 4, 2, 40, 40, 1, 64), "float16")])
    assert (found.num_rows, found.new) == (3, 0)


@COMPILED
def test_it_is_the_same_when_compiled_in_one_graph():
    call = call_of(20, batch=1)
    assert are_same(compiled(attention_forward)(*call), attention_forward(*call))


@pytest.mark.parametrize(
    ("queries", "keys", "window", "pairs"),
    [(4, 4, 1, 10), (4, 4, 0, 16), (2, 4, 1, 7), (4, 2, 1, 3), (4, 4, 2, 7)],
)
def test_the_work_is_that_of_the_keys_that_are_seen(queries, keys, window, pairs):
    call = KERNEL.inputs(
        (1, 1, 1, queries, keys, window, 64),
        Draw(Case((1,), "float16"), subject_of(KERNEL)),
    )
    assert KERNEL.work(*call).flops == 4 * 64 * pairs


@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_call_has_the_shape_that_it_was_made_of(window):
    shape = (1, 2, 1, 4, 5, window, 64)
    made = KERNEL.inputs(shape, Draw(Case((1,), "float16"), subject_of(KERNEL)))
    assert shape_of(*made) == shape


@pytest.mark.parametrize(("window", "counted"), [(0, 1), (4, 4), (5, 1), (9, 1)])
def test_a_window_that_hides_nothing_is_none_in_the_shape(window, counted):
    q, k, v = call_of(4, 5)
    assert shape_of(q, k, v, True, window)[5] == counted


def test_what_it_cannot_do_it_refuses():
    q, k, v = call_of(20)
    assert KERNEL.refuses(q, k, v) is None
    assert "heads of 48" in KERNEL.refuses(q[..., :48], k[..., :48], v[..., :48])
    assert "float32" in KERNEL.refuses(q.float(), k.float(), v.float())
    assert "do not share" in KERNEL.refuses(*call_of(20, query_heads=3, heads=2))
    assert "a grid" in KERNEL.refuses(*(one[:1].expand(65_536, -1, -1, -1) for one in (q, k, v)))
    assert KERNEL.refuses(q.requires_grad_(), k, v) is None


def test_the_kernel_for_hopper_says_why_it_is_not_here():
    with pytest.raises(ImportError, match="Gluon"):
        KERNEL.provider("kprof-hopper").load()


@pytest.mark.slow
def test_the_gate_passes_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(host, "forward_schedule", lambda *about: Schedule(16, 16, 4, 2))
    assert why_untrusted(KERNEL, (2, 1, 1, 20, 20, 1, 64)) == ""
    assert why_inaccurate(KERNEL, (2, 2, 1, 20, 20, 0, 64), ("float16",)) == ""


@pytest.mark.slow
def test_nothing_spills_on_hopper_for_the_default_shapes():
    shapes = [
        (1, 2, 1, queries, 256, window, dim)
        for dim in (64, 128, 256)
        for queries, window in ((256, 1), (40, 1), (256, 0), (256, 100))
    ]
    cases = [(shape, "bfloat16") for shape in shapes]
    assert spills_of(replace(KERNEL, differentiable=()), *cases) == []


ON_HOPPER = """
import json, torch
from unittest.mock import patch
from kprof.kernels.bench import ahead
from kprof.kernels.attention._hopper import REGISTERS, schedule_for
from kprof.kernels.attention.attention_forward import KERNEL
from tests.kernels.kernel_code import powers_beside_values

read, found = ahead._read, []

def kept(*given):
    binary = read(*given)
    ptx = binary.ptx
    kinds = ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.dec", "bar.sync 9, 256")
    counts = [ptx.count(kind) > 0 for kind in kinds]
    spared = REGISTERS[schedule.warpgroups][0] - binary.num_registers
    about = [spared, binary.spilled_bytes, binary.shared_bytes, counts]
    ways = schedule.warpgroups, schedule.exp_before_wait, schedule.prefetches_q
    found.append([*about, *ways, powers_beside_values(binary)])
    return binary

attend = KERNEL.provider("kprof-hopper").load()
calls = [(300, dim, torch.bfloat16, c, 0) for dim in (64, 128, 256) for c in (True, False)]
calls += [(300, 128, torch.float16, True, 100), (8192, 64, torch.bfloat16, True, 0)]
calls = [(*call, 300) for call in calls]
calls += [(600, dim, torch.bfloat16, False, 0, 640) for dim in (64, 128, 256)]
calls += [(512, 64, torch.bfloat16, False, 0, 512), (2048, 128, torch.bfloat16, False, 0, 300)]
calls += [(600, dim, torch.bfloat16, True, 0, 600) for dim in (64, 128)]
for queries, dim, dtype, causal, window, keys in calls:
    q = torch.zeros(1, 4, queries, dim, dtype=dtype)
    k = torch.zeros(1, 2, keys, dim, dtype=dtype)
    schedule = schedule_for(dim, queries, keys, not (causal or window))
    with patch.object(ahead, "_read", kept):
        ahead.compile_ahead(lambda: attend(q, k, k, causal, window))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_on_hopper_warps_are_specialised_and_nothing_spills():
    found = json.loads(on_hopper(ON_HOPPER))
    held = [False, *2 * [True], False, *3 * [True], *3 * [False], True, False, False, False, True]
    early = [*4 * [True], False, False, True, False, False, True, False, True, False, True, False]
    assert [one[5:7] for one in found] == [list(one) for one in zip(held, early, strict=True)]
    for spared, spilled_bytes, shared_bytes, has, groups, exp_before_wait, _, powers in found:
        # One warpgroup takes no turns, and leaves half of a multiprocessor to another program.
        assert (spared, spilled_bytes, has) == (0, 0, [*3 * [True], groups > 1])
        assert shared_bytes <= (227 if groups > 1 else 113) * 1024
        # A thread's: half of a block of 64 or 128 keys, and what two rows shrink by.
        assert len(powers) >= 2
        assert all(one in (34, 66) for one in powers) or not exp_before_wait
