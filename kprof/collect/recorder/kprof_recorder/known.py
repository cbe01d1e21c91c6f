"""Facts about an object, remembered while the object lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Fact = TypeVar("Fact")


class Known(Generic[Thing, Fact]):
    """Facts about objects, by identity: what a workload compares or hashes may be anything."""

    def __init__(self, find_out: Callable[[Thing], Fact]) -> None:
        self._find_out = find_out
        self._facts: dict[int, tuple[weakref.ref[Thing], Fact]] = {}

    def __call__(self, thing: Thing) -> Fact:
        """Return the fact about `thing`, found out the first time only."""
        known = self._facts.get(id(thing))
        if known is not None and known[0]() is thing:
            return known[1]
        fact = self._find_out(thing)
        self._facts[id(thing)] = (weakref.ref(thing), fact)
        return fact

    def alive(self) -> Iterator[Thing]:
        """Yield the objects that still live."""
        for reference, _ in list(self._facts.values()):
            thing = reference()
            if thing is not None:
                yield thing
