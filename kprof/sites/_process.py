"""A whole process as what is swapped: its models and optimizers, and torch's own functions."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import Module, functional
from torch.optim import Optimizer

from kprof.sites._providers import ORIGINAL
from kprof.sites._site import Request, Site, Switch
from kprof.sites._translate import Translation, settings_of, translation_of
from kprof.sites._ways import Ways
from kprof.sites.rewired import replacement_of

# Taken when this was imported: what is there later may be a swap's.
FUNCTIONS = (functional.cross_entropy, functional.scaled_dot_product_attention)


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


def process_sites(request: Request) -> Iterator[Site]:
    """Yield the sites for all calls of functions of torch, wherever a script makes them."""
    for function in FUNCTIONS:
        translation = translation_of(function)
        if translation is not None and translation.kernel in request.kernels:
            yield _site(function, translation, request)


def _site(function: Callable[..., Any], translation: Translation, request: Request) -> Site:
    name = function.__name__
    settings = settings_of(function, translation)
    ways = Ways(request.kernels[translation.kernel], request.providers, settings)
    replacement, switch = replacement_of(function, translation, ways), Switch()
    calls_itself = request.providers.name(translation.kernel) in ORIGINAL

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            run = function if calls_itself else replacement
            return run(*args, **kwargs)
        owner = switch.owner
        if owner is None:
            return function(*args, **kwargs)
        # A provider may call this function itself.
        switch.owner = None
        try:
            return replacement(*args, **kwargs)
        finally:
            switch.owner = owner

    return Site(
        "torch.nn.functional",
        functional,
        lambda owner: call,
        {name: ways},
        attribute=name,
        switch=switch,
    )
