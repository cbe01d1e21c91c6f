"""Losses of language models: the function by which a model of Hugging Face computes its loss.

The original casts logits to float32 in a copy, and has their gradient in another one; the kernel
reads the logits as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module, functional

from kprof.kernels import kernel_named
from kprof.kernels.swap.dispatch import Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import TORCHS, calls_in, innermost, python_modules
from kprof.kernels.swap.probes import (
    ARRANGING,
    CANNOT,
    Operators,
    Setting,
    are_alike,
    autocast_of,
    have_same_gradients,
    probing,
    settings_where,
)
from kprof.kernels.swap.reads import CHANGED, Reads, reads_of_function
from kprof.kernels.swap.site import Request, Site, Skip, Switch
from kprof.kernels.swap.sites import Family

CROSS_ENTROPY = "cross_entropy"
PROPERTY, ATTRIBUTE = "loss_function", "_loss_function"
IGNORE_INDEX = -100
VOCABULARY = 37
OTHER_SIZE = "its vocabulary has another size than its logits"


# Options of Hugging Face's loss, besides logits, labels and the size of the vocabulary.
OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")
# Batches and tokens of probes: with the last, all tokens of the vocabulary are labels.
LENGTHS = ((2, 5), (1, 2), (3, 64))
OPERATORS = ARRANGING | {"_log_softmax", "constant_pad_nd", "div", "mean", "mul", "sum"}
OPERATORS |= {"nll_loss2d_forward", "nll_loss_forward"}


Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Known:
    """A recognised loss of a language model."""

    settings: frozenset[Setting]
    is_shifted: bool
    """Whether the label of a position is the next token, not its own (a masked one)."""
    options: frozenset[str]
    """Arguments with the same meaning as in Hugging Face's own loss."""
    reads: Reads

    def why_not(self, logits: Any, labels: Any, vocab_size: Any, options: dict[str, Any]) -> str:
        """Return why a call runs the original; empty: a kernel may take it."""
        for name, value in options.items():
            if name not in self.options and not (name in OPTIONS and value is None):
                return f"it is called with {name}"
        tensors = (logits, labels, options.get("shift_labels"))
        if not all(isinstance(one, Tensor) for one in tensors if one is not None):
            return "it is called in another way than with logits and labels"
        targets = labels if options.get("shift_labels") is None else options["shift_labels"]
        # A shift is along the tokens of a batch of sequences.
        dims = (3,) if self.is_shifted else (2, 3)
        fits = targets is not None and logits.shape[:-1] == targets.shape
        if not fits or logits.dim() not in dims:
            return "its logits and labels have other dimensions"
        return ""

    def arguments_of(self, rows: Tensor, labels: Tensor, options: dict[str, Any]) -> Arguments:
        """Return the kernel's arguments of a call, for logits or for the input of the head."""
        return arguments_of(rows, labels, options, is_shifted=self.is_shifted)


class Loss:
    """The loss of a language model, without a copy of the logits.

    A copied or pickled model gets the original instead.
    """

    def __init__(
        self, original: Callable[..., Any], known: Known, dispatcher: Dispatcher, switch: Switch
    ) -> None:
        self._original = original
        self._known = known
        self._is_changed = changes_of(known.reads)
        self._guarded = dispatcher.guarded(original)
        self._dispatcher = dispatcher
        self._trace = dispatcher.tracing()
        self._switch = switch

    def __call__(
        self, logits: Any, labels: Any, vocab_size: Any, *others: Any, **options: Any
    ) -> Any:
        """Return the loss, as the original does."""
        function, original = None, self._original
        if self._switch.owner is not None:
            why = self._why_not(logits, labels, vocab_size, others, options)
            if why:
                if not is_compiling():
                    self._dispatcher.leave_out(why)
                    original = self._guarded
            else:
                arguments = self._known.arguments_of(logits, labels, options)
                if is_compiling():
                    function = self._trace(*arguments)
                else:
                    function, original = self._decide(arguments), self._guarded
        if function is None:
            return original(logits, labels, vocab_size, *others, **options)
        return divided(function(*arguments), options.get("num_items_in_batch"))

    def _why_not(
        self, logits: Any, labels: Any, vocab_size: Any, others: Any, options: dict[str, Any]
    ) -> str:
        if others:
            return "it is called with more arguments by position"
        if self._is_changed is not None and self._is_changed(self):
            return CHANGED
        why = self._known.why_not(logits, labels, vocab_size, options)
        is_size = not why and logits.shape[-1] == vocab_size
        return why if is_size or why else OTHER_SIZE

    def _decide(self, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        rows, targets, *options = arguments
        key = (key_of(rows, targets), targets.shape, *options)
        is_default = options[0] == IGNORE_INDEX and options[2] == "mean"
        decision = self._dispatcher.known.get(key) or self._dispatcher.decide(
            key, arguments, is_default=is_default
        )
        decision.num_calls += 1
        return decision.function

    def __reduce__(self) -> tuple[Any, ...]:
        # A function's copy is itself: unpickling needs no kprof.
        return copy.copy, (self._original,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._original


def _itself(loss: Loss, owner: Module) -> Loss:
    return loss


def targets_of(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return the next token of every position."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def arguments_of(
    rows: Tensor, labels: Tensor, options: dict[str, Any], *, is_shifted: bool
) -> Arguments:
    """Return the kernel's arguments, for logits or for the input of the head."""
    ignore_index = options.get("ignore_index", IGNORE_INDEX)
    targets = labels.reshape(-1)
    if is_shifted:
        targets = targets_of(labels, options.get("shift_labels"), ignore_index)
    targets = targets.to(rows.device)
    reduction = "mean" if options.get("num_items_in_batch") is None else "sum"
    return rows.reshape(-1, rows.shape[-1]), targets, ignore_index, 0.0, reduction


def divided(loss: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Return a sum divided by a number of items; None: it is a mean already."""
    if num_items is None:
        return loss
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module that carry a loss function."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        function = loss_of(module)
        if function is None:
            continue
        label, what = name or type(module).__name__, f"{type(module).__name__}: {PROPERTY}"
        if isinstance(function, Loss):
            yield Skip(label, CROSS_ENTROPY, what, "it is swapped already")
            continue
        if not _calls_its_loss(type(module)):
            if has_torchs_loss(module):
                # It is a site of the functions that a forward calls.
                continue
            why = "its forward computes its loss without its loss function"
            yield Skip(label, CROSS_ENTROPY, what, why)
            continue
        known = request.once(("loss", function), known_loss, function)
        if isinstance(known, str):
            yield Skip(label, CROSS_ENTROPY, what, known)
            continue
        dispatcher = Dispatcher(request.kernels[CROSS_ENTROPY], request.providers, known.settings)
        switch = Switch()
        loss = Loss(function, known, dispatcher, switch)
        yield Site(
            label,
            module,
            functools.partial(_itself, loss),
            {what: dispatcher},
            attribute=ATTRIBUTE,
            switch=switch,
            why_changed=functools.partial(why_changed, function, known),
        )


def why_changed(function: object, known: Known, module: Module) -> str | None:
    """Return what has changed since the loss of a model was recognised; None: nothing."""
    if getattr(module, PROPERTY, None) is not function:
        return "it has another loss now"
    return known.reads.why_changed(None)


def _calls_its_loss(cls: type) -> bool:
    """Return whether the forward of a class, or a base's by `super()`, names the loss."""
    for one in cls.__mro__:
        forward = vars(one).get("forward")
        inner = innermost(forward)
        if forward is None:
            continue
        if inner is None or PROPERTY in inner.__code__.co_names:
            return True
        if "super" not in inner.__code__.co_names:
            return False
    return False


def has_torchs_loss(module: Module) -> bool:
    """Return whether torch's own loss is a child of a module, or named in its forward."""
    kind = TORCHS.cross_entropy_module
    named = [value for _, value in calls_in(type(module).forward)]
    is_named = any(one is kind or one is TORCHS.cross_entropy for one in named)
    return is_named or any(type(child) is kind for child in module.children())


def loss_of(module: Module) -> Callable[..., Any] | None:
    """Return the loss function of a Hugging Face model; None: it has none."""
    if not isinstance(inspect.getattr_static(type(module), PROPERTY, None), property):
        return None
    if "labels" not in inspect.signature(type(module).forward).parameters:
        return None
    function: Callable[..., Any] = getattr(module, PROPERTY)
    if isinstance(function, Loss):
        return function
    names = list(inspect.signature(function).parameters)
    return function if names[:3] == ["logits", "labels", "vocab_size"] else None


def known_loss(function: Callable[..., Any]) -> Known | str:
    """Recognise a loss; a sentence says why it is neither a causal model's nor a masked one's."""
    reads = reads_of_function(function)
    if isinstance(reads, str):
        return reads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with probing(device):
        for is_shifted in (True, False):
            probe = _Probe(function, device, is_shifted)
            settings = settings_where(functools.partial(probe.agrees, options={}))
            if (torch.float32, None) in settings:
                why = probe.why_not()
                options = frozenset(name for name in OPTIONS if probe.takes(name, settings))
                return Known(settings, is_shifted, options, reads) if why is None else why
    return "it is not the loss of a causal language model, nor of a masked one"


class _Probe:
    """Runs a loss and the kernel's reference on the same logits and labels."""

    def __init__(
        self, function: Callable[..., Any], device: torch.device, is_shifted: bool
    ) -> None:
        self._function, self._device, self._is_shifted = function, device, is_shifted
        self._reference = kernel_named(CROSS_ENTROPY).reference

    def _drawn(self, lead: tuple[int, int]) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(22)
        logits = 3 * torch.randn(*lead, VOCABULARY, generator=generator)
        labels = (torch.arange(lead[0] * lead[1]) * 5 % VOCABULARY).view(lead)
        labels[0, lead[1] // 2 + 1 :: 7] = IGNORE_INDEX
        return logits.to(self._device), labels.to(self._device)

    def agrees(self, setting: Setting, options: dict[str, Any]) -> bool:
        """Return whether both agree for calls with these options."""
        for lead in LENGTHS:
            logits, labels = self._drawn(lead)
            ignored = options.get("ignore_index", IGNORE_INDEX)
            labels = labels.masked_fill(labels == IGNORE_INDEX, ignored)
            logits = logits.to(setting[0])
            given = [(logits, labels)]
            if not self._is_shifted:
                given.append((logits.flatten(0, 1), labels.flatten()))
            if not all(self._are_alike(*one, setting, options) for one in given):
                return False
        return True

    def _are_alike(
        self, logits: Tensor, labels: Tensor, setting: Setting, options: dict[str, Any]
    ) -> bool:
        with autocast_of(self._device, setting[1]):
            original = self._function(logits, labels, VOCABULARY, **options)
        return are_alike(self._replaced(logits, labels, options), original)

    def _replaced(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Any:
        arguments = arguments_of(logits, labels, options, is_shifted=self._is_shifted)
        return divided(self._reference(*arguments), options.get("num_items_in_batch"))

    def takes(self, name: str, settings: frozenset[Setting]) -> bool:
        """Return whether this option has the meaning of Hugging Face's loss."""
        if name == "shift_labels" and not self._is_shifted:
            return False
        labels = self._drawn((2, 5))[1]
        values: dict[str, list[Any]] = {
            "num_items_in_batch": [9, torch.tensor(7, device=self._device)],
            "ignore_index": [IGNORE_INDEX, 3],
            "shift_labels": [],
        }
        if name == "shift_labels":
            return self._takes_shifted(labels)
        try:
            return all(
                self.agrees(setting, {name: value})
                for setting in settings
                for value in values[name]
            )
        except CANNOT:
            return False

    def _takes_shifted(self, labels: Tensor) -> bool:
        logits, shifted = self._drawn((2, 5))[0], labels.flip(1).contiguous()
        options = {"shift_labels": shifted}
        try:
            original = self._function(logits, labels, VOCABULARY, **options)
        except CANNOT:
            return False
        return are_alike(self._replaced(logits, labels, options), original)

    def why_not(self) -> str | None:
        """Return an operator that no loss needs, or that gradients differ; None: neither."""
        for lead in LENGTHS:
            logits, labels = self._drawn(lead)
            versions = logits._version, labels._version
            with Operators(logits, labels) as operators:
                self._function(logits, labels, VOCABULARY)
            why = operators.why_not(OPERATORS)
            if why is not None:
                return why
            if (logits._version, labels._version) != versions:
                return "it writes to its logits or labels"

            def original(logits: Tensor, labels: Tensor = labels) -> object:
                return self._function(logits, labels, VOCABULARY)

            def replaced(logits: Tensor, labels: Tensor = labels) -> object:
                return self._replaced(logits, labels, {})

            if not have_same_gradients(replaced, original, logits):
                return "its gradients are those of something else"
        return None


FAMILY = Family(kernels=(CROSS_ENTROPY,), find=find)
