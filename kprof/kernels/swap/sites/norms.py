"""Norms: modules that compute an RMSNorm or a LayerNorm of rows, under any name.

A probe runs the module's own code on random rows, some of them tiny, so that the rounding order and
the place of epsilon show. The candidate that agrees tells which kernel computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from kprof.kernels import OURS, kernel_named
from kprof.kernels.norm import forked_norm
from kprof.kernels.runtime import needs_gradient
from kprof.kernels.swap.dispatch import OTHERWISE, Decision, Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import python_modules, why_foreign
from kprof.kernels.swap.probes import (
    ARITHMETIC,
    ARRANGING,
    CANNOT,
    DTYPES,
    CannotCopyError,
    Operators,
    Setting,
    are_alike,
    autocast_of,
    distance,
    have_same_gradients,
    is_another,
    kind_of,
    place_of,
    probing,
    set_mode,
    set_number,
    settings_where,
    stand_in,
)
from kprof.kernels.swap.reads import CHANGED, Number, Reads, reads_of_module
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.uses import Narrowing

RMSNORM, LAYERNORM = "rmsnorm", "layernorm"
# Parameters that kernels take, as most norms call them.
TAKEN = WEIGHT, BIAS = "weight", "bias"
OTHER = "it computes something else than an RMSNorm or a LayerNorm of rows"
MOVED = "its weight is no parameter of its own: it is sharded, pruned or parametrized"
FORMS = ("llama", "torch", "gemma")
USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, torch.finfo(torch.float32).eps)
# Scales of rows: epsilon is a small part of the mean square, about half, or most.
SCALES = (1.0, 30.0, 1e-1, 1e-2, 3e-3, 1e-3, 1e-4, 1.0)
# Dimensions before the columns.
BATCHES = (2, 4)
LEADS = ((8,), (2, 2, 2), (1, 1), (1, 130))
OPERATORS = ARRANGING | ARITHMETIC
OPERATORS |= {"_fused_rms_norm", "linalg_vector_norm", "mean", "native_layer_norm", "norm"}
OPERATORS |= {"rms_norm", "rsqrt", "sqrt", "std", "std_mean", "sum", "var", "var_mean"}


class Names(NamedTuple):
    """The names of a norm's parameters."""

    weight: str
    bias: str
    """As `has_bias` says, also of one that is not there."""
    has_bias: bool


@dataclass(frozen=True)
class Recognised:
    """A recognised norm."""

    kernel: str
    names: Names
    form: str | None
    """Rounding order of an RMSNorm."""
    eps: float
    eps_name: str | None
    """Attribute with the epsilon; None: it is in the code."""
    settings: frozenset[Setting]
    keeps_order: bool
    """Whether its result lies in memory as its input does, where dimensions are transposed."""


def looks_like_a_norm(module: Module) -> bool:
    """Return whether its name or its epsilon suggests a norm of rows."""
    if isinstance(module, (_NormBase, torch.jit.ScriptModule)) or module._modules:
        return False
    return "norm" in type(module).__name__.lower() or (
        module._parameters.get("weight") is not None and bool(_eps_names(module))
    )


def why_no_weights(module: Module) -> str | None:
    """Return why it has not one row of weights, and perhaps one of biases; None: it has."""
    own = module._parameters
    if own.get("weight") is None:
        has_moved = "weight" in module.__dict__ or "weight_orig" in own
        if has_moved or parametrize.is_parametrized(module, "weight"):
            return MOVED
    names = names_of_weights(module)
    if not names:
        return "it has no weight"
    weight, bias = (own.get(one) for one in names[0][:2])
    assert weight is not None
    if weight.dim() != 1:
        return f"its weight has {weight.dim()} dimensions"
    if bias is not None and bias.shape != weight.shape:
        return "its bias has another shape than its weight"
    return None


def names_of_weights(module: Module) -> list[Names]:
    """Return which parameters may be its weight and its bias, the likeliest first.

    Own code calls them as it likes: scale and shift, gamma and beta, g.
    """
    own = [name for name, one in module._parameters.items() if one is not None]
    if WEIGHT in own:
        return [Names(WEIGHT, BIAS, BIAS in own)]
    if len(own) == 1:
        return [Names(own[0], BIAS, False)]
    if len(own) != 2:
        return []
    first, second = own
    return [Names(first, second, True), Names(second, first, True)]


def _eps_names(module: Module) -> list[str]:
    return [
        name
        for name, value in module.__dict__.items()
        if isinstance(value, float) and 0 <= value <= 1e-2
    ]


def recognise(module: Module, reads: Reads, names: Names) -> Recognised | str:
    """Recognise a norm with these parameters; a sentence says why it is not known."""
    device, dtype = place_of(module), _dtype_of(module, names)
    if dtype not in DTYPES:
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    with probing(device) as generator:
        try:
            probe = Probe(module, device, generator, names)
            original = probe.original((dtype, None))
        except CannotCopyError as error:
            return str(error)
        except CANNOT as error:
            return f"its own code failed on random rows ({type(error).__name__}: {error})"
        best = min(
            _candidates(module, dtype, reads, has_bias=names.has_bias),
            key=lambda one: distance(probe.replaced((dtype, None), one), original),
        )
        if not are_alike(probe.replaced((dtype, None), best), original):
            return OTHER
        return _recognise(probe, best, dtype, reads)


def _recognise(probe: Probe, best: Candidate, dtype: torch.dtype, reads: Reads) -> Recognised | str:
    settings = settings_where(
        lambda setting: all(
            are_alike(probe.replaced(setting, best), probe.original(setting, is_training))
            for is_training in (False, True)
        )
    )
    if (dtype, None) not in settings:
        return "it computes something else when it trains"
    if not probe.has_gradients_of(best):
        return "its gradients are those of something else"
    kernel, form, eps, eps_name = best
    why = probe.why_not_operators() or probe.why_not_everywhere(best)
    if why is not None:
        return why
    for number in reads.numbers:
        if number.name != eps_name and probe.is_read(number):
            return f"it reads {number.title}, which the kernel does not take"
    return Recognised(kernel, probe.names, form, eps, eps_name, settings, probe.keeps_order())


def _dtype_of(module: Module, names: Names) -> torch.dtype:
    weight = module._parameters[names.weight]
    assert weight is not None
    return weight.dtype


Candidate = tuple[str, str | None, float, str | None]


def _candidates(
    module: Module, dtype: torch.dtype, reads: Reads, *, has_bias: bool
) -> Iterator[Candidate]:
    names = [name for name in _eps_names(module) if name in reads.names]
    named = [(module.__dict__[name], name) for name in names]
    usual = [(eps, None) for eps in (*USUAL_EPS, torch.finfo(dtype).eps)]
    for eps, name in (*named, *usual):
        if not has_bias:
            for form in FORMS:
                yield RMSNORM, form, eps, name
        yield LAYERNORM, None, eps, name


class Probe:
    """Runs a norm's own code and candidates on the same rows."""

    def __init__(
        self, module: Module, device: torch.device, generator: torch.Generator, names: Names
    ) -> None:
        self._device = device
        self.names = names
        own = module._parameters
        weight = own[names.weight]
        assert weight is not None
        self._dtype = weight.dtype
        columns = len(weight)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self._parameters = {
            name: None if one is None else (0.5 + 0.2 * draw(*one.shape)).to(one.dtype)
            for name, one in own.items()
        }
        self._module = stand_in(module, self._parameters, {})
        scales = torch.tensor(SCALES, device=device)[:, None]
        self.rows = draw(len(SCALES), columns) * scales + 0.1 * scales

    def original(
        self, setting: Setting, is_training: bool = False, lead: tuple[int, ...] = BATCHES
    ) -> object:
        """Return the result of the module's code."""
        dtype, cast = setting
        set_mode(self._module, is_training)
        with autocast_of(self._device, cast):
            return self._run(self._rows_in(lead).to(dtype), lead)

    def _rows_in(self, lead: tuple[int, ...]) -> Tensor:
        num_rows = math.prod(lead)
        return self.rows.repeat(-(-num_rows // len(self.rows)), 1)[:num_rows]

    def _run(self, rows: Tensor, lead: tuple[int, ...] = BATCHES) -> object:
        # In several dimensions, so that a norm over another dimension shows.
        x = rows.unflatten(0, lead)
        result = type(self._module).forward(self._module, x)
        is_known = isinstance(result, Tensor) and result.shape == x.shape
        return result.reshape(rows.shape) if is_known else result

    def why_not_operators(self) -> str | None:
        """Return an operator that no norm needs, or that it writes to its input; None: neither."""
        x = self.rows.to(self._dtype, copy=True).unflatten(0, BATCHES)
        version = x._version
        for is_training in (False, True):
            set_mode(self._module, is_training)
            with Operators(x, *self._parameters.values()) as operators:
                type(self._module).forward(self._module, x)
            why = operators.why_not(OPERATORS)
            if why is not None:
                return why
        return "it writes to its input" if x._version != version else None

    def why_not_everywhere(self, one: Candidate) -> str | None:
        """Return for which dimensions it differs from a candidate; None: none."""
        for lead in LEADS:
            try:
                original = self.original((self._dtype, None), lead=lead)
            except CANNOT:
                continue
            rows = self._rows_in(lead).to(self._dtype)
            if not are_alike(_computed(rows, self._given(), one), original):
                return f"it computes something else for inputs of {lead} rows"
        return None

    def keeps_order(self) -> bool:
        """Return whether the result lies in memory as an input of transposed dimensions does."""
        x = self._rows_in((2, 3, 4)).to(self._dtype).unflatten(0, (2, 3, 4)).transpose(1, 2)
        result = type(self._module).forward(self._module, x)
        return bool(result.stride() == x.stride())

    def is_read(self, number: Number) -> bool:
        """Return whether the result depends on this number."""
        return is_another(
            lambda: [self.original((self._dtype, None), one) for one in (False, True)],
            set_number(self._module, number),
        )

    def has_gradients_of(self, one: Candidate) -> bool:
        """Return whether a candidate has the gradients of the module's code, in float32."""
        names = self.names[: 1 + self.names.has_bias]

        def original(rows: Tensor, *weights: Tensor) -> object:
            own = {**self._parameters, **dict(zip(names, weights, strict=True))}
            self._module.__dict__["_parameters"] = own
            return self._run(rows)

        def replaced(rows: Tensor, *weights: Tensor) -> object:
            return _computed(rows, weights, one)

        weights = self._given()
        try:
            return have_same_gradients(replaced, original, self.rows, *weights)
        finally:
            self._module.__dict__["_parameters"] = self._parameters

    def replaced(
        self, setting: Setting, one: Candidate, function: Callable[..., Any] | None = None
    ) -> object:
        """Return the result of a candidate, by the reference or another function."""
        return _computed(self.rows.to(setting[0]), self._given(), one, function)

    def _given(self) -> list[Tensor | None]:
        """Return the weight, and the bias if there is one."""
        return [self._parameters[name] for name in self.names[: 1 + self.names.has_bias]]


def _computed(
    rows: Tensor,
    weights: Sequence[Tensor | None],
    one: Candidate,
    function: Callable[..., Any] | None = None,
) -> object:
    kernel, form, eps, _ = one
    function = function or kernel_named(kernel).reference
    weight, bias = weights if len(weights) == 2 else (*weights, None)
    if kernel == RMSNORM:
        options = () if form == FORMS[0] else (form,)
        return function(rows, weight, eps, *options)
    return function(rows, weight, bias, eps)


PERMUTED = "its rows lie in another order, which the original's result keeps"
MOVED_SINCE = "its weights are no parameters of its own any more"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the norms below a module."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        found = norm_of(module, request)
        if found is None:
            continue
        kernel = found.kernel if isinstance(found, Recognised) else _kernel_of(module, request)
        if kernel not in request.kernels:
            continue
        label = name or type(module).__name__
        why = why_foreign(module) or (found if isinstance(found, str) else None)
        if why is None:
            why = request.once((*kind_of(module), kernel), _check, module, found, request)
        reads = reads_of(module)
        if isinstance(found, str) or isinstance(reads, str) or why is not None:
            yield Skip(label, kernel, type(module).__name__, why or str(reads))
        else:
            yield _site(label, module, found, compared(module, found, reads), request)


def _kernel_of(module: Module, request: Request) -> str:
    """Return the kernel to report for a norm that was not recognised."""
    asked = [one for one in (RMSNORM, LAYERNORM) if one in request.kernels]
    is_layer = "layer" in type(module).__name__.lower() and LAYERNORM in asked
    return LAYERNORM if is_layer else asked[0] if asked else ""


def compared(module: Module, found: Recognised, reads: Reads) -> Reads:
    """Return the reads to compare: all except those that the kernel reads at each call."""
    taken = found.names[:1] if found.kernel == RMSNORM else found.names[:2]
    empty = [name for name, one in module._parameters.items() if one is None and name not in taken]
    return replace(
        reads,
        own=[one for one in reads.own if one[0] != found.eps_name],
        empty=[*reads.empty, *(name for name in empty if name not in reads.empty)],
    )


def norm_of(module: Module, request: Request) -> Recognised | str | None:
    """Return a recognised norm, or why it was not recognised; None: it is no norm."""
    if not looks_like_a_norm(module):
        return None
    why = why_no_weights(module)
    if why is not None:
        return why
    return request.once(kind_of(module), _recognised, module)


def reads_of(module: Module) -> Reads | str:
    """Return what the code of a norm reads, or why this is not known."""
    names = names_of_weights(module)
    return reads_of_module(module, taken=names[0][:2] if names else TAKEN)


def _recognised(module: Module) -> Recognised | str:
    reads = reads_of(module)
    if isinstance(reads, str):
        return reads
    outcomes = [recognise(module, reads, names) for names in names_of_weights(module)]
    return next((one for one in outcomes if isinstance(one, Recognised)), outcomes[0])


def _check(module: Module, found: Recognised, request: Request) -> str | None:
    """Run the kernel on the rows of a probe; return why it does not agree."""
    device = place_of(module)
    kernel = request.kernels[found.kernel]
    with probing(device) as generator:
        probe = Probe(module, device, generator, found.names)
        dtype = _dtype_of(module, found.names)
        rows = probe.rows.to(dtype)
        options = () if is_default(found) else (found.form,)
        function, provider, _ = request.providers.choose(
            kernel,
            rows,
            tuple(rows.shape),
            is_default=is_default(found),
            arguments=(rows, rows, found.eps, *options),
        )
        if function is None:
            # Calls may come from another device; each is decided later.
            return None
        new = probe.replaced((dtype, None), (found.kernel, found.form, found.eps, None), function)
        if not are_alike(new, probe.original((dtype, None))):
            return f"the kernel of {provider} does not agree with it on random rows"
    return None


def is_default(found: Recognised) -> bool:
    """Return whether it rounds as every provider does."""
    return found.form in (None, FORMS[0])


def _site(name: str, module: Module, found: Recognised, reads: Reads, request: Request) -> Site:
    kernel = request.kernels[found.kernel]
    maker, settings = request.new_maker(), found.settings
    dispatcher = Dispatcher(
        kernel, request.providers, settings, is_default=is_default(found), maker=maker
    )
    switch = Switch()
    original = type(module).forward
    forward = _normalising(original, found, reads, dispatcher, switch, maker is None)
    put = bound(forward, original, switch)
    return Site(name, module, put, dispatcher, switch=switch, why_changed=reads.why_changed)


def _normalising(
    original: Callable[..., Any],
    found: Recognised,
    reads: Reads,
    dispatcher: Dispatcher,
    switch: Switch,
    may_fork: bool,
) -> Callable[..., Any]:
    """Return the forward of a swapped norm; of a fork, with its input for further uses."""
    known, decide, trace = dispatcher.known, dispatcher.decide, dispatcher.tracing()
    run_original, is_changed = running_original(original, dispatcher, switch), changes_of(reads)
    constant, eps_name, takes_bias = found.eps, found.eps_name, found.kernel == LAYERNORM
    keeps_order, form = found.keeps_order, found.form or "layer"
    options = () if is_default(found) else (found.form,)
    names = weight_name, bias_name, _ = found.names
    # Between the arguments of a call and the dtype of its result.
    defaults = () if takes_bias or options else FORMS[:1]

    def forward(
        self: Any,
        x: Any = None,
        /,
        *args: Any,
        kprof_readers: Narrowing | None = None,
        kprof_forks: bool = False,
        **kwargs: Any,
    ) -> Any:
        if switch.owner is not self or args or kwargs or not isinstance(x, Tensor):
            return run_original(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        if not x.is_contiguous() and is_permuted(x):
            order = None if is_compiling() or not keeps_order else order_of(x)
            if order is None:
                return run_original(self, PERMUTED, x)
            # The rows as they lie in memory.
            back = [order.index(place) for place in range(len(order))]
            return forward(self, x.permute(order)).permute(back)
        if have_moved(self, names) or (is_changed is not None and is_changed(self)):
            why = MOVED_SINCE if have_moved(self, names) else CHANGED
            return run_original(self, why, x)
        parameters = self._parameters
        weight = parameters.get(weight_name)
        bias = parameters.get(bias_name) if takes_bias else None
        eps = constant if eps_name is None else getattr(self, eps_name)
        arguments = (x, weight, bias, eps) if takes_bias else (x, weight, eps, *options)
        if is_compiling():
            function = trace(*arguments)
        else:
            key = key_of(x, weight, bias)
            decision = known.get(key) or decide(key, arguments)
            decision.num_calls += 1
            function = decision.function
            rounded = rounding(kprof_readers, decision, x, defaults)
            forks = kprof_forks and may_fork and function is not None and needs_gradient(x)
            if forks and decision.provider == OURS:
                return forked_norm(form, x, weight, bias, eps, *rounded[len(defaults) :])
            arguments += rounded
        return original(self, x) if function is None else function(*arguments)

    return forward


def rounding(
    readers: Narrowing | None, decision: Decision, x: Tensor, defaults: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the arguments that round a norm to the dtype of its readers; none: it stays as it is.

    `defaults`: those that stand between the arguments of other calls and the dtype.
    """
    if readers is None or decision.provider != OURS:
        return ()
    dtype = readers.dtype_for(x)
    return () if dtype is None else (*defaults, dtype)


def have_moved(norm: Module, names: Names) -> bool:
    """Return whether a norm's weight or bias is no longer its own parameter.

    Pruning, parametrization and FullyShardedDataParallel make a plain attribute of it.
    """
    own, parameters = norm.__dict__, norm._parameters
    weight, bias, has_bias = names
    return (
        parameters.get(weight) is None
        or (parameters.get(bias) is not None) is not has_bias
        or own.get(weight) is not None
        or own.get(bias) is not None
    )


def is_permuted(x: Tensor) -> bool:
    """Return whether the order of elements in memory differs from that of the dimensions."""
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if step and size > 1]
    # Neighbours: a compiler sorts no sizes that may change.
    return any(step < later for step, later in pairwise(steps))


def order_of(x: Tensor) -> list[int] | None:
    """Return the dimensions in the order of memory; None: the last one is not the innermost."""
    last = x.dim() - 1
    order = sorted(range(last), key=lambda place: -x.stride(place))
    steps = [x.stride(place) for place in order if x.shape[place] > 1]
    return [*order, last] if x.stride(last) == 1 and all(step > 1 for step in steps) else None


FAMILY = Family(kernels=(RMSNORM, LAYERNORM), find=find)
