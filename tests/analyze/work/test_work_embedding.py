from kprof.analyze.work import Work
from tests.analyze.calls import tensor, tensors, work_of

TABLE = tensor("bf16", 100, 8)


def test_a_lookup_reads_only_the_rows_that_are_named():
    index = tensor("int64", 2, 3)
    expected = Work(0, 48 + 96 + 96, written=96)
    assert work_of("aten::embedding", TABLE, index, -1, False, False) == expected
    assert work_of("aten::index_select", TABLE, 0, tensor("int64", 6)) == expected


def test_a_lookup_of_columns_takes_whole_columns():
    work = work_of("aten::index_select", TABLE, 1, tensor("int64", 2))
    assert work == Work(0, 16 + 400 + 400, written=400)


def test_a_small_table_is_not_read_more_than_once():
    table, index = tensor("bf16", 2, 8), tensor("int64", 6)
    assert work_of("aten::embedding", table, index).bytes == 48 + 32 + 96


def test_an_expanded_index_of_a_gather_is_stored_once():
    index = tensor("int64", 6, 8, strides=[1, 0])
    assert work_of("aten::gather", TABLE, 0, index, False) == Work(0, 48 + 96 + 96, written=96)


def test_indexing_needs_the_shapes_of_its_indices():
    assert work_of("aten::index", TABLE, None) is None
    assert work_of("aten::index", TABLE, tensors((6,))) == Work(0, 48 + 96 + 96)


def test_the_gradient_of_an_embedding_is_added_up_by_row():
    grad, index = tensor("bf16", 2, 3, 8), tensor("int64", 2, 3)
    work = work_of("aten::embedding_dense_backward", grad, index, 100, -1, False)
    assert work == Work(48, 96 + 48 + 96, "fp32")
    assert work_of("aten::embedding_dense_backward", grad, index, 4, -1, False).bytes == 208


def test_adding_at_an_index_reads_what_it_adds_to():
    source, index = tensor("bf16", 6, 8), tensor("int64", 6, 8)
    adding = work_of("aten::scatter_add_", TABLE, 0, index, source)
    storing = work_of("aten::scatter_", TABLE, 0, index, source)
    assert adding == Work(48, 384 + 96 + 192, "fp32")
    assert storing == Work(0, 384 + 96 + 96, "fp32")


def test_a_number_is_stored_at_every_index():
    assert work_of("aten::scatter_", TABLE, 0, tensor("int64", 6, 8), 1.0).bytes == 384 + 96


def test_storing_a_single_value_at_unknown_places_is_unknown():
    assert work_of("aten::index_put_", TABLE, None, tensor("bf16"), False) is None
    values = tensor("bf16", 6, 8)
    assert work_of("aten::index_put_", TABLE, None, values, False).bytes == 192
    assert work_of("aten::index_put_", TABLE, None, values, True).bytes == 288


def test_filling_whole_slices_writes_them_only():
    work = work_of("aten::index_fill_", tensor("fp32", 10, 4), 0, tensor("int64", 3), 0)
    assert work.bytes == 24 + 4 * 12


def test_putting_values_at_places_reads_places_and_values():
    table, places, values = tensor("bf16", 100), tensor("int64", 5), tensor("bf16", 5)
    assert work_of("aten::put_", table, places, values, False).bytes == 40 + 10 + 10


def test_how_many_places_a_mask_sets_is_unknown():
    table, mask, source = tensor("bf16", 100), tensor("bool", 100), tensor("bf16", 100)
    assert work_of("aten::masked_scatter_", table, mask, source).bound == "at least"


def test_windows_are_added_up_to_the_shape_they_came_from():
    work = work_of("aten::unfold_backward", tensor("fp32", 2, 5, 3), [2, 7], 1, 3, 1)
    assert work.bytes == 4 * (30 + 14)
