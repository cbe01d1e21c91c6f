"""Causal language models of Hugging Face: their `generate`."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.nn import Module

from kprof.kernels import OURS
from kprof.kernels.swap.dispatch import Dispatcher
from kprof.kernels.swap.patches import MARK, python_modules
from kprof.kernels.swap.site import Request, Site, Skip, Switch
from kprof.kernels.swap.sites import Family

KERNEL = "decode"
ATTRIBUTE = "generate"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the models below a module that generate text."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        if not _generates(module):
            continue
        from kprof.kernels.decode._model import decoder_of

        cls = type(module)
        found = _why_foreign(module) or decoder_of(module)
        if isinstance(found, str):
            yield Skip(name or cls.__name__, KERNEL, cls.__name__, found)
            continue
        dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, frozenset())
        switch = Switch()
        function = _generating(found, dispatcher, switch)
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


def _generating(decoder: Any, dispatcher: Dispatcher, switch: Switch) -> Callable[..., Any]:
    from kprof.kernels.decode.decode import Decoding, generate

    kept: list[Decoding] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = types.MethodType(type(self).generate, self)
        if switch.owner is not self:
            return original(*args, **kwargs)
        if not _has_weights(self, decoder):
            dispatcher.leave_out("its weights were replaced since")
            return original(*args, **kwargs)
        if not kept or not kept[0].is_current():
            kept[:] = [Decoding(decoder)]
        note = _noting(dispatcher, decoder)
        return generate(self, original, kept[0], note, *args, **kwargs)

    run.__name__ = run.__qualname__ = ATTRIBUTE
    setattr(run, MARK, switch)
    return run


def _has_weights(model: Any, decoder: Any) -> bool:
    """Return whether a model still has the parameters that were read."""
    first, last = model.model.layers[0], model.model.layers[-1]
    return (
        model.lm_head.weight is decoder.head.weight
        and model.model.embed_tokens.weight is decoder.embedding
        and first.self_attn.q_proj.weight is decoder.layers[0].q.weight
        and last.mlp.down_proj.weight is decoder.layers[-1].down.weight
    )


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
