import pytest

from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

X, HALF, SCALE = tensor("bf16", 6, 8), tensor("bf16", 6, 4), tensor("bf16", 8)
X_BYTES = 96


@pytest.mark.parametrize("name", ["_C::silu_and_mul", "sgl_kernel::silu_and_mul"])
def test_an_activation_times_the_other_half_is_half_as_large(name):
    assert work_of(name, HALF, X) == Work(48, X_BYTES + X_BYTES // 2, "fp32", written=X_BYTES // 2)


@pytest.mark.parametrize("name", ["_C::rms_norm", "sgl_kernel::rmsnorm"])
def test_a_norm_is_written_to_its_first_argument(name):
    assert work_of(name, X, X, SCALE, 1e-5).bytes == 2 * X_BYTES + 16


@pytest.mark.parametrize("name", ["_C::fused_add_rms_norm", "sgl_kernel::fused_add_rmsnorm"])
def test_a_residual_added_before_the_norm_is_written_back(name):
    assert work_of(name, X, X, SCALE, 1e-5) == Work(5 * 48, 4 * X_BYTES + 16, "fp32")


def test_a_conversion_to_fp8_writes_one_byte_each_and_its_scales():
    out, scales = tensor("fp8", 6, 8), tensor("fp32", 6, 1)
    work = work_of("_C::dynamic_per_token_scaled_fp8_quant", out, X, scales, None)
    assert work.bytes == X_BYTES + 48 + 24
    name = "sgl_kernel::sgl_per_token_quant_fp8"
    assert work_of(name, X, out, scales).bytes == X_BYTES + 48 + 24


def test_rotation_reads_the_angles_of_its_positions_only():
    positions, query, key = tensor("int64", 3), tensor("bf16", 3, 16), tensor("bf16", 3, 8)
    angles = tensor("bf16", 1000, 4)
    work = work_of("_C::rotary_embedding", positions, query, key, 4, angles, True)
    assert work == Work(3 * 72, 24 + 24 + 2 * (96 + 48), "fp32")


def test_new_keys_and_values_are_written_in_the_type_of_the_cache():
    new, cache = tensor("bf16", 3, 2, 4), tensor("fp8", 100, 16, 2, 4)
    slots = tensor("int64", 3)
    name = "_C_cache_ops::reshape_and_cache_flash"
    assert work_of(name, new, new, cache, cache, slots).bytes == 2 * (48 + 24)
