"""One call site: the attribute that is replaced while a swap is on.

`CallProxy` runs a module's own code once with other children.
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
from kprof.kernels.swap.swap_report import SiteReport

if TYPE_CHECKING:
    from kprof.kernels.fp8._copies import CopyMaker

# The kernel whose layers read FP8 copies.
FP8_LINEAR = "fp8_linear"
_ABSENT = object()


@dataclass
class Request:
    """The kernels and filters of a swap, and a cache of what it knows about kinds of modules."""

    kernels: Mapping[str, Kernel]
    providers: Providers
    recognised: dict[Hashable, Any] = field(default_factory=dict)
    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Filters by kernel: patterns of names or shapes of wanted sites; ! excludes."""

    def is_wanted(self, kernel: str, name: str, shape: str = "") -> bool:
        """Return whether the filters of a kernel select the site of this name.

        `shape` is that of its weights, such as "14336x4096"; empty: it has none.
        """

        def matches(pattern: str) -> bool:
            return fnmatchcase(shape if _is_of_shapes(pattern) else name, pattern)

        patterns = self.patterns.get(kernel, ())
        wanted = [one for one in patterns if not one.startswith("!")]
        unwanted = [one[1:] for one in patterns if one.startswith("!")]
        return (not wanted or any(map(matches, wanted))) and not any(map(matches, unwanted))

    def is_named_in_full(self, kernel: str, name: str) -> bool:
        """Return whether a filter is the full name of this site."""
        return name in self.patterns.get(kernel, ())

    def new_maker(self) -> CopyMaker | None:
        """Return a maker of FP8 copies of a site's results; None: no layer reads them."""
        if FP8_LINEAR not in self.kernels:
            return None
        # Imports the FP8 kernels, which other swaps do without.
        from kprof.kernels.fp8._copies import CopyMaker

        return CopyMaker()

    def once(self, key: Hashable, find: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `find` for these arguments, cached by key."""
        if key not in self.recognised:
            self.recognised[key] = find(*arguments)
        return self.recognised[key]


def _is_of_shapes(pattern: str) -> bool:
    """Return whether a pattern is one of shapes, such as "14336x*"."""
    rows, _, columns = pattern.partition("x")
    are_lengths = all(side and set(side) <= set("0123456789*?") for side in (rows, columns))
    return are_lengths and any(map(str.isdigit, pattern))


@dataclass
class Skip:
    """A place that is not swapped, and why."""

    name: str
    kernel: str
    what: str
    why: str

    @property
    def place(self) -> Hashable:
        """The key of the place: each is swapped once."""
        return (self.name, self.kernel, self.what)

    def reports(self) -> Iterator[SiteReport]:
        """Yield the report of the place."""
        yield SiteReport(self.name, self.kernel, self.what, self.why)


class Switch:
    """The object whose calls are replaced; None while the swap is off.

    A copy of the object carries the same method, but is not the owner: it runs the original.
    """

    __slots__ = ("owner",)

    def __init__(self) -> None:
        self.owner: Any = None


class Site:
    """An attribute of an object that is replaced while a swap is on."""

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
            owner: The object with the attribute; held weakly.
            put: Returns the new value for the owner.
            dispatcher: Of its calls; or several, by the function that they call.
            attribute: Its name.
            switch: Turned on for the owner.
            may_stand: Whether another value, set after recognition, may be replaced, too.
            why_changed: Takes the owner; returns what has changed since recognition, or None.
            shape: Of its weights, "ROWSxCOLUMNS", for filters; empty: none.
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
        """The object with the attribute; None after it was deleted."""
        return self._owner()

    @property
    def place(self) -> Hashable:
        """The key of the place: each is swapped once."""
        return (id(self.owner), self._attribute)

    def enter(self) -> None:
        """Set the new value, unless other code has replaced the attribute since recognition."""
        owner, self.problem = self._owner(), None
        if owner is None:
            return
        previous = owner.__dict__.get(self._attribute, _ABSENT)
        if previous is not self._found and not self._may_stand(previous):
            self.problem = "other code has replaced it since"
            return
        self.problem = self._why_changed(owner)
        if self.problem is not None:
            return
        self._previous = previous
        self._value = owner.__dict__[self._attribute] = self._put(owner)
        self._switch.owner = owner

    def leave(self) -> None:
        """Restore the attribute. A wrapper around it by other code stays, and runs the original."""
        owner, value = self._owner(), self._value
        self._switch.owner = None
        self._value = _ABSENT
        if owner is None or value is _ABSENT:
            return
        if owner.__dict__.get(self._attribute) is not value:
            self.problem = "other code replaced it in between: it stays, and runs the original"
        elif self._previous is _ABSENT:
            del owner.__dict__[self._attribute]
        else:
            owner.__dict__[self._attribute] = self._previous

    def reports(self) -> Iterator[SiteReport]:
        """Yield the report of the site."""
        for what, dispatcher in self.parts.items():
            why = self.problem if dispatcher.is_open else UNWANTED
            calls = dispatcher.calls() if dispatcher.is_open else ()
            yield SiteReport(self.name, dispatcher.kernel.name, what, why, calls)


def running_original(
    original: Callable[..., Any], dispatcher: Dispatcher, switch: Switch
) -> Callable[..., Any]:
    """Return a function that runs the original, and counts the owner's calls with a reason."""

    def run(owner: Any, why: str, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is owner and not is_compiling():
            dispatcher.leave_out(why)
        return original(owner, *args, **kwargs)

    return run


def bound(function: Callable[..., Any], original: Callable[..., Any], switch: Switch) -> Any:
    """Return a function that binds a method to its owner, for `Site`.

    The method has the name and the signature of the original, for inspection and pickling.
    """
    function.__name__ = "forward"
    function.__qualname__ = getattr(original, "__qualname__", "forward")
    function.__module__ = original.__module__
    function.__doc__ = original.__doc__
    function.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(function, MARK, switch)
    return lambda owner: types.MethodType(function, owner)


class CallProxy:
    """A stand-in for one call of a module's code, with other children and attributes."""

    def __init__(self, module: Module, children: Mapping[str, Any], **others: Any) -> None:
        self._module = module
        self.clone: Module = object.__new__(type(module))
        own = {**module.__dict__, **others, "_modules": dict(children)}
        own.pop("forward", None)
        self._attributes_before = own
        self.clone.__dict__.update(own)

    def copy_back(self) -> None:
        """Copy the attributes that the call has written to the module."""
        before = self._attributes_before
        for name, value in self.clone.__dict__.items():
            if before.get(name, _ABSENT) is not value:
                self._module.__dict__[name] = value
