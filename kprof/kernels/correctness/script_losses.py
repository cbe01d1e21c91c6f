"""The losses of a training script, unmodified: what level L6 compares.

The process that trains writes them. `kprof ab --losses` runs the script with this context on, once
for each curve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kprof.kernels.correctness.subject import Curve

PATCH = f"{__name__}:watched"
TF32 = "tfloat32"


@dataclass(frozen=True)
class Trained:
    """What a process has written: its curve, and the narrowest dtype of its arithmetic."""

    curve: Curve
    dtype: str


@contextmanager
def watched(path: str, names: str = "") -> Iterator[None]:
    """Write the losses of this process to a file, with kernels swapped in.

    Args:
        path: Of the file, begun anew at each entry; a line for each step of an optimizer.
        names: "KERNEL,KERNEL=PROVIDER,…"; empty: none.
    """
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    with ExitStack() as stack:
        if names:
            from kprof.kernels.swap.swapping import all_models

            stack.enter_context(all_models(names))
        if is_first:
            stack.enter_context(_Watch(Path(path)))
        yield


class _Watch(ExitStack):
    """Listens to backward passes, scaled losses, autocast and optimizers, and writes each step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", encoding="utf-8")
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._unscaled: tuple[object, Tensor] | None = None
        self._dtypes: set[torch.dtype] = set()
        self.enter_context(self._file)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(GradScaler, "scale", self._scale)
        self._replace(torch.autocast, "__enter__", self._autocast)
        self.callback(register_optimizer_step_pre_hook(self._step_begins).remove)
        self.callback(register_optimizer_step_post_hook(self._step_ends).remove)

    def _replace(self, owner: Any, name: str, listen: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return listen(original, *arguments, **named)

        self.enter_context(patch.object(owner, name, call))

    def _backward(
        self, original: Callable[..., Any], tensors: Any, *others: Any, **named: Any
    ) -> Any:
        self._losses += map(self._without_scale, _losses_in(tensors))
        return original(tensors, *others, **named)

    def _without_scale(self, loss: Tensor) -> Tensor:
        if self._unscaled is not None and self._unscaled[0] is loss:
            loss = self._unscaled[1]
        return loss.detach().double().sum()

    def _scale(self, original: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(outputs, Tensor):
            self._unscaled = (scaled, outputs)
        return scaled

    def _autocast(self, original: Callable[..., Any], context: torch.autocast) -> Any:
        if context._enabled:
            self._dtypes.add(context.fast_dtype)
        return original(context)

    def _step_begins(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        self._dtypes |= {one.dtype for one in weights}
        gradients = [one.grad for one in weights if one.grad is not None]
        # Of sparse ones there is no norm of a list.
        if gradients and all(one.layout is torch.strided for one in gradients):
            norms = torch._foreach_norm(gradients)
            self._norm = torch.stack([one.double() for one in norms]).square().sum()

    def _step_ends(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if not self._losses:
            return
        loss = float(sum(one.item() for one in self._losses))
        norm = None if self._norm is None else math.sqrt(self._norm.item())
        self._losses, self._norm, self._unscaled = [], None, None
        told = {"loss": loss, "norm": norm, "dtype": _narrowest(self._dtypes)}
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()


def _losses_in(tensors: object) -> list[Tensor]:
    several = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [one for one in several if isinstance(one, Tensor) and one.numel() == 1]


def _narrowest(dtypes: Iterable[torch.dtype]) -> str:
    floats = [one for one in dtypes if one.is_floating_point]
    narrowest = min(floats, key=lambda one: one.itemsize, default=torch.float32)
    if narrowest == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return TF32
    return str(narrowest).removeprefix("torch.")


def read(path: Path, most: int) -> Trained:
    """Return what a process has written so far, at most so many steps."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    steps = [json.loads(line) for line in lines[:most]]
    norms = [one["norm"] for one in steps]
    curve = Curve([one["loss"] for one in steps], () if None in norms else norms)
    return Trained(curve, steps[-1]["dtype"] if steps else "float32")
