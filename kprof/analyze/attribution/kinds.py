"""The kind of each device activity, with the type of its operands.

A kernel's name decides first, then the name of the operator that launched it. Rules run once for
each distinct combination of names, never for each row. A name belongs to a plain function (Triton,
assembly), to a C++ function with or without its signature, or is mangled by the Itanium ABI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pandas as pd

from kprof.analyze.element_type import FLOATING, type_in_name, type_of
from kprof.analyze.work.elementwise import MODELS as ELEMENTWISE
from kprof.trace import Trace

_OPENING, _CLOSING = "<({[", {">": "<", ")": "(", "}": "{", "]": "["}

_ANONYMOUS = re.compile(
    r"\(anonymous namespace\)::|\(anonymous\)::|<unnamed>::|\b_GLOBAL__N__?\w*::"
)

_OPERATOR = re.compile(r"operator(\(\)|\[\]|<<?=?|>>?=?|->)")

_LENGTH = re.compile(r"\d{1,9}")  # longer than any name

_ROCM_SUFFIX = ".kd"  # of a kernel's descriptor

# The CuTe DSL puts a fixed word before module and class, and the types of arguments behind them.
_CUTE_PREFIX, _CUTE_TYPES = "kernel_cutlass_kernel_", "_object_at_"

# The type of the operands, which MTIA's names end in: fc-dtype_Float, cat.out-dtype_Long-extraKey_1
_OPERANDS = "-dtype_"

OTHER = "other"

OWN_OP_RULES: tuple[tuple[str, str], ...] = (
    ("norm", r"^kprof::norm"),
    ("optimizer", r"^kprof::adamw"),
    ("gemm", r"^kprof::fp8_(gemm|linear)"),
    ("elementwise", r"^kprof::(glu|(bias_)?gelu|rope|scale|(swiglu_)?quantize)"),
    ("reduction", r"^kprof::moe_combine"),
    ("indexing", r"^kprof::moe_gather"),
)

# By which a linear layer in FP8 casts its operands, before their product.
OWN_CASTS = {"_rows", "_blocks", "_largest", "_turned"}

# Functions that only their whole names tell: of kprof and of tiny-cuda-nn.
WHOLE_NAMES = {
    "decode": "attention",
    "kernel_grid": "embedding",
    "transform_kernel": "elementwise",
}

# The words of names, a row a kind. Of several words in a name the first row wins: heavy work comes
# before light work, and words that name a library come last. `quant*` takes any ending and `*gemm`
# any beginning. A word may be written in parts (`softmax`: soft_max, SoftMax), so a phrase is a
# word too; `dtype`, `dims`, `axes`, `wxa` stand for a type, an order of dimensions, a permutation
# and the types of operands.
WORDS = """
collective  allreduce* collectivepermute allgather* reducescatter* alltoall* all2all* a2a a2av nccl*
            rccl* msccl* nvshmem* multimem nvls oneshot twoshot sendrecv pushrecv p2p ipc barrier
            crossdevicereduce *userbuffers lamport quickreduce haloexchange exchangehalo
            pushpullhalo ack phaseack publish* multicast syncallgpus symmmem symmetricmem pingpong
            waitsignal notifysignal ringreduce ringreduction ppsend pprecv pgsend pgrecv pgbroadcast
            notify reshard* ringbcast rdxn combinepush combinewait lowlatencydispatch
            lowlatencycombine dispatchnormal combinenormal moedistribute waitcombine broadcastring
            broadcasttree broadcastll broadcastsimple collectonstream fcollect onstream epdispatch
            epcombine ubx putsignal engramfetch startsync endsync devicesync aggfx argfx rsgfx
            arkernel
set         memset
attention   kkt householder fna siso parallax ttt qksoftmax lapersistent lapersistentpaged
            podpersistent
reduction   lpnorm bezieralign moecb redux copywgrad residualnorm cumsum cumprod segsum prefixsum
            gathersum indexmax maxreducescatter quantparam quantizationparam vectornorm matrixnorm
            frobenius clipnorm blockallreduce warpallreduce dequantreduce gradnorm pnorm l0norm
            maxnorm minnorm infnorm globalnorm centroidupdate moereduc* moereduction moesum scaninit
            compactinit numnan rankskernel
indexing    topermutation tokenpool src2dst blocktable advancestep moedata alignblocksize alignsum
            maskedupdate mappedidx setrows
copy        packhalo unpackhalo initfrom tomarlin setkvbuffer setmlakvbuffer
other       mhcpost nonmax nonmaximum nonmaxima trsmln castray causalfilter btvregularization
            mhcexpandcombine columnfilter rowfilter householderreflector conjugategradient pmegather
            corrindex lengthcriterion stopcriterion stoppingcriterion stopwords* sinkhorn
            binomialoption* furthest*
sort        moegate gatherkthvalue moegating* moefusedgate topkhash gatingtopk hashtopk selectexpert
            countandsort
elementwise transducerjoint gdngate gdngating kdagate kdagating glagate outerprod outerproduct
            multicasttranspose scalezeropoint*
loss        crossentropy mutualinformation lambdarank ndcg *entropy xent nll *loss losses *criterion
            focal kl kldiv labelsmooth* rnnt transducer jsd mse huber hinge smoothl1 bce ctc grpo
            gspo dpo orpo kto simpo meansquarederror ce celoss svm tvdistance
embedding   spliteb splitembedding tbe embeddingbag kernelgridbackward
optimizer   optimizer adam* *adam *sgd rprop weightdecay momentum adagrad amsgrad adabelief adabound
            adadelta rmsprop momentumupdate nesterov lamb lars ftrl lion muon adafactor novo*
            shampoo regulariz* lbfgs emaupdate emastep lookaheadstep
norm        lnx fusedparam qknorm normrope rmsnormrope skipln cucomputegradinput
elementwise rope *rope opgenerictensor rotary* blendlinear upsample rotate gridsample gridsampler
            ropequant lossscale signflip biasaddgrad maskedfill adduniform
copy        catandcache concatandcache
attention   flash splitkv kvsplit flashattn* flashmla flashdecod* *fmha sdpa *mha gla gdn gdr gsa
            kda hgrn wkv rwkv nsa hstu gdpa retention deltarule deltanet gateddelta batchprefill
            batchdecode singleprefill singledecode pageddecode pagedprefill pagedattention
            mergestate* mqalogits dotdoo doodot attend msdeform msdeformable multiheadattention
            causaldot lse mlstm simplicial solvetril dkv wyrepr recomputewu outputcorrection
            outcorrection dkdv dqkv withkvcache fwdkernelstage sagefwd sagebwd mla attnfwd attnbwd
            sparseattn xqa lightningattn lightningindexer indexerscore indexscore deltaformer
            parallelbased parallelrebased mesanet fwddiag fwdnonediag fwdkvparallel fwdkvreduce
            wufwd gradcorrection gradq gradk gradqk gradqkv dsa parallelpath convertdq convertdk
            convertdv convertdkv chunkscan chunkstate
convolution conv *conv convol* *convolution deconv* implicitgemm wino igemm winograd depthwise dcn
            cvbwd cvfwd scudnn dtypecudnn computeoffset computeboffset subtensoropwithscalar
            subtensoropwithcasttensor xdlopsbwdweight xdlopsbwddata
indexing    linearsearch binarysearch moealig getrow moealign moedev todense permute1ddata
            permute2ddata permute1dlength permute2dlength permuteindices permuteweight permutepooled
            permutebwd moepermute expandinputrows finalizemoe tokenpermute permutetoken unpermute*
            indicesto idxto idsto sparsetodense tocsr tocoo tojagged topkindices topkindex topkidx
            batchedarray pointerarray isin getitem copyindices relabel maplabel sortchunk
            invertpermute invertpermutation inversepermute inversepermutation grouppoint grouping
            addat topkid
gemm        *gemm gemm* matmult* *gemv reduce1block persistrnn mhcprojection innerproduct
            rnnblockpersist gemv* *matmul matmul* matvec vecmat einsum tensordot contraction syrk
            mmf mm bmm addmm addmv baddbmm addbmm qmm mv qmv nvjet cijk mfma lora sgmv bgmv spmm*
            spmv* spgemm sddmm trmv* tpmv* tbmv* gbmv* hbmv* hemv* hpmv* sbmv* symv* trmm* herk*
            syrkx* syr2k* her2k* ger syr her spr hpr syr2 her2 spr2 hpr2 rank2k* rankk sger dger
            tgmm gett sddkernel dsdkernel ddskernel xty scatter2scatter mulmat* fullyconnected
            downproj upproj gateproj outproj qkvproj fusedmoe fmoe moefused moeexpert moeforward
            moebackward moefwd moebwd xxt xtx mmt gram vdot matrixmul* matrixmultiply
            matrixmultiplication matmultiply smm hspmm sspaddmm streamk* csrmm* csrmv* cscmm* cscmv*
            bsrmm* bsrmv* gebsrm* bscmm* coomm* coomv* ellmm* ellmv* sellmv* hybmv*
convolution dgrad wgrad
indexing    routing
copy        fillkv fillkvcache passthrough segmentcopy subsample slicescatter copyqkv packedtopadded
            paddedtopacked tensortransformgeneric restoreblock convertblock im3d2col dup
            concatkvcache makesequential packsegment unpacksegment convertdimstodims zeropad
            zeropadding d2dcpy d2hcpy h2dcpy majorto positioncopy conjugatecopy
            subtensoropwithsubtensor
softmax     *softmax softmin sparsemax entmax
reduction   blocksum
other       quat* voxel* mesh* ray rays raster* triangle iou* giou nms tree trees knn camera* pose
            frustum morton octree fft ifft butterfly ballquery texture* mip splat* distance bbox
            gaussian upsert evict insert* hash* hashmap hashtable nearestneighbor blur bilateral fps
            label warpaffine warpperspective spin nop workspace latency findbest bestsplit nlist
            meanshift collision intersect* surface lru lfu lxu ngram* sparse24* sparsenm findsplit
            subdivide duplicate gravity pathlength pointsampling farthest*
random      sample sampler sampling initializegaussian
sort        *sort sorting topk* *topk nucleus topp radix* onesweep bitonic selectk warpselect
            blockselect unique kthvalue gathermedian gathertopk kth* selectmink
norm        *norm norms normali* ln bn gn lrn rms welford gammabeta moments standardi* runningstat
            runningmean runningvar meandelta variancedelta cmvn internalgradients
embedding   embed emb wte wpe embedding* embeddinglookup indexselectlarge indexselectsmall
            indexselectlargeindex indexselectsmallindex partialspersegment partialsegment
            partialtosegment computegradweight
elementwise dtypetodtype dtype2dtype dequantizelinear quantizelinear upsampl* *upscale resize*
            interp* bilinear bicubic
attention   attn* *attn gqa mqa attention* *attention att chunkwise recurrent flashdecoding
random      dropout distribution rbits rbitsc philox threefry executedist zipf curand bernoulli
            random* quasirandom rejection rand randn randint randperm rng uniform gaussiannoise
            halton sobol multinomial exponential gumbel noise poisson binomial dirichlet cauchy
            lognormal sampl* withreplacement unpackcudnn withoutreplacement
gemm        splitk splitkreduce wvsplitk wvsplitkq wvsplitkrc linear nndense gateup mlp fc dot
            dotprod dotproduct ffn
indexing    unpool* attnplan moedpch sortedsearch maxunpool*
reduction   pool *pool pooling* *pooling roialign subsampling selectivestate selectivescan ssu
            statepassing logsumexp sumexp
elementwise posencoding positionencoding positionalencoding posenc frequencyencoding waveencoding
            sphericalharmonic* shencod* modulate modulation dtypetoq qtodtype scalepacked activefwd
            activebwd neuronfwd neuronbwd reppen rnncell xielu resampl* downsampl* *downscale quant*
            *quant dequant* *dequant requant* qdq cast upcast downcast convert* cvt todtype upfirdn
            silu *silu sigmoid *sigmoid *glu swiglu* *bitrowwise temperature* oneminus* penal* snake
            timestepembedding sinusoid* gridsampling bilinearsampler bilinearsampling tograyscale
            togray torgb tobgr toyuv optensor op1dtensor op2dtensor op3dtensor op4dtensor op5dtensor
            badword bnll dyt lstm gru relu *relu gelu *gelu elu celu selu mish softplus softsign
            swish hardswish activat* *tanh hardshrink softshrink tanhshrink act actandmul residual
            softcap elementwise elemwise elewise eltwise pointwise linewise unary binary ternary
            globalrange submean subtractmean scalefromamax computescale addbias biasadd bcast
            decompress* packdtype unpackdtype packsign packtrellis unpacktrellis bits nibble*
            packweight unpackweight
set         triuindices trilindices
indexing    gather* scatter* index* indice* argwhere onehot nonzero maskedselect flip fliplr flipud
            roll take bucketize searchsorted lowerbound upperbound getrows selectrows maskedscatter
reduction   scan* *scan reduce* reduction* *reduce sum summation *mean avg average cummax cummin
            sumsq sqsum bincount amax amin absmax argmax argmin max min minmax var variance std prod
            count histogram* hist trace aggregate* aggregation countnonzero allfinite nonfinite
            notfinite isfinite infandnan isnan hasnan hasinf accumulat* compact lpmax segment*
            qparam backwardbias dbias anykernel allkernel anydim alldim histc trapezoid checknan
            checkinf checknumeric nancheck parallelprefix scanstate stat stats statistic statistics
            nrm2 nrminf asum iamax iamin checkfinite counter summarization
indexing    indexes idx ind ids id offset slot seqlen position* metadata layout remap map
set         fill* tabulatefunctor zero poison zeros rangekernel set clear clean reset ones iota eye
            arange linspace logspace hannwindow hammingwindow blackmanwindow bartlettwindow
            kaiserwindow init initiali* generatesequence makesequence
copy        copy* *copy *memcpy cpy memcpy transpos* transpose trans permut* cat concat* *stack
            pixelunshuffle moveaxis movedim swapdim swapfirstdim swapdimension swapaxes slice
            pixelshuffle spacetodepth depthtospace trilu swapblock pad padded padding repeat
            replicate placement tmaalign asstrided unpad* reorder* rearrange* *swizzle shuffle
            interleave deinterleave unfold fold reshape flatten unflatten contiguous stash crop
            pack* repack* unpack* im2col col2im vol2col col2vol row2col col2row rowtocol coltorow
            vol2im im2d2col dimsdims dimstodims dims2dims move kvcache kvupdate updatecache
            storecache writecache andcache compressbert prepack* reformat* tril triu triangular
            recat kvtrans swapkernel sswap dswap cswap zswap laswp arrange tonchw tonhwc
indexing    reverse bsr2csr csr2bsr csr2csc csr2coo coo2csr csr2dense dense2csr csc2dense dense2csc
            csr2ell ell2csr csr2hyb csr2gebsr gebsr2csr coo2dense dense2coo
attention   chunk* *chunk prefill causal noncausal groupedkernelstage
convolution *cudnn fprop
gemm        cutlass cublas* xmma mma bitblas epilogueimpl wxa wmma wgmma mmvq mmq marlin moe dense
"""

# Words that say little: the operator's kind comes before them.
WEAK_WORDS = """
other       dct idct dwt fwht walsh cholesky* trsm* trsv tbsv tpsv trtri* getrf getf2 getri potrf
            potf2 getrs sytrf geqrf larf larfg solve* substitution
gemm        symm hemm
elementwise add addition addto sscal hscal dscal cscal zscal *axpy sqr multiplication blend tmix
            cmix decay seconddiff difference increment* decrement* negat* kron* axpby geam dgmm rot
            colortwist* hsv addcmul addcdiv plus bitwise logical mul mult multiply div divide sub
            subtract scal scale scaling clamp clip pow power exp expm log logp sqrt rsqrt square abs
            neg sign reciprocal sin sinh cos cosh tan absolute fabs gcd lcm nextafter isclose
            bessel* floor ceil round trunc binarize lerp bias reconstruct threshold thresh equal
            notequal greater less compare heaviside fma gate broadcast lgamma igamma polygamma where
            acos* asin* atan* digamma erf* frac sgn signbit logit sinc nantonum rsub xlogy hypot
            fmod remainder copysign maximum minimum fmax fmin ldexp conj lshift rshift xor alibi
            bitmask rescale gt ge lt le eq ne downscale mask polar cross outer shift addr angle freq
            arc* rad2deg deg2rad frexp negative isinf isneginf isposinf isreal gammainc* gammaln
            airy* chebyshev* hermite* laguerre* legendre* ndtr* zeta entr expit modf real imag
            complex xlog1py multigammaln booleannot logicalnot bitwisenot constrain shortcut beq bge
            bgt ble blt bne tozero oneblob mxfp nvfp arith densetosparse uniformshape conjugate
            truncate
copy        tile transfer store save separate split trim getdiag diagkernel kerneldiag hsplit vsplit
            dsplit rsplit rot90 unbind append blockdiag diagflat diagembed extract transformaxes
            transform4daxes expand identity diagonal clone
set         constant full
reduction   prefix allclose nansum trapz nnz addup
sort        top
"""


def _rows(text: str) -> list[tuple[str, list[str]]]:
    """Return the kind and the words of each row; a row goes on where a line is indented."""
    rows = re.sub(r"\n +", " ", text.strip()).split("\n")
    return [(kind, words) for kind, *words in map(str.split, rows)]


def _set(words: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(words.split())


_ROWS = [*_rows(WORDS), *_rows(WEAK_WORDS)]
_WEAK = len(_rows(WORDS))  # the first row of words that say little
_LEXICON = [(word, row) for row, (_, words) in reversed([*enumerate(_ROWS)]) for word in words]
_BEGINNINGS = {word[:-1]: row for word, row in _LEXICON if word.endswith("*")}
_ENDINGS = {word[1:]: row for word, row in _LEXICON if word.startswith("*")}
_EXACT = _BEGINNINGS | _ENDINGS | {word: row for word, row in _LEXICON if "*" not in word}
_ATTENTION, _LIBRARIES = _EXACT["attention"], _EXACT["cutlass"]

# A verb at the head takes the words behind it as its objects, but not work that is fused with it.
_VERBS = _set(
    "copy memcpy transpose reorder rearrange reformat concat reshape flatten append quantize"
    " quant dequantize dequant decompress cast clamp gather scatter fill reset clear clean zero"
    " memset move sample"
)
_FUSED = _set("collective loss optimizer convolution gemm norm random")

# Preparing an index or a mask does none of the work that they are for.
_PREPARE = _set(
    "compute prepare build create make generate gen get set setup update convert calc cal"
    " calculate precompute fill invert sanitize assign derive"
)
_INDEX = _set(
    "index indices indice indexes idx idxs ind inds id ids position positions pos meta metadata"
    " offset offsets stride strides seqlen seqlens len lens length lengths slot slots table tables"
    " inputs map maps mapping mappings desc descs descriptor descriptors ptrs pointers args"
    " arguments params parameters schedule schedules addrs addresses pairs"
    " numblocks problemsizes starts indptr"
)

# Operands: the word before them says what they belong to, not what is done.
_INITIALIZE = _set("init initialize reset")
# Work that is not done yet where a name begins or ends with that.
_INITIALIZED = _set("set gemm sort elementwise indexing optimizer reduction")
_MASK = _set("mask masks bitmask")
_OPERAND_WORDS = _set("output outputs input inputs weight weights")
# Parts of attention, beside which the weak word `attention` tells nothing.
_PARTS = _set(
    "bias mask masks weight weights prob probs softmax metadata cache reshape output outputs"
)

# Words and phrases that tell nothing; other words may stand beside them without a space.
_NOISE = _set(
    "kernel kern ker cuda gpu hip triton fwd bwd forward backward grad gradient impl fused warp"
    " block thread row col rows cols token tokens group layer batch qkv cache opt vec tiled naive"
    " inplace small large multi single device shared static dynamic persistent ragged jagged"
    " masked scaled scattered gathered sampled update output input quantile gemma fbgemm deepgemm"
    " lossless lossy nocast packed"
)
_IDIOMS = _set(
    "foreach parallelfor varlen kvpool memorypool mempool varshape gridstride pow2"
    " colmap iq1bn iq2bn minlatency innerouter outerpersistent numblocks problemsizes deepgemm"
    " fwdcontiguous bwdcontiguous"
)

# Behind them stands the purpose or the means of the work.
_PREPOSITIONS = _set("for by via using without from")

# A part of a name: letters, digits, a hash, types, or an order of dimensions.
_PART = re.compile(
    r"0x[0-9a-f]+|[wa]\d+[wa]\d+|(?<![a-z0-9])(?:(?:bf|mx|[efi])\d+){3,}(?![a-z0-9])"
    r"|n[cdhw]{2,4}\d*(?![a-z])|[hs]\d{3,5}|v\d+(?![a-z])"
    r"|(?:s?u?int|b?float|fp|bf|tf|nf|[fhiuwqas])(?:16|32|64|\d)(?!d(?![a-z])|half|float)"
    r"|e\dm\d[a-z0-9]*|\d+bits?(?![a-z])|[a-z]+|\d+d(?![a-z])|\d+"
)
_TYPE = re.compile(
    r"(?:s?u?int|b?float|fp|bf|tf|nf|[fhiuwqs])\d+|e\dm\d\w*|\d+bits?|half|float|double|lowp|fp|int"
)
_DIMS = re.compile(r"n[cdhw]{2,4}\d*|[chw]{3}|b[shd]{3}|sbhd|thd")
# Types of operands and result, after which GEMMs of mixed types are named.
_WXA = re.compile(r"w\d+a\d+|a\d+w\d+|(?:(?:bf|mx|[efi])\d+){3,}")
_AXES = re.compile("[0-5]{3,5}")

# All to all, where nothing else is said.
_EXCHANGE = re.compile(
    r"^(kernel_?)?(cached_|low_latency_|hybrid_|intranode_|internode_)?(notify_)?(dispatch|combine)"
    r"(_?reduce)?(_?(impl|kernel))?(_(v?\d+|sm\d+|b?f(p|loat)?\d+))*$",
    re.IGNORECASE,
)

# Functions that do what the rest of their name or a template argument says: of the kinds that
# these can be, the first that is told, else the last.
_FRAMES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), tuple(kinds.split()))
    for pattern, kinds in (
        # Inductor names a kernel after all operators that it fused, the last of which may be GEMMs
        # and convolutions that other kernels did: only a template (tem) does one itself.
        (
            r"^triton_(tem_fused|flex|convolution|mm|bmm|addmm|scaled_mm)_",
            "attention convolution gemm",
        ),
        (r"^triton_poi_", "embedding elementwise"),
        (r"^triton_(red|per)_fused_(mm|mv|bmm|addmm)(_v?\d+)+$", "gemm"),
        (r"^triton_(red|per|spl)_(?=.*rsqrt)", "norm"),
        (
            r"^triton_(red|per|spl)_",
            "norm softmax loss reduction",
        ),  # TensorRT names a fusion after all its operations, each in at most four letters.
        (r"^__myl_(?=\w*(MeanSubMulMean|SqrtDivMul|Mean\w{0,40}Sqrt))", "gemm norm"),
        (r"^__myl_(?=\w*MaxSub\w{0,40}Exp\w{0,40}Sum)", "gemm softmax"),
        # XLA names a fusion after its root operations, and a lone operation `wrapped_`.
        (r"^(loop|wrapped)_(broadcast|iota)(_fusion|_\d|\.|$)", "set"),
        (
            r"^(input|loop|wrapped)_(?=\w*fusion)|^wrapped_",
            "sort indexing reduction copy elementwise",
        ),
        (
            r"(?i)(elementwise|pointwise)_?(kernel|grid|$)",
            "random loss norm optimizer set indexing copy elementwise",
        ),
    )
)

# Template arguments of a functor's frame that say where and as what the operands are read.
_ADDRESSING = re.compile(r"\b\w*(?:OffsetCalculator|With(?:out)?Cast)\w*|std::array\b.*")

# Functions that do what a template argument says: the kind of others is in their own name.
_GENERIC = re.compile(
    r"^(Kernel2?|device_kernel|kentry|trampoline_kernel|kernel|_kernel_agent|parallel_for\w*"
    r"|for_each\w*|static_kernel|GPUKernel|run_kernel|apply_kernel|kernelPointwiseApply\d"
    r"|EigenMetaKernel|(cuda|hip|sycl)_parallel_launch\w*|launch_global|launch_kernel|forall_\w*kernel\w*|LaunchNKernel)$",
    re.IGNORECASE,
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

# For kernels whose names say nothing; matched against the operator's name.
OP_RULES: tuple[tuple[str, str], ...] = (
    *OWN_OP_RULES,
    (
        "collective",
        r"^(nccl|gloo|mpi|ucc|xccl|hccl|c10d|record_param_comms|_c10d)|allreduce|all_reduce|allgather",
    ),
    ("attention", r"attention|flash_attn|fmha"),
    ("convolution", r"conv"),
    ("optimizer", r"_fused_(adam|sgd|adagrad)|^Optimizer\.step"),
    ("loss", r"loss|cross_entropy"),
    ("softmax", r"softmax"),
    ("norm", r"(layer|batch|group|rms|instance|weight)_?norm"),
    ("embedding", r"embedding|index_select|split_embedding"),
    ("gemm", r"::(_scaled_|_int_|_grouped_)?(mm|bmm|addmm|baddbmm|matmul|linear|addmv|mv|dot)_?\b"),
    # A recurrent layer of the host spends its time in its GEMMs.
    ("gemm", r"::(mkldnn_(rnn_layer|linear)|_mkl_linear|_linear_pointwise)"),
    # GEMMs of other libraries, with operands packed in any way.
    ("gemm", r"::\w+_(?<!quantize_)(linear|matmul|gemm|b?mm)$"),
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

# The norm of a list of tensors is a number for each of them.
_NORM_OF_LIST = re.compile("NormFunctor|_foreach_norm")

_UPDATE = re.compile(r"optimize|adam|adagrad|sgd|lamb", re.IGNORECASE)


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
        return _of_list(name, op, phase)
    kind = kind_of_name(name)
    of_op = _of_operator(op) if op else None
    if kind == OTHER:
        return of_op or OTHER
    if kind == "gemm" and of_op == "convolution":
        return "convolution"  # Libraries do some convolutions as a matrix product.
    if kind is None and name in OWN_CASTS and of_op == "gemm":
        return "elementwise"
    return kind or of_op or _of_words(parse(name).function, weak=True) or OTHER


def _of_list(name: str, op: str | None, phase: str | None) -> str:
    """Return the kind of a launch over a list of tensors."""
    if phase == "optimizer" or _UPDATE.search(f"{name} {op}"):
        return "optimizer"
    return "reduction" if _NORM_OF_LIST.search(name) else "elementwise"


# Characters of a word that is searched for known ones: the search takes the square of them.
LONGEST_WORD = 200


# Ranks of one job run the same kernels.
@lru_cache(maxsize=65536)
def kind_of_name(name: str) -> str | None:
    """Return the kind that a kernel's name tells, or None.

    Its function's own name comes first, its template arguments second, its scopes last: what
    types it has or where it was written says little of what it does.
    """
    parts = parse(name)
    if parts.function in WHOLE_NAMES:
        return WHOLE_NAMES[parts.function]
    if _EXCHANGE.search(parts.function):
        return "collective"
    for pattern, kinds in _FRAMES:
        if pattern.search(parts.function):
            functor = _ADDRESSING.sub("", parts.arguments)
            words = _words(f"{parts.function} {functor}")
            told = {_ROWS[row][0] for word in words if (row := _row(word)) is not None}
            return next((kind for kind in kinds if kind in told), kinds[-1])
    if parts.function == "EigenMetaKernel":
        return _match(EXPRESSION_RULES, parts.arguments)
    if not _GENERIC.match(parts.function):
        return _of_words(parts.function) or _of_words(parts.scopes)
    arguments = parts.arguments
    if parts.function == "trampoline_kernel":
        # One of rocPRIM's arguments names the algorithm: `scan_config_selector`.
        arguments = " ".join(re.findall(r"\b\w+_config(?:_selector)?\b", arguments))
    return _of_words(arguments) or _of_words(parts.scopes)


@lru_cache(maxsize=65536)
def _of_words(text: str, weak: bool = False) -> str | None:
    """Return the kind that the words of a name tell (mean_Kernel), or None."""
    words = _words(text)
    end = next((at for at, word in enumerate(words) if at and word in _PREPOSITIONS), None)
    words = words[:end]
    told = [(word, row) for word in words if (row := _row(word)) is not None]
    if {"add", "bias"} <= set(words):  # The operand stands between them: add_QKV_bias.
        told.append(("addbias", _EXACT["addbias"]))
    follows = dict(pairwise(words))
    is_verb = bool(told) and told[0][0] in _VERBS
    work = {
        _ROWS[row][0]
        for word, row in told[is_verb:]
        if row < _LIBRARIES and (not is_verb or follows.get(word) not in _OPERAND_WORDS)
    }
    heads = [word for word in words if word.isalpha() and word not in _NOISE] or words
    prepares = next((at for at, word in enumerate(words) if word in _PREPARE), len(words))
    objects = set(words[prepares + 1 :])
    # A name that begins with it does nothing else: compute_group_gemm_args.
    begins = all(word in _NOISE for word in words[:prepares])
    real_work = {"convolution"} if begins else _FUSED - {"collective"}
    if objects & _MASK and "random" not in work and (heads[-1] in _MASK or not objects & _INDEX):
        return "set"
    if objects & _INDEX and work.isdisjoint(real_work | {"other"}):
        return "indexing"
    is_object = work <= _INITIALIZED or not _INDEX.isdisjoint(words)
    initializes = not {*heads[:1], *heads[-1:]}.isdisjoint(_INITIALIZE)
    if initializes and is_object and not is_verb and "scanstate" not in words:
        return "set"
    if is_verb and not work & _FUSED:
        return _ROWS[told[0][1]][0]
    rows = [row for word, row in told if row != _ATTENTION or follows.get(word) not in _PARTS]
    row = min(rows, default=len(_ROWS))
    return _ROWS[row][0] if row < (len(_ROWS) if weak else _WEAK) else None


def _words(text: str) -> list[str]:
    """Return the words of a name in lower case; those of the table that stand apart are joined."""
    spelled = _ACRONYMS.sub(lambda found: found[0].capitalize(), text)
    lower = _BETWEEN_WORDS.sub("_", spelled).lower()
    parts = [_class_of(part) for part in _PART.findall(lower)]
    words: list[str] = []
    at = 0
    while at < len(parts):
        size, word = next(_joined(parts[at : at + 6]), (1, parts[at]))
        is_whole = size > 1 or word in _IDIOMS or _exact(word) is not None
        words += [word] if is_whole else _split(word)
        at += size
    return [word for word in words if not word[0].isdigit()]


def _joined(parts: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the words that the first parts make together, the longest first, and their sizes.

    Fragments alone make none: `se_t` is no set.
    """
    for size in range(len(parts), 1, -1):
        word = "".join(parts[:size])
        is_known = word in _IDIOMS or _exact(word) is not None
        if is_known and (max(map(len, parts[:size])) > 2 or not word.isalpha()):
            yield size, word


def _class_of(part: str) -> str:
    """Return the word that stands for all types, all orders of dimensions, or the part itself."""
    classes = (("wxa", _WXA), ("dtype", _TYPE), ("dims", _DIMS), ("axes", _AXES))
    return next((word for word, pattern in classes if pattern.fullmatch(part)), part)


@lru_cache(maxsize=65536)
def _row(word: str) -> int | None:
    """Return the row of a word in the table, or None."""
    if word in _NOISE or word.removesuffix("s") in _NOISE:
        return None
    if (row := _exact(word)) is not None:
        return row
    lengths = range(min(len(word), LONGEST_WORD), 2, -1)
    beginnings = (_BEGINNINGS.get(word[:length]) for length in lengths)
    endings = (_ENDINGS.get(word[-length:]) for length in lengths)
    return next((row for row in (*beginnings, *endings) if row is not None), None)


def _exact(word: str) -> int | None:
    """Return the row of a word that stands in the table, or whose singular does."""
    singular = word.removesuffix("s") if len(word) > 3 else word
    return _EXACT.get(word, _EXACT.get(singular))


@lru_cache(maxsize=65536)
def _split(word: str) -> list[str]:
    """Return the known words that `word` is made of, or itself."""
    if len(word) > LONGEST_WORD:
        return [word]
    ways: list[list[str] | None] = [[], *[None] * len(word)]
    for end in range(1, len(word) + 1):
        for begin in range(end - 2):
            part, way = word[begin:end], ways[begin]
            if way is not None and (part in _EXACT or part in _NOISE):
                found = [*way, part]
                if ways[end] is None or len(found) < len(ways[end] or ()):
                    ways[end] = found
    return ways[-1] or [word]


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
    head, _, operands = name.partition(_OPERANDS)
    text = head if re.fullmatch(r"\w+(-\w+)*", operands) else name
    text = _OPERATOR.sub("operator", _ANONYMOUS.sub("", text))
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
