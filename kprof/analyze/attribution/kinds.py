"""The kind of each device activity, and the type of its operands.

A kernel's name decides first, then the name of the operator that launched it. Rules run once for
each distinct combination of names, never for each row. A name belongs to a plain function (Triton,
assembly), to a C++ function with or without its signature, or is mangled by the Itanium ABI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

from kprof.analyze.element_type import FLOATING, type_in_name, type_of
from kprof.analyze.work.elementwise import MODELS as ELEMENTWISE
from kprof.trace import Trace

_OPENING, _CLOSING = "<({[", {">": "<", ")": "(", "}": "{", "]": "["}

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\(anonymous\)::|<unnamed>::|_GLOBAL__N__?\w*::")

_OPERATOR = re.compile(r"operator(\(\)|\[\]|<<?=?|>>?=?|->)")

_LENGTH = re.compile(r"\d+")

_ROCM_SUFFIX = ".kd"  # of a kernel's descriptor

# The CuTe DSL puts a fixed word before module and class, and the types of arguments behind them.
_CUTE_PREFIX, _CUTE_TYPES = "kernel_cutlass_kernel_", "_object_at_"

# The type of the operands, which MTIA's names end in: fc-dtype_Float, cat.out-dtype_Long-extraKey_1
_OPERANDS = re.compile(r"-dtype_\w+(-\w+)*$")

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

# Matched against the words of the function's own name, joined by `_`, in lower case. First match
# wins, so specific names come first.
KERNEL_RULES: tuple[tuple[str, str], ...] = (
    *INDUCTOR_RULES,
    *XLA_RULES,
    *OWN_RULES,
    (
        "collective",
        r"nccl|rccl|msccl|nvshmem|multimem|nvls|cross_device_reduce|userbuffers"
        r"|all[-_]?gather|reduce[-_]?scatter|all[-_]?(to|2)[-_]?all|send_?recv|pushrecv|(one|two)_?shot"
        r"|(?<!block_)(?<!warp_)all[-_]?reduce(?!d)",
    ),
    (
        "collective",
        r"(put|get|port|semaphore|fifo)\w*ping_?pong|(?<![a-z])barrier|symm(etric)?_mem|(wait|notify)_?signal"
        r"|ring_?(all_?)?reduc|(?<![a-z])(a2av?(?!\w*_(idx|ind|indices|offsets|metadata)(?![a-z]))|ipc|f?collect_on_stream|p2p|(pp|pg)_(send|recv|broadcast))"
        r"(?![a-z])|_on_stream_kernel|broadcast_(simple|ring|tree|ll)",
    ),
    (
        "collective",
        r"^(kernel_?)?(cached_|low_latency_|hybrid_|intranode_|internode_)?(notify_)?(dispatch|combine)"
        r"(_?reduce)?(_(impl|kernel))?$|^(kernel_)?(cached_)?notify(?![a-z])",
    ),
    ("set", r"memset"),
    ("convolution", r"[hs]\d+cudnn_|scudnn"),
    ("attention", r"ms_deform"),
    ("copy", r"(d_?2_?d|d2_?h|h2_?d)_?(cpy|copy)|(?<!un)(re|pre)pack(ed)?(?![a-z])"),
    (
        "copy",
        r"(reshape|concat)_and_cache|append_?paged_?kv|nchw_?(to|2)_?nhwc|nhwc_?(to|2)_?nchw|batched_?transpose",
    ),
    (
        "copy",
        r"im(2d)?_?2d?_?col|col2?_?im|(store|update|copy|set|write)_?(kv|mla)?_?(cache|buffer)|fill_(compressed_)?kv"
        r"|(append|flatten)_?kv|(?<![a-z])kv_?(cache_)?(update|append|write|store|move|memcpy)|(?<!\bindex_)(?<!_index_)copy_(?!dequant|ind(ex|ices))",
    ),
    ("elementwise", r"(relu|bias|gelu|add)_?(fprop|bprop|dgrad)|scale_?(cpy|copy)|bias_?add_?grad"),
    (
        "indexing",
        r"expand_?input_?rows|finalize_?moe|moe_?(alig|sum_|permute|unpermute)|routing|bucketize"
        r"|bounds_check|linearize_index|offsets_range|dispatch_layout|(token|kv)_(ids|indices)|get_?rows"
        r"|expert_?(maps?|ids?|counts|offsets?)(?![a-z])|to_dense(?!_mm)",
    ),
    ("reduction", r"moe_(\w+_)?reduc"),
    (
        "copy",
        r"major_?to_?\w*(major|row|col)|^_?(kern(el)?_)?n[cdhw\d]+_(to_)?n[cdhw\d]+(_kernel)?$",
    ),
    (
        "indexing",
        r"(?<![a-z])index_(copy|add|put|fill)|(indices|indexes|idxs?|ids|inds?|offsets)_to_",
    ),
    (
        "elementwise",
        r"^_?convert_(?!d(q|kv?|v)_|\w*(layout|format|ind(ex|ices)|offset|_map|soft_?max|loss))|(?<![a-z])(sub|subtract)_mean",
    ),
    (
        "indexing",
        r"^_?(gather|scatter)_(?!\w*(gemm|mm_|matmul|top_?k|conv|fprop))",
    ),
    ("elementwise", r"cast_transpose|rotary|(?<![a-z])m?rope|(?<=[a-z0-9_])rotary|rope_?quant"),
    ("elementwise", r"act_and_mul|do_?activation|(?<![a-z])act_quant"),
    (
        "elementwise",
        r"^_?((de)?quant(ize)?|decompress)_\w*(output|outputs|weights?|inputs?|activations?|grads?)(_kernel)?$",
    ),
    (
        "copy",
        r"^_?(kernel_)?(transpose|reformat|relayout)_(?!\w*(quant|gemm|mat_?mul|conv|norm|soft_?max))",
    ),
    ("convolution", r"^compute_([wd]grad_|fprop_)?((a|b|split_k)_)?offsets(_kernel)?\d?(_?d)?$"),
    # What prepares an index, a mask or the metadata of a batch does none of their work.
    (
        "indexing",
        r"(fill|compute|prepare|generate|build|create|make|get|update|convert|calc|calculate|set(?=_\w+_))_(\w+_)?(indices|indexes|inde?x|idxs?"
        r"|inds|ids|positions?|metadata|offsets?|strides|seq\w*_?len(gth)?s?|slots?|(block|page)_tables?|maps?"
        r"|(in|out|kernel)\w*_map|desc(riptor)?s?)(?![a-z])|metadata",
    ),
    ("set", r"(build|create|make|prepare|generate|init|fill)\w*mask"),
    ("softmax", r"(attn|attention)_?soft_?max"),
    (
        "gemm",
        r"^bmm_|(?<![a-z])(?<!quant_)dense_kernel|gather_?mm|segment_?mm|sddmm|spm[mv]|spgemm|(?<![a-z])nn_dense(?![a-z])|split_?k_?reduce",
    ),
    (
        "attention",
        r"flash(?!infer|fft|_?inference)|fmha|sdpa|(?<![a-z])m[hqgl]a_|mha(?![a-z])|(?<![a-z])(gqa|mqa)(?![a-z])|attn|attention|gdpa"
        r"|hstu|(?<![a-z])sage_(fwd|bwd)|(?<![a-z])att\d?(?![a-z])|(?<![a-z])lse(?![a-z])"
        r"|out(put)?_correction",
    ),
    ("attention", r"mla_|dot_do_o|do_o_dot|merge_?states?|mqa_logits|convert_d(q|kv?|v)_"),
    ("attention", r"(batch|single)_?(prefill|decode)|with_?(paged|ragged)?_?kv_?cache|batch_?mla"),
    ("attention", r"^_fwd_(grouped_)?kernel_stage[12]$|causal_dot|paged_(decode|prefill)"),
    ("reduction", r"cum_?(sum|prod|max|min)|segsum|prefix_?sum|sumexp"),
    # Linear attention: chunkwise, recurrent and parallel forms.
    (
        "attention",
        r"^_?(fused_|intra_|inter_)?(chunk(wise)?|recurrent|parallel)_\w*(fwd|bwd)|delta_(rule|net)|retention"
        r"|gated_delta|fused_recurrent",
    ),
    (
        "attention",
        r"(?<![a-z])(gla|gdn|gdr|gsa|kda|hgrn|r?wkv|nsa)\d?(?![a-z])|_wy_repr|recompute_w_u",
    ),
    (
        "convolution",
        r"implicit_?gemm|conv(olution|olve|1d|2d|3d|_)|fprop|(?<![a-z])(?<![a-z][123])(dgrad|wgrad)|winograd|[a-z]\d*cudnn_",
    ),
    ("copy", r"sub_?tensor_?op_?with_?(sub_?tensor|transform)"),
    (
        "convolution",
        r"^mi_?open.*conv|^igemm_(fwd|bwd|wrw)|sub_?tensor_?op|cudnn_.*conv|cv_?bwd|cv_?fwd|depthwise"
        r"|gemm\w*(bwd|backward)_(weight|data)|(?<![a-z])conv(?![a-z])",
    ),
    (
        "embedding",
        r"split_(embedding|eb_)|^kernel_grid|^compute_grad_weight|partials?_(per_|to_)?segment",
    ),
    ("indexing", r"search_?sorted|sorted_?search|(upper|lower)_?bound"),
    (
        "optimizer",
        r"optimizer|adam(?!ard)|ada_?grad|ams_?grad|ada_?(belief|bound)|ada_?delta|rms_?prop|momentum_?update|nesterov|ema_(step|update)|novo_(step|grad|update)"
        r"|lookahead_step|(?<![a-z])(sgd|lamb|lars|ftrl|lion|muon|adafactor|novograd|shampoo)(?![a-z])",
    ),
    (
        "loss",
        r"x?_?entropy|xent|x_ent(?![a-z])|mse_kernel|mean_?squared_?error|smooth_l1|kl_?div|jsd|loss(?!y|less|_?scale)"
        r"|(?<![a-z])ce_(fwd|bwd|forward|backward)|(?<![a-z])(grpo|gspo|dpo|orpo|kto|simpo|nll|bce|ctc)(?![a-z])"
        r"|(nll|cross|bce|mse)\w*criterion|hinge",
    ),
    ("softmax", r"(?<!non)soft_?max"),
    ("reduction", r"(vector|matrix|frobenius)_?norm|xmma_pooling"),
    ("copy", r"^permutation_?kernel"),
    (
        "norm",
        r"(?<!re)norm(?!al)|(?<!re)normali[sz](e|ation|er)|(?<![a-z])bn_|gamma_?beta|rowwise_?moments|welford"
        r"|internal_?gradients|fused_?params_?cuda|(?<![a-z])cmvn",
    ),
    ("norm", r"(?<![a-z])ln_|_ln(_|$)|skip_?ln|(?<![a-z])(rms|lrn)(?![a-z])|rms_?pre_?norm"),
    (
        "embedding",
        r"embedding|emb_?lookup|(?<![a-z])emb(?![a-z])|index_?select_?(large|small)|(?<![a-z])embed(?![a-z])",
    ),
    (
        "gemm",
        r"(?<!fb)gemm(?!_gpu|s_)|gemv|nvjet|cijk_|xmma|cutlass|split_?k(?![a-z])|mat_?mul|dot_kernel"
        r"|reduce_1_?block",
    ),
    ("gemm", r"(?<![a-z])(add|b|baddb|addb|scaled_|grouped_|q)?m[mv](?![a-z])"),
    (
        "gemm",
        r"cublas|wv_?split_?k|(?<![a-z])f(used_?)?moe|moe_?(fused|experts?|forward|backward|fwd|bwd)(?![a-z])|(?<![a-z])(w?mma|mfma|wgmma)_(?!softmax|attn)|marlin|mul_mat_|(?<![a-z])lora(?![a-z])|(?<![a-z])fc(?![a-z])"
        r"|(?<![a-z])fc_?(?=cast|bias|relu|gelu|add)|(?<![a-z])(down|up|gate|qkv|out)_proj(?![a-z])",
    ),
    ("gemm", r"fully_?connected|^(xxt|xtx|ba_plus_c_?aa)_kernel"),
    ("copy", r"[a-z]_?copy(_?kernel)?$"),
    ("sort", r"(?<![a-z])select_?(min_?|max_?)?k(?![a-z])|(warp|block)_?select"),
    (
        "sort",
        r"(?<!ten)sort(?!ed)|topk|top_k|radix|onesweep|bitonic|top_?p(?![a-z])|unique|kth_?value|(?<![a-z])median(?!_(filter|blur|kernel_\d))",
    ),
    (
        "random",
        r"distribution_|philox|curand|dropout|bernoulli|random|(?<!point)(?<!point_)sampling|multinomial|gumbel"
        r"|(?<![a-z])(rand(n|int|perm)?|rng|(?<!add_)uniform(?!_shape)|gaussian_noise|halton|sobol)\d*(?![a-z])"
        r"|(with|without)_?replacement|(?<![a-z])row_?wise_sample|(?<![a-z])sample_(?!grid|idx|ind)(\w+_)?(gamma|normal|uniform|tokens?)",
    ),
    (
        "reduction",
        r"(?<![a-z])pool(ing)?(\d*d)?(?![a-z])|(avg|max|ave|average|sum|min|roi)_?pool|pooling",
    ),
    # Geometry, trees, detection and codecs: what they add, copy or reduce is not tensors.
    (
        "other",
        r"(?<![a-z])(quats?|quaternions?|voxels?|voxeli[sz]e|mesh(es)?|rays?|raster\w*|triangles?|iou\w*|giou|nms"
        r"|(?<!gather_)trees?|knn|cameras?|poses?|frustum|morton|octree|covar(iance)?|i?fft|butterfly|ball_query|hash_?(map|table)"
        r"|textures?|mip|splats?|distances?)(?![a-z])|bbox|nearest_?neighbor(?!_?(interp|upsampl))",
    ),
    ("elementwise", r"^_?(clamp|clip)_|penal(ty|ties|ize)|^_?add_?\w*bias|bias_?(add_)?transpose"),
    ("copy", r"scale_transpose|(?<!cast_)(?<!quantize_)(?<!quant_)transpose_(?!quant)"),
    (
        "elementwise",
        r"scale_from_amax|per_block_scale|quant(?!if|ile)|_to_(float|half|bf16|fp|lowp)|convert|dequant"
        r"|upsampl|upscale|upfirdn|(float|half|bf16|bfloat16|fp16|fp8|int8)\d*_?(2|to)_?(float|half|bf16|fp|bfloat|u?int)|(?<![a-z])cvt(?![a-z])",
    ),
    (
        "elementwise",
        r"dtype|(?<![a-z])(up|down)?cast(?![a-z])|(mx|nv)fp[48]|(?<![a-z])(un)?pack_?(\w+_)?(signs?|bits?|u?int\d*|bf\d+|fp\d+|trellis|nibbles?|codes|\d+bits?)",
    ),
    (
        "gemm",
        r"(?<![a-z])(w\d+a\d+|a\d+w\d+)(?![a-z])|(?<![a-z])linear_kernel|mlp_fused|fused_mlp|(?<![a-z])moe_kernel|(?<![a-z])dot(_prod(uct)?)?(?![a-z])",
    ),
    (
        "set",
        r"arange|linspace|logspace|(?<![a-z])((?<!scatter_)(?<!masked_)fill(ed)?|zeros?|clear|clean|reset|set|ones|iota|eye|(?<!\w)_?full)"
        r"_(?!pad|point|col)\w*",
    ),
    (
        "set",
        r"(^|_)(fill|zero|clear|reset|set)(_kernel)?$|(^_?init|(?<![a-z])initiali[sz]e)_(?!\w*(scan|rand|rng|hash|param|window|info|workspace))|^_?range(_kernel)?$|(?<![a-z])(generate_sequence|sequence_mask)",
    ),
    (
        "reduction",
        r"count_?non_?zero|all_?finite|no[nt]_?finite|check_numerics|(has|is|check)_?(nan|inf|finite)|nan_?inf|(?<![a-z])(any|all)_(kernel|dim)",
    ),
    (
        "indexing",
        r"index|indices|gather|scatter|masked_(select|scatter)|nonzero|(?<![a-z])(un)?permute_(?!data|nd)|position",
    ),
    (
        "indexing",
        r"(?<![a-z])(flip|roll|relabel|slots?|inds|idxs?|take|one_?hot|select_rows|(?<!leave_)reverse(?!_bits)|offsets?|seq_?lens|expert_?map|id_?map|row_?ids?"
        r"|kernel_map|block_tables?|page_(ids|tables?))(?![a-z])|_(?<!hash_)(?<!feature_)(?<!heat_)(?<!bit_)maps?(?![a-z]|_reduc)",
    ),
    (
        "copy",
        r"direct_copy|cat_?array|copy|cpy|transpose|memcpy|(?<![a-z])tri[ul](?![a-z])|^recat|(?<![a-z])transform(_?\dd)?_\d+|permute|(major|col\d+)_?to_?(row|col)",
    ),
    (
        "copy",
        r"(?<!in)(re)?order_|reorder|rearrange|reorg|swizzle|(?<![a-z])(un)?pad(d(ed|ing))?\d*d?(?![a-z])|(?<![a-z])move(?![a-z])",
    ),
    (
        "copy",
        r"(?<![a-z])(concat(enate)?|cat|[hv]?stack|shuffle|repeat|replicate|trans|(de)?interleave|slice|unfold|fold|tile"
        r"|split_?(qkv|heads?)|swap_?(first_)?dim(s|ensions?)?\d?|(un)?flatten|reshape|(to|make)_contiguous|contiguous(?=_kernel)|stash|arrange|compress_\w*inputs?|crop)"
        r"(?![a-z])|nd_?permute|split_?(qkv|kv_heads|tensor)|pack_?qkv",
    ),
    ("reduction", r"reduce_kernel|device_?reduce|reduce_?reduce"),
    (
        "reduction",
        r"scan(?!line)|reduce|reduction|selective_state|chunk_state|state_passing|amax|amin|absmax|qparam|parallel_prefix|aggregat(e|ion)"
        r"|(?<![a-z])[cr]?(sum|summation|mean|min_?max|max|min|argm(ax|in)|var|variance|std|prod|count|trace"
        r"|hist(o?grams?)?|bincount)(?![a-z])",
    ),
    (
        "reduction",
        r"segment_(coo|csr|sum|mean|reduce)|reduce_segments|average_pool|device_compact|histo?gram",
    ),
    (
        "elementwise",
        r"elementwise|elewise|elemwise|pointwise|(unary|binary|ternary)(?![a-z])|transform_config|elu(?![a-z])"
        r"|op_?(\dd_?)?tensor|silu|sigmoid|tanh|glu(?![a-z])|activat(e|ion)|bitmask|logits?_?mask|mask_?(output|logits?)"
        r"|residual|soft_?cap|int[48]_?pack|(?<![a-z])bcast|hard_?(swish|shrink|tanh)|(?<![a-z])p?relu"
        r"|(lstm|gru)_?(cell|unit|acts?)|(gated|act)_act|linewise",
    ),
)

# Words that say little: the operator's kind comes before them.
WEAK_RULES: tuple[tuple[str, str], ...] = (
    (
        "elementwise",
        r"one_blob|(?<![a-z])(add(c(mul|div))?|plus|bitwise|logical|mult?(iply)?|div(ide)?|sub(tract)?|scal(e|es|ing)?|clamp"
        r"|clip|pow(er)?(?!_spectrum)|exp(onential)?|log|r?sqrt|square|abs|neg|reciprocal|sinh?|cosh?|floor|ceil(ing)?|round|axpy|binari[sz]e"
        r"|softplus|swish|lerp|bias|reconstruct|thresh(old)?|(not_)?equal|greater|less|compare|heaviside|fma|gate"
        r"|broadcast|act|lgamma|i?gamma|polygamma|erf|where|resize|interp(olate)?)\d*(?![a-z])",
    ),
    ("copy", r"(?<!best_)(?<![a-z])split(?![a-z])"),
)

# Functions that do what a template argument says: the kind of others is in their own name.
_GENERIC = re.compile(
    r"^(\w*elementwise_?kernel\w*|Kernel2?|device_kernel|kentry|trampoline_kernel|kernel"
    r"|_kernel_agent|parallel_for\w*|for_each\w*|static_kernel|GPUKernel|run_kernel|apply_kernel"
    r"|kernelPointwiseApply\d|EigenMetaKernel)$",
    re.IGNORECASE,
)

# Functors of an elementwise kernel that do not compute on numbers.
FUNCTOR_RULES: tuple[tuple[str, str], ...] = (
    ("random", r"distribution_|philox|bernoulli|random|dropout"),
    ("loss", r"mse_|smooth_l1|huber|_loss|kl_div|binary_cross_entropy"),
    ("norm", r"(group|layer|batch|instance|rms)_?norm"),
    ("optimizer", r"Adam|Sgd|Lamb(?!da)|Adagrad"),
    ("set", r"(fill|full)_?functor|arange|linspace"),
    ("indexing", r"index_(put|copy|fill|kernel)|gather|scatter|masked_select|take_put|flip_kernel"),
    ("copy", r"copy_?(kernel|op)|direct_copy|triu_tril"),
)

# Eigen names a kernel after the expression that it evaluates, its leaves last.
EXPRESSION_RULES: tuple[tuple[str, str], ...] = (
    ("reduction", r"reducer|reduction_?op|scan_?op"),
    ("convolution", r"convolution_?op|image_?patch_?op"),
    ("gemm", r"contraction_?op"),
    ("random", r"random|uniform|normal_"),
    ("indexing", r"generator|gather|scatter|reverse_?op"),
    (
        "copy",
        r"(padding|shuffling|slicing|concatenation|chipping|striding|inflation|layoutswap)_?op",
    ),
    ("elementwise", r"cwise|conversion_?op|scalar_\w+_op|select_?op"),
    ("copy", r"(broadcasting|reshaping|assign)_?op"),
)

# Namespaces whose functions have names of one word.
SCOPE_RULES: tuple[tuple[str, str], ...] = (
    ("collective", r"deep_ep|nccl|mscclpp|nvshmem"),
    ("indexing", r"moe::dev"),
    ("attention", r"flash(?!infer)|fmha"),
    ("convolution", r"cask_cudnn|winograd"),
    ("gemm", r"deep_gemm|cublas|marlin|gem[mv]|fused_?moe|^epilogue::impl"),
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

# One word each, in spite of the capitals within.
_ACRONYMS = re.compile("[RGS][ei]LU|(Swi|Ge|Re)GLU|RoPE|TanH|MoE|LoRA|IoU|NaN")

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
    if kind == OTHER:
        return of_op or OTHER
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
    if parts.function == "EigenMetaKernel":
        return _match(EXPRESSION_RULES, parts.arguments)
    if re.search("elementwise|pointwise", parts.function, re.IGNORECASE):
        # Of functors and the lambdas in them.
        functor = _match(FUNCTOR_RULES, parts.arguments)
        return functor or _of_words(KERNEL_RULES, parts.function)
    arguments = parts.arguments
    if parts.function == "trampoline_kernel":
        # Of rocPRIM's arguments one tells the algorithm: `scan_config_selector`.
        arguments = " ".join(re.findall(r"\w+_config(?:_selector)?\b", arguments))
    return _match(KERNEL_RULES, arguments) or _match(SCOPE_RULES, parts.scopes)


def _of_words(rules: tuple[tuple[str, str], ...], function: str) -> str | None:
    """Return the kind of the first rule that the words of a function's name (mean_Kernel) meet."""
    spelled = _ACRONYMS.sub(lambda found: found[0].capitalize(), function)
    words = _BETWEEN_WORDS.sub("_", spelled)
    return _match(rules, words)


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
    text = name.lower()
    return next((kind for kind, search in _compiled(rules) if search(text)), None)


@lru_cache(maxsize=16)
def _compiled(
    rules: tuple[tuple[str, str], ...],
) -> tuple[tuple[str, Callable[[str], re.Match[str] | None]], ...]:
    """Return each rule's kind and the search for its pattern."""
    return tuple((kind, re.compile(pattern, re.MULTILINE).search) for kind, pattern in rules)


@dataclass(frozen=True)
class KernelName:
    """The parts of a kernel's name that tell what it does."""

    function: str
    """Without scopes, arguments and parameters."""
    scopes: str
    """Namespaces and classes around it, joined by `::`."""
    arguments: str
    """Template arguments of the function, without the parameter lists in them."""


@lru_cache(maxsize=65536)
def parse(name: str) -> KernelName:
    """Take a kernel's name apart; one that was cut off is read as far as it goes."""
    name = name.removesuffix(_ROCM_SUFFIX)
    if name.startswith("_Z"):
        return _mangled(name)
    if name.startswith(_CUTE_PREFIX):
        return KernelName(name.removeprefix(_CUTE_PREFIX).split(_CUTE_TYPES)[0], "", "")
    text = _OPERANDS.sub("", _OPERATOR.sub("operator", _ANONYMOUS.sub("", name)))
    text = text.replace("->", " ")
    outside, groups = _outermost(text)
    words = outside.split()
    qualified = words[-1] if words else name
    scopes, _, function = qualified.rpartition("::")
    # The arguments that stand after the last scope are those of the function.
    at = outside.rfind(function) if function else 0
    arguments = " ".join(inside for place, inside in groups if place >= at)
    return KernelName(function or name, scopes, _without_parameters(arguments))


def _outermost(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the text outside of brackets, and what stands in `<>`, with its place in that text.

    The text ends with the parameters.
    """
    kept: list[str] = []
    groups: list[tuple[int, str]] = []
    open_brackets: list[str] = []
    begin = 0
    for place, character in enumerate(text):
        if character in _OPENING:
            if not open_brackets:
                begin = place + 1
                if character == "(" and kept:
                    break
            open_brackets.append(character)
        elif open_brackets and open_brackets[-1] == _CLOSING.get(character):
            open_brackets.pop()
            if not open_brackets and character == ">":
                groups.append((len(kept), text[begin:place]))
        elif not open_brackets:
            kept.append(character)
    # A name that was cut off lacks the ends of its brackets.
    cut_off = [(len(kept), text[begin:])] if open_brackets[:1] == ["<"] else []
    return "".join(kept), groups + cut_off


def _without_parameters(arguments: str) -> str:
    """Return template arguments without what stands in parentheses."""
    kept, depth = [], 0
    for character in arguments:
        depth += character == "("
        if not depth:
            kept.append(character)
        depth -= character == ")" and depth > 0
    return "".join(kept)


def _mangled(name: str) -> KernelName:
    """Return the parts of a mangled name: its source names are preceded by their lengths."""
    place = 3 if name.startswith("_ZN") else 2
    parts: list[str] = []
    while found := _LENGTH.match(name, place):
        place = found.end() + int(found[0])
        parts.append(name[found.end() : place])
        if not name.startswith("_ZN"):
            break
    parts = [part for part in parts if not part.startswith("_GLOBAL__N")]
    if not parts:
        return KernelName(name, "", "")
    rest: list[str] = []
    while (found := _LENGTH.search(name, place)) is not None:
        length = int(found[0])
        text = name[found.end() : found.end() + length]
        # Digits of a literal or of a substitution have no name behind them.
        is_name = 1 < length == len(text) and text.isidentifier() and not text.isdigit()
        place = found.end() + (length if is_name else 0)
        if is_name:
            rest.append(text)
    return KernelName(parts[-1], "::".join(parts[:-1]), " ".join(rest))
