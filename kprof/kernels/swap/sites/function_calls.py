"""Functions that a forward calls by a global name: attention, rotations, norms, losses.

A module gets its own copy of its forward, in which the name is another function; other modules of
the class, and the function itself, do not change. `process_sites` replaces functions of torch for
the whole process instead.

Models of Hugging Face look attention up by a name, and make a mask by the same name. The copy of a
mask function attaches a description to plain causal masks, so that a kernel need not read the mask.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling
from torch.nn import Module, functional

from kprof.kernels.swap.dispatch import Dispatcher, changes_of, has_decided
from kprof.kernels.swap.patches import (
    MARK,
    TORCHS,
    Patched,
    Path,
    calls_in,
    has,
    innermost,
    python_modules,
    tree_of,
    why_foreign,
    why_not_patched,
    why_writing,
)
from kprof.kernels.swap.providers import ORIGINAL
from kprof.kernels.swap.reads import CHANGED, Reads, reads_of_function
from kprof.kernels.swap.rotations import rotation_of, why_unknown
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.translate import (
    ATTENTION_FORWARD,
    ATTENTION_FP8,
    CROSS_ENTROPY,
    DECODE_ATTENTION,
    FEW_TOKENS,
    LAYERNORM,
    MANY_TOKENS,
    MOST_TOKENS,
    OTHER_SCALE,
    RMSNORM,
    ROPE,
    Arguments,
    Route,
    Translation,
    as_autocast,
    attention,
    casting,
    is_interface,
    is_of_hugging_face,
    is_own_scale,
    many_queries,
    scaled,
    settings_of,
    translations_of,
    with_own_scale,
)

SEEN = "kprof_seen"
# Functions that make masks, and the setting with their window.
MASKS = {"create_causal_mask": None, "create_sliding_window_causal_mask": "sliding_window"}
GENERATION = "create_masks_for_generate"


class Seen(NamedTuple):
    """The keys that a causal mask allows."""

    lengths: Tensor | None
    """Number of keys of each sequence; None: all."""
    window: int
    version: int
    """Version counter of the mask: a later write invalidates this."""


def is_mask(value: object) -> TypeGuard[types.FunctionType]:
    """Return whether this is a function of Hugging Face that makes causal masks."""
    return inspect.isfunction(value) and value.__name__ in MASKS and is_of_hugging_face(value)


def generation_masks(model: object) -> types.FunctionType | None:
    """Return the function that makes the masks of a Hugging Face model for `generate`.

    With a static cache, masks are made before the model is called. None: the class has its own.
    """
    if hasattr(type(model), GENERATION):
        return None
    for one in type(model).__mro__:
        prepare = innermost(one.__dict__.get("prepare_inputs_for_generation"))
        found = prepare.__globals__.get(GENERATION) if prepare is not None else None
        if inspect.isfunction(found) and is_of_hugging_face(found):
            return found
    return None


def remembering_all(function: types.FunctionType) -> Callable[..., Any]:
    """Return a function that makes the same masks, with descriptions as of `remembering`."""
    used = {path: _remembered(value) for path, value in calls_in(function)}
    others = {path: value for path, value in used.items() if value is not None}
    return Patched(function, others).function


def _remembered(value: object) -> Any:
    """Return the replacement of a value; None: it makes no masks."""
    if is_mask(value):
        return remembering(value)
    if not isinstance(value, dict):
        return None
    others = {key: _remembered(one) for key, one in value.items()}
    others = {key: one for key, one in others.items() if one is not None}
    return {**value, **others} if others else None


def remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the same mask, with a description if it is plainly causal."""
    signature = inspect.signature(function)
    setting = MASKS[function.__name__]

    def make(*args: Any, **kwargs: Any) -> Any:
        mask = function(*args, **kwargs)
        if is_compiling() or not isinstance(mask, Tensor):
            return mask
        if mask.dtype == torch.bool and not mask.is_inference():
            given = signature.bind(*args, **kwargs).arguments
            seen = _seen_by(mask, given, setting)
            if seen is not None:
                setattr(mask, SEEN, seen)
        return mask

    return make


# Caches with tokens in their order.
CACHES = ("DynamicCache", "StaticCache")
# Arguments that a plain mask does not have.
ADDED = ("or_mask_function", "and_mask_function", "block_sequence_ids", "layer_idx")


def _seen_by(mask: Tensor, given: dict[str, Any], setting: str | None) -> Seen | None:
    """Return the description of a mask; None: unknown without reading the mask."""
    config, cache, padding = (
        given.get(one) for one in ("config", "past_key_values", "attention_mask")
    )
    window = 0 if setting is None else getattr(config, setting, None)
    is_causal = window is not None and getattr(config, "is_causal", True)
    is_plain = is_causal and all(given.get(one) is None for one in ADDED)
    if mask is padding or not (is_plain and type(cache).__name__ in CACHES):
        return None
    is_sliding = list(getattr(cache, "is_sliding", ()))
    layer = is_sliding.index(setting is not None) if (setting is not None) in is_sliding else 0
    num_tokens, cache = mask.shape[2], cast("Any", cache)
    num_keys, first = cache.get_mask_sizes(num_tokens, layer)
    if num_keys != mask.shape[3] or not isinstance(first, int):
        return None
    # A sliding window keeps the keys that one new token sees.
    has_moved = first > 0
    if has_moved and not (num_tokens == 1 and num_keys <= cast("int", window)):
        return None
    # This waits for the GPU, as Hugging Face does for one token; a captured graph cannot.
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if padding is not None and (is_captured or not bool(padding.all())):
        return None
    if has_moved:
        return Seen(None, 0, mask._version)
    end = cache.get_query_offset(layer) + num_tokens
    if isinstance(end, int):
        lengths = None if end == num_keys else torch.full((mask.shape[0],), end, device=mask.device)
    else:
        lengths = end.to(mask.device).reshape(1).expand(mask.shape[0]).contiguous()
    return Seen(lengths, cast("int", window), mask._version)


class Interface:
    """Hugging Face's attention, by name, with a kernel where it would call torch's."""

    def __init__(self, original: Any, routes: Sequence[Route]) -> None:
        self._original = original
        self._routes = routes
        self._replaced: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._compiled = _attending_compiled(routes)

    def get_interface(self, name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the attention of this name."""
        return self._instead_of(self._original.get_interface(name, default))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attention of this name, or the default."""
        return self._instead_of(self._original.get(name, default))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._instead_of(self._original[name])

    def __contains__(self, name: str) -> bool:
        return name in self._original

    def _instead_of(self, function: Any) -> Any:
        # By its code: wrappers have the same name.
        code = getattr(function, "__code__", None)
        is_torchs = getattr(code, "co_name", "") == "sdpa_attention_forward"
        if is_compiling():
            return self._compiled(function) if is_torchs else function
        if not is_torchs:
            for one in self._routes:
                one.dispatcher.leave_out("the model does not use torch's attention")
            return function
        if function not in self._replaced:
            self._replaced[function] = _attending(function, self._routes)
        return self._replaced[function]


def _attending(function: Callable[..., Any], routes: Sequence[Route]) -> Callable[..., Any]:
    """Return the replacement of Hugging Face's function that calls torch's attention."""
    original = routes[0].dispatcher.guarded(function)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        # The original gets the uncast inputs: it repeats heads of keys before the cast.
        q, k, v = as_autocast(query, key, value)
        for translation, dispatcher in routes:
            asked = ARGUMENTS[translation.kernel]
            arguments = asked(module, q, k, v, attention_mask, options)
            if isinstance(arguments, str):
                dispatcher.leave_out(arguments)
                continue
            sort = translation.key(*arguments)
            decision = dispatcher.known.get(sort)
            if decision is None:
                shape = translation.shape(*arguments)
                decision = dispatcher.decide(sort, arguments, shape, is_default=True)
            decision.num_calls += 1
            if decision.function is not None:
                return decision.function(*arguments).transpose(1, 2).contiguous(), None
        return original(module, query, key, value, attention_mask, **options)

    return attend


def _attending_compiled(routes: Sequence[Route]) -> Callable[..., Callable[..., Any]]:
    """Return the same replacement, in a form that torch.compile can trace."""
    traced = tuple(
        (ARGUMENTS[one.translation.kernel], one.dispatcher.tracing(), one.dispatcher.noting())
        for one in routes
    )

    def attending(function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **options: Any,
        ) -> Any:
            q, k, v = as_autocast(query, key, value)
            for asked, trace, note in traced:
                arguments = asked(module, q, k, v, attention_mask, options)
                if isinstance(arguments, str):
                    note(False)
                    continue
                run = trace(*arguments)
                if run is not None:
                    return run(*arguments).transpose(1, 2).contiguous(), None
            return function(module, query, key, value, attention_mask, **options)

        return attend

    return attending


def _decoding(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Arguments | str:
    """Return the arguments of a call for `decode_attention`, or why it has none."""
    if q.shape[2] > MOST_TOKENS:
        return MANY_TOKENS
    why = _why_odd(q, k, mask, options)
    if not why and not is_own_scale(options.get("scaling"), q):
        why = OTHER_SCALE
    if why:
        return why
    if mask is not None:
        seen: Seen = getattr(mask, SEEN)
        return q, k, v, seen.lengths, seen.window
    if q.shape[2] > 1 and not (_is_causal(module, options) and q.shape[2] == k.shape[2]):
        return "several tokens without a mask"
    return q, k, v, None, 0


def _many(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Arguments | str:
    """Return the arguments of a call for `attention_forward`, or why it has none."""
    if q.shape[2] <= MOST_TOKENS:
        return FEW_TOKENS
    why = _why_odd(q, k, mask, options)
    if why:
        return why
    scale = options.get("scaling")
    if mask is None:
        return many_queries(q, k, v, _is_causal(module, options), scale)
    seen: Seen = getattr(mask, SEEN)
    if seen.lengths is not None:
        return "a cache with room for more tokens"
    return scaled((q, k, v, True, seen.window), scale)


def _many_in_fp8(*given: Any) -> Arguments | str:
    """Return the arguments of a call for `attention_fp8`, or why it has none."""
    arguments = with_own_scale(_many(*given))
    assert arguments is not None
    return arguments


# Per kernel: takes the arguments of Hugging Face's attention; returns those of the kernel, or why
# it has none.
ARGUMENTS: dict[str, Callable[..., Arguments | str]] = {DECODE_ATTENTION: _decoding}
ARGUMENTS |= {ATTENTION_FORWARD: _many, ATTENTION_FP8: _many_in_fp8}


def _why_odd(q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]) -> str:
    """Return why no kernel supports such a call; empty: one may."""
    if options.get("dropout"):
        return "dropout"
    if options.get("position_bias") is not None or options.get("output_attentions"):
        return "a bias, or weights to return"
    if mask is None:
        return ""
    seen: Seen | None = getattr(mask, SEEN, None)
    fits = mask.shape[2] == q.shape[2] and mask.shape[3] == k.shape[2]
    # A compiler cannot check the version.
    is_known = seen is not None and fits and (is_compiling() or seen.version == mask._version)
    return "" if is_known else "a mask that is not plainly causal"


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    is_causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


# Functions that a swap of the whole process replaces.
FUNCTIONS = (TORCHS.cross_entropy, TORCHS.attention)
# The name of their sites, which are there without a call.
OF_PROCESS = "torch.nn.functional"
NO_ATTENTION = "its forward calls neither torch's attention nor one of Hugging Face's registry"


class Known(NamedTuple):
    """A function, and the translations of its calls."""

    function: Any
    translations: tuple[Translation, ...]
    reads: Reads | str | None
    """What its code reads, or why this is not known; None: it is torch's."""


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
        elif masks and not (why_foreign(module) or why_not_patched(forward)):
            yield _site(name or type(module).__name__, module, {}, {}, masks, request)
        makes = generation_masks(module) if ARGUMENTS.keys() & request.kernels.keys() else None
        if makes is not None:
            make = request.once(("generation", makes), remembering_all, makes)
            yield _generation_site(name or type(module).__name__, module, make)


def _expected(
    name: str, module: Module, calls: Mapping[Path, Known], request: Request
) -> Iterator[Skip]:
    """Yield rotations and attention that the names suggest, and that were not recognised."""
    what, forward = type(module).__name__, type(module).forward
    if ROPE in request.kernels:
        for path, function in request.once(("rotations", forward), _other_rotations, forward):
            if path not in calls:
                why = why_unknown(function)
                yield Skip(name, ROPE, f"{what}: {path[-1]}", f"{'.'.join(path)}: {why}")
    asked = [one for one in ARGUMENTS if one in request.kernels]
    known = {one.kernel for call in calls.values() for one in call.translations}
    if asked and not known & ARGUMENTS.keys() and _computes_attention(module):
        for kernel in asked:
            yield Skip(name, kernel, what, NO_ATTENTION)


def _computes_attention(module: Module) -> bool:
    """Return whether its name says attention, and it has layers of its own."""
    children = [one for one in module._modules.values() if one is not None]
    is_inside = any("attention" in type(one).__name__.lower() for one in children)
    layers = [one for one in children if has(one, "weight") and not is_norm(one)]
    return "attention" in type(module).__name__.lower() and not is_inside and len(layers) > 1


def is_norm(module: Module) -> bool:
    """Return whether a module's name says that it is a norm."""
    return "norm" in type(module).__name__.lower()


def _generation_site(name: str, module: Module, make: Callable[..., Any]) -> Site:
    """Return the site that replaces the function for the masks of `generate`."""
    return Site(name, module, lambda owner: make, {}, attribute=GENERATION, switch=Switch())


def _known_calls(forward: Callable[..., Any], request: Request) -> dict[Path, Known]:
    known = {}
    for path, function in calls_in(forward):
        translations = translations_of(function, request.kernels)
        if ROPE in request.kernels and inspect.isfunction(function):
            other = request.once(("rotation", function), rotation_of, function)
            translations = translations if other is None else (other,)
        if translations:
            is_own = any(one.kernel == ROPE for one in translations)
            known[path] = Known(
                function,
                translations,
                # How it compares was looked at where it was recognised.
                reads_of_function(function, may_compare=True) if is_own else None,
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
    """Return replacements of the functions of a forward that make masks."""
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
    foreign = why_foreign(module) or why_not_patched(original)
    routes: dict[Path, list[Route]] = {}
    for path, (function, translations, _) in calls.items():
        why = foreign
        if function is TORCHS.cross_entropy_module:
            why = why or request.once(("made", original, path), _why_not_made, original, path)
        for one in translations:
            sort = ("settings", id(function), one.kernel)
            settings = request.once(sort, settings_of, function, one)
            if why or isinstance(settings, str):
                skipped = why or f"{'.'.join(path)}: {settings}"
                yield Skip(name, one.kernel, _what(module, path, one), skipped)
            else:
                dispatcher = Dispatcher(request.kernels[one.kernel], request.providers, settings)
                routes.setdefault(path, []).append(Route(one, dispatcher))
    if routes:
        masks = request.once(("masks", original), _masks_of, original, request)
        yield _site(name, module, calls, routes, masks, request)


def _site(
    name: str,
    module: Module,
    calls: Mapping[Path, Known],
    routes: Mapping[Path, list[Route]],
    masks: Mapping[Path, Any],
    request: Request,
) -> Site:
    original = type(module).forward
    others = {path: _guarded(calls[path], found) for path, found in routes.items()}
    others.update(masks)
    rewired, switch = Patched(original, others), Switch()
    put = bound(_calling(original, rewired, switch), original, switch)
    functions = {path: calls[path].function for path in routes}
    read = [calls[path].reads for path in routes]

    def why_changed(owner: Module) -> str | None:
        found = (one.why_changed(None) for one in read if isinstance(one, Reads))
        return rewired.why_changed(functions) or next((why for why in found if why), None)

    def put_anew(owner: Module) -> object:
        rewired.refresh()
        # Layers that are compiled one by one share graphs: torch keeps eight of a code object.
        are_open = tuple(one.dispatcher.is_open for found in routes.values() for one in found)
        sort = ("graphs", original, are_open)
        rewired.share_graphs(request.once(sort, lambda: rewired.code))
        return put(owner)

    parts = {
        _what(module, path, one.translation): one.dispatcher
        for path, found in routes.items()
        for one in found
    }
    return Site(name, module, put_anew, parts, switch=switch, why_changed=why_changed)


def _guarded(known: Known, routes: Sequence[Route]) -> Any:
    """Return the replacement of a function; it runs the original if the code's reads changed."""
    function, replacement = known.function, replacement_of(known.function, routes)
    is_changed = changes_of(known.reads) if isinstance(known.reads, Reads) else None
    if is_changed is None:
        return replacement

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not is_changed(None):
            return replacement(*args, **kwargs)
        if not is_compiling():
            for route in routes:
                route.dispatcher.leave_out(CHANGED)
        return function(*args, **kwargs)

    return guarded


def _what(module: Module, path: Path, translation: Translation) -> str:
    return translation.titled(f"{type(module).__name__}: {'.'.join(path)}")


def _calling(original: Callable[..., Any], rewired: Patched, switch: Switch) -> Callable[..., Any]:
    live, compiled = rewired.live, rewired.function

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self:
            return original(self, *args, **kwargs)
        # After a graph break a compiler would trace the live one, too.
        if is_compiling() or compiler_of_frames() is not None:
            return compiled(self, *args, **kwargs)
        return live(self, *args, **kwargs)

    return forward


def replacement_of(function: Any, routes: Sequence[Route]) -> Any:
    """Return the replacement of a function: the first kernel that supports a call gets it."""
    if is_interface(function):
        return Interface(function, routes)
    if function is TORCHS.cross_entropy_module:
        return _losing(replacement_of(TORCHS.cross_entropy, routes), routes)
    replacement = function
    for one in reversed(routes):
        replacement = _routed(replacement, one)
    return casting(replacement) if function is attention else replacement


def _why_not_made(forward: Callable[..., Any], path: Path) -> str | None:
    """Return why a forward does more with a class than make modules that it calls."""
    tree = tree_of(forward)
    if tree is None:
        return "the source of its forward is missing, or is not the code that runs"
    made = {id(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    names = [one for one in ast.walk(tree) if isinstance(one, (ast.Name, ast.Attribute))]
    named = ".".join(path)
    if any(ast.unparse(one) == named and id(one) not in made for one in names):
        return f"its forward does more with {named} than call it"
    return why_writing(forward)


def _losing(lose: Callable[..., Any], routes: Sequence[Route]) -> Callable[..., Any]:
    """Return what makes a module of torch whose loss is computed by a replacement."""
    notes = [one.dispatcher.noting() for one in routes]

    class Loss(TORCHS.cross_entropy_module):  # type: ignore[name-defined]
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            options = {"reduction": self.reduction, "label_smoothing": self.label_smoothing}
            result: Tensor = lose(
                input, target, weight=self.weight, ignore_index=self.ignore_index, **options
            )
            return result

    def make(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            for note in notes:
                note(False)
            return TORCHS.cross_entropy_module(*args, **kwargs)
        return Loss(*args, **kwargs)

    return make


def _routed(function: Callable[..., Any], route: Route) -> Callable[..., Any]:
    translation, dispatcher = route
    known, decide, trace = dispatcher.known, dispatcher.decide, dispatcher.tracing()
    translate, key_of, shape_of = translation.arguments, translation.key, translation.shape
    returned = translation.returned

    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = translate(*args, **kwargs)
        if not isinstance(arguments, tuple):
            if not is_compiling():
                why = arguments or "it is called with options that the kernel does not have"
                dispatcher.leave_out(why)
            return function(*args, **kwargs)
        if is_compiling():
            run = trace(*arguments)
        else:
            key = key_of(*arguments)
            decision = known.get(key)
            if decision is None:
                is_default = translation.is_default(arguments)
                decision = decide(key, arguments, shape_of(*arguments), is_default=is_default)
            decision.num_calls += 1
            run = decision.function
        return function(*args, **kwargs) if run is None else returned(run(*arguments))

    return replacement


def process_sites(request: Request) -> Iterator[Site]:
    """Yield the sites of functions of torch, for all calls of the process."""
    for function in FUNCTIONS:
        translations = translations_of(function, request.kernels)
        if translations:
            yield _process_site(function, translations, request)


def _process_site(
    function: Callable[..., Any], translations: Sequence[Translation], request: Request
) -> Site:
    name, routes = function.__name__, []
    for one in translations:
        found = settings_of(function, one)
        settings = frozenset() if isinstance(found, str) else found
        dispatcher = Dispatcher(request.kernels[one.kernel], request.providers, settings)
        routes.append(Route(one, dispatcher))
    replacement, switch = replacement_of(function, routes), Switch()
    # Providers that call this function itself cannot be compiled into its place.
    name_of = request.providers.name
    others = [one for one in routes if name_of(one.translation.kernel) not in ORIGINAL]
    compiled = replacement_of(function, others)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A reference taken while the swap was on may be called later.
        if switch.owner is None:
            return function(*args, **kwargs)
        if is_compiling():
            return compiled(*args, **kwargs)
        if has_decided(request.providers):
            return function(*args, **kwargs)
        return replacement(*args, **kwargs)

    setattr(call, MARK, switch)
    return Site(
        OF_PROCESS,
        functional,
        lambda owner: call,
        {one.translation.titled(name): one.dispatcher for one in routes},
        attribute=name,
        switch=switch,
    )


# Returns None outside of compiled code; without this function, code may always be compiled.
compiler_of_frames = getattr(eval_frame, "get_eval_frame_callback", object)


FAMILY = Family(
    kernels=(
        *(ATTENTION_FORWARD, ATTENTION_FP8, CROSS_ENTROPY, DECODE_ATTENTION),
        *(LAYERNORM, RMSNORM, ROPE),
    ),
    find=find,
)
