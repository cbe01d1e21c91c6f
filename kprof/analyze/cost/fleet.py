"""Whole GPUs: how many a demand needs, what they cost, and when an API would cost the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

from kprof.analyze.cost.facts import Facts
from kprof.analyze.cost.price import HOURS_PER_MONTH
from kprof.analyze.cost.sheet import Sheet
from kprof.analyze.cost.tokens import MILLION, SECONDS_PER_HOUR


@dataclass(frozen=True)
class Replicas:
    """How a fleet is made: GPUs come in whole replicas, and never fewer than `min_replicas`.

    `headroom` is what must be there over what is asked; a replica that is started is paid for
    `cold_start_s` before it serves.
    """

    gpus_per_replica: int = 1
    min_replicas: int = 1
    headroom: Fraction = Fraction(1)
    cold_start_s: Fraction = Fraction(0)


@dataclass(frozen=True)
class Fleet:
    """The GPUs that a demand needs at its peak, and the GPU-hours paid, steady or scaled hourly."""

    gpus: int
    steady_gpu_hours: Fraction
    scaled_gpu_hours: Fraction
    used_gpu_hours: Fraction
    """What would be enough at full use of every GPU."""

    @property
    def steady_utilisation(self) -> Fraction:
        """What is served over what the GPUs of the peak could serve all the time."""
        return self.used_gpu_hours / self.steady_gpu_hours

    @property
    def scaled_utilisation(self) -> Fraction:
        """What is served over what is provisioned where every hour has its own number of GPUs."""
        return self.used_gpu_hours / self.scaled_gpu_hours


def size_fleet(
    demand_tokens_per_s: Sequence[Fraction],
    tokens_per_s_per_gpu: Fraction,
    replicas: Replicas = Replicas(),
) -> Fleet:
    """Return the fleet for a demand given hour by hour, its capacity taken at the SLA.

    Replicas of an hour are ceil(rate * headroom / (T * GPUs of a replica)).
    """
    per_replica = tokens_per_s_per_gpu * replicas.gpus_per_replica
    needed = [
        max(ceil(rate * replicas.headroom / per_replica), replicas.min_replicas)
        for rate in demand_tokens_per_s
    ]
    starts = sum(max(b - a, 0) for a, b in pairwise(needed))
    started_hours = starts * replicas.cold_start_s / SECONDS_PER_HOUR
    peak = max(needed) * replicas.gpus_per_replica
    return Fleet(
        gpus=peak,
        steady_gpu_hours=Fraction(peak * len(needed)),
        scaled_gpu_hours=(sum(needed) + started_hours) * replicas.gpus_per_replica,
        used_gpu_hours=sum(demand_tokens_per_s, Fraction(0)) / tokens_per_s_per_gpu,
    )


def usd_per_month(gpus: int, usd_per_gpu_hour: Fraction, overhead_factor: Fraction) -> Fraction:
    """Return what GPUs cost that are kept all month, of 730 hours, used or not."""
    return gpus * usd_per_gpu_hour * overhead_factor * HOURS_PER_MONTH


def break_even_tokens_per_month(
    fleet_usd_per_month: Fraction, api_usd_per_million: Fraction
) -> Fraction:
    """Return the tokens per month at which an API costs as much as GPUs kept all month."""
    return fleet_usd_per_month * MILLION / api_usd_per_million


def replicas_of(facts: Facts) -> Replicas:
    """Return how the facts say that a fleet is made."""
    return Replicas(
        int(facts.replica_gpus), int(facts.min_replicas), facts.headroom, facts.cold_start
    )


def add_fleet(sheet: Sheet) -> None:
    """Add the whole GPUs that the demand needs, how used they are, and what they cost."""
    topic, facts = "Fleet", sheet.facts
    if facts.demand is None or not sheet.has(topic, "tokens_per_s") or facts.tokens_per_s is None:
        return
    fleet = size_fleet(facts.demand, facts.tokens_per_s.mid, replicas_of(facts))
    formula = "ceil(peak * headroom / (T * GPUs of a replica)) * GPUs of a replica"
    sheet.add(topic, "GPUs at the peak", "GPUs", Fraction(fleet.gpus), formula)
    kinds = [("kept at the peak", fleet.steady_gpu_hours, fleet.steady_utilisation)]
    if len(facts.demand) > 1:
        kinds.append(("scaled by the hour", fleet.scaled_gpu_hours, fleet.scaled_utilisation))
    for name, _, used in kinds:
        sheet.add(topic, f"utilisation, {name}", "share", used, "served / provisioned")
    if not sheet.has(topic, "price"):
        return
    tokens = sum(facts.demand, Fraction(0)) * SECONDS_PER_HOUR
    for name, hours, _ in kinds:
        per_million = hours * facts.overhead * MILLION / tokens
        cost = "P * overhead * GPU-hours / tokens of these hours"
        sheet.add_usd(topic, name, "$/M tokens", per_million.__mul__, cost)
    monthly = "P * overhead * GPUs * 730 h"
    sheet.add_usd(
        topic,
        "kept at the peak",
        "$/month",
        lambda p: usd_per_month(fleet.gpus, p, facts.overhead),
        monthly,
    )


def add_break_even(sheet: Sheet) -> None:
    """Add from how many tokens a month on own GPUs are cheaper than an API."""
    topic, facts = "Against an API", sheet.facts
    api_price, gpus, rate = facts.api_price, facts.gpus, facts.tokens_per_s
    if api_price is None:
        return
    if gpus is None and facts.demand is not None and rate is not None:
        gpus = Fraction(size_fleet(facts.demand, rate.mid, replicas_of(facts)).gpus)
    if not sheet.has(topic, *(["price"] if gpus else ["price", "gpus"])) or gpus is None:
        return
    number = int(gpus)

    def tokens(price: Fraction) -> Fraction:
        monthly = usd_per_month(number, price, facts.overhead)
        return break_even_tokens_per_month(monthly, api_price)

    formula = "P * overhead * GPUs * 730 h / API price"
    sheet.add_usd(topic, "break-even", "tokens/month", tokens, formula)
    if not sheet.has(f"{topic}: whether the GPUs can serve that", "tokens_per_s") or rate is None:
        return
    most = rate.mid * number * HOURS_PER_MONTH * SECONDS_PER_HOUR
    sheet.add(topic, "most that they serve", "tokens/month", most, "T * GPUs * 730 h")
    if sheet.figures[-2].values.mid > most:
        sheet.notes.append("The API is cheaper at any load that these GPUs can serve.")
