"""A module for one call of another's code, with other children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module

_ABSENT = object()


class Around:
    """One call of a module's code with other children, and other attributes."""

    def __init__(self, module: Module, children: Mapping[str, Any], **others: Any) -> None:
        self._module = module
        self.clone: Module = object.__new__(type(module))
        own = {**module.__dict__, **others, "_modules": dict(children)}
        own.pop("forward", None)
        self._before = own
        self.clone.__dict__.update(own)

    def take_over(self) -> None:
        """Let the module have what the call has written to its attributes."""
        before = self._before
        for name, value in self.clone.__dict__.items():
            if before.get(name, _ABSENT) is not value:
                self._module.__dict__[name] = value
