"""Products with FP8 weights, in Triton's interpreter and ahead of time for Hopper."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json

import pytest
import torch

from kprof.kernels.correctness.inputs import place
from kprof.kernels.fp8 import _gemm
from kprof.kernels.fp8._gemm import FewRows, Tiled, multiply, schedule_of
from kprof.kernels.fp8._gemm import PREFETCHED, gains_from_overlap
from kprof.kernels.runtime import Launcher
from kprof.kernels.fp8.fp8_gemm import KERNEL, fp8_gemm
from kprof.kernels.fp8.quantize_fp8 import quantize_fp8
from tests.kernels.kernel_checks import (
    INTERPRETED,
    compiled,
    rows,
)
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED
FP8 = torch.float8_e4m3fn
# The interpreter truncates to bfloat16.
OF_BFLOAT16, OF_FLOAT16 = 6e-3, 5e-4
SMALL_NARROW = FewRows(16, 32, 2, 2)
SMALL_TILED = Tiled(16, 16, 128, 4, 2, 3)
BLOCKED_TILED = Tiled(16, 32, 128, 4, 2, 2)


def scales(*shape, seed):
    return rows(*shape, seed=seed).abs() + 0.5


def given(num_rows, num_columns, depth, dtype=FP8, is_blocked=False):
    x = rows(num_rows, depth, seed=1).to(dtype)
    w = rows(num_columns, depth, seed=2).to(FP8)
    groups = -(-depth // 128)
    if is_blocked:
        w_scale = scales(-(-num_columns // 128), groups, seed=3)
        x_scale = scales(groups, num_rows, seed=4).t()
    else:
        w_scale, x_scale = scales(num_columns, 1, seed=3), scales(num_rows, 1, seed=4)
    return x, w, x_scale if dtype == FP8 else None, w_scale


def exact(x, w, x_scale, w_scale, *others):
    x_scale = None if x_scale is None else x_scale.double()
    return KERNEL.truth(x.double(), w.double(), x_scale, w_scale.double(), *others)


def error_of(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("schedule", [SMALL_NARROW, SMALL_TILED], ids=["narrow", "tiled"])
def test_rows_that_32_bits_do_not_reach_give_the_same(schedule):
    x, w, _, w_scale = given(3, 16, 64, torch.float16)
    expected = multiply(x, w, None, w_scale, None, "none", schedule)
    apart = place(x, "far").view
    assert apart.stride(0) > 2**30
    assert torch.equal(multiply(apart, w, None, w_scale, None, "none", schedule), expected)


@pytest.mark.parametrize("schedule", [SMALL_NARROW, SMALL_TILED], ids=["narrow", "tiled"])
@pytest.mark.parametrize("shape", [(1, 16, 64), (5, 40, 208), (16, 17, 33)], ids=str)
@pytest.mark.parametrize("dtype", [FP8, torch.float16], ids=["fp8", "wide"])
def test_every_schedule_gives_the_product(schedule, shape, dtype):
    arguments = given(*shape, dtype)
    found = multiply(*arguments, None, "none", schedule)
    assert found.dtype == (torch.bfloat16 if dtype == FP8 else dtype)
    assert error_of(found, exact(*arguments)) < (OF_BFLOAT16 if dtype == FP8 else OF_FLOAT16)


@pytest.mark.parametrize(
    "schedule", [FewRows(16, 64, 4, 2), BLOCKED_TILED], ids=["narrow", "tiled"]
)
@pytest.mark.parametrize("dtype", [FP8, torch.float16], ids=["fp8", "wide"])
def test_blocks_may_have_scales_of_their_own(schedule, dtype):
    arguments = given(6, 144, 272, dtype, is_blocked=True)
    found = multiply(*arguments, None, "none", schedule)
    assert error_of(found, exact(*arguments)) < (OF_BFLOAT16 if dtype == FP8 else OF_FLOAT16)


@pytest.mark.parametrize("schedule", [SMALL_NARROW, SMALL_TILED], ids=["narrow", "tiled"])
def test_what_is_launched_for_one_call_is_good_for_none_that_lies_otherwise(schedule):
    x, w, _, w_scale = given(5, 32, 64, torch.float16)
    wide, bias = torch.zeros(5, 96, dtype=torch.float16), rows(40, seed=5).half()
    wide[:, :64] = x
    calls = [(one, bias[first : first + 32]) for one in (x, wide[:, :64]) for first in (0, 1, 8)]
    for one, added in (*calls, *calls):
        y = multiply(one, w, None, w_scale, added, "none", schedule)
        expected = exact(x, w, None, w_scale, added.double(), "none")
        assert error_of(y, expected) < 2 * OF_FLOAT16


def test_more_rows_than_a_tile_has_are_several_tiles():
    arguments = given(40, 144, 64, torch.float16)
    found = multiply(*arguments, None, "none", Tiled(16, 16, 32, 4, 2, 1))
    assert error_of(found, exact(*arguments)) < OF_FLOAT16


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_bias_and_activation_come_behind_the_product(activation, num_rows):
    arguments, bias = given(num_rows, 48, 64, torch.float16), rows(48, seed=5).half()
    expected = exact(*arguments, bias.double(), activation)
    assert error_of(fp8_gemm(*arguments, bias, activation), expected) < 2 * OF_FLOAT16


def test_a_nan_stays_in_its_row():
    x, w, _, w_scale = given(3, 16, 64, torch.float16)
    x[1, 5] = torch.nan
    y = multiply(x, w, None, w_scale, None, "none", SMALL_NARROW)
    assert y.isnan().any(1).tolist() == [False, True, False]


def test_matrices_that_lie_apart_are_read_where_they_are():
    x, w, _, w_scale = given(5, 32, 64, torch.float16)
    expected = fp8_gemm(x, w, None, w_scale)
    apart = torch.full((5, 80), torch.nan, dtype=torch.float16)
    apart[:, 16:] = x
    turned = w.t().contiguous().t()
    assert torch.equal(fp8_gemm(apart[:, 16:], turned, None, w_scale), expected)


def test_no_rows_give_no_results():
    x, w, x_scale, w_scale = given(0, 32, 64)
    assert fp8_gemm(x, w, x_scale, w_scale).shape == (0, 32)


def test_it_compiles_without_a_graph_break_to_the_same_bits():
    x, *others = given(4, 32, 64, torch.float16)
    assert torch.equal(compiled(lambda x: fp8_gemm(x * 2, *others))(x), fp8_gemm(x * 2, *others))


def test_what_it_cannot_take_is_refused_with_a_reason():
    x, w, x_scale, w_scale = given(4, 32, 256)
    assert KERNEL.refuses(x, w, x_scale, w_scale) is None
    assert "scales" in KERNEL.refuses(x, w, None, w_scale)
    assert "scales" in KERNEL.refuses(x.half(), w, x_scale, w_scale)
    assert "weights" in KERNEL.refuses(x, w, x_scale, w_scale[:31])
    assert "of x" in KERNEL.refuses(x, w, x_scale[:3], w_scale)
    assert "tanh" in KERNEL.refuses(x, w, x_scale, w_scale, None, "tanh")
    assert KERNEL.refuses(x[:, :9], w, x_scale, w_scale) is not None


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_reference_takes_the_kernels_own_inputs(is_blocked):
    shape = (5, 144, 272, 1) if is_blocked else (5, 48, 80)
    arguments = KERNEL.inputs(shape, Plain())
    assert KERNEL.refuses(*arguments) is None
    assert error_of(KERNEL.reference(*arguments), exact(*arguments)) < OF_BFLOAT16


@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_scales_in_blocks_lie_as_the_cast_leaves_them(num_rows):
    x, _, scales, _ = KERNEL.inputs((num_rows, 144, 272, 1), Plain())
    assert scales.stride() == quantize_fp8(x.float(), "1x128")[1].stride()


def test_scales_that_lie_otherwise_give_the_same():
    x, w, x_scale, w_scale = given(6, 144, 272, is_blocked=True)
    found = fp8_gemm(x, w, x_scale.contiguous(), w_scale)
    assert torch.equal(found, fp8_gemm(x, w, x_scale, w_scale))


class Plain:
    """Draws normal values."""

    def __call__(self, *shape):
        return rows(*shape).bfloat16()

    def plain(self, *shape, scale):
        return rows(*shape).bfloat16() * scale


def test_few_rows_are_cut_so_that_most_multiprocessors_read():
    for _, num_columns, depth in {shape[:3] for shape in KERNEL.shapes}:
        for num_rows in (1, 8, 64, 128):
            cut = schedule_of(num_rows, num_columns, depth, False, False, 132)
            programs = -(-num_columns // cut.n) * (cut.splits if isinstance(cut, Tiled) else 1)
            assert programs >= 0.7 * 132


@pytest.mark.parametrize(
    ("num_columns", "splits", "stages"), [(4_096, 2, 10), (6_144, 1, 12), (8_448, 1, 12)]
)
def test_64_rows_have_a_program_for_each_multiprocessor_and_no_room_for_two(
    num_columns, splits, stages
):
    cut = schedule_of(64, num_columns, 4_096, False, False, 132)
    assert cut == Tiled(64, 64, 128, 4, stages, splits)
    assert num_columns // 64 * splits <= 132
    assert cut.stage_bytes(64) > 232_448 // 2


def test_rings_are_as_long_as_a_gpu_has_room_for():
    cut = schedule_of(64, 4_096, 4_096, False, False, 128, room=101_376)
    assert (cut.stages, cut.stage_bytes(64)) == (6, 98_304)


@pytest.mark.parametrize(
    ("programs", "num_casting", "fit", "is_gain"),
    [
        # 256 programs, two for each of 132 multiprocessors: three where 8 or 16 are taken.
        (256, 8, 3, False),
        (256, 16, 3, False),
        # Two, where no more have room.
        (256, 8, 2, True),
        # One is taken: still two for each.
        (256, 1, 3, True),
        # 192 programs: two for some, whether or not 32 are taken.
        (192, 32, 3, True),
        # More programs cast than there are multiprocessors.
        (256, 140, 3, False),
    ],
)
def test_a_launch_before_the_cast_ends_gains_where_programs_still_spread_evenly(
    programs, num_casting, fit, is_gain
):
    assert gains_from_overlap(programs, num_casting, fit, 132) == is_gain


def launched(monkeypatch, *arguments, schedule=SMALL_NARROW):
    """Return the arguments and options with which a product behind the cast is launched."""
    found = []
    monkeypatch.setattr(_gemm, "_plans", {})
    monkeypatch.setattr(_gemm, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(_gemm, "num_sms", lambda device: 132)
    monkeypatch.setattr(Launcher, "__call__", lambda *given, **known: found.append(given[3:5]))
    multiply(*arguments, None, "none", schedule, is_behind_cast=True)
    (one,) = found
    return one


def is_let_in_early(monkeypatch, *arguments):
    """Tell whether a product said to be behind the cast is launched so that it overlaps it."""
    return launched(monkeypatch, *arguments)[1].get("launch_pdl", False)


def empty(num_rows, num_columns, depth):
    """Return arguments of which only sizes count."""
    x, w = torch.empty(num_rows, depth, dtype=FP8), torch.empty(num_columns, depth, dtype=FP8)
    return x, w, torch.empty(num_rows, 1), torch.empty(num_columns, 1)


@pytest.mark.parametrize(("num_columns", "fetched"), [(6_144, PREFETCHED), (28_672, 0)])
def test_no_more_weights_are_fetched_than_the_cast_leaves_time_for(
    num_columns, fetched, monkeypatch
):
    arguments, options = launched(monkeypatch, *empty(1, num_columns, 4_096), schedule=None)
    assert options["launch_pdl"]
    assert arguments[-2:] == (True, fetched)


@pytest.mark.parametrize("depth", [4_096, 14_336])
def test_a_product_whose_programs_would_crowd_waits_for_the_cast(monkeypatch, depth):
    arguments, options = launched(monkeypatch, *empty(8, 4_096, depth), schedule=None)
    assert "launch_pdl" not in options
    assert arguments[-2:] == (False, 0)


def test_a_product_behind_the_cast_is_launched_before_that_has_ended(monkeypatch):
    assert is_let_in_early(monkeypatch, *given(3, 16, 64))


def test_weights_that_are_copied_first_are_waited_for(monkeypatch):
    x, w, x_scale, w_scale = given(3, 16, 64)
    turned = w.t().contiguous().t()
    assert not is_let_in_early(monkeypatch, x, turned, x_scale, w_scale)


def test_a_product_of_nothing_has_no_cast_to_overlap(monkeypatch):
    assert not is_let_in_early(monkeypatch, *given(3, 16, 0))


@pytest.mark.slow
def test_ahead_of_time_products_read_nothing_before_they_wait_for_the_cast():
    told = [json.loads(line) for line in on_hopper(OVERLAPPING).splitlines()]
    cast, *products = [[kind for kind in one if kind in KINDS] for one in told]
    # It lets others in before it reads.
    assert cast[0] == "PREEXIT"
    assert len(products) == 5
    for product, fetches in zip(products, (True, True, True, True, False), strict=True):
        before = product[: product.index("ACQBULK")]
        assert set(before) == ({"CCTL"} if fetches else set())
        assert "LDGSTS" in product


KINDS = ("ACQBULK", "CCTL", "LDG", "LDGSTS", "PREEXIT", "STG", "ATOMG", "RED", "UTMALDG")
OVERLAPPING = """
import json, torch
from kprof.kernels.fp8 import _gemm as _fp8_gemm, quantize_fp8
from kprof.kernels.bench import ahead
from kprof.kernels.fp8._gemm import multiply
from tests.kernels.kernel_code import instructions_of, _kind_of

_fp8_gemm.has_dependent_launch = quantize_fp8.has_dependent_launch = lambda device: True
_fp8_gemm.num_sms = lambda device: 132
FP8 = torch.float8_e4m3fn
calls = [lambda: quantize_fp8.quantize_fp8(torch.empty(1, 4096, dtype=torch.bfloat16))]
for m, n in ((1, 4096), (16, 6144), (64, 4096), (64, 6144), (1, 28672)):
    x, w = torch.empty(m, 4096, dtype=FP8), torch.empty(n, 4096, dtype=FP8)
    s = torch.empty(m, 1), torch.empty(n, 1)
    calls.append(lambda x=x, w=w, s=s: multiply(x, w, *s, None, "none", is_behind_cast=True))
for call in calls:
    (binary,) = ahead.compile_ahead(call)
    print(json.dumps([_kind_of(one) for one in instructions_of(binary)[0]]))
"""


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_and_tensor_cores_multiply_fp8():
    told = on_hopper(AHEAD)
    found = [json.loads(line) for line in told.splitlines()]
    assert len(found) == 44
    assert [one for one in found if one["spilled"]] == []
    # Who shares a multiprocessor follows from it.
    assert all(one["shared"] == one["ring"] for one in found if one["ring"])
    # 16 bytes at a time, past the registers; widened weights go there.
    assert all("cp.async.cg.shared.global" in one["ptx"] for one in found)
    kinds = {(one["rows"] > 16, one["is_wide"]): one["ptx"] for one in found}
    assert "wgmma" in kinds[True, False]
    assert "e4m3.e4m3" in kinds[True, False]
    assert "wgmma" in kinds[True, True]
    assert "mma.sync" in kinds[False, True]
    # Products of 8 bits begin together, and are waited for once: not one after the other.
    loops = [
        loop for one in found if one["rows"] > 16 and not one["is_wide"] for loop in one["loops"]
    ]
    assert len(loops) == 20
    assert all(loop["WARPGROUP"] == 2 <= loop["QGMMA"] for loop in loops)
    # Outside of the tensor cores they are added up.
    assert all(loop.get("FADD", 0) + loop.get("FFMA", 0) >= 16 for loop in loops)


# Every schedule of an H200 for these sizes, once.
AHEAD = """
import json, re, torch
from itertools import product
from kprof.kernels.fp8 import _gemm as _fp8_gemm
from kprof.kernels.bench import ahead
from kprof.kernels.fp8.fp8_gemm import LLAMA, fp8_gemm
from tests.kernels.kernel_code import product_loops_of

_fp8_gemm.num_sms = lambda device: 132
FP8 = torch.float8_e4m3fn
done = set()
for m, (n, k), is_wide, is_blocked in product(
    (1, 16, 32, 64, 128, 512, 4096), LLAMA, (True, False), (True, False)
):
    schedule = _fp8_gemm.schedule_of(m, n, k, is_wide, is_blocked, 132)
    if (schedule, is_wide, is_blocked) in done or m > 128 and is_wide:
        continue
    done.add((schedule, is_wide, is_blocked))
    x = torch.empty(m, k, dtype=torch.bfloat16 if is_wide else FP8)
    w = torch.empty(n, k, dtype=FP8)
    w_scale = torch.empty(n // 128, k // 128) if is_blocked else torch.empty(n, 1)
    x_scale = None if is_wide else torch.empty(k // 128 if is_blocked else 1, m).t()
    call = lambda: fp8_gemm(x, w, x_scale, w_scale)
    for binary in ahead.compile_ahead(call):
        seen = set(re.findall(r"wgmma\\S*|mma\\.sync\\S*|cp\\.async\\.cg\\S*", binary.ptx))
        print(json.dumps({"rows": m, "is_wide": is_wide, "shared": binary.shared_bytes,
            "ring": 0 if is_wide or is_blocked else schedule.stage_bytes(m),
            "spilled": binary.spilled_bytes, "ptx": " ".join(sorted(seen)),
            "loops": product_loops_of(binary)}))
"""


ON_BLACKWELL = """
import json, torch
from kprof.kernels.fp8 import _gemm as _fp8_gemm
from kprof.kernels.bench.ahead import BLACKWELL, compile_ahead
from kprof.kernels.fp8.fp8_gemm import fp8_gemm

_fp8_gemm.num_sms = lambda device: 148
FP8 = torch.float8_e4m3fn
for m, n in ((1, 4096), (16, 4096), (64, 4096), (64, 28672), (512, 4096), (4096, 4096)):
    x, w = torch.empty(m, 4096, dtype=FP8), torch.empty(n, 4096, dtype=FP8)
    wide, s = torch.empty(m, 4096, dtype=torch.bfloat16), torch.empty(n, 1)
    for arguments in ((x, w, torch.empty(m, 1), s), (wide, w, None, s)):
        found = compile_ahead(lambda: fp8_gemm(*arguments), BLACKWELL)
        print(json.dumps([[one.capability, one.spilled_bytes] for one in found]))
"""


@pytest.mark.slow
def test_the_same_sources_spill_nothing_on_blackwell():
    told = [json.loads(line) for line in on_hopper(ON_BLACKWELL).splitlines()]
    assert told == 12 * [[[100, 0]]]
