"""Floors of decoding, by values that a reader can compute."""

from dataclasses import replace

import pytest

from kprof.analyze.fit import Need, fit, measured_gpus, read_model
from kprof.device import Device
from kprof.errors import KprofError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
# 1,000 bytes a second, and FLOPs that take no time.
GPU = Device("slow", 1_000.0, {"bf16": 1e15}, "test", memory_bytes=10_000)
NEED = Need("ttf3_p50<=10s", tokens=3, limit_ns=10e9, prompt=4, batch=1)


def made(**others):
    return read_model("m", {**CONFIG, **others})


def test_the_bytes_of_a_token_are_the_weights_and_the_cache():
    # A layer: q 8 x 8, k and v 4 x 8, o 8 x 8, gate and up 16 x 8, down 8 x 16: 576 weights.
    # Norms: 2 x 8 a layer, and 8. The head: 10 x 8.
    model = made()
    assert model.layer_weights == 2 * 576
    assert model.read_bytes("bf16") == 2 * (2 * 576 + 80 + 40)
    # Scales of 8 + 4 + 4 + 8 + 16 + 16 + 8 rows.
    assert model.read_bytes("fp8") == 2 * 576 + 4 * 2 * 64 + 2 * (80 + 40)
    # Keys and values of 4 columns in 2 layers, 2 bytes each.
    assert model.cache_bytes(5) == 5 * 2 * 2 * 4 * 2
    assert model.weight_bytes("bf16") == model.read_bytes("bf16")
    assert made(tie_word_embeddings=False).weight_bytes("bf16") == 2 * (2 * 576 + 2 * 80 + 40)


def test_the_floor_is_prefill_and_a_read_for_each_further_token():
    # Weights 2,544 bytes; a cached token 32: behind 4 tokens 128, behind 5 160.
    found = fit(made(), "bf16", GPU, NEED)
    assert found.prefill_ns == pytest.approx(2.544e9)
    assert found.floor_ns == pytest.approx((3 * 2_544 + 128 + 160) * 1e6)
    assert found.needed_share == pytest.approx((2 * 2_544 + 288) / (10_000 - 2_544))
    assert found.bytes_per_token == 2_544 + 6 * 32
    assert found.memory_bytes == 2_544 + 7 * 32
    assert found.verdict == "can"


def test_sequences_of_a_batch_share_the_weights():
    found = fit(made(), "bf16", GPU, replace(NEED, batch=3))
    assert found.floor_ns == pytest.approx((3 * 2_544 + 3 * 288) * 1e6)


def test_a_long_prompt_is_bound_by_flops():
    # 2 x 1,152 x 4 tokens, 4 x 8 x 10 pairs of 2 layers, 2 x 80 of the head.
    flops = 2 * 1_152 * 4 + 4 * 8 * 10 * 2 + 160
    found = fit(made(), "bf16", replace(GPU, flops_per_s={"bf16": 1_000.0}), NEED)
    assert found.prefill_ns == pytest.approx(flops * 1e6)


@pytest.mark.parametrize(
    ("limit_s", "memory", "verdict"),
    [
        (10, 10_000, "can"),
        # Steps of 5.376 s in 5.456 s: a share of 0.985.
        (8, 10_000, "not shown"),
        (7.91, 10_000, "cannot"),
        (2, 10_000, "cannot"),
        (10, 2_000, "no memory"),
    ],
)
def test_verdicts(limit_s, memory, verdict):
    gpu, need = replace(GPU, memory_bytes=memory), replace(NEED, limit_ns=limit_s * 1e9)
    found = fit(made(), "bf16", gpu, need)
    assert found.verdict == verdict
    assert (found.needed_share is None) == (verdict == "cannot")


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (None,) * 6),
        ({"model_type": "mistral", "sliding_window": 4}, (4,) * 6),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 6),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False}, (None,) * 6),
        ({"model_type": "gemma2", "sliding_window": 4}, (4, None, 4, None, 4, None)),
        ({"model_type": "gemma3_text", "sliding_window": 4}, (4, 4, 4, 4, 4, None)),
    ],
)
def test_windows_are_those_of_the_family(config, windows):
    model = made(num_hidden_layers=6, **config)
    assert model.windows == windows
    assert model.cache_bytes(10) == sum(min(10, one or 10) for one in windows) * 2 * 2 * 4


def test_biases_and_norms_are_those_of_the_family():
    assert made(model_type="qwen2").vectors == 2 * (16 + 8 + 2 * 4) + 8
    assert made(model_type="qwen3").vectors == 2 * (16 + 2 * 4) + 8
    assert made(model_type="gemma2").vectors == 2 * 32 + 8


def test_the_text_model_of_a_larger_one_is_read():
    model = read_model("m", {"model_type": "gemma3", "text_config": CONFIG})
    assert model == made()


@pytest.mark.parametrize(
    "config", [{"model_type": "mixtral"}, {"hidden_size": None}, {"vocab_size": "many"}]
)
def test_other_models_and_missing_dimensions_are_refused(config):
    with pytest.raises(KprofError):
        made(**config)


def test_llama_1b_reads_the_bytes_that_its_kernels_read():
    llama = made(
        hidden_size=2_048,
        intermediate_size=8_192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    assert llama.read_bytes("bf16") == 2_471_628_800
    assert [one.name for one in measured_gpus()] == ["H100 SXM", "H200 SXM"]
