"""One place of a model: what is put there, and the way that each of its calls goes.

A module for one call of another's code, with other children.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels import Kernel
from kprof.kernels.swap.dispatch import UNWANTED, Dispatcher
from kprof.kernels.swap.patches import MARK
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.report import SiteReport

if TYPE_CHECKING:
    from kprof.kernels.fp8._copies import CopyMaker

# The kernel whose layers read FP8 copies.
FP8_LINEAR = "fp8_linear"
_ABSENT = object()


@dataclass
class Request:
    """What a swap was asked for, and what it has found out about modules of the same kind."""

    kernels: Mapping[str, Kernel]
    providers: Providers
    recognised: dict[Hashable, Any] = field(default_factory=dict)
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of names or shapes, by kernel: its sites that are wanted; those with ! before are not."""

    def is_wanted(self, kernel: str, name: str, shape: str = "") -> bool:
        """Tell whether a kernel is wanted at the site of this name; without patterns, at all.

        `shape`: that of its weights, such as "14336x4096"; empty: it has none.
        """

        def matches(pattern: str) -> bool:
            return fnmatchcase(shape if _is_of_shapes(pattern) else name, pattern)

        patterns = self.patterns.get(kernel, ())
        wanted = [one for one in patterns if not one.startswith("!")]
        unwanted = [one[1:] for one in patterns if one.startswith("!")]
        return (not wanted or any(map(matches, wanted))) and not any(map(matches, unwanted))

    def is_named_in_full(self, kernel: str, name: str) -> bool:
        """Tell whether somebody asked for just this site."""
        return name in self.patterns.get(kernel, ())

    def new_maker(self) -> CopyMaker | None:
        """Return a maker of FP8 copies of a site's results; None: no layer reads them."""
        if FP8_LINEAR not in self.kernels:
            return None
        # Imports the FP8 kernels, which other swaps do without.
        from kprof.kernels.fp8._copies import CopyMaker

        return CopyMaker()

    def once(self, key: Hashable, find: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `find` finds for these arguments, and the same for the same key."""
        if key not in self.recognised:
            self.recognised[key] = find(*arguments)
        return self.recognised[key]


def _is_of_shapes(pattern: str) -> bool:
    """Tell whether a pattern is one of shapes, such as "14336x*"."""
    rows, _, columns = pattern.partition("x")
    are_lengths = all(side and set(side) <= set("0123456789*?") for side in (rows, columns))
    return are_lengths and any(map(str.isdigit, pattern))


@dataclass
class Skip:
    """A place that is left as it is, and why."""

    name: str
    kernel: str
    what: str
    why: str

    @property
    def place(self) -> Hashable:
        """What there is only one of."""
        return (self.name, self.kernel, self.what)

    def reports(self) -> Iterator[SiteReport]:
        """Yield it as plain data."""
        yield SiteReport(self.name, self.kernel, self.what, self.why)


class Switch:
    """Whose calls are replaced now: one object's, or, while it is off, None's.

    A copy of that object carries the same method; its calls find that it is not the one.
    """

    __slots__ = ("owner",)

    def __init__(self) -> None:
        self.owner: Any = None


class Site:
    """An attribute of an object that is another one while a swap is on."""

    def __init__(
        self,
        name: str,
        owner: Any,
        put: Callable[[Any], Any],
        dispatcher: Dispatcher | dict[str, Dispatcher],
        *,
        attribute: str = "forward",
        switch: Switch,
        may_stand: Callable[[object], bool] = lambda own: False,
        why_changed: Callable[[Any], str | None] = lambda owner: None,
        shape: str = "",
    ) -> None:
        """Describe the place.

        Args:
            name: Qualified.
            owner: Whose attribute it is; held weakly.
            put: Makes the new value for the owner.
            dispatcher: Of its calls; or several, by the function that they call.
            attribute: Its name.
            switch: Turned on for the owner.
            may_stand: Whether a value that comes to be there later may be replaced, too.
            why_changed: Takes the owner; returns what differs from when it was recognised, or None.
            shape: Of its weights, "rows x columns" without the blanks, for filters; empty: none.
        """
        self.name = name
        self.shape = shape
        self.parts = (
            dispatcher if isinstance(dispatcher, dict) else {type(owner).__name__: dispatcher}
        )
        self.problem: str | None = None
        self._owner = weakref.ref(owner)
        self._put = put
        self._attribute = attribute
        self._switch = switch
        self._may_stand = may_stand
        self._why_changed = why_changed
        self._found = self._previous = owner.__dict__.get(attribute, _ABSENT)
        self._value: object = _ABSENT

    @property
    def owner(self) -> Any:
        """Whose attribute it is; None where that is gone."""
        return self._owner()

    @property
    def place(self) -> Hashable:
        """What there is only one of."""
        return (id(self.owner), self._attribute)

    def enter(self) -> None:
        """Put the new value there, unless somebody else put one there meanwhile."""
        owner, self.problem = self._owner(), None
        if owner is None:
            return
        previous = owner.__dict__.get(self._attribute, _ABSENT)
        if previous is not self._found and not self._may_stand(previous):
            self.problem = "somebody else has replaced it since"
            return
        self.problem = self._why_changed(owner)
        if self.problem is not None:
            return
        self._previous = previous
        self._value = owner.__dict__[self._attribute] = self._put(owner)
        self._switch.owner = owner

    def leave(self) -> None:
        """Take it away; what somebody has put around it stays, and runs the original."""
        owner, value = self._owner(), self._value
        self._switch.owner = None
        self._value = _ABSENT
        if owner is None or value is _ABSENT:
            return
        if owner.__dict__.get(self._attribute) is not value:
            self.problem = "somebody replaced it in between: it was left so, and runs the original"
        elif self._previous is _ABSENT:
            del owner.__dict__[self._attribute]
        else:
            owner.__dict__[self._attribute] = self._previous

    def reports(self) -> Iterator[SiteReport]:
        """Yield what became of it, as plain data."""
        for what, dispatcher in self.parts.items():
            why = self.problem if dispatcher.is_open else UNWANTED
            calls = dispatcher.calls() if dispatcher.is_open else ()
            yield SiteReport(self.name, dispatcher.kernel.name, what, why, calls)


def running_original(
    original: Callable[..., Any], dispatcher: Dispatcher, switch: Switch
) -> Callable[..., Any]:
    """Return what runs the original where no kernel is asked, and counts the owner's calls."""

    def run(owner: Any, why: str, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is owner and not is_compiling():
            dispatcher.leave_out(why)
        return original(owner, *args, **kwargs)

    return run


def bound(function: Callable[..., Any], original: Callable[..., Any], switch: Switch) -> Any:
    """Return what binds a method to its owner, for `Site`.

    It has the name and the signature of the original, so that who inspects or pickles the owner
    finds what would be there without it.
    """
    function.__name__ = "forward"
    function.__qualname__ = getattr(original, "__qualname__", "forward")
    function.__module__ = original.__module__
    function.__doc__ = original.__doc__
    function.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(function, MARK, switch)
    return lambda owner: types.MethodType(function, owner)


class CallProxy:
    """One call of a module's code with other children, and other attributes."""

    def __init__(self, module: Module, children: Mapping[str, Any], **others: Any) -> None:
        self._module = module
        self.clone: Module = object.__new__(type(module))
        own = {**module.__dict__, **others, "_modules": dict(children)}
        own.pop("forward", None)
        self._attributes_before = own
        self.clone.__dict__.update(own)

    def copy_back(self) -> None:
        """Let the module have what the call has written to its attributes."""
        before = self._attributes_before
        for name, value in self.clone.__dict__.items():
            if before.get(name, _ABSENT) is not value:
                self._module.__dict__[name] = value
