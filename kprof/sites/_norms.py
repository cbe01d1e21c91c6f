"""What a norm computes: found by trying which candidate agrees with the module's own code.

The rows are random, some of them tiny, so that the order in which a norm rounds, and where its
epsilon is, show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kprof.sites._probe import (
    CANNOT,
    DTYPES,
    Setting,
    are_alike,
    autocast_of,
    distance,
    have_same_gradients,
    place_of,
    probing,
    set_mode,
    settings_where,
    stand_in,
)

RMSNORM, LAYERNORM = "rmsnorm", "layernorm"
FORMS = ("llama", "torch", "gemma")
USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
# Rows of which the epsilon is a small part, about half, and most.
SCALES = (1.0, 30.0, 1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 1.0)
BATCHES = (2, 4)


@dataclass(frozen=True)
class Recognised:
    """What a norm computes."""

    kernel: str
    form: str | None
    """Of an RMSNorm: the order in which it rounds."""
    eps: float
    eps_name: str | None
    """The attribute that holds it; None: it is in the code."""
    settings: frozenset[Setting]


def looks_like_a_norm(module: Module) -> bool:
    """Tell whether it has no children, no state, and one row of weights, if any, and an epsilon."""
    if module._modules or module._buffers or set(module._parameters) - {"weight", "bias"}:
        return False
    rows = [one for one in module._parameters.values() if one is not None]
    if not rows or any(one.dim() != 1 or one.shape != rows[0].shape for one in rows):
        return False
    return "norm" in type(module).__name__.lower() or bool(_eps_names(module))


def _eps_names(module: Module) -> list[str]:
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(value, float) and 0 <= value <= 1e-2
    ]


def recognise(module: Module) -> Recognised | str:
    """Find out what a norm computes; a sentence says why it is none that is known."""
    device = place_of(module)
    with probing(device) as generator:
        probe = Probe(module, device, generator)
        weight = next(one for one in module._parameters.values() if one is not None)
        dtype = weight.dtype
        if dtype not in DTYPES:
            return f"its weights are {str(dtype).removeprefix('torch.')}"
        try:
            original = probe.original((dtype, None))
        except CANNOT as error:
            return f"its own code failed on random rows ({type(error).__name__}: {error})"
        best = min(
            _candidates(module, dtype),
            key=lambda one: distance(probe.replaced((dtype, None), one), original),
        )
        if not are_alike(probe.replaced((dtype, None), best), original):
            return "it computes something else than an RMSNorm or a LayerNorm of rows"
        settings = settings_where(
            lambda setting: all(
                are_alike(probe.replaced(setting, best), probe.original(setting, is_training))
                for is_training in (False, True)
            )
        )
        is_same = probe.has_gradients_of(best)
    if (dtype, None) not in settings:
        return "it computes something else when it trains"
    if not is_same:
        return "its gradients are those of something else"
    kernel, form, eps, eps_name = best
    return Recognised(kernel, form, eps, eps_name, settings)


Candidate = tuple[str, str | None, float, str | None]


def _candidates(module: Module, dtype: torch.dtype) -> Iterator[Candidate]:
    named = [(module.__dict__[name], name) for name in _eps_names(module)]
    usual = [(eps, None) for eps in (*USUAL_EPS, torch.finfo(dtype).eps)]
    for eps, name in (*named, *usual):
        if module._parameters.get("bias") is None:
            for form in FORMS:
                yield RMSNORM, form, eps, name
        yield LAYERNORM, None, eps, name


class Probe:
    """Runs a norm's own code and its replacements on the same rows."""

    def __init__(self, module: Module, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        own = module._parameters
        columns = next(one.shape[0] for one in own.values() if one is not None)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self._parameters = {
            name: None if one is None else (0.5 + 0.2 * draw(columns)).to(one.dtype)
            for name, one in own.items()
        }
        self._module = stand_in(module, self._parameters, {})
        scales = torch.tensor(SCALES, device=device)[:, None]
        self.rows = draw(len(SCALES), columns) * scales + 0.1 * scales

    def original(self, setting: Setting, is_training: bool = False) -> object:
        """Return what the module's code computes."""
        dtype, cast = setting
        set_mode(self._module, is_training)
        with autocast_of(self._device, cast):
            return self._run(self.rows.to(dtype))

    def _run(self, rows: Tensor) -> object:
        # In two batches: what norms more than a row, or another dimension, shows.
        result = type(self._module).forward(self._module, rows.unflatten(0, BATCHES))
        return result.flatten(0, 1) if isinstance(result, Tensor) and result.dim() > 1 else result

    def has_gradients_of(self, one: Candidate) -> bool:
        """Tell whether a candidate has the gradients of the module's code, in float32."""
        names = [name for name, weight in self._parameters.items() if weight is not None]

        def original(rows: Tensor, *weights: Tensor) -> object:
            own = {**self._parameters, **dict(zip(names, weights, strict=True))}
            self._module.__dict__["_parameters"] = own
            return self._run(rows)

        def replaced(rows: Tensor, *weights: Tensor) -> object:
            return _computed(rows, dict(zip(names, weights, strict=True)), one)

        weights = [weight for weight in self._parameters.values() if weight is not None]
        try:
            return have_same_gradients(replaced, original, self.rows, *weights)
        finally:
            self._module.__dict__["_parameters"] = self._parameters

    def replaced(
        self, setting: Setting, one: Candidate, function: Callable[..., Any] | None = None
    ) -> object:
        """Return what a candidate computes, by the reference or by another function."""
        return _computed(self.rows.to(setting[0]), self._parameters, one, function)


def _computed(
    rows: Tensor,
    parameters: Mapping[str, Tensor | None],
    one: Candidate,
    function: Callable[..., Any] | None = None,
) -> object:
    kernel, form, eps, _ = one
    weight = parameters.get("weight")
    if kernel == RMSNORM:
        from kprof.kernels.rmsnorm import KERNEL

        options = () if form == FORMS[0] else (form,)
        return (function or KERNEL.reference)(rows, weight, eps, *options)
    from kprof.kernels.layernorm import KERNEL as LAYER

    return (function or LAYER.reference)(rows, weight, parameters.get("bias"), eps)
