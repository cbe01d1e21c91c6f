from kprof.analyze.work import Work
from tests.analyze.calls import tensor, tensors, work_of


def test_a_copy_reads_one_type_and_writes_another():
    work = work_of("aten::copy_", tensor("fp32", 4, 8), tensor("bf16", 4, 8), False)
    assert work == Work(0, 128 + 64, written=128)


def test_an_expanded_source_is_read_once():
    source = tensor("fp32", 4, 8, strides=[0, 1])
    assert work_of("aten::copy_", tensor("fp32", 4, 8), source, False).bytes == 32 + 128


def test_filling_only_writes():
    assert work_of("aten::fill_", tensor("bf16", 4, 8), 0) == Work(0, 64, written=64)
    assert work_of("aten::zero_", tensor("fp32", 4, 8)) == Work(0, 128, written=128)


def test_a_range_writes_its_numbers():
    assert work_of("aten::arange", 0, 10, 3, tensor("int64", 0)) == Work(0, 4 * 8)
    assert work_of("aten::arange", 0, 10, 0, tensor("int64", 0)) is None


def test_a_range_has_the_numbers_from_its_start_up_to_its_end():
    # 4, 7; 10, 8, 6; none.
    ranges = [(4, 10, 3), (10, 4, -2), (10, 4, 1)]
    works = [work_of("aten::arange", *told, tensor("int64", 0)) for told in ranges]
    assert works == [Work(0, 2 * 8), Work(0, 3 * 8), Work(0, 0)]


def test_concatenation_moves_every_element_twice():
    work = work_of("aten::cat", tensors((2, 3), (4, 3)), 0, element_bytes=2)
    assert work == Work(0, 2 * 2 * 18)


def test_concatenation_of_elements_of_unknown_size_is_unknown():
    assert work_of("aten::cat", tensors((2, 3), (4, 3)), 0) is None


def test_a_triangle_reads_half_and_writes_all():
    assert work_of("aten::tril", tensor("fp32", 4, 4), 0) == Work(0, 32 + 64)
    assert work_of("aten::triu_", tensor("fp32", 4, 4), 0) == Work(0, 32)


def test_new_keys_and_values_are_written_in_the_caches_type():
    new, cache = tensor("bf16", 3, 1, 64), tensor("uint8", 1000, 16, 1, 64)
    work = work_of("_C_cache_ops::reshape_and_cache_flash", new, new, cache, cache)
    assert work == Work(0, 2 * (384 + 192))
