"""Names of C++ kernels without what all of them share, for tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

# PyTorch's launchers: the functor that they launch tells more than they do, so it comes first.
LAUNCHERS = {
    "elementwise_kernel",
    "elementwise_kernel_with_index",
    "index_elementwise_kernel",
    "multi_tensor_apply_kernel",
    "reduce_kernel",
    "unrolled_elementwise_kernel",
    "vectorized_elementwise_kernel",
    "vectorized_templated_elementwise_kernel",
}
# Templates that only pass on one of their arguments, and its place.
PASSED_ON = {"gpu_kernel_impl": 0, "gpu_kernel_impl_nocast": 0, "func_wrapper_t": 1, "ReduceOp": 1}
# Arguments that say how pointers and offsets are passed.
BOILERPLATE = {
    "array",
    "FusedOptimizerTensorListMetadata",
    "LoadWithCast",
    "LoadWithoutCast",
    "OffsetCalculator",
    "StoreWithCast",
    "StoreWithoutCast",
    "TensorListMetadata",
    "TensorListScalarListMetadata",
    "TrivialOffsetCalculator",
}
_OPEN, _CLOSE = "<([{", ">)]}"
_QUALIFIERS = re.compile(r"\b(?:const|volatile)\b|[*&]")
_CAST = re.compile(r"^\([^()]*\)(-?\d+)\w*$")
# A function outside all namespaces, with its parameters: `Fan2(float *, int)`.
_PLAIN_FUNCTION = re.compile(r"^[A-Za-z_]\w*\([^()]*\)$")
_NUMBER = re.compile(r"^(-?\d+)[uUlL]*$")
_CLOSURE = re.compile(r"^[{\['](?:lambda|unnamed)|^operator\(\)")
_LAMBDA = re.compile(r"lambda\((.*)\)")
_NO_NAMESPACE = re.compile(r"^(?:\(anonymous namespace\)|<unnamed>|_GLOBAL__N__\w*)$")
_NAMESPACES = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\b[a-z_]\w*::")
# Longer ones are cut anyway, and a name may nest as deep as its file is long.
LONGEST_READ = 4000
MOST_NESTED = 50


@lru_cache(maxsize=4096)
def readable(name: str) -> str:
    """Return a C++ kernel's name without result, namespaces, parameters and boilerplate.

    Of PyTorch's launchers the functor stands first: `CUDAFunctor_add<float> · elementwise_kernel`.
    Any other name is returned as it is.
    """
    is_function = name.startswith("void ") or ("::" in name and ("<" in name or ")" in name))
    is_function = is_function or bool(_PLAIN_FUNCTION.match(name))
    if not is_function or len(name) > LONGEST_READ:
        return name
    text = name.removeprefix("void ")
    if not _is_balanced(text):
        # A recorder cut it off.
        return _NAMESPACES.sub("", text)
    base, arguments = _parse(text)
    numbers = [one for one in arguments if _NUMBER.match(one)]
    others = [one for one in arguments if not _NUMBER.match(one)]
    if base in LAUNCHERS and others:
        return f"{others[0]} · {_joined(base, numbers)}"
    return _joined(base, arguments) or name


def _joined(base: str, arguments: list[str]) -> str:
    return f"{base}<{', '.join(arguments)}>" if arguments else base


def _is_balanced(text: str) -> bool:
    """Tell whether brackets match, and do not nest without end."""
    depth = 0
    for at, character in enumerate(text):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE and text[at - 1 : at + 1] != "->":
            depth -= 1
        if not 0 <= depth <= MOST_NESTED:
            return False
    return depth == 0


def _pieces(text: str, separator: str) -> Iterator[str]:
    """Split where the separator stands outside of all brackets."""
    depth, start, at = 0, 0, 0
    while at < len(text):
        if text[at] in _OPEN:
            depth += 1
        elif text[at] in _CLOSE and text[at - 1 : at + 1] != "->":
            depth -= 1
        elif not depth and text.startswith(separator, at):
            yield text[start:at]
            start = at + len(separator)
            at = start - 1
        at += 1
    yield text[start:]


def _parse(text: str) -> tuple[str, list[str]]:
    """Return the last name of a qualified one, and its template arguments, made readable."""
    parts = [one.strip() for one in _pieces(text, "::")]
    parts = [one for one in parts if not _NO_NAMESPACE.match(one)]
    first = next((i for i, one in enumerate(parts) if _CLOSURE.match(one)), len(parts))
    named, closure = parts[:first], parts[first:]
    if not named:
        return "lambda", []
    # A member of a class template is told apart by it.
    before = named[-2] if len(named) > 1 and "<" in named[-2] else ""
    base, arguments = _template(named[-1])
    if before:
        outer, of_outer = _template(before)
        base = f"{_joined(outer, _shown(of_outer))}::{base}"
    types = _LAMBDA.search(closure[-1]) if closure and not arguments else None
    if types is not None and types[1]:
        taken = ", ".join(_without_repeats([_argument(one) for one in _pieces(types[1], ",")]))
        base = f"{base}({taken})"
    return base, _shown(arguments)


def _template(text: str) -> tuple[str, list[str]]:
    """Split `name<a, b>(parameters)` into its name and its arguments."""
    start = text.find("<")
    paren = text.find("(")
    if start < 0 or 0 <= paren < start:
        return text[:paren].strip() if paren > 0 else text, []
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in _OPEN) - (text[at] in _CLOSE and text[at - 1 : at + 1] != "->")
        if not depth:
            return text[:start].strip(), list(_pieces(text[start + 1 : at], ","))
    return text[:start], []


def _shown(arguments: list[str]) -> list[str]:
    found = [one for one in map(_argument, arguments) if one]
    return _without_repeats(found)


def _argument(text: str) -> str:
    """Return one argument made readable; empty for boilerplate."""
    plain = text.strip()
    if cast := _CAST.match(plain):
        return cast[1]
    plain = _QUALIFIERS.sub("", plain).strip() if "(" not in plain else plain
    if number := _NUMBER.match(plain):
        return number[1]
    base, raw = _template(list(_pieces(plain, "::"))[-1].strip())
    if base in BOILERPLATE:
        return ""
    place = PASSED_ON.get(base, len(raw))
    parts = [part.strip() for part in _pieces(plain, "::")]
    is_closure = any(_CLOSURE.match(part) for part in parts)
    if is_closure:
        named = [part for part in parts if not _CLOSURE.match(part)]
        base, raw = _template(named[-1]) if named else (base, raw)
        place = PASSED_ON.get(base, len(raw))
    if place < len(raw):
        return _argument(raw[place])
    return _joined(*_parse(plain))


def _without_repeats(arguments: list[str]) -> list[str]:
    """Return a type that follows itself once; numbers stay."""
    return [
        one
        for i, one in enumerate(arguments)
        if not i or one != arguments[i - 1] or _NUMBER.match(one) or one in ("true", "false")
    ]
