"""The price of a GPU-hour: dated quotes, the band that they make, rented or owned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from statistics import median
from typing import Annotated, Generic, TypeVar

import msgspec

from kprof.errors import KprofError

STALE_AFTER_DAYS = 90
HOURS_PER_MONTH = 730
ON_DEMAND = "on-demand"
PRICE_LIST = "price_list of the assumptions"


T = TypeVar("T", bound=float)


@dataclass(frozen=True)
class Spread(Generic[T]):
    """A quantity between what is low and what is high; all three the same where it is known."""

    low: T
    mid: T
    high: T

    @classmethod
    def known(cls, value: T) -> Spread[T]:
        """Return the band of a value that has no spread."""
        return cls(value, value, value)

    @property
    def is_known(self) -> bool:
        """Whether the band has no spread."""
        return self.low == self.high

    def map(self, function: Callable[[T], T]) -> Spread[T]:
        """Return the band of a function that only rises, or only falls, over it."""
        ends = function(self.low), function(self.high)
        return Spread(min(ends), function(self.mid), max(ends))


Band = Spread[float]


class Quote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The price of one GPU for an hour, as one list had it on one day."""

    gpu: str
    usd_per_gpu_hour: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    term: str
    """on-demand, spot, reserved-3y, or owned (what it costs its owner)."""
    price_list: str
    """Whose list, with its tier: only prices of the same list can be divided by each other."""
    source: str
    date: date
    region: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Price:
    """The price of a GPU-hour that dollars are computed with, and where it comes from."""

    name: str
    usd_per_gpu_hour: Band
    oldest: date
    newest: date
    sources: tuple[str, ...]

    @property
    def is_listed(self) -> bool:
        """Whether price lists tell it, and neither an option nor an assumption."""
        return not any(source.startswith(("--", "[")) for source in self.sources)

    def is_of_later(self, today: date) -> bool:
        """Tell whether a price in it was read after the day that the answer is for."""
        return self.newest > today

    def is_stale(self, today: date) -> bool:
        """Tell whether a price in it was read too long ago to stand for today's."""
        return (today - self.oldest).days > STALE_AFTER_DAYS


def price_of(quotes: Sequence[Quote], gpu: str, term: str, price_list: str | None = None) -> Price:
    """Return a GPU's price: the least, the median and the highest of the lists' newest quotes.

    Raises:
        KprofError: no quote is of that GPU, term and list; it names those that there are.
    """
    of_gpu = quotes_of(quotes, gpu, "--gpu")
    of_term = [quote for quote in of_gpu if quote.term == term]
    if not of_term:
        raise _unknown(
            f"no price list has {gpu} at the term {term!r}",
            (term, [quote.term for quote in of_gpu]),
            "--term",
        )
    named = [q for q in of_term if price_list is None or q.price_list == price_list]
    if not named:
        raise _unknown(
            f"the price list {price_list!r} has no price of {gpu}, {term}",
            (str(price_list), [quote.price_list for quote in of_term]),
            PRICE_LIST,
        )
    newest = list({q.price_list: q for q in sorted(named, key=lambda q: q.date)}.values())
    amounts = [quote.usd_per_gpu_hour for quote in newest]
    dates = [quote.date for quote in newest]
    return Price(
        name=f"{newest[0].gpu}, {term}",
        usd_per_gpu_hour=Band(min(amounts), median(amounts), max(amounts)),
        oldest=min(dates),
        newest=max(dates),
        sources=tuple(sorted(f"{q.price_list}: {q.source}" for q in newest)),
    )


def quotes_of(quotes: Sequence[Quote], gpu: str, option: str) -> list[Quote]:
    """Return the quotes of a GPU, which `option` of the command line named.

    Raises:
        KprofError: there are none; it names the GPUs that have one, the nearest names first.
    """
    found = [quote for quote in quotes if quote.gpu.casefold() == gpu.casefold()]
    if not found:
        known = [quote.gpu for quote in quotes]
        raise _unknown(f"no price list has the GPU {gpu!r}", (gpu, known), option)
    return found


def require_list(quotes: Sequence[Quote], price_list: str) -> None:
    """Refuse the name of a price list that no quote is of.

    Raises:
        KprofError: there is none; it names all.
    """
    known = [quote.price_list for quote in quotes]
    if price_list not in known:
        raise _unknown(f"there is no price list {price_list!r}", (price_list, known), PRICE_LIST)


def _unknown(problem: str, wanted: tuple[str, Sequence[str]], option: str) -> KprofError:
    """Return an error that lists every known name, those most like the given one first."""
    name, known = wanted
    by_folded = {one.casefold(): one for one in sorted(set(known))}
    near = [by_folded[one] for one in get_close_matches(name.casefold(), by_folded, cutoff=0.6)]
    names = [*near, *(one for one in by_folded.values() if one not in near)]
    # Names hold commas.
    listed = "; ".join(names)
    return KprofError(problem, fix=f"{option} takes one of: {listed}. Or give the price itself")


@dataclass(frozen=True)
class ListedRatio:
    """The price of one GPU relative to another on one list, by the quotes nearest in time."""

    price_list: str
    term: str
    ratio: float
    quotes: tuple[Quote, Quote]


def ratios_by_list(quotes: Sequence[Quote], gpu: str, over: str) -> list[ListedRatio]:
    """Return the price of `gpu` over that of `over` on every list that has both, least first.

    Within a list alone: dividing one vendor's dear list by another's cheap one says nothing.
    """
    ratios: dict[tuple[str, str], ListedRatio] = {}
    pairs = [
        (a, b)
        for a in quotes_of(quotes, gpu, "--baseline-gpu")
        for b in quotes_of(quotes, over, "--gpu")
        if (a.price_list, a.term) == (b.price_list, b.term)
    ]
    # The last one stays: nearest to each other, and of those the newest.
    for a, b in sorted(pairs, key=lambda p: (-abs((p[0].date - p[1].date).days), p[0].date)):
        ratio = a.usd_per_gpu_hour / b.usd_per_gpu_hour
        found = ListedRatio(a.price_list, a.term, ratio, (a, b))
        ratios[a.price_list, a.term] = found
    return sorted(ratios.values(), key=lambda one: (one.ratio, one.price_list))
