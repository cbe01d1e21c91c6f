"""Patched copies of a function for one module, with detection of patches by other code.

A forward calls functions by global names (`apply_rotary_pos_emb`, `F.cross_entropy`) that belong to
the whole process. A copy of the forward with its own globals replaces them for one module; other
calls are unchanged, and torch.compile reads the copy as it reads the original. A copy with other
statements is compiled from the changed syntax tree of the source. A swap does not patch a module
that other code has patched.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import types
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module, functional
from torch.nn.modules import module as _GLOBAL

# Functions of torch that kernels replace, as they were when a swap was imported. Other code may
# patch them later; what it puts there is not torch's, and is not swapped.
TORCHS = types.SimpleNamespace(
    attention=functional.scaled_dot_product_attention,
    cross_entropy=functional.cross_entropy,
    cross_entropy_module=torch.nn.CrossEntropyLoss,
    rms_norm=functional.rms_norm,
    layer_norm=functional.layer_norm,
)
# A function and the names by which the code reaches it: ("F", "cross_entropy").
Path = tuple[str, ...]


def calls_in(function: Callable[..., Any]) -> Iterator[tuple[Path, object]]:
    """Yield the path and value of what a function reaches from global names, without modules."""
    inner = innermost(function)
    if inner is None:
        return
    seen: set[Path] = set()
    for path in paths_in(inner.__code__):
        value = inner.__globals__.get(path[0])
        for length in range(1, len(path) + 1):
            if length > 1:
                if not isinstance(value, types.ModuleType):
                    break
                value = getattr(value, path[length - 1], None)
            if path[:length] not in seen and not isinstance(value, types.ModuleType):
                seen.add(path[:length])
                yield path[:length], value


def innermost(function: Any) -> types.FunctionType | None:
    """Return the function inside its decorators; None if a decorator hides it."""
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        if not any(content_of(cell) is inner for cell in function.__closure__ or ()):
            return None
        function = inner
    return function if isinstance(function, types.FunctionType) else None


def functions_reached(
    function: types.FunctionType, module: Module | None = None
) -> Iterator[types.FunctionType | None]:
    """Yield the functions that one reaches, and methods of a module; None: one that is hidden.

    Torch's are left out: they say in their names that they write.
    """
    new, seen = [function], {function.__code__}
    while new:
        one = new.pop()
        found = [value for _, value in calls_in(one)]
        found += [content_of(cell) for cell in one.__closure__ or ()]
        for name in () if module is None else one.__code__.co_names:
            found += [vars(cls).get(name) for cls in type(module).__mro__]
            found.append(module.__dict__.get(name))
        for value in found:
            reached = getattr(value, "__func__", value)
            is_torchs = str(getattr(reached, "__module__", "")).startswith("torch.")
            if not isinstance(reached, types.FunctionType) or is_torchs:
                continue
            inner = innermost(reached)
            if inner is None:
                yield None
            elif inner.__code__ not in seen:
                seen.add(inner.__code__)
                new.append(inner)
                yield inner


def why_not_patched(function: Callable[..., Any]) -> str | None:
    """Return why a copy with its own globals would not behave as the function; None: it would."""
    inner = innermost(function)
    if inner is None:
        return "its forward is wrapped by a decorator that hides it"
    names = {instruction.opname for instruction in dis.get_instructions(inner.__code__)}
    if names & {"STORE_GLOBAL", "DELETE_GLOBAL"}:
        return "its forward writes a global variable"
    if "IMPORT_NAME" in names:
        return "its forward imports"
    if "LOAD_BUILD_CLASS" in names:
        return "its forward defines a class"
    found = {"eval", "exec", "globals"} & set(names_in(inner.__code__))
    return f"its forward calls {min(found)}" if found else None


class Patched:
    """A copy of a function that calls replacements of some functions."""

    def __init__(self, function: Callable[..., Any], others: Mapping[Path, object]) -> None:
        inner = innermost(function)
        assert inner is not None
        self._original, self._others = inner.__globals__, others
        self._globals = dict(inner.__globals__)
        # Without `__name__`, compilers look names up here instead of in that module.
        self._globals.pop("__name__", None)
        self._names = set(names_in(inner.__code__))
        self._put_others()
        self.function = _with_globals(function, inner, self._globals)
        """For torch.compile: its other globals are those of the last `refresh`."""
        self._live = self._live_globals(inner.__code__)
        self.live = _with_globals(function, inner, self._live)
        """For all other calls: its other globals are looked up where the original does."""
        # A function keeps the builtins of its creation. C code that imports, such as torch's
        # anomaly detection, looks `__import__` up in the current ones.
        if self._live["__builtins__"] is self._original:
            self._live["__builtins__"] = builtins

    def _put_others(self) -> None:
        for path, other in self._others.items():
            value = other
            for depth in range(len(path) - 1, 0, -1):
                value = _namespace(_reached(self._globals, path[:depth]), path[depth], value)
            self._globals[path[0]] = value

    def _live_globals(self, code: types.CodeType) -> dict[str, Any]:
        """Return globals with the replacements, whose fallback is the original's globals."""
        roots = {path[0] for path in self._others}
        names: dict[str, Any] = {name: self._globals[name] for name in roots}
        missing = self._names - set(self._original)
        names |= {name: getattr(builtins, name) for name in missing if hasattr(builtins, name)}
        # Python looks a name up in the globals, then in their `__builtins__`.
        behind: dict[str, Any] = self._original
        if any(isinstance(one, types.CodeType) for one in code.co_consts):
            # Inner functions take the current builtins: one mapping has to hold both. A lookup in
            # it takes 80 ns longer.
            both = type("Both", (dict,), {"__missing__": self._original.__getitem__})
            behind = both(__import__=builtins.__import__)
        return {**names, "__name__": self._original.get("__name__"), "__builtins__": behind}

    def refresh(self) -> None:
        """Copy changes of the original's globals."""
        own, original = self._globals, self._original
        for name in self._names - {path[0] for path in self._others}:
            # Only other objects, so that compiled graphs stay valid.
            if name in original and own.get(name) is not original[name]:
                own[name] = original[name]
            if name in original:
                self._live.pop(name, None)

    @property
    def code(self) -> types.CodeType:
        """The code for torch.compile, whose graphs are those of all copies with this code."""
        copy = innermost(self.function)
        assert copy is not None
        return copy.__code__

    def share_graphs(self, code: types.CodeType) -> None:
        """Use the graphs of another copy of the same function.

        Its replacements must do the same: a compiler does not look at those of this copy.
        """
        copy = innermost(self.function)
        assert copy is not None
        copy.__code__ = code

    def why_changed(self, functions: Mapping[Path, object]) -> str | None:
        """Return which of these functions has been replaced since; None: none."""
        for path, function in functions.items():
            value = self._original.get(path[0])
            for name in path[1:]:
                value = getattr(value, name, None)
            # A replacement by a swap calls the original function.
            if value is not function and getattr(value, "__wrapped__", None) is not function:
                return f"{'.'.join(path)} is another function now"
        return None


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and its inner functions look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _reached(names: Mapping[str, Any], path: Path) -> Any:
    value = names[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    return value


def _namespace(module: types.ModuleType, name: str, value: object) -> types.ModuleType:
    """Return a copy of a module with one attribute replaced."""
    namespace = types.ModuleType(module.__name__)
    namespace.__dict__.update(module.__dict__)
    namespace.__dict__[name] = value
    return namespace


def _with_globals(
    function: Any, inner: types.FunctionType, names: dict[str, Any]
) -> types.FunctionType:
    """Return a copy of the inner function with these globals, inside copies of its decorators."""
    # Compilers cache graphs by code object, so the copy needs its own.
    code = inner.__code__.replace(co_name=f"{inner.__code__.co_name} (swapped)")
    copy = types.FunctionType(code, names, inner.__name__, None, inner.__closure__)
    return _in_decorators(function, inner, copy)


def _in_decorators(
    function: Any, inner: types.FunctionType, replacement: types.FunctionType
) -> types.FunctionType:
    """Return the replacement of the inner function, inside copies of the decorators."""
    if function is inner:
        copy = replacement
    else:
        wrapped = _in_decorators(function.__wrapped__, inner, replacement)
        closure = tuple(
            types.CellType(wrapped) if content_of(cell) is function.__wrapped__ else cell
            for cell in function.__closure__
        )
        code, globals_ = function.__code__, function.__globals__
        copy = types.FunctionType(code, globals_, function.__name__, None, closure)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    copy.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return the syntax tree of the function inside its decorators.

    None if its source is missing, or is not the source of the code that runs.
    """
    inner = innermost(function)
    if inner is None:
        return None
    try:
        lines, first = inspect.getsourcelines(inner)
        tree = ast.parse("if 1:\n" + "".join(lines) if lines[0][0].isspace() else "".join(lines))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    outermost = tree.body[0]
    node = outermost.body[0] if isinstance(outermost, ast.If) else outermost
    if not isinstance(node, ast.FunctionDef):
        return None
    ast.increment_lineno(node, first - (2 if node is not outermost else 1))
    return node if _same_code(_compiled(node, inner, ()), inner.__code__) else None


def rewritten(
    function: Callable[..., Any], tree: ast.FunctionDef, names: Mapping[str, object]
) -> types.FunctionType:
    """Return the function with the statements of a tree; `names` are additional variables."""
    inner = innermost(function)
    assert inner is not None
    code = _compiled(tree, inner, tuple(names))
    assert code is not None
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in names.items()})
    closure = tuple(cells[name] for name in code.co_freevars)
    copy = types.FunctionType(code, inner.__globals__, inner.__name__, None, closure)
    return _in_decorators(function, inner, copy)


def _compiled(
    tree: ast.FunctionDef, inner: types.FunctionType, names: tuple[str, ...]
) -> types.CodeType | None:
    """Compile a tree as if it stood where the inner function is defined.

    `names` become free variables, in addition to those of the inner function.
    """
    free = (*inner.__code__.co_freevars, *names)
    holder: ast.stmt = ast.FunctionDef(
        name=tree.name, args=_plain(tree.args), body=tree.body, decorator_list=[]
    )
    # Private names (`self.__x`) carry the name of the class.
    owner = inner.__qualname__.split(".")[-2:-1]
    if owner and owner[0].isidentifier():
        holder = ast.ClassDef(
            name=owner[0], bases=[], keywords=[], body=[holder], decorator_list=[]
        )
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(arg=name) for name in free],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )
    outer = ast.FunctionDef(name="outer", args=arguments, body=[holder], decorator_list=[])
    for node in (outer, holder):
        if "type_params" in node._fields:
            node.type_params = []  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    futures = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    code: types.CodeType | None = compile(
        module,
        inner.__code__.co_filename,
        "exec",
        flags=inner.__code__.co_flags & futures,
        dont_inherit=True,
    )
    while code is not None and code.co_name != tree.name:
        inside = [one for one in code.co_consts if isinstance(one, types.CodeType)]
        code = inside[0] if inside else None
    return code


def _plain(arguments: ast.arguments) -> ast.arguments:
    """Return arguments without annotations, with None for each default."""
    none = ast.Constant(value=None)

    def plain(one: ast.arg | None) -> ast.arg | None:
        return None if one is None else ast.arg(arg=one.arg)

    return ast.arguments(
        posonlyargs=[ast.arg(arg=one.arg) for one in arguments.posonlyargs],
        args=[ast.arg(arg=one.arg) for one in arguments.args],
        vararg=plain(arguments.vararg),
        kwonlyargs=[ast.arg(arg=one.arg) for one in arguments.kwonlyargs],
        kw_defaults=[None if one is None else none for one in arguments.kw_defaults],
        kwarg=plain(arguments.kwarg),
        defaults=[none for _ in arguments.defaults],
    )


def _same_code(one: types.CodeType | None, other: types.CodeType) -> bool:
    """Return whether two code objects are equal, apart from their location."""
    names = ("co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    return (
        one is not None
        and all(getattr(one, name) == getattr(other, name) for name in names)
        and len(mine := _instructions(one)) == len(theirs := _instructions(other))
        and all(
            name == other_name
            and (
                _same_code(value, other_value)
                if isinstance(value, types.CodeType) and isinstance(other_value, types.CodeType)
                else (type(value), repr(value)) == (type(other_value), repr(other_value))
            )
            for (name, value), (other_name, other_value) in zip(mine, theirs, strict=True)
        )
    )


# CPython compiles `a.b()` in another way if the file imports a; the call does the same.
_CALLS_OF_METHODS = {"LOAD_METHOD": "LOAD_ATTR"}
_OF_CALLS = ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP")


def _instructions(code: types.CodeType) -> list[tuple[str, object]]:
    """Return names and arguments of instructions; for a jump, the number of its target."""
    kept = [one for one in dis.get_instructions(code) if one.opname not in _OF_CALLS]
    offsets = [one.offset for one in kept]
    return [
        (
            _CALLS_OF_METHODS.get(one.opname, one.opname),
            bisect_left(offsets, one.argval)
            if one.opcode in (*dis.hasjrel, *dis.hasjabs)
            else one.argval,
        )
        for one in kept
    ]


def content_of(cell: types.CellType) -> object:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def paths_in(code: types.CodeType) -> Iterator[Path]:
    """Yield every chain of names that begins with a global one."""
    path: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if path:
                yield tuple(path)
            path = [str(instruction.argval)]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and path:
            path.append(str(instruction.argval))
        elif instruction.opname not in ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG"):
            if path:
                yield tuple(path)
            path = []
    if path:
        yield tuple(path)


# Attribute of every method that a swap binds.
MARK = "kprof_site"
# Packages whose modules are fused already.
FUSED = ("apex", "flash_attn", "liger_kernel", "quack", "transformer_engine", "unsloth", "xformers")


def python_modules(root: Module) -> Iterator[tuple[str, Module]]:
    """Yield a module and those below it, with names, except those compiled by TorchScript."""
    for name, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def why_foreign(module: Module) -> str | None:
    """Return why this module's forward is not the original of its class; None: it is."""
    function = _put_there(module)
    if function is not None:
        if hasattr(function, MARK):
            # A copy of a swapped module: its method runs the original.
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
    """Return whether a call of this module can be left out: no hooks, no code of its own."""
    function, cls = _put_there(module), type(module)
    return not (
        module._forward_hooks
        or cls.__call__ is not Module.__call__
        or cls._call_impl is not Module._call_impl
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
    """Return that a forward writes attributes, which a kernel would not; None: it does not."""
    inner = innermost(forward)
    if inner is None:
        return None
    names = {one.opname for one in dis.get_instructions(inner)}
    return "its forward writes attributes" if names & {"STORE_ATTR", "DELETE_ATTR"} else None


def _put_there(module: Module) -> Any:
    """Return the function that replaces the class's forward in an instance; None: none does."""
    own = module.__dict__.get("forward")
    # A swapped module that was pickled has its class's forward, bound to it.
    if own is None or own == types.MethodType(type(module).forward, module):
        return None
    return getattr(own, "__func__", own)


def has(module: Module, name: str) -> bool:
    """Return whether a module has an attribute, without running code of its class."""
    absent = object()
    is_static = inspect.getattr_static(module, name, absent) is not absent
    return is_static or name in module._parameters


def is_on(module: Module) -> bool:
    """Return whether a swap replaces this module now."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    switch = getattr(function, MARK, None)
    return switch is not None and switch.owner is module


def _origin(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}"
