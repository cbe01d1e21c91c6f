"""Heads of language models: the last linear layer and the loss in one, so that a step of training
makes no logits.

The model's own forward runs, with a layer that passes on what it gets in the place of its head,
and a loss function that knows that. Its result has no logits then; where nobody trains, where
there are no labels, where somebody watches the head, or where it or the loss is another one since,
everything runs as it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from kprof.sites import Family
from kprof.sites._around import Around
from kprof.sites._patches import is_passed_over, why_foreign
from kprof.sites._probe import CANNOT, Setting, kind_of, probing, stand_in
from kprof.sites._site import Request, Site, Skip, Switch, bound
from kprof.sites._ways import Ways, key_of
from kprof.sites.losses import (
    ATTRIBUTE,
    IGNORE_INDEX,
    Loss,
    divided,
    loss_of,
    settings_of,
    targets_of,
)

KERNEL = "linear_cross_entropy"
HEAD = "lm_head"


class _Passing(Module):
    """A head that passes on what it gets."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return it."""
        return hidden


class _Body(Module):
    """A body that returns given hidden states, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__["last_hidden_state"] = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself: it has what a body's output has."""
        return self

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module whose head and loss can be one."""
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        function, head = loss_of(module), module._modules.get(HEAD)
        if function is None or head is None:
            continue
        label = name or type(module).__name__
        why = _why_not(module, head, function, request)
        if why is not None:
            yield Skip(label, KERNEL, type(module).__name__, why)
        else:
            settings = request.once(("loss", function), settings_of, function)
            yield _site(label, module, settings, request)


def _why_not(module: Module, head: Module, function: Any, request: Request) -> str | None:
    why = why_foreign(module)
    if why is not None:
        return why
    if type(head) is not Linear:
        return f"its head is a {type(head).__name__}, no Linear"
    if isinstance(function, Loss):
        return "its loss is swapped already"
    if not request.once(("loss", function), settings_of, function):
        return "its loss is not that of a causal language model"
    apart: str | None = request.once(("head", *kind_of(module)), _why_apart, module)
    return apart


def _why_apart(module: Module) -> str | None:
    """Run the model's own forward around a body that is none; return why it does not fit."""
    hidden = torch.randn(1, 3, 8)
    losses: list[Any] = []

    def lose(logits: Any, labels: Any, vocab_size: Any, **kwargs: Any) -> Tensor:
        losses.append(logits)
        return torch.zeros(())

    passing, seen = _Watching(), torch.zeros(1, 3, dtype=torch.int64)
    children: dict[str, Module | None] = {
        name: passing if name == HEAD else _Body(hidden) for name in module._modules
    }
    clone = stand_in(module, {}, children)
    clone.__dict__[ATTRIBUTE] = lose
    with probing(torch.device("cpu")):
        try:
            outputs = type(module).forward(clone, input_ids=seen, labels=seen)
        except CANNOT as error:
            return f"its forward needs more than a body and a head ({error})"
    if len(losses) != 1 or losses[0] is not passing.result:
        return "it changes its logits before the loss"
    return None if outputs.logits is passing.result else "it changes its logits after the loss"


class _Watching(_Passing):
    """A head that remembers what it passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return it."""
        self.__dict__["result"] = hidden
        return hidden


class _Fused:
    """The loss of one call, from what its head would get."""

    def __init__(self, model: Any, ways: Ways) -> None:
        self._model, self._ways = model, ways
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        """Where the kernel could not do it: the head's."""

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
        """Return the loss of these hidden states, which are no logits."""
        self.hidden, head = logits, self._model._modules[HEAD]
        targets = targets_of(labels, shift_labels, ignore_index).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        rows = logits.reshape(-1, logits.shape[-1])
        arguments = (rows, head.weight, targets, head.bias, ignore_index, 0.0, reduction)
        function = self._decide(arguments)
        if function is not None:
            return divided(function(*arguments), num_items_in_batch)
        self.logits = head(logits)
        return self._model.loss_function(
            logits=self.logits,
            labels=labels,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=shift_labels,
            **kwargs,
        )

    def _decide(self, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        rows, weight, targets, bias, *options = arguments
        key = (key_of(rows, weight), targets.shape, bias is None, *options)
        way = self._ways.known.get(key)
        if way is None:
            shape = (*rows.shape, weight.shape[0])
            is_default = options == [IGNORE_INDEX, 0.0, "mean"]
            way = self._ways.decide(key, arguments, shape, is_default=is_default)
        way.num_calls += 1
        return way.function


def _site(name: str, module: Module, settings: frozenset[Setting], request: Request) -> Site:
    ways = Ways(request.kernels[KERNEL], request.providers, settings)
    switch = Switch()
    original = type(module).forward
    own = module.__dict__.get(ATTRIBUTE)
    put = bound(_headless(original, own, ways, switch), original, switch)
    return Site(name, module, put, ways, switch=switch)


def _headless(
    original: Callable[..., Any], own: object, ways: Ways, switch: Switch
) -> Callable[..., Any]:
    note = ways.noting()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or kwargs.get("labels") is None:
            return original(self, *args, **kwargs)
        if is_compiling():
            note(False)
            return original(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()):
            ways.leave_out("nobody trains: its logits may be wanted")
            return original(self, *args, **kwargs)
        why = _why_not_now(self, own)
        if why:
            ways.leave_out(why)
            return original(self, *args, **kwargs)
        fused = _Fused(self, ways)
        call = Around(self, {**self._modules, HEAD: _Passing()}, **{ATTRIBUTE: fused})
        try:
            outputs = original(call.clone, *args, **kwargs)
        finally:
            call.take_over()
        return _with_logits(outputs, fused.hidden, fused.logits)

    return forward


def _why_not_now(model: Any, own: object) -> str:
    """Return why this call needs its logits; empty: it does not."""
    head, loss = model._modules[HEAD], model.__dict__.get(ATTRIBUTE)
    if type(head) is not Linear:
        return f"its head is a {type(head).__name__} now, no Linear"
    if not is_passed_over(head):
        return "somebody watches its head"
    return "" if loss is own or isinstance(loss, Loss) else "it has another loss now"


def _with_logits(outputs: Any, hidden: Tensor | None, logits: Tensor | None) -> Any:
    """Return a model's outputs with these logits, or with none, where the hidden states are."""
    if isinstance(outputs, tuple):
        placed = [logits if one is hidden else one for one in outputs]
        return tuple(one for one in placed if one is not None)
    named = {name: logits if one is hidden else one for name, one in outputs.items()}
    return type(outputs)(**{name: one for name, one in named.items() if one is not None})


FAMILY = Family(kernels=(KERNEL,), find=find)
