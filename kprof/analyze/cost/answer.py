"""The whole answer: which price holds, every figure that follows, what is missing, what is old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from kprof.analyze.cost.facts import COMPANIONS, Facts, option_of, without_companion
from kprof.analyze.cost.fleet import add_break_even, add_fleet, replicas_of, size_fleet
from kprof.analyze.cost.gain import add_gain
from kprof.analyze.cost.plausible import check_facts
from kprof.analyze.cost.price import (
    STALE_AFTER_DAYS,
    Band,
    Ownership,
    Price,
    Quote,
    interrupted_usd_per_gpu_hour,
    owned_usd_per_gpu_hour,
    price_of,
)
from kprof.analyze.cost.serving import (
    add_energy,
    add_serving,
    add_split,
    add_steps,
    add_what_moves_it,
)
from kprof.analyze.cost.sheet import Figure, Missing, Sheet
from kprof.analyze.cost.tokens import Bill
from kprof.analyze.cost.training import add_training
from kprof.errors import KprofError

LARGEST = 10**100
"""Anything in dollars, hours or tokens that is larger is a slip."""
ALL = (
    add_steps,
    add_serving,
    add_what_moves_it,
    add_split,
    add_fleet,
    add_break_even,
    add_training,
    add_energy,
    add_gain,
)


@dataclass(frozen=True)
class Costs:
    """Everything that follows from some facts, on the day on which its prices were judged."""

    as_of: date
    price: Price | None
    figures: tuple[Figure, ...]
    missing: tuple[Missing, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    bill: Bill | None = None
    """The bill of the served window at the middle price, exact."""


def costs_of(facts: Facts, quotes: Sequence[Quote], today: date) -> Costs:
    """Compute every figure that follows from the facts; what does not is named as missing.

    Raises:
        KprofError: the facts tell nothing at all, or name a GPU, term or list without a price.
    """
    sheet = Sheet(facts, tuple(quotes))
    sheet.facts = _with_rates(sheet)
    sheet.price = _price(sheet, today)
    hardly_true = check_facts(sheet)
    for add in ALL:
        add(sheet)
    for name in without_companion(facts):
        options = " or ".join(option_of(other) for other in COMPANIONS[name])
        sheet.missing.append(Missing(f"{option_of(name)} alone changes nothing", (options,)))
    if sheet.price is None and not sheet.figures and not sheet.missing:
        raise KprofError(
            "nothing follows from what is given",
            fix="begin with: kprof cost --gpu H100 --tokens-per-s 5000",
        )
    _refuse_beyond_numbers(sheet)
    behind = [price for figure in sheet.figures for price in figure.prices]
    used = dict.fromkeys([*([sheet.price] if sheet.price else []), *behind])
    stale = [price for price in used if price.is_stale(today)]
    return Costs(
        as_of=today,
        price=sheet.price,
        figures=tuple(sheet.figures),
        missing=tuple(dict.fromkeys(sheet.missing)),
        warnings=(*hardly_true, *([_stale_warning(stale, today)] if stale else [])),
        notes=tuple(dict.fromkeys(sheet.notes)),
        bill=sheet.bill,
    )


def _refuse_beyond_numbers(sheet: Sheet) -> None:
    """Refuse what no report can show: beyond it, a figure would read as 0 or as infinity.

    Raises:
        KprofError: a figure, or the price of a GPU-hour, is so far from 1.
    """
    told = [(f"{one.topic}, {one.name}", one.values) for one in sheet.figures]
    told += [("the price of a GPU-hour", sheet.price.usd_per_gpu_hour)] if sheet.price else []
    for what, band in told:
        for value in (band.low, band.mid, band.high):
            if value and not 1 / LARGEST < abs(value) < LARGEST:
                size = "large" if abs(value) > 1 else "small"
                raise KprofError(
                    f"{what}: what follows from these facts is too {size} for a number",
                    fix="look for a slip in the exponents of what was given",
                )


def _with_rates(sheet: Sheet) -> Facts:
    """Return the facts with what follows for all: tokens/s and joules from steps, utilisation."""
    facts = sheet.facts
    tokens, joules = facts.tokens_per_step, facts.joules_per_step
    if tokens is not None and joules is not None and facts.joules_per_token is None:
        facts = replace(facts, joules_per_token=joules / tokens)
    is_rate_needed = tokens is not None and facts.tokens_per_s is None
    if is_rate_needed and sheet.has("Tokens per second", "step_s", "gpus"):
        assert tokens and facts.step_s and facts.gpus
        facts = replace(facts, tokens_per_s=Band.known(tokens / facts.step_s / facts.gpus))
    rate, demand = facts.tokens_per_s, facts.demand
    if demand is not None and rate is not None and facts.utilisation is None:
        used = size_fleet(demand, rate.mid, replicas_of(facts)).steady_utilisation
        sheet.notes.append("Utilisation follows from the demand on GPUs kept at its peak.")
        facts = replace(facts, utilisation=Band.known(used))
    return facts


def _stale_warning(stale: Sequence[Price], today: date) -> str:
    oldest = min(price.oldest for price in stale)
    return (
        f"Prices older than {STALE_AFTER_DAYS} days say little, and the oldest here is of "
        f"{oldest}, {(today - oldest).days} days ago: {'; '.join(p.name for p in stale)}. Give "
        "today's with --price, or a file of them with --prices."
    )


def _price(sheet: Sheet, today: date) -> Price | None:
    """Return the price of a GPU-hour: as given, as owned, or from the table."""
    facts = sheet.facts
    if facts.price is not None:
        price = Price("as given", facts.price, today, today, ("--price",))
    elif facts.capex is not None:
        if not sheet.has("Price of an own GPU", "life"):
            return None
        hourly = Band.known(owned_usd_per_gpu_hour(_ownership(sheet)))
        price = Price("owned, as given", hourly, today, today, (option_of("capex"),))
    elif facts.gpu is not None:
        price = price_of(sheet.quotes, facts.gpu, facts.term, facts.price_list)
    else:
        return None
    return _interrupted(sheet, price)


def _ownership(sheet: Sheet) -> Ownership:
    facts = sheet.facts
    assert facts.capex and facts.life
    kw, kwh_price = facts.kw, facts.kwh_price
    if kw is None or kwh_price is None:
        sheet.notes.append("The price leaves current out; to count it, give --kw and --kwh-price.")
        kw = kwh_price = facts.opex * 0
    return Ownership(
        facts.capex,
        facts.life,
        facts.interest,
        facts.opex,
        facts.availability,
        kw,
        facts.pue,
        kwh_price,
    )


def _interrupted(sheet: Sheet, price: Price) -> Price | None:
    """Return the price with what interruptions cost, where any are expected."""
    facts = sheet.facts
    if facts.interruptions is None and facts.restart is None:
        return price
    if not sheet.has("Price with interruptions", "interruptions", "restart"):
        return None
    rate, hours = facts.interruptions, facts.restart
    assert rate is not None and hours is not None
    band = price.usd_per_gpu_hour.map(lambda p: interrupted_usd_per_gpu_hour(p, rate, hours))
    name = f"{price.name}, with interruptions"
    return Price(name, band, price.oldest, price.newest, price.sources)
