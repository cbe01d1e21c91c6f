"""A module for one call of another's code, with other children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

_ABSENT = object()
# What is the call's own, and stays so.
OWN = ("_modules", "forward")


def around(module: Module, children: Mapping[str, Any], **others: Any) -> Module:
    """Return a module for one call of this one's code with other children, and other attributes."""
    clone: Module = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__.pop("forward", None)
    clone.__dict__.update(others, _modules=dict(children))
    return clone


def take_over(module: Module, clone: Module, *besides: str) -> None:
    """Let a module have what the call has written to its attributes."""
    own = module.__dict__
    for name, value in clone.__dict__.items():
        if own.get(name, _ABSENT) is not value and name not in OWN and name not in besides:
            own[name] = value
