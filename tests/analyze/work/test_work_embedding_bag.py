from kprof.analyze.work import Work
from tests.analyze.calls import tensor, work_of

INDEX, OFFSETS = tensor("int64", 20), tensor("int64", 4)


def test_a_bag_reads_the_rows_of_its_indices_and_writes_their_sum():
    work = work_of("aten::_embedding_bag", tensor("fp32", 100, 8), INDEX, OFFSETS, False, 0)
    assert work == Work(160, 160 + 32 + 4 * 160 + 4 * 32, "fp32")


def test_no_more_of_a_table_is_read_than_there_is():
    work = work_of("aten::_embedding_bag", tensor("fp32", 3, 8), INDEX, OFFSETS, False, 0)
    assert work.bytes == 160 + 32 + 4 * 24 + 4 * 32


def test_many_tables_read_their_indices_and_write_their_results_at_least():
    name = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
    weights = [tensor("fp32", 0), tensor("fp32", 900), tensor("fp32", 0), tensor("fp32", 0, 0)]
    places = [tensor("int32", 2), tensor("int64", 2), tensor("int32", 3)]
    sizes = [12, 8, tensor("int64", 3), 7]
    work = work_of(name, *weights, *places, *sizes, INDEX, tensor("int64", 9), 0, None)
    # Two tables of together 12 columns, four bags each.
    assert work == Work(None, 160 + 72 + 4 * 4 * 12, bound="at least")


def test_their_backward_reads_at_least_the_gradient():
    name = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"
    assert work_of(name, tensor("fp32", 4, 12)) == Work(None, 192, bound="at least")


def test_rows_of_eight_bits_carry_their_scales():
    coded = work_of("fbgemm::FloatToFP8RowwiseQuantized", tensor("fp32", 10, 16), True)
    decoded = work_of("fbgemm::FP8RowwiseQuantizedToFloat", tensor("uint8", 10, 24), True)
    assert coded.bytes == decoded.bytes == 640 + 240


def test_a_complete_running_sum_of_lengths_has_one_more_result():
    assert work_of("fbgemm::asynchronous_complete_cumsum", tensor("int32", 10)).bytes == 84
