import pytest

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Work
from tests.analyze.calls import inputs, tensor, work_of


def test_a_fourier_transform_reads_and_writes_and_takes_five_n_log_n():
    work = work_of("aten::_fft_c2c", tensor("complex64", 3, 8), [1], 0, True)
    assert work == Work(5 * 24 * 3, 2 * 8 * 24, "fp32")


def test_the_transform_of_real_numbers_writes_half_of_the_spectrum():
    work = work_of("aten::_fft_r2c", tensor("fp32", 3, 8), [1], 0, True)
    assert work == Work(5 * 24 * 3 // 2, 4 * 24 + 8 * 3 * 5, "fp32")


def test_its_inverse_writes_real_numbers_of_the_length_asked_for():
    work = work_of("aten::_fft_c2r", tensor("complex64", 3, 5), [1], 2, 8)
    assert work == Work(5 * 24 * 3 // 2, 8 * 15 + 4 * 24, "fp32")


def test_a_factorization_takes_its_textbook_count():
    matrix = tensor("fp32", 2, 6, 6)
    assert work_of("aten::linalg_cholesky_ex", matrix) == Work(2 * 216 // 3, 2 * 288, "fp32")
    assert work_of("aten::linalg_lu_factor_ex", matrix).flops == 2 * 2 * 216 // 3


def test_a_triangular_system_reads_half_of_its_matrix():
    work = work_of("aten::linalg_solve_triangular", tensor("fp32", 6, 6), tensor("fp32", 6, 2))
    assert work == Work(72, 72 + 2 * 48, "fp32")


def test_a_view_moves_nothing():
    assert work_of("aten::transpose", tensor("fp32", 3, 8), 0, 1) == Work(0, 0)


def test_an_allocation_moves_nothing_whatever_it_is_given():
    _, model = find_model("aten::empty")
    assert model(inputs([3, 8], 6, None, None)) == Work(0, 0)


def test_the_spectrum_of_all_frequencies_is_as_long_as_the_signal():
    work = work_of("aten::_fft_r2c", tensor("fp32", 3, 8), [1], 0, False)
    assert work == Work(5 * 24 * 3 // 2, 4 * 24 + 8 * 24, "fp32")


def test_a_transform_over_several_dimensions_counts_the_points_of_all():
    work = work_of("aten::_fft_c2c", tensor("complex64", 2, 4, 8), [1, 2], 0, True)
    assert work == Work(5 * 64 * 5, 2 * 8 * 64, "fp32")
    # The last dimension of those that are transformed is the halved one.
    work = work_of("aten::_fft_r2c", tensor("fp32", 4, 8), [1, 0], 0, True)
    assert work == Work(5 * 32 * 5 // 2, 4 * 32 + 8 * 3 * 8, "fp32")


def test_a_transform_of_one_point_takes_as_long_as_one_of_two():
    assert work_of("aten::_fft_c2c", tensor("complex64", 3, 1), [1], 0, True).flops == 5 * 3


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("aten::_fft_c2c", (tensor("complex64", 3, 8), None)),
        ("aten::_fft_c2c", (tensor("complex64", 3, 8), [])),
        ("aten::_fft_c2c", (tensor("complex64"), [0])),
        ("aten::_fft_c2r", (tensor("complex64", 3, 5), [1], 2, None)),
        ("aten::linalg_cholesky_ex", (tensor("fp32", 6),)),
        ("aten::linalg_cholesky_ex", (tensor("fp32", 6, 5),)),
        ("aten::linalg_qr", (tensor("fp32", 6),)),
        ("aten::linalg_qr", (None,)),
        ("aten::linalg_solve_triangular", (tensor("fp32", 6, 6), tensor("fp32", 6))),
        ("aten::linalg_solve_triangular", (tensor("fp32", 6), tensor("fp32", 6, 2))),
        ("aten::linalg_solve_triangular", (tensor("fp32", 6, 6), None)),
        ("aten::_cdist_forward", (tensor("fp32", 6), tensor("fp32", 5, 3))),
        ("aten::_cdist_forward", (tensor("fp32", 6, 3), tensor("fp32", 3))),
        ("aten::_cdist_forward", (None, tensor("fp32", 5, 3))),
    ],
)
def test_work_of_unknown_or_unfit_operands_is_missing(op, arguments):
    assert work_of(op, *arguments) is None


def test_an_inverse_takes_six_times_a_cholesky_factorization():
    matrix = tensor("fp32", 6, 6)
    assert work_of("aten::linalg_inv_ex", matrix).flops == 6 * 2 * 216 // 6
    assert work_of("aten::cholesky_inverse", matrix).flops == 2 * 2 * 216 // 6


def test_the_triangle_is_the_second_operand_of_the_older_solver():
    right, matrix = tensor("fp32", 6, 2), tensor("fp32", 6, 6)
    old = work_of("aten::triangular_solve", right, matrix)
    assert old == work_of("aten::linalg_solve_triangular", matrix, right)


@pytest.mark.parametrize("shape", [(2, 6, 3), (2, 3, 6)])
def test_a_qr_factorization_takes_the_same_of_a_matrix_and_of_its_transpose(shape):
    work = work_of("aten::linalg_qr", tensor("fp32", *shape))
    assert work == Work(2 * 2 * 9 * (6 - 1), 2 * 4 * 36, "fp32")


def test_distances_take_three_flops_for_each_element_of_each_pair():
    work = work_of("aten::_cdist_forward", tensor("fp32", 2, 4, 3), tensor("fp32", 2, 5, 3))
    assert work == Work(3 * 2 * 4 * 5 * 3, 4 * (24 + 30 + 40), "fp32")


def test_rows_without_elements_are_no_distance_apart():
    work = work_of("aten::_cdist_forward", tensor("fp32", 4, 0), tensor("fp32", 5, 0))
    assert work == Work(0, 0, "fp32")
