"""Bounds on the shares of a launch's time in which the memory and the SMs are busy.

The work tells the least. What is known of all kernels of a family, of the number of CTAs and of
short launches tells the most: the memory cannot be busy with traffic that a kernel does not have,
nor can SMs without a CTA be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kprof.device import Device

RAMP_NS = 2000
"""Time in which a launch begins and ends: its first bytes come, its last CTAs are alone.

An empty kernel takes 1 to 2 us on an H100; one that reads from memory, 2 to 3.
"""

MEMORY_RAMP_NS = 4000
"""Time that a launch needs beside streaming at `ATTAINED`, where nothing lies in a cache."""

COUNTED_OF = 1.08, 1.25
"""Instructions of a kernel over those that were counted, which exclude its own function.

Counters of 26 launches gave 1.03 to 1.14 (benchmarks/notes/bounds.md).
"""

ATTAINED = 0.92
"""Share of its bandwidth at which the memory of recent GPUs streams (H200: 4.4 of 4.8 TB/s)."""

HELD_SHARE, READ_ONCE = 0.5, 1.1
"""Of the cache, what a launch can read again from there, and its traffic over that of one read."""

MOST_OF_EVEN_SHARE = 2.5
"""What one SM moves from memory at most, over its even share of the bandwidth.

Not measured: the bytes that an SM can have in flight set it.
"""

WARP_LANES, SCHEDULERS = 32, 4

_HOPPER = r"\b(H20|G?H200|H100|H800)\b"


@dataclass(frozen=True)
class Family:
    """What holds for all kernels whose names match."""

    names: str
    """A regular expression; the first family that matches is a kernel's."""
    executed: tuple[float, float] | None = None
    """Time of the pipes over that of the useful FLOPs at the peak, at least and at most.

    Launches of such families do all FLOPs of their operator.
    """
    traffic: float | None = None
    """Traffic with the memory over the minimum, at most; None where it has no bound."""
    part: float | None = None
    """Traffic of this launch alone over the minimum of its operator, of whose launches it is one.

    None where it shares the operator's in proportion to its time.
    """
    instructions: tuple[float, float] | None = None
    """Instructions for an element of the largest operand, at least and at most.

    Around those that counters gave on an H100, with a margin by hand (benchmarks/notes/bounds.md).
    """
    of_thread: float = 40
    """Further instructions of each thread at most: its place, or its part in a reduction."""


# Functions of an element by the instructions that they take: a few, or one or two polynomials.
# Division of integers, arithmetic of 64 bits and of complex numbers take any number more.
_COSTLY = r"(?!.*(Div|div_|remainder|fmod|pow|gcd|lcm|atan|hypot|double|complex))"
_SIMPLE = (
    "CUDAFunctor_add|CUDAFunctorOnSelf_add|FillFunctor|copy_kernel|compare_|MulFunctor|clamp|"
    "threshold|masked_(scale|fill)|where_kernel|neg_kernel|abs_kernel|AbsFunctor|bitwise_|logical_|"
    "relu|square|sqrt|sign_kernel|m(in|ax)imum"
)
_TRANSCENDENTAL = (
    "gelu|Gelu|GELU|silu|tanh|sigmoid|exp_kernel|exp2_kernel|expm1|log_kernel|log1p|log2|log10|"
    "sin_kernel|cos_kernel|erf_kernel|softplus|mish|elu"
)

# Hopper's wgmma reaches the peak; mma.sync, as compiled for earlier GPUs, two thirds of it, and in
# its shape for 8 elements deep half. Vector units issue loads and addresses beside multiply-adds.
FAMILIES = (
    # Exponentials and random numbers for dropout stand beside the products; the backward pass
    # computes the scores once more, five products for four.
    Family(r"flash_bwd_kernel|flash_bwd_dq_dk_dv|fmha_cutlassB_(bf16|f16)", (1.8, 5.2), 2.5),
    Family(r"flash_fwd_(splitkv_)?kernel|fmha_cutlassF_(bf16|f16)", (1.45, 4.2), 2.5),
    Family(r"flash_bprop", (1.25, 4.2), 2.5),
    Family(r"flash_fprop", (1.0, 4.2), 2.5),
    # Fewer multiplications than the definition has; and what channels are padded to is unknown.
    Family(r"winograd", (0.4, np.inf)),
    Family(r"sm90\w*(fprop|dgrad|wgrad)", (1.0, np.inf), 3.0),
    Family(r"(16816|sm80_xmma|tf32|1688)\w*(fprop|dgrad|wgrad)", (1.45, np.inf), 3.0),
    Family(r"fprop|dgrad|wgrad|implicit_convolve", (1.0, np.inf), 3.0),
    Family(r"nvjet|sm90_xmma|cutlass.*sm90|wgmma.*gemm", (1.0, 1.3), 2.5),
    Family(r"16816|sm80_xmma\w*(bf16|f16|tf32)|ampere_\w*(bf16|fp16|h)\w*gemm", (1.45, 1.8), 2.5),
    Family(r"_s?1688\w*gemm|_h?884", (1.9, 2.2), 2.5),
    Family(r"f32f32_f32f32_f32|sgemm|simt_s", (1.25, 2.0), 2.5),
    # Of the five tensors that attention's backward pass reads and the three that it writes, it
    # reads two, and clears the gradient of q in fp32.
    Family(r"dot_do_o", traffic=1.1, part=0.5, instructions=(0, 30)),
    # The gradient of q is read in fp32, and written.
    Family(r"convert_dq", traffic=1.1, part=0.375, instructions=(0, 30)),
    # The gradient and the input are read by both, the gradient of the input is written by one.
    Family(r"layer_norm_grad_input", None, 1.2, 1.0, (28, 65), 250),
    Family(r"GammaBetaBackward", None, 1.2, 0.67, (0, 25), 250),
    Family(r"batch_norm_collect_statistics_channels_last", None, 1.3, 0.5, (0, 45), 250),
    Family(r"batch_norm_backward_reduce_channels_last", None, 1.3, 0.67, (0, 45), 250),
    Family(r"batch_norm_\w+_channels_last", None, 1.1, 1.0, (0, 45)),
    Family(r"embedding_backward_feature", traffic=2.0),
    # A sum of squares; a mean and a variance in one pass, with a division for each element.
    Family(r"vectorized_layer_norm_kernel<[^>]*true>", None, 1.05, None, (5, 40), 250),
    Family(r"vectorized_layer_norm_kernel", None, 1.05, None, (40, 85), 250),
    # Exponentials; a row that no cache holds is read for its maximum, its sum and the result.
    Family(r"softmax_warp_forward", None, 1.05, None, (30, 65)),
    Family(r"softmax_warp_backward", None, 1.05, None, (8, 25)),
    Family(r"cunn_SoftMaxForward(Reg|Smem)", None, 1.1, None, (14, 100), 250),
    Family(r"cunn_SoftMaxForward", None, 2.0, None, (14, 40), 250),
    Family(r"cunn_SoftMaxBackward", None, 1.7, None, (10, 30), 250),
    Family(r"fused_dropout_kernel", None, 1.05, None, (22, 45)),
    Family(r"CatArrayBatchedCopy", None, 1.1, None, (0, 110)),
    Family(r"\breduce_kernel<.*(Welford|Arg|double|complex)", None, 1.1),
    Family(r"\breduce_kernel<", None, 1.1, None, (2, 28), 250),
    # Types are converted, one element at a time.
    Family(rf"unrolled_elementwise_kernel{_COSTLY}.*({_SIMPLE})", None, 1.1, None, (15, 60)),
    Family(rf"vectorized_elementwise_kernel{_COSTLY}.*({_SIMPLE})", None, 1.05, None, (0, 16)),
    Family(
        rf"vectorized_elementwise_kernel{_COSTLY}.*({_TRANSCENDENTAL})", None, 1.05, None, (0, 45)
    ),
    Family(r"(vectorized|unrolled)_elementwise_kernel", None, 1.1),
)


@dataclass(frozen=True)
class BusyShares:
    """Shares of one of each row's time; at least 0, and 1 where nothing better is known."""

    memory_least: np.ndarray
    memory_most: np.ndarray
    sm_least: np.ndarray
    sm_most: np.ndarray


def families_of(kernels: pd.DataFrame) -> np.ndarray:
    """Return each row's place in `FAMILIES`, -1 where its name is of none."""
    names = kernels["name"].cat
    places = [
        next((n for n, family in enumerate(FAMILIES) if re.search(family.names, str(name))), -1)
        for name in names.categories
    ]
    return np.asarray(np.array([*places, -1], dtype=np.int64)[names.codes.to_numpy()])


def fill_of(kernels: pd.DataFrame, device: Device) -> np.ndarray:
    """Return the share of the SMs' schedulers that have a warp at most, 1 where unknown."""
    if device.num_sms is None:
        return np.ones(len(kernels))
    ctas, threads = _product(kernels["grid"]), _product(kernels["block"])
    warps = ctas * np.ceil(threads / WARP_LANES)
    by_sms = ctas / device.num_sms
    by_schedulers = warps / (device.num_sms * SCHEDULERS)
    fill = np.minimum(1, np.minimum(by_sms, by_schedulers))
    return np.asarray(np.where((ctas > 0) & (threads > 0), fill, 1.0))


def _threads(kernels: pd.DataFrame) -> np.ndarray:
    """Return the threads of each launch, NaN where its grid or block is missing."""
    number = _product(kernels["grid"]) * _product(kernels["block"])
    return np.asarray(np.where(number > 0, number, np.nan))


def _product(sizes: pd.Series[str]) -> np.ndarray:
    """Return how many CTAs or threads sizes such as '8,1,1' name, 0 where they are missing."""
    named = sizes.astype("category").cat
    numbers = [np.prod([float(n) for n in re.findall(r"\d+", str(s))]) for s in named.categories]
    return np.asarray(np.array([*numbers, 0.0])[named.codes.to_numpy()])


@dataclass(frozen=True)
class Measured:
    """What the work and the recording tell of each row; NaN where they do not."""

    time_ns: np.ndarray
    """Of the operator, over which its work counts."""
    own_ns: np.ndarray
    """Of the row."""
    moved: np.ndarray
    """Bytes that the operator reads and writes, each once."""
    traffic: np.ndarray
    """How many of these must pass the memory."""
    is_least: np.ndarray
    """Whether the work is a lower bound, so that traffic may be any more."""
    arithmetic_ns: np.ndarray
    """Useful FLOPs of the operator at their peak."""
    group: np.ndarray
    """Rows with the same number are launches of one operator."""
    issue_ns: np.ndarray
    """Instructions of the operator as far as they were counted; 0 where they were not."""
    element_ns: np.ndarray
    """One instruction for each element of the largest operand."""
    instruction_ns: float
    """One instruction of one thread; NaN where the GPU's rate is unknown."""


def find_busy_shares(kernels: pd.DataFrame, device: Device, told: Measured) -> BusyShares:
    """Bound the shares of each row's time."""
    family = families_of(kernels)
    time_ns = np.maximum(told.time_ns, 1)
    part = _of_family([f.part or np.nan for f in FAMILIES], np.nan, family)
    part = np.where(np.isnan(part), told.own_ns / time_ns, part)
    own_ns = np.maximum(told.own_ns, 1)
    memory_ns = part * told.traffic / device.memory_bytes_per_s * 1e9
    attained_ns = MEMORY_RAMP_NS + memory_ns / ATTAINED
    memory_least = memory_ns / np.maximum(own_ns, attained_ns)
    executed = _of_family([f.executed or (1.0, np.nan) for f in FAMILIES], (1.0, np.nan), family)
    if not re.search(_HOPPER, device.name):
        # There each instruction may reach the peak.
        executed[:, 0] = np.minimum(executed[:, 0], 1.0)
    each = _of_family([f.instructions or (0, np.nan) for f in FAMILIES], (0, np.nan), family)
    most_traffic = _of_family([f.traffic or np.nan for f in FAMILIES], np.nan, family)
    # Data that the cache holds is read from the memory once, however often a kernel reads it.
    is_held = told.moved <= HELD_SHARE * (device.cache_bytes or 0)
    most_traffic = np.where(is_held, np.minimum(most_traffic, READ_ONCE), most_traffic)
    most_ns = np.where(told.is_least, np.nan, memory_ns * most_traffic)
    most_share = most_ns / np.maximum(own_ns, MEMORY_RAMP_NS + most_ns / ATTAINED)
    on_pipes = _arithmetic_of(told, family)[:, None] * executed
    issued = told.element_ns[:, None] * each
    threads_ns = _threads(kernels) * told.instruction_ns
    of_thread = _of_family([f.of_thread for f in FAMILIES], np.nan, family)
    # No kernel here has more threads than elements, but a result may have more than operands.
    issued[:, 1] = np.maximum(told.element_ns, threads_ns) * each[:, 1] + threads_ns * of_thread
    counted = told.issue_ns[:, None] * np.array(COUNTED_OF)
    sm_least = np.fmax(np.fmax(on_pipes, issued), counted)[:, 0] / time_ns
    # Arithmetic is among the instructions of an element.
    counted_most = np.where(told.issue_ns > 0, counted[:, 1], np.nan)
    # Of its operator's instructions a launch may issue all.
    sm_most = np.fmin(on_pipes[:, 1] / time_ns, np.fmin(issued[:, 1], counted_most) / own_ns)
    running = np.maximum(told.own_ns - RAMP_NS, 0) / own_ns
    fill = fill_of(kernels, device)
    streamed = fill * MOST_OF_EVEN_SHARE
    return BusyShares(
        memory_least=np.nan_to_num(memory_least),
        memory_most=_least_of(running, streamed, most_share),
        sm_least=np.nan_to_num(sm_least),
        sm_most=_least_of(running, fill, sm_most),
    )


def _arithmetic_of(told: Measured, family: np.ndarray) -> np.ndarray:
    """Return the arithmetic of each row's operator as if the row's rate held all of its time.

    Where launches of families with FLOPs are in the operator they do all of them: others convert
    layouts or types, or add up partial results.
    """
    member, _ = pd.factorize(told.group)
    does = np.array([f.executed is not None for f in FAMILIES] + [False])[family]
    doing_ns = np.bincount(member, weights=told.own_ns * does)[member]
    scale = told.time_ns / np.maximum(doing_ns, 1)
    of_doing = np.where(does, told.arithmetic_ns * scale, np.nan)
    return np.asarray(np.where(doing_ns > 0, of_doing, told.arithmetic_ns))


def _of_family(values: list[object], other: object, family: np.ndarray) -> np.ndarray:
    return np.asarray(np.array([*values, other], dtype=float)[family])


def _least_of(*shares: np.ndarray) -> np.ndarray:
    """Return the least of the shares that are known, and of one."""
    return np.asarray(np.fmin(np.fmin.reduce(shares), 1.0))
