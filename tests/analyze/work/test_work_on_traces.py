"""Work against figures known in advance, on recorded traces where they are at hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from kprof.analyze.passes import analyze
from kprof.collect.readers.kineto import reader as kineto
from kprof.device import find_device

TRACES = Path(__file__).parents[4] / "shared" / "traces" / "h200"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")


def analyzed(name):
    trace = kineto.read(TRACES / name)
    return analyze(replace(trace, meta=replace(trace.meta, device=find_device("NVIDIA H200"))))


@pytest.fixture(scope="module")
def training():
    return analyzed("llama8_train.json.gz").kernels


def test_a_training_step_takes_six_flops_per_weight_and_token_and_attention(training):
    # Eight layers of 60.8 M weights in products, a head of 262.7 M, 4 x 1024 tokens; two steps.
    weights = 8 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 2048 * 128256
    attention = 8 * 3 * 2 * (64 + 64) * 4 * 32 * 1024 * 1024 // 2
    expected = 2 * (6 * weights * 4 * 1024 + attention)
    in_products = training["kind"].isin(["gemm", "attention"])
    assert training.loc[in_products, "flops"].sum() == pytest.approx(expected, rel=0.001)


def test_the_optimizers_bound_is_close_to_its_traffic(training):
    # Parameter, gradient and two moments of two bytes each; all but the gradient written back.
    weights = 749_240_320
    bound = training.loc[training["op"] == "aten::_fused_adamw_", "bytes"].sum()
    assert bound == pytest.approx(2 * 7 * 2 * weights, rel=0.01)


@pytest.mark.parametrize("name", ["llama8_train.json.gz", "llama8_decode_eager.json.gz"])
def test_nearly_all_device_time_has_known_work_and_no_ceiling_is_beaten(name):
    kernels = analyzed(name).kernels
    modelled = kernels.loc[kernels["work_from"].notna(), "duration_ns"].sum()
    beaten = kernels["limit_ns"].fillna(0) > 1.05 * kernels["duration_ns"]
    assert modelled >= 0.99 * kernels["duration_ns"].sum()
    assert not beaten.any()


def test_products_of_a_training_step_are_bound_by_compute(training):
    products = training[training["op"] == "aten::mm"]
    in_compute = products.loc[products["bound"] == "compute", "duration_ns"].sum()
    assert in_compute > 0.95 * products["duration_ns"].sum()
