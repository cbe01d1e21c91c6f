from kprof.analyze.element_type import type_in_name
from kprof.analyze.roofline.launch_work import bound_list_kernel
from kprof.analyze.work import Work
from tests.analyze.calls import tensors, work_of

LIST = tensors((2, 3), (4,))
EMPTY = tensors()
KERNEL = "void at::native::multi_tensor_apply_kernel<at::native::"
ADAM = KERNEL + (
    "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<c10::BFloat16, 4, "
)


def test_adam_reads_four_lists_and_writes_three():
    work = work_of("aten::_fused_adamw_", LIST, LIST, LIST, LIST, EMPTY, LIST, element_bytes=2)
    assert work == Work(14 * 10, 7 * 20, "fp32", written=3 * 20)


def test_amsgrad_keeps_one_more_moment():
    work = work_of("aten::_fused_adam_", LIST, LIST, LIST, LIST, LIST, LIST, element_bytes=2)
    assert work.bytes == 9 * 20


def test_momentum_is_read_and_written():
    assert work_of("aten::_fused_sgd_", LIST, LIST, LIST, element_bytes=4).bytes == 5 * 40
    assert work_of("aten::_fused_sgd_", LIST, LIST, EMPTY, element_bytes=4).bytes == 3 * 40


def test_a_launch_over_lists_has_at_most_a_full_chunk_for_each_block():
    chunk = 65536
    work = bound_list_kernel(ADAM, "10,1,1")
    assert work == Work(14 * 10 * chunk, 7 * 2 * 10 * chunk, "fp32", "at most")


def test_scalars_in_a_list_have_another_type_than_the_tensors():
    divide = KERNEL + (
        "TensorListScalarListMetadata<float, 1>, "
        "at::native::BinaryOpScalarListFunctor<c10::BFloat16, 1, 1, 0>, std::divides<float> >"
    )
    assert type_in_name(divide) == "bf16"
    assert bound_list_kernel(divide, "1,1,1").bytes == 2 * 2 * 65536


def test_the_functor_says_how_many_lists_are_read():
    add = KERNEL + "TensorListMetadata<2>, at::native::BinaryOpListAlphaFunctor<float, 2, 2, 0>"
    copy = KERNEL + "TensorListMetadata<2>, at::native::UnaryOpFunctor<float, 2, 1, 1>"
    assert bound_list_kernel(add, "1,1,1").bytes == 3 * 4 * 65536
    assert bound_list_kernel(copy, "1,1,1").bytes == 2 * 4 * 65536


def test_a_kernel_of_another_library_has_no_bound():
    assert (
        bound_list_kernel("multi_tensor_apply_kernel<TensorListMetadata<4>, Adam", "1,1,1") is None
    )
