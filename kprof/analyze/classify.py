"""Kinds: what each device activity is, and the type of its operands.

A kernel's name decides first, then the name of the operator that launched it. Rules are asked
once per distinct combination of names, never per row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from kprof.analyze.element_type import FLOATING, type_in_name, type_of
from kprof.analyze.work.elementwise import MODELS as ELEMENTWISE
from kprof.trace import Trace

OTHER = "other"

# What Inductor generates is named after all operators that it fused, the last of which may be
# products and convolutions that other kernels did: only a template (tem) does one itself.
INDUCTOR_RULES: tuple[tuple[str, str], ...] = (
    ("attention", r"^triton_(tem_fused|flex).*attention"),
    ("convolution", r"^triton_(tem_fused.*convolution|convolution\d?d?_)"),
    ("gemm", r"^triton_(tem|mm|bmm|addmm|scaled_mm)_"),
    ("embedding", r"^triton_poi_.*embedding"),
    ("elementwise", r"^triton_poi_"),
    ("norm", r"^triton_(red|per)_.*(norm|rsqrt)"),
    ("softmax", r"^triton_(red|per)_.*softmax"),
    ("loss", r"^triton_(red|per)_.*(nll_loss|cross_entropy)"),
    ("reduction", r"^triton_(red|per|spl)_"),
)

# kprof's own whose whole names tell it; of the others (forward, _kernel) their operators do.
OWN_RULES: tuple[tuple[str, str], ...] = (
    ("attention", r"^(decode|attend(_back(_to_(keys|queries))?)?)$"),
    ("loss", r"^losses_((held|shared)_)?kernel$"),
    ("elementwise", r"^_rotate$"),
)
OWN_OP_RULES: tuple[tuple[str, str], ...] = (
    ("norm", r"^kprof::norm"),
    ("optimizer", r"^kprof::adamw"),
    ("gemm", r"^kprof::fp8_(gemm|linear)"),
    ("elementwise", r"^kprof::(glu|rope|scale|(swiglu_)?quantize)"),
)
# By which a linear layer in FP8 casts its operands, before their product.
OWN_CASTS = {"_rows", "_blocks", "_largest", "_turned"}

# First match wins, so specific names come before general ones.
KERNEL_RULES: tuple[tuple[str, str], ...] = (
    *INDUCTOR_RULES,
    *OWN_RULES,
    ("collective", r"nccl|rccl|msccl|nvshmem|deep_ep::|multimem|cross_device_reduce|userbuffers"),
    ("collective", r"all_?reduce(?!d)|all_?gather|reduce_?scatter|all_?to_?all"),
    ("copy", r"(reshape|concat)_and_cache|AppendPagedKV|nchwToNhwc|nhwcToNchw|batched_transpose"),
    ("copy", r"im2col|col2im|im2d2col"),
    ("indexing", r"moe::dev::|expandInputRows|finalizeMoe|moe_(align|sum|permute|unpermute)"),
    ("elementwise", r"quantize_with|fp8_quant|_quantize_|cast_transpose|rotary|(?<![a-z])rope"),
    ("elementwise", r"act_and_mul|doActivation"),
    ("attention", r"flash(?!infer)|fmha|sdpa|mha_|attn_(fwd|bwd)|attention|flex_attn|paged_att"),
    ("attention", r"mla_|compute_dot_do_o|merge_attn_states|MergeState|mqa_logits"),
    ("attention", r"(Batch|Single)(Prefill|Decode)|(Prefill|Decode)With(Paged)?KVCache|BatchMLA"),
    ("attention", r"^_fwd_(grouped_)?kernel_stage[12]$"),
    (
        "convolution",
        r"implicit_?gemm|conv(olution|olve|1d|2d|3d|_)|fprop|dgrad|wgrad|winograd|scudnn",
    ),
    ("convolution", r"^miopen.*conv|^igemm_(fwd|bwd|wrw)|SubTensorOp|cudnn_.*conv"),
    ("optimizer", r"fused_?(adam|sgd|lamb|adagrad)|adam_?(w|functor|kernel)|lamb(functor|stage)"),
    ("loss", r"nll_loss|cross_?entropy|mse_kernel|smooth_l1|ctc_loss|kl_div"),
    ("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|bn_(fw|bw)|GammaBeta|RowwiseMoments"),
    ("norm", r"\bln_(fwd|bwd)|Rmsnorm2d"),
    ("softmax", r"soft_?max"),
    ("embedding", r"embedding|index_?select"),
    ("sort", r"sort(?!ed)|topk|top_k|radix_?select|bitonic|TopP"),
    ("gemm", r"(?<!fb)gemm(?!_gpu)|gemv|nvjet|cijk_|xmma|cutlass|splitk|_matmul|\bbmm_|dot_kernel"),
    (
        "gemm",
        r"epilogue::impl|cublas|wvSplitK|fused_moe_kernel|marlin|mul_mat_|lora_(shrink|expand)",
    ),
    ("random", r"distribution_|philox|curand|dropout|bernoulli|random|Sampling"),
    ("set", r"FillFunctor|memset|arange|linspace"),
    ("indexing", r"index|indices|gather|scatter|masked_(select|scatter)|nonzero|permute_"),
    ("copy", r"direct_copy|CatArray|copy_?(kernel|device|buffer)|transpose|memcpy|triu_tril"),
    ("reduction", r"reduce_kernel|DeviceReduce|reduceReduce|reduce_1Block|_?pool(ing|_|2d|3d)"),
    ("elementwise", r"elementwise|pointwise|swiglu|geglu|quantize|upsample"),
    ("reduction", r"scan|cumsum|Reduce"),
)

# For kernels whose names say nothing; matched against the operator's name.
OP_RULES: tuple[tuple[str, str], ...] = (
    *OWN_OP_RULES,
    ("collective", r"^(nccl|c10d|record_param_comms|_c10d)|allreduce|all_reduce|allgather"),
    ("attention", r"attention|flash_attn|fmha"),
    ("convolution", r"conv"),
    ("optimizer", r"_fused_(adam|sgd|adagrad)|^Optimizer\.step"),
    ("loss", r"loss|cross_entropy"),
    ("softmax", r"softmax"),
    ("norm", r"(layer|batch|group|rms|instance|weight)_?norm"),
    ("embedding", r"embedding|index_select|split_embedding"),
    ("gemm", r"::(_scaled_|_int_|_grouped_)?(mm|bmm|addmm|baddbmm|matmul|linear|addmv|mv|dot)_?\b"),
    # What a recurrent layer of the host takes is its products.
    ("gemm", r"::(mkldnn_(rnn_layer|linear)|_mkl_linear|_linear_pointwise)"),
    ("sort", r"::(sort|argsort|topk|msort|kthvalue|unique)"),
    ("random", r"::(rand|normal_|uniform_|bernoulli|multinomial|native_dropout|exponential_)"),
    ("indexing", r"::(index|gather|scatter|masked_select|nonzero|take|_index_put|repeat_interl)"),
    ("copy", r"::(copy_|_to_copy|to|clone|contiguous|cat|stack|_cat|pin_memory|[a-z]+_pad)"),
    ("set", r"::(fill_|zero_|zeros|ones|full|arange)"),
    (
        "reduction",
        r"::(sum|mean|norm|linalg_vector_norm|amax|amin|max|min|prod|var|std|arg|cum|all|any)",
    ),
    (
        "elementwise",
        r"::(_?foreach|add|sub|mul|div|pow|sqrt|rsqrt|neg|exp(?!and)|log|sigmoid|tanh|silu|gelu)",
    ),
    (
        "elementwise",
        r"::(relu|clamp|threshold|where|(eq|ne|lt|gt|le|ge)(_|\b)|bitwise|logical|sin|cos|abs|upsample)",
    ),
)

_UPDATE = re.compile(r"optimizer|adam|adagrad|sgd|lamb", re.IGNORECASE)


def add_kind(trace: Trace) -> Trace:
    """Add `kind` and `dtype` to every device activity."""
    kernels = trace.kernels
    op_row = kernels["op_row"].fillna(-1).to_numpy(dtype=np.int64)
    input_types = trace.ranges["input_dtypes"].cat
    input_codes = input_types.codes.to_numpy()
    types_code = np.full(len(kernels), -1, dtype=np.int64)
    has_op = op_row >= 0
    types_code[has_op] = input_codes[op_row[has_op]]
    columns = ("name", "activity", "op", "phase")
    keys = pd.DataFrame({c: kernels[c].cat.codes.to_numpy() for c in columns})
    keys["input_dtypes"] = types_code
    group = keys.groupby(list(keys.columns), sort=False).ngroup().to_numpy()
    _, first = np.unique(group, return_index=True)

    names = {c: _texts(kernels[c], keys[c].to_numpy()[first]) for c in columns}
    types = _texts(trace.ranges["input_dtypes"], types_code[first])
    kinds, dtypes = [], []
    for name, activity, op, phase, inputs in zip(*names.values(), types, strict=True):
        kind = find_kind(name or "", activity or "", op, phase)
        kinds.append(kind)
        dtypes.append(find_dtype(name or "", activity or "", kind, inputs))
    index = kernels.index
    return trace.with_kernels(
        kind=_spread(kinds, group).set_axis(index), dtype=_spread(dtypes, group).set_axis(index)
    )


def _texts(column: pd.Series[str], codes: np.ndarray) -> list[str | None]:
    """Return the categories of `column` at `codes`, None for a missing one."""
    categories = [*column.cat.categories, None]
    return [categories[code] for code in codes]


def _spread(values: Sequence[str | None], group: np.ndarray) -> pd.Series[str]:
    """Give every row the value of its group."""
    categories = sorted({v for v in values if v is not None})
    code_of = {value: code for code, value in enumerate(categories)}
    codes = np.array([-1 if v is None else code_of[v] for v in values], dtype=np.int16)
    dtype = pd.CategoricalDtype(pd.Index(categories, dtype=object))
    spread: pd.Series[str] = pd.Series(pd.Categorical.from_codes(codes[group], dtype=dtype))
    return spread


def find_kind(name: str, activity: str, op: str | None, phase: str | None) -> str:
    """Return the kind of an activity from its name, then from its operator's."""
    if activity == "memcpy":
        return "copy"
    if activity == "memset":
        return "set"
    if activity == "host":
        return _of_operator(name) or OTHER
    if re.search("multi_tensor_apply|foreach|^triton_for_", name):
        is_update = phase == "optimizer" or _UPDATE.search(f"{name} {op}")
        return "optimizer" if is_update else "elementwise"
    kind = _match(KERNEL_RULES, name)
    of_op = _of_operator(op) if op else None
    if kind == "gemm" and of_op == "convolution":
        return "convolution"  # Libraries do some convolutions as a matrix product.
    if kind is None and name in OWN_CASTS and of_op == "gemm":
        return "elementwise"
    return kind or of_op or OTHER


def _of_operator(name: str) -> str | None:
    """Return the kind that an operator's name tells, or None."""
    # Known names come before patterns: `maximum` is no reduction.
    return "elementwise" if name in ELEMENTWISE else _match(OP_RULES, name)


def find_dtype(name: str, activity: str, kind: str, input_types: str | None) -> str | None:
    """Return the operands' type: of the operator's inputs, else what the kernel's name says."""
    recorded = _operand_type(input_types) if input_types else None
    named = type_in_name(name) if activity == "kernel" else None
    if recorded is None or ("double" in (input_types or "") and named == "fp64"):
        return named
    is_matrix = kind in ("gemm", "convolution", "attention")
    if recorded == "fp32" and is_matrix and _runs_on_tensor_cores(name):
        return "tf32"
    return recorded


def _runs_on_tensor_cores(name: str) -> bool:
    """Tell whether a kernel with float operands multiplies them as TF32."""
    return bool(re.search(r"tf32|s1688|tensorop_s|nvjet|xf32", name, re.IGNORECASE))


@lru_cache(maxsize=65536)
def _operand_type(input_types: str) -> str | None:
    """Return the first floating type of an operator's inputs, else its first type.

    A double beside another floating type is a Python number that was wrapped as a tensor.
    """
    names = (type_of(t) for t in re.findall(r'"([^"]*)"', input_types))
    found = [n for n in names if n is not None]
    floating = [n for n in found if n in FLOATING]
    operands = [n for n in floating if n != "fp64"] or floating or found
    if not operands:
        return None
    return "fp4" if operands[0] == "fp4x2" else operands[0]


@lru_cache(maxsize=65536)
def _match(rules: tuple[tuple[str, str], ...], name: str) -> str | None:
    """Return the kind of the first rule that `name` meets."""
    return next((k for k, pattern in rules if re.search(pattern, name, re.IGNORECASE)), None)
