"""Serving: a million tokens, what moves their cost, input against output, joules of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kprof.analyze.cost.facts import Served
from kprof.analyze.cost.fleet import MILLION, SECONDS_PER_HOUR, usd_per_month
from kprof.analyze.cost.price import Band
from kprof.analyze.cost.sheet import Sheet

JOULES_PER_KWH = 3_600_000


def usd_per_million_tokens(
    usd_per_gpu_hour: float,
    tokens_per_s_per_gpu: float,
    utilisation: float = 1,
    overhead_factor: float = 1,
) -> float:
    """Return $ for a million tokens: P * ov / (T * 3,600 / 10^6 * u).

    `tokens_per_s_per_gpu` is what a GPU serves at the largest load that still meets the targets,
    not its peak; `utilisation` is what is served over that. With u = 1 it is the cost of use,
    with the measured u that of the reservation, which is what is paid.
    """
    tokens_per_hour = tokens_per_s_per_gpu * SECONDS_PER_HOUR * utilisation
    return usd_per_gpu_hour * overhead_factor * MILLION / tokens_per_hour


class Bill(NamedTuple):
    """The cost of a window of serving, by purpose: the three parts add up to the whole."""

    computed_usd: float
    """For input tokens that were computed."""
    cached_usd: float
    """For input tokens from the cache."""
    output_usd: float


def split_bill(
    served: Served,
    usd_per_gpu_hour: float,
    utilisation: float = 1,
    overhead_factor: float = 1,
) -> Bill:
    """Split the bill for the GPUs of a window by the seconds that prefill and decode took.

    The bill is P * ov / u * (prefill + decode GPU seconds) / 3,600: hours that were paid and not
    used are borne in proportion. Within prefill a cached token weighs `cached_weight`, a computed
    one 1. Charging the whole GPU-hour to input and again to output, as some tables do, counts it
    twice.
    """
    usd_per_s = usd_per_gpu_hour * overhead_factor / utilisation / SECONDS_PER_HOUR
    prefill_usd = usd_per_s * served.prefill_gpu_s
    cached = served.cached_tokens * served.cached_weight
    weight = served.computed_tokens + cached
    cached_usd = prefill_usd * cached / weight
    return Bill(prefill_usd - cached_usd, cached_usd, usd_per_s * served.decode_gpu_s)


def in_micro_dollars(parts_usd: Sequence[float]) -> list[int]:
    """Round parts to whole millionths of a dollar that add up to their rounded sum."""
    exact = [part * MILLION for part in parts_usd]
    whole = [int(part // 1) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: round(sum(exact)) - sum(whole)]:
        whole[i] += 1
    return whole


def add_steps(sheet: Sheet) -> None:
    """Add the cost of steps of any work."""
    seconds, gpus, ov = sheet.facts.step_s, sheet.facts.gpus, sheet.assumed.overhead
    if seconds is None or not sheet.has("Steps", "price", "gpus"):
        return
    assert gpus is not None
    hours = 1_000 * seconds * gpus / SECONDS_PER_HOUR
    formula = "P * overhead * GPUs * step / 3,600"
    sheet.add_usd("Steps", "a thousand steps", "$", ov * hours, formula)


def add_serving(sheet: Sheet) -> None:
    """Add what a million tokens cost at the capacity under the SLA."""
    topic, unit, facts, ov = "Serving", "$/M tokens", sheet.facts, sheet.assumed.overhead
    rate, gpus, used = facts.tokens_per_s, facts.gpus, sheet.utilisation
    if rate is None or not sheet.has(topic, "price"):
        return
    as_paid = "P * overhead / (T * 3,600 / 10^6 * utilisation)"
    sheet.add_usd(topic, "as paid", unit, usd_per_million_tokens(1, rate.mid, used, ov), as_paid)
    if facts.utilisation is None:
        sheet.notes.append(
            "Utilisation is taken as 1, which no service reaches. Give --utilisation, what is "
            "served over what the GPUs could serve at the SLA, or the --demand by the hour."
        )
    else:
        of_use = "the same at utilisation 1: hours paid and not used are left out"
        sheet.add_usd(
            topic,
            "of use alone",
            unit,
            usd_per_million_tokens(1, rate.mid, 1, ov),
            of_use,
        )
    if gpus is not None:
        kept, formula = "all GPUs, kept for a month", "P * overhead * GPUs * 730 h"
        sheet.add_usd(topic, kept, "$/month", usd_per_month(gpus, 1, ov), formula)


def add_what_moves_it(sheet: Sheet) -> None:
    """Add the cost of serving over each uncertain fact alone, the widest first."""
    facts, price, rate = sheet.facts, sheet.price, sheet.facts.tokens_per_s
    if price is None or rate is None:
        return
    p, ov, used = price.usd_per_gpu_hour, sheet.assumed.overhead, sheet.utilisation
    shares = facts.utilisation or Band.known(1)
    moved = {
        "price": p.map(lambda x: usd_per_million_tokens(x, rate.mid, used, ov)),
        "utilisation": shares.map(lambda x: usd_per_million_tokens(p.mid, rate.mid, x, ov)),
        "speed": rate.map(lambda x: usd_per_million_tokens(p.mid, x, used, ov)),
    }
    wide = {name: band for name, band in moved.items() if not band.is_known}
    if not set(wide) - {"price"}:
        return
    for name, band in sorted(wide.items(), key=lambda item: item[1].low - item[1].high):
        text = f"{name} over its band, the rest in the middle"
        sheet.add("What moves it", name, "$/M tokens", band, text, price)


def add_split(sheet: Sheet) -> None:
    """Add what input, cached input and output cost, by measured GPU seconds."""
    topic, served, used = "Input and output", sheet.assumed.served, sheet.utilisation
    if served is None or not sheet.has(topic, "price"):
        return
    assert sheet.price is not None
    ov = sheet.assumed.overhead
    micro = in_micro_dollars(split_bill(served, sheet.price.usd_per_gpu_hour.mid, used, ov))
    names = ("input_microusd", "cached_input_microusd", "output_microusd")
    sheet.bill = {**dict(zip(names, micro, strict=True)), "total_microusd": sum(micro)}
    # The bill is proportional to the price of a GPU-hour.
    of_1 = split_bill(served, 1, used, ov)
    whole = "P * overhead / utilisation * GPU seconds / 3,600"
    sheet.add_usd(topic, "bill", "$", sum(of_1), whole)
    for name, tokens, usd, formula in (
        ("input", served.computed_tokens, of_1.computed_usd, "prefill's share of the bill"),
        ("cached input", served.cached_tokens, of_1.cached_usd, "by cached_weight"),
        ("output", served.output_tokens, of_1.output_usd, "decode's share of the bill"),
    ):
        if tokens:
            sheet.add_usd(topic, f"{name}, of the bill", "$", usd, formula)
            of_million, text = usd * MILLION / tokens, f"the same over {name} tokens"
            sheet.add_usd(topic, f"{name}, a token", "$/M tokens", of_million, text)


def add_energy(sheet: Sheet) -> None:
    """Add joules of a step, of a token as measured and as provisioned, and what they cost."""
    topic, facts, energy = "Energy", sheet.facts, sheet.assumed.energy
    if facts.joules_per_step is not None:
        sheet.add(topic, "a step on all GPUs", "J/step", facts.joules_per_step, "as measured")
    found = {}
    if facts.joules_per_token is not None:
        found["measured"] = (facts.joules_per_token, "as measured")
    if energy.kw_per_gpu is not None and facts.tokens_per_s is not None:
        joules = energy.kw_per_gpu * 1_000 / facts.tokens_per_s.mid
        found["provisioned"] = (joules, "kW * 1,000 / T")
    for name, (joules, formula) in found.items():
        sheet.add(topic, name, "J/token", joules, formula)
    if not found or not sheet.has(topic, "energy.usd_per_kwh"):
        return
    assert energy.usd_per_kwh is not None
    for name, (joules, _) in found.items():
        usd = joules * MILLION / JOULES_PER_KWH * energy.usd_per_kwh * energy.pue
        formula = "J/token / 3.6 * $/kWh * PUE"
        sheet.add(topic, f"electricity, {name}", "$/M tokens", usd, formula)
    sheet.notes.append(
        "Electricity is part of the price of a GPU-hour already, rented or owned: do not add it. "
        "On rented GPUs, energy saved is no money saved."
    )
