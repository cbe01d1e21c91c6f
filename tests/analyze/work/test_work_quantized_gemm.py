from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

SCALE = tensor("fp32")
BF16, FP32 = 15, 6


def test_a_product_into_a_given_tensor_writes_its_type():
    out, a, b = tensor("bf16", 2, 5), tensor("fp8", 2, 3), tensor("fp8", 3, 5)
    work = work_of("_C::cutlass_scaled_mm", out, a, b, SCALE, SCALE, None)
    assert work == Work(60, 6 + 15 + 8 + 20, "fp8")


def test_a_product_writes_the_type_that_is_asked_for():
    a, b = tensor("fp8", 2, 3), tensor("fp8", 3, 5)
    name = "sgl_kernel::fp8_scaled_mm"
    assert work_of(name, a, b, SCALE, SCALE, BF16, None).bytes == 6 + 15 + 8 + 20
    assert work_of(name, a, b, SCALE, SCALE, FP32, None).bytes == 6 + 15 + 8 + 40


def test_two_small_floats_in_a_byte_are_two_multiply_adds():
    out, a, b = tensor("bf16", 2, 5), tensor("uint8", 2, 8), tensor("uint8", 5, 8)
    work = work_of("_C::cutlass_scaled_fp4_mm", out, a, b, SCALE, SCALE, SCALE)
    assert work == Work(2 * 2 * 5 * 16, 16 + 40 + 8 + 20, "fp4")


def test_packed_integers_tell_how_wide_their_matrix_is():
    x, scales = tensor("bf16", 2, 64), tensor("bf16", 2, 32)
    along_columns = work_of("_C::awq_gemm", x, tensor("int32", 64, 4), scales, None, 8)
    along_rows = work_of("_C::gptq_gemm", x, tensor("int32", 8, 32), None, scales, None, True, 4)
    assert along_columns == Work(2 * 2 * 32 * 64, 256 + 1024 + 128 + 128, "bf16")
    assert along_rows == along_columns


def test_four_bit_weights_of_torch_have_their_width_in_their_scales():
    x, packed, scales = (
        tensor("bf16", 2, 64),
        tensor("int32", 4, 1, 32, 4),
        tensor("bf16", 2, 32, 2),
    )
    work = work_of("aten::_weight_int4pack_mm", x, packed, 32, scales)
    assert work == Work(2 * 2 * 32 * 64, 256 + 2048 + 256 + 128, "bf16")


def test_an_integer_product_with_a_transposed_matrix_writes_int32():
    work = work_of("bitsandbytes::int8_linear_matmul", tensor("int8", 2, 3), tensor("int8", 5, 3))
    assert work == Work(60, 6 + 15 + 40, "int8")


def test_unpacking_writes_the_shape_and_type_asked_for():
    packed, scales = tensor("uint8", 32), tensor("fp32", 1)
    name = "bitsandbytes::dequantize_4bit"
    assert work_of(name, packed, scales, 64, "nf4", [8, 8], BF16).bytes == 32 + 4 + 128
