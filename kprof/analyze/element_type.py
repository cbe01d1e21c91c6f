"""Element types of tensors: their sizes, with the names that recorders use."""

from __future__ import annotations

import re
from functools import lru_cache

SIZE_BYTES: dict[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp4": 0.5,
    "fp4x2": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

COMPLEX = ("complex32", "complex64", "complex128")
FLOATING = ("fp32", "bf16", "fp16", "fp8", "fp4", "fp4x2", "tf32", "fp64", *COMPLEX)

# As Kineto writes `Input type`; old recorders say "long", newer ones "long int".
RECORDED: dict[str, str] = {
    "double": "fp64",
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
    "c10::Float8_e8m0fnu": "fp8",
    "c10::Float4_e2m1fn_x2": "fp4x2",
    "c10::complex<c10::Half>": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "int64_t": "int64",
    "unsigned long": "int64",
    "int": "int32",
    "unsigned int": "int32",
    "short": "int16",
    "short int": "int16",
    "unsigned short": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "c10::quint8": "uint8",
    "c10::qint8": "int8",
    "bool": "bool",
}

# PyTorch's numbers for element types, as arguments that name a type are recorded.
NUMBERED: dict[int, str] = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "fp16",
    6: "fp32",
    7: "fp64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    15: "bf16",
    **dict.fromkeys((23, 24, 25, 26, 44), "fp8"),
}

# What a product of two such elements is computed in: a complex one in its parts, and two 4-bit
# numbers that share a byte each alone.
_COMPUTED_IN = {"complex32": "fp16", "complex64": "fp32", "complex128": "fp64", "fp4x2": "fp4"}

# Spellings inside kernel names. The earliest in the name wins: it is the operands' type more
# often than that of the accumulator or the result.
_IN_NAMES: tuple[tuple[str, str], ...] = (
    ("tf32", r"tf32|s1688gemm|s1688fprop|s1688dgrad|s1688wgrad|s1688cudnn|tensorop_s1688"),
    ("fp8", r"e4m3|e5m2|float8|fp8|nvjet_(?:sm\d+_)?q"),
    ("fp4", r"mxfp4|nvfp4|e2m1|float4_e2m1"),
    ("bf16", r"bf16|bfloat16|_bbs_|nvjet_(?:sm\d+_)?t"),
    (
        "fp16",
        r"c10::half|__half|half_t|\bhalf\b|[^b]f16|fp16|hgemm|h884|h1688|h16816|_hhs_|_hss_"
        r"|nvjet_(?:sm\d+_)?h",
    ),
    ("fp64", r"\bdouble\b|dgemm|d884gemm|f64"),
    ("fp32", r"\bfloat\b|sgemm|f32f32|_sb_|fp32|nvjet_(?:sm\d+_)?s"),
    ("int8", r"imma|igemm|s8_s8|int8|\bsigned char\b"),
    ("uint8", r"\bunsigned char\b|uint8"),
    ("int64", r"\blong\b|int64"),
    ("int32", r"\bint\b(?!,? ?\d)"),
    ("bool", r"\bbool\b"),
)
# `vectorized_elementwise_kernel<4, …` and index types stand before the operands' type: an
# integer is believed only where no other type is named.
_FLOATS_IN_NAMES = re.compile("|".join(f"(?P<{t}>{p})" for t, p in _IN_NAMES[:7]), re.IGNORECASE)
_INTEGERS_IN_NAMES = re.compile("|".join(f"(?P<{t}>{p})" for t, p in _IN_NAMES[7:]), re.IGNORECASE)
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
# PyTorch's lists of scalars, whose type stands before that of the tensors.
_SCALARS = re.compile(r"ScalarListMetadata<\w+, ")


def type_of(recorded: str) -> str | None:
    """Return the short name of a tensor's type as recorded; None for scalars, lists and others."""
    return RECORDED.get(recorded)


def size_bytes(element_type: str) -> float:
    """Return the bytes of one element."""
    return SIZE_BYTES[element_type]


def computed_in(element_type: str) -> str:
    """Return the real type whose peak limits products of elements of this type."""
    return _COMPUTED_IN.get(element_type, element_type)


@lru_cache(maxsize=65536)
def type_in_name(kernel: str) -> str | None:
    """Return the operands' type that a kernel's name tells, or None."""
    if _OPAQUE.search(kernel):
        return None
    kernel = _SCALARS.sub("", kernel)
    match = _FLOATS_IN_NAMES.search(kernel) or _INTEGERS_IN_NAMES.search(kernel)
    return match.lastgroup if match else None


@lru_cache(maxsize=65536)
def size_in_name(kernel: str) -> float | None:
    """Return the bytes of an element that a kernel's name tells, or None.

    Copying kernels name the size without the type: `OpaqueType<2u>`.
    """
    opaque = _OPAQUE.search(kernel)
    if opaque:
        return float(opaque.group(1))
    named = type_in_name(kernel)
    return SIZE_BYTES[named] if named else None


@lru_cache(maxsize=65536)
def least_size_in_name(kernel: str) -> float | None:
    """Return the bytes of the smallest floating element that a kernel's name tells, or None.

    Integers in a name may be those that it counts with.
    """
    opaque = _OPAQUE.search(kernel)
    if opaque:
        return float(opaque.group(1))
    found = _FLOATS_IN_NAMES.finditer(kernel)
    return min((SIZE_BYTES[str(match.lastgroup)] for match in found), default=None)
