"""The contract: the replacement that the gate judges, with the model around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from kprof.kernels.correctness.inputs import Draw

Precision = Literal["same", "lower"]
Function = Callable[..., Any]
Shape = tuple[int, ...]
Arm = Literal["replaced", "again", "new"]
"""`again` is the replaced code once more, restarted and in other batch shapes: the A/A baseline."""

DISTRIBUTIONS = (
    *("normal", "outliers", "large", "small", "offset"),
    *("uneven", "half_zero", "negative", "zeros", "nonfinite"),
)
LAYOUTS = ("contiguous", "padded", "transposed", "strided", "expanded", "far")
CONTEXTS = ("gradient", "no_grad", "inference_mode", "autocast", "double_backward")
"""The modes of torch that a function is called in; `gradient` is the plain call and its backward
pass, `autocast` is to bfloat16, or to float16 where the inputs are float16."""


@dataclass(frozen=True)
class Case:
    """One set of inputs, made again whenever it is drawn."""

    shape: Shape
    dtype: str
    distribution: str = "normal"
    layout: str = "contiguous"
    seed: int = 0
    context: str = "gradient"
    leading: Shape | None = None
    """Dimensions in the place of the first one of every argument that has rows; None: as it is."""

    def __str__(self) -> str:
        size = "x".join(str(n) for n in self.shape)
        words = [f"{size} {self.dtype}", self.distribution, self.layout]
        if self.context != "gradient":
            words.append(self.context)
        if self.leading is not None:
            words.append(f"rows as {'x'.join(map(str, self.leading)) or 'one vector'}")
        return f"{', '.join(words)}, seed {self.seed}"


@dataclass(frozen=True)
class Timing:
    """What was measured of the new code, and the least that its inputs allow on this device."""

    measured_ns: float
    floor_ns: float


@dataclass(frozen=True)
class Subject:
    """A function that is to replace another, and all that it takes to tell whether it may."""

    name: str
    replaced: Function
    """The customer's own code: the standard."""
    new: Function
    truth: Function
    """The mathematics, on float64 arguments."""
    inputs: Callable[[Shape, Draw], tuple[Any, ...]]
    """Makes the arguments of one case; `draw(*shape)` is data of the case's distribution."""
    shapes: tuple[Shape, ...]
    """Those seen in the profile; the first is varied for the edge cases."""
    free: tuple[int, ...] = (0,)
    """Dimensions of a shape that may have any size; the first may also be empty."""
    dimensions: tuple[str, ...] = ()
    """Names of the dimensions, in the plural; none: rows and columns, where there are two."""
    reach: Shape = ()
    """Sizes that the gate lets the free dimensions grow to; 0 or none: 65,536 for the first free
    one, 8,192 for the others, and twice the largest given in any case."""
    growth_s: float | None = None
    """Seconds that the call of a larger size may take; None: 2 on a CPU, 10 on a GPU."""
    refuses: Callable[..., str | None] | None = None
    """Declared limits of the new code: why it is not for a call with these arguments."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    device: str = "cpu"
    differentiable: tuple[int, ...] = ()
    """Arguments whose gradients are compared."""
    writes: tuple[int, ...] = ()
    """Arguments that are written in place, and are results; no other may change."""
    rows: tuple[int, ...] = ()
    """Arguments of which row i, and no other, decides row i of every result."""
    constant: tuple[int, ...] = ()
    """Arguments that are written to through torch alone: weights, of which something is kept."""
    precision: Precision = "same"
    stated_error: float | None = None
    """Of a lower precision: the relative L2 error against the truth that it promises."""
    is_deterministic: bool = True
    """Claimed: the same inputs give the same bits."""
    is_batch_invariant: bool = False
    """Claimed: a row's bits do not depend on how many rows stand around it."""
    has_free_strides: bool = False
    """Declared: the caller makes results contiguous itself, so their strides may be any."""
    large: float = 1_000.0
    """Magnitude of the large inputs; what overflows a careless 16-bit square is above 256."""
    distributions: tuple[str, ...] = DISTRIBUTIONS
    seed: int = 0
    """Another one draws other inputs."""
    contexts: tuple[str, ...] = CONTEXTS
    """Modes of torch that the new code is for."""
    num_values: int = 1_000_000
    """Values of each dtype that L1 pools; fewer only where calls are slow, as in an interpreter."""
    layouts: tuple[str, ...] = LAYOUTS


@dataclass(frozen=True)
class Generation:
    """What one prompt was answered with."""

    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]
    """For every token, the log-probabilities of the likeliest ones at that place."""


@dataclass(frozen=True)
class Curve:
    """A training run: the loss of every step, and the norms of the gradients where known."""

    losses: Sequence[float]
    gradient_norms: Sequence[float] = ()


@dataclass(frozen=True)
class Model:
    """How to observe the model that the swap is part of, each with one of the arms.

    What is None is not looked at, and its level counts as not run.
    """

    name: str
    hidden: Callable[[Arm], Sequence[Tensor]] | None = None
    """The residual stream after every layer, on the same tokens."""
    hidden_truth: Callable[[], Sequence[Tensor]] | None = None
    """The same from the model in float64 (or float32, for one in 16 bits)."""
    logits: Callable[[Arm], Tensor] | None = None
    """Logits at the same positions of the same texts: (positions, vocabulary)."""
    generate: Callable[[Arm], Sequence[Generation]] | None = None
    answers: Callable[[Arm], Sequence[bool]] | None = None
    """Which items of a task were answered rightly, in the same order."""
    train: Callable[[Arm, int], Curve] | None = None
    """A training run with a seed, which decides initial weights and the order of the data."""
    training_dtype: str = "bfloat16"
    precision: Precision = "same"
