"""Kinds: what each device activity is, and the type of its operands.

A kernel's name decides first, then the name of the operator that launched it. Rules are asked
once per distinct combination of names, never per row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from kprof.analyze.element_type import FLOATING, type_in_name, type_of
from kprof.analyze.kernel_name import parse
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

# XLA names a fusion after its root operations, and a lone operation `wrapped_`.
XLA_RULES: tuple[tuple[str, str], ...] = (
    ("gemm", r"^(triton_)?gemm_fusion"),
    ("softmax", r"^triton_softmax"),
    ("sort", r"^wrapped_sort"),
    ("indexing", r"^(input|loop|wrapped)_(\w+_)?(gather|scatter|reverse)(_fusion|_\d|\.|$)"),
    ("reduction", r"^(input|loop|wrapped)_(\w+_)?reduce(_window)?(_\w+)?(_fusion|_\d|\.|$)"),
    (
        "copy",
        r"^(input|loop|wrapped)_(\w+_)?(transpose|concatenate|copy|slice|pad)(_fusion|_\d|\.|$)",
    ),
    ("set", r"^(loop|wrapped)_(broadcast|iota)(_fusion|_\d|\.|$)"),
    (
        "elementwise",
        r"^(input|loop)_\w*fusion|^wrapped_(add|multiply|subtract|convert|compare|select)",
    ),
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

# Matched against the function's own name and its words joined by `_`. First match wins, so
# specific names come first.
KERNEL_RULES: tuple[tuple[str, str], ...] = (
    *INDUCTOR_RULES,
    *XLA_RULES,
    *OWN_RULES,
    ("set", r"memset"),
    ("collective", r"nccl|rccl|msccl|nvshmem|multimem|cross_device_reduce|userbuffers"),
    (
        "collective",
        r"all[-_]?reduce(?!d)|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all|send_?recv"
        r"|pushrecv|(one|two)_?shot",
    ),
    (
        "collective",
        r"(put|get|port|semaphore|fifo)\w*pingpong|(switch|peer)_?barrier|(?<![a-z])barrier(_?kernel)?$|symm(etric)?_mem|(wait|notify)_?signal",
    ),
    (
        "collective",
        r"^(kernel_?)?(notify_|cached_notify|low_latency_)?(dispatch|combine)(_?reduce)?$",
    ),
    ("attention", r"ms_deform"),
    ("copy", r"(d2d|d2h|h2d)_?(cpy|copy)"),
    ("copy", r"(reshape|concat)_and_cache|AppendPagedKV|nchwToNhwc|nhwcToNchw|batched_transpose"),
    (
        "copy",
        r"im2col|col2im|im2d2col|(store|update|copy|set|write)_?(kv|mla)?_?(cache|buffer)|(append|flatten)_?kv"
        r"|(?<![a-z])kv_?(cache_)?(update|append|write|store|move)|_?copy_",
    ),
    ("elementwise", r"(relu|bias|gelu|add)_?(fprop|bprop|dgrad)|scale_?(cpy|copy)"),
    (
        "indexing",
        r"expandInputRows|finalizeMoe|moe_(align|sum|permute|unpermute)|routing|bucketize"
        r"|bounds_check|linearize_index|offsets_range|dispatch_layout|(token|kv)_(ids|indices)",
    ),
    ("elementwise", r"cast_transpose|rotary|(?<![a-z])m?rope|(?<=[a-z0-9_])Rotary|RopeQuant"),
    ("elementwise", r"act_and_mul|doActivation"),
    ("convolution", r"^compute[a-z0-9]*Offsets(Kernel)?"),
    # What prepares an index, a mask or the metadata of a batch does none of their work.
    (
        "indexing",
        r"(fill|compute|prepare|generate|build|create|get|update|convert)_(\w+_)?(indices|indexes|positions?"
        r"|metadata|offsets?|seq_?lens?|slots?|(block|page)_tables?|(in|out|kernel)\w*_map)(?![a-z])",
    ),
    ("set", r"(build|create|make|prepare|generate|init|fill)\w*mask"),
    ("softmax", r"(attn|attention)_?soft_?max"),
    ("gemm", r"^bmm_|(?<![a-z])dense_kernel|gather_?mm|segment_?mm|sddmm|spm[mv]|spgemm"),
    (
        "attention",
        r"flash(?!infer)|fmha|sdpa|mha_|attn|attention|gdpa|hstu|(?<![a-z])sage_(fwd|bwd)"
        r"|(?<![a-z])att\d?(?![a-z])|(?<![a-z])lse(?![a-z])|out_correction",
    ),
    ("attention", r"mla_|dot_do_o|do_o_dot|merge_?states?|mqa_logits|convert_d(q|kv?|v)_"),
    ("attention", r"(Batch|Single)(Prefill|Decode)|With(Paged|Ragged)?KVCache|BatchMLA"),
    ("attention", r"^_fwd_(grouped_)?kernel_stage[12]$"),
    ("reduction", r"cumsum|cumprod|segsum"),
    # Linear attention: chunkwise, recurrent and parallel forms.
    (
        "attention",
        r"^_?(fused_|intra_|inter_)?(chunk(wise)?|recurrent|parallel)_\w*(fwd|bwd)|delta_(rule|net)|retention",
    ),
    ("attention", r"(?<![a-z])(gla|gdn|kda|hgrn|r?wkv|nsa)\d?(?![a-z])|_wy_repr|recompute_w_u"),
    (
        "convolution",
        r"implicit_?gemm|conv(olution|olve|1d|2d|3d|_)|fprop|dgrad|wgrad|winograd|scudnn",
    ),
    ("copy", r"SubTensorOpWith(SubTensor|Transform)"),
    (
        "convolution",
        r"^miopen.*conv|^igemm_(fwd|bwd|wrw)|SubTensorOp|cudnn_.*conv|CvBwd|CvFwd|depthwise"
        r"|gemm\w*(bwd|backward)_(weight|data)",
    ),
    ("embedding", r"split_embedding|^kernel_grid|^compute_grad_weight|partials?_(per_)?segment"),
    ("indexing", r"searchsorted"),
    (
        "optimizer",
        r"optimizer|adam(?!ard)|adagrad|adadelta|(?<![a-z])(sgd|lamb|lars|ftrl|lion|muon|rmsprop|adafactor"
        r"|novograd|shampoo)"
        r"(?![a-z])",
    ),
    (
        "loss",
        r"x?_?entropy|xent|mse_kernel|mean_?squared_?error|smooth_l1|kl_?div|jsd|loss(?!y|less)|(?<=_)ce_(fwd|bwd|forward"
        r"|backward)|(?<![a-z])(grpo|gspo|dpo|orpo|kto|simpo)(?![a-z])",
    ),
    ("softmax", r"soft_?max"),
    (
        "norm",
        r"(?<!re)norm(?!al)|(?<!re)normali[sz]e|(?<![a-z])bn_|GammaBeta|RowwiseMoments|welford|InternalGradients|FusedParamsCUDA",
    ),
    ("norm", r"(?<![a-z])ln_|_ln(_|$)|(?<![a-z])(rms|lrn)(?![a-z])|rmsprenorm"),
    ("embedding", r"embedding|emb_?lookup|(?<![a-z])emb(?![a-z])|indexSelect(Large|Small)"),
    (
        "gemm",
        r"(?<!fb)gemm(?!_gpu)|gemv|nvjet|cijk_|xmma|cutlass|splitk|matmul|dot_kernel|reduce_1Block",
    ),
    ("gemm", r"(?<![a-z])(add|b|baddb|scaled_|grouped_)?m[mv](?![a-z])"),
    ("gemm", r"cublas|wvSplitK|fused_moe_kernel|marlin|mul_mat_|lora_(shrink|expand)"),
    ("copy", r"[a-z]_?copy(_?kernel)?$"),
    ("sort", r"(?<![a-z])select_?(min_?|max_?)?k(?![a-z])|(warp|block)_?select"),
    ("sort", r"sort(?!ed)|topk|top_k|radix_?select|bitonic|TopP|unique"),
    (
        "random",
        r"distribution_|philox|curand|dropout|bernoulli|random|(?<!point)(?<!point_)Sampling"
        r"|multinomial|gumbel|(?<![a-z])(rand(n|int|perm)?|rng|uniform)(?![a-z])|(with|without)_?replacement",
    ),
    ("elementwise", r"^_?(clamp|clip)_|penal(ty|ties|ize)|^_?add_?\w*bias"),
    ("copy", r"scale_transpose|(?<!cast_)transpose_(?!quant)"),
    (
        "elementwise",
        r"scale_from_amax|per_block_scale|quant(?!if)|_to_(float|half|bf16|fp)|convert",
    ),
    ("elementwise", r"dtype|(?<![a-z])cast(?![a-z])|(mx|nv)fp[48]"),
    ("set", r"arange|linspace|(?<![a-z])(fill|zeros?|clear|clean|reset|set)_\w*"),
    ("set", r"_(fill|zero|clear|set)(_kernel)?$"),
    ("indexing", r"index|indices|gather|scatter|masked_(select|scatter)|nonzero|permute_|position"),
    ("indexing", r"(?<![a-z])(flip|roll|relabel|slots?)(?![a-z])"),
    (
        "copy",
        r"direct_copy|CatArray|copy|cpy|transpose|memcpy|triu_tril|^recat|^transform(_?\dd)?_\d+",
    ),
    ("copy", r"reorder|swizzle|(?<![a-z])(un)?pad(d(ed|ing))?(?![a-z])"),
    ("copy", r"(?<![a-z])(concat|cat|shuffle|repeat|trans|(de)?interleave)(?![a-z])"),
    ("reduction", r"reduce_kernel|DeviceReduce|reduceReduce|_?pool(ing|_|2d|3d)"),
    (
        "reduction",
        r"scan|Reduce|reduction|selective_state|chunk_state|state_passing|amax|absmax|qparam|(?<![a-z])(sum|summation|mean|min_?max|max|min|argm(ax|in)|var"
        r"|count|trace|hist(ogram)?)(?![a-z])",
    ),
    ("reduction", r"segment_(coo|csr|sum|mean|reduce)|reduce_segments|average_pool|Compact"),
    (
        "elementwise",
        r"elementwise|elewise|pointwise|(unary|binary|ternary)_?(op|func\w*|kernel)|transform_config|upsample|elu(?![a-z])|Op(\dd)?Tensor|silu|sigmoid|tanh|glu(?![a-z])"
        r"|activation|bitmask|logits?_?mask|residual|soft_?cap|int[48]_?pack"
        r"|(?<![a-z])(un)?pack_?(bf|fp|u?int)\d",
    ),
)
# Words that say little: the operator's kind comes before them.
WEAK_RULES: tuple[tuple[str, str], ...] = (
    (
        "elementwise",
        r"one_blob|(?<![a-z])(add|plus|bitwise|logical|mult?(iply)?|div(ide)?|sub(tract)?|scale?|clamp"
        r"|clip|pow|exp|log|r?sqrt|square|abs|neg|reciprocal|sinh?|cosh?|floor|ceil|round|axpy|softplus|swish|lerp|bias|reconstruct)(?![a-z])",
    ),
)

# Functions that do what a template argument says: the kind of others is in their own name.
_GENERIC = re.compile(
    r"^((\w*_)?elementwise_kernel\w*|Kernel2?|device_kernel|kentry|trampoline_kernel|kernel"
    r"|_kernel_agent|parallel_for\w*|for_each\w*|static_kernel|GPUKernel|run_kernel|apply_kernel)$"
)
# Functors of an elementwise kernel that do not compute on numbers.
FUNCTOR_RULES: tuple[tuple[str, str], ...] = (
    ("random", r"distribution_|philox|bernoulli|random|dropout"),
    ("loss", r"mse_|smooth_l1|huber|_loss|kl_div|binary_cross_entropy"),
    ("norm", r"(Group|Layer|Batch|Instance|rms)_?Norm"),
    ("optimizer", r"Adam|Sgd|Lamb(?!da)|Adagrad"),
    ("set", r"FillFunctor|arange|linspace"),
    ("indexing", r"index_(put|copy|fill|kernel)|gather|scatter|masked_select|take_put|flip_kernel"),
    ("copy", r"copy_kernel|direct_copy|triu_tril"),
)
# Namespaces whose functions have names of one word.
SCOPE_RULES: tuple[tuple[str, str], ...] = (
    ("collective", r"deep_ep|nccl|mscclpp|nvshmem"),
    ("indexing", r"moe::dev"),
    ("attention", r"flash(?!infer)|fmha"),
    ("convolution", r"cask_cudnn|winograd"),
    ("gemm", r"deep_gemm|cublas|marlin|gem[mv]|^epilogue::impl"),
    ("random", r"philox"),
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

_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
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
    kind = kind_of_name(name)
    of_op = _of_operator(op) if op else None
    if kind == "gemm" and of_op == "convolution":
        return "convolution"  # Libraries do some convolutions as a matrix product.
    if kind is None and name in OWN_CASTS and of_op == "gemm":
        return "elementwise"
    return kind or of_op or _of_words(WEAK_RULES, parse(name).function) or OTHER


def kind_of_name(name: str) -> str | None:
    """Return the kind that a kernel's name tells, or None.

    Its function's own name comes first, its template arguments second, its scopes last: what
    types it has or where it was written says little of what it does.
    """
    parts = parse(name)
    if not _GENERIC.match(parts.function):
        return _of_words(KERNEL_RULES, parts.function) or _match(SCOPE_RULES, parts.scopes)
    if "elementwise" in parts.function:
        # Of functors and the lambdas in them.
        return _match(FUNCTOR_RULES, parts.arguments) or _match(KERNEL_RULES, parts.function)
    arguments = parts.arguments
    if parts.function == "trampoline_kernel":
        # Of rocPRIM's arguments one tells the algorithm: `scan_config_selector`.
        arguments = " ".join(re.findall(r"\w+_config(?:_selector)?\b", arguments))
    return _match(KERNEL_RULES, arguments) or _match(SCOPE_RULES, parts.scopes)


def _of_words(rules: tuple[tuple[str, str], ...], function: str) -> str | None:
    """Return the kind of the first rule that a function's name or its words (mean_Kernel) meet."""
    words = _BETWEEN_WORDS.sub("_", function)
    return _match(rules, function if words == function else f"{function}\n{words}")


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
    """Return the kind of the first rule that a line of `name` meets."""
    return next((kind for kind, search in _compiled(rules) if search(name)), None)


@lru_cache(maxsize=16)
def _compiled(
    rules: tuple[tuple[str, str], ...],
) -> tuple[tuple[str, Callable[[str], re.Match[str] | None]], ...]:
    """Return each rule's kind and the search for its pattern."""
    flags = re.IGNORECASE | re.MULTILINE
    return tuple((kind, re.compile(pattern, flags).search) for kind, pattern in rules)
