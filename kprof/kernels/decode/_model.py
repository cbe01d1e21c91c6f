"""The weights and dimensions of a causal language model of Hugging Face, as decoding reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of a head; the kernel needs a power of two.
DIMS = (16, 32, 64, 128, 256)
# Query heads of a key head: the rows of a tile.
MOST_GROUP = 16
MOST_BATCH = 8
# Classes whose code computes what `_reference` does; (1 + weight) in norms of Gemma.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Of positions: others depend on the length of the sequence.
ROTATIONS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Weight:
    """The weight (outputs, inputs) of a linear layer, and its bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """The weights of a decoder layer."""

    before_attention: Tensor
    q: Weight
    k: Weight
    v: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    before_mlp: Tensor
    gate: Weight
    up: Weight
    down: Weight
    window: int | None
    """How many keys a query sees, its own with them; None: all."""
    after_attention: Tensor | None = None
    """The norm of what attention adds to the residual stream; None: there is none."""
    after_mlp: Tensor | None = None
    rotation: str | None = None
    """The type of the layer, where each has its own rotation."""


@dataclass(frozen=True)
class Decoder:
    """A causal language model: its layers, and what they have in common."""

    layers: tuple[Layer, ...]
    embedding: Tensor
    norm: Tensor
    head: Weight
    rotary: Module
    hidden: int
    heads: int
    """Key heads."""
    group: int
    """Query heads of a key head."""
    dim: int
    scale: float
    eps: float
    activation: str
    adds_one: bool
    """Whether the weights of norms are one less than what they multiply by."""
    embedding_scale: float
    score_cap: float | None = None
    """c of c tanh(x / c) of attention's scores; None: they have no cap."""
    logit_cap: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.device

    @property
    def inner(self) -> int:
        """The width of the MLP."""
        return self.layers[0].gate.weight.shape[0]

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.head.weight.shape[0]

    def weights(self) -> list[Tensor]:
        """Return all weights that a step reads once, the head with them."""
        found = [self.norm, self.head.weight]
        for layer in self.layers:
            found += [layer.before_attention, layer.before_mlp]
            found += [one for one in (layer.q_norm, layer.k_norm) if one is not None]
            for name in ("q", "k", "v", "o", "gate", "up", "down"):
                weight = getattr(layer, name)
                found += [one for one in (weight.weight, weight.bias) if one is not None]
            found += [one for one in (layer.after_attention, layer.after_mlp) if one is not None]
        return found

    def bytes_per_token(self, context: int) -> int:
        """Return the compulsory traffic of a token: every weight once, and the cached keys."""
        weights = sum(one.numel() * one.element_size() for one in self.weights())
        row = 2 * self.heads * self.dim * self.embedding.element_size() * len(self.layers)
        return weights + row * context

    def rotations(self, length: int, kind: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in float32, (length, dim), for layers of a `rotation`."""
        positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(1, 1, self.dim, device=self.device, dtype=torch.float32)
        with torch.no_grad():
            cos, sin = self.rotary(like, positions, *([] if kind is None else [kind]))
        return cos[0].contiguous(), sin[0].contiguous()


def decoder_of(model: Module) -> Decoder | str:
    """Return the weights of a model; or why its decoding is not supported."""
    why = _why_not(model)
    if why is not None:
        return why
    config: Any = model.config
    body: Any = model.model
    attention = body.layers[0].self_attn
    is_gemma = FAMILIES[type(model).__name__].startswith("gemma")
    dim = attention.head_dim
    key_heads = attention.k_proj.weight.shape[0] // dim
    scale = getattr(body.embed_tokens, "embed_scale", None)
    found = Decoder(
        layers=tuple(_layer(one, config) for one in body.layers),
        embedding=body.embed_tokens.weight,
        norm=body.norm.weight,
        head=_weight(model.lm_head),
        rotary=body.rotary_emb,
        hidden=config.hidden_size,
        heads=key_heads,
        group=attention.q_proj.weight.shape[0] // dim // key_heads,
        dim=dim,
        scale=attention.scaling,
        eps=config.rms_norm_eps,
        activation=ACTIVATIONS[_activation(config)],
        adds_one=is_gemma,
        # Rounded to the dtype, as the model does.
        embedding_scale=1.0 if scale is None else scale.to(body.embed_tokens.weight.dtype).item(),
        # The attention of Gemma 3 leaves its own out.
        score_cap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )
    return _why_not_sized(found) or found


def _why_not(model: Module) -> str | None:
    cls = type(model)
    family = FAMILIES.get(cls.__name__)
    if family is None or cls.__module__ != f"transformers.models.{family}.modeling_{family}":
        return f"decoding of {cls.__name__} is not supported: {', '.join(FAMILIES)} are"
    config: Any = model.config
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    for rotation in _rotations(config):
        if rotation not in ROTATIONS:
            return f"its rotary positions are of the type {rotation}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    return _why_changed(model)


def _rotations(config: Any) -> list[Any]:
    """Return the types of the rotary positions, of all types of layers."""
    parameters = config.rope_parameters or {}
    if parameters and all(isinstance(one, dict) for one in parameters.values()):
        return [one.get("rope_type") for one in parameters.values()]
    return [parameters.get("rope_type")]


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _why_changed(model: Module) -> str | None:
    """Return how a part of the model differs from the code of its family."""
    home = type(model).__module__
    for name, module in model.named_modules():
        cls = type(module)
        if not cls.__module__.startswith((home, "torch.nn.modules", "transformers.activations")):
            return f"{name} is a {cls.__module__}.{cls.__name__}"
        if not _is_as_built(name, module, home):
            return f"{name} is a {cls.__name__}"
        if "forward" in module.__dict__:
            return f"the forward of {name or cls.__name__} was replaced"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or cls.__name__} has hooks"
    return _why_not_stored(model)


def _is_as_built(name: str, module: Module, home: str) -> bool:
    """Return whether a part that decoding reads has the class that its family gives it."""
    part = name.rpartition(".")[2]
    if part.endswith("_proj") or part == "lm_head":
        return type(module) is Linear
    if part == "embed_tokens":
        return isinstance(module, Embedding)
    return not part.endswith("norm") or type(module).__module__ == home


def _why_not_stored(model: Module) -> str | None:
    parameters = list(model.parameters())
    if {one.dtype for one in parameters} - {parameters[0].dtype}:
        return "its weights have several dtypes"
    if parameters[0].dtype not in DTYPES:
        return f"its weights are in {parameters[0].dtype}"
    if len({one.device for one in parameters}) > 1:
        return "its weights are on several devices"
    if any(type(one) is not torch.nn.Parameter or not one.is_contiguous() for one in parameters):
        return "its weights are no plain contiguous parameters"
    return None


def _why_not_sized(found: Decoder) -> str | None:
    if found.dim not in DIMS:
        return f"its heads have {found.dim} columns, not one of {', '.join(map(str, DIMS))}"
    if found.group > MOST_GROUP:
        return f"{found.group} query heads share a key head: more than {MOST_GROUP}"
    if found.hidden % 8 or found.inner % 8:
        return f"its widths {found.hidden} and {found.inner} are no multiples of 8"
    biases = {(one.q.bias is None, one.k.bias is None, one.v.bias is None) for one in found.layers}
    if any(len(set(one)) > 1 for one in biases):
        return "only some of the projections of its attention have biases"
    if found.head.bias is not None:
        return "its head has a bias"
    return None


def _weight(linear: Linear) -> Weight:
    return Weight(linear.weight, linear.bias)


def _layer(layer: Any, config: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    is_gemma = hasattr(layer, "pre_feedforward_layernorm")
    after = layer.post_attention_layernorm.weight
    return Layer(
        before_attention=layer.input_layernorm.weight,
        q=_weight(attention.q_proj),
        k=_weight(attention.k_proj),
        v=_weight(attention.v_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        o=_weight(attention.o_proj),
        before_mlp=layer.pre_feedforward_layernorm.weight if is_gemma else after,
        gate=_weight(mlp.gate_proj),
        up=_weight(mlp.up_proj),
        down=_weight(mlp.down_proj),
        window=_window(attention, config),
        after_attention=after if is_gemma else None,
        after_mlp=layer.post_feedforward_layernorm.weight if is_gemma else None,
        rotation=attention.layer_type if config.model_type == "gemma3_text" else None,
    )


def _window(attention: Any, config: Any) -> int | None:
    # Qwen sets the window of a layer; Mistral has one for all.
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
