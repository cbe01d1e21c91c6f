"""kprof: profile GPU workloads unmodified and account for every nanosecond."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kprof.api import profile as profile
    from kprof.api import range as range
    from kprof.callables import ab_test as ab_test
    from kprof.saved import load as load
    from kprof.sla import measure_generation as measure_generation
    from kprof.swap import swapped as swapped

_HOME = {
    "ab_test": "kprof.callables",
    "load": "kprof.saved",
    "measure_generation": "kprof.sla",
    "profile": "kprof.api",
    "range": "kprof.api",
    "swapped": "kprof.swap",
}

__all__ = [
    "ab_test",
    "load",
    "measure_generation",
    "profile",
    "range",
    "swapped",
]


def __getattr__(name: str) -> object:
    """Import a public name where it is first used, so that `import kprof` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'kprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
