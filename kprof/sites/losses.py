"""Losses of language models: what computes the loss of a model of Hugging Face from its logits.

There the logits are cast to float32 in a copy, and another copy holds their gradient; the kernel
reads them as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module, functional

from kprof.kernels import kernel_named
from kprof.sites import Family
from kprof.sites._probe import Setting, are_alike, autocast_of, probing, settings_where
from kprof.sites._site import Request, Site, Skip, Switch
from kprof.sites._ways import Ways, key_of

CROSS_ENTROPY = "cross_entropy"
PROPERTY, ATTRIBUTE = "loss_function", "_loss_function"
IGNORE_INDEX = -100
VOCABULARY = 37


class Loss:
    """The loss of a causal language model, whose logits need no copy.

    A copy of the model that carries it, and what is read back from a file, carries the original.
    """

    def __init__(self, original: Callable[..., Any], ways: Ways, switch: Switch) -> None:
        self._original = original
        self._aside = ways.aside(original)
        self._ways = ways
        self._trace = ways.tracing()
        self._switch = switch

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss, as the original does."""
        function, original = None, self._original
        if self._switch.owner is not None:
            targets = targets_of(labels, shift_labels, ignore_index).to(logits.device)
            reduction = "mean" if num_items_in_batch is None else "sum"
            arguments = (logits.reshape(-1, vocab_size), targets, ignore_index, 0.0, reduction)
            if is_compiling():
                function = self._trace(*arguments)
            else:
                function, original = self._decide(arguments), self._aside
        if function is None:
            return original(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        return divided(function(*arguments), num_items_in_batch)

    def _decide(self, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        rows, targets, *options = arguments
        key = (key_of(rows, targets), targets.shape, *options)
        is_default = options[0] == IGNORE_INDEX and options[2] == "mean"
        way = self._ways.known.get(key) or self._ways.decide(key, arguments, is_default=is_default)
        way.num_calls += 1
        return way.function

    def __reduce__(self) -> tuple[Any, ...]:
        # A function's copy is itself: who reads this back needs no kprof.
        return copy.copy, (self._original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._original


def _itself(loss: Loss, owner: Module) -> Loss:
    return loss


def targets_of(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return for every position the token that follows it."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def divided(loss: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Return a sum over this number of items; None: a mean already."""
    if num_items is None:
        return loss
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module that carry a loss function."""
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        function = loss_of(module)
        if function is None:
            continue
        label, what = name or type(module).__name__, f"{type(module).__name__}: {PROPERTY}"
        if isinstance(function, Loss):
            yield Skip(label, CROSS_ENTROPY, what, "it is swapped already")
            continue
        settings = request.once(("loss", function), settings_of, function)
        if not settings:
            yield Skip(label, CROSS_ENTROPY, what, "it is not the loss of a causal language model")
            continue
        ways = Ways(request.kernels[CROSS_ENTROPY], request.providers, settings)
        switch = Switch()
        loss = Loss(function, ways, switch)
        yield Site(
            label,
            module,
            functools.partial(_itself, loss),
            {what: ways},
            attribute=ATTRIBUTE,
            switch=switch,
        )


def loss_of(module: Module) -> Callable[..., Any] | None:
    """Return the function by which a model of Hugging Face computes its loss; None: it has none."""
    if not isinstance(inspect.getattr_static(type(module), PROPERTY, None), property):
        return None
    if "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    function: Callable[..., Any] = getattr(module, PROPERTY)
    if isinstance(function, Loss):
        return function
    names = list(inspect.signature(function).parameters)
    return function if names[:3] == ["logits", "labels", "vocab_size"] else None


def settings_of(function: Callable[..., Any]) -> frozenset[Setting]:
    """Return the settings in which it is the loss of a causal language model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = kernel_named(CROSS_ENTROPY).reference

    def agrees(setting: Setting) -> bool:
        generator = torch.Generator().manual_seed(22)
        logits = (3 * torch.randn(2, 5, VOCABULARY, generator=generator)).to(device, setting[0])
        labels = torch.randint(VOCABULARY, (2, 5), generator=generator).to(device)
        labels[0, 3] = IGNORE_INDEX
        rows, targets = logits.view(-1, VOCABULARY), targets_of(labels, None, IGNORE_INDEX)
        with autocast_of(device, setting[1]):
            mean = function(logits, labels, VOCABULARY)
            share = function(logits, labels, VOCABULARY, num_items_in_batch=9)
        total = reference(rows, targets, IGNORE_INDEX, 0.0, "sum")
        return are_alike(reference(rows, targets), mean) and are_alike(total / 9, share)

    with probing(device):
        return settings_where(agrees)


FAMILY = Family(kernels=(CROSS_ENTROPY,), find=find)
