"""A whole process as what is swapped: its models and optimizers, and torch's own functions."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import Module, functional
from torch.optim import Optimizer

from kprof.sites._aside import has_decided
from kprof.sites._patches import MARK
from kprof.sites._providers import ORIGINAL
from kprof.sites._site import Request, Site, Switch
from kprof.sites._translate import Route, Translation, settings_of, translations_of
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
        translations = translations_of(function, request.kernels)
        if translations:
            yield _site(function, translations, request)


def _site(
    function: Callable[..., Any], translations: Sequence[Translation], request: Request
) -> Site:
    name, routes = function.__name__, []
    for one in translations:
        found = settings_of(function, one)
        settings = frozenset() if isinstance(found, str) else found
        ways = Ways(request.kernels[one.kernel], request.providers, settings)
        routes.append(Route(one, ways))
    replacement, switch = replacement_of(function, routes), Switch()
    # What calls this function itself cannot be compiled into its place.
    name_of = request.providers.name
    others = [one for one in routes if name_of(one.translation.kernel) not in ORIGINAL]
    compiled = replacement_of(function, others)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Who took this function while the swap was on may call it later.
        if switch.owner is None:
            return function(*args, **kwargs)
        if is_compiling():
            return compiled(*args, **kwargs)
        if has_decided(request.providers):
            return function(*args, **kwargs)
        return replacement(*args, **kwargs)

    setattr(call, MARK, switch)
    return Site(
        "torch.nn.functional",
        functional,
        lambda owner: call,
        {one.translation.titled(name): one.ways for one in routes},
        attribute=name,
        switch=switch,
    )
