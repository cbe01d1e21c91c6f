"""What a kernel's name says: the function, the scopes around it and its template arguments.

A name is that of a plain function (Triton, assembly), a C++ function with or without its
signature, or mangled by the Itanium ABI. Return type and parameters tell nothing of the work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_OPENING, _CLOSING = "<({[", {">": "<", ")": "(", "}": "{", "]": "["}
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\(anonymous\)::|<unnamed>::|_GLOBAL__N__?\w*::")
_OPERATOR = re.compile(r"operator(\(\)|\[\]|<<?=?|>>?=?|->)")
_LENGTH = re.compile(r"\d+")
_ROCM_SUFFIX = ".kd"  # of a kernel's descriptor
# The CuTe DSL puts a fixed word before module and class, and the types of arguments behind them.
_CUTE_PREFIX, _CUTE_TYPES = "kernel_cutlass_kernel_", "_object_at_"
# The type of the operands, which MTIA's names end in: fc-dtype_Float, cat.out-dtype_Long-extraKey_1
_OPERANDS = re.compile(r"-dtype_\w+(-\w+)*$")


@dataclass(frozen=True)
class KernelName:
    """The parts of a kernel's name that tell what it does."""

    function: str
    """Without scopes, arguments and parameters."""
    scopes: str
    """Namespaces and classes around it, joined by `::`."""
    arguments: str
    """Template arguments of the function, without the parameter lists in them."""


@lru_cache(maxsize=65536)
def parse(name: str) -> KernelName:
    """Take a kernel's name apart; one that was cut off is read as far as it goes."""
    name = name.removesuffix(_ROCM_SUFFIX)
    if name.startswith("_Z"):
        return _mangled(name)
    if name.startswith(_CUTE_PREFIX):
        return KernelName(name.removeprefix(_CUTE_PREFIX).split(_CUTE_TYPES)[0], "", "")
    text = _OPERANDS.sub("", _OPERATOR.sub("operator", _ANONYMOUS.sub("", name)))
    text = text.replace("->", " ")
    outside, groups = _outermost(text)
    words = outside.split()
    qualified = words[-1] if words else name
    scopes, _, function = qualified.rpartition("::")
    # The arguments that stand after the last scope are those of the function.
    at = outside.rfind(function) if function else 0
    arguments = " ".join(inside for place, inside in groups if place >= at)
    return KernelName(function or name, scopes, _without_parameters(arguments))


def _outermost(text: str) -> tuple[str, list[tuple[int, str]]]:
    """Return the text outside of brackets, and what stands in `<>`, with its place in that text.

    The text ends with the parameters.
    """
    kept: list[str] = []
    groups: list[tuple[int, str]] = []
    open_brackets: list[str] = []
    begin = 0
    for place, character in enumerate(text):
        if character in _OPENING:
            if not open_brackets:
                begin = place + 1
                if character == "(" and kept:
                    break
            open_brackets.append(character)
        elif open_brackets and open_brackets[-1] == _CLOSING.get(character):
            open_brackets.pop()
            if not open_brackets and character == ">":
                groups.append((len(kept), text[begin:place]))
        elif not open_brackets:
            kept.append(character)
    # A name that was cut off lacks the ends of its brackets.
    cut_off = [(len(kept), text[begin:])] if open_brackets[:1] == ["<"] else []
    return "".join(kept), groups + cut_off


def _without_parameters(arguments: str) -> str:
    """Return template arguments without what stands in parentheses."""
    kept, depth = [], 0
    for character in arguments:
        depth += character == "("
        if not depth:
            kept.append(character)
        depth -= character == ")" and depth > 0
    return "".join(kept)


def _mangled(name: str) -> KernelName:
    """Return the parts of a mangled name: its source names are preceded by their lengths."""
    place = 3 if name.startswith("_ZN") else 2
    parts: list[str] = []
    while found := _LENGTH.match(name, place):
        place = found.end() + int(found[0])
        parts.append(name[found.end() : place])
        if not name.startswith("_ZN"):
            break
    parts = [part for part in parts if not part.startswith("_GLOBAL__N")]
    if not parts:
        return KernelName(name, "", "")
    rest: list[str] = []
    while (found := _LENGTH.search(name, place)) is not None:
        length = int(found[0])
        text = name[found.end() : found.end() + length]
        # Digits of a literal or of a substitution have no name behind them.
        is_name = 1 < length == len(text) and text.isidentifier() and not text.isdigit()
        place = found.end() + (length if is_name else 0)
        if is_name:
            rest.append(text)
    return KernelName(parts[-1], "::".join(parts[:-1]), " ".join(rest))
