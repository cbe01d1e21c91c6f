"""Decode attention: numbers, lengths, windows, pages, FP8, parts that are merged, refusals."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import math
from dataclasses import replace

import pytest
import torch

import kprof.kernels.decode_attention._kernel as host
from kprof.errors import KprofError
from kprof.kernels.correctness import Case
from kprof.kernels.correctness.integrity import count_variant_rows
from kprof.kernels.decode_attention._kernel import Schedule
from kprof.kernels.runtime import DifferentiationError
from kprof.kernels.bench.measure import subject_of
from kprof.kernels.decode_attention.decode_attention import KERNEL, decode_attention
from tests.kernels.kernel_checks import (
    COMPILED,
    INTERPRETED,
    are_same,
    compiled,
    errors_of,
    spills_of,
)
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED
FP8 = torch.float8_e4m3fn


def drawn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call_of(batch=2, query_heads=4, heads=2, tokens=1, keys=70, dim=64):
    return (
        drawn(batch, query_heads, tokens, dim),
        drawn(batch, heads, keys, dim, seed=1),
        drawn(batch, heads, keys, dim, seed=2),
    )


def expected_of(q, k, v, lengths=None, window=0):
    return KERNEL.truth(q.double(), k.double(), v.double(), lengths, window)


def error_of(found, expected):
    return errors_of([found], [expected])


@pytest.fixture(params=["whole", "in parts"])
def cutting(request, monkeypatch):
    """Attends in one part, or as on a large GPU: 16 keys at a time, 4 programs for a sequence."""
    sms = {"whole": 0, "in parts": 16}[request.param]
    monkeypatch.setattr(host, "sms_of", lambda device: sms)
    monkeypatch.setattr(host, "schedule_of", lambda *about: Schedule(16, 3, 4, 1))


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63])
def test_one_token_has_the_weighted_mean_of_all_values(cutting, keys):
    q, k, v = call_of(keys=keys)
    assert error_of(decode_attention(q, k, v)[0], expected_of(q, k, v)) < 5e-4


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_of_every_dimension_are_right(dim):
    q, k, v = call_of(batch=1, keys=33, dim=dim)
    assert error_of(decode_attention(q, k, v)[0], expected_of(q, k, v)) < 5e-4


@pytest.mark.parametrize(("query_heads", "heads"), [(3, 3), (6, 2), (8, 1)])
def test_query_heads_share_heads_of_keys_in_order(cutting, query_heads, heads):
    q, k, v = call_of(query_heads=query_heads, heads=heads)
    assert error_of(decode_attention(q, k, v)[0], expected_of(q, k, v)) < 5e-4


def test_a_token_does_not_see_those_after_it(cutting):
    q, k, v = call_of(tokens=3)
    assert error_of(decode_attention(q, k, v)[0], expected_of(q, k, v)) < 5e-4
    alone = decode_attention(q[:, :, :1], k[:, :, :-2], v[:, :, :-2])[0]
    torch.testing.assert_close(decode_attention(q, k, v)[0][:, :, :1], alone, rtol=0, atol=1e-3)


def test_tokens_see_everything_where_nothing_is_causal(cutting):
    q, k, v = call_of(tokens=2)
    expected = torch.cat([expected_of(q[:, :, i : i + 1], k, v) for i in range(2)], 2)
    assert error_of(decode_attention(q, k, v, is_causal=False)[0], expected) < 5e-4


def test_each_sequence_has_its_own_length_and_nothing_beyond_it_matters(cutting):
    q, k, v = call_of(batch=3)
    lengths = torch.tensor([70, 1, 33], dtype=torch.int32)
    expected = expected_of(q, k, v, lengths)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length:] = v[row, :, length:] = math.nan
    assert error_of(decode_attention(q, k, v, lengths)[0], expected) < 5e-4


def test_a_token_that_sees_no_key_gets_nothing(cutting):
    q, k, v = call_of(tokens=3)
    y, lse = decode_attention(q, k, v, torch.tensor([0, 2]))
    assert y[0].eq(0).all()
    assert lse[0].eq(-math.inf).all()
    assert y[1, :, 0].eq(0).all()
    assert lse[1].isinf().tolist() == 4 * [[True, False, False]]
    assert error_of(y[1:], expected_of(q[1:], k[1:], v[1:], torch.tensor([2]))) < 5e-4


@pytest.mark.parametrize("window", [1, 20, 69, 200])
def test_a_window_hides_what_lies_before_it(cutting, window):
    q, k, v = call_of(tokens=2)
    expected = expected_of(q, k, v, None, window)
    k[:, :, : max(69 - window, 0)] = v[:, :, : max(69 - window, 0)] = math.nan
    assert error_of(decode_attention(q, k, v, window=window)[0], expected) < 5e-4


def test_the_log_sum_exp_is_that_of_the_scaled_scores(cutting):
    q, k, v = call_of(heads=4)
    scores = 0.3 * q.double() @ k.double().transpose(-1, -2)
    found = decode_attention(q, k, v, scale=0.3)[1]
    torch.testing.assert_close(found.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("page", [4, 16, 32])
def test_pages_may_lie_anywhere_in_any_order(cutting, page):
    q, k, v = call_of(keys=64)
    lengths = torch.tensor([64, 19])
    order = torch.randperm(128 // page, generator=torch.Generator().manual_seed(3))
    table = order.view(2, -1)

    def in_pages(cache):
        pages = torch.empty(128 // page, page, 2, 64, dtype=cache.dtype)
        pages[order] = cache.transpose(1, 2).reshape(-1, page, 2, 64)
        return pages.transpose(1, 2)

    found = decode_attention(q, in_pages(k), in_pages(v), lengths, table)[0]
    assert error_of(found, expected_of(q, k, v, lengths)) < 5e-4


def test_keys_and_values_in_fp8_are_multiplied_by_their_scales(cutting):
    q, k, v = call_of()
    k, v = k.to(FP8), v.to(FP8)
    of_keys, of_values = torch.tensor(0.5), torch.tensor([2.0, 3.0])
    expected = expected_of(q, 0.5 * k.double(), of_values[:, None, None] * v.double())
    found = decode_attention(q, k, v, k_scale=of_keys, v_scale=of_values)[0]
    assert error_of(found, expected) < 5e-4


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_queries_of_any_size_meet_keys_in_fp8(size):
    q, k, v = call_of(batch=1)
    k, v, scale = k.to(FP8), v.to(FP8), 0.1 / size
    expected = expected_of((0.8 * scale * size * q).double() * 10, k.double(), v.double())
    found = decode_attention((size * q), k, v, scale=scale)[0]
    assert error_of(found, expected) < 2e-3


def test_caches_are_read_where_they_lie(cutting):
    q, k, v = call_of()
    apart = torch.stack([k, v], 2)
    turned = v.transpose(-1, -2).contiguous().transpose(-1, -2)
    lengths = torch.tensor([[70, 0], [31, 0]])[:, 0]
    expected = decode_attention(q, k, v, lengths.contiguous())
    assert are_same(decode_attention(q, apart[:, :, 0], turned, lengths), expected)
    by_token = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert are_same(decode_attention(by_token, k, v, lengths), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_key_that_is_no_number_spoils_the_heads_that_see_it_alone(cutting, bad):
    q, k, v = call_of()
    k[1, 0, 40, 3] = bad
    y, lse = decode_attention(q.abs(), k, v)
    assert y.isnan().all(-1).flatten().tolist() == [*4 * [False], True, True, False, False]
    assert lse.isnan().flatten().tolist() == [*4 * [False], True, True, False, False]


@pytest.mark.parametrize("step", [65, 66])
def test_keys_in_fp8_may_lie_an_odd_number_of_bytes_apart(step):
    q, k, v = call_of(batch=1, keys=20)
    k, v = k.to(FP8), v.to(FP8)
    expected = decode_attention(q, k, v)
    apart = torch.zeros(2, 1, 2, 20, step, dtype=torch.uint8)
    for there, cache in zip(apart, (k, v), strict=True):
        there[..., 1:65] = cache.view(torch.uint8)
    found = decode_attention(q, *(one.view(FP8)[..., 1:65] for one in apart))
    assert are_same(found, expected)


def test_a_sequence_has_the_same_bits_in_every_batch_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(host, "schedule_of", lambda *about: Schedule(16, 3, 4, 1))
    monkeypatch.setattr(host, "INVARIANT_PARTS", 3)
    q, k, v = call_of(batch=3)
    lengths = torch.tensor([70, 5, 40])
    together = decode_attention(q, k, v, lengths, is_invariant=True)
    for i in range(3):
        length = lengths[i : i + 1]
        cut = [one[i : i + 1] for one in (q, k[:, :, :length], v[:, :, :length])]
        alone = decode_attention(*cut, length, is_invariant=True)
        assert are_same(alone, [one[i : i + 1] for one in together])


@pytest.mark.parametrize(
    ("batch", "keys", "parts", "block"),
    [(1, 1_024, 16, 64), (1, 4_096, 16, 64), (1, 16_384, 16, 128), (8, 4_096, 2, 128)],
)
def test_a_cache_is_cut_by_what_each_sm_reads_of_it(batch, keys, parts, block):
    q, k = torch.empty(batch, 32, 1, 128).half(), torch.empty(1, 8, keys, 128).half()
    cut = host.partition_of(q, k.expand(batch, -1, -1, -1), None, False)
    assert (cut.parts, cut.schedule.block) == (parts, block)


@pytest.mark.parametrize("batch", [16, 32, 128])
def test_many_sequences_are_read_by_two_programs_on_an_sm(batch):
    q, k = torch.empty(batch, 32, 1, 128).half(), torch.empty(1, 8, 4_096, 128).half()
    cut = host.partition_of(q, k.expand(batch, -1, -1, -1), None, False)
    assert (cut.schedule.block, cut.schedule.ctas_per_sm) == (64, 2)


def test_how_a_sequence_is_cut_does_not_depend_on_the_batch_where_that_is_asked_for():
    cuts = []
    for batch in (1, 8, 40):
        q, k = torch.empty(batch, 32, 1, 128).half(), torch.empty(1, 8, 4_096, 128).half()
        cuts.append(
            host.partition_of(q, k.expand(batch, -1, -1, -1), None, True)._replace(places=0)
        )
    assert len(set(cuts)) == 1


@pytest.mark.parametrize(("provider", "varies"), [("kprof", True), ("kprof-invariant", False)])
def test_the_gate_holds_the_one_that_claims_it_to_the_same_bits_in_every_batch(
    cutting, provider, varies
):
    subject = subject_of(KERNEL, provider)
    assert subject.is_batch_invariant is not varies
    cases = [Case((4, 4, 2, 1, 70, 64), "float16"), Case((3, 4, 1, 2, 40, 64, 30), "float16")]
    found = count_variant_rows(subject, cases)
    assert found.num_rows == 5
    assert varies or found.new == 0


def test_the_gate_finds_rows_that_vary(monkeypatch):
    monkeypatch.setattr(host, "schedule_of", lambda *about: Schedule(16, 3, 4, 1))
    monkeypatch.setattr(host, "sms_of", lambda device: 8)
    subject = replace(subject_of(KERNEL), is_batch_invariant=True)
    found = count_variant_rows(subject, [Case((4, 4, 2, 1, 70, 64), "float16")])
    assert found.new > 0


def test_the_programs_leave_their_counters_as_they_found_them(monkeypatch):
    monkeypatch.setattr(host, "schedule_of", lambda *about: Schedule(16, 3, 4, 1))
    q, k, v = call_of()
    first = decode_attention(q, k, v)
    assert host.counters(4, q.device).count_nonzero() == 0
    assert are_same(decode_attention(q, k, v), first)


def test_no_sequence_gives_no_result():
    y, lse = decode_attention(*call_of(batch=0))
    assert (y.shape, lse.shape) == ((0, 4, 1, 64), (0, 4, 1))


def test_no_key_gives_nothing():
    y, lse = decode_attention(*call_of(keys=0))
    assert y.eq(0).all()
    assert lse.eq(-math.inf).all()


def test_torch_gets_rows_that_begin_at_multiples_of_16_bytes(monkeypatch):
    seen = []

    def attention(q, k, v, **options):
        seen.extend(
            one for x in (q, k, v) for one in (x.data_ptr(), *x.stride()[:-1], x.stride(-1))
        )
        return q

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attention)
    wide = torch.zeros(3, 2, 4, 5, 69).half()[..., 3:67]
    KERNEL.reference(wide[0, :, :, :1], wide[1], wide[2])
    assert all(one == 1 or one % 8 == 0 for one in seen)


@COMPILED
def test_it_is_the_same_when_compiled_in_one_graph():
    q, k, v = call_of(batch=1, keys=20)
    assert are_same(compiled(decode_attention)(q, k, v), decode_attention(q, k, v))


def test_what_it_cannot_do_it_refuses():
    q, k, v = call_of()
    assert KERNEL.refuses(q, k, v) is None
    assert "heads of 48" in KERNEL.refuses(q[..., :48], k[..., :48], v[..., :48])
    assert "float32" in KERNEL.refuses(q.float(), k.float(), v.float())
    assert "do not share" in KERNEL.refuses(q[:, :3], k, v)
    assert "a grid" in KERNEL.refuses(*(one[:1].expand(65_536, -1, -1, -1) for one in (q, k, v)))
    assert "too many" in KERNEL.refuses(q.expand(2, 4, 40, 64), k, v)
    assert "gradients" in KERNEL.refuses(q.requires_grad_(), k, v)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"q": (2, 3, 1, 64)}, "do not share"),
        ({"q": (3, 4, 1, 64)}, "3 sequences of queries, 2"),
        ({"q": (4, 1, 64)}, "queries"),
        ({"v": (2, 2, 69, 64)}, "values"),
        ({"k": (2, 2, 70, 128), "v": (2, 2, 70, 128)}, "64 and 128"),
        ({"lengths": (1,)}, "for 2 sequences"),
        ({"table": (1, 2)}, "for 2 sequences"),
        ({"k_scale": ()}, "scales of keys"),
    ],
)
def test_a_call_that_would_read_elsewhere_or_leave_results_unwritten_raises(others, why):
    q, k, v = call_of()
    call = {"q": q, "k": k, "v": v}
    call |= {name: torch.ones(shape, dtype=torch.float16) for name, shape in others.items()}
    call |= {name: call[name].int() for name in ("lengths", "table") if name in call}
    with pytest.raises(KprofError, match=why):
        decode_attention(**call)


def test_lengths_are_integers():
    with pytest.raises(KprofError, match="not in integers"):
        decode_attention(*call_of(), torch.tensor([70.0, 3.0]))


def test_gradients_without_an_implementation_are_refused():
    q, k, v = call_of()
    with pytest.raises(DifferentiationError, match="no gradients"):
        decode_attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert decode_attention(q, k, v)[0].shape == q.shape


@pytest.mark.slow
def test_nothing_spills_on_hopper_for_the_default_shapes():
    shapes = [
        *((1, 32, 8, 1, 4_096, 64), (1, 32, 8, 1, 4_096, 128), (2, 16, 8, 4, 4_096, 256)),
        *((2, 32, 8, 4, 1_024, 128, 512), (40, 32, 8, 1, 256, 128), (1, 64, 4, 4, 1_024, 256)),
        *((1, 32, 8, 1, keys, dim) for keys in (512, 16_384) for dim in (64, 128)),
    ]
    assert spills_of(KERNEL, *[(shape, "bfloat16") for shape in shapes]) == []


AHEAD = """
import itertools, json, torch
from kprof.kernels.bench.ahead import compile_ahead
from kprof.kernels.decode_attention.decode_attention import decode_attention

keys = 4_096
for dim, dtype, page in itertools.product((64, 128, 256), ("bfloat16", "float8_e4m3fn"), (0, 64)):
    for heads, tokens in ((8, 1), (8, 4), (8, 8), (4, 8)):
        q = torch.empty(1, 32, tokens, dim, dtype=torch.bfloat16)
        k = torch.empty(1, heads, keys, dim).to(getattr(torch, dtype))
        how = {"is_invariant": tokens == 1}
        if page:
            k = k.view(keys // page, heads, page, dim)
            how = {"table": torch.zeros(1, keys // page, dtype=torch.int32)}
        for one in compile_ahead(lambda: decode_attention(q, k, k, **how)):
            if one.spilled_bytes:
                print(json.dumps([dim, dtype, page, heads, tokens, one.spilled_bytes]))
"""


@pytest.mark.slow
def test_nothing_spills_on_hopper_with_pages_fp8_several_tokens_or_the_same_bits_in_every_batch():
    assert on_hopper(AHEAD) == ""


def test_no_token_without_a_key_reaches_torch_whose_ways_differ_in_what_they_make_of_it(
    monkeypatch,
):
    attend, masks = torch.nn.functional.scaled_dot_product_attention, []

    def noting(*tensors, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    q, k, v = call_of(batch=3, tokens=2)
    y = KERNEL.reference(q, k, v, torch.tensor([70, 1, 0]), 0)
    assert masks[0].any(-1).all()
    # A sequence of one key has it before its last token alone.
    assert y[2].eq(0).all() and y[1, :, 0].eq(0).all() and y[1, :, 1].ne(0).any()
    assert KERNEL.reference(q[:, :, :1], k, v) is not None and masks[1] is None
