"""One module's own copy of its code, in which some functions that it calls are others.

What a forward calls by a global name (`apply_rotary_pos_emb`, `F.cross_entropy`) belongs to every
module of the class, and of the process. A copy of the forward with globals of its own changes it
for one module, at no cost for its other calls, and a compiler reads it as it reads the original.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# A function and the names by which the code reaches it: ("F", "cross_entropy").
Path = tuple[str, ...]


def calls_in(function: Callable[..., Any]) -> Iterator[tuple[Path, object]]:
    """Yield what a function's code reaches from a global name, modules aside, and the names."""
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
    """Return the function within its decorators, None where they cannot be looked through."""
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        inner = function.__wrapped__
        if not any(content_of(cell) is inner for cell in function.__closure__ or ()):
            return None
        function = inner
    return function if isinstance(function, types.FunctionType) else None


def why_not_rewired(function: Callable[..., Any]) -> str | None:
    """Return why a copy with globals of its own would not do what the function does."""
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
    found = {"eval", "exec", "globals"} & set(_names_in(inner.__code__))
    return f"its forward calls {min(found)}" if found else None


class Rewired:
    """A copy of a function that calls others in the place of some."""

    def __init__(self, function: Callable[..., Any], others: Mapping[Path, object]) -> None:
        inner = innermost(function)
        assert inner is not None
        self._original, self._others = inner.__globals__, others
        self._globals = dict(inner.__globals__)
        # Without a name, compilers look names up here, and not in the module of that name.
        self._globals.pop("__name__", None)
        self._names = set(_names_in(inner.__code__))
        self._put_others()
        self.function = _copied(function, inner, self._globals)
        """For compilers: its other globals are those of the last `refresh`."""
        self._live = self._live_globals()
        self.live = _copied(function, inner, self._live)
        """For all other calls: looks its other globals up where the original does."""

    def _put_others(self) -> None:
        for path, other in self._others.items():
            value = other
            for depth in range(len(path) - 1, 0, -1):
                value = _namespace(_reached(self._globals, path[:depth]), path[depth], value)
            self._globals[path[0]] = value

    def _live_globals(self) -> dict[str, Any]:
        """Return what is replaced and builtins, behind which the original's globals are."""
        roots = {path[0] for path in self._others}
        names: dict[str, Any] = {name: self._globals[name] for name in roots}
        missing = self._names - set(self._original)
        names |= {name: getattr(builtins, name) for name in missing if hasattr(builtins, name)}
        # Python looks a name up in globals, then in what these say are builtins.
        name = self._original.get("__name__")
        return {**names, "__name__": name, "__builtins__": self._original}

    def refresh(self) -> None:
        """Take over what has changed in the original's globals."""
        own, original = self._globals, self._original
        for name in self._names - {path[0] for path in self._others}:
            # Only what is another object, so that compiled graphs stay what they are.
            if name in original and own.get(name) is not original[name]:
                own[name] = original[name]
            if name in original:
                self._live.pop(name, None)

    def why_changed(self, functions: Mapping[Path, object]) -> str | None:
        """Return which of these functions is another one now; None: none."""
        for path, function in functions.items():
            value = self._original.get(path[0])
            for name in path[1:]:
                value = getattr(value, name, None)
            # What a swap has put there calls the function that was there.
            if value is not function and getattr(value, "__wrapped__", None) is not function:
                return f"{'.'.join(path)} is another function now"
        return None


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and the functions within it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _reached(names: Mapping[str, Any], path: Path) -> Any:
    value = names[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    return value


def _namespace(module: types.ModuleType, name: str, value: object) -> types.ModuleType:
    """Return a module with the contents of another one, and one of them replaced."""
    namespace = types.ModuleType(module.__name__)
    namespace.__dict__.update(module.__dict__)
    namespace.__dict__[name] = value
    return namespace


def _copied(function: Any, inner: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """Return a copy of the inner function with these globals, in copies of its decorators."""
    code, globals_, closure = function.__code__, function.__globals__, function.__closure__
    if function is inner:
        # Compilers keep what they made with the code: the copy's must not be the original's.
        code, globals_ = code.replace(co_name=f"{code.co_name} (swapped)"), names
    else:
        wrapped = _copied(function.__wrapped__, inner, names)
        closure = tuple(
            types.CellType(wrapped) if content_of(cell) is function.__wrapped__ else cell
            for cell in closure
        )
    copy = types.FunctionType(code, globals_, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update({k: v for k, v in function.__dict__.items() if k != "__wrapped__"})
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def content_of(cell: types.CellType) -> object:
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
