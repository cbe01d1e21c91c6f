"""Promises: what stands for a part's result, and for the sum with it, until it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_map


class Promise:
    """What stands for a tensor, to everybody but a sum and a norm."""

    def __init__(self, x: Tensor, residual: Tensor | None = None) -> None:
        """Stand for x, or for residual + x."""
        self.x, self.residual = x, residual
        self.made = x if residual is None else None
        self.has_gradient = torch.is_grad_enabled()

    def tensor(self) -> Tensor:
        """Return it, made at the latest now, and as where it was promised."""
        if self.made is None:
            with torch.set_grad_enabled(self.has_gradient):
                self.made = self.residual + self.x
        return self.made

    @property
    def is_open(self) -> bool:
        """Whether it is a sum that nobody has made, and could be made here as well."""
        return self.made is None and self.has_gradient == torch.is_grad_enabled()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Add a tensor to what is no sum yet; run all other functions of torch on tensors."""
        if function in ADDS and len(args) == 2 and not kwargs:
            term, residual = args if isinstance(args[0], Promise) else reversed(args)
            if term.residual is None and isinstance(residual, Tensor):
                return Promise(term.x, residual)
        args, kwargs = all_kept(args, kwargs or {})
        return function(*args, **kwargs)


CONTAINERS = (list, tuple, dict)
ADDS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul"),
    *("pow", "rpow", "neg", "pos", "abs", "invert", "floordiv", "rfloordiv", "mod", "rmod"),
    *("and", "or", "xor", "lt", "gt", "le", "ge", "eq", "ne", "getitem", "setitem", "contains"),
    *("len", "bool", "iter", "float", "int", "complex", "index", "format", "repr"),
)


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def call(self: Promise, *others: Any) -> Any:
        return Promise.__torch_function__(function, (), (self, *others))

    return call


for _name in OPERATORS:
    setattr(Promise, f"__{_name}__", _operator(f"__{_name}__"))
# Tensors, too, are equal element by element and yet keys by themselves.
Promise.__hash__ = object.__hash__  # type: ignore[method-assign]


def kept(one: Any) -> Any:
    """Return the tensor that a promise stands for, anything else as it is."""
    return one.tensor() if isinstance(one, Promise) else one


def returned(one: Any) -> Any:
    """Return what a forward returns, with tensors in the place of promises."""
    if isinstance(one, Tensor):
        return one
    if type(one) is tuple and not any(isinstance(part, CONTAINERS) for part in one):
        return tuple(map(kept, one))
    return tree_map(kept, one)


def all_kept(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return arguments with tensors in the place of promises."""
    # To look into containers takes longer than most calls.
    if kwargs or any(isinstance(one, CONTAINERS) for one in args):
        args, kwargs = tree_map(kept, (tuple(args), kwargs))
        return args, kwargs
    return [kept(one) for one in args], kwargs


class Part:
    """A child that promises its result."""

    def __init__(self, child: Module) -> None:
        self._child = child

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the child."""
        result = self._child(*args, **kwargs)
        if type(result) is tuple and result and type(result[0]) is Tensor:
            return (Promise(result[0]), *result[1:])
        return Promise(result) if type(result) is Tensor else result
