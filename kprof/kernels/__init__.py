"""The kernel library: operations, each with several providers behind one contract.

A public module here, or in the package of a family, holds one `KERNEL`, or several `KERNELS`; that
is all that registration takes. A provider may be ours, torch's own or a peer's. Measurements decide
which one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kprof.errors import KprofError, modules_in

if TYPE_CHECKING:
    from kprof.kernels.correctness.inputs import Draw

Function = Callable[..., Any]
Shape = tuple[int, ...]
OURS = "kprof"
# Modules by the kernels that they hold, so that a swap imports no others. A kernel that is missing
# here is found all the same, with all modules imported.
HOMES = {
    "adamw": "adamw",
    "add_layernorm": "norm",
    "add_rmsnorm": "norm",
    "attention_forward": "attention.attention_forward",
    "attention_fp8": "attention.attention_fp8",
    "bias_gelu": "gelu",
    "cast_weights": "cast_weights",
    "cross_entropy": "cross_entropy.cross_entropy",
    "decode": "decode.decode",
    "decode_attention": "decode_attention.decode_attention",
    "fp8_linear": "fp8.fp8_linear",
    "geglu": "gated",
    "gelu": "gelu",
    "group_norm_silu": "group_norm",
    "layernorm": "norm",
    "linear_cross_entropy": "cross_entropy.linear_cross_entropy",
    "moe_experts": "moe_experts",
    "rmsnorm": "norm",
    "rope": "rope",
    "swiglu": "gated",
}
# Packages that are no families.
INFRASTRUCTURE = tuple(
    f"kprof.kernels.{name}" for name in ("bench", "correctness", "swap", "tiles")
)


@dataclass(frozen=True)
class Work:
    """Work of one call: useful FLOPs, and compulsory traffic (each input and output once)."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Provider:
    """An implementation of an operation, with the arguments of the reference."""

    name: str
    load: Callable[[], Function]
    """Imports and returns the function; an ImportError says what is missing."""
    distribution: str = "torch"
    """The installed package that has it, whose version goes into results."""
    is_varying: bool = False
    """Whether a row's bits depend on the number of rows (it is not batch-invariant)."""
    repeats: bool = True
    """Whether the same call has the same bits every time (it is deterministic), gradients too."""


@dataclass(frozen=True)
class Kernel:
    """An operation: its reference, its providers, and how it is checked and measured."""

    name: str
    replaces: str
    """The code that it replaces, in words."""
    reference: Function
    """That code in eager torch: the standard of the gate, and the fallback."""
    truth: Function
    """The mathematics, on float64 arguments."""
    providers: tuple[Provider, ...]
    refuses: Callable[..., str | None]
    """Returns why our kernel does not support these arguments; None: it does."""
    inputs: Callable[[Shape, Draw], tuple[Any, ...]]
    """Returns arguments of a call of this shape."""
    work: Callable[..., Work]
    """Counts the work of a call from its arguments, without its gradients."""
    shapes: tuple[Shape, ...]
    """Shapes that the bench measures by default."""
    edges: tuple[Shape, ...] = ()
    """Shapes that the gate must try: around tile sizes, and the largest that are supported."""
    free: tuple[int, ...] = (0,)
    """Dimensions of a shape to which the gate may give any size."""
    reach: Shape = ()
    """Sizes of the first dimensions up to which the gate tries the kernel, and a swap uses it;
    empty: `refuses` alone decides."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    differentiable: tuple[int, ...] = ()
    """Positions of arguments that get gradients."""
    backward_work: Callable[..., Work] | None = None
    """Counts the work of the backward pass alone, from the same arguments."""
    writes: tuple[int, ...] = ()
    """Positions of arguments that are written in place."""
    rows: tuple[int, ...] = ()
    """Positions of arguments whose row i alone determines row i of every result."""
    stated_error: float | None = None
    """Documented relative error of a kernel with a lower precision than the reference."""
    constant: tuple[int, ...] = ()
    """Positions of weights that are cached in another form; they change through torch alone."""
    has_free_strides: bool = False
    """Whether results may have any strides, as a swap makes them contiguous."""
    exact: int = 1
    """How many of the last sizes of a shape choose the fastest provider; earlier ones are rows."""
    unmeasured: str = OURS
    """The provider that a swap uses without measurements on this GPU."""
    needs_gpu: str = ""
    """Why Triton's interpreter cannot run it; empty: it can."""
    sources: tuple[str, ...] = ()
    """Sources of the formulas and ideas."""

    def provider(self, name: str) -> Provider:
        """Return the provider with this name.

        Raises:
            KprofError: there is none.
        """
        for one in self.providers:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.providers)
        raise KprofError(f"{self.name} has no provider {name}", fix=f"choose among {known}")


@cache
def all_kernels() -> dict[str, Kernel]:
    """Return every kernel by its name; needs torch."""
    modules = modules_in("kprof.kernels")
    families = [m for m in modules if hasattr(m, "__path__") and m.__name__ not in INFRASTRUCTURE]
    modules += [module for family in families for module in modules_in(family.__name__)]
    found = [kernel for module in modules for kernel in _kernels_in(module)]
    return {kernel.name: kernel for kernel in sorted(found, key=lambda kernel: kernel.name)}


def _kernels_in(module: ModuleType) -> tuple[Kernel, ...]:
    if hasattr(module, "KERNEL"):
        return (module.KERNEL,)
    kernels: tuple[Kernel, ...] = getattr(module, "KERNELS", ())
    return kernels


def kernel_named(name: str) -> Kernel:
    """Return one kernel.

    Raises:
        KprofError: there is none of that name.
    """
    if name in HOMES:
        home = import_module(f"{__name__}.{HOMES[name]}")
        return next(one for one in _kernels_in(home) if one.name == name)
    kernels = all_kernels()
    if name not in kernels:
        raise KprofError(f"there is no kernel {name}", fix=f"choose among {', '.join(kernels)}")
    return kernels[name]
