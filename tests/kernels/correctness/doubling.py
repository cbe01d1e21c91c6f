"""A function to replace, for the gate: it doubles; and what may take its place."""

from dataclasses import replace

from kprof.kernels.correctness import Subject

FEW_VALUES = 10_000
DOUBLED = Subject(
    "doubled",
    replaced=lambda x: x * 2,
    new=lambda x: x + x,
    truth=lambda x: x * 2,
    inputs=lambda shape, draw: (draw(*shape),),
    shapes=((8, 16),),
    free=(0, 1),
    dtypes=("float32",),
    differentiable=(0,),
    rows=(0,),
)


def new_is(function, **changes):
    return replace(DOUBLED, new=function, **changes)


def few(subject):
    """Return the subject with fewer values pooled, to be done sooner."""
    return replace(subject, num_values=FEW_VALUES)
