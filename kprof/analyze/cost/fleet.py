"""The number of whole GPUs that a demand needs, with their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from kprof.analyze.cost.facts import Replicas
from kprof.analyze.cost.price import HOURS_PER_MONTH
from kprof.analyze.cost.sheet import Sheet

MILLION, SECONDS_PER_HOUR = 1_000_000, 3_600


@dataclass(frozen=True)
class Fleet:
    """The GPUs that a demand needs at its peak, and the GPU-hours paid, steady or scaled hourly."""

    gpus: int
    steady_gpu_hours: float
    scaled_gpu_hours: float
    used_gpu_hours: float
    """GPU-hours that would suffice at full use."""

    @property
    def steady_utilisation(self) -> float:
        """Served tokens over the capacity of the peak's GPUs at all times."""
        return self.used_gpu_hours / self.steady_gpu_hours

    @property
    def scaled_utilisation(self) -> float:
        """Served tokens over the capacity where every hour has its own number of GPUs."""
        return self.used_gpu_hours / self.scaled_gpu_hours


def size_fleet(
    demand_tokens_per_s: Sequence[float],
    tokens_per_s_per_gpu: float,
    replicas: Replicas,
) -> Fleet:
    """Return the fleet for a demand given hour by hour, its capacity taken at the SLA.

    Replicas of an hour are ceil(rate * headroom / (T * GPUs of a replica)).
    """
    per_replica = tokens_per_s_per_gpu * replicas.gpus_per_replica
    needed = [
        # Rounding in the last place must not add a replica.
        max(ceil(rate * replicas.headroom / per_replica * (1 - 1e-12)), replicas.min_replicas)
        for rate in demand_tokens_per_s
    ]
    starts = sum(max(b - a, 0) for a, b in pairwise(needed))
    started_hours = starts * replicas.cold_start_s / SECONDS_PER_HOUR
    peak = max(needed) * replicas.gpus_per_replica
    return Fleet(
        gpus=peak,
        steady_gpu_hours=float(peak * len(needed)),
        scaled_gpu_hours=(sum(needed) + started_hours) * replicas.gpus_per_replica,
        used_gpu_hours=sum(demand_tokens_per_s) / tokens_per_s_per_gpu,
    )


def usd_per_month(gpus: int, usd_per_gpu_hour: float, overhead_factor: float) -> float:
    """Return what GPUs cost that are kept all month, of 730 hours, used or not."""
    return gpus * usd_per_gpu_hour * overhead_factor * HOURS_PER_MONTH


def add_fleet(sheet: Sheet) -> None:
    """Add the whole GPUs that the demand needs, how used they are, and what they cost."""
    topic, facts = "Fleet", sheet.facts
    if facts.demand is None or not sheet.has(topic, "tokens_per_s"):
        return
    assert facts.tokens_per_s is not None
    fleet = size_fleet(facts.demand, facts.tokens_per_s.mid, sheet.assumed.replicas)
    formula = "ceil(peak * headroom / (T * GPUs of a replica)) * GPUs of a replica"
    sheet.add(topic, "GPUs at the peak", "GPUs", fleet.gpus, formula)
    kinds = [("kept at the peak", fleet.steady_gpu_hours, fleet.steady_utilisation)]
    if len(facts.demand) > 1:
        kinds.append(("scaled by the hour", fleet.scaled_gpu_hours, fleet.scaled_utilisation))
    for name, _, used in kinds:
        sheet.add(topic, f"utilisation, {name}", "share", used, "served / provisioned")
    if not sheet.has(topic, "price"):
        return
    tokens = sum(facts.demand) * SECONDS_PER_HOUR
    for name, hours, _ in kinds:
        per_million = hours * sheet.assumed.overhead * MILLION / tokens
        cost = "P * overhead * GPU-hours / tokens of these hours"
        sheet.add_usd(topic, name, "$/M tokens", per_million, cost)
    of_month = usd_per_month(fleet.gpus, 1, sheet.assumed.overhead)
    monthly = "P * overhead * GPUs * 730 h"
    sheet.add_usd(topic, "kept at the peak", "$/month", of_month, monthly)


def add_break_even(sheet: Sheet) -> None:
    """Add from how many tokens a month on own GPUs are cheaper than an API."""
    topic, facts = "Against an API", sheet.facts
    api_price, gpus, rate = facts.api_price, facts.gpus, facts.tokens_per_s
    if api_price is None:
        return
    if gpus is None and facts.demand is not None and rate is not None:
        gpus = size_fleet(facts.demand, rate.mid, sheet.assumed.replicas).gpus
    if not sheet.has(topic, *(["price"] if gpus else ["price", "gpus"])):
        return
    assert gpus is not None
    of_price = usd_per_month(gpus, 1, sheet.assumed.overhead) * MILLION / api_price
    formula = "P * overhead * GPUs * 730 h / API price"
    sheet.add_usd(topic, "break-even", "tokens/month", of_price, formula)
    if not sheet.has(f"{topic}: whether the GPUs can serve that", "tokens_per_s"):
        return
    assert rate is not None
    most = rate.mid * gpus * HOURS_PER_MONTH * SECONDS_PER_HOUR
    sheet.add(topic, "most that they serve", "tokens/month", most, "T * GPUs * 730 h")
    if sheet.figures[-2].mid > most:
        sheet.notes.append("The API is cheaper at any load that these GPUs can serve.")


def add_kept_gpus(sheet: Sheet) -> None:
    """Add what GPUs cost that are kept, where nothing else is known of their use."""
    topic, facts, overhead = "Kept GPUs", sheet.facts, sheet.assumed.overhead
    if sheet.figures or sheet.missing or sheet.price is None:
        return
    gpus = facts.gpus or 1
    of_month = usd_per_month(gpus, 1, overhead)
    sheet.add_usd(topic, f"an hour of {gpus:g}", "$", gpus * overhead, "P * overhead * GPUs")
    sheet.add_usd(topic, f"a month of {gpus:g}", "$", of_month, "P * overhead * GPUs * 730 h")
    if facts.utilisation is not None:
        formula = "P * overhead / utilisation"
        used = overhead / facts.utilisation.mid
        sheet.add_usd(topic, "a GPU-hour in use", "$", used, formula)
    sheet.notes.append("For the cost of tokens, give --tokens-per-s; of steps, --step-s.")
