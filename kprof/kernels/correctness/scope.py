"""The calls that a class of equivalence covers: those that the gate tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class Size:
    """The sizes that one dimension of a call may have."""

    name: str
    largest: int | None = None
    """Of a dimension that may have any size; None: it has one of `known`."""
    known: tuple[int, ...] = ()
    """The sizes that were tried of a dimension that has few; none: the code declares its own."""

    def why_outside(self, size: int) -> str | None:
        """Return why a size is outside of what was tried; None: it is inside."""
        if self.largest is not None and size > self.largest:
            return f"{size:,} {self.name}: the gate tried up to {self.largest:,}"
        if self.known and size not in self.known:
            tried = ", ".join(f"{one:,}" for one in self.known)
            return f"{size:,} {self.name}: the gate tried {tried}"
        return None

    def __str__(self) -> str:
        if self.largest is not None:
            return f"{self.name} ≤ {self.largest:,}"
        known = ", ".join(f"{one:,}" for one in self.known)
        return f"{self.name} in {{{known}}}" if self.known else ""


@dataclass(frozen=True)
class Scope:
    """The calls that the gate tried: sizes, dimensions, dtypes, layouts and modes of torch."""

    sizes: tuple[Size, ...]
    num_dimensions: tuple[int, ...]
    """Of the first tensor; none: any that the code takes."""
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    contexts: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Calls that the new code refuses, each with its reason."""

    def why_outside(
        self,
        shape: Sequence[int],
        dtype: str,
        *,
        num_dimensions: int | None = None,
        contexts: Sequence[str] = (),
    ) -> str | None:
        """Return why a call is outside of what was tried; None: it is inside.

        Args:
            shape: As the subject counts shapes.
            dtype: Its name, such as "bfloat16".
            num_dimensions: Of its first tensor; None: as many as the shape has.
            contexts: The modes of torch that it is made in.
        """
        if dtype not in self.dtypes:
            return f"{dtype}: the gate tried {', '.join(self.dtypes)}"
        others = [one for one in contexts if one not in self.contexts]
        if others:
            return f"{others[0]}: the gate tried {', '.join(self.contexts) or 'no mode'}"
        is_known = not self.num_dimensions or num_dimensions in (None, *self.num_dimensions)
        if not is_known:
            tried = ", ".join(map(str, self.num_dimensions))
            return f"{num_dimensions} dimensions: the gate tried {tried}"
        return self._why_of_sizes(shape)

    def _why_of_sizes(self, shape: Sequence[int]) -> str | None:
        if len(shape) != len(self.sizes):
            return f"a shape of {len(shape)} sizes: the gate tried {len(self.sizes)}"
        reasons = map(Size.why_outside, self.sizes, shape)
        return next((why for why in reasons if why), None)

    def __str__(self) -> str:
        """Return the scope in words, such as "rows ≤ 65,536, bf16 and fp32, contiguous …"."""
        sizes = [str(one) for one in self.sizes if str(one)]
        if self.num_dimensions:
            sizes.append(f"{_joined([str(n) for n in self.num_dimensions])} dimensions")
        dtypes = _joined([SHORT_DTYPES.get(one, one) for one in self.dtypes])
        layouts = f"{_joined(self.layouts)} layouts"
        contexts = f"contexts {_joined(self.contexts)}"
        return ", ".join([*sizes, dtypes, layouts, contexts])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), *words[-1:]])


def names_of_dimensions(given: Sequence[str], count: int) -> tuple[str, ...]:
    """Return names for so many dimensions: those given, else the usual ones."""
    usual = {1: ("values",), 2: ("rows", "columns")}
    if len(given) == count:
        return tuple(given)
    return usual.get(count, tuple(f"dimension {i}" for i in range(count)))
