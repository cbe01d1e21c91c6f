"""Figures of serving: a million tokens, what moves their cost, input against output, current."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kprof.analyze.cost.fleet import usd_per_month
from kprof.analyze.cost.price import Band
from kprof.analyze.cost.sheet import ONE, Figure, Sheet
from kprof.analyze.cost.tokens import (
    MILLION,
    SECONDS_PER_HOUR,
    Bill,
    Served,
    energy_usd_per_million_tokens,
    provisioned_joules_per_token,
    split_bill,
    usd_per_million_tokens,
)


def add_steps(sheet: Sheet) -> None:
    """Add what steps cost, whatever they do."""
    seconds, gpus, ov = sheet.facts.step_s, sheet.facts.gpus, sheet.facts.overhead
    if seconds is None or not sheet.has("Steps", "price", "gpus") or gpus is None:
        return
    hours = 1_000 * seconds * gpus / SECONDS_PER_HOUR
    formula = "P * overhead * GPUs * step / 3,600"
    sheet.add_usd("Steps", "a thousand steps", "$", lambda p: p * ov * hours, formula)


def add_serving(sheet: Sheet) -> None:
    """Add what a million tokens cost at the capacity under the SLA."""
    topic, facts = "Serving", sheet.facts
    rate, ov, used = facts.tokens_per_s, facts.overhead, sheet.utilisation
    if rate is None or not sheet.has(topic, "price"):
        return
    formula = "P * overhead / (T * 3,600 / 10^6 * utilisation)"
    unit = "$/M tokens"
    sheet.add_usd(
        topic,
        "as paid",
        unit,
        lambda p: usd_per_million_tokens(p, rate.mid, used, ov),
        formula,
    )
    if facts.utilisation is None:
        sheet.notes.append(
            "Utilisation is taken as 1, which no service reaches. Give --utilisation, what is "
            "served over what the GPUs could serve at the SLA, or the --demand by the hour."
        )
    else:
        sheet.add_usd(
            topic,
            "of use alone",
            unit,
            lambda p: usd_per_million_tokens(p, rate.mid, ONE, ov),
            "the same at utilisation 1: hours paid and not used are left out",
        )
    if facts.gpus is not None:
        number = int(facts.gpus)
        sheet.add_usd(
            topic,
            "all GPUs, kept for a month",
            "$/month",
            lambda p: usd_per_month(number, p, ov),
            "P * overhead * GPUs * 730 h",
        )


def add_what_moves_it(sheet: Sheet) -> None:
    """Add the cost of serving over each uncertain fact alone, the widest first."""
    facts, price, rate = sheet.facts, sheet.price, sheet.facts.tokens_per_s
    if price is None or rate is None:
        return
    p, ov, used = price.usd_per_gpu_hour, facts.overhead, sheet.utilisation
    shares = facts.utilisation or Band.known(ONE)
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
        sheet.figures.append(Figure("What moves it", name, "$/M tokens", band, text, (price,)))


def add_split(sheet: Sheet) -> None:
    """Add what input, cached input and output cost, by measured GPU seconds."""
    topic, facts = "Input and output", sheet.facts
    measured = ("input_tokens", "output_tokens", "prefill_gpu_s", "decode_gpu_s")
    if not sheet.is_asked(*measured) or not sheet.has(topic, "price", *measured):
        return
    assert facts.input_tokens and facts.output_tokens and sheet.price
    assert facts.prefill_gpu_s is not None and facts.decode_gpu_s is not None
    served = Served(
        facts.input_tokens,
        facts.output_tokens,
        facts.prefill_gpu_s,
        facts.decode_gpu_s,
        facts.cached_share,
        facts.cached_weight,
    )

    def bill(price: Fraction) -> Bill:
        return split_bill(served, price, sheet.utilisation, facts.overhead)

    sheet.bill = bill(sheet.price.usd_per_gpu_hour.mid)
    whole = "P * overhead / utilisation * GPU seconds / 3,600"
    sheet.add_usd(topic, "bill", "$", lambda p: bill(p).total_usd, whole)
    parts: list[tuple[str, Fraction, Callable[[Bill], Fraction], str]] = [
        ("input", served.computed_tokens, lambda b: b.computed_usd, "prefill's share of the bill"),
        ("cached input", served.cached_tokens, lambda b: b.cached_usd, "by --cached-weight"),
        ("output", served.output_tokens, lambda b: b.output_usd, "decode's share of the bill"),
    ]
    for name, tokens, part, formula in parts:
        if tokens:
            _add_part(sheet, name, tokens, formula, _after(bill, part))


def _after(
    bill: Callable[[Fraction], Bill], part: Callable[[Bill], Fraction]
) -> Callable[[Fraction], Fraction]:
    """Return a part of the bill as a function of the price."""
    return lambda price: part(bill(price))


def _add_part(
    sheet: Sheet, name: str, tokens: Fraction, formula: str, usd: Callable[[Fraction], Fraction]
) -> None:
    """Add a part of the bill, in dollars and for a million of its tokens."""
    topic = "Input and output"
    sheet.add_usd(topic, f"{name}, of the bill", "$", usd, formula)
    unit, text = "$/M tokens", f"the same over {name} tokens"
    sheet.add_usd(topic, f"{name}, a token", unit, lambda p: usd(p) * MILLION / tokens, text)


def add_energy(sheet: Sheet) -> None:
    """Add joules of a step, of a token as measured and as provisioned, and what they cost."""
    topic, facts = "Energy", sheet.facts
    if facts.joules_per_step is not None:
        sheet.add(topic, "a step on all GPUs", "J/step", facts.joules_per_step, "as measured")
    is_only_price = facts.capex is not None and facts.joules_per_token is None
    if is_only_price or not sheet.is_asked("joules_per_token", "kw", "kwh_price"):
        return
    found = _joules_per_token(sheet, topic)
    for name, joules, formula in found:
        sheet.add(topic, name, "J/token", joules, formula)
    if not found or not sheet.has(topic, "kwh_price") or facts.kwh_price is None:
        return
    for name, joules, _ in found:
        usd = energy_usd_per_million_tokens(joules, facts.kwh_price, facts.pue)
        sheet.add(topic, f"current, {name}", "$/M tokens", usd, "J/token / 3.6 * $/kWh * PUE")
    sheet.notes.append(
        "Current is part of the price of a GPU-hour already, rented or owned: do not add it. On "
        "rented GPUs, energy saved is no money saved."
    )


def _joules_per_token(sheet: Sheet, topic: str) -> list[tuple[str, Fraction, str]]:
    """Return the joules of a token, each as what and how; what misses for any is noted."""
    facts, rate = sheet.facts, sheet.facts.tokens_per_s
    found = []
    if facts.joules_per_token is not None:
        found.append(("measured", facts.joules_per_token, "as measured"))
    if facts.kw is not None and sheet.has(topic, "tokens_per_s") and rate is not None:
        joules = provisioned_joules_per_token(facts.kw, rate.mid)
        found.append(("provisioned", joules, "kW * 1,000 / T"))
    if not found and facts.kw is None:
        sheet.has(topic, "joules_per_token")
    return found
