"""Quotes of GPU-hours in files: kprof's own table of prices, and anybody's in the same form."""

from __future__ import annotations

from datetime import date
from fractions import Fraction
from pathlib import Path

import msgspec

from kprof.analyze.cost.price import Quote
from kprof.errors import KprofError

TABLE = Path(__file__).with_name("prices.json")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A quote as a file of prices writes it."""

    gpu: str
    usd_per_gpu_hour: float
    term: str
    price_list: str
    source: str
    date: date
    region: str | None = None
    note: str | None = None


class _File(msgspec.Struct):
    quotes: list[_Line]


def read_prices(path: Path | None = None) -> list[Quote]:
    """Return kprof's table of prices; a GPU that is in the file `path` has only that file's.

    Raises:
        KprofError: the file cannot be read, or is no table of prices.
    """
    table = _read(TABLE)
    if path is None:
        return table
    own = _read(path)
    theirs = {quote.gpu.casefold() for quote in own}
    return [*own, *(quote for quote in table if quote.gpu.casefold() not in theirs)]


def _read(path: Path) -> list[Quote]:
    fix = "see docs/cost.md for what a file of prices holds"
    try:
        lines = msgspec.json.decode(path.read_bytes(), type=_File).quotes
    except OSError as error:
        raise KprofError(
            f"{path} cannot be read: {error.strerror}",
            fix="name a file of prices that exists, or none for kprof's own table",
        ) from error
    except msgspec.MsgspecError as error:
        raise KprofError(f"{path} is no table of prices: {error}", fix=fix) from error
    for line in lines:
        if not 0 < line.usd_per_gpu_hour < float("inf"):
            problem = f"{path}: {line.gpu} costs {line.usd_per_gpu_hour} at {line.price_list}"
            raise KprofError(problem, fix="a price is a number of dollars above 0")
    return [_quote(line) for line in lines]


def _quote(line: _Line) -> Quote:
    return Quote(
        line.gpu,
        # As it is written, not the float nearest to it: the sums are exact.
        Fraction(repr(line.usd_per_gpu_hour)),
        line.term,
        line.price_list,
        line.source,
        line.date,
        line.region,
        line.note,
    )
