"""What the workload's own modules and optimizers are to the recorder; to ask them may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.nn import Module
from torch.optim import Optimizer

from .known import Known
from .listener import Listener
from .steps import Source

Thing = TypeVar("Thing")
Fact = TypeVar("Fact")


class Asking:
    """Facts about the workload's own things; where one has none, the recorder stops."""

    def __init__(self, recorder: Listener) -> None:
        self._recorder = recorder
        self._describe = Known(_describe)

    def about_call(self, module: Module) -> tuple[Source, bool] | None:
        """Return what a model is to the counter of steps, and whether this call may train it."""
        return self._ask(self._describe_call, module)

    def about_generate(self, module: Module) -> Source | None:
        """Return what a model's `generate` is to the counter of steps."""
        model = self._ask(self._recorder.models.describe, module)
        if model is None:
            return None
        key, name, size = model.source.key, model.source.name, model.source.size
        # One more than the model's own calls, so that whole generations win over them.
        return Source(("generate", key), f"{name}.generate", size + 1)

    def about_step(self, optimizer: Optimizer) -> Source | None:
        """Return what an optimizer is to the counter of steps."""
        return self._ask(self._describe, optimizer)

    def range_name(self, module: Module) -> str | None:
        """Return the name of the range of a module."""
        return self._ask(self._recorder.models.range_name_of, module)

    def optimizers(self) -> Iterator[Optimizer]:
        """Yield the optimizers that have stepped, as far as they still live."""
        return self._describe.alive()

    def _describe_call(self, module: Module) -> tuple[Source, bool]:
        model = self._recorder.models.describe(module)
        # A property of the workload's own is asked only where there is nothing else to ask.
        mode = vars(module).get("training")
        is_training = module.training if mode is None else mode
        return model.source, model.could_train and is_training and torch.is_grad_enabled()

    def _ask(self, fact: Callable[[Thing], Fact], thing: Thing) -> Fact | None:
        try:
            return fact(thing)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the workload's
            reason = (
                f"The recorder stopped, because a {type(thing).__name__} could not be described "
                f"({type(error).__name__}: {error})."
            )
        with self._recorder.lock:
            if not self._recorder.is_broken:
                self._recorder.give_up(reason)
        return None


def _describe(optimizer: Optimizer) -> Source:
    # Without the workload's own kinds of tensors and modes.
    with torch._C.DisableTorchFunction():
        size = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return Source(id(optimizer), f"{type(optimizer).__name__}, {size:,} parameters", size)
