"""Who has patched a module already: a swap never stacks on what somebody else has put there."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as _GLOBAL  # noqa: N812 - its globals are meant.

from kprof.sites._rewire import innermost

# Set on every method that a swap binds, so that it knows its own.
MARK = "kprof_site"
# Packages whose modules are replacements themselves.
FUSED = ("apex", "flash_attn", "liger_kernel", "quack", "transformer_engine", "unsloth", "xformers")


def python_modules(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield a module and those below it, with their names, but none compiled by TorchScript."""
    for name, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def why_foreign(module: Module) -> str | None:
    """Return why this module's forward is not its author's any more; None: it is."""
    function = _put_there(module)
    if function is not None:
        if hasattr(function, MARK):
            # A copy of a swapped module: what it carries goes to the original by itself.
            return None if not is_on(module) else "it is swapped already"
        return f"its forward was replaced by {_origin(function)}"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    cls = type(module)
    package = cls.__module__.partition(".")[0]
    if package in FUSED:
        return f"{cls.__name__} of {package} is a replacement already"
    owner = next((c for c in cls.__mro__ if "forward" in vars(c)), cls)
    function = inspect.unwrap(vars(owner).get("forward", cls.forward))
    if getattr(function, "__module__", owner.__module__) != owner.__module__:
        return f"the forward of {owner.__name__} was replaced by {_origin(function)}"
    return None


def is_passed_over(module: Module) -> bool:
    """Tell whether nobody would miss a call of this module: no hook, and no forward of its own."""
    function = _put_there(module)
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or (function is not None and not hasattr(function, MARK))
        or _GLOBAL._global_forward_hooks
        or _GLOBAL._global_forward_pre_hooks
        or _GLOBAL._global_backward_hooks
        or _GLOBAL._global_backward_pre_hooks
    )


def why_writing(forward: Callable[..., Any]) -> str | None:
    """Return that a forward leaves something on its module, which a kernel would not."""
    inner = innermost(forward)
    if inner is None:
        return None
    names = {one.opname for one in dis.get_instructions(inner)}
    return "its forward writes attributes" if names & {"STORE_ATTR", "DELETE_ATTR"} else None


def _put_there(module: Module) -> Any:
    """Return the function that stands for the class's forward in an instance; None: none does."""
    own = module.__dict__.get("forward")
    # A swapped module that was pickled carries its class's own, bound to it.
    if own is None or own == types.MethodType(type(module).forward, module):
        return None
    return getattr(own, "__func__", own)


def is_on(module: Module) -> bool:
    """Tell whether a swap runs this very module now."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    switch = getattr(function, MARK, None)
    return switch is not None and switch.owner is module


def _origin(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}"
