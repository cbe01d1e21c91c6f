"""Functions that a module's forward calls by a global name: attention, rotations, norms, losses.

The module gets its own copy of its forward, in which that name is another function; other modules
of the class, and the function itself, stay what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels.swap.attention_calls import (
    ATTENTION_FORWARD,
    ATTENTION_FP8,
    DECODE_ATTENTION,
    casting,
)
from kprof.kernels.swap.attention_dispatch import (
    ARGUMENTS,
    GENERATION,
    Interface,
    generation_masks,
    is_mask,
    remembering,
    remembering_all,
)
from kprof.kernels.swap.dispatch import Ways
from kprof.kernels.swap.patches import (
    Path,
    Rewired,
    calls_in,
    python_modules,
    why_foreign,
    why_not_rewired,
)
from kprof.kernels.swap.reads import CHANGED, Reads, reads_of_function
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.translate import (
    CROSS_ENTROPY,
    LAYERNORM,
    RMSNORM,
    ROPE,
    Route,
    Translation,
    attention,
    is_interface,
    settings_of,
    translations_of,
    why_unlike_rotation,
)

NO_ATTENTION = "its forward calls neither torch's attention nor one of Hugging Face's registry"


class Known(NamedTuple):
    """A function, and how its calls become calls of kernels."""

    function: Any
    translations: tuple[Translation, ...]
    reads: Reads | str | None
    """What its code reads, or why that is not known; None: it is torch's."""


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the modules below one whose forward calls a function that a kernel can replace."""
    if not isinstance(root, Module):
        return
    for name, module in python_modules(root):
        forward = type(module).forward
        calls = request.once(("calls", forward), _known_calls, forward, request)
        masks = request.once(("masks", forward), _masks_of, forward, request)
        yield from _expected(name or type(module).__name__, module, calls, request)
        if calls:
            yield from _sites(name or type(module).__name__, module, calls, request)
        elif masks and not (why_foreign(module) or why_not_rewired(forward)):
            yield _site(name or type(module).__name__, module, {}, {}, masks)
        makes = generation_masks(module) if ARGUMENTS.keys() & request.kernels.keys() else None
        if makes is not None:
            make = request.once(("generation", makes), remembering_all, makes)
            yield _generation_site(name or type(module).__name__, module, make)


def _expected(
    name: str, module: Module, calls: Mapping[Path, Known], request: Request
) -> Iterator[Skip]:
    """Yield the rotations and the attention that a reader would expect there, and are not known."""
    what, forward = type(module).__name__, type(module).forward
    if ROPE in request.kernels:
        for path, function in request.once(("rotations", forward), _other_rotations, forward):
            if path not in calls:
                why = why_unlike_rotation(function) or "it is not known"
                yield Skip(name, ROPE, f"{what}: {path[-1]}", f"{'.'.join(path)}: {why}")
    asked = [one for one in ARGUMENTS if one in request.kernels]
    known = {one.kernel for call in calls.values() for one in call.translations}
    if asked and not known & ARGUMENTS.keys() and _computes_attention(module):
        for kernel in asked:
            yield Skip(name, kernel, what, NO_ATTENTION)


def _computes_attention(module: Module) -> bool:
    """Tell whether its name says attention, and it has the layers for that itself."""
    children = [one for one in module._modules.values() if one is not None]
    is_inside = any("attention" in type(one).__name__.lower() for one in children)
    layers = [one for one in children if hasattr(one, "weight") and not is_norm(one)]
    return "attention" in type(module).__name__.lower() and not is_inside and len(layers) > 1


def is_norm(module: Module) -> bool:
    """Tell whether a module's name says that it is a norm."""
    return "norm" in type(module).__name__.lower()


def _generation_site(name: str, module: Module, make: Callable[..., Any]) -> Site:
    """Return the place where Hugging Face lets a model make its masks for `generate` itself."""
    return Site(name, module, lambda owner: make, {}, attribute=GENERATION, switch=Switch())


def _known_calls(forward: Callable[..., Any], request: Request) -> dict[Path, Known]:
    known = {}
    for path, function in calls_in(forward):
        translations = translations_of(function, request.kernels)
        if translations:
            is_own = any(one.kernel == ROPE for one in translations)
            known[path] = Known(
                function, translations, reads_of_function(function) if is_own else None
            )
    return known


def _other_rotations(forward: Callable[..., Any]) -> list[tuple[Path, Callable[..., Any]]]:
    """Return the functions that a forward calls whose names say that they rotate."""
    found = ((path, one) for path, one in calls_in(forward) if inspect.isfunction(one))
    return [
        (path, one)
        for path, one in found
        if any(part in path[-1].lower() for part in ("rotary", "rope"))
    ]


def _masks_of(forward: Callable[..., Any], request: Request) -> dict[Path, Any]:
    """Return what makes masks for attention in a forward, as it is to be for a kernel's."""
    if not ARGUMENTS.keys() & request.kernels.keys():
        return {}
    return {path: remembering(one) for path, one in calls_in(forward) if is_mask(one)}


def _sites(
    name: str,
    module: Module,
    calls: Mapping[Path, Known],
    request: Request,
) -> Iterator[Site | Skip]:
    original = type(module).forward
    why = why_foreign(module) or why_not_rewired(original)
    routes: dict[Path, list[Route]] = {}
    for path, (function, translations, _) in calls.items():
        for one in translations:
            sort = ("settings", id(function), one.kernel)
            settings = request.once(sort, settings_of, function, one)
            if why or isinstance(settings, str):
                skipped = why or f"{'.'.join(path)}: {settings}"
                yield Skip(name, one.kernel, _what(module, path, one), skipped)
            else:
                ways = Ways(request.kernels[one.kernel], request.providers, settings)
                routes.setdefault(path, []).append(Route(one, ways))
    if routes:
        masks = request.once(("masks", original), _masks_of, original, request)
        yield _site(name, module, calls, routes, masks)


def _site(
    name: str,
    module: Module,
    calls: Mapping[Path, Known],
    routes: Mapping[Path, list[Route]],
    masks: Mapping[Path, Any],
) -> Site:
    original = type(module).forward
    others = {path: _guarded(calls[path], found) for path, found in routes.items()}
    others.update(masks)
    rewired, switch = Rewired(original, others), Switch()
    put = bound(_calling(original, rewired, switch), original, switch)
    functions = {path: calls[path].function for path in routes}
    read = [calls[path].reads for path in routes]

    def why_changed(owner: Module) -> str | None:
        found = (one.why_changed(None) for one in read if isinstance(one, Reads))
        return rewired.why_changed(functions) or next((why for why in found if why), None)

    def put_anew(owner: Module) -> object:
        rewired.refresh()
        return put(owner)

    parts = {
        _what(module, path, one.translation): one.ways
        for path, found in routes.items()
        for one in found
    }
    return Site(name, module, put_anew, parts, switch=switch, why_changed=why_changed)


def _guarded(known: Known, routes: Sequence[Route]) -> Any:
    """Return what is called in the place of a function while what its code reads is as it was."""
    function, replacement = known.function, replacement_of(known.function, routes)
    is_changed = known.reads.changes() if isinstance(known.reads, Reads) else None
    if is_changed is None:
        return replacement

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not is_changed(None):
            return replacement(*args, **kwargs)
        if not is_compiling():
            for route in routes:
                route.ways.leave_out(CHANGED)
        return function(*args, **kwargs)

    return guarded


def _what(module: Module, path: Path, translation: Translation) -> str:
    return translation.titled(f"{type(module).__name__}: {'.'.join(path)}")


def _calling(original: Callable[..., Any], rewired: Rewired, switch: Switch) -> Callable[..., Any]:
    live, compiled = rewired.live, rewired.function

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self:
            return original(self, *args, **kwargs)
        # A compiler would read the live one, too, where it has left this frame to Python.
        if is_compiling() or compiler_of_frames() is not None:
            return compiled(self, *args, **kwargs)
        return live(self, *args, **kwargs)

    return forward


def replacement_of(function: Any, routes: Sequence[Route]) -> Any:
    """Return what is called in the place of a function; what no kernel takes goes there.

    The first kernel of these that takes a call gets it.
    """
    if is_interface(function):
        return Interface(function, routes)
    replacement = function
    for one in reversed(routes):
        replacement = _routed(replacement, one)
    return casting(replacement) if function is attention else replacement


def _routed(function: Callable[..., Any], route: Route) -> Callable[..., Any]:
    translation, ways = route
    known, decide, trace = ways.known, ways.decide, ways.tracing()
    translate, key_of, shape_of = translation.arguments, translation.key, translation.shape

    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = translate(*args, **kwargs)
        if not isinstance(arguments, tuple):
            if not is_compiling():
                why = arguments or "it is called with options that the kernel does not have"
                ways.leave_out(why)
            return function(*args, **kwargs)
        if is_compiling():
            run = trace(*arguments)
        else:
            key = key_of(*arguments)
            way = known.get(key)
            if way is None:
                is_default = translation.is_default(arguments)
                way = decide(key, arguments, shape_of(*arguments), is_default=is_default)
            way.num_calls += 1
            run = way.function
        return function(*args, **kwargs) if run is None else run(*arguments)

    return replacement


# Returns None outside of what a compiler runs; where torch does not tell, it may be anywhere.
compiler_of_frames = getattr(eval_frame, "get_eval_frame_callback", object)


FAMILY = Family(
    kernels=(
        *(ATTENTION_FORWARD, ATTENTION_FP8, CROSS_ENTROPY, DECODE_ATTENTION),
        *(LAYERNORM, RMSNORM, ROPE),
    ),
    find=find,
    is_last=True,
)
