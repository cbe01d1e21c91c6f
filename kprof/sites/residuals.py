"""Residual adds in front of a norm: layers that compute norm(x + part(...)), and use the sum again.

The layer's own forward runs around a part that returns a promise of its result. The sum of that and
a tensor is a promise, too, which the norm keeps: it makes sum and norm at once. To whoever else
looks at it, a promise is the tensor that it stands for.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.sites import Family
from kprof.sites._around import Around
from kprof.sites._norms import LAYERNORM, RMSNORM, Recognised
from kprof.sites._patches import is_passed_over, why_foreign, why_writing
from kprof.sites._probe import CANNOT, are_alike, kind_of, place_of, probing, stand_in
from kprof.sites._promise import Part, Promise, all_kept, returned
from kprof.sites._rewire import innermost
from kprof.sites._site import Request, Site, Skip, Switch, bound
from kprof.sites._ways import Ways, key_of
from kprof.sites.norms import is_default, norm_of

KERNELS = {RMSNORM: "add_rmsnorm", LAYERNORM: "add_layernorm"}
NO_SUM = "what it norms is no sum that nobody looked at before"
WATCHED = "somebody watches its norm"
# What a part of a layer may return: a tensor, or one and so many things beside it.
MOST_BESIDE = 2


@dataclass(frozen=True)
class Joint:
    """Where a layer adds and norms."""

    part: str
    """The child whose result is added."""
    norm: str
    """The child that gets the sum."""


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the layers below a module that add to what they were given before they norm it."""
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        norms = {child: norm_of(one, request) for child, one in module.named_children()}
        known = {child: one for child, one in norms.items() if isinstance(one, Recognised)}
        if not known or len(norms) == len(known):
            continue
        joint = request.once(("joint", *kind_of(module)), _joint_of, module, frozenset(known))
        if joint is None or KERNELS[known[joint.norm].kernel] not in request.kernels:
            continue
        label, what = name or type(module).__name__, type(module).__name__
        kernel = KERNELS[known[joint.norm].kernel]
        why = why_foreign(module) or _why_not_around(type(module).forward)
        if why is None:
            norm, key = module._modules[joint.norm], (kernel, known[joint.norm])
            why = request.once((*kind_of(norm), *key), _check, norm, *key, request)
        if why is not None:
            yield Skip(label, kernel, what, why)
        else:
            yield _site(label, module, joint, known[joint.norm], request)


def _why_not_around(forward: Callable[..., Any]) -> str | None:
    """Return why a forward cannot run with other children than its module has."""
    inner = innermost(forward)
    if inner is None:
        return "its forward is wrapped by a decorator that hides it"
    names = inner.__code__.co_names
    if any("checkpoint" in name for name in names):
        # What that runs again would get promises.
        return "its forward checkpoints a part of itself"
    if {"isinstance", "type"} & set(names):
        return "its forward asks of what type something is"
    return why_writing(forward)


def _check(norm: Module, name: str, found: Recognised, request: Request) -> str | None:
    """Let the kernel itself run on random rows; a sentence says what is wrong with it."""
    kernel, device = request.kernels[name], place_of(norm)
    weight = next(one for one in norm._parameters.values() if one is not None)
    with probing(device) as generator:
        rows = [torch.randn(9, *weight.shape, generator=generator) for _ in range(3)]
        x, residual, weights = (one.to(device, weight.dtype) for one in rows)
        default = is_default(found)
        function, provider, _ = request.providers.choose(kernel, x, x.shape, is_default=default)
        if function is None:
            # Calls may come from another device, and are looked at one by one.
            return None
        arguments = _arguments_of(found, x, residual, weights[0], weights[1], found.eps)
        if not are_alike(function(*arguments), kernel.reference(*arguments)):
            return f"the kernel of {provider} does not agree with it on random rows"
    return None


def _arguments_of(
    found: Recognised, x: Any, residual: Any, weight: Any, bias: Any, eps: float
) -> tuple[Any, ...]:
    """Return the arguments of the kernel that does this norm after a sum."""
    if found.kernel == LAYERNORM:
        return x, residual, weight, bias, eps
    return x, residual, weight, eps, *(() if is_default(found) else (found.form,))


class _Watching:
    """A child that returns a given tensor, and notes what it was given."""

    def __init__(self, result: Tensor, called: list[tuple[_Watching, object]]) -> None:
        self.result, self.num_beside, self._called = result, 0, called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tensor, alone or with nothing beside it."""
        self._called.append((self, next(iter((*args, *kwargs.values())), None)))
        return (self.result, *[None] * self.num_beside) if self.num_beside else self.result


def _joint_of(module: Module, norms: frozenset[str]) -> Joint | None:
    """Run a layer's own code with children that return given tensors; None: it does not add."""
    called: list[tuple[_Watching, object]] = []
    with probing(torch.device("cpu")) as generator:
        # One row of a batch: nobody can take a tensor for a pair.
        x, *drawn = torch.randn(1 + len(module._modules), 1, 3, 8, generator=generator)
        children = {
            name: _Watching(one, called) for name, one in zip(module._modules, drawn, strict=True)
        }
        if not _runs(module, children, x, called):
            return None
    names = {child: name for name, child in children.items()}
    found = [names[child] for child, _ in called]
    for norm, given in ((names[child], given) for child, given in called):
        if norm not in norms or found.count(norm) > 1 or not isinstance(given, Tensor):
            continue
        for part, child in children.items():
            if found.count(part) == 1 and torch.equal(given, x + child.result):
                return Joint(part, norm)
    return None


def _runs(module: Module, children: dict[str, _Watching], x: Tensor, called: list[Any]) -> bool:
    """Run it, with things beside the results of children where it asks for some."""
    clone = stand_in(module, {}, cast("Any", children))
    others = _num_needed(type(module).forward) - 1
    for _ in range(1 + MOST_BESIDE * len(children)):
        called.clear()
        try:
            type(module).forward(clone, x, *[None] * others)
        except CANNOT:
            if not called or called[-1][0].num_beside == MOST_BESIDE:
                return False
            called[-1][0].num_beside += 1
        else:
            return True
    return False


def _num_needed(forward: Callable[..., Any]) -> int:
    """Return how many arguments a method has to be given."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return sum(one.default is one.empty and one.kind in (0, 1) for one in parameters)


class _Norm:
    """A norm that makes the sum that it is given."""

    def __init__(self, child: Module, found: Recognised, ways: Ways) -> None:
        self._child, self._found, self._ways = child, found, ways

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of the sum, and keep the sum in it."""
        (promise, *others) = args or (None,)
        is_sum = type(promise) is Promise and promise.is_open and not (others or kwargs)
        if not is_sum or not is_passed_over(self._child):
            self._ways.leave_out(WATCHED if is_sum else NO_SUM)
            given, named = all_kept(args, kwargs)
            return self._child(*given, **named)
        x, residual, found = promise.x, promise.residual, self._found
        own, eps = self._child._parameters, found.eps
        if found.eps_name is not None:
            eps = getattr(self._child, found.eps_name)
        weight, bias = own.get("weight"), own.get("bias")
        arguments = _arguments_of(found, x, residual, weight, bias, eps)
        key = (key_of(x, weight), residual.shape, residual.dtype, type(residual))
        way = self._ways.known.get(key) or self._ways.decide(key, arguments)
        way.num_calls += 1
        if way.function is None:
            return self._child(promise.tensor())
        y, promise.made = way.function(*arguments)
        return y


def _site(name: str, module: Module, joint: Joint, found: Recognised, request: Request) -> Site:
    kernel = request.kernels[KERNELS[found.kernel]]
    maker, settings = request.new_maker(), found.settings
    ways = Ways(kernel, request.providers, settings, is_default=is_default(found), maker=maker)
    switch = Switch()
    original = type(module).forward
    note, norm_found = ways.noting(), weakref.ref(module._modules[joint.norm])

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self:
            return original(self, *args, **kwargs)
        if is_compiling():
            note(False)
            return original(self, *args, **kwargs)
        children = self._modules
        if children[joint.norm] is not norm_found():
            ways.leave_out("its norm is another one now")
            return original(self, *args, **kwargs)
        part, norm = Part(children[joint.part]), _Norm(children[joint.norm], found, ways)
        call = Around(self, {**children, joint.part: part, joint.norm: norm})
        try:
            return returned(original(call.clone, *args, **kwargs))
        finally:
            call.take_over()

    return Site(name, module, bound(forward, original, switch), ways, switch=switch)


FAMILY = Family(kernels=tuple(KERNELS.values()), find=find)
