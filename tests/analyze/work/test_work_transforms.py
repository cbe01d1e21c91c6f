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
