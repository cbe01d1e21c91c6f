"""Rotations by functions other than Hugging Face's usual one: how their calls become `rope`'s.

Names of arguments tell which are angles: `cos` and `sin` in any order, or complex numbers. Random
data tells the rest: whether tokens or heads come first, which columns are paired, and whether
float32 is rounded once. It does so for each shape of angles apart; other calls run the original.
Code may compare numbers of dimensions, as LitGPT and the first Llama do, and no sizes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kprof.kernels import kernel_named
from kprof.kernels.swap.dispatch import key_of
from kprof.kernels.swap.probes import (
    CANNOT,
    Operators,
    are_alike,
    autocast_of,
    distance,
    have_same_gradients,
    orders_sizes,
    probing,
)
from kprof.kernels.swap.reads import COMPARES, reads_of_function
from kprof.kernels.swap.translate import (
    LENGTHS,
    ROPE,
    ROTATED,
    ROTATING,
    Arguments,
    Translation,
    why_unlike_rotation,
)

# Arguments that hold cosine and sine together.
BOTH = ("freqs_cis", "freqs", "rope_cache")
OPERATORS = ROTATING | {"repeat_interleave", "view_as_complex", "view_as_real"}
# Of probes: batch, heads and columns.
BATCH, HEADS, COLUMNS = 2, 3, 8
# Tokens by which a table of angles is longer than a probe.
ROOM = 3


def _once(one: Tensor) -> Tensor:
    return one.unsqueeze(-1).expand(*one.shape, 2)


def _twice(one: Tensor) -> Tensor:
    return torch.cat((one, one), dim=-1)


# How (B, S, W) angles are understood, as `rope` takes them.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda one: one,
    "half of the halves": _twice,
    "the first half, twice": lambda one: _twice(one[..., : one.shape[-1] // 2]),
    "pairs": lambda one: one.unflatten(-1, (-1, 2)),
    "one for each pair": _once,
    "the first half, one for each pair": lambda one: _once(one[..., : one.shape[-1] // 2]),
}


class Sort(NamedTuple):
    """The shape of a call's angles, in relation to its heads."""

    dims: int
    is_shared: bool
    """Whether they are (1, S, W)."""
    has_room: bool
    """Whether they are (S, W) with more rows than there are tokens."""
    width: float
    """W by the columns of a head."""


@dataclass(frozen=True)
class Form:
    """How a function understands angles of a sort."""

    view: str
    is_wide: bool
    """Whether terms are not rounded, though angles are of the dtype of heads."""
    takes_float32: frozenset[bool]
    """Whether angles may be float32 beside heads in 16 bits, without (False) and with autocast."""
    from_pairs: bool = False
    """Whether neighbours come out as halves (DeepSeek); angles are those of halves."""


SORTS = tuple(
    Sort(*shape, width)
    for width in (1.0, 0.5)
    for shape in ((2, False, False), (2, False, True), (3, False, False), (3, True, False))
)


class Signature(NamedTuple):
    """The arguments of a rotation, by position."""

    num_heads: int
    """Tensors that are rotated: 1 or 2."""
    cos: int
    sin: int
    names: tuple[str, ...]

    @property
    def are_together(self) -> bool:
        """Whether one argument has cosine and sine."""
        return self.cos == self.sin

    def bound(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any] | None:
        """Return the tensors of a call in their order; None: it has other arguments."""
        if len(args) + len(named) != len(self.names):
            return None
        others = self.names[len(args) :]
        if any(name not in named for name in others):
            return None
        return [*args, *(named[name] for name in others)]


def signature_of(function: Callable[..., Any]) -> Signature | None:
    """Return which arguments are heads and angles, by their names; None: it is no rotation."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [one.name for one in parameters]
    together = [place for place, name in enumerate(names) if name in BOTH]
    if together:
        cos = sin = together[0]
    else:
        found = [[i for i, one in enumerate(names) if part in one] for part in ("cos", "sin")]
        if any(len(one) != 1 for one in found):
            return None
        cos, sin = found[0][0], found[1][0]
    num_heads, last = min(cos, sin), max(cos, sin)
    if num_heads not in (1, 2) or last - num_heads > 1:
        return None
    if any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in parameters[: last + 1]):
        return None
    is_needed = any(one.default is one.empty for one in parameters[last + 1 :])
    return None if is_needed else Signature(num_heads, cos, sin, tuple(names[: last + 1]))


@dataclass(frozen=True)
class Rotation:
    """A recognised function: how its calls become the kernel's, and results its own."""

    signature: Signature
    is_token_first: bool
    """Whether heads are (B, S, H, D), not (B, H, S, D)."""
    is_complex: bool
    """Whether cosine and sine are a complex number, not neighbours, where they are together."""
    forms: Mapping[Sort, Form]

    def arguments(self, *args: Any, **named: Any) -> Arguments | str | None:
        """Return the arguments of `rope`, or why a call has none."""
        given = self.signature.bound(args, named)
        if given is None:
            return None
        heads = given[: self.signature.num_heads]
        cos, sin = given[self.signature.cos], given[self.signature.sin]
        if any(not isinstance(one, Tensor) for one in (*heads, cos, sin)):
            return None
        if any(one.dim() != len(("B", "H", "S", "D")) for one in heads):
            return "heads of other dimensions"
        if self.signature.are_together:
            if cos.is_complex() != self.is_complex or not (
                self.is_complex or cos.shape[-1:] == (2,)
            ):
                return "angles of another kind"
            cos, sin = (torch.view_as_real(cos) if self.is_complex else cos).unbind(-1)
        return self._turning(heads, cos, sin)

    def _turning(self, heads: list[Tensor], cos: Tensor, sin: Tensor) -> Arguments | str:
        if self.is_token_first:
            heads = [one.transpose(1, 2) for one in heads]
        q = heads[0]
        form = self.forms.get(_sort_of(q, cos))
        if form is None or cos.shape != sin.shape:
            return f"angles of {tuple(cos.shape)} for heads of {tuple(q.shape)}"
        if cos.dtype != q.dtype:
            is_cast = torch.is_autocast_enabled(q.device.type)
            if cos.dtype != torch.float32 or is_cast not in form.takes_float32:
                return f"heads in {q.dtype}, angles in {cos.dtype}"
        angles = [one[: q.shape[2]][None] if one.dim() == 2 else one for one in (cos, sin)]
        if form.is_wide:
            angles = [one.float() for one in angles]
        cos, sin = (VIEWS[form.view](one) for one in angles)
        if form.from_pairs:
            heads = [one.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for one in heads]
            q = heads[0]
        # Detached: a gradient of no heads would be added to that of all.
        return q, heads[1] if len(heads) > 1 else q.detach()[:, :0], cos, sin

    def returned(self, results: Any) -> Any:
        """Return the kernel's results as the function returns them."""
        turned = [one.transpose(1, 2) if self.is_token_first else one for one in results]
        return tuple(turned) if self.signature.num_heads > 1 else turned[0]

    def drawn(
        self, sort: Sort, draw: Callable[..., Tensor], dtype: torch.dtype, length: int = 5
    ) -> Arguments:
        """Return random arguments of the function, with angles of a sort."""
        shapes = [(BATCH, one, length, COLUMNS) for one in (HEADS, 1)[: self.signature.num_heads]]
        heads = [draw(*one).to(dtype) for one in shapes]
        if self.is_token_first:
            heads = [one.transpose(1, 2).contiguous() for one in heads]
        lead = (1 if sort.is_shared else BATCH,) if sort.dims > len(("S", "W")) else ()
        shape = (*lead, length + ROOM * sort.has_room, int(sort.width * COLUMNS))
        if self.signature.are_together:
            both = draw(*shape, 2)
            return *heads, torch.view_as_complex(both) if self.is_complex else both.to(dtype)
        cos, sin = draw(*shape).to(dtype), draw(*shape).to(dtype)
        is_sin_first = self.signature.sin < self.signature.cos
        return *heads, *((sin, cos) if is_sin_first else (cos, sin))


def _sort_of(q: Tensor, cos: Tensor) -> Sort:
    dims = cos.dim()
    is_table = dims == len(("S", "W"))
    has_room = is_table and cos.shape[0] > q.shape[2]
    is_shared = dims > len(("S", "W")) and cos.shape[0] == 1
    return Sort(dims, is_shared, has_room, cos.shape[-1] / q.shape[-1])


def rotation_of(function: Callable[..., Any]) -> Translation | None:
    """Return the translation of a rotation other than of halves by (q, k, cos, sin); None: none.

    Its code is analysed before it runs.
    """
    signature = signature_of(function)
    if signature is None or isinstance(reads_of_function(function, may_compare=True), str):
        return None
    compares = isinstance(reads_of_function(function), str)
    if signature.names == ROTATED and not compares and _is_usual(function):
        return None
    with probing(torch.device("cpu")):
        found = next(_recognised(function, signature), None)
    return None if found is None else _translation(found)


def why_unknown(function: Callable[..., Any]) -> str:
    """Return why a function whose name says that it rotates is not known."""
    signature = signature_of(function)
    if signature is None:
        return why_unlike_rotation(function) or "it is not known"
    reads = reads_of_function(function, may_compare=True)
    return reads if isinstance(reads, str) else "it computes something else"


def _is_usual(function: Callable[..., Any]) -> bool:
    """Return whether a function of q, k, cos and sin rotates halves, in angles of their dtype."""
    if why_unlike_rotation(function) is not None:
        return True
    given = [_draw(BATCH, heads, 5, COLUMNS) for heads in (HEADS, 1)]
    for width in (COLUMNS, COLUMNS // 2):
        angles = [_draw(BATCH, 5, width + one)[..., :width] for one in (0, 1)]
        mixed = [*(one.bfloat16() for one in given), *angles]
        if _is_as_the_kernel(function, mixed):
            return False
        if _is_as_the_kernel(function, [*given, *angles]):
            return True
    return False


def _is_as_the_kernel(function: Callable[..., Any], given: list[Tensor]) -> bool:
    try:
        return are_alike(function(*given), kernel_named(ROPE).reference(*given))
    except CANNOT:
        return False


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _recognised(function: Callable[..., Any], signature: Signature) -> Iterator[Rotation]:
    """Yield how a function understands its arguments, if some agree."""
    sorts = [one for one in SORTS if not signature.are_together or one.width < 1]
    kinds = (True, False) if signature.are_together else (False,)
    for is_token_first, is_complex in product((False, True), kinds):
        found = {}
        for sort in sorts:
            form = _form_of(function, Rotation(signature, is_token_first, is_complex, {}), sort)
            if form is not None:
                found[sort] = form
        if found:
            yield Rotation(signature, is_token_first, is_complex, found)


def _form_of(function: Callable[..., Any], empty: Rotation, sort: Sort) -> Form | None:
    """Return how a function understands angles of a sort; None: in another way."""

    def apart(
        form: Form, dtype: torch.dtype, *, is_mixed: bool = False, casts: bool = False
    ) -> float:
        one = replace(empty, forms={sort: form})
        given = list(one.drawn(sort, _draw, dtype))
        if is_mixed and not empty.is_complex:
            num_heads = empty.signature.num_heads
            given[num_heads:] = [angle.float() / 3 for angle in given[num_heads:]]
        try:
            with autocast_of(torch.device("cpu"), dtype if casts else None):
                new, old = _replaced(one, given), function(*given)
        except CANNOT:
            return math.inf
        return distance(new, old) if are_alike(new, old) else math.inf

    either = frozenset((False, True))
    for view, from_pairs in product(VIEWS, (False, True)):
        known = Form(view, False, either, from_pairs)
        if apart(known, torch.float32) == math.inf:
            continue
        taken = (
            casts
            for casts in either
            if apart(known, torch.bfloat16, is_mixed=True, casts=casts) < math.inf
        )
        known = replace(known, takes_float32=frozenset(taken))
        if empty.is_complex:
            return known
        wide = replace(known, is_wide=True)
        return wide if apart(wide, torch.bfloat16) < apart(known, torch.bfloat16) else known
    return None


def _replaced(one: Rotation, given: Any) -> Any:
    arguments = one.arguments(*given)
    if not isinstance(arguments, tuple):
        return None
    return one.returned(kernel_named(ROPE).reference(*arguments))


def _translation(one: Rotation) -> Translation:
    sort = next(iter(one.forms))
    return Translation(
        ROPE,
        one.arguments,
        key=lambda q, k, cos, sin: (key_of(q, k), k.shape, cos.shape, cos.dtype, cos.requires_grad),
        probe=lambda draw, dtype: one.drawn(sort, draw, dtype),
        shape=lambda q, k, *_: (q.shape[0], q.shape[2], q.shape[1], max(1, k.shape[1]), q.shape[3]),
        is_default=_is_default,
        returned=one.returned,
        why_not=functools.partial(_why_not, one),
    )


def _is_default(arguments: Arguments) -> bool:
    """Return whether every provider takes them: two tensors, halves, one dtype."""
    q, k, cos, _ = arguments
    return bool(k.shape[1] and cos.dtype == q.dtype and cos.shape[2:] == q.shape[3:])


def _why_not(one: Rotation, function: Callable[..., Any]) -> str | None:
    """Return why a function is no rotation: results, gradients, operators or side effects."""
    for sort, length in product(one.forms, LENGTHS):
        given = one.drawn(sort, _draw, torch.float32, length)
        if orders_sizes(function, *given):
            return COMPARES
        versions = [tensor._version for tensor in given]
        with Operators(*given) as operators:
            original = function(*given)
        why = operators.why_not(OPERATORS)
        if why is not None:
            return why
        if [tensor._version for tensor in given] != versions:
            return "it writes to its arguments"
        if not are_alike(_replaced(one, given), original):
            return f"it computes something else for {length} tokens"
        for place in range(one.signature.num_heads):
            compute = (
                _part_of(call, place, given)
                for call in (function, lambda *given: _replaced(one, given))
            )
            if not have_same_gradients(*compute, given[place]):
                return "its gradients are those of something else"
    return None


def _part_of(
    function: Callable[..., Any], place: int, given: Arguments
) -> Callable[[Tensor], object]:
    def compute(one: Tensor) -> object:
        result = function(*given[:place], one, *given[place + 1 :])
        return result[place] if isinstance(result, tuple) else result

    return compute
