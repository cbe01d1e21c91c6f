"""Heads of language models: the last linear layer with the loss as one operation.

The model's own forward runs with a head that returns a stand-in of its logits, which notes a scale,
a cap or a bias, and with a loss that expects that. The result has no logits then. Whatever else is
done to the stand-in is done to the logits, which the head computes then. The head may be part of
another module (BERT). The original runs if the model is not training, if there are no labels, if
the head has hooks, or if head or loss have been replaced since.

Where few labels count, as in masked language models, the kernel gets the rows of these alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Embedding, Linear, Module, functional
from torch.utils._pytree import tree_leaves, tree_map_only

from kprof.kernels import kernel_named
from kprof.kernels.cross_entropy.linear_cross_entropy import PLAIN, Shape
from kprof.kernels.swap.dispatch import Decision, Dispatcher, cast_of, changes_of, key_of
from kprof.kernels.swap.patches import (
    TORCHS,
    Path,
    innermost,
    is_passed_over,
    names_in,
    python_modules,
    why_foreign,
)
from kprof.kernels.swap.probes import (
    CANNOT,
    CannotCopyError,
    Direct,
    Setting,
    are_alike,
    autocast_of,
    is_more_exact,
    kind_of,
    probing,
    settings_where,
    stand_in,
)
from kprof.kernels.swap.providers import INDUCTOR
from kprof.kernels.swap.reads import CHANGED, why_effects
from kprof.kernels.swap.site import CallProxy, Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.losses import (
    ATTRIBUTE,
    OTHER_SIZE,
    Known,
    Loss,
    divided,
    has_torchs_loss,
    known_loss,
    loss_of,
    why_changed,
)
from kprof.kernels.swap.translate import PLAIN_LOSS, loss_arguments

KERNEL = "linear_cross_entropy"
HEAD = "lm_head"
# Names of the argument with the labels.
LABELS = ("labels", "targets", "target")
CHANGES_LOGITS = "it changes its logits before the loss"
CHANGES_LATER = "it changes its logits after the loss"
READS_LOGITS = "it reads or keeps its logits besides the loss"
# Logits that tell one form from another: some for the slope, some for the cap.
PROBES = (1e-3, -1e-3, 0.1, -1.0, 3.0, -10.0, 25.0, -40.0, 70.0, -300.0, 1e4, -1e6)

# Methods that change shapes, and not the order of elements in memory.
RESHAPING = ("contiguous", "flatten", "reshape", "view")
# Methods that are noted, where the gradient is that of what they compute.
NOTED = (*RESHAPING, "add", "bfloat16", "div", "double", "float", "half", "mul", "tanh", "to")
# What reads or changes the gradients of logits, which a kernel does not make either.
OF_GRADIENTS = ("grad", "register_hook", "retain_grad")
FUNCTIONS = {torch.add, torch.div, torch.flatten, torch.mul, torch.reshape, torch.tanh}
OTHER_AUTOCAST = "its loss runs under another autocast than its head"
NO_GRADIENTS = "its loss runs without gradients"
IN_FUNCTION = "a torch.autograd.Function gets its logits, and decides on their gradients"
NARROW = "its logits are narrower than its hidden states, so that they cost little"
OTHER_DTYPE = "a bias is added to its logits in another dtype"
# The share of labels that count up to which their rows are selected, for which the host waits: of
# three matrix multiplications, half is left out.
FEW_LABELS = 0.5


class _Head(Module):
    """Stands for a head; it has the head's attributes."""

    def __init__(self, head: Module) -> None:
        super().__init__()
        self.__dict__["head"] = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)


class _Body(Module):
    """Any part of a model but its head: returns given hidden states, and logits of a router."""

    def __init__(self, hidden: Tensor, num_experts: object, replaced: Module | None) -> None:
        super().__init__()
        self.__dict__.update(last_hidden_state=hidden, replaced=replaced)
        if isinstance(num_experts, int):
            routed = torch.ones(hidden.shape[1], num_experts)
            self.__dict__["router_logits"] = (routed,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself, with the attributes of a body's output.

        Parts of a body return what they do: embeddings hidden states, later ones their input.
        """
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and isinstance(self.__dict__["replaced"], Embedding):
            return torch.ones(*first.shape, self.__dict__["last_hidden_state"].shape[-1])
        return first if first is not None and first.is_floating_point() else self

    def __getattr__(self, name: str) -> _Body | None:
        return self._parts(name).get(name)

    def __getitem__(self, place: Any) -> Any:
        part = self._parts(str(place)).get(str(place))
        return self.__dict__["last_hidden_state"] if part is None and place == 0 else part

    def __iter__(self) -> Iterator[_Body]:
        return iter(self._parts().values())

    def _parts(self, *names: str) -> dict[str, _Body]:
        """Return stand-ins of these children, or of all."""
        hidden, replaced = self.__dict__["last_hidden_state"], self.__dict__["replaced"]
        children = {} if replaced is None else replaced._modules
        asked = [one for one in names or children if one in children]
        return {name: _Body(hidden, None, children[name]) for name in asked}


class Step(NamedTuple):
    """An operation on logits."""

    apply: Callable[[Any], Any]
    is_reshaping: bool = False
    bias: Tensor | None = None
    """The row that it adds; None: it adds none."""


Compute = Callable[[Tensor], Tensor]
Lose = Callable[..., Any]
APPLY = torch.autograd.Function.apply.__func__.__code__


class Source:
    """What a head was called with, in which state; it computes the logits where they are wanted."""

    def __init__(self, hidden: Tensor, num_columns: int, head: Compute, lose: Lose) -> None:
        self.hidden = hidden
        """The input of the head."""
        self.cast = cast_of(hidden)
        """The dtype of autocast; None: there was none."""
        self.num_columns, self.lose = num_columns, lose
        self._head = head
        self._logits: Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether the logits have been computed."""
        return self._logits is not None

    @property
    def is_cast_alike(self) -> bool:
        """Whether autocast is as it was."""
        return cast_of(self.hidden) == self.cast

    def logits(self) -> Tensor:
        """Return the logits, as the head would have returned them."""
        if self._logits is None:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                if not self.is_cast_alike:
                    device, is_on = self.hidden.device.type, self.cast is not None
                    stack.enter_context(torch.autocast(device, self.cast, enabled=is_on))
                self._logits = self._head(self.hidden)
        return self._logits


class Deferred:
    """Stands for logits that were not computed, and notes what is done to them.

    What it does not note is done to the logits.
    """

    def __init__(self, source: Source, steps: tuple[Step, ...] = ()) -> None:
        self.source, self.steps = source, steps
        self._made: Any = None

    @property
    def hidden(self) -> Tensor:
        """The input of the head."""
        return self.source.hidden

    def made(self) -> Any:
        """Return what it stands for.

        Raises:
            TypeError: a `torch.autograd.Function` gets it, whose gradients it would not have.
        """
        if not torch.is_grad_enabled() and _is_in_function():
            raise TypeError(IN_FUNCTION)
        if self._made is None:
            logits = self.source.logits()
            with torch.enable_grad():
                self._made = self.applied_to(logits)
        return self._made

    def is_of(self, other: Deferred) -> bool:
        """Return whether another one stands for what was done to this one later, or for it."""
        is_same = self.source is other.source
        return is_same and other.steps[: len(self.steps)] == self.steps

    def applied_to(self, logits: Tensor) -> Any:
        """Return what would have been done to these logits."""
        for step in self.steps:
            logits = step.apply(logits)
        return logits

    def form(self) -> Form | None:
        """Return what is done to each logit; None: more than a kernel can do."""
        bias: Tensor | None = None
        others: list[Step] = []
        for step in self.steps:
            if step.bias is not None:
                if bias is not None or others:
                    return None
                bias = step.bias
            elif not step.is_reshaping:
                others.append(step)
        if not others:
            return Form(PLAIN, bias)
        shape = shape_of(Deferred(self.source, tuple(others)).applied_to)
        return None if shape is None else Form(shape, bias)

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return self._described().shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._described().dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._described().ndim

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self._described().dim()

    def numel(self) -> int:
        """Return the number of elements."""
        return self._described().numel()

    def size(self, *place: int) -> Any:
        """Return the shape, or one size of it."""
        return self._described().size(*place)

    def _described(self) -> Any:
        """Return a tensor without data that has the shape and the dtype of the logits."""
        shape = (*self.hidden.shape[:-1], self.source.num_columns)
        dtype = self.source.cast or self.hidden.dtype
        return self.applied_to(torch.empty(shape, dtype=dtype, device="meta"))

    def _then(self, apply: Callable[[Any], Any], **more: Any) -> Any:
        # Without gradients, it would be another operation.
        if not torch.is_grad_enabled():
            return apply(self.made())
        return Deferred(self.source, (*self.steps, Step(apply, **more)))

    def __getattr__(self, name: str) -> Any:
        # Names of methods that write end with an underscore, and so do those of protocols.
        if name.endswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name in OF_GRADIENTS:
            raise TypeError(READS_LOGITS)
        if name not in NOTED:
            return getattr(self.made(), name)
        return lambda *args, **kwargs: self._then(
            lambda x: getattr(x, name)(*_made(args), **_made(kwargs)),
            is_reshaping=name in RESHAPING,
        )

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Tensor) or other.shape[-1:] != (other.numel(),):
            return self._then(lambda x: operator.add(x, _made(other)))
        return self._then(lambda x: x + other.to(x.device), bias=other)

    def __mul__(self, other: Any) -> Any:
        return self._then(lambda x: operator.mul(x, _made(other)))

    def __rmul__(self, other: Any) -> Any:
        return self._then(lambda x: operator.mul(_made(other), x))

    def __truediv__(self, other: Any) -> Any:
        return self._then(lambda x: operator.truediv(x, _made(other)))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note a function of torch, return a loss, or run the function on the logits."""
        kwargs = kwargs or {}
        first, *others = args or (None,)
        if isinstance(first, Deferred) and not _deferred_in((others, kwargs)):
            # A swap of the whole process may have replaced it.
            if TORCHS.cross_entropy in (function, getattr(function, "__wrapped__", None)):
                return first.source.lose(first, *others, **kwargs)
            if function in FUNCTIONS and "out" not in kwargs:
                is_reshaping = function.__name__ in RESHAPING
                return first._then(
                    lambda x: function(x, *others, **kwargs), is_reshaping=is_reshaping
                )
        return function(*_made(args), **_made(kwargs))


# Operators that are not noted.
OPERATORS = (
    *("abs", "bool", "contains", "eq", "float", "floordiv", "ge", "getitem", "gt", "index"),
    *("int", "invert", "iter", "le", "len", "lt", "matmul", "mod", "ne", "neg", "pow", "radd"),
    *("rmatmul", "rpow", "rsub", "rtruediv", "sub"),
)


def _run_on_logits(name: str) -> Callable[..., Any]:
    def run(self: Deferred, *args: Any) -> Any:
        return getattr(self.made(), name)(*_made(args))

    return run


for _name in OPERATORS:
    setattr(Deferred, f"__{_name}__", _run_on_logits(f"__{_name}__"))
# Two stand-ins are told apart by identity, as tensors are.
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


def _deferred_in(values: Any) -> list[Deferred]:
    """Return the stand-ins in nested lists, tuples and dictionaries."""
    return [one for one in tree_leaves(values) if isinstance(one, Deferred)]


def _made(values: Any) -> Any:
    """Return nested values with logits in the place of stand-ins."""
    if not _deferred_in(values):
        return values
    return tree_map_only(Deferred, Deferred.made, values)


def _is_in_function() -> bool:
    """Return whether a `torch.autograd.Function` runs."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is APPLY:
            return True
        frame = frame.f_back
    return False


class Form(NamedTuple):
    """What is done to logits before the loss."""

    shape: Shape = PLAIN
    bias: Tensor | None = None
    """Is added first."""


def shape_of(apply: Callable[[Tensor], Any]) -> Shape | None:
    """Return the scale and cap that a function gives to logits; None: it does something else."""
    x = torch.tensor(PROBES)
    try:
        with torch.enable_grad():
            result = apply(x)
    except CANNOT:
        return None
    if not isinstance(result, Tensor) or result.shape != x.shape or result.device != x.device:
        return None
    # A number of the kernel's gets no gradient.
    if result.requires_grad:
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


class _Deferring(_Head):
    """A head that returns a stand-in of its logits."""

    def __init__(self, head: Module, compute: Compute, lose: Lose) -> None:
        super().__init__(head)
        self.__dict__.update(compute=compute, lose=lose)

    def __call__(self, hidden: Tensor) -> Any:
        """Return the stand-in; without gradients, the logits."""
        compute, lose = self.__dict__["compute"], self.__dict__["lose"]
        if not torch.is_grad_enabled():
            return compute(hidden)
        return Deferred(Source(hidden, self.out_features, compute, lose))


def _compute_none(hidden: Tensor) -> Tensor:
    """Raise, because a stand-in of a model has no logits."""
    raise TypeError(READS_LOGITS)


class Use(NamedTuple):
    """How a model uses the logits of its head."""

    has_torchs_loss: bool


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module whose head and loss can be fused."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        labels, function = _labels_of(type(module).forward), loss_of(module)
        if labels is None or (function is None and not has_torchs_loss(module)):
            continue
        path = _path_to_head(module)
        if path is None:
            continue
        label = name or type(module).__name__
        why: str | None = _why_not(module, path, function)
        use = why or request.once(("head", path, *kind_of(module)), _use_of_logits, module, path)
        known: Known | frozenset[Setting] | str = ""
        if isinstance(use, Use):
            known = request.once(("torchs loss",), _torchs_loss)
            if not use.has_torchs_loss and function is not None:
                known = request.once(("loss", function), known_loss, function)
        if isinstance(use, str) or isinstance(known, str):
            why = use if isinstance(use, str) else str(known)
            yield Skip(label, KERNEL, type(module).__name__, why)
        else:
            known_call = _Call(path, labels, module, known)
            yield _site(label, module, function, known_call, request)


class Labels(NamedTuple):
    """The argument of a forward with the labels, and the first one, with the tokens."""

    name: str
    place: int
    """Behind the module itself."""
    name_of_tokens: str

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the labels of a call; None: it has none."""
        return args[self.place] if len(args) > self.place else kwargs.get(self.name)


@functools.cache
def _labels_of(forward: Callable[..., Any]) -> Labels | None:
    """Return the labels of a forward; None: it has none."""
    names = list(inspect.signature(forward).parameters)[1:]
    found = next((one for one in LABELS if one in names), None)
    tokens = next((one for one in ("input_ids", *names) if one in names), None)
    if found is None or tokens is None:
        return None
    return Labels(found, names.index(found), tokens)


def _path_to_head(module: Module) -> Path | None:
    """Return the names by which a model reaches the layer that computes its logits."""
    getter = getattr(type(module), "get_output_embeddings", None)
    try:
        head = getter(module) if inspect.isfunction(getter) else None
    except CANNOT:
        head = None
    if head is not None:
        for name, one in module.named_modules():
            if one is head:
                return tuple(name.split("."))
    if module._modules.get(HEAD) is not None:
        return (HEAD,)
    linears = [name for name, one in module._modules.items() if type(one) is Linear]
    return (linears[0],) if len(linears) == 1 else None


def _modules_on(module: Module, path: Path) -> list[Module]:
    """Return the modules on a path: first that of the first name, last the head."""
    found: list[Module] = []
    for name in path:
        below = module._modules.get(name)
        if below is None:
            return []
        found.append(below)
        module = below
    return found


def _why_not(module: Module, path: Path, function: Any) -> str | None:
    why = why_foreign(module)
    if why is not None:
        return why
    head = _modules_on(module, path)[-1]
    if type(head) is not Linear:
        return f"its head is a {_title(head)}, not a torch.nn.Linear"
    if head._parameters.get("weight") is None:
        return "the weight of its head is no parameter of its own"
    if head.out_features < head.in_features:
        return NARROW
    return "its loss is swapped already" if isinstance(function, Loss) else None


def _title(module: Module) -> str:
    cls = type(module)
    # Another class may have the name of torch's.
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__ == Linear.__name__ else cls.__name__


def _loss_of_zero() -> Tensor:
    # With gradients, and written to, as a loss is.
    return torch.zeros((), requires_grad=True).clone()


class _Losses:
    """The losses of a stand-in of a model, in the place of its loss function and of torch's."""

    def __init__(self) -> None:
        self.of_function: list[Any] = []
        self.of_torch: list[Any] = []

    @property
    def all(self) -> list[Any]:
        """The logits of each loss."""
        return self.of_function + self.of_torch

    def lose(self, logits: Any, labels: Any, vocab_size: Any, **kwargs: Any) -> Tensor:
        """Note the logits of the model's loss function."""
        self.of_function.append(logits)
        return _loss_of_zero()

    def lose_by_torch(self, logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Note the logits of torch's loss."""
        self.of_torch.append(logits)
        return _loss_of_zero()


def _use_of_logits(module: Module, path: Path) -> Use | str:
    """Run a stand-in of the model with a stand-in body; return how it uses its logits.

    A sentence says why the model does not fit.
    """
    on_path = _modules_on(module, path)
    inner = innermost(type(module).forward)
    why = READS_LOGITS if inner is not None and _names_logits(inner.__code__) else None
    for one in (module, *on_path[:-1]):
        why = why or why_effects(one)
    if why is not None:
        return why
    # Ones, because random values would advance the workload's random state.
    hidden, losses = torch.ones(1, 3, 8), _Losses()
    head = _Deferring(on_path[-1], _compute_none, losses.lose_by_torch)
    outputs = _run_apart(module, path, head, hidden, losses)
    if isinstance(outputs, str):
        is_read = READS_LOGITS in outputs or IN_FUNCTION in outputs
        return (READS_LOGITS if losses.all else CHANGES_LOGITS) if is_read else outputs
    if [type(one) for one in losses.all] != [Deferred] or losses.all[0].form() is None:
        return CHANGES_LOGITS
    logits = getattr(outputs, "logits", None)
    if not isinstance(outputs, Mapping):
        returned = outputs if isinstance(outputs, tuple) else (outputs,)
        logits = next((one for one in returned if isinstance(one, Deferred)), None)
    is_lost = isinstance(logits, Deferred) and logits.is_of(losses.all[0])
    return Use(bool(losses.of_torch)) if is_lost else CHANGES_LATER


def _torchs_loss() -> frozenset[Setting] | str:
    """Return the settings in which the kernel computes torch's loss of logits of a linear layer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = kernel_named(KERNEL)
    with probing(device) as generator:
        hidden = torch.randn(6, 64, generator=generator).to(device)
        weight = torch.randn(50, 64, generator=generator).to(device) / 3
        targets = torch.arange(6, device=device) * 7

        def agrees(setting: Setting) -> bool:
            dtype, cast = setting
            given = hidden.to(dtype), weight.to(dtype)
            with autocast_of(device, cast):
                original = functional.cross_entropy(functional.linear(*given), targets)
                new = kernel.reference(*given, targets).to(original.dtype)
            if are_alike(new, original):
                return True
            truth = kernel.truth(given[0].double(), given[1].double(), targets)
            return is_more_exact(new, original, truth, cast or dtype)

        return settings_where(agrees) or "it computes something else"


def _names_logits(code: types.CodeType) -> bool:
    """Return whether code reads the logits of an output, as a class around a model's does."""
    return "logits" in {*names_in(code), *code.co_consts}


def _run_apart(module: Module, path: Path, head: Module, hidden: Tensor, losses: _Losses) -> Any:
    """Return the outputs of a stand-in with this head and these losses, or why it failed."""
    # Unlike each other: one of them at most is the token of padding.
    seen = torch.arange(2, 5).view(1, 3)
    try:
        clone = _stand_in(module, path, head, hidden)
    except CannotCopyError as error:
        return str(error)
    clone.__dict__[ATTRIBUTE] = losses.lose
    clone.__dict__["training"] = True
    with probing(torch.device("cpu")), torch.enable_grad():
        try:
            labels = _labels_of(type(module).forward)
            assert labels is not None
            given = {labels.name_of_tokens: seen, labels.name: seen}
            outputs = type(module).forward(clone, **given)
        except CANNOT as error:
            return f"its forward needs more than a body and a head ({error})"
    return READS_LOGITS if _keeps(clone, outputs) else outputs


def _is_loss(module: Module | None) -> bool:
    return type(module) is TORCHS.cross_entropy_module


def _stand_in(module: Module, path: Path, head: Module, hidden: Tensor) -> Module:
    """Return a stand-in of a module with this head at the end of a path, and bodies beside it.

    Raises:
        CannotCopyError: an attribute cannot be copied.
    """
    num_experts = module.__dict__.get("num_experts")
    children: dict[str, Module | None] = {
        name: Direct(one) if one is not None and _is_loss(one) else _Body(hidden, num_experts, one)
        for name, one in module._modules.items()
    }
    below = module._modules[path[0]]
    assert below is not None
    children[path[0]] = _stand_in(below, path[1:], head, hidden) if path[1:] else head
    return stand_in(module, {}, children)


def _keeps(module: Module, outputs: Any) -> bool:
    """Return whether a model keeps its logits, or returns what it makes of them."""
    named = outputs if isinstance(outputs, Mapping) else {}
    kept = list(module.__dict__.values())
    returned = [one for name, one in named.items() if name != "logits"]
    is_twice = isinstance(outputs, tuple) and len(_deferred_in(tuple(outputs))) > 1
    return is_twice or bool(_deferred_in([*kept, *returned]))


class _Fused:
    """The losses of one call, which get the input of the head."""

    def __init__(
        self, model: Any, head: Linear, known: Known | None, dispatcher: Dispatcher, state: _State
    ) -> None:
        self._model, self._head, self._known = model, head, known
        self._dispatcher, self._state = dispatcher, state
        self._lost: list[Deferred] = []
        self._has_logits = False

    def compute(self, hidden: Tensor) -> Any:
        """Return the logits, by the head."""
        self._has_logits = True
        return self._head(hidden)

    def __call__(self, logits: Any, labels: Any, vocab_size: Any, *others: Any, **opt: Any) -> Any:
        """Return the model's own loss of logits, or of what stands for them."""
        loss, why = None, ""
        if isinstance(logits, Deferred):
            loss, why = self._lose(logits, labels, vocab_size, others, opt)
        if loss is not None:
            return loss
        if why:
            self._dispatcher.leave_out(why)
        # By keyword, as models call it.
        named = {"logits": _made(logits), "labels": labels, "vocab_size": vocab_size}
        if others:
            return self._model.loss_function(*named.values(), *others, **opt)
        return self._model.loss_function(**named, **opt)

    def _lose(
        self, logits: Deferred, labels: Any, vocab_size: Any, others: Any, opt: Any
    ) -> tuple[Tensor | None, str]:
        """Return the loss by a kernel; None: the original does, and why, if not noted yet."""
        self._lost.append(logits)
        hidden, form, why = self._rows_of(logits)
        why = why or (OTHER_SIZE if vocab_size != self._head.weight.shape[0] else "")
        why = why or ("it is called with more arguments by position" if others else "")
        known = self._known
        why = why or ("" if known is None else known.why_not(hidden, labels, vocab_size, opt))
        if why or known is None:
            return None, why or CHANGES_LOGITS
        loss = self._computed(*known.arguments_of(hidden, labels, opt), form=form)
        return loss if loss is None else divided(loss, opt.get("num_items_in_batch")), ""

    def lose_by_torch(self, logits: Deferred, *args: Any, **kwargs: Any) -> Any:
        """Return torch's loss of what stands for logits."""
        self._lost.append(logits)
        hidden, form, why = self._rows_of(logits)
        asked = loss_arguments(hidden, *args, **kwargs)
        if not isinstance(asked, tuple) or not _are_rows(hidden, asked[1]):
            why = why or "torch's loss is called in another way than with rows and labels"
        if why or not isinstance(asked, tuple):
            self._dispatcher.leave_out(why)
        else:
            loss = self._computed(hidden, *asked[1:], form=form)
            if loss is not None:
                return loss if cast_of(hidden) else loss.to(logits.dtype)
        return functional.cross_entropy(logits.made(), *args, **kwargs)

    def completed(self, outputs: Any) -> Any:
        """Return a model's outputs without stand-ins of logits: with logits if it has no loss."""
        if self._has_logits and not self._lost:
            self._dispatcher.leave_out(READS_LOGITS)
        if not isinstance(outputs, (tuple, Mapping)):
            return self._logits_for(outputs)
        if isinstance(outputs, tuple):
            placed = [self._logits_for(one) for one in outputs]
            # A named tuple takes its fields one by one.
            return type(outputs)(*placed) if hasattr(outputs, "_fields") else tuple(placed)
        named = {name: self._logits_for(one) for name, one in outputs.items()}
        return type(outputs)(**{name: one for name, one in named.items() if one is not None})

    def _logits_for(self, one: Any) -> Any:
        if not isinstance(one, Deferred):
            return _made(one)
        is_lost = any(one.is_of(lost) for lost in self._lost)
        return None if is_lost and not one.source.is_made else one.made()

    def _rows_of(self, logits: Deferred) -> tuple[Any, Form, str]:
        """Return the input of the head for these logits, what is done to them, and why not."""
        hidden, form, shape = logits.hidden, logits.form(), logits.shape
        if logits.source.is_made:
            return hidden, Form(), READS_LOGITS
        if not logits.source.is_cast_alike:
            return hidden, Form(), OTHER_AUTOCAST
        if not torch.is_grad_enabled():
            return hidden, Form(), NO_GRADIENTS
        if form is None or shape[-1] != self._head.weight.shape[0]:
            return hidden, Form(), CHANGES_LOGITS
        bias = form.bias
        if bias is not None and self._state.is_zero(bias):
            form = form._replace(bias=None)
        elif bias is not None and self._head.bias is not None:
            return hidden, form, CHANGES_LOGITS
        elif bias is not None and bias.dtype != (cast_of(hidden) or hidden.dtype):
            return hidden, form, OTHER_DTYPE
        return hidden.reshape(*shape[:-1], hidden.shape[-1]), form, ""

    def _computed(self, rows: Tensor, targets: Tensor, *options: Any, form: Form) -> Tensor | None:
        """Return the loss by a kernel; None: the original computes it."""
        bias = self._head.bias if form.bias is None else form.bias.reshape(-1)
        rows, weight, bias = (_autocast(one) for one in (rows, self._head.weight, bias))
        options += () if form.shape == PLAIN else form.shape
        decision = self._decide((rows, weight, targets, bias, *options))
        function = decision.function
        if function is None:
            return None
        ignore_index, _, reduction, *_ = options
        # Inductor would compile anew for each number of rows.
        is_free = reduction != "none" and decision.provider != INDUCTOR
        if is_free and self._state.selects(targets, ignore_index):
            counted = (targets != ignore_index).nonzero().view(-1)
            rows, targets = rows.index_select(0, counted), targets.index_select(0, counted)
        loss: Tensor = function(rows, weight, targets, bias, *options)
        return loss

    def _decide(self, arguments: tuple[Any, ...]) -> Decision:
        rows, weight, targets, bias, *options = arguments
        key = (key_of(rows, weight), targets.shape, bias is None, *options)
        decision = self._dispatcher.known.get(key)
        if decision is None:
            shape = (*rows.shape, weight.shape[0])
            is_default = tuple(options) == PLAIN_LOSS
            decision = self._dispatcher.decide(key, arguments, shape, is_default=is_default)
        decision.num_calls += 1
        return decision


def _are_rows(hidden: Tensor, targets: Any) -> bool:
    """Return whether there is one index for each row of hidden states."""
    is_index = isinstance(targets, Tensor) and targets.dtype == torch.int64
    return is_index and hidden.dim() == 2 and hidden.shape[:1] == targets.shape


def _autocast(one: Tensor | None) -> Any:
    """Return the argument of a linear layer as autocast casts it."""
    cast = None if one is None or one.dtype == torch.float64 else cast_of(one)
    return one if one is None or cast is None else one.to(cast)


class _State:
    """What a site knows of its model's data: reading it makes the host wait, so it is kept."""

    def __init__(self) -> None:
        self._selects: bool | None = None
        self._zero: tuple[Tensor, int, bool] | None = None

    def selects(self, targets: Tensor, ignore_index: int) -> bool:
        """Return whether few labels counted when this was asked for the first time."""
        if targets.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if self._selects is None:
            share = (targets != ignore_index).float().mean()
            self._selects = bool(share <= FEW_LABELS)
        return self._selects

    def is_zero(self, bias: Tensor) -> bool:
        """Return whether a bias is all zeros, and gets no gradient."""
        if bias.requires_grad or bias.is_inference():
            return False
        known = self._zero
        if known is None or known[0] is not bias or known[1] != bias._version:
            if bias.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            known = self._zero = (bias, bias._version, not bool(bias.any()))
        return known[2]


def _site(
    name: str,
    module: Module,
    function: Callable[..., Any] | None,
    call: _Call,
    request: Request,
) -> Site:
    dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, call.settings)
    switch = Switch()
    original = type(module).forward
    put = bound(_headless(original, call, dispatcher, switch), original, switch)

    def why(owner: Any) -> str | None:
        # Another site may have replaced it.
        if call.loss is None or isinstance(owner.__dict__.get(ATTRIBUTE), Loss):
            return None
        return why_changed(function, call.loss, owner)

    return Site(name, module, put, dispatcher, switch=switch, why_changed=why)


class _Call:
    """Calls of a model without its head."""

    def __init__(
        self,
        path: Path,
        labels: Labels,
        model: Module,
        known: Known | frozenset[Setting],
    ) -> None:
        self.labels = labels
        self.loss = known if isinstance(known, Known) else None
        self.settings = known.settings if isinstance(known, Known) else known
        self._path, self._state = path, _State()
        self._own = model.__dict__.get(ATTRIBUTE)
        self._is_changed = None if self.loss is None else changes_of(self.loss.reads)

    def why_not(self, model: Any) -> str:
        """Return why this call needs logits; empty: it does not."""
        on_path = _modules_on(model, self._path)
        if not on_path or type(on_path[-1]) is not Linear:
            title = _title(on_path[-1]) if on_path else "part of another module"
            return f"its head is a {title} now, not a torch.nn.Linear"
        if not all(map(is_passed_over, on_path)):
            return "its head has hooks"
        if not all(is_passed_over(one) for one in model._modules.values() if _is_loss(one)):
            return "its loss has hooks"
        loss = model.__dict__.get(ATTRIBUTE)
        if loss is not self._own and not isinstance(loss, Loss):
            return "it has another loss now"
        return CHANGED if self._is_changed is not None and self._is_changed(model) else ""

    def without_head(self, model: Any, dispatcher: Dispatcher) -> _Headless:
        """Return a proxy of a model with a stand-in of its head, for one call."""
        on_path = [model, *_modules_on(model, self._path)]
        fused = _Fused(model, on_path[-1], self.loss, dispatcher, self._state)
        below: Module = _Deferring(on_path[-1], fused.compute, fused.lose_by_torch)
        calls = []
        for name, module in reversed(list(zip(self._path, on_path, strict=False))):
            others = {ATTRIBUTE: fused} if module is model else {}
            calls.append(CallProxy(module, {**module._modules, name: below}, **others))
            below = calls[-1].clone
        return _Headless(below, calls, fused)


class _Headless(NamedTuple):
    """A model for one call: its own code, without its head."""

    proxy: Module
    calls: list[CallProxy]
    fused: _Fused


def _headless(
    original: Callable[..., Any], call: _Call, dispatcher: Dispatcher, switch: Switch
) -> Callable[..., Any]:
    """Return the forward of a model that runs without its head where it can."""
    note = dispatcher.noting()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or call.labels.given(args, kwargs) is None:
            return original(self, *args, **kwargs)
        if is_compiling():
            note(False)
            return original(self, *args, **kwargs)
        why = "the model is not training: its logits may be wanted"
        if self.training and torch.is_grad_enabled():
            why = call.why_not(self)
        if why:
            dispatcher.leave_out(why)
            return original(self, *args, **kwargs)
        run = call.without_head(self, dispatcher)
        try:
            outputs = original(run.proxy, *args, **kwargs)
        finally:
            for one in run.calls:
                one.copy_back()
        return run.fused.completed(outputs)

    return forward


FAMILY = Family(kernels=(KERNEL,), find=find)
