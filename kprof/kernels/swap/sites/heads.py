"""Heads of language models: the last linear layer with the loss as one operation.

The model's own forward runs with a head that returns its input, and with a loss function that
expects that. The result has no logits then. The original runs if the model is not training, if
there are no labels, if the head has hooks, or if head or loss have been replaced since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from kprof.kernels.swap.dispatch import Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import is_passed_over, python_modules, why_foreign
from kprof.kernels.swap.probes import CANNOT, CannotCopyError, kind_of, probing, stand_in
from kprof.kernels.swap.reads import CHANGED, why_effects
from kprof.kernels.swap.site import CallProxy, Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.losses import (
    ATTRIBUTE,
    IGNORE_INDEX,
    OTHER_SIZE,
    Known,
    Loss,
    arguments_of,
    divided,
    known_loss,
    loss_of,
    why_changed,
)

KERNEL = "linear_cross_entropy"
HEAD = "lm_head"


class _Passing(Module):
    """A head that returns its input."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the input."""
        return hidden


class _Body(Module):
    """A body that returns given hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.__dict__["last_hidden_state"] = hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself: it has the attributes of a body's output."""
        return self

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module whose head and loss can be fused."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        function, head = loss_of(module), module._modules.get(HEAD)
        if function is None or head is None:
            continue
        label = name or type(module).__name__
        why = _why_not(module, head, function)
        known = request.once(("loss", function), known_loss, function) if why is None else why
        if not isinstance(known, str):
            why = request.once(("head", *kind_of(module)), _why_apart, module)
        if isinstance(known, str) or why is not None:
            yield Skip(label, KERNEL, type(module).__name__, why or str(known))
        else:
            yield _site(label, module, function, known, request)


def _why_not(module: Module, head: Module, function: Any) -> str | None:
    why = why_foreign(module)
    if why is not None:
        return why
    if type(head) is not Linear:
        return f"its head is a {_title(head)}, not a torch.nn.Linear"
    if head._parameters.get("weight") is None:
        return "the weight of its head is no parameter of its own"
    return "its loss is swapped already" if isinstance(function, Loss) else None


def _title(module: Module) -> str:
    cls = type(module)
    # Another class may have the name of torch's.
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__ == Linear.__name__ else cls.__name__


def _why_apart(module: Module) -> str | None:
    """Run a stand-in of the model with a stand-in body; return why it does not fit."""
    why = why_effects(module)
    if why is not None:
        return why
    # Ones, because random values would advance the workload's random state.
    hidden = torch.ones(1, 3, 8)
    losses: list[Any] = []

    def lose(logits: Any, labels: Any, vocab_size: Any, **kwargs: Any) -> Tensor:
        losses.append(logits)
        return torch.zeros(())

    passing, seen = _Watching(), torch.zeros(1, 3, dtype=torch.int64)
    children: dict[str, Module | None] = {
        name: passing if name == HEAD else _Body(hidden) for name in module._modules
    }
    try:
        clone = stand_in(module, {}, children)
    except CannotCopyError as error:
        return str(error)
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
    """A head that records and returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return it."""
        self.__dict__["result"] = hidden
        return hidden


class _Fused:
    """The loss function of one call, which gets the input of the head."""

    def __init__(self, model: Any, known: Known, dispatcher: Dispatcher) -> None:
        self._model, self._known, self._dispatcher = model, known, dispatcher
        self.hidden: Any = None
        self.logits: Any = None
        """Logits of the head, if the kernel could not run."""

    def __call__(self, logits: Any, labels: Any, vocab_size: Any, *others: Any, **opt: Any) -> Any:
        """Return the loss of these hidden states."""
        self.hidden, head = logits, self._model._modules[HEAD]
        why = OTHER_SIZE if vocab_size != head.weight.shape[0] else ""
        why = why or self._known.why_not(logits, labels, vocab_size, opt)
        function = None
        if why or others:
            self._dispatcher.leave_out(why or "it is called with more arguments by position")
        else:
            rows, targets, *options = arguments_of(logits, labels, opt)
            arguments = (rows, head.weight, targets, head.bias, *options)
            function = self._decide(arguments)
        if function is not None:
            return divided(function(*arguments), opt.get("num_items_in_batch"))
        self.logits = head(logits)
        # By keyword, as models call it.
        named = {"logits": self.logits, "labels": labels, "vocab_size": vocab_size}
        if others:
            return self._model.loss_function(*named.values(), *others, **opt)
        return self._model.loss_function(**named, **opt)

    def _decide(self, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        rows, weight, targets, bias, *options = arguments
        key = (key_of(rows, weight), targets.shape, bias is None, *options)
        decision = self._dispatcher.known.get(key)
        if decision is None:
            shape = (*rows.shape, weight.shape[0])
            is_default = options == [IGNORE_INDEX, 0.0, "mean"]
            decision = self._dispatcher.decide(key, arguments, shape, is_default=is_default)
        decision.num_calls += 1
        return decision.function


def _site(
    name: str, module: Module, function: Callable[..., Any], known: Known, request: Request
) -> Site:
    dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, known.settings)
    switch = Switch()
    original = type(module).forward
    own = module.__dict__.get(ATTRIBUTE)
    put = bound(_headless(original, own, known, dispatcher, switch), original, switch)

    def why(owner: Any) -> str | None:
        # Another site may have replaced it.
        loss = owner.__dict__.get(ATTRIBUTE)
        return None if isinstance(loss, Loss) else why_changed(function, known, owner)

    return Site(name, module, put, dispatcher, switch=switch, why_changed=why)


def _headless(
    original: Callable[..., Any], own: object, known: Known, dispatcher: Dispatcher, switch: Switch
) -> Callable[..., Any]:
    note, is_changed = dispatcher.noting(), changes_of(known.reads)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or kwargs.get("labels") is None:
            return original(self, *args, **kwargs)
        if is_compiling():
            note(False)
            return original(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()):
            dispatcher.leave_out("the model is not training: its logits may be wanted")
            return original(self, *args, **kwargs)
        why = _why_not_now(self, own)
        if is_changed is not None and is_changed(self):
            why = why or CHANGED
        if why:
            dispatcher.leave_out(why)
            return original(self, *args, **kwargs)
        fused = _Fused(self, known, dispatcher)
        call = CallProxy(self, {**self._modules, HEAD: _Passing()}, **{ATTRIBUTE: fused})
        try:
            outputs = original(call.clone, *args, **kwargs)
        finally:
            call.copy_back()
        return _with_logits(outputs, fused.hidden, fused.logits)

    return forward


def _why_not_now(model: Any, own: object) -> str:
    """Return why this call needs logits; empty: it does not."""
    head, loss = model._modules[HEAD], model.__dict__.get(ATTRIBUTE)
    if type(head) is not Linear:
        return f"its head is a {_title(head)} now, not a torch.nn.Linear"
    if not is_passed_over(head):
        return "its head has hooks"
    return "" if loss is own or isinstance(loss, Loss) else "it has another loss now"


def _with_logits(outputs: Any, hidden: Tensor | None, logits: Tensor | None) -> Any:
    """Return a model's outputs with these logits, or without, instead of the hidden states."""
    if isinstance(outputs, tuple):
        placed = [logits if one is hidden else one for one in outputs]
        return tuple(one for one in placed if one is not None)
    named = {name: logits if one is hidden else one for name, one in outputs.items()}
    return type(outputs)(**{name: one for name, one in named.items() if one is not None})


FAMILY = Family(kernels=(KERNEL,), find=find)
