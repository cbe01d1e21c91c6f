"""Plug-ins by convention: every module of a plural folder is one of them."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def modules_in(package: str) -> list[ModuleType]:
    """Import every public module of `package`, in the order of their names."""
    folder = importlib.import_module(package)
    names = sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name[0] != "_")
    return [importlib.import_module(f"{package}.{name}") for name in names]
