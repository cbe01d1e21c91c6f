"""The worth of a speed-up: per token, in cash, and when it has paid for the work."""

from __future__ import annotations

from statistics import median

from kprof.analyze.cost.fleet import size_fleet, usd_per_month
from kprof.analyze.cost.price import Band, ListedRatio, Price, ratios_by_list
from kprof.analyze.cost.serving import usd_per_million_tokens
from kprof.analyze.cost.sheet import Missing, Sheet
from kprof.errors import three_digits

UNIT, CASH = "Gain of a token", "Gain in cash"
BEFORE = "before"
"""The cost of a million tokens at an old price that was given separately."""


def add_gain(sheet: Sheet) -> None:
    """Add what a speed-up is worth for a token, and in cash where whole GPUs are given back."""
    speedup = sheet.facts.speedup
    if speedup is None:
        return
    ratio = _price_ratio(sheet)
    if ratio is None:
        return
    # A ratio of latencies is a speed-up only where a GPU serves a fixed number of streams at a
    # time; utilisation is the same before and after.
    gain = Band(speedup.low * ratio.low, speedup.mid * ratio.mid, speedup.high * ratio.high)
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
        return Band.known(1)
    if not sheet.has(UNIT, "gpu"):
        return None
    assert facts.gpu is not None and facts.speedup is not None
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
    gain = speedup.map(lambda times: times * one.ratio)
    text = f"{sheet.facts.baseline_gpu} over {sheet.facts.gpu}: {three_digits(one.ratio)}"
    sheet.add("Gain by price list", price.name, "times", gain, text, price)


def _add_unit_saving(sheet: Sheet, speedup: Band, ratio: Band) -> None:
    facts, price = sheet.facts, sheet.price
    if facts.tokens_per_s is None or price is None:
        if sheet.is_asked("tokens_per_month"):
            sheet.has(f"{UNIT}, in dollars", "tokens_per_s", "price")
        return
    new = usd_per_million_tokens(
        price.usd_per_gpu_hour.mid,
        facts.tokens_per_s.mid,
        sheet.utilisation,
        sheet.assumed.overhead,
    )
    if (old := facts.baseline_price) is not None:
        ratio = old.map(lambda usd: usd / price.usd_per_gpu_hour.mid)
    ends = zip(_ends(speedup), _ends(ratio), strict=True)
    saved = Band(*(new * (times * one - 1) for times, one in ends))
    if old is not None:
        before = saved.map(lambda usd: usd + new)
        text = "cost at the old GPU's price, over its band and that of the speed-up"
        sheet.add(UNIT, BEFORE, "$/M tokens", before, text)
    text = "new cost at the middle price * (gain - 1), over the band of the gain"
    sheet.add(UNIT, "saved", "$/M tokens", saved, text, price)
    if facts.tokens_per_month is None:
        return
    volume = facts.tokens_per_month
    monthly = saved.map(lambda usd: usd * volume / 10**6)
    text = "the same for all tokens; cash only as far as GPUs are given back"
    sheet.add(UNIT, "saved", "$/month", monthly, text, price)
    _add_payback(sheet, UNIT, monthly)


def _ends(band: Band) -> tuple[float, float, float]:
    return band.low, band.mid, band.high


def _add_cash(sheet: Sheet, speedup: Band, ratio: Band) -> None:
    """Add what whole GPUs that are given back save, over the bands of prices and speed-up."""
    facts, price = sheet.facts, sheet.price
    if not sheet.has(CASH, "demand", "tokens_per_s", "price"):
        return
    assert facts.demand is not None and facts.tokens_per_s is not None and price is not None
    demand, rate, replicas = facts.demand, facts.tokens_per_s.mid, sheet.assumed.replicas
    after = size_fleet(demand, rate, replicas).gpus
    before = speedup.map(lambda times: size_fleet(demand, rate / times, replicas).gpus)
    sheet.add(CASH, "GPUs before", "GPUs", before, "fleet at T / speed-up")
    sheet.add(CASH, "GPUs after", "GPUs", after, "fleet at T")

    def saved_on(gpus: float, old_usd: float, new_usd: float) -> float:
        old = usd_per_month(int(gpus), old_usd, sheet.assumed.overhead)
        return old - usd_per_month(after, new_usd, sheet.assumed.overhead)

    pairs = _price_pairs(price.usd_per_gpu_hour, facts.baseline_price, ratio)
    saves = [saved_on(gpus, *pair) for gpus in _ends(before) for pair in pairs]
    middle = saved_on(
        before.mid, price.usd_per_gpu_hour.mid * ratio.mid, price.usd_per_gpu_hour.mid
    )
    saved = Band(min(saves), middle, max(saves))
    text = "whole GPUs * 730 h, before less after, once they are given back"
    sheet.add(CASH, "saved", "$/month", saved, text, price)
    _add_payback(sheet, CASH, saved)


def _price_pairs(new: Band, given: Band | None, ratio: Band) -> list[tuple[float, float]]:
    """Return the old and the new price of a GPU-hour, wherever the bands of both end.

    Two that were given apart are unknown apart; else the old price is so many times the new one.
    """
    if given is not None:
        return [(old, usd) for old in _ends(given) for usd in _ends(new)]
    return [(usd * times, usd) for usd in _ends(new) for times in _ends(ratio)]


def _add_payback(sheet: Sheet, topic: str, saved: Band) -> None:
    fee = sheet.facts.fee
    if fee is None:
        return
    if saved.low <= 0:
        sheet.notes.append(f"{topic}: at the low end of the band the fee is never paid back.")
        return
    months = saved.map(lambda usd: fee / usd)
    sheet.add(topic, "paid back after", "months", months, "fee / saved a month")
