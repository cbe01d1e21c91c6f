"""Whether a language model can keep a time to N tokens on a GPU: floors from bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kprof.device import Device, find_device
from kprof.errors import KprofError

Dtype = Literal["bf16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")
# Bytes of a weight of a linear layer, and of one row's scale. The head, embeddings, norms, biases
# and the cache of keys and values stay in 16 bits.
WEIGHT_BYTES = {"bf16": 2, "fp8": 1}
SCALE_BYTES = {"bf16": 0, "fp8": 4}
HALF_BYTES = 2
# Dense decoders: whether the queries and keys of a layer have norms, how many norms it has, and
# whether the head is the embedding where the configuration does not say.
FAMILIES = {
    "llama": (False, 2, False),
    "mistral": (False, 2, False),
    "qwen2": (False, 2, False),
    "qwen3": (True, 2, False),
    "gemma": (False, 2, True),
    "gemma2": (False, 4, True),
    "gemma3_text": (True, 4, True),
}
# Read rates that kprof measured: benchmarks/results/decode_llama-3.2-1b_h100_2026-11.json and
# roofline_h200_2026-11.json.
MEASURED = {"NVIDIA H100 80GB HBM3": 3.107e12, "NVIDIA H200": 4.397e12}
# Share of the read rate that kprof's decoding reached: Llama-3.2-1B on an H100, the first file.
REACHED_SHARE = 0.84

Verdict = Literal["can", "not shown", "cannot", "no memory"]


@dataclass(frozen=True)
class Model:
    """The dimensions of a dense decoder."""

    name: str
    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    dim: int
    vocabulary: int
    is_tied: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Of each layer: how many keys a query sees; None: all."""

    @property
    def layer_rows(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of each linear layer of one decoder layer."""
        queries, keys = self.heads * self.dim, self.key_heads * self.dim
        return (
            *((queries, self.hidden), (keys, self.hidden), (keys, self.hidden)),
            *((self.hidden, queries), (self.inner, self.hidden), (self.inner, self.hidden)),
            (self.hidden, self.inner),
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of all decoder layers."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.layer_rows)

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.vocabulary * self.hidden

    @property
    def vectors(self) -> int:
        """Elements of norms and biases."""
        has_qk_norm, norms, _ = FAMILIES[self.family]
        queries, keys = self.heads * self.dim, self.key_heads * self.dim
        layer = norms * self.hidden + (2 * self.dim if has_qk_norm else 0)
        if self.attention_bias:
            layer += queries + 2 * keys + (0 if self.family == "qwen2" else self.hidden)
        if self.mlp_bias:
            layer += 2 * self.inner + self.hidden
        return self.layers * layer + self.hidden

    def read_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of weights that a step reads: all but the embeddings."""
        scales = self.layers * sum(outputs for outputs, _ in self.layer_rows)
        linear = self.layer_weights * WEIGHT_BYTES[dtype] + scales * SCALE_BYTES[dtype]
        return linear + HALF_BYTES * (self.head_weights + self.vectors)

    def weight_bytes(self, dtype: Dtype) -> int:
        """Return the bytes of all weights."""
        embedding = 0 if self.is_tied else HALF_BYTES * self.head_weights
        return self.read_bytes(dtype) + embedding

    def cache_bytes(self, context: int) -> int:
        """Return the bytes of cached keys and values that a step behind `context` tokens reads."""
        seen = sum(min(context, one or context) for one in self.windows)
        return 2 * HALF_BYTES * self.key_heads * self.dim * seen

    def prefill_flops(self, prompt: int) -> int:
        """Return the FLOPs of a prompt: linear layers, causal attention, the head of one token."""
        attended = sum(_causal_pairs(prompt, one) for one in self.windows)
        attention = 4 * self.heads * self.dim * attended
        return 2 * self.layer_weights * prompt + attention + 2 * self.head_weights


def _causal_pairs(prompt: int, window: int | None) -> int:
    seen = min(prompt, window or prompt)
    return seen * (seen + 1) // 2 + (prompt - seen) * seen


@dataclass(frozen=True)
class Need:
    """What is asked for: N tokens behind a prompt within a time."""

    target: str
    tokens: int
    limit_ns: float
    prompt: int
    batch: int


@dataclass(frozen=True)
class Fit:
    """One model in one dtype on one GPU. Times are floors: no kernel is faster."""

    model: str
    dtype: Dtype
    gpu: str
    verdict: Verdict
    bytes_per_token: int
    """At the end: weights, and the cache of all sequences."""
    token_ns: float
    prefill_ns: float
    floor_ns: float
    """Prefill and all further tokens."""
    needed_share: float | None
    """Of the read rate, that decoding must reach to keep the target; None: it cannot."""
    memory_bytes: int
    """Weights, and the cache at the end."""
    gpu_memory_bytes: int | None


def read_model(name: str, config: Mapping[str, Any]) -> Model:
    """Return the dimensions in a configuration of Hugging Face.

    Raises:
        KprofError: it is of another kind of model, or lacks a dimension.
    """
    config = config.get("text_config", config)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise KprofError(
            f"{name}: no dense decoder that kprof knows: model_type is {family!r}",
            fix=f"give a configuration of {', '.join(FAMILIES)}",
        )
    hidden, heads = (
        _number(name, config, "hidden_size"),
        _number(name, config, "num_attention_heads"),
    )
    layers = _number(name, config, "num_hidden_layers")
    is_tied = config.get("tie_word_embeddings", FAMILIES[family][2])
    return Model(
        name=name,
        family=family,
        hidden=hidden,
        inner=_number(name, config, "intermediate_size"),
        layers=layers,
        heads=heads,
        key_heads=_number(name, config, "num_key_value_heads", heads),
        dim=_number(name, config, "head_dim", hidden // heads),
        vocabulary=_number(name, config, "vocab_size"),
        is_tied=bool(is_tied),
        attention_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=tuple(_windows(name, family, config, layers)),
    )


def _number(name: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KprofError(
            f"{name}: {key} is {value!r}, not a positive whole number",
            fix="give the config.json that is stored with the weights",
        )
    return value


def _windows(name: str, family: str, config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return the window of each layer, by its types or by the rule of the family."""
    window = config.get("sliding_window")
    is_used = config.get("use_sliding_window", family not in ("qwen2", "qwen3"))
    if window is None or not is_used or family in ("llama", "gemma"):
        return [None] * layers
    window = _number(name, config, "sliding_window")
    types = config.get("layer_types")
    if types is not None and len(types) != layers:
        raise KprofError(
            f"{name}: {len(types)} layer_types for {layers} layers",
            fix="give the config.json that is stored with the weights",
        )
    if types is not None:
        return [window if one == "sliding_attention" else None for one in types]
    if family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [window if number >= first else None for number in range(layers)]
    # Of so many layers, the last sees all keys; Mistral has none that does.
    period = {"gemma2": 2, "gemma3_text": config.get("sliding_window_pattern", 6)}.get(family)
    return [
        None if period is not None and (number + 1) % period == 0 else window
        for number in range(layers)
    ]


def fit(model: Model, dtype: Dtype, gpu: Device, need: Need) -> Fit:
    """Return whether a model in a dtype can keep the need on a GPU.

    `gpu.memory_bytes_per_s` is a rate of reading. The first token comes with the prefill, whose
    floor is the longer of its FLOPs at the peak rate and one read of the weights; each further one
    reads the weights and the cache so far.
    """
    rate = gpu.memory_bytes_per_s
    weights = model.read_bytes(dtype)
    contexts = range(need.prompt, need.prompt + need.tokens - 1)
    cached = need.batch * sum(model.cache_bytes(one) for one in contexts)
    flops = need.batch * model.prefill_flops(need.prompt)
    peak = gpu.flops_per_s.get(dtype) or gpu.flops_per_s["bf16"]
    prefill_ns = 1e9 * max(flops / peak, weights / rate)
    steps_ns = 1e9 * (len(contexts) * weights + cached) / rate
    end = need.prompt + need.tokens
    last = weights + need.batch * model.cache_bytes(end - 1)
    memory = model.weight_bytes(dtype) + need.batch * model.cache_bytes(end)
    left_ns = need.limit_ns - prefill_ns
    share = steps_ns / left_ns if left_ns > 0 else None
    share = None if share is None or share > 1 else share
    return Fit(
        model=model.name,
        dtype=dtype,
        gpu=gpu.name,
        verdict=_verdict(share, memory, gpu.memory_bytes),
        bytes_per_token=last,
        token_ns=1e9 * last / rate,
        prefill_ns=prefill_ns,
        floor_ns=prefill_ns + steps_ns,
        needed_share=share,
        memory_bytes=memory,
        gpu_memory_bytes=gpu.memory_bytes,
    )


def _verdict(share: float | None, memory: int, available: int | None) -> Verdict:
    if available is not None and memory > available:
        return "no memory"
    if share is None:
        return "cannot"
    return "can" if share <= REACHED_SHARE else "not shown"


def measured_gpus() -> tuple[Device, ...]:
    """Return the GPUs whose rate of reading kprof has measured."""
    found = []
    for name, rate in MEASURED.items():
        listed = find_device(name)
        if listed is not None:
            found.append(reading(listed, rate))
    return tuple(found)


def reading(listed: Device, rate: float) -> Device:
    """Return a device whose memory's rate is one of reading, in bytes a second."""
    return Device(
        name=listed.name,
        memory_bytes_per_s=rate,
        flops_per_s=listed.flops_per_s,
        source=f"read rate measured by kprof; {listed.source}",
        is_measured=True,
        num_sms=listed.num_sms,
        memory_bytes=listed.memory_bytes,
    )
