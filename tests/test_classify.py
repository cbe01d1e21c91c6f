import pytest

from kprof.analyze.classify import add_kind, find_dtype, find_kind
from tests.calls import recorded, tensor
from tests.traces import trace_of

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"


def kind_of(name, op=None, phase=None, activity="kernel"):
    return find_kind(name, activity, op, phase)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("ampere_sgemm_128x64_nn", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64", "gemm"),
        ("void splitKreduce_kernel<float, float, float, float, true, false>", "gemm"),
        ("triton_tem_fused_mm_3", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32", "convolution"),
        ("void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_opt", "convolution"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage", "collective"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "collective"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(", "collective"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512>", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norm"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float", "softmax"),
        ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float", "loss"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float", "reduction"),
        ("void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>", "copy"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false>", "copy"),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu", "indexing"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*", "indexing"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<", "embedding"),
        ("void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy", "sort"),
        ("void at::native::distribution_elementwise_grid_stride_kernel<float", "random"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_per_fused_native_layer_norm_2", "norm"),
        ("triton_red_fused_sum_1", "reduction"),
        ("triton_per_fused__softmax_4", "softmax"),
        (ELEMENTWISE + "FillFunctor<float>, std::array<char*, 1ul> >", "set"),
        (ELEMENTWISE + "CUDAFunctor_add<float>, at::detail::Array<char*, 3> >", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_k", "copy"),
        ("void fbgemm_gpu::permute_indices_weights_kernel<false, int>", "indexing"),
        ("my_own_kernel", "other"),
    ],
)
def test_a_kernels_name_tells_its_kind(name, kind):
    assert kind_of(name) == kind


def test_copies_and_sets_are_told_by_their_activity():
    assert kind_of("Memcpy HtoD (Pinned -> Device)", activity="memcpy") == "copy"
    assert kind_of("Memset (Device)", op="aten::mm", activity="memset") == "set"


def test_a_name_that_says_nothing_takes_the_kind_of_its_operator():
    assert kind_of("kernel_0", op="aten::native_layer_norm") == "norm"
    assert kind_of("kernel_0", op="aten::addmm") == "gemm"
    assert kind_of("kernel_0", op="aten::cudnn_convolution") == "convolution"


def test_a_kernel_over_tensor_lists_updates_parameters_only_in_the_optimizer():
    name = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, UnaryOpFunctor"
    assert kind_of(name, op="aten::_foreach_mul_") == "elementwise"
    assert kind_of(name, op="aten::_foreach_mul_", phase="optimizer") == "optimizer"
    assert kind_of(name, op="aten::_fused_adamw_") == "optimizer"
    assert kind_of(name.replace("UnaryOpFunctor", "FusedSgdMathFunctor")) == "optimizer"


def test_in_host_mode_the_operators_own_name_tells_the_kind():
    assert kind_of("aten::mkldnn_convolution", activity="host") == "convolution"
    assert kind_of("aten::empty", activity="host") == "other"


def test_the_type_is_that_of_the_operators_inputs():
    assert find_dtype("k", "kernel", "gemm", '["c10::BFloat16", "c10::BFloat16"]') == "bf16"
    assert find_dtype("k", "kernel", "gemm", '["c10::Half", "c10::Half"]') == "fp16"
    assert find_dtype("k", "kernel", "gemm", '["c10::Float8_e4m3fn", "float"]') == "fp8"


def test_the_weights_type_counts_before_that_of_the_indices():
    assert find_dtype("k", "kernel", "embedding", '["long int", "c10::Half"]') == "fp16"
    assert find_dtype("k", "kernel", "indexing", '["long int", "Scalar"]') == "int64"


def test_a_wrapped_python_number_is_not_the_operands_type():
    assert find_dtype("k", "kernel", "elementwise", '["double", "c10::BFloat16"]') == "bf16"
    assert find_dtype("k", "kernel", "elementwise", '["double", "double"]') == "fp64"


def test_a_product_of_floats_on_tensor_cores_is_tf32():
    types = '["float", "float"]'
    tensor_cores = "cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1"
    assert find_dtype(tensor_cores, "kernel", "gemm", types) == "tf32"
    assert find_dtype("ampere_sgemm_128x64_nn", "kernel", "gemm", types) == "fp32"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "bf16"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "fp16"),
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S", "bf16"),
        (ELEMENTWISE + "CUDAFunctor_add<c10::Half>, at::detail::Array", "fp16"),
        ("void multi_tensor_apply_kernel<Functor<c10::BFloat16, 4>>", "bf16"),
        ("void k<at::native::OpaqueType<2u>, unsigned int, 3>", None),
        ("my_own_kernel", None),
    ],
)
def test_without_recorded_inputs_the_kernels_name_tells_the_type(name, dtype):
    assert find_dtype(name, "kernel", "gemm", None) == dtype


def test_the_pass_looks_at_the_operator_that_launched_each_row():
    trace = trace_of(
        {"name": "gemm_a", "op_row": 1, "op": "aten::mm"},
        {"name": "gemm_a", "op_row": 0, "op": "aten::mm"},
        {"name": "gemm_a"},
        {"name": "Memset (Device)", "activity": "memset"},
        ranges=[
            recorded(tensor("bf16", 2, 2), tensor("bf16", 2, 2)),
            recorded(tensor("fp16", 2, 2), tensor("fp16", 2, 2)),
        ],
        passes=("attribute",),
    )
    kernels = add_kind(trace).kernels
    assert kernels["kind"].tolist() == ["gemm", "gemm", "gemm", "set"]
    assert kernels["dtype"].tolist()[:2] == ["fp16", "bf16"]
    assert kernels["dtype"].isna().tolist() == [False, False, True, True]


def test_a_trace_without_activities_gets_empty_columns():
    kernels = add_kind(trace_of(passes=("attribute",))).kernels
    assert len(kernels) == 0
    assert {"kind", "dtype"} <= set(kernels.columns)
