"""Experts of a mixture in one module: those that Hugging Face runs by its `ExpertsInterface`.

The class of such a module has a forward that looks up, by a name in the configuration, the function
that runs the experts. The kernel replaces those that are part of transformers and take any module
with packed weights: one expert after the other, batched and grouped GEMMs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module, functional

from kprof.kernels.swap.dispatch import Dispatcher, key_of
from kprof.kernels.swap.patches import is_passed_over, python_modules, why_foreign
from kprof.kernels.swap.probes import CANNOT, Setting, are_alike, kind_of, probing
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound, running_original
from kprof.kernels.swap.sites import Family

MOE_EXPERTS = "moe_experts"
# The package whose functions are known, and the names in the configuration that they have.
INTEGRATIONS = "transformers.integrations.moe"
REPLACED = ("eager", "grouped_mm", "batched_mm")
# Layout that the kernel takes, as transformers' decorator names it.
LAYOUT = {
    "has_gate": (True, "its experts have no gate"),
    "has_bias": (False, "its experts have biases"),
    "is_transposed": (False, "its weights are transposed"),
    "is_concatenated": (True, "its weights hold gate and up in turn"),
}
WEIGHTS = ("gate_up_proj", "down_proj")
SETTINGS: frozenset[Setting] = frozenset({(torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)})
OTHERWISE = "it is called in another way than with tokens, indices and weights"
ANOTHER = "its experts are run by {name}"
MOVED = "its weights are no parameters of its own"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


def interface_of(forward: Callable[..., Any]) -> Any:
    """Return transformers' interface that a forward looks its experts up in; None: it does not."""
    if not isinstance(forward, types.FunctionType) or forward.__closure__ is None:
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__, strict=True)
    found = {name: cell.cell_contents for name, cell in cells}.get("experts_interface")
    return found if type(found).__module__ == INTEGRATIONS else None


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the modules below one that hold experts."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        interface = interface_of(type(module).forward)
        if interface is None:
            continue
        label, title = name or type(module).__name__, type(module).__name__
        why = why_foreign(module) or _why_not(module)
        activation = None
        if why is None:
            activation = request.once(("experts", *kind_of(module)), _activation_of, module)
            why = None if activation else "its activation is none of SiLU and GELU"
        if activation is None:
            yield Skip(label, MOE_EXPERTS, title, str(why))
        else:
            yield _site(label, module, interface, activation, request)


def _why_not(module: Module) -> str | None:
    """Return why the kernel does not take the weights of these experts; None: it does."""
    for name, (expected, why) in LAYOUT.items():
        if getattr(module, name, None) is not expected:
            return why
    gate = getattr(type(module)._apply_gate, "__module__", "")
    if gate != INTEGRATIONS:
        return "its gate is one of its own"
    if _have_moved(module) or set(module._parameters) != set(WEIGHTS):
        return MOVED
    if any(one is not None for one in module._buffers.values()):
        return "it has buffers"
    return None


def _have_moved(module: Module) -> bool:
    parameters = module._parameters
    return any(parameters.get(name) is None or name in module.__dict__ for name in WEIGHTS)


def _activation_of(module: Module) -> str | None:
    """Return the name of the activation; None: it is another one."""
    activation: Any = getattr(module, "act_fn", None)
    if isinstance(activation, Module) and not is_passed_over(activation):
        return None
    with probing(torch.device("cpu")) as generator:
        x = 3 * torch.randn(64, 8, generator=generator)
        try:
            result = activation(x)
        except CANNOT:
            return None
        for name, function in ACTIVATIONS.items():
            if are_alike(function(x), result):
                return name
    return None


def _site(name: str, module: Module, interface: Any, activation: str, request: Request) -> Site:
    dispatcher = Dispatcher(request.kernels[MOE_EXPERTS], request.providers, SETTINGS)
    original, switch = type(module).forward, Switch()
    forward = _routing(original, interface, activation, dispatcher, switch)
    recognised = module.act_fn

    def why_changed(owner: Any) -> str | None:
        is_same = owner.act_fn is recognised and _why_not(owner) is None
        return None if is_same else "it was changed since it was recognised"

    put = bound(forward, original, switch)
    return Site(name, module, put, dispatcher, switch=switch, why_changed=why_changed)


def _routing(
    original: Callable[..., Any],
    interface: Any,
    activation: str,
    dispatcher: Dispatcher,
    switch: Switch,
) -> Callable[..., Any]:
    """Return the forward of swapped experts."""
    known, decide, trace = dispatcher.known, dispatcher.decide, dispatcher.tracing()
    run_original = running_original(original, dispatcher, switch)

    def forward(
        self: Any,
        hidden_states: Any = None,
        top_k_index: Any = None,
        top_k_weights: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = (hidden_states, top_k_index, top_k_weights)
        if switch.owner is not self or args or kwargs or any(one is None for one in given):
            return run_original(self, OTHERWISE, *given, *args, **kwargs)
        name = self.config._experts_implementation
        if name not in REPLACED or not _is_known(interface, name):
            return run_original(self, ANOTHER.format(name=name), *given)
        if _have_moved(self):
            return run_original(self, MOVED, *given)
        arguments = (*given, self.gate_up_proj, self.down_proj, activation)
        if is_compiling():
            function = trace(*arguments)
        else:
            key = key_of(*given)
            shape = (len(hidden_states), *_sizes(self, top_k_index))
            decision = known.get(key) or decide(key, arguments, shape)
            decision.num_calls += 1
            function = decision.function
        return original(self, *given) if function is None else function(*arguments)

    return forward


def _sizes(module: Any, index: Any) -> tuple[int, ...]:
    """Return the sizes of a call as the kernel's bench counts them, but for the tokens."""
    experts, columns, hidden = module.down_proj.shape
    return columns, hidden, experts, index.shape[-1]


def _is_known(interface: Any, name: str) -> bool:
    """Return whether a name stands for the function of transformers, not for one set since."""
    if name == "eager":
        return name not in interface
    return name in interface and interface[name].__module__ == INTEGRATIONS


FAMILY = Family(kernels=(MOE_EXPERTS,), find=find)
