"""The figures that follow from the facts: each with its band, its formula and its price's date."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from kprof.analyze.cost.facts import Facts, option_of
from kprof.analyze.cost.price import Band, Price, Quote
from kprof.analyze.cost.tokens import Bill

ONE = Fraction(1)


@dataclass(frozen=True)
class Figure:
    """One number of the answer; `prices` are those that its dollars stand on."""

    topic: str
    name: str
    unit: str
    values: Band
    formula: str
    prices: tuple[Price, ...] = ()


@dataclass(frozen=True)
class Missing:
    """What could not be computed, and the facts that would tell it."""

    topic: str
    facts: tuple[str, ...]


@dataclass
class Sheet:
    """The facts and prices that figures follow from, and the figures as they are found."""

    facts: Facts
    quotes: tuple[Quote, ...] = ()
    price: Price | None = None
    figures: list[Figure] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bill: Bill | None = None
    """The bill of the served window at the price in the middle of its band."""

    @property
    def utilisation(self) -> Fraction:
        """What is served over what could be; 1 where nobody says."""
        return self.facts.utilisation.mid if self.facts.utilisation else ONE

    def has(self, topic: str, *names: str) -> bool:
        """Tell whether all of these facts are known; note those that are not."""
        absent = [name for name in names if self._is_absent(name)]
        if absent:
            options = ("--gpu or --price" if n == "price" else option_of(n) for n in absent)
            self.missing.append(Missing(topic, tuple(options)))
        return not absent

    def _is_absent(self, name: str) -> bool:
        return self.price is None if name == "price" else getattr(self.facts, name) is None

    def is_asked(self, *names: str) -> bool:
        """Tell whether any of these facts is given."""
        return any(getattr(self.facts, name) is not None for name in names)

    def add(self, topic: str, name: str, unit: str, values: Band | Fraction, formula: str) -> None:
        """Add a figure that stands on no price."""
        band = values if isinstance(values, Band) else Band.known(values)
        self.figures.append(Figure(topic, name, unit, band, formula))

    def add_usd(
        self, topic: str, name: str, unit: str, cost: Callable[[Fraction], Fraction], formula: str
    ) -> None:
        """Add dollars as a function of the price of a GPU-hour, over the price's band."""
        assert self.price is not None, "asked for dollars without a price"
        values = self.price.usd_per_gpu_hour.map(cost)
        self.figures.append(Figure(topic, name, unit, values, formula, (self.price,)))
