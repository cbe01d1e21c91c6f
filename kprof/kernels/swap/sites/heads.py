"""Heads of language models: the last linear layer with the loss as one operation.

The model's own forward runs with a head that returns its input, and with a loss function that
expects that. The result has no logits then. If the forward scales or caps its logits, the head
returns a stand-in that notes what is done to it. The original runs if the model is not training, if
there are no labels, if the head has hooks, or if head or loss have been replaced since.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from kprof.kernels.cross_entropy.linear_cross_entropy import PLAIN, Shape
from kprof.kernels.swap.dispatch import Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import (
    innermost,
    is_passed_over,
    names_in,
    python_modules,
    why_foreign,
)
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
    divided,
    known_loss,
    loss_of,
    why_changed,
)

KERNEL = "linear_cross_entropy"
HEAD = "lm_head"
CHANGES_LOGITS = "it changes its logits before the loss"
CHANGES_LATER = "it changes its logits after the loss"
READS_LOGITS = "it reads or keeps its logits besides the loss"
SHAPES = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__}
SHAPES |= {Tensor.size, Tensor.dim}
# Logits that tell one form from another: some for the slope, some for the cap.
PROBES = (1e-3, -1e-3, 0.1, -1.0, 3.0, -10.0, 25.0, -40.0, 70.0, -300.0, 1e4, -1e6)


class _Passing(Module):
    """A head that returns its input."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the input."""
        return hidden


class _Body(Module):
    """A body that returns given hidden states, and logits of a router if there are experts."""

    def __init__(self, hidden: Tensor, num_experts: object) -> None:
        super().__init__()
        self.__dict__["last_hidden_state"] = hidden
        if isinstance(num_experts, int):
            routed = torch.ones(hidden.shape[1], num_experts)
            self.__dict__["router_logits"] = (routed,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself: it has the attributes of a body's output."""
        return self

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None


class Deferred:
    """Stands for logits that were not computed, and notes what is done to them."""

    def __init__(self, hidden: Tensor, steps: tuple[Callable[[Any], Any], ...] = ()) -> None:
        self.hidden = hidden
        """The input of the head."""
        self._steps = steps

    def applied_to(self, logits: Tensor) -> Any:
        """Return what would have been done to these logits."""
        for step in self._steps:
            logits = step(logits)
        return logits

    def _then(self, step: Callable[[Any], Any]) -> Deferred:
        return Deferred(self.hidden, (*self._steps, step))

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.hidden, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._then(lambda x: getattr(x, name)(*args, **kwargs))

    def __mul__(self, other: Any) -> Deferred:
        return self._then(lambda x: operator.mul(x, other))

    def __rmul__(self, other: Any) -> Deferred:
        return self._then(lambda x: operator.mul(other, x))

    def __truediv__(self, other: Any) -> Deferred:
        return self._then(lambda x: operator.truediv(x, other))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a function of torch whose first argument stands for logits."""
        first, *others = args
        if not isinstance(first, Deferred) or any(isinstance(one, Deferred) for one in others):
            return NotImplemented
        return first._then(lambda x: function(x, *others, **(kwargs or {})))


def shape_of(apply: Callable[[Tensor], Any]) -> Shape | None:
    """Return the scale and cap that a function gives to logits; None: it does something else."""
    x = torch.tensor(PROBES)
    try:
        result = apply(x)
    except CANNOT:
        return None
    if not isinstance(result, Tensor) or result.shape != x.shape or result.device != x.device:
        return None
    scale, largest = float(result[0] / x[0]), float(result[-1] / x[-1])
    is_capped = abs(largest) < 0.5 * abs(scale)
    found = Shape(scale, float(result[-1].abs()) if is_capped else 0.0)
    expected = x.double() * found.scale
    if found.cap:
        expected = found.cap * torch.tanh(expected / found.cap)
    is_finite = bool(torch.isfinite(result).all()) and 0 < found.scale < math.inf
    is_known = is_finite and torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-9)
    return found if is_known else None


class _Deferring(Module):
    """A head that returns a stand-in of its logits."""

    def __call__(self, hidden: Tensor) -> Deferred:
        """Return the stand-in."""
        return Deferred(hidden)


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
        shapes = False
        if not isinstance(known, str):
            told = request.once(("head", *kind_of(module)), _shapes_logits, module)
            why, shapes = (told, False) if isinstance(told, str) else (None, told)
        if isinstance(known, str) or why is not None:
            yield Skip(label, KERNEL, type(module).__name__, why or str(known))
        else:
            yield _site(label, module, function, known, request, shapes=shapes)


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


def _shapes_logits(module: Module) -> bool | str:
    """Run a stand-in of the model with a stand-in body; return whether it shapes its logits.

    A sentence says why the model does not fit.
    """
    inner = innermost(type(module).forward)
    why = READS_LOGITS if inner is not None and _names_logits(inner.__code__) else None
    why = why or why_effects(module)
    if why is not None:
        return why
    # Ones, because random values would advance the workload's random state.
    hidden = torch.ones(1, 3, 8)
    losses, outputs = _run_apart(module, _Watching(), hidden)
    is_passed = len(losses) == 1 and isinstance(losses[0], _Watched)
    if isinstance(outputs, str) or not is_passed:
        is_read = isinstance(outputs, str) and READS_LOGITS in outputs
        losses, outputs = _run_apart(module, _Deferring(), hidden)
        if isinstance(outputs, str) and is_read:
            return READS_LOGITS if losses else CHANGES_LOGITS
        if isinstance(outputs, str):
            return outputs
        if len(losses) != 1 or not isinstance(losses[0], Deferred):
            return CHANGES_LOGITS
        if shape_of(losses[0].applied_to) is None:
            return CHANGES_LOGITS
    return not is_passed if getattr(outputs, "logits", None) is losses[0] else CHANGES_LATER


def _names_logits(code: types.CodeType) -> bool:
    """Return whether code reads the logits of an output, as a class around a model's does."""
    return "logits" in {*names_in(code), *code.co_consts}


def _run_apart(module: Module, head: Module, hidden: Tensor) -> tuple[list[Any], Any]:
    """Return what a stand-in gives to its loss, and its outputs, or why it failed."""
    losses: list[Any] = []

    def lose(logits: Any, labels: Any, vocab_size: Any, **kwargs: Any) -> Tensor:
        losses.append(logits)
        return torch.zeros(())

    seen = torch.zeros(1, 3, dtype=torch.int64)
    children: dict[str, Module | None] = {
        name: head if name == HEAD else _Body(hidden, module.__dict__.get("num_experts"))
        for name in module._modules
    }
    try:
        clone = stand_in(module, {}, children)
    except CannotCopyError as error:
        return [], str(error)
    clone.__dict__[ATTRIBUTE] = lose
    clone.__dict__["training"] = True
    with probing(torch.device("cpu")):
        try:
            outputs = type(module).forward(clone, input_ids=seen, labels=seen)
        except CANNOT as error:
            return losses, f"its forward needs more than a body and a head ({error})"
    return losses, READS_LOGITS if _keeps(clone, outputs) else outputs


def _keeps(module: Module, outputs: Any) -> bool:
    """Return whether a model keeps its logits, or returns what it makes of them."""
    kinds, named = (Deferred, _Watched), outputs if isinstance(outputs, Mapping) else {}
    returned = [one for name, one in named.items() if name != "logits"]
    return any(isinstance(one, kinds) for one in (*module.__dict__.values(), *returned))


class _Watched(Tensor):
    """Logits that only a loss may read."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise, except where a shape, a dtype or a device is read."""
        if function not in SHAPES:
            raise TypeError(READS_LOGITS)
        return super().__torch_function__(function, types, args, kwargs or {})


class _Watching(Module):
    """A head whose result only a loss may read."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return its input."""
        return hidden.as_subclass(_Watched)


class _Fused:
    """The loss function of one call, which gets the input of the head."""

    def __init__(self, model: Any, known: Known, dispatcher: Dispatcher) -> None:
        self._model, self._known, self._dispatcher = model, known, dispatcher
        self.hidden: Any = None
        self.logits: Any = None
        """Logits of the head, if the kernel could not run."""

    def __call__(self, logits: Any, labels: Any, vocab_size: Any, *others: Any, **opt: Any) -> Any:
        """Return the loss of these hidden states, or of the logits that stand for them."""
        self.hidden, head = logits, self._model._modules[HEAD]
        hidden: Any = logits
        shape: Shape | None = PLAIN
        if isinstance(logits, Deferred):
            hidden, shape = logits.hidden, shape_of(logits.applied_to)
        why = OTHER_SIZE if vocab_size != head.weight.shape[0] else ""
        why = why or ("" if shape else CHANGES_LOGITS)
        why = why or self._known.why_not(hidden, labels, vocab_size, opt)
        function = None
        if why or others:
            self._dispatcher.leave_out(why or "it is called with more arguments by position")
        else:
            rows, targets, *options = self._known.arguments_of(hidden, labels, opt)
            options += () if shape is None or shape == PLAIN else shape
            arguments = (rows, head.weight, targets, head.bias, *options)
            function = self._decide(arguments)
        if function is not None:
            return divided(function(*arguments), opt.get("num_items_in_batch"))
        self.logits = head(hidden)
        if isinstance(logits, Deferred):
            self.logits = logits.applied_to(self.logits)
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
    name: str,
    module: Module,
    function: Callable[..., Any],
    known: Known,
    request: Request,
    *,
    shapes: bool,
) -> Site:
    dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, known.settings)
    switch = Switch()
    original = type(module).forward
    own = module.__dict__.get(ATTRIBUTE)
    head = _Deferring() if shapes else _Passing()
    put = bound(_headless(original, own, known, dispatcher, switch, head), original, switch)

    def why(owner: Any) -> str | None:
        # Another site may have replaced it.
        loss = owner.__dict__.get(ATTRIBUTE)
        return None if isinstance(loss, Loss) else why_changed(function, known, owner)

    return Site(name, module, put, dispatcher, switch=switch, why_changed=why)


def _headless(
    original: Callable[..., Any],
    own: object,
    known: Known,
    dispatcher: Dispatcher,
    switch: Switch,
    head: Module,
) -> Callable[..., Any]:
    """Return the forward of a model without its head, in whose place `head` stands."""
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
        call = CallProxy(self, {**self._modules, HEAD: head}, **{ATTRIBUTE: fused})
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
