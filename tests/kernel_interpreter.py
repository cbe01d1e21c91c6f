"""Triton's interpreter for the tests of kernels; import this before anything that imports Triton.

Where another test of the same process imported Triton for a GPU, these tests are skipped.
"""

import inspect
import os
import sys
from functools import cache

import pytest

pytest.importorskip("torch")
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("a test's module imports Triton: no kernel could be tried after it")
    pytest.skip("Triton was imported without its interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def _builtins_of(part):
    return [name for name, member in inspect.getmembers(part) if is_builtin(member)]


def _replace_builtins(part, builder, scope):
    """Replace what a part of Triton's language has built in, as Triton's own function does.

    Triton does it at each call of one function by another and looks the names up each time, which
    takes a third of a kernel's time.
    """
    members = [(name, getattr(part, name)) for name in _builtins_of(part)]
    for name, member in members:
        if is_builtin(member):
            interpreter._patch_attr(part, name, member, builder, scope)


interpreter._patch_builtin = _replace_builtins
