"""Gated units: modules that compute down(activation(gate(x)) * up(x)), packed or not.

The last layer may be in another module, and the first ones, too: then the module returns the
product, or gets what a layer has made. A probe runs the module's own code with layers that return
given tensors. The input of the last layer, or the result, tells which layer is which, and what is
computed between them; no GEMM is needed. The provider `kprof-lean` computes the product again for
gradients instead of saving it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import Linear, Module

from kprof.kernels import kernel_named
from kprof.kernels.swap.dispatch import OTHERWISE, Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import is_passed_over, python_modules, why_foreign
from kprof.kernels.swap.probes import (
    ARITHMETIC,
    ARRANGING,
    CANNOT,
    DTYPES,
    CannotCopyError,
    Direct,
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
from kprof.kernels.swap.providers import LEAN
from kprof.kernels.swap.reads import CHANGED, Number, Reads, reads_of_module
from kprof.kernels.swap.site import CallProxy, Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family

SWIGLU, GEGLU = "swiglu", "geglu"
Options = tuple[Any, ...]
# Kernel and options.
CANDIDATES: tuple[tuple[str, Options], ...] = (
    (SWIGLU, ()),
    (GEGLU, ("tanh",)),
    (GEGLU, ("none",)),
)
# Stands for a layer where the module gets what it has made.
INPUT = ""
NUM_COLUMNS = 128
# float32 distinguishes activations that agree in fewer bits.
IN_FULL: Setting = (torch.float32, None)
# Scales of rows: most distinguish activations, the last ones show clamps of large numbers.
SCALES = (1.0, 3.0, 3.0, 3.0, 3.0, 10.0, 50.0, 3e3)
OPERATORS = ARRANGING | ARITHMETIC | {"erf", "exp", "gelu", "sigmoid", "silu", "tanh"}
# Leading dimensions: rows alone, batches in two and three dimensions, one row, many rows.
LEADS = ((8,), (2, 2, 2), (1, 1), (1, 1_030))
BATCHES = (2, 4)
# A term, a factor, or the probability of a dropout, that change nothing; each call compares them.
NEUTRAL = (0, 1)
# Parts of the names of layers and classes of gated MLPs.
GATES = (("gate",), ("w1", "w2", "w3"), ("wi_0", "wi_1"))
CLASSES = ("expert", "feedforward", "feed_forward", "ffn", "glu", "mlp")
# The product of two values must be finite.
LARGEST_OF = {torch.float16: 150.0}
SPREAD = "its rows lie in memory in another order, which the original's result keeps"


@dataclass(frozen=True)
class Recognised:
    """A recognised gated unit."""

    kernel: str
    options: Options
    gate: str
    """Name of the layer before the activation."""
    up: str | None
    """None: the gate's layer computes both."""
    down: str | None
    """None: the module returns the product."""
    passed_over: tuple[str, ...]
    """Other children, such as the activation, that the kernel replaces."""
    is_up_first: bool
    """Whether the layer of `up` runs before that of `gate`."""
    settings: frozenset[Setting]


def layers_of(module: Module) -> dict[str, Module]:
    """Return the children with in_features and out_features, as linear layers have."""
    return {
        name: child
        for name, child in module._modules.items()
        if child is not None and all(_is_number(child, size) for size in SIZES)
    }


SIZES = ("in_features", "out_features")


def _is_number(module: Module, name: str) -> bool:
    """Return whether an attribute is a number, which no code of the module computes."""
    return isinstance(inspect.getattr_static(module, name, None), int)


def looks_gated(module: Module) -> bool:
    """Return whether its names suggest a gated unit."""
    names, title = layers_of(module), type(module).__name__.lower()
    if len(names) < len(("up", "down")):
        return "glu" in title
    if "attention" in title or not _lead_to_another(names.values()):
        return False
    if _are_names_of_gates(names):
        return True
    return len(names) == 3 and any(part in title for part in CLASSES)


def _are_names_of_gates(names: Iterable[str]) -> bool:
    found = list(names)
    return any(all(any(part in name for name in found) for part in parts) for parts in GATES)


def why_unknown_layers(module: Module) -> str | None:
    """Return why the layers of a gated MLP, by its names, are not known; None: it is none."""
    layers = [
        name
        for name, child in module._modules.items()
        if child is not None and getattr(child._parameters.get("weight"), "dim", int)() == 2
    ]
    is_named = any(part in type(module).__name__.lower() for part in CLASSES)
    if layers_of(module) or len(layers) not in (2, 3) or not is_named:
        return None
    return (
        "its layers have no in_features and out_features" if _are_names_of_gates(layers) else None
    )


def _lead_to_another(layers: Iterable[Any]) -> bool:
    """Return whether one layer takes the output of another one, or half of it.

    A lazy layer has no size yet, and may match.
    """
    sizes = [(one.in_features, one.out_features) for one in layers]
    taken = {given for given, _ in sizes}
    return 0 in taken or any({made, made / 2} & taken for _, made in sizes)


class Given(Module):
    """A layer that returns a given tensor, and records its inputs."""

    def __init__(self, layer: Any, order: list[Given] | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.given: list[object] = []
        self.result: Tensor | None = None
        self.modes: object = None
        self._order = order

    def __call__(self, *args: Any) -> Any:
        """Return the tensor."""
        self.given.append(args[0] if len(args) == 1 else args)
        self.modes = modes()
        if self._order is not None:
            self._order.append(self)
        return self.result

    @property
    def weight(self) -> Tensor:
        """An empty tensor, of the dtype that the weights would have."""
        return torch.empty(0, dtype=torch.float32 if self.result is None else self.result.dtype)


class GivenOnce(Given):
    """A layer that gives its tensor away, and keeps no reference to it."""

    def __call__(self, *args: Any) -> Any:
        """Return the tensor."""
        result, self.result = self.result, None
        return result


def modes() -> object:
    """Return torch's modes: gradients, inference and autocast."""
    devices = [one for one in ("cpu", "cuda") if torch.amp.is_autocast_available(one)]
    casts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


class NotGatedError(Exception):
    """A module that is not a gated MLP."""


class Probe:
    """Runs a copy of a module with layers that return given tensors."""

    def __init__(self, module: Module, device: torch.device, generator: torch.Generator) -> None:
        self._device = device
        self._order: list[Given] = []
        self._layers = {
            name: Given(layer, self._order) for name, layer in layers_of(module).items()
        }
        children: dict[str, Module | None] = {
            name: self._layers.get(name) or (child and Direct(child))
            for name, child in module._modules.items()
        }
        self._module = stand_in(module, module._parameters, children)
        set_mode(self._module, False)
        columns = NUM_COLUMNS * (1 + (len(self._layers) < len(("gate", "up", "down"))))
        scales = torch.tensor(SCALES)[:, None]
        self.names = tuple(self._layers) or (INPUT,)
        """Of the layers, or of the input that stands for one."""
        self._drawn = {
            name: (scales * torch.randn(len(SCALES), columns, generator=generator)).to(device)
            for name in self.names
        }

    def run(
        self,
        setting: Setting,
        lead: tuple[int, ...] = BATCHES,
        *,
        x_dtype: torch.dtype | None = None,
        operators: Operators | None = None,
    ) -> tuple[str | None, object]:
        """Return the layer that computes the result, and its input; None: it is the result.

        Raises:
            NotGatedError: the module has another form.
        """
        dtype = setting[0]
        drawn = {name: self.of(name, dtype, lead) for name in self.names}
        return self._run(setting[1], drawn, x_dtype or dtype, operators)

    def _run(
        self,
        cast: torch.dtype | None,
        results: dict[str, Tensor],
        x_dtype: torch.dtype,
        operators: Operators | None = None,
    ) -> tuple[str | None, object]:
        self._order.clear()
        for name, layer in self._layers.items():
            layer.result, layer.given = results[name], []
        x = results.get(INPUT)
        if x is None:
            x = (next(iter(results.values())) + 1).detach().to(x_dtype)
        versions = [one._version for one in (x, *results.values())]
        if operators is not None:
            operators.know((x, *results.values()))
        with autocast_of(self._device, cast), operators or nullcontext():
            outside = modes()
            returned = type(self._module).forward(self._module, x)
        last = [name for name, layer in self._layers.items() if layer.result is returned]
        self._check_layers(last, x, outside)
        if versions != [one._version for one in (x, *results.values())]:
            raise NotGatedError("it writes to its input, or to what its layers return")
        return (last[0], self._layers[last[0]].given[0]) if last else (None, returned)

    def _check_layers(self, last: list[str], x: Tensor, outside: object) -> None:
        """Raise if layers were not called as those of a gated unit are."""
        if not last and len(self._layers) > len(("gate", "up")):
            raise NotGatedError("its result is not that of one of its layers")
        if any(len(layer.given) != 1 for layer in self._layers.values()):
            raise NotGatedError("it does not call each of its layers once")
        first = [layer.given[0] for name, layer in self._layers.items() if name not in last]
        if any(given is not x for given in first):
            raise NotGatedError("its first layers do not get its input as it is")
        if any(layer.modes != outside for layer in self._layers.values()):
            raise NotGatedError("it runs its layers in another mode of autocast or of gradients")

    def is_before(self, name: str, other: str) -> bool:
        """Return whether one layer ran before another in the last run."""
        return self._order.index(self._layers[name]) < self._order.index(self._layers[other])

    def given_to_last(self, setting: Setting, is_training: bool) -> object:
        """Return the input of the last layer, or the result without one."""
        set_mode(self._module, is_training)
        return self.run(setting)[1]

    def agrees(
        self, setting: Setting, kernel: str, options: Options, gate: str, up: str | None
    ) -> bool:
        """Return whether the input of the last layer is the result of a kernel's reference."""
        expected = _reference(kernel, options, *self.tensors(setting, gate, up))
        try:
            return all(
                are_alike(expected, self.given_to_last(setting, is_training))
                for is_training in (False, True)
            )
        except NotGatedError:
            return False

    def why_not_training(self) -> str:
        """Return why a module differs in training mode."""
        try:
            self.given_to_last(IN_FULL, True)
        except NotGatedError as error:
            return f"where it trains, {error}"
        return "it computes something else when it trains"

    def has_gradients_of(self, kernel: str, options: Options, gate: str, up: str | None) -> bool:
        """Return whether the gradients are those of a kernel's reference."""
        given = [one for one in self.tensors(IN_FULL, gate, up) if one is not None]
        others = [None] if up is None else []
        try:
            return have_same_gradients(
                lambda *given: _reference(kernel, options, *given, *others),
                lambda *given: self.given_to_last_by(gate, up, *given),
                *given,
            )
        except NotGatedError:
            return False

    def tensors(
        self, setting: Setting, gate: str, up: str | None, lead: tuple[int, ...] = BATCHES
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tensors that these layers return."""
        dtype = setting[0]
        return self.of(gate, dtype, lead), None if up is None else self.of(up, dtype, lead)

    def given_to_last_by(self, gate: str, up: str | None, *tensors: Tensor) -> object:
        """Return the input of the last layer if these layers return these float32 tensors."""
        drawn = {name: self.of(name, torch.float32) for name in self.names}
        results = drawn | dict(zip((gate, up), tensors, strict=False))
        return self._run(None, {name: results[name] for name in drawn}, torch.float32)[1]

    def why_not_operators(self) -> str | None:
        """Return an operator that no gated MLP needs; None: none."""
        for is_training in (False, True):
            set_mode(self._module, is_training)
            operators = Operators()
            self.run(IN_FULL, operators=operators)
            why = operators.why_not(OPERATORS)
            if why is not None:
                return why
        return None

    def is_read(self, number: Number) -> bool:
        """Return whether the result depends on this number."""
        return is_another(lambda: self._results(), set_number(self._module, number))

    def _results(self) -> list[object]:
        found: list[object] = []
        for is_training in (False, True):
            set_mode(self._module, is_training)
            try:
                found += self.run(IN_FULL)
            except NotGatedError as why:
                found.append(str(why))
        return found

    def of(self, name: str, dtype: torch.dtype, lead: tuple[int, ...] = BATCHES) -> Tensor:
        """Return the tensor of a layer, in these leading dimensions."""
        largest = LARGEST_OF.get(dtype)
        drawn, rows = self._drawn[name], math.prod(lead)
        drawn = drawn.repeat(-(-rows // len(drawn)), 1)[:rows].unflatten(0, lead)
        return (drawn if largest is None else drawn.clamp(-largest, largest)).to(dtype)


def recognise(module: Module, reads: Reads) -> Recognised | str | None:
    """Recognise a gated MLP; a sentence says why it is not known; None: it is none."""
    device = place_of(module)
    with probing(device) as generator:
        try:
            probe = Probe(module, device, generator)
            down, product = probe.run(IN_FULL)
        except CannotCopyError as error:
            return str(error)
        except CANNOT as error:
            why = f"its code failed between given layers ({type(error).__name__}: {error})"
            return why if looks_gated(module) else None
        except NotGatedError as error:
            return str(error) if looks_gated(module) else None
        return _recognise(module, reads, probe, down, product)


def _recognise(
    module: Module, reads: Reads, probe: Probe, down: str | None, product: object
) -> Recognised | str | None:
    others = [name for name in probe.names if name != down]
    if not (isinstance(product, Tensor) and others):
        return "its last layer gets no tensor" if looks_gated(module) else None
    is_pair = len(others) == len(("gate", "up"))
    is_up_first = is_pair and probe.is_before(others[1], others[0])
    best, (kernel, options, gate, up) = _best_of(probe, others, product)
    if not best <= 32:
        # With fewer layers, it may be any other module.
        is_named = (is_pair and down is not None) or looks_gated(module)
        return (NOT_KNOWN if down else NO_UNIT) if is_named else None
    is_up_first ^= gate != others[0]
    settings = settings_where(lambda one: probe.agrees(one, kernel, options, gate, up))
    if IN_FULL not in settings:
        return probe.why_not_training()
    why = _why_another(probe, reads, kernel, options, gate, up)
    if why is not None:
        return why
    passed_over = tuple(name for name in module._modules if name not in probe.names)
    return Recognised(kernel, options, gate, up, down, passed_over, is_up_first, settings)


def _why_another(
    probe: Probe, reads: Reads, kernel: str, options: Options, gate: str, up: str | None
) -> str | None:
    """Return which gradient, operator, shape or number it has that a kernel has not."""
    if not probe.has_gradients_of(kernel, options, gate, up):
        return "its gradients are those of something else"
    why = probe.why_not_operators() or _why_not_everywhere(probe, kernel, options, gate, up)
    if why is not None:
        return why
    for number in reads.numbers:
        if number.value not in NEUTRAL and probe.is_read(number):
            return f"it reads {number.title}, which the kernel does not take"
    return None


def _why_not_everywhere(
    probe: Probe, kernel: str, options: Options, gate: str, up: str | None
) -> str | None:
    """Return for which dimensions or inputs it differs; None: none."""
    for lead in LEADS:
        try:
            given = probe.run(IN_FULL, lead)[1]
        except CANNOT:
            continue
        except NotGatedError as error:
            return str(error)
        if not are_alike(
            _reference(kernel, options, *probe.tensors(IN_FULL, gate, up, lead)), given
        ):
            return f"it computes something else for inputs of {lead} rows"
    for dtype in DTYPES:
        try:
            probe.run(IN_FULL, x_dtype=dtype)
        except (*CANNOT, NotGatedError):
            return "its first layers do not get its input as it is"
    return None


Found = tuple[str, Options, str, str | None]


def _best_of(probe: Probe, others: list[str], product: Tensor) -> tuple[float, Found]:
    """Return the candidate that is closest to the product, and its distance."""
    pairs: list[tuple[str, str | None, Options]]
    pairs = [(others[0], None, ()), (others[0], None, (True,))]
    if len(others) == 2:
        pairs = [(others[0], others[1], ()), (others[1], others[0], ())]
    tried = [
        (distance(_reference(kernel, options, *probe.tensors(IN_FULL, gate, up)), product), found)
        for kernel, activation in CANDIDATES
        for gate, up, order in pairs
        for options in [(*activation, *order)]
        for found in [(kernel, options, gate, up)]
    ]
    return min(tried, key=lambda one: one[0])


def _reference(kernel: str, options: Options, *tensors: Tensor | None) -> object:
    return kernel_named(kernel).reference(*tensors, *options)


class _Again(NamedTuple):
    """Replaces a saved tensor until it is computed again."""

    make: Callable[[], Tensor]
    shape: torch.Size


def run_on(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make())."""
    return layer(make())


def run_without_keeping(layer: Module, make: Callable[[], Tensor]) -> Any:
    """Return layer(make()), and compute make() again for gradients instead of saving it.

    The tensor is saved as usual if this is not known to be right, or to save memory: for a layer
    that is not torch's linear one or has hooks, or under hooks for saved tensors, which gradient
    checkpointing uses.

    Args:
        layer: The layer.
        make: Computes the input, with the same bits every time.
    """
    x = make()
    if not _saves_x(layer):
        return layer(x)
    address, size = x.data_ptr(), x.numel()

    def pack(saved: Tensor) -> Tensor | _Again:
        is_x = saved.data_ptr() == address and saved.numel() == size and saved.is_contiguous()
        return _Again(make, saved.shape) if is_x else saved

    with saved_tensors_hooks(pack, _unpack):
        return layer(x)


def _saves_x(layer: Module) -> bool:
    is_watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    is_plain = type(layer).forward is Linear.forward and is_passed_over(layer)
    return torch.is_grad_enabled() and is_plain and not is_watched


def _unpack(packed: Tensor | _Again) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    with torch.no_grad():
        return packed.make().view(packed.shape)


NOT_KNOWN = "what it computes between its layers is not known"
NO_UNIT = "it computes neither SwiGLU nor GeGLU"
NOT_AS_FOUND = "its activation was replaced, or has hooks"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the gated MLPs below a module."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        if _holds_experts(module) and SWIGLU in request.kernels:
            why = "its experts share one module, which multiplies inside a loop over them"
            yield Skip(name or type(module).__name__, SWIGLU, type(module).__name__, why)
        layers, why_none = layers_of(module), why_unknown_layers(module)
        if why_none is not None:
            yield from _sites(name or type(module).__name__, module, why_none, why_none, request)
        if not _may_be_one(module, layers):
            continue
        reads = reads_of_module(module, leaves=layers.values())
        if isinstance(reads, str):
            found: Recognised | str | None = reads if looks_gated(module) else None
        else:
            found = request.once(("gated", *kind_of(module)), recognise, module, reads)
        if found is not None:
            yield from _sites(name or type(module).__name__, module, found, reads, request)


def _may_be_one(module: Module, layers: Mapping[str, Module]) -> bool:
    """Return whether a module has as many layers as a gated unit, and may be one."""
    if len(layers) in (2, 3):
        return True
    others = [one for name, one in module._modules.items() if one and name not in layers]
    has_others = any(True for one in others for _ in one.parameters())
    return not (len(layers) > 1 or has_others or type(module).__module__.startswith("torch."))


def _sites(
    name: str, module: Module, found: Recognised | str, reads: Reads | str, request: Request
) -> Iterator[Site | Skip]:
    asked = [one for one in (SWIGLU, GEGLU) if one in request.kernels]
    kernel = asked[0] if isinstance(found, str) else found.kernel
    if kernel not in asked:
        return
    why = why_foreign(module)
    if isinstance(found, str) or isinstance(reads, str):
        yield Skip(name, kernel, type(module).__name__, why or str(found))
        return
    why = why or request.once(("checked", *kind_of(module)), _check, module, found, request)
    if why is not None:
        yield Skip(name, kernel, type(module).__name__, why)
    else:
        yield _site(name, module, found, reads, request)


def _holds_experts(module: Module) -> bool:
    """Return whether its parameters are the stacked layers of several experts."""
    own = [name for name, one in module._parameters.items() if one is not None and one.dim() == 3]
    return any("up" in name or "gate" in name for name in own) and any("down" in n for n in own)


def _check(module: Module, found: Recognised, request: Request) -> str | None:
    """Run the kernel on the data of a probe; return why it does not agree."""
    device = place_of(module)
    parameter = next(module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    if (dtype, None) not in found.settings:
        return None
    with probing(device) as generator:
        probe = Probe(module, device, generator)
        tensors = probe.tensors((dtype, None), found.gate, found.up)
        function, provider, _ = request.providers.choose(
            request.kernels[found.kernel],
            tensors[0],
            tuple(tensors[0].shape),
            is_default=_is_default(found),
        )
        if function is None:
            return None
        if not are_alike(
            function(*tensors, *_options(found)), probe.given_to_last((dtype, None), False)
        ):
            return f"the kernel of {provider} does not agree with it on random data"
    return None


def _is_default(found: Recognised) -> bool:
    """Return whether every provider supports it: two tensors, and tanh."""
    return found.up is not None and found.options in ((), ("tanh",))


def _options(found: Recognised) -> tuple[str, ...]:
    return () if found.options in ((), ("tanh",)) else found.options


def _site(name: str, module: Module, found: Recognised, reads: Reads, request: Request) -> Site:
    kernel = request.kernels[found.kernel]
    maker, settings = request.new_maker(), found.settings
    dispatcher = Dispatcher(
        kernel, request.providers, settings, is_default=_is_default(found), maker=maker
    )
    switch = Switch()
    original = type(module).forward
    passed_over = {name: module._modules[name] for name in found.passed_over}
    put = bound(_gated(original, found, passed_over, reads, dispatcher, switch), original, switch)
    return Site(name, module, put, dispatcher, switch=switch, why_changed=reads.why_changed)


def _gated(
    original: Callable[..., Any],
    found: Recognised,
    passed_over: Mapping[str, Any],
    reads: Reads,
    dispatcher: Dispatcher,
    switch: Switch,
) -> Callable[..., Any]:
    known, decide, trace = dispatcher.known, dispatcher.decide, dispatcher.tracing()
    run_original = running_original(original, dispatcher, switch)
    why_not = _refusing(found, passed_over, reads)
    first, second, last = found.gate, found.up, found.down
    is_given = first == INPUT
    options, run_first, complete = _options(found), _running_first(found), _completing(last)

    def forward(self: Any, x: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self or args or kwargs or not isinstance(x, Tensor):
            return run_original(self, OTHERWISE, *(() if x is None else (x,)), *args, **kwargs)
        why = why_not(self, x)
        if why is not None:
            return run_original(self, why, x)
        children = self._modules
        gate, up = run_first(children, x)
        if is_compiling():
            function = trace(gate, up, *options)
            if function is None:
                return original(self, x)
            return complete(children, partial(function, gate, up, *options), None)
        key = key_of(gate, up)
        decision = known.get(key) or decide(key, (gate, up, *options))
        decision.num_calls += 1
        if decision.function is None:
            given = self if is_given else _with_results(self, {first: gate, second: up})
            # The original frees them before its last layer, where no gradient needs them.
            del gate, up
            return original(given, x)
        make = partial(decision.function, gate, up, *options)
        return complete(children, make, decision.provider)

    return forward


def _refusing(
    found: Recognised, passed_over: Mapping[str, Any], reads: Reads
) -> Callable[[Any, Tensor], str | None]:
    """Return a function that tells why a call runs the original; None: a kernel may take it."""
    is_changed, is_given = changes_of(reads), found.gate == INPUT

    def why_not(owner: Any, x: Tensor) -> str | None:
        if not _are_as_found(owner._modules, passed_over):
            return NOT_AS_FOUND
        if is_changed is not None and is_changed(owner):
            return CHANGED
        return SPREAD if is_given and not x.is_contiguous() else None

    return why_not


def _completing(last: str | None) -> Callable[[Mapping[str, Any], Any, str | None], Any]:
    """Return a function that runs the last layer, if there is one, on the product that is made."""

    def complete(children: Mapping[str, Any], make: Callable[[], Tensor], provider: Any) -> Any:
        if last is None:
            return make()
        run = run_without_keeping if provider == LEAN else run_on
        return run(children[last], make)

    return complete


def _running_first(found: Recognised) -> Callable[[Mapping[str, Any], Any], tuple[Any, Any]]:
    """Return a function that runs gate and up in the original's order, for hooks."""
    gate, up, is_up_first = found.gate, found.up, found.is_up_first

    def run(children: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        if gate == INPUT:
            return x, None
        if is_up_first:
            second = children[up](x)  # type: ignore[index]
            return children[gate](x), second
        return children[gate](x), None if up is None else children[up](x)

    return run


def _are_as_found(children: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether these children are unchanged, and their calls can be left out."""
    return all(children[one] is child and is_passed_over(child) for one, child in found.items())


def _with_results(module: Module, results: dict[str | None, Tensor | None]) -> Module:
    """Return a module that runs the code with these results of layers, each of them once."""
    children = dict(module._modules)
    for name, result in results.items():
        if name is not None:
            children[name] = layer = GivenOnce(children[name])
            layer.result = result
    return CallProxy(module, children).clone


FAMILY = Family(kernels=(SWIGLU, GEGLU), find=find)
