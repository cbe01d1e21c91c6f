"""What a gated MLP computes: found by running its own code with layers that return given tensors.

What reaches the last layer tells which layer is which, and what is between them. No product of
matrices is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kprof.kernels import geglu, swiglu
from kprof.sites._probe import (
    CANNOT,
    Direct,
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

SWIGLU, GEGLU = "swiglu", "geglu"
# Kernel, and the options of its call.
CANDIDATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (SWIGLU, ()),
    (GEGLU, ("tanh",)),
    (GEGLU, ("none",)),
)
NUM_COLUMNS = 128
# float32 tells activations apart that look the same in fewer bits.
IN_FULL: Setting = (torch.float32, None)
# Of rows: most tell activations apart, and the last ones what is cut off where numbers are large.
SCALES = (1.0, 3.0, 3.0, 3.0, 3.0, 10.0, 50.0, 3e3)
# The product of two has to be a number.
LARGEST_OF = {torch.float16: 150.0}


@dataclass(frozen=True)
class Recognised:
    """What a gated MLP computes."""

    kernel: str
    options: tuple[str, ...]
    gate: str
    """The name of the layer before the activation."""
    up: str | None
    """None: the gate's layer computes both, itself first."""
    down: str
    passed_over: tuple[str, ...]
    """Other children, whose work the kernel does."""
    settings: frozenset[Setting]


def layers_of(module: Module) -> dict[str, Module]:
    """Return the children that map vectors to vectors, as linear layers do."""
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None and hasattr(child, "out_features") and hasattr(child, "in_features")
    }


class Given(Module):
    """A layer that returns a given tensor, and remembers what it was given."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.given: list[object] = []
        self.result: Tensor | None = None

    def __call__(self, *args: Any) -> Any:
        """Return the tensor."""
        self.given.append(args[0] if len(args) == 1 else args)
        return self.result


class Probe:
    """Runs a module's own code with layers that return given tensors."""

    def __init__(self, module: Module, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        self._layers = {name: Given(layer) for name, layer in layers_of(module).items()}
        children: dict[str, Module | None] = {
            name: self._layers.get(name) or (child and Direct(child))
            for name, child in module._modules.items()
        }
        self._module = stand_in(module, module._parameters, children)
        columns = NUM_COLUMNS * (1 + (len(self._layers) == 2))
        scales = torch.tensor(SCALES)[:, None]
        self._drawn = {
            name: (scales * torch.randn(len(SCALES), columns, generator=generator)).to(device)
            for name in self._layers
        }

    def run(self, setting: Setting) -> tuple[str, object] | None:
        """Return the layer that the result comes from, and what it was given; None: none."""
        dtype = setting[0]
        return self._run(setting, {name: self._of(name, dtype) for name in self._layers})

    def _run(self, setting: Setting, results: dict[str, Tensor]) -> tuple[str, object] | None:
        for name, layer in self._layers.items():
            layer.result, layer.given = results[name], []
        x = self._of(next(iter(self._drawn)), setting[0]) + 1
        with autocast_of(self._device, setting[1]):
            returned = type(self._module).forward(self._module, x)
        last = [name for name, layer in self._layers.items() if layer.result is returned]
        if not last or any(len(layer.given) != 1 for layer in self._layers.values()):
            return None
        first = [layer.given[0] for name, layer in self._layers.items() if name != last[0]]
        if any(given is not x for given in first):
            return None
        return last[0], self._layers[last[0]].given[0]

    def given_to_last(self, setting: Setting, is_training: bool) -> object:
        """Return what the last layer is given."""
        set_mode(self._module, is_training)
        ran = self.run(setting)
        return None if ran is None else ran[1]

    def tensors(self, setting: Setting, gate: str, up: str | None) -> tuple[Tensor, Tensor | None]:
        """Return what these layers return."""
        dtype = setting[0]
        return self._of(gate, dtype), None if up is None else self._of(up, dtype)

    def given_to_last_by(self, gate: str, up: str | None, *tensors: Tensor) -> object:
        """Return what the last layer is given where these layers return these float32 tensors."""
        drawn = {name: self._of(name, torch.float32) for name in self._layers}
        results = drawn | dict(zip((gate, up), tensors, strict=False))
        ran = self._run((torch.float32, None), {name: results[name] for name in drawn})
        return None if ran is None else ran[1]

    def _of(self, name: str, dtype: torch.dtype) -> Tensor:
        largest = LARGEST_OF.get(dtype)
        drawn = self._drawn[name]
        return (drawn if largest is None else drawn.clamp(-largest, largest)).to(dtype)


def recognise(module: Module) -> Recognised | str | None:
    """Find out what an MLP computes; None: no gated MLP, a sentence: one that is not known."""
    device = place_of(module)
    names = list(layers_of(module))
    with probing(device) as generator:
        probe = Probe(module, device, generator)
        try:
            ran = probe.run(IN_FULL)
        except CANNOT:
            return None
        if ran is None:
            return None
        down, product = ran
        if not isinstance(product, Tensor):
            return None
        others = [name for name in names if name != down]
        best, (kernel, options, gate, up) = _best_of(probe, others, product)
        if not best <= 32:
            # With two layers alone, it is as any other MLP.
            return None if len(others) == 1 else "what it computes between its layers is not known"
        settings = settings_where(
            lambda one: all(
                are_alike(
                    _reference(kernel, options, *probe.tensors(one, gate, up)),
                    probe.given_to_last(one, is_training),
                )
                for is_training in (False, True)
            )
        )
        is_same = have_same_gradients(
            lambda *given: _reference(kernel, options, *given, *([None] if up is None else [])),
            lambda *given: probe.given_to_last_by(gate, up, *given),
            *(one for one in probe.tensors(IN_FULL, gate, up) if one is not None),
        )
    if IN_FULL not in settings:
        return "it computes something else when it trains"
    if not is_same:
        return "its gradients are those of something else"
    passed_over = tuple(name for name in module._modules if name not in names)
    return Recognised(kernel, options, gate, up, down, passed_over, settings)


Found = tuple[str, tuple[str, ...], str, str | None]


def _best_of(probe: Probe, others: list[str], product: Tensor) -> tuple[float, Found]:
    """Return what comes closest to the product, and how close: kernel, options, gate, up."""
    pairs: list[tuple[str, str | None]] = [(others[0], None)]
    if len(others) == 2:
        pairs = [(others[0], others[1]), (others[1], others[0])]
    tried = [
        (distance(_reference(kernel, options, *probe.tensors(IN_FULL, *pair)), product), found)
        for kernel, options in CANDIDATES
        for pair in pairs
        for found in [(kernel, options, *pair)]
    ]
    return min(tried, key=lambda one: one[0])


def _reference(kernel: str, options: tuple[str, ...], *tensors: Tensor | None) -> object:
    module = swiglu if kernel == SWIGLU else geglu
    return module.KERNEL.reference(*tensors, *options)
