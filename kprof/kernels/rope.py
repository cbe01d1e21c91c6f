"""Rotary position embedding of queries with keys in one launch, which reads each once.

With x1 and x2 the halves of a head, y1 = x1 cos1 - x2 sin1 and y2 = x2 cos2 + x1 sin2. q is (B, Hq,
S, D), k is (B, Hk, S, D), cos and sin are (B or 1, S, D), or of fewer columns: then as many columns
of each head are rotated, and the rest stays. Angles of shape (B or 1, S, R / 2, 2) rotate
neighbours instead of halves. Angles in float32 beside 16-bit heads round the result alone; angles
of the same dtype round both terms, too. `rope` returns new tensors, `rope_` works in place. A CTA
rotates all heads of one token, so it reads cosine and sine once. The backward pass rotates the
gradients back.

Order, in this and the other single files: kernel, public function, launch, operator, KERNEL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import (
    DTYPES,
    Launcher,
    alignments,
    applied,
    define,
    empty_like,
    kind_of,
    next_power_of_two,
)

# Of all heads of one token, which a CTA keeps in registers.
MOST_ELEMENTS = 32_768
ELEMENTS_PER_WARP, MOST_WARPS = 256, 16
# Dimensions of angles for halves; those for pairs have one more.
ANGLES = 3


@triton.jit
def rope_kernel(
    q_BHSD,
    k_BHSD,
    cos_BSD,
    sin_BSD,
    q_out_BHSD,
    k_out_BHSD,
    q_b: tl.int64,
    q_h: tl.int64,
    q_s: tl.int64,
    k_b: tl.int64,
    k_h: tl.int64,
    k_s: tl.int64,
    q_out_b: tl.int64,
    q_out_h: tl.int64,
    q_out_s: tl.int64,
    k_out_b: tl.int64,
    k_out_h: tl.int64,
    k_out_s: tl.int64,
    angle_b: tl.int64,
    angle_s: tl.int64,
    angle_step: tl.int64,
    angle_apart: tl.int64,
    length: tl.int64,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    IS_BACK: tl.constexpr,
):
    """Rotate all heads of one token: columns i STEP and i STEP + APART, for i below HALF."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // length, token % length
    places = tl.arange(0, BLOCK)[None, :]
    is_place = places < HALF
    angles = b * angle_b + s * angle_s + places * angle_step
    cos_1 = tl.load(cos_BSD + angles, is_place, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_BSD + angles + angle_apart, is_place, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_BSD + angles, is_place, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_BSD + angles + angle_apart, is_place, other=0.0).to(tl.float32)
    angle_type: tl.constexpr = cos_BSD.dtype.element_ty
    if IS_BACK:
        sin_1, sin_2 = -sin_2, -sin_1
    q_heads = tl.arange(0, Q_BLOCK)[:, None]
    is_q = (q_heads < Q_HEADS) & is_place
    q_from = q_BHSD + b * q_b + s * q_s + q_heads * q_h + places * STEP
    q_1, q_2 = tl.load(q_from, is_q, other=0.0), tl.load(q_from + APART, is_q, other=0.0)
    k_heads = tl.arange(0, K_BLOCK)[:, None]
    is_k = (k_heads < K_HEADS) & is_place
    k_from = k_BHSD + b * k_b + s * k_s + k_heads * k_h + places * STEP
    k_1, k_2 = tl.load(k_from, is_k, other=0.0), tl.load(k_from + APART, is_k, other=0.0)
    q_to = q_out_BHSD + b * q_out_b + s * q_out_s + q_heads * q_out_h + places * STEP
    tl.store(q_to, _rotate_half(q_1, cos_1, q_2, -sin_1, angle_type), is_q)
    tl.store(q_to + APART, _rotate_half(q_2, cos_2, q_1, sin_2, angle_type), is_q)
    k_to = k_out_BHSD + b * k_out_b + s * k_out_s + k_heads * k_out_h + places * STEP
    tl.store(k_to, _rotate_half(k_1, cos_1, k_2, -sin_1, angle_type), is_k)
    tl.store(k_to + APART, _rotate_half(k_2, cos_2, k_1, sin_2, angle_type), is_k)


@triton.jit
def _rotate_half(own, cos, other, sin, angle_type: tl.constexpr):
    # Rounds both terms before they are added, to the dtype that torch's products have.
    kept = (own.to(tl.float32) * cos).to(angle_type).to(tl.float32)
    crossed = (other.to(tl.float32) * sin).to(angle_type).to(tl.float32)
    return (kept + crossed).to(own.dtype)


_launch = Launcher(rope_kernel)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return q and k with each head rotated by the angles of its position.

    Args:
        q: (B, Hq, S, D), in any order in memory; float32, float16 or bfloat16.
        k: (B, Hk, S, D).
        cos: (B or 1, S, R) for the first R of D columns, or (B or 1, S, R / 2, 2), which pairs
            neighbours; of the same dtype, or float32; has no gradient.
        sin: As cos.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _with_gradient(q, k, cos, sin)
    return tuple(_operator(q, k, cos, sin, False))


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k in place, and return them; refused where they need gradients."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise KprofError("q and k need gradients", fix="call `rope`, which writes new tensors")
    _operator_in_place(q, k, cos, sin)
    return q, k


class _WithGradient(torch.autograd.Function):
    """The operator with gradients, outside the dispatcher, which is faster."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(_operator(q, k, cos, sin, False))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_operator(dq, dk, *ctx.saved_tensors, True), None, None


_with_gradient = applied(_WithGradient)


def _empty(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> list[Tensor]:
    """Return memory for the results: in the order of q and k, if their heads are contiguous."""
    like = [torch.empty_like(one) for one in (q, k)]
    return [one if one.stride(-1) == 1 else empty_like(one) for one in like]


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, is_back: bool) -> list[Tensor]:
    results, width = _empty(q, k, cos, sin, is_back), _width(cos)
    if width == q.shape[-1]:
        _launch_rotation(q, k, cos, sin, results, is_back)
        return results
    rotated = [one[..., :width] for one in results]
    _launch_rotation(q[..., :width], k[..., :width], cos, sin, rotated, is_back)
    for one, result in zip((q, k), results, strict=True):
        result[..., width:].copy_(one[..., width:])
    return results


def _run_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    width = _width(cos)
    if width < q.shape[-1]:
        q, k = q[..., :width], k[..., :width]
    if q.stride(-1) == k.stride(-1) == 1:
        _launch_rotation(q, k, cos, sin, (q, k), False)
        return
    for one, turned in zip((q, k), _run(q, k, cos, sin, False), strict=True):
        one.copy_(turned)


def _launch_rotation(q, k, cos, sin, results: Sequence[Tensor], is_back: bool) -> None:
    tensors = (q, k, cos, sin, *results)
    call = kind_of(q, k, cos, sin), is_back, results[0] is q
    if _launch.again(call, tensors):
        return
    (batch, q_heads, length, columns), k_heads = q.shape, k.shape[1]
    half = columns // 2
    if not batch * length * half:
        return
    q, k = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k))
    in_pairs = cos.dim() > ANGLES
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    steps = cos.stride()[-2:] if in_pairs else (cos.stride(-1), half * cos.stride(-1))
    strides = [stride for one in (q, k, *results) for stride in one.stride()[:3]]
    strides += [cos.stride(0) * (len(cos) > 1), cos.stride(1), *steps]
    blocks = next_power_of_two(q_heads), next_power_of_two(k_heads), next_power_of_two(half)
    aligned = alignments((q, k, cos, sin, *results), *strides, length)
    constants = (q_heads, k_heads, half, *blocks, *((2, 1) if in_pairs else (1, half)), is_back)
    key = (q.device, q.dtype, cos.dtype, constants, aligned)
    arguments = (q, k, cos, sin, *results, *strides, length, *constants)
    warps = min(MOST_WARPS, max(1, blocks[0] * blocks[2] // ELEMENTS_PER_WARP))
    options = {"num_warps": warps}
    _launch(key, batch * length, arguments, options, call=call, tensors=tensors)


def _width(cos: Tensor) -> int:
    """Return how many columns are rotated."""
    return cos.shape[-1] if cos.dim() == ANGLES else 2 * cos.shape[-2]


_operator = define(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool is_back) -> Tensor[]", _run, _empty
)
_operator_in_place = define(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()",
    _run_in_place,
    lambda q, k, cos, sin: None,
)


def _reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Hugging Face's `apply_rotary_pos_emb`, in the dtype of q and k."""
    in_pairs, width = cos.dim() > ANGLES, _width(cos)
    cos, sin = (one.flatten(ANGLES - 1).unsqueeze(1) for one in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        x, rest = x[..., :width], x[..., width:]
        if in_pairs:
            first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
            other = torch.stack((-second, first), dim=-1).flatten(-2)
        else:
            first, second = x.chunk(2, dim=-1)
            other = torch.cat((-second, first), dim=-1)
        turned = (x * cos + other * sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    return turn(q), turn(k)


def _refuses(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}"
    in_pairs = cos.dim() == ANGLES + 1 and cos.shape[-1] == 2
    if q.dim() != 4 or k.dim() != 4 or not (in_pairs or cos.dim() == ANGLES):
        return f"not (B, H, S, D) with (B, S, D): {shapes}"
    batch, heads, length, columns = q.shape
    same = k.shape[0] == batch and k.shape[2:] == q.shape[2:]
    width = _width(cos)
    same = same and cos.shape == sin.shape
    if not same or cos.shape[0] not in (1, batch) or cos.shape[1] != length or width > columns:
        return f"shapes that do not fit each other: {shapes}"
    if width % 2 or next_power_of_two(max(heads, k.shape[1])) * columns > MOST_ELEMENTS:
        return f"heads that are odd, or too many for one program: {shapes}"
    is_one = q.dtype in DTYPES and k.dtype == q.dtype and sin.dtype == cos.dtype
    if not is_one or cos.dtype not in (q.dtype, torch.float32):
        return f"dtypes {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}: not one of {DTYPES}"
    return "cos and sin get no gradients" if cos.requires_grad or sin.requires_grad else None


def _work(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Work:
    turned = q.numel() + k.numel()
    return Work(3 * turned, q.element_size() * (2 * turned + cos.numel() + sin.numel()))


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Tensor, ...]:
    batch, length, *heads, columns = shape
    q, k = (draw(batch, length, n, columns).transpose(1, 2) for n in heads)
    angles = draw.plain(1, length, columns)
    return q, k, angles.cos(), angles.sin()


def _liger() -> Any:
    from liger_kernel.ops.rope import LigerRopeFunction

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if cos.dim() > ANGLES or cos.dtype != q.dtype or not k.shape[1]:
            # It has no such rotation.
            return _reference(q, k, cos, sin)
        width = cos.shape[-1]
        if width == q.shape[-1]:
            rotated: tuple[Tensor, ...] = LigerRopeFunction.apply(q, k, cos, sin)
            return rotated
        parts = LigerRopeFunction.apply(q[..., :width], k[..., :width], cos, sin)
        pairs = zip(parts, (q, k), strict=True)
        return tuple(torch.cat((part, one[..., width:]), dim=-1) for part, one in pairs)

    return rotate


KERNEL = Kernel(
    name="rope",
    replaces="apply_rotary_pos_emb of Hugging Face's models, in its form of rotated halves",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: rope, "kprof"),
        Provider("eager", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
        Provider("liger", _liger, "liger-kernel"),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=((4, 2_048, 32, 8, 64), (4, 2_048, 32, 8, 128), (1, 32_768, 32, 8, 128)),
    edges=((3, 5, 3, 1, 12), (2, 3, 28, 4, 128), (1, 2, 64, 8, 80)),
    reach=(2**16,),
    differentiable=(0, 1),
    backward_work=_work,
    rows=(0, 1),
    sources=(
        "Su et al., RoFormer, arXiv 2104.09864",
        "transformers, apply_rotary_pos_emb: the halves, and the order in which it rounds",
    ),
)
