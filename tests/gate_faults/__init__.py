"""Operations with their honest rewritings, their seeded faults, and cheats: the gate's own test."""

import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from kprof.kernels.correctness import Subject, check, integrity, numerics, variation
from kprof.kernels.correctness.observe import observe, observe_truth

from . import attentions, calls, cheats, norms, optimizers, products, scopes, softmaxes, streams

SUBJECTS = {
    subject.name: subject
    for subject in (
        *(norms.RMSNORM, norms.LAYERNORM, softmaxes.SOFTMAX, softmaxes.CROSS_ENTROPY),
        *(products.LINEAR, products.SWIGLU, attentions.ATTENTION, attentions.ROPE),
        optimizers.ADAMW,
    )
}
MODULES = (norms, softmaxes, products, attentions, optimizers, scopes)


@dataclass(frozen=True)
class Variant:
    """One implementation of an operation."""

    operation: str
    name: str
    make: Callable[[], Callable]
    """Returns the function, with nothing remembered."""
    device: str = "cpu"
    growth_s: float | None = None
    """How long a size may grow; no clock decides about what is wrong in large calls alone."""

    @property
    def subject(self) -> Subject:
        """The subject with this implementation as the new one."""
        about = {"device": self.device, "growth_s": self.growth_s}
        return replace(SUBJECTS[self.operation], new=self.make(), **about)


def _variants(table: str) -> list[Variant]:
    return [
        Variant(
            operation,
            function.__name__,
            lambda function=function: function,
            growth_s=math.inf if module is scopes else None,
        )
        for module in MODULES
        for operation, functions in getattr(module, table).items()
        for function in functions
    ]


HONEST = _variants("HONEST")
SAME = [Variant(n, "the same", lambda s=s: s.replaced) for n, s in SUBJECTS.items()]
FAULTS = _variants("WRONG") + [Variant("rmsnorm", one.__name__, one) for one in calls.FAULTS]
ON_A_GPU = [Variant("rmsnorm", fault.__name__, fault, "cuda") for fault in streams.FAULTS]
CHEATS = [Variant("rmsnorm", cheat.__name__, cheat) for cheat in cheats.CHEATS]


@contextlib.contextmanager
def restored():
    """Put back what a cheat patches, and start chance from the beginning."""
    clock, elapsed = time.perf_counter, torch.cuda.Event.elapsed_time
    random.seed(5)
    try:
        yield
    finally:
        time.perf_counter = clock
        torch.cuda.Event.elapsed_time = elapsed


@contextlib.contextmanager
def standard_kept():
    """Compute once what all that may replace an operation is held against: a third of the time."""
    kept = {}

    def once(key, call):
        if key not in kept:
            kept[key] = call()
        return kept[key]

    def of_code(function, subject, case, arguments, **options):
        about = function, subject, case, arguments
        operation = SUBJECTS.get(subject.name)
        if operation is None or function is not operation.replaced or function is subject.new:
            return observe(*about, **options)
        about_call = function, subject.seed, subject.differentiable, case, *options.values()
        key = *about_call, _bits_of(arguments)
        return once(key, lambda: observe(*about, **options))

    def of_truth(subject, case, arguments):
        about = subject.truth, subject.seed, subject.differentiable, subject.writes, case
        # The search for cheats gives other values for the same case.
        return once(
            ("truth", *about, _bits_of(arguments)), lambda: observe_truth(subject, case, arguments)
        )

    with contextlib.ExitStack() as stack:
        for level in (integrity, numerics, variation):
            stack.enter_context(patch.object(level, "observe", of_code))
            stack.enter_context(patch.object(level, "observe_truth", of_truth))
        yield


def _bits_of(arguments):
    """Return what tells arguments of other values apart."""
    tensors = [one.detach() for one in arguments if isinstance(one, torch.Tensor)]
    return hash(
        tuple(
            one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors
        )
    )


def judge(subject, levels=("L0", "L1")):
    """Return the gate's report at the levels that look at functions."""
    with restored():
        return check(subject, levels)
