"""The whole answer: which price holds, every figure that follows, what is missing, what is old."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date

from msgspec.structs import replace

from kprof.analyze.cost.facts import Energy, Facts, Owning, Spot, option_of
from kprof.analyze.cost.fleet import add_break_even, add_fleet, size_fleet
from kprof.analyze.cost.gain import add_gain
from kprof.analyze.cost.plausible import check_facts
from kprof.analyze.cost.price import ON_DEMAND, STALE_AFTER_DAYS, Band, Price, Quote, price_of
from kprof.analyze.cost.serving import (
    add_energy,
    add_serving,
    add_split,
    add_steps,
    add_what_moves_it,
)
from kprof.analyze.cost.sheet import Costs, Missing, Sheet
from kprof.analyze.cost.training import add_training
from kprof.errors import KprofError

HOURS_PER_YEAR = 8_760
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
RATES = ("tokens_per_s", "tokens_per_step")
# A fact that changes nothing unless one of these is given beside it.
COMPANIONS = {
    "term": ("gpu",),
    "utilisation": RATES,
    "gpus": (*RATES, "step_s", "api_price"),
    **dict.fromkeys(("baseline_gpu", "baseline_price", "tokens_per_month", "fee"), ("speedup",)),
}


def costs_of(facts: Facts, quotes: Sequence[Quote], today: date) -> Costs:
    """Compute every figure that follows from the facts; what does not is named as missing.

    Raises:
        KprofError: the facts tell nothing at all, or name a GPU, term or list without a price.
    """
    sheet = Sheet(facts, tuple(quotes))
    sheet.facts = _with_rates(sheet)
    sheet.price = _price(sheet, today)
    warnings = check_facts(sheet)
    for add in ALL:
        add(sheet)
    _name_idle_facts(sheet)
    if sheet.price is None and not sheet.figures and not sheet.missing:
        raise KprofError(
            "nothing follows from what is given",
            fix="begin with: kprof cost --gpu H100 --tokens-per-s 5000",
        )
    behind = [price for figure in sheet.figures for price in figure.prices]
    used = dict.fromkeys([*([sheet.price] if sheet.price else []), *behind])
    if stale := [price for price in used if price.is_stale(today)]:
        warnings.append(_stale_warning(stale, today))
    return Costs(
        as_of=today,
        price=sheet.price,
        figures=tuple(sheet.figures),
        missing=tuple(dict.fromkeys(sheet.missing)),
        warnings=tuple(warnings),
        notes=tuple(dict.fromkeys(sheet.notes)),
        bill=sheet.bill,
    )


def _name_idle_facts(sheet: Sheet) -> None:
    """Name the facts that were given and change nothing."""
    for name, others in COMPANIONS.items():
        is_given = getattr(sheet.facts, name) not in (None, ON_DEMAND)
        is_served = name == "utilisation" and sheet.assumed.served is not None
        if is_given and not is_served and not sheet.is_asked(*others):
            told = " or ".join(option_of(other) for other in others)
            sheet.missing.append(Missing(f"{option_of(name)} alone changes nothing", (told,)))


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
        used = size_fleet(demand, rate.mid, facts.assumptions.replicas).steady_utilisation
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
    facts, owning = sheet.facts, sheet.assumed.owning
    if facts.price is not None:
        price = Price("as given", facts.price, today, today, ("--price",))
    elif owning is not None:
        energy = sheet.assumed.energy
        if energy.kw_per_gpu is None or energy.usd_per_kwh is None:
            sheet.notes.append(
                "The price leaves electricity out; to count it, give kw_per_gpu and usd_per_kwh "
                "in [energy]."
            )
        hourly = Band.known(owned_usd_per_gpu_hour(owning, energy))
        price = Price("owned, as assumed", hourly, today, today, ("[owning]",))
    elif facts.gpu is not None:
        price = price_of(sheet.quotes, facts.gpu, facts.term, sheet.assumed.price_list)
    else:
        return None
    spot = sheet.assumed.spot
    if spot is None:
        return price
    band = price.usd_per_gpu_hour.map(lambda usd: interrupted_usd_per_gpu_hour(usd, spot))
    name = f"{price.name}, with interruptions"
    return Price(name, band, price.oldest, price.newest, price.sources)


def owned_usd_per_gpu_hour(owned: Owning, energy: Energy) -> float:
    """Return what an hour costs an owner: capital, operation and electricity.

    (capex * CRF + opex) / (8,760 * availability) + kW * PUE * $/kWh, where the capital recovery
    factor CRF = r (1 + r)^n / ((1 + r)^n - 1) spreads the capital evenly over n years at interest
    r, and is 1 / n without interest.
    """
    rate, years = owned.interest_per_year, owned.life_years
    recovery = rate / -math.expm1(-years * math.log1p(rate)) if rate else 1 / years
    yearly = owned.capex_usd_per_gpu * recovery + owned.opex_usd_per_gpu_year
    electricity = (energy.kw_per_gpu or 0) * energy.pue * (energy.usd_per_kwh or 0)
    return yearly / (HOURS_PER_YEAR * owned.availability) + electricity


def interrupted_usd_per_gpu_hour(usd_per_gpu_hour: float, spot: Spot) -> float:
    """Return what an hour of work costs on GPUs that are taken away: P * (1 + r * t_restart)."""
    return usd_per_gpu_hour * (1 + spot.interruptions_per_hour * spot.restart_hours)
