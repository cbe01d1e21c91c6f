"""A whole process as what is swapped: its models and optimizers, and torch's own loss function."""

from __future__ import annotations

import functools
import gc
from typing import Any

from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import Module, functional
from torch.optim import Optimizer

from kprof.sites._providers import ORIGINAL
from kprof.sites._site import Request, Site, Switch
from kprof.sites._translate import CROSS_ENTROPY, settings_of, translation_of
from kprof.sites._ways import Ways
from kprof.sites.rewired import replacement_of

# Taken when this was imported: what is there later may be a swap's.
_cross_entropy = functional.cross_entropy


def all_roots() -> list[Any]:
    """Return the modules of this process that are in no other one, and its optimizers.

    The largest come first: what a compiler made of a model's parts comes after the model.
    """
    found = [one for one in gc.get_objects() if issubclass(type(one), (Module, Optimizer))]
    modules = [one for one in found if isinstance(one, Module) and not isinstance(one, GraphModule)]
    modules = [one for one in modules if "_modules" in one.__dict__]
    inside = {id(child) for one in modules for child in one._modules.values()}
    roots = [one for one in modules if id(one) not in inside]
    sizes = {id(one): sum(1 for _ in one.modules()) for one in roots}
    roots.sort(key=lambda one: -sizes[id(one)])
    return [*roots, *(one for one in found if isinstance(one, Optimizer))]


def process_site(request: Request) -> Site | None:
    """Return the site for all calls of torch's cross_entropy, wherever a script makes them."""
    translation = translation_of(_cross_entropy)
    if CROSS_ENTROPY not in request.kernels or translation is None:
        return None
    settings = settings_of(_cross_entropy, translation)
    ways = Ways(request.kernels[CROSS_ENTROPY], request.providers, settings)
    replacement, switch = replacement_of(_cross_entropy, translation, ways), Switch()
    calls_itself = request.providers.name(CROSS_ENTROPY) in ORIGINAL

    @functools.wraps(_cross_entropy)
    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            run = _cross_entropy if calls_itself else replacement
            return run(*args, **kwargs)
        owner = switch.owner
        if owner is None:
            return _cross_entropy(*args, **kwargs)
        # A provider may call this function itself.
        switch.owner = None
        try:
            return replacement(*args, **kwargs)
        finally:
            switch.owner = owner

    return Site(
        "torch.nn.functional",
        functional,
        lambda owner: cross_entropy,
        {CROSS_ENTROPY: ways},
        attribute=CROSS_ENTROPY,
        switch=switch,
    )
