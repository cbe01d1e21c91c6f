"""What being faster is worth: per token, in cash, and when it has paid for the work."""

from __future__ import annotations

from fractions import Fraction
from statistics import median

from kprof.analyze.cost.fleet import replicas_of, size_fleet, usd_per_month
from kprof.analyze.cost.price import Band, ListedRatio, Price, ratios_by_list
from kprof.analyze.cost.sheet import ONE, Figure, Missing, Sheet
from kprof.analyze.cost.tokens import usd_per_million_tokens

UNIT, CASH = "Gain of a token", "Gain in cash"
BEFORE = "before"
"""What a million tokens cost at an old price that was given apart from the new one."""


def unit_gain(speedup: Fraction, old_over_new_price: Fraction) -> Fraction:
    """Return by what a token gets cheaper: (P_old / T_old) / (P_new / T_new).

    A ratio of latencies is a speed-up here only where a GPU serves one stream, or a fixed number
    of them, at a time; else take tokens per second at the SLA. Utilisation is the same in both.
    """
    return speedup * old_over_new_price


def payback_months(fee_usd: Fraction, saved_usd_per_month: Fraction) -> Fraction | None:
    """Return after how many months a saving has paid for the work; None where it never does."""
    return fee_usd / saved_usd_per_month if saved_usd_per_month > 0 else None


def add_gain(sheet: Sheet) -> None:
    """Add what a speed-up is worth for a token, and in cash where whole GPUs are given back."""
    speedup = sheet.facts.speedup
    if speedup is None:
        return
    ratio = _price_ratio(sheet)
    if ratio is None:
        return
    gain = Band(
        unit_gain(speedup.low, ratio.low),
        unit_gain(speedup.mid, ratio.mid),
        unit_gain(speedup.high, ratio.high),
    )
    formula = "speed-up * price of the old GPU / price of the new"
    sheet.add(UNIT, "a token gets cheaper by", "times", gain, formula)
    _add_unit_saving(sheet, speedup, ratio)
    _add_cash(sheet, speedup, ratio)


def _price_ratio(sheet: Sheet) -> Band | None:
    """Return what an hour of the old GPU costs over one of the new, list by list where it can."""
    facts = sheet.facts
    if facts.baseline_price is not None:
        if sheet.price is None:
            sheet.has(UNIT, "price")
            return None
        # Given apart, the two prices do not move together.
        old, new = facts.baseline_price, sheet.price.usd_per_gpu_hour
        return Band(old.low / new.high, old.mid / new.mid, old.high / new.low)
    if facts.baseline_gpu is None:
        return Band.known(ONE)
    if not sheet.has(UNIT, "gpu") or facts.gpu is None or facts.speedup is None:
        return None
    found = ratios_by_list(sheet.quotes, facts.baseline_gpu, facts.gpu)
    for one in found:
        _add_listed_gain(sheet, one, facts.speedup)
    if not found:
        sheet.missing.append(
            Missing(
                UNIT, (f"--baseline-price, as no list has {facts.baseline_gpu} and {facts.gpu}",)
            )
        )
        return None
    ratios = [one.ratio for one in found]
    return Band(min(ratios), median(ratios), max(ratios))


def _add_listed_gain(sheet: Sheet, one: ListedRatio, speedup: Band) -> None:
    """Add the gain where both GPUs are paid by one list."""
    dates = [quote.date for quote in one.quotes]
    names = f"{one.price_list}, {one.term}"
    hourly = Band.known(one.quotes[1].usd_per_gpu_hour)
    price = Price(names, hourly, min(dates), max(dates), (one.quotes[1].source,))
    gain = speedup.map(lambda speed: unit_gain(speed, one.ratio))
    text = f"{sheet.facts.baseline_gpu} over {sheet.facts.gpu}: {float(one.ratio):.3g}"
    sheet.figures.append(Figure("Gain by price list", price.name, "times", gain, text, (price,)))


def _add_unit_saving(sheet: Sheet, speedup: Band, ratio: Band) -> None:
    facts, price = sheet.facts, sheet.price
    if facts.tokens_per_s is None or price is None:
        if sheet.is_asked("tokens_per_month"):
            sheet.has(f"{UNIT}, in dollars", "tokens_per_s", "price")
        return
    new = usd_per_million_tokens(
        price.usd_per_gpu_hour.mid, facts.tokens_per_s.mid, sheet.utilisation, facts.overhead
    )
    if (old := facts.baseline_price) is not None:
        ratio = old.map(lambda usd: usd / price.usd_per_gpu_hour.mid)
    ends = zip(_ends(speedup), _ends(ratio), strict=True)
    saved = Band(*(new * (unit_gain(speed, one) - 1) for speed, one in ends))
    if old is not None:
        before = saved.map(lambda usd: usd + new)
        text = "cost at the old GPU's price, over its band and that of the speed-up"
        sheet.figures.append(Figure(UNIT, BEFORE, "$/M tokens", before, text))
    text = "new cost at the middle price * (gain - 1), over the band of the gain"
    sheet.figures.append(Figure(UNIT, "saved", "$/M tokens", saved, text, (price,)))
    if facts.tokens_per_month is None:
        return
    volume = facts.tokens_per_month
    monthly = saved.map(lambda usd: usd * volume / 10**6)
    text = "the same for all tokens; cash only as far as GPUs are given back"
    sheet.figures.append(Figure(UNIT, "saved", "$/month", monthly, text, (price,)))
    _add_payback(sheet, UNIT, monthly)


def _ends(band: Band) -> tuple[Fraction, Fraction, Fraction]:
    return band.low, band.mid, band.high


def _add_cash(sheet: Sheet, speedup: Band, ratio: Band) -> None:
    """Add what whole GPUs that are given back save, over the bands of prices and speed-up."""
    facts, price = sheet.facts, sheet.price
    if not sheet.has(CASH, "demand", "tokens_per_s", "price"):
        return
    if facts.demand is None or facts.tokens_per_s is None or price is None:
        return
    demand, rate, replicas = facts.demand, facts.tokens_per_s.mid, replicas_of(facts)
    after = size_fleet(demand, rate, replicas).gpus
    before = speedup.map(lambda times: Fraction(size_fleet(demand, rate / times, replicas).gpus))
    sheet.add(CASH, "GPUs before", "GPUs", before, "fleet at T / speed-up")
    sheet.add(CASH, "GPUs after", "GPUs", Fraction(after), "fleet at T")

    def saved_on(gpus: Fraction, old_usd: Fraction, new_usd: Fraction) -> Fraction:
        old = usd_per_month(int(gpus), old_usd, facts.overhead)
        return old - usd_per_month(after, new_usd, facts.overhead)

    pairs = _price_pairs(price.usd_per_gpu_hour, facts.baseline_price, ratio)
    saves = [saved_on(gpus, *pair) for gpus in _ends(before) for pair in pairs]
    middle = saved_on(
        before.mid, price.usd_per_gpu_hour.mid * ratio.mid, price.usd_per_gpu_hour.mid
    )
    saved = Band(min(saves), middle, max(saves))
    text = "whole GPUs * 730 h, before less after, once they are given back"
    sheet.figures.append(Figure(CASH, "saved", "$/month", saved, text, (price,)))
    _add_payback(sheet, CASH, saved)


def _price_pairs(new: Band, given: Band | None, ratio: Band) -> list[tuple[Fraction, Fraction]]:
    """Return the old and the new price of a GPU-hour, wherever the bands of both end.

    Two that were given apart are unknown apart; else the old price is so many times the new one.
    """
    if given is not None:
        return [(old, usd) for old in _ends(given) for usd in _ends(new)]
    return [(usd * times, usd) for usd in _ends(new) for times in _ends(ratio)]


def _add_payback(sheet: Sheet, topic: str, saved: Band) -> None:
    if sheet.facts.fee is None:
        return
    months = [payback_months(sheet.facts.fee, usd) for usd in (saved.high, saved.mid, saved.low)]
    if months[2] is None or months[1] is None or months[0] is None:
        sheet.notes.append(f"{topic}: at the low end of the band the fee is never paid back.")
        return
    band = Band(months[0], months[1], months[2])
    sheet.add(topic, "paid back after", "months", band, "fee / saved a month")
