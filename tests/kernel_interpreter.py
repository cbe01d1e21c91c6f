"""Triton's interpreter for the tests of kernels; import this before anything that imports Triton.

Where another test of the same process imported Triton for a GPU, these tests are skipped.
"""

import dataclasses
import inspect
import math
import os
import sys
from functools import cache, cached_property

import pytest

pytest.importorskip("torch")
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("a test's module imports Triton: no kernel could be tried after it")
    pytest.skip("Triton was imported without its interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

# The interpreter computes with NumPy, which warns of what a GPU does without a word.
interpreter.GridExecutor.__call__ = np.errstate(all="ignore")(interpreter.GridExecutor.__call__)

# Nearly all of a kernel's time is what Triton does in Python at each operation, whatever its size.
# What follows does the same once, or only where somebody looks at it, and takes half of the time.

# Each operation on integers would be done again in 64 bits, for an assertion about overflow that
# is left out where nothing is debugged, as here.
_builder = interpreter.interpreter_builder
assert not _builder.options.debug
_builder.options = dataclasses.replace(_builder.options, sanitize_overflow=False)


_checks_semantic = core.builtin(lambda: None).__code__


def _with_semantic(member, semantic):
    """Return what calls a member with the interpreter's semantic, which it need not look for."""
    if member.__code__ is _checks_semantic:
        member = member.__wrapped__

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


@cache
def _builtins_of(part, builder):
    """Return names of what a part of Triton's language has built in, itself, and its stand-in."""
    semantic = interpreter.TritonSemantic(builder)
    found = [(name, one) for name, one in inspect.getmembers(part) if core.is_builtin(one)]
    return [(name, member, _with_semantic(member, semantic)) for name, member in found]


def _replace_builtins(part, builder, scope):
    """Replace what a part of Triton's language has built in, as Triton's own function does."""
    members = [(*one, getattr(part, one[0])) for one in _builtins_of(part, builder)]
    for name, member, stand_in, now in members:
        if now is member:
            scope.set_attr(part, name, stand_in)


_replaced = set()
"""The modules in which the language is replaced now."""


class _Scope(interpreter._LangPatchScope):
    def restore(self):
        super().restore()
        _replaced.clear()


@cache
def _language_of(function):
    return {tl, core}.intersection(filter(inspect.ismodule, function.__globals__.values()))


def _replace_language(function, replace=interpreter._patch_lang):
    """Replace the language that a function sees, unless who calls it had it replaced already."""
    modules = _language_of(function)
    if modules and modules <= _replaced:
        return None
    scope = replace(function)
    _replaced.update(modules)
    return scope


_numpy_dtypes = {}


def _numpy_dtype_of(dtype, look_up=interpreter._get_np_dtype):
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = look_up(dtype)
    return _numpy_dtypes[name]


def _new_tuple(self, values, type=None, initialise=core.tuple.__init__):
    """Leave a tuple's type to who asks for it: that is hardly anybody."""
    if type is None:
        self.values = list(values)
    else:
        initialise(self, values, type)


def _sizes_of(shape, unwrap=core._unwrap_shape):
    are_plain = type(shape) is not core.constexpr and all(type(one) is int for one in shape)
    return list(shape) if are_plain else unwrap(shape)


@cache
def _shape_and_size(*sizes):
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _new_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_size(*(type.shape if type.is_block() else ()))


@cache
def _block_of(*sizes):
    return core.tuple(sizes), validate_block_shape(sizes)


def _new_block_type(self, element_ty, shape):
    """Leave a type's name to who asks for it, and check its shape once."""
    self.element_ty = element_ty
    self.shape, self.numel = _block_of(*_sizes_of(shape))
    if not self.shape:
        raise TypeError("0d block_type is forbidden")


def _broadcast(self, lhs, rhs, broadcast=interpreter.TritonSemantic.broadcast_impl_value):
    """Return two tensors in one shape; `_block_of` gives equal shapes as one object."""
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.shape is other.shape:
        return lhs, rhs
    return broadcast(self, lhs, rhs)


def _is_same_dtype(self, other, compare=core.dtype.__eq__):
    return self is other or compare(self, other)


interpreter._patch_builtin = _replace_builtins
interpreter._LangPatchScope = _Scope
interpreter._patch_lang = _replace_language
interpreter._get_np_dtype = _numpy_dtype_of
core.tuple.__init__ = _new_tuple
core.tuple.type = cached_property(lambda self: core._type_for_tuple_values(self.values))
core.tuple.type.__set_name__(core.tuple, "type")
core.tensor.__init__ = _new_tensor
core.block_type.__init__ = _new_block_type
core.dtype.__eq__ = _is_same_dtype
interpreter.TritonSemantic.broadcast_impl_value = _broadcast
core.block_type.name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
core.block_type.name.__set_name__(core.block_type, "name")
core._unwrap_shape = _sizes_of
