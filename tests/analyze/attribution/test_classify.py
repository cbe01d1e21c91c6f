import re
from pathlib import Path

import pytest

from kprof.analyze.attribution.kinds import add_kind, find_dtype, find_kind
from tests.analyze.calls import recorded, tensor
from tests.traces import trace_of

ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::"


def kind_of(name, op=None, phase=None, activity="kernel"):
    return find_kind(name, activity, op, phase)


KINDS = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "gemm",
    "ampere_sgemm_128x64_nn": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "gemm",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(": "gemm",
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64": "gemm",
    "void splitKreduce_kernel<float, float, float, float, true, false>": "gemm",
    "triton_tem_fused_mm_3": "gemm",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": "attention",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32": "convolution",
    "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_opt": "convolution",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage": "collective",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": "collective",
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(": "collective",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512>": "norm",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel": "norm",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float": "softmax",
    "void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float": "loss",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float": "reduction",
    "void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>": "copy",
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false>": "copy",
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu": "indexing",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*": "indexing",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<": "embedding",
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy": "sort",
    "void at::native::distribution_elementwise_grid_stride_kernel<float": "random",
    "triton_poi_fused_add_mul_0": "elementwise",
    "triton_red_fused_add_mean_mul_pow_rsqrt_0": "norm",
    "triton_per_fused_native_layer_norm_2": "norm",
    "triton_red_fused_sum_1": "reduction",
    "triton_per_fused__softmax_4": "softmax",
    ELEMENTWISE + "FillFunctor<float>, std::array<char*, 1ul> >": "set",
    ELEMENTWISE + "CUDAFunctor_add<float>, at::detail::Array<char*, 3> >": "elementwise",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_k": "copy",
    "void fbgemm_gpu::permute_indices_weights_kernel<false, int>": "indexing",
    "sm50_xmma_pooling_coalescedC_NHWC_kMAX_3_False_execute_kernel_trt": "reduction",
    "void cutensor_internal_namespace::permutationKernelPLC3<float, float>(": "copy",
    "XXT_kernel": "gemm",
    "my_own_kernel": "other",
}


def test_a_kernels_name_tells_its_kind():
    assert {name: kind_of(name) for name in KINDS} == KINDS


FLASHINFER = "void flashinfer::"
CUTLASS3 = "void cutlass::device_kernel<"
TENSORRT_LLM = "void tensorrt_llm::kernels::"


LIBRARIES = {
    # FlashAttention, FlashInfer and others that only begin with the same word.
    CUTLASS3 + "flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<": "attention",
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<": "attention",
    "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64": "attention",
    FLASHINFER + "BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode": "attention",
    FLASHINFER + "PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<": "attention",
    FLASHINFER + "norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(": "norm",
    FLASHINFER + "sampling::TopKTopPSamplingFromProbKernel<1024u, (cub::": "random",
    FLASHINFER + "activation::act_and_mul_kernel<__nv_bfloat16, &silu>(": "elementwise",
    FLASHINFER + "BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 128u": "elementwise",
    FLASHINFER + "trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_la": "collective",
    # vLLM and SGLang
    "kernel_unified_attention_2d": "attention",
    "_fwd_grouped_kernel_stage1": "attention",
    "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u>(": "attention",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData": "collective",
    "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16": "copy",
    "void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu": "elementwise",
    "void marlin::Marlin<nv_bfloat16, 1125899906842624l, 256, 1, 8, 8": "gemm",
    "fused_moe_kernel": "gemm",
    "_w8a8_block_fp8_matmul": "gemm",
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*": "indexing",
    "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16>(float const*": "softmax",
    "_lora_shrink_kernel": "gemm",
    # TensorRT-LLM
    TENSORRT_LLM + "mmha::masked_multihead_attention_kernel<__nv_bfloat16": "attention",
    TENSORRT_LLM + "cutlass_kernels::expandInputRowsKernel<__nv_bfloat16": "indexing",
    TENSORRT_LLM + "cutlass_kernels::doActivationKernel<__nv_bfloat16": "elementwise",
    TENSORRT_LLM + "generalRmsNorm<__nv_bfloat16, true>(": "norm",
    TENSORRT_LLM + "twoShotAllReduceKernel<__nv_bfloat16, 8, true>(": "collective",
    "void moe::dev::finalize::finalizeKernelVecLoad<moe::dev::finalize::Ker": "indexing",
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_m128x16x32": "gemm",
    # CUTLASS 3 and 4, DeepGEMM, DeepEP, cuBLAS
    CUTLASS3 + "cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16": "gemm",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u, 2048u, 1u, 128u": "gemm",
    "void deep_ep::internode_ll::dispatch<true, 9, 7168>(void*": "collective",
    "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float": "gemm",
    # cuDNN, MIOpen, rocBLAS, hipBLASLt, AITER, RCCL
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(": "convolution",
    "void explicit_convolve_sgemm<float, int, 1024, 5, 5, 3, 3, 3, 0>(": "convolution",
    "void cudnn::pooling_fw_4d_kernel<float, float, cudnn::maxpooling_func": "reduction",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1_group": "convolution",
    "MIOpenBatchNormFwdTrainSpatialNorm": "norm",
    "void rocblas_gemvt_warp_reduce_kernel<false, 256, int, float const*": "gemm",
    "Custom_Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64": "gemm",
    "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<": "attention",
    "aiter::mla_a16w16_qh16_m16x4_n16x1_coex0_mask1": "attention",
    "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(": "collective",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "collective",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "collective",
    # Inductor: what a kernel fused does not make it a product or a convolution.
    "triton_poi_fused_convolution_relu_3": "elementwise",
    "triton_poi_fused__scaled_dot_product_flash_attention_clone_2": "elementwise",
    "triton_poi_fused_native_dropout_add_7": "elementwise",
    "triton_poi_fused_embedding_0": "embedding",
    "triton_red_fused_convolution_backward_5": "reduction",
    "triton_per_fused_nll_loss_forward_1": "loss",
    "triton_tem_fused_flex_attention_2": "attention",
    "triton_tem_fused_convolution_4": "convolution",
    "triton_tem_fused_addmm_relu_0": "gemm",
    "triton_mm_12": "gemm",
    # Liger, Transformer Engine, Mamba
    "liger_cross_entropy_kernel": "loss",
    "_swiglu_forward_kernel": "elementwise",
    "_triton_rope": "elementwise",
    "void transformer_engine::normalization::ln_fwd_tuned_kernel<": "norm",
    "void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4": "convolution",
}


def test_kernels_of_well_known_libraries_are_told_by_name():
    assert {name: kind_of(name) for name in LIBRARIES} == LIBRARIES


def test_kprofs_own_kernels_are_told_by_name_or_else_by_operator():
    expected = {
        ("decode", None): "attention",
        ("attend", None): "attention",
        ("attend_back_to_keys", None): "attention",
        ("losses_kernel", None): "loss",
        ("_rotate", None): "elementwise",
        ("forward", "kprof::norm"): "norm",
        ("add_up", "kprof::norm_backward"): "norm",
        ("_forward", "kprof::glu"): "elementwise",
        ("_forward", "kprof::softmax"): "softmax",
        ("step_kernel", "kprof::adamw_"): "optimizer",
        ("tiled", "kprof::fp8_linear"): "gemm",
        ("_rows", "kprof::fp8_linear"): "elementwise",
        ("_rows", "kprof::quantize_fp8"): "elementwise",
        ("narrow", "kprof::attention_fp8"): "attention",
        ("attention_forward_kernel", None): "attention",
        ("attention_backward_hopper_kernel", None): "attention",
        ("decode_attention_kernel", None): "attention",
        ("fp8_gemm_tiled_kernel", None): "gemm",
        ("quantize_fp8_rows_kernel", "kprof::fp8_linear"): "elementwise",
        ("quantize_fp8_transposed_kernel", "kprof::fp8_linear"): "elementwise",
        ("norm_quantize_fp8_kernel", None): "norm",
        ("softmax_forward_kernel", None): "softmax",
        ("rope_kernel", None): "elementwise",
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "kprof::fp8_linear"): "gemm",
    }
    assert {(name, op): kind_of(name, op) for name, op in expected} == expected


def test_a_hosts_operator_is_a_gemm_by_the_last_word_of_its_name():
    expected = {
        "sgl-kernel::weight_packed_linear": "gemm",
        "aten::_weight_int4pack_mm": "gemm",
        "quantized::quantize_linear": "other",
        "aten::upsample_linear1d": "elementwise",
    }
    assert {op: kind_of(op, activity="host") for op in expected} == expected


def test_every_operator_of_kprofs_own_tells_a_kind():
    sources = (Path(__file__).parents[3] / "kprof" / "kernels").rglob("*.py")
    defined = [re.findall(r'define\(\s*f?"(\w+)', path.read_text()) for path in sources]
    names = {name for found in defined for name in found}
    assert {"decode_attention", "fp8_linear", "glu", "norm"} < names
    assert [name for name in names if kind_of("k", f"kprof::{name}") == "other"] == []


@pytest.mark.parametrize("name", ["forward", "_forward", "decode_kernel", "_rows"])
def test_a_name_that_others_may_have_tells_nothing_by_itself(name):
    assert kind_of(name) == "other"


def test_the_operands_type_at_the_end_of_a_name_tells_no_kind():
    expected = {
        ("fc-dtype_Float", None): "gemm",
        ("batch_matmul-dtype_Half", "aten::bmm"): "gemm",
        ("vector_norm_float_order-dtype_Float", "aten::linalg_vector_norm"): "reduction",
        ("layer_norm_backward-dtype_Float", "aten::native_layer_norm_backward"): "norm",
        ("split_eb_bwd_rowwise_adagrad-dtype_Half", "fbgemm::split_backward_cpu"): "embedding",
        ("aten::cat.out-dtype_Long-extraKey_15", "aten::cat"): "copy",
        ("min_dim_min-dtype_Long", "aten::min"): "reduction",
        ("an_unknown_one-dtype_Float", "aten::mm"): "gemm",
        ("divide-dtype_Double", "aten::div"): "elementwise",
    }
    assert {(name, op): kind_of(name, op) for name, op in expected} == expected


def test_a_convolution_done_as_a_product_is_a_convolution():
    name = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>("
    assert kind_of(name, op="aten::cudnn_convolution") == "convolution"
    assert kind_of(name, op="aten::convolution_backward") == "convolution"
    assert kind_of(name, op="aten::addmm") == "gemm"


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
    assert kind_of("aten::addmv_", activity="host") == "gemm"
    assert kind_of("aten::mkldnn_rnn_layer_backward", activity="host") == "gemm"
    assert kind_of("aten::ne", activity="host") == "elementwise"
    for operator in ("aten::lerp_", "aten::reciprocal", "aten::maximum", "aten::leaky_relu"):
        assert kind_of(operator, activity="host") == "elementwise"
    for view in ("aten::empty", "aten::new_empty", "aten::expand"):
        assert kind_of(view, activity="host") == "other"


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
    double = ELEMENTWISE + "BinaryFunctor<double, double, double, at::native::binary_internal"
    assert find_dtype(double, "kernel", "elementwise", '["double", "float"]') == "fp64"


def test_a_product_of_floats_on_tensor_cores_is_tf32():
    types = '["float", "float"]'
    tensor_cores = "cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1"
    assert find_dtype(tensor_cores, "kernel", "gemm", types) == "tf32"
    assert find_dtype("ampere_sgemm_128x64_nn", "kernel", "gemm", types) == "fp32"


def test_without_recorded_inputs_the_kernels_name_tells_the_type():
    expected = {
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": "bf16",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT": "fp16",
        "ampere_sgemm_128x64_nn": "fp32",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S": "bf16",
        ELEMENTWISE + "CUDAFunctor_add<c10::Half>, at::detail::Array": "fp16",
        "void multi_tensor_apply_kernel<Functor<c10::BFloat16, 4>>": "bf16",
        "void k<at::native::OpaqueType<2u>, unsigned int, 3>": None,
        "my_own_kernel": None,
    }
    assert {name: find_dtype(name, "kernel", "gemm", None) for name in expected} == expected


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


@pytest.mark.parametrize(
    ("piece", "kind"),
    [("x", "other"), ("set", "other"), ("gemm_", "gemm"), ("aB", "other"), ("a::b<", "other")],
)
def test_a_name_of_100_000_letters_is_classified_in_linear_time(piece, kind):
    name = (piece * 100_000)[:100_000]
    assert kind_of(name) == kind


@pytest.mark.parametrize("piece", ["aWith", "Mean", "-dtype_a", "e4m3", "1"])
@pytest.mark.parametrize(
    "name",
    [
        "void at::native::elementwise_kernel<{}>(int)",
        "triton_red_{}",
        "__myl_{}",
        "_Z{}",
    ],
)
def test_a_name_with_100_000_letters_anywhere_is_classified_in_linear_time(name, piece):
    long = find_kind(name.format((piece * 100_000)[:100_000]), "kernel", None, None)
    assert long == find_kind(name.format((piece * 1_000)[:1_000]), "kernel", None, None)
