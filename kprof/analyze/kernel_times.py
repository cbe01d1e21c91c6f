"""The output of `kprof kernels bench --json`: the fastest provider of a kernel, and all times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

OURS = "kprof"
KEYS = frozenset({"kernel", "bucket", "direction", "provider", "measured"})


class Timing(msgspec.Struct, frozen=True):
    """One provider's time for one shape; what could not be measured is missing."""

    provider: str
    shape: tuple[int, ...]
    gpu_ns: float | None = None
    share_of_copy: float | None = None
    problem: str = ""


class Benched(msgspec.Struct, frozen=True):
    """All providers of a kernel on one shape, and the one that was chosen."""

    kernel: str
    dtype: str
    direction: str
    provider: str
    gpu: str
    date: str
    measured: tuple[Timing, ...]

    @property
    def what(self) -> str:
        """The call in words."""
        shape = "x".join(str(length) for length in self.measured[0].shape) if self.measured else ""
        return f"{self.kernel} {self.direction}, {shape} {self.dtype}".replace(",  ", ", ")

    @property
    def ours(self) -> Timing | None:
        """Time of the fastest kernel of kprof; None: none was measured, or ran."""
        return _fastest([one for one in self._usable if is_ours(one.provider)])

    @property
    def best_other(self) -> Timing | None:
        """The fastest of all others; None: there is none that ran."""
        return _fastest([one for one in self._usable if not is_ours(one.provider)])

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best other ours is; None: one of the two is missing."""
        ours, other = self.ours, self.best_other
        if ours is None or other is None or not ours.gpu_ns or not other.gpu_ns:
            return None
        return other.gpu_ns / ours.gpu_ns

    @property
    def _usable(self) -> list[Timing]:
        return [one for one in self.measured if one.gpu_ns is not None and not one.problem]


def is_ours(provider: str) -> bool:
    """Tell whether a provider is ours, in one of its forms: kprof, kprof-shared."""
    return provider.split("-")[0] == OURS


def _fastest(timings: Sequence[Timing]) -> Timing | None:
    return min(timings, key=lambda one: one.gpu_ns or 0.0, default=None)


def read_benched(found: Sequence[dict[str, Any]]) -> tuple[Benched, ...]:
    """Return what was measured.

    Raises:
        msgspec.ValidationError: it is no output of kprof kernels bench.
    """
    return msgspec.convert(list(found), type=tuple[Benched, ...])
