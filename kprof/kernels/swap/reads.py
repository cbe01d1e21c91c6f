"""Static analysis of a module's code: the values that it reads besides its arguments.

It reads bytecode and runs nothing. A kernel computes the same as the code only while these values
are as they were when the module was recognised. Code is refused if it reads values that cannot be
compared, such as a list or an object of an unknown class, or if it has side effects.
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module

from kprof.kernels.swap.patches import MARK, Path, content_of, paths_in

ABSENT = object()
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
# Attributes that `torch.nn.Module` gives to every instance.
OF_MODULES = frozenset(Module().__dict__)
# Builtins of Python without side effects, which depend on their arguments alone.
PURE = frozenset(
    (
        *("abs", "all", "any", "bool", "bytes", "dict", "divmod", "enumerate"),
        *("filter", "float", "frozenset", "getattr", "hasattr", "int", "isinstance"),
        *("issubclass", "iter", "len", "list", "map", "max", "min"),
        *("next", "pow", "range", "repr", "reversed", "round", "set"),
        *("slice", "sorted", "str", "sum", "super", "tuple", "type"),
        *("zip", "NotImplemented", "Ellipsis", "True", "False", "None"),
    )
)
# Modules whose functions and constants are pure.
PURE_MODULES = ("math", "operator", "typing", "typing_extensions", "collections.abc")
# Modules of torch that define functions of tensors.
TORCH = (
    *("torch", "torch.functional", "torch.nn.functional", "torch.special", "torch.fft"),
    *("torch.linalg", "torch._tensor", "torch._jit_internal", "torch.utils._contextlib"),
)
TYPES_OF_TORCH = (
    "torch.amp",
    "torch.autograd.grad_mode",
    "torch.cuda.amp",
    "torch.nn",
    "torch.types",
)
# Methods of `torch.nn.Module`, and not of tensors, that read or change several attributes.
OF_ALL = frozenset(
    (
        *("add_module", "apply", "buffers"),
        *("children", "eval", "get_buffer"),
        *("get_parameter", "get_submodule", "load_state_dict"),
        *("modules", "named_buffers", "named_children"),
        *("named_modules", "named_parameters", "parameters"),
        *("register_backward_hook", "register_buffer", "register_forward_hook"),
        *(
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        ),
        *("register_module", "register_parameter", "set_extra_state"),
        *("set_submodule", "state_dict", "train"),
        *("zero_grad",),
    )
)
# Methods of tensors with side effects.
OF_TENSORS = frozenset(
    ("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
)
# Methods that are called without their name.
IMPLICIT = ("__bool__", "__contains__", "__getitem__", "__iter__", "__len__")
# Libraries whose constants do not change.
LIBRARIES = ("torch", "math", "operator", "typing")
DYNAMIC = frozenset(("getattr", "vars", "__dict__", "__getattribute__", "__getattr__"))
# Names by which code reaches its class.
OF_CLASSES = frozenset(("type", "__class__"))
SIZES = frozenset(("dim", "len", "ndim", "nelement", "numel", "shape", "size", "stride"))
WRITES = "its forward writes attributes"
FORBIDDEN = {
    "STORE_ATTR": WRITES,
    "DELETE_ATTR": WRITES,
    "STORE_GLOBAL": "its forward writes a global variable",
    "DELETE_GLOBAL": "its forward writes a global variable",
    "IMPORT_NAME": "its forward imports",
    "LOAD_BUILD_CLASS": "its forward defines a class",
}
CHANGED = "what its code reads has changed since it was recognised"
COMPARES = "its code compares sizes: it may compute something else for others"


class UnclearError(Exception):
    """Code that cannot be analysed; the text says why."""


class Read(NamedTuple):
    """One value that code reads, and where it is."""

    namespace: Any
    """A mapping, or an object with this attribute."""
    name: str
    value: object

    def is_as_it_was(self) -> bool:
        """Return whether it still has that value."""
        namespace = self.namespace
        if isinstance(namespace, (dict, types.MappingProxyType)):
            now = namespace.get(self.name, ABSENT)
            # A replacement by a swap calls the original function.
            return now is self.value or (hasattr(now, MARK) and now.__wrapped__ is self.value)
        return getattr(namespace, self.name, ABSENT) is self.value


class Number(NamedTuple):
    """A plain number that code reads from an attribute of a module."""

    path: tuple[str, ...]
    """The names of the children that lead to the module."""
    name: str
    value: int | float

    @property
    def title(self) -> str:
        """The dotted name in the code of the module."""
        return ".".join((*self.path, self.name))


@dataclass
class Reads:
    """The values that code reads, and that must not change while a kernel runs in its place."""

    own: list[tuple[str, object]] = field(default_factory=list)
    """Plain attributes and functions of the module itself: compared at each call."""
    empty: list[str] = field(default_factory=list)
    """Parameters and buffers of the module itself that are None: compared at each call."""
    inherited: list[str] = field(default_factory=list)
    """Attributes that the module has from its class: compared at each entry."""
    others: list[Read] = field(default_factory=list)
    """Plain values elsewhere: compared at each call."""
    cells: list[tuple[str, types.CellType, object]] = field(default_factory=list)
    """Variables of enclosing functions: compared at each call."""
    defined: list[Read] = field(default_factory=list)
    """Functions, classes and other definitions: compared at each entry."""
    numbers: list[Number] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Names of all attributes that the code mentions, of any object."""

    def why_changed(self, owner: Module | None) -> str | None:
        """Return which value has changed since the code was analysed; None: none."""
        own: list[Read] = []
        if owner is not None:
            own += [Read(owner.__dict__, name, value) for name, value in self.own]
            own += [Read(owner.__dict__, name, ABSENT) for name in self.inherited]
            own += [Read(owner, name, None) for name in self.empty]
        for one in (*own, *self.others, *self.defined):
            if not one.is_as_it_was():
                return f"{one.name} has changed since it was recognised"
        for name, cell, value in self.cells:
            if content_of(cell) is not value:
                return f"{name} has changed since it was recognised"
        return None


def reads_of_module(
    module: Module, *, taken: Collection[str] = (), leaves: Collection[Module] = ()
) -> Reads | str:
    """Return what the forward of a module and its children reads, or why this is not known.

    Args:
        module: The module.
        taken: Parameters that the kernel takes, and attributes that are read at each call.
        leaves: Children that still run when the kernel does, and are not analysed.
    """
    modules = list(_modules_of(module, leaves, ()))
    scan = _Scan([one for _, one in modules])
    try:
        for path, one in modules:
            scan.follow_forward(one, is_root=not path)
        _follow_attributes(scan, modules, taken)
    except UnclearError as why:
        return str(why)
    return scan.reads


def reads_of_function(function: object, *, may_compare: bool = False) -> Reads | str:
    """Return what a function reads besides its arguments, or why this is not known.

    `may_compare`: it may compare by order; its caller has to know that it compares no sizes.
    """
    scan = _Scan(may_compare=may_compare)
    try:
        scan.follow(function, getattr(function, "__name__", "it"))
    except UnclearError as why:
        return str(why)
    return scan.reads


def why_effects(module: Module) -> str | None:
    """Return which side effect a run of a module's forward may have; None: none.

    Gradients that code decides on itself, by a `torch.autograd.Function`, are one.

    Its children and its own attributes do not count: a stand-in has others.
    """
    scan = _Scan([module], is_for_effects=True)
    done: set[str] = set()
    try:
        scan.follow_defined(type(module), "forward", "forward")
        while names := set(scan.reads.names) - done:
            done |= names
            for name in sorted(names - set(module.__dict__)):
                scan.follow_methods(type(module), name)
    except UnclearError as why:
        return str(why)
    return None


def names_in_class(cls: type[Module]) -> frozenset[str] | None:
    """Return the names that the code of a class loads; None: it may load any name."""
    found: set[str] = set()
    for one in _above_module(cls):
        for name, value in vars(one).items():
            if name not in ("__init__", "extra_repr", "reset_parameters"):
                for function in functions_of(value):
                    found |= _names_loaded(function.__code__)
    return None if found & DYNAMIC else frozenset(found)


def value_key(value: object) -> Hashable:
    """Return a key of a value: the value itself if it is plain, else its identity."""
    if isinstance(value, tuple):
        return (type(value), *map(value_key, value))
    return (type(value), repr(value)) if isinstance(value, PLAIN) else id(value)


def is_plain(value: object) -> bool:
    """Return whether a value is immutable, and equality compares all of it."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def _above_module(cls: type) -> list[type]:
    """Return a class and its bases below `torch.nn.Module`."""
    return [one for one in cls.__mro__ if one not in (Module, object)]


def _modules_of(
    module: Module, leaves: Collection[Module], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not any(child is one for one in leaves):
            yield from _modules_of(child, leaves, (*path, name))


class _Scan:
    """Follows code from function to function, and collects the values that it reads."""

    def __init__(
        self,
        modules: Collection[Module] = (),
        *,
        is_for_effects: bool = False,
        may_compare: bool = False,
    ) -> None:
        """Collect what is read; with `is_for_effects`, look for side effects only."""
        self.reads = Reads()
        self._is_for_effects = is_for_effects
        self._may_compare = is_for_effects or may_compare
        self._modules = modules
        self._seen: set[int] = set()

    def follow_forward(self, module: Module, *, is_root: bool) -> None:
        """Follow the forward of a module's class."""
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise UnclearError(f"{cls.__name__} is compiled by TorchScript")
        if not is_root and "forward" in module.__dict__:
            raise UnclearError(f"the forward of its {cls.__name__} was replaced")
        if not is_root and cls.__call__ is not Module.__call__:
            raise UnclearError(f"{cls.__name__} has a __call__ of its own")
        if any({"__getattr__", "__getattribute__"} & set(vars(one)) for one in _above_module(cls)):
            raise UnclearError(f"{cls.__name__} finds attributes in a way of its own")
        self.follow_defined(cls, "forward", f"{cls.__name__}.forward")
        for name in IMPLICIT:
            function = getattr(cls, name, None)
            if not str(getattr(function, "__module__", "")).startswith("torch."):
                self.follow_defined(cls, name, name)

    def follow_defined(self, cls: type[Module], name: str, title: str) -> None:
        """Follow the definitions of this name in a class and its bases."""
        found = getattr(cls, name, ABSENT)
        if found is getattr(Module, name, ABSENT):
            return
        self.defined(cls, name, found)
        is_first = True
        for one in _above_module(cls):
            # Later ones are reached by `super()`.
            if name in vars(one):
                if is_first or "super" in self.reads.names or name == "forward":
                    self._follow_class_value(vars(one)[name], title)
                is_first = False

    def follow_methods(self, cls: type[Module], name: str) -> None:
        """Follow the methods of this name in a class and its bases."""
        for one in _above_module(cls):
            for function in functions_of(vars(one).get(name)):
                self.follow(function, name)

    def _follow_class_value(self, value: object, title: str) -> None:
        if isinstance(value, classmethod):
            raise UnclearError(f"its code calls {title}, a method of its class")
        functions = list(functions_of(value))
        for function in functions:
            self.follow(function, title)
        if not functions and not is_plain(value):
            follow_object(self, value, title)

    def defined(self, namespace: Any, name: str, value: object) -> None:
        """Record a definition."""
        self.reads.defined.append(Read(namespace, name, value))

    def follow(self, value: object, title: str) -> None:
        """Follow a callable, or raise that it cannot be followed."""
        if isinstance(value, functools.partial):
            bound = [one for one in (*value.args, *value.keywords.values()) if not is_plain(one)]
            if bound:
                raise UnclearError(f"its code binds a {type(bound[0]).__name__} to {title}")
            value = value.func
        if isinstance(value, types.MethodType):
            if not any(value.__self__ is one for one in self._modules):
                raise UnclearError(f"its code calls {title} of a {type(value.__self__).__name__}")
            value = value.__func__
        if _is_of_torch(value) or _is_pure(value):
            return
        if not isinstance(value, types.FunctionType):
            raise UnclearError(
                f"its code calls {title}, a {type(value).__name__} that is not known"
            )
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._follow_function(value)

    def _follow_function(self, function: types.FunctionType) -> None:
        package = str(function.__globals__.get("__name__"))
        if package.startswith("torch._dynamo"):
            raise UnclearError("its forward is compiled by torch.compile")
        self.defined(function, "__code__", function.__code__)
        self.defined(function, "__defaults__", function.__defaults__)
        self.defined(function, "__kwdefaults__", function.__kwdefaults__)
        is_library = package in TORCH or (self._is_for_effects and _is_library(package))
        if not is_library:
            self._follow_code(function.__code__, function.__globals__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            value = content_of(cell)
            if name == "__class__":
                continue
            self.reads.cells.append((name, cell, value))
            self._follow_value(value, name)

    def _follow_code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self.reads.names |= _names_loaded(code)
        for one in _codes_in(code):
            _check_instructions(
                one, is_for_effects=self._is_for_effects, may_compare=self._may_compare
            )
            for path in paths_in(one):
                self._follow_path(path, names)

    def _follow_path(self, path: Path, names: dict[str, Any]) -> None:
        """Follow a chain of attributes that begins with a global name."""
        if path[0] not in names:
            if path[0] not in PURE and not _is_error(getattr(builtins, path[0], None)):
                raise UnclearError(f"its code calls {path[0]}")
            self.defined(names, path[0], ABSENT)
            return
        namespace, depth, value = self._reached(path, names)
        if isinstance(value, types.ModuleType):
            return
        owner = str(namespace.get("__name__"))
        is_found = is_plain(value) and path[depth] in namespace
        if is_found and owner.partition(".")[0] not in LIBRARIES:
            self.reads.others.append(Read(namespace, path[depth], value))
        elif owner not in PURE_MODULES:
            if isinstance(value, types.FunctionType) and len(path) > depth + 1:
                raise UnclearError(f"it reads {'.'.join(path)}, which may change")
            self._follow_value(value, ".".join(path[: depth + 1]))

    def _reached(self, path: Path, names: dict[str, Any]) -> tuple[dict[str, Any], int, object]:
        """Return namespace, depth and value of the first element of a path that is not a module."""
        value: Any = names[path[0]]
        self.defined(names, path[0], value)
        for depth, name in enumerate(path[1:], 1):
            if not isinstance(value, types.ModuleType):
                return names, depth - 1, value
            names, value = vars(value), getattr(value, name, ABSENT)
            self.defined(names, name, names.get(name, ABSENT))
        return names, len(path) - 1, value

    def _follow_value(self, value: object, title: str) -> None:
        if self._is_for_effects and isinstance(value, type) and issubclass(value, Function):
            raise UnclearError(f"its code names {value.__name__}, a torch.autograd.Function")
        if is_plain(value) or (self._is_for_effects and isinstance(value, (Tensor, type))):
            return
        if isinstance(value, Tensor):
            raise UnclearError(f"it reads {title}, a tensor, which the kernel does not take")
        if isinstance(value, type) and not _is_of_torch(value) and not _is_error(value):
            raise UnclearError(f"its code makes a {value.__name__}")
        if not callable(value):
            raise UnclearError(f"it reads {title}, a {type(value).__name__}, which may change")
        self.follow(value, title)


def _follow_attributes(
    scan: _Scan, modules: list[tuple[tuple[str, ...], Module]], taken: Collection[str]
) -> None:
    """Resolve the attribute names that code loads in its modules; methods add further names."""
    done: set[str] = set()
    while names := set(scan.reads.names) - done:
        done |= names
        for path, module in modules:
            every = set(module.__dict__) - OF_MODULES if names & DYNAMIC else set()
            for name in sorted(names | every):
                if path or name not in taken:
                    _follow_attribute(scan, path, module, name)
    for path, module in modules:
        _follow_tensors(scan, path, module, () if path else taken)


def _follow_tensors(
    scan: _Scan, path: tuple[str, ...], module: Module, taken: Collection[str]
) -> None:
    for kind, own in (("a parameter", module._parameters), ("a buffer", module._buffers)):
        for name, one in own.items():
            if one is None and name not in taken and path:
                scan.reads.others.append(Read(own, name, None))
            elif one is None:
                scan.reads.empty += [] if name in taken else [name]
            elif name not in taken and (name in scan.reads.names or scan.reads.names & DYNAMIC):
                title = ".".join((*path, name))
                raise UnclearError(f"it reads {title}, {kind} that the kernel does not take")


def _follow_attribute(scan: _Scan, path: tuple[str, ...], module: Module, name: str) -> None:
    if name in module.__dict__:
        if name not in OF_MODULES:
            _follow_own(scan, path, module, name)
        return
    if name in module._parameters or name in module._buffers or name in module._modules:
        return
    value = getattr(type(module), name, ABSENT)
    if value is not ABSENT and value is not getattr(Module, name, ABSENT):
        _follow_inherited(scan, path, module, name)
    elif value is not ABSENT and name in OF_ALL:
        raise UnclearError(f"its code calls {name}")


def _follow_inherited(scan: _Scan, path: tuple[str, ...], module: Module, name: str) -> None:
    title, value = ".".join((*path, name)), getattr(type(module), name)
    if path:
        scan.defined(module.__dict__, name, ABSENT)
    else:
        scan.reads.inherited.append(name)
    if is_plain(value):
        owner = next(one for one in type(module).__mro__ if name in vars(one))
        scan.reads.others.append(Read(vars(owner), name, value))
    if _is_number(value):
        if scan.reads.names & OF_CLASSES:
            raise UnclearError(f"it reads {title} of its class, which the kernel does not take")
        scan.reads.numbers.append(Number(path, name, value))
    scan.follow_defined(type(module), name, title)


def _follow_own(scan: _Scan, path: tuple[str, ...], module: Module, name: str) -> None:
    reads, value = scan.reads, module.__dict__[name]
    if path:
        reads.others.append(Read(module.__dict__, name, value))
    else:
        reads.own.append((name, value))
    if _is_number(value):
        reads.numbers.append(Number(path, name, value))
    if not is_plain(value):
        follow_object(scan, value, ".".join((*path, name)))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def follow_object(scan: _Scan, value: object, title: str) -> None:
    """Follow an attribute that is not a plain value."""
    if isinstance(value, (Tensor, Module, list, dict, set)):
        kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UnclearError(f"it reads {title}, {kind}, which the kernel does not take")
    if callable(value) or not hasattr(value, "__dict__"):
        if isinstance(value, type) and not _is_of_torch(value):
            raise UnclearError(f"its code makes a {value.__name__}")
        scan.follow(value, title)
        return
    for name in sorted(scan.reads.names):
        if name in vars(value):
            if not is_plain(vars(value)[name]):
                kind = type(vars(value)[name]).__name__
                raise UnclearError(f"it reads {title}.{name}, a {kind}, which may change")
            scan.reads.others.append(Read(vars(value), name, vars(value)[name]))
        elif hasattr(type(value), name) and not hasattr(object, name) and not hasattr(Tensor, name):
            raise UnclearError(f"its code calls {name} of {title}")


def functions_of(value: object) -> Iterator[types.FunctionType]:
    """Yield the functions that run when a class attribute with this value is used."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.cached_property):
        value = value.func
    if isinstance(value, types.FunctionType):
        yield value


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


@functools.lru_cache(maxsize=4096)
def _names_loaded(code: types.CodeType) -> frozenset[str]:
    """Return the attribute names that code loads, and strings that may be attribute names."""
    found: set[str] = set()
    for one in _codes_in(code):
        found |= {name for name in one.co_consts if isinstance(name, str) and name.isidentifier()}
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                found.add(str(instruction.argval))
            elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found |= {str(instruction.argval)} & (DYNAMIC | OF_CLASSES)
    return frozenset(found)


def _check_instructions(code: types.CodeType, *, is_for_effects: bool, may_compare: bool) -> None:
    """Raise if code has side effects, or branches on sizes of tensors.

    `is_for_effects`: writes to its own objects are allowed. `may_compare`: branches are.
    """
    names = set(code.co_names)
    effects = sorted(names & OF_TENSORS)
    if effects:
        raise UnclearError(f"its code calls {effects[0]}")
    forbidden, is_ordering = _instructions_of(code)
    for why in forbidden:
        if not (is_for_effects and why == WRITES):
            raise UnclearError(why)
    if not may_compare and is_ordering and names & SIZES:
        raise UnclearError(COMPARES)


@functools.lru_cache(maxsize=4096)
def _instructions_of(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """Return the forbidden operations of code, and whether it compares by order."""
    found, is_ordering = [], bool({"min", "max"} & set(code.co_names))
    for one in dis.get_instructions(code):
        if one.opname in FORBIDDEN:
            found.append(FORBIDDEN[one.opname])
        if one.opname in ("STORE_DEREF", "DELETE_DEREF") and one.argval in code.co_freevars:
            found.append(f"its code writes {one.argval}, a variable of an enclosing function")
        is_ordering |= one.opname == "COMPARE_OP" and bool(set(str(one.argval)) & set("<>"))
    return tuple(found), is_ordering


def _is_of_torch(value: object) -> bool:
    """Return whether this is a function of tensors, a type or a constant of torch."""
    if isinstance(value, types.FunctionType):
        return value.__globals__.get("__name__") in TORCH and not value.__closure__
    module = str(getattr(value, "__module__", None) or "")
    if isinstance(value, type):
        return module == "torch" or module.startswith(TYPES_OF_TORCH)
    if isinstance(value, types.MethodDescriptorType):
        return value.__objclass__.__module__ == "torch._C"
    if isinstance(value, types.BuiltinFunctionType):
        is_setting = value.__name__.lstrip("_").startswith(("set_", "clear_"))
        return not is_setting and (module == "torch" or module.startswith("torch._C"))
    return isinstance(value, (torch.finfo, torch.iinfo, torch.memory_format, torch.layout))


def _is_library(package: str) -> bool:
    """Return whether code of a package has no side effects outside of its module."""
    return package.partition(".")[0] in ("torch", "transformers")


def _is_pure(value: object) -> bool:
    if _is_error(value):
        return True
    name = getattr(value, "__name__", None)
    module = str(getattr(value, "__module__", None))
    if isinstance(value, types.BuiltinFunctionType):
        return module in PURE_MODULES or (module == "builtins" and name in PURE)
    if isinstance(value, type):
        return module == "builtins" or module in PURE_MODULES
    return module in PURE_MODULES


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
