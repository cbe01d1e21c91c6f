"""kprof: profile GPU workloads unmodified and account for every nanosecond."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kprof.api import profile as profile
    from kprof.api import range as range
    from kprof.saved import load as load

_HOME = {"profile": "kprof.api", "range": "kprof.api", "load": "kprof.saved"}

__all__ = ["load", "profile", "range"]


def __getattr__(name: str) -> object:
    """Import a public name where it is first used, so that `import kprof` costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'kprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
