"""Attention in FP8: its error, what is refused, and the binary."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.quantities import quantities_in
from tests.kernels.swap.reasons import GRADIENTS
from kprof.kernels.attention import attention_fp8 as attention_fp8_module
from kprof.kernels.attention._triton import Options
from kprof.kernels.attention.attention_fp8 import forward_fp8, run_fp8
from kprof.kernels.runtime import DifferentiationError
from kprof.kernels.attention.attention_fp8 import KERNEL, STATED_ERROR, attention_fp8
from kprof.kernels.correctness.inputs import Draw
from kprof.kernels.correctness.numerics import DISTRIBUTIONS
from kprof.kernels.correctness.subject import Case
from tests.kernels.kernel_checks import COMPILED, compiled
from tests.kernels.kernel_hopper import on_hopper
from tests.kernels.test_kernel_attention_hopper import order_of
from tests.kernels.test_kernel_attention_rounding import BLOCK, as_laid_out, given


def emulated(q, k, v, largest, *into_and_how):
    """Do as the kernel for Hopper does, but for the order in which keys come."""
    y, lse, options, _ = into_and_how
    batch, heads, queries, dim = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    of_q, of_k, of_v = largest.split([heads, k.shape[1], k.shape[1]], 1)
    back = torch.tensor(order_of(v.shape[2] // dim * BLOCK)).argsort()
    values = v.float().view(batch, k.shape[1], -1, dim, BLOCK).transpose(3, 4).flatten(2, 3)
    values = values[:, :, back][:, :, :keys].repeat_interleave(group, 1)
    scale = of_q * of_k.repeat_interleave(group, 1) * options.scale / 448**2
    scores = q.float() @ k.float().repeat_interleave(group, 1).mT * scale[..., None, None]
    own = torch.arange(queries)[:, None] + keys - queries
    ahead = torch.arange(keys) - own
    left, right = options.bounds(queries, keys)
    hidden = (ahead > (keys if right is None else right)) | (
        ahead < (-keys if left is None else -left)
    )
    scores = scores.masked_fill(
        hidden & torch.tensor(left is not None or right is not None), -math.inf
    )
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = 256 * torch.exp(scores - top)
    totals = weights.sum(-1, keepdim=True)
    narrow = weights.to(torch.float8_e4m3fn).float()
    scaled = narrow @ values * of_v.repeat_interleave(group, 1)[..., None, None] / 448
    y.copy_(torch.where(totals == 0, 0, scaled / totals))
    lse.copy_((top + totals.log() - math.log(256))[..., 0])


def rounded(q, k, v):
    """Do as `quantize_heads`, where Triton's interpreter rounds wrongly."""
    largest = [one.float().abs().amax((2, 3)) for one in (q, k, v)]
    scaled = [
        (one.float() * (448 / most.clamp(min=1e-12))[..., None, None]).to(torch.float8_e4m3fn)
        for one, most in zip((q, k, v), largest, strict=True)
    ]
    values = as_laid_out(scaled[2].float()).to(torch.float8_e4m3fn)
    return scaled[0], scaled[1], values, torch.cat(largest, 1)


@pytest.fixture
def pretended():
    with (
        patch.object(attention_fp8_module, "launch_forward", emulated),
        patch.object(attention_fp8_module, "quantize_heads", rounded),
    ):
        yield


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(1, 4, 2, 300, 300, 1, 64), (1, 2, 1, 150, 300, 0, 128)])
def test_the_stated_error_holds_for_every_distribution(pretended, shape, distribution):
    case = Case(shape, "bfloat16", distribution=distribution)
    subject = SimpleNamespace(seed=0, device="cpu", large=1e3)
    arguments = KERNEL.inputs(shape, Draw(case, subject))
    truth = KERNEL.truth(*(one.double() if torch.is_tensor(one) else one for one in arguments))
    y, _ = run_fp8(*arguments[:3], Options(shape[-1] ** -0.5, *arguments[3:], shape[3]))
    assert (y.double() - truth).norm() <= STATED_ERROR * truth.norm()


def test_no_keys_and_no_queries_give_nothing(pretended):
    q, k, v = given()
    y, lse = attention_fp8(q, k[:, :, :0], v[:, :, :0])
    assert not y.any()
    assert (lse == -math.inf).all()
    y, lse = attention_fp8(q[:, :, :0], k, v)
    assert (y.shape, lse.shape) == ((2, 4, 0, 64), (2, 4, 0))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dim": 256}, ["256", "64", "128"]),
        ({"heads": 3, "group": 1}, None),
        ({"dim": 32}, ["32", "64", "128"]),
    ],
)
def test_what_is_refused_is_said(changed, why):
    found = KERNEL.refuses(*given(**changed))
    assert (found and quantities_in(found)) == why


def test_more_heads_than_a_grid_has_room_for_are_refused():
    q = torch.zeros(1, 30_000, 1, 64, dtype=torch.bfloat16)
    assert quantities_in(KERNEL.refuses(q, q, q)) == ["30000", "30000"]
    assert KERNEL.refuses(q, q[:, :10], q[:, :10]) is None


def test_gradients_are_refused_where_they_are_recorded(pretended):
    q, k, v = given()
    q.requires_grad_()
    assert KERNEL.refuses(q, k, v) == GRADIENTS
    with pytest.raises(DifferentiationError, match="no gradients"):
        attention_fp8(q, k, v)
    with torch.no_grad():
        assert KERNEL.refuses(q, k, v) is None
        assert attention_fp8(q, k, v)[0].shape == q.shape


@COMPILED
def test_a_compiler_sees_the_operator(pretended):
    q, k, v = given()
    y, lse = compiled(lambda *call: attention_fp8(*call))(q, k, v)
    expected = forward_fp8(q, k, v, q.shape[-1] ** -0.5, True, 0)
    assert torch.equal(y, expected[0])
    assert torch.equal(lse, expected[1])


ON_HOPPER = """
import json
import torch
from kprof.kernels.bench import ahead
from kprof.kernels.attention._triton import Options
from kprof.kernels.attention.attention_fp8 import run_fp8
from tests.kernels.kernel_code import powers_beside_values, product_loops_of

found = []
for dim, dtype, causal, window in (
    (128, torch.bfloat16, True, 0), (128, torch.float16, False, 0), (64, torch.bfloat16, True, 100)
):
    q, k = torch.zeros(1, 4, 300, dim, dtype=dtype), torch.zeros(1, 2, 300, dim, dtype=dtype)
    call = lambda: run_fp8(q, k, k, Options(0.1, causal, window, 300))
    for binary in ahead.compile_ahead(call):
        about = [binary.num_registers, binary.shared_bytes, binary.spilled_bytes]
        found.append([binary.name, *about, product_loops_of(binary), powers_beside_values(binary)])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_on_hopper_products_of_8_bits_run_beside_powers_and_no_loop_spills():
    found = json.loads(on_hopper(ON_HOPPER))
    assert [one[0] for one in found] == 3 * [
        "attention_fp8_quantize_kernel",
        "attention_forward_hopper_kernel",
    ]
    for name, registers, shared, spilled, loops, powers in found:
        assert shared <= 227 * 1024
        if name != "attention_forward_hopper_kernel":
            # Three programs fit a multiprocessor.
            assert (registers <= 80, spilled) == (True, 0)
            continue
        assert registers == 168
        # A thread's: half of a block of 128 keys, and what two rows shrink by.
        assert set(powers) == {66}
        steps = [loop for loop in loops if loop.get("MUFU") == 66]
        assert len(steps) >= 4
        for step in steps:
            # Nothing is exchanged but the largest of a row, nothing is taken apart or spilled.
            assert not any(one in step for one in ("PRMT", "STL", "LDL", "HGMMA"))
            assert step["SHFL"] == 4
            # Two products begin, and are waited for once each: not each of their parts.
            assert step["WARPGROUP"] == 4
