"""A kernel's short name tells what it computes, and tells kernels apart."""

import csv
from pathlib import Path

import pytest

from kprof.report.kernel_names import readable

KNOWN = Path(__file__).parents[1] / "data" / "kernel_names.tsv"
NATIVE = "at::native::"
COPY = (
    f"{NATIVE}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}::operator()() const"
    "::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}"
)
SHORT = {
    f"void {NATIVE}vectorized_elementwise_kernel<8, {NATIVE}CUDAFunctor_add<c10::BFloat16>, "
    f"std::array<char*, 3ul> >(int, {NATIVE}CUDAFunctor_add<c10::BFloat16>)": (
        "CUDAFunctor_add<BFloat16> · vectorized_elementwise_kernel<8>"
    ),
    f"void {NATIVE}elementwise_kernel<128, 4, {NATIVE}gpu_kernel_impl_nocast<{COPY}>"
    f"(at::TensorIteratorBase&, {COPY} const&)::{{lambda(int)#1}}>(int)": (
        "direct_copy_kernel_cuda(BFloat16) · elementwise_kernel<128, 4>"
    ),
    f"void {NATIVE}reduce_kernel<512, 1, {NATIVE}ReduceOp<float, {NATIVE}MeanOps<float, float>, "
    "unsigned int, float, 4, 4> >()": "MeanOps<float> · reduce_kernel<512, 1>",
    "void deep_gemm::transpose_fp32<512u, 64u, 64u>(float const*)": "transpose_fp32<512, 64, 64>",
    "void cub::Kernel<cub::Policy<long>::Policy800, false>(int*)": (
        "Kernel<Policy<long>::Policy800, false>"
    ),
    "Fan2(float *, float *, int)": "Fan2",
    "void (anonymous namespace)::cut_off_kernel<c10::Half, (int": "cut_off_kernel<Half, (int",
}


@pytest.mark.parametrize("name", SHORT)
def test_a_name_leaves_out_namespaces_parameters_and_boilerplate(name):
    assert readable(name) == SHORT[name]


@pytest.mark.parametrize(
    "name",
    [
        "aten::mm",
        "autograd::engine::evaluate_function: MulBackward0",
        "Memcpy HtoD (Pinned -> Device)",
        "nvjet_sm90_tst",
        "layers.0.mlp",
        "",
        "void " + "f<" * 1500 + ">" * 1500,
        "void >::<",
    ],
)
def test_other_names_stay_as_they_are(name):
    assert readable(name).endswith(name.removeprefix("void "))


def test_kernels_of_one_library_keep_different_names():
    with KNOWN.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if "torch" in row["library"]]
    names = {row["name"] for row in rows}
    assert len(names) > 100
    # Two versions of a library call their parameters otherwise.
    assert len({readable(name) for name in names}) >= len(names) - 4
