"""The figures that follow from the facts, each with band, formula, date of its price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from operator import attrgetter

from kprof.analyze.cost.facts import Assumptions, Facts, option_of
from kprof.analyze.cost.price import Band, Price, Quote, Spread

SCHEMA = 1


@dataclass(frozen=True)
class Figure:
    """One number of the answer; `prices` are those that its dollars stand on."""

    topic: str
    name: str
    unit: str
    low: float
    mid: float
    high: float
    formula: str
    prices: tuple[Price, ...] = ()

    @property
    def values(self) -> Band:
        """The number with its band."""
        return Band(self.low, self.mid, self.high)


@dataclass(frozen=True)
class Missing:
    """A figure that could not be computed, and the facts that it needs."""

    topic: str
    give: tuple[str, ...]


@dataclass(frozen=True)
class Costs:
    """Everything that follows from some facts, on the day on which its prices were judged."""

    as_of: date
    price: Price | None
    figures: tuple[Figure, ...]
    missing: tuple[Missing, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    bill: Mapping[str, int] | None = None
    """The bill of the served window at the middle price, in whole millionths of a dollar."""
    schema: int = SCHEMA


@dataclass
class Sheet:
    """The facts and prices that figures follow from, and the figures as they are found."""

    facts: Facts
    quotes: tuple[Quote, ...] = ()
    price: Price | None = None
    figures: list[Figure] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bill: Mapping[str, int] | None = None

    @property
    def assumed(self) -> Assumptions:
        """The assumptions beside the facts."""
        return self.facts.assumptions

    @property
    def utilisation(self) -> float:
        """Served share of the capacity; 1 where it is unknown."""
        return self.facts.utilisation.mid if self.facts.utilisation else 1

    def has(self, topic: str, *names: str) -> bool:
        """Tell whether all of these facts are known; note those that are not."""
        absent = [name for name in names if self._is_absent(name)]
        if absent:
            options = ("--gpu or --price" if n == "price" else option_of(n) for n in absent)
            self.missing.append(Missing(topic, tuple(options)))
        return not absent

    def _is_absent(self, name: str) -> bool:
        if name == "price":
            return self.price is None
        return attrgetter(name)(self.assumed if "." in name else self.facts) is None

    def is_asked(self, *names: str) -> bool:
        """Tell whether any of these facts is given."""
        return any(getattr(self.facts, name) is not None for name in names)

    def add(
        self,
        topic: str,
        name: str,
        unit: str,
        values: Band | float,
        formula: str,
        *prices: Price,
    ) -> None:
        """Add a figure, with the prices that it stands on."""
        band = values if isinstance(values, Spread) else Band.known(values)
        self.figures.append(
            Figure(topic, name, unit, band.low, band.mid, band.high, formula, prices)
        )

    def add_usd(self, topic: str, name: str, unit: str, gpu_hours: float, formula: str) -> None:
        """Add the cost of so many GPU-hours, over the price's band."""
        assert self.price is not None, "asked for dollars without a price"
        values = self.price.usd_per_gpu_hour.map(lambda usd: usd * gpu_hours)
        self.add(topic, name, unit, values, formula, self.price)
