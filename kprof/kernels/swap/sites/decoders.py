"""Causal language models of Hugging Face: their `generate`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from kprof.kernels import OURS
from kprof.kernels.swap.dispatch import Dispatcher
from kprof.kernels.swap.patches import MARK, python_modules
from kprof.kernels.swap.site import Request, Site, Skip, Switch
from kprof.kernels.swap.sites import Family

KERNEL = "decode"
ATTRIBUTE = "generate"
OTHERS = "its weights or numbers are others since the swap"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module that generate text."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        if not _generates(module):
            continue
        cls = type(module)
        found = _why_foreign(module) or _read(module)
        if isinstance(found, str):
            yield Skip(name or cls.__name__, KERNEL, cls.__name__, found)
            continue
        dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, frozenset())
        switch = Switch()
        function = _generating(found, dispatcher, switch, is_dry=not request.providers.launches)
        yield Site(
            name or cls.__name__,
            module,
            partial(types.MethodType, function),
            dispatcher,
            attribute=ATTRIBUTE,
            switch=switch,
        )


def _generates(module: Module) -> bool:
    """Return whether a module has the `generate` of Hugging Face."""
    owner = next((one for one in type(module).__mro__ if ATTRIBUTE in vars(one)), None)
    return owner is not None and owner.__module__.startswith("transformers.generation")


def _why_foreign(module: Module) -> str | None:
    own = module.__dict__.get(ATTRIBUTE)
    if own is None:
        return None
    is_swapped = hasattr(getattr(own, "__func__", own), MARK)
    return "it is swapped already" if is_swapped else f"its {ATTRIBUTE} was replaced"


def _generating(
    decoder: Any, dispatcher: Dispatcher, switch: Switch, *, is_dry: bool
) -> Callable[..., Any]:
    from kprof.kernels.decode.decode import Decoding, generate

    kept: list[Decoding] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = types.MethodType(type(self).generate, self)
        if switch.owner is not self:
            return original(*args, **kwargs)
        # A dry run replaces parts of the model for other kernels, as this swap does not.
        now = decoder if is_dry else _read(self)
        if isinstance(now, str) or not _are_same(now, decoder):
            dispatcher.leave_out(now if isinstance(now, str) else OTHERS)
            return original(*args, **kwargs)
        if not kept or not kept[0].is_current():
            kept[:] = [Decoding(decoder)]
        note = _noting(dispatcher, decoder)
        return generate(self, original, kept[0], note, *args, is_dry=is_dry, **kwargs)

    run.__name__ = run.__qualname__ = ATTRIBUTE
    setattr(run, MARK, switch)
    return run


def _read(model: Module) -> Any:
    """Return the decoder that a model is now; or why its decoding is not supported."""
    from transformers.activations import ACT2FN
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from kprof.kernels.decode._model import decoder_of

    found: Any = decoder_of(model)
    if isinstance(found, str):
        return found
    body: Any = model.model
    config: Any = model.config
    activation = type(ACT2FN[getattr(config, "hidden_activation", None) or config.hidden_act])
    attention = config._attn_implementation
    function: Any = ALL_ATTENTION_FUNCTIONS.get(attention)
    if function is not None and not function.__module__.startswith("transformers."):
        return f"its attention {attention} is not one of Hugging Face"
    norms = [one for one in body.modules() if type(one).__name__.endswith("RMSNorm")]
    if any(_eps_of(one) != found.eps for one in norms):
        return "its norms have several epsilons"
    if any(layer.self_attn.scaling != found.scale for layer in body.layers):
        return "its attention has several scales"
    if any(type(layer.mlp.act_fn) is not activation for layer in body.layers):
        return "its activation is not that of its configuration"
    return found


def _eps_of(norm: Any) -> object:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _are_same(first: Any, second: Any) -> bool:
    """Return whether two decoders have the same tensors and modules, and equal numbers."""
    if type(first) is not type(second):
        return False
    if isinstance(first, (Tensor, Module)):
        return first is second
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_are_same, first, second))
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return all(_are_same(getattr(first, one), getattr(second, one)) for one in names)
    return bool(first == second)


def _noting(dispatcher: Dispatcher, decoder: Any) -> Callable[[str], None]:
    """Return a function that counts a call, by why the kernels do not run it."""

    def note(why: str) -> None:
        if why:
            dispatcher.leave_out(why)
            return
        decision = dispatcher.known.get(OURS)
        if decision is None:
            shape = (1, decoder.hidden, decoder.vocabulary)
            decision = dispatcher.settle(OURS, None, decoder.embedding, shape, False)
        decision.num_calls += 1

    return note


FAMILY = Family(kernels=(KERNEL,), find=find)
