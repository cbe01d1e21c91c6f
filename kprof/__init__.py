"""kprof: profile GPU workloads unmodified and account for every nanosecond."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kprof.ab.functions import ab_test
    from kprof.api import Run
    from kprof.api import open as open
    from kprof.api import profile as profile
    from kprof.api import range as range
    from kprof.collect.generation import measure_generation
    from kprof.kernels.swap.swapping import swapped
    from kprof.storage import load

_HOME = {
    "Run": "kprof.api",
    "ab_test": "kprof.ab.functions",
    "load": "kprof.storage",
    "measure_generation": "kprof.collect.generation",
    "open": "kprof.api",
    "profile": "kprof.api",
    "range": "kprof.api",
    "swapped": "kprof.kernels.swap.swapping",
}

__all__ = [
    "Run",
    "ab_test",
    "load",
    "measure_generation",
    "open",
    "profile",
    "range",
    "swapped",
]


def __getattr__(name: str) -> object:
    """Import a public name where it is first used, so that `import kprof` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'kprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Return the public names, which completion in a notebook shows."""
    return list(__all__)
