"""Probes: a module's own code on random data, without a change of the module.

A probe runs a stand-in: the same class and plain attributes, with its own parameters and children,
and without hooks. So the module's weights may be sharded, or on the meta device; and a factor that
is still all ones in the module shows.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kprof.kernels.swap.reads import OF_MODULES, Number, is_plain, names_in_class, value_key

# Errors that a forward may raise on data of another kind than it expects.
CANNOT = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError),
    *(NotImplementedError, ArithmeticError),
)
# Differences by other summation orders, in units of the last place.
MOST_ULPS = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 32.0}
# The same for gradients, where a detached part differs by far more.
MOST_ULPS_OF_GRADIENTS = 4_096.0
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The number by which code names the last dimension, and one that no tensor of a probe has.
LAST_DIMENSION, NO_DIMENSION = -1, 8
# Dtype of the input, and of autocast if it is on.
Setting = tuple[torch.dtype, torch.dtype | None]
SETTINGS: tuple[Setting, ...] = tuple(
    (dtype, cast) for cast in (None, torch.bfloat16, torch.float16) for dtype in DTYPES
)


class CannotCopyError(TypeError):
    """A module that cannot be copied for a probe."""


def stand_in(
    module: Module, parameters: Mapping[str, Tensor | None], children: Mapping[str, Module | None]
) -> Module:
    """Return a module with the same code, with these parameters and children, without hooks.

    Everything that its code may read is a deep copy, so that the module does not change.

    Raises:
        CannotCopyError: an attribute cannot be copied.
    """
    cls = type(module)
    clone: Module = object.__new__(cls)
    memo: dict[int, Any] = {id(module): clone, id(module._parameters): dict(parameters)}
    memo |= {id(one): children[name] for name, one in module._modules.items() if name in children}
    names = names_in_class(cls)
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") or "_hooks_" in name:
            clone.__dict__[name] = OrderedDict()
        elif name in OF_MODULES or names is None or name in names:
            clone.__dict__[name] = _copied(value, name, memo)
    clone.__dict__.pop("forward", None)
    clone.__dict__["_parameters"] = dict(parameters)
    clone.__dict__["_modules"] = dict(children)
    return clone


def _copied(value: object, name: str, memo: dict[int, Any]) -> object:
    if name in ("_parameters", "_modules", "forward") or is_plain(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # Its class may raise anything.
        raise CannotCopyError(f"its {name} cannot be copied for a probe ({error})") from error


class Operators(TorchDispatchMode):
    """Records which operators of torch run, and whether they use tensors that were not given."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.has_others = False
        """Whether a tensor was used that is neither given nor computed from given ones."""
        self._kept: list[Tensor] = []
        self._storages: set[int] = set()
        self.know(given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that nothing here is hidden from torch.compile, whose import takes seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record one operator."""
        name = function.overloadpacket.__name__.rstrip("_")
        self.names.add(name)
        if name == "lift_fresh":
            self.know(args)
        self.has_others |= any(
            one.untyped_storage()._cdata not in self._storages
            for one in tree_leaves((args, kwargs))
            if isinstance(one, Tensor)
        )
        result = function(*args, **(kwargs or {}))
        self.know(tree_leaves(result))
        return result

    def know(self, tensors: Iterable[Any]) -> None:
        """Count these tensors as given."""
        for one in tensors:
            if isinstance(one, Tensor):
                # A reference, so that no other tensor gets its address.
                self._kept.append(one)
                self._storages.add(one.untyped_storage()._cdata)

    def why_not(self, allowed: Container[str]) -> str | None:
        """Return which operator is not allowed, or that a tensor was not given; None: neither."""
        others = sorted(name for name in self.names if name not in allowed)
        if others:
            return f"its code runs {others[0]}, which the kernel does not"
        return "it reads a tensor that the kernel does not take" if self.has_others else None


class OrderedError(Exception):
    """Code that orders a size, or makes a plain number of it."""


class _Size(int):
    """A size of a tensor: code may compute with it and compare it for equality, nothing else."""

    def _refused(self, *others: object) -> Any:
        raise OrderedError

    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = _refused
    __divmod__ = __rdivmod__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refused
    __abs__ = __invert__ = __trunc__ = __round__ = _refused

    @staticmethod
    def _computing(function: Callable[..., Any]) -> Any:
        def compute(*sizes: Any) -> Any:
            result = function(*sizes)
            return result if result is NotImplemented else _Size(result)

        return compute

    for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
        for _side in ("__", "__r"):
            locals()[f"{_side}{_name}__"] = _computing(getattr(int, f"{_side}{_name}__"))
    __neg__, __pos__ = _computing(int.__neg__), _computing(int.__pos__)


class _Sized(Tensor):
    """A tensor whose sizes are `_Size`s. The number of its dimensions is a plain one."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and watch the sizes that it returns."""
        if function is Tensor.__len__:
            raise OrderedError
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, torch.Size):
            return torch.Size(map(_Size, result))
        return _Size(result) if function in SIZES_OF else result


# Functions that return a size, if they return an integer.
SIZES_OF = {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, torch.numel}


def orders_sizes(function: Callable[..., object], *given: Tensor) -> bool:
    """Return whether a function compares sizes of these tensors by order, or uses them unseen.

    Numbers of dimensions do not count: they are the same in every call of a kind.
    """
    try:
        function(*(one.as_subclass(_Sized) for one in given))
    except (OrderedError, *CANNOT):
        return True
    return False


# Operators that cast, copy or rearrange tensors, or create constants.
ARRANGING = frozenset(
    (
        *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "chunk", "clone"),
        *("contiguous", "copy", "detach", "empty", "empty_like", "expand", "fill", "full"),
        *("full_like", "lift_fresh", "narrow", "new_empty", "ones", "ones_like", "permute"),
        *("reshape", "scalar_tensor", "select", "slice", "split", "split_with_sizes"),
        *("squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view", "zeros"),
        *("zeros_like",),
    )
)
ARITHMETIC = frozenset(("add", "div", "mul", "neg", "pow", "reciprocal", "rsub", "square", "sub"))


class Direct(Module):
    """A child in a stand-in: its own code and data, without hooks."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        children = {
            name: None if child is None else Direct(child)
            for name, child in module._modules.items()
        }
        self.__dict__["module"] = stand_in(module, module._parameters, children)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the child's forward without hooks."""
        module = self.__dict__["module"]
        return type(module).forward(module, *args, **kwargs)


def set_mode(module: Module, is_training: bool) -> None:
    """Set a stand-in and its children to training or evaluation."""
    module.__dict__["training"] = is_training
    for child in module._modules.values():
        if isinstance(child, Direct):
            set_mode(child.__dict__["module"], is_training)


@contextmanager
def probing(device: torch.device) -> Iterator[torch.Generator]:
    """Run a probe without gradients, and without the caller's autocast, inference mode and seed.

    Torch counts no writes to tensors of its inference mode.
    """
    devices = [device] if device.type == "cuda" else []
    no_modes = torch.inference_mode(mode=False), torch.no_grad()
    with torch.random.fork_rng(devices), no_modes[0], no_modes[1], warnings.catch_warnings():
        # Torch may warn of slow settings that no result depends on.
        warnings.simplefilter("ignore")
        with torch.autocast(device.type, enabled=False):
            yield torch.Generator().manual_seed(20)


def kind_of(module: Module) -> tuple[Hashable, ...]:
    """Return a key of what a module computes, apart from the values of its parameters."""
    names = names_in_class(type(module))
    own = (
        (name, value_key(value))
        for name, value in module.__dict__.items()
        if name not in OF_MODULES and (names is None or name in names)
    )
    tensors = (
        (name, None if one is None else (one.shape, one.dtype, one.device))
        for name, one in (*module._parameters.items(), *module._buffers.items())
    )
    children = (
        (name, None if one is None else kind_of(one)) for name, one in module._modules.items()
    )
    return (type(module), type(module).forward, *own, *tensors, *children)


def place_of(module: Module) -> torch.device:
    """Return the device of probes: that of the parameters, or the host if they have no data."""
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type not in ("cuda", "cpu"):
        return torch.device("cpu")
    return parameter.device


def autocast_of(device: torch.device, cast: torch.dtype | None) -> Any:
    """Return the autocast context of a setting."""
    return nullcontext() if cast is None else torch.autocast(device.type, dtype=cast)


def distance(new: object, old: object) -> float:
    """Return the largest difference of two results, in units of the last place of their row.

    It is infinite if shapes or dtypes differ, or if one is NaN.
    """
    if isinstance(new, (tuple, list)) and isinstance(old, (tuple, list)) and len(new) == len(old):
        return max((distance(a, b) for a, b in zip(new, old, strict=True)), default=0.0)
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return float("inf")
    if new.shape != old.shape or new.dtype != old.dtype or not old.dtype.is_floating_point:
        return float("inf")
    # On the host: on a GPU, the kernels of these operations would be loaded for this alone.
    a, b = new.detach().cpu().double(), old.detach().cpu().double()
    scale = torch.maximum(b.abs(), b.pow(2).mean(-1, keepdim=True).sqrt() if b.dim() else b.abs())
    apart = (a - b).abs() / (scale * torch.finfo(old.dtype).eps).clamp_min(1e-300)
    worst = float(apart.max()) if apart.numel() else 0.0
    return float("inf") if worst != worst else worst


def are_alike(new: object, old: object) -> bool:
    """Return whether two results differ by no more than another summation order explains."""
    dtype = old.dtype if isinstance(old, Tensor) else torch.float32
    if isinstance(old, (tuple, list)) and old and isinstance(old[0], Tensor):
        dtype = old[0].dtype
    return distance(new, old) <= MOST_ULPS.get(dtype, 0.0)


def is_more_exact(new: object, old: object, truth: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results differ by roundings to `dtype` that only the old one has.

    Args:
        new: Of a kernel.
        old: Of the code that it replaces; of the same shape and dtype.
        truth: Of the same call, in float64.
        dtype: That the old code rounds to on its way, narrower than its result's.
    """
    if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.dtype != old.dtype:
        return False
    errors = [distance(one.double(), truth) for one in (new, old)]
    rounding = torch.finfo(dtype).eps / torch.finfo(torch.float64).eps
    return errors[0] <= errors[1] <= MOST_ULPS.get(dtype, 0.0) * rounding


def gradients_of(compute: Callable[..., object], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a function of these tensors, in float32."""
    with torch.enable_grad():
        given = [one.detach().float().requires_grad_() for one in tensors]
        result = compute(*given)
        assert isinstance(result, Tensor)
        weights = torch.linspace(-1, 2, result.numel(), device=result.device)
        weights = weights.view(result.shape)
        # Of a sum: for given gradients, torch imports SymPy, which takes seconds.
        return torch.autograd.grad((result * weights).sum(), given, materialize_grads=True)


def have_same_gradients(
    new: Callable[..., object], old: Callable[..., object], *tensors: Tensor
) -> bool:
    """Return whether two functions of these tensors have the same gradients."""
    try:
        apart = distance(gradients_of(new, *tensors), gradients_of(old, *tensors))
    except CANNOT:
        return False
    return apart <= MOST_ULPS_OF_GRADIENTS


def set_number(module: Module, number: Number) -> Callable[[bool], None]:
    """Return a function that sets a number of a stand-in to another value, or back."""
    for name in number.path:
        child = module._modules[name]
        module = child.__dict__["module"] if isinstance(child, Direct) else cast("Module", child)
    value = number.value
    other = value + 1 if isinstance(value, int) else 1.37 * value + 0.11
    if value == LAST_DIMENSION and isinstance(value, int):
        # A factor changes the result; a dimension raises, so that it counts as a form.
        other = NO_DIMENSION

    def put(is_other: bool) -> None:
        module.__dict__[number.name] = other if is_other else value

    return put


def is_another(compute: Callable[[], list[object]], put: Callable[[bool], None]) -> bool:
    """Return whether results change, in the same shape, with a number.

    A number whose change raises or changes the shape describes the form of the module.
    """
    with torch.random.fork_rng([]):
        before = compute()
    put(True)
    try:
        after = compute()
    except CANNOT:
        return False
    finally:
        put(False)
    for one, other in zip(before, after, strict=False):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.shape == other.shape and not torch.equal(one, other):
                return True
        elif one != other:
            return True
    return len(before) != len(after)


def settings_where(agrees: Callable[[Setting], bool]) -> frozenset[Setting]:
    """Return the settings in which original and replacement agree; errors count as disagreement."""
    found = set()
    for setting in SETTINGS:
        try:
            if agrees(setting):
                found.add(setting)
        except CANNOT:
            continue
    return frozenset(found)
