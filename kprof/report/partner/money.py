"""Money before against after the change, from the results of `kprof cost`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kprof.analyze.cost.gain import BEFORE
from kprof.analyze.cost.of_runs import worth_of
from kprof.analyze.cost.price import Band
from kprof.analyze.cost.sheet import Costs, Figure
from kprof.findings import Saving
from kprof.report.partner.evidence import Evidence, first_and_last
from kprof.report.partner.wording import dollars
from kprof.report.units import MISSING, UNKNOWN, format_worth

OF_PRICES = "; that is of "
MILLION, MONTH, STEPS = "A million tokens", "A month", "A thousand steps"
KEPT = "A month, all GPUs kept"
PROVEN = ("FASTER", "SLOWER")

COMPARED = (
    (MILLION, ("Serving", "as paid", "$/M tokens")),
    (MONTH, ("Fleet", "kept at the peak", "$/month")),
    (KEPT, ("Serving", "all GPUs, kept for a month", "$/month")),
    (STEPS, ("Steps", "a thousand steps", "$")),
)
"""Figures of which a before and an after can be compared, each with its topic, name and unit."""


@dataclass(frozen=True)
class Line:
    """A cost before and after, and the saving; missing where it is unknown."""

    name: str
    before: Band | None
    after: Band | None
    saved: Band | None

    def written(self) -> tuple[str, str, str]:
        """Return before, after and what is saved, each with its band."""
        return written(self.before), written(self.after), written(self.saved)


def is_cheaper(saved: Band) -> bool | None:
    """Tell whether money is saved, all over the band; None: it may be so or not."""
    if saved.low > 0:
        return True
    return False if saved.high < 0 else None


def written(band: Band | None) -> str:
    """Write a band of dollars."""
    if band is None:
        return MISSING
    return dollars(float(band.low), float(band.mid), float(band.high))


def negated(band: Band) -> Band:
    """Return what a saving costs, or a cost saves."""
    return Band(-band.high, -band.mid, -band.low)


def is_credited(evidence: Evidence) -> bool:
    """Tell whether the difference that money rests on is proven, or nothing was compared."""
    comparison = evidence.headline
    return comparison is None or comparison.headline.verdict in PROVEN


def money_in(evidence: Evidence) -> list[Line]:
    """Return the lines of money that follow from the costs, the most telling first."""
    before, after = first_and_last(evidence.costs)
    if after is None:
        return []
    lines = _from_two(before, after) if before is not None else _from_one(after)
    if _is_same_gpu(after, evidence):
        # An unchanged cost is known without any other figure.
        lines = [
            Line(KEPT, line.after, line.after, Band.known(0))
            if line.name == KEPT and line.before is None and line.saved is None
            else line
            for line in lines
        ]
    return [line for line in lines if line.after is not None or line.saved is not None]


def _is_same_gpu(costs: Costs, evidence: Evidence) -> bool:
    """Tell whether the gain is that of the comparison's time alone, at one price of the GPU."""
    gain = _band(costs, "Gain of a token", "a token gets cheaper by")
    if gain is None or evidence.headline is None:
        return False
    claim = evidence.headline.headline
    return any(
        one is not None and math.isclose(float(gain.mid) * one.ratio, 1, rel_tol=1e-6)
        for one in (claim.mean, claim.interval)
    )


def find_figure(costs: Costs, topic: str, name: str, unit: str = "") -> Figure | None:
    """Return a figure by its topic, name and unit, any unit where none is named."""
    found = (f for f in costs.figures if (f.topic, f.name) == (topic, name))
    return next((f for f in found if unit in ("", f.unit)), None)


def _band(costs: Costs, topic: str, name: str, unit: str = "") -> Band | None:
    figure = find_figure(costs, topic, name, unit)
    return figure.values if figure else None


def _from_two(before: Costs, after: Costs) -> list[Line]:
    saved = _together if is_one_price(before, after) else _apart
    lines = [
        Line(name, old, new, saved(old, new) if old else None)
        for name, where in COMPARED
        if (new := _band(after, *where)) is not None
        for old in [_band(before, *where)]
    ]
    if lines and lines[0].name == MILLION and (volume := volume_in(after)):
        lines.insert(1, _times(lines[0], MONTH, volume))
    names = [line.name for line in lines]
    # The first line found says most about the cost of a month.
    is_known = MONTH in names
    lines = [line for line in lines if not (is_known and line.name == KEPT)]
    return [line for i, line in enumerate(lines) if line.name not in names[:i]]


def _from_one(costs: Costs) -> list[Line]:
    """Return the lines where the gain stands in the costs: before is after and what is saved."""
    million = _band(costs, "Serving", "as paid", "$/M tokens")
    saved = _band(costs, "Gain of a token", "saved", "$/M tokens")
    given = _band(costs, "Gain of a token", BEFORE, "$/M tokens")
    if given is not None and million is not None:
        lines = [Line(MILLION, given, million, _apart(given, million))]
    else:
        lines = [Line(MILLION, _before(million, saved), million, _over_prices(saved, million))]
    cash = _band(costs, "Gain in cash", "saved", "$/month")
    monthly = _band(costs, "Gain of a token", "saved", "$/month")
    volume = volume_in(costs)
    if million is not None and volume:
        lines.append(_times(lines[0], MONTH, volume))
    elif (kept := _band(costs, "Serving", "all GPUs, kept for a month")) is not None:
        lines.append(Line(KEPT, None, kept, cash))
    elif cash or monthly:
        lines.append(Line(MONTH, None, None, cash or monthly))
    steps, gain = (
        _band(costs, "Steps", "a thousand steps"),
        _band(costs, "Gain of a token", "a token gets cheaper by"),
    )
    if steps is not None and million is None:
        more = gain.map(lambda times: steps.mid * (times - 1)) if gain else None
        lines.append(Line(STEPS, _before(steps, more), steps, _over_prices(more, steps)))
    return lines


def volume_in(costs: Costs) -> float | None:
    """Return how many million tokens a month the savings were computed for."""
    of_million = _band(costs, "Gain of a token", "saved", "$/M tokens")
    of_month = _band(costs, "Gain of a token", "saved", "$/month")
    if of_million is None or of_month is None or not of_million.mid:
        return None
    return float(of_month.mid / of_million.mid)


def load_in_words(costs: Costs) -> str:
    """Say of how many tokens a month is, and how much of the time paid serves; empty if unknown."""
    volume = volume_in(costs)
    paid = _band(costs, "Serving", "as paid", "$/M tokens")
    of_use = _band(costs, "Serving", "of use alone", "$/M tokens")
    told = [f"A month is {volume:,.4g} million tokens"] if volume else []
    if paid is not None and of_use is not None and paid.mid:
        used = 100 * float(of_use.mid / paid.mid)
        told.append(f"GPUs serve in {used:.3g} % of the time that is paid")
    return f"{'; '.join(told)}." if told else ""


def _times(line: Line, name: str, factor: float) -> Line:
    bands = (
        b.map(lambda usd: usd * factor) if b else None
        for b in (line.before, line.after, line.saved)
    )
    return Line(name, *bands)


def _over_prices(saved: Band | None, after: Band | None) -> Band | None:
    """Return what is saved at the middle price over the band of the price as well."""
    if saved is None or after is None or not after.mid:
        return saved
    ends = [
        share * usd / after.mid
        for share in (saved.low, saved.high)
        for usd in (after.low, after.high)
    ]
    return Band(min(ends), saved.mid, max(ends))


def _before(after: Band | None, saved: Band | None) -> Band | None:
    """Return what it cost, over the bands of the price and of the gain: no saving exceeds it.

    `saved` is at the middle price, over the band of the gain.
    """
    if after is None or saved is None or not after.mid:
        return None
    ends = zip((after.low, after.mid, after.high), (saved.low, saved.mid, saved.high), strict=True)
    return Band(*(usd * (1 + gained / after.mid) for usd, gained in ends))


def is_one_price(before: Costs, after: Costs) -> bool:
    """Tell whether both costs rest on the same quotes of price lists: on one unknown, then."""
    return before.price == after.price and before.price is not None and before.price.is_listed


def prices_in_words(evidence: Evidence) -> str:
    """Say how the prices of two costs hang together; empty where that does not matter."""
    before, after = first_and_last(evidence.costs)
    if before is None or after is None or before.price is None or after.price is None:
        return ""
    if before.price.usd_per_gpu_hour.is_known and after.price.usd_per_gpu_hour.is_known:
        return ""
    if is_one_price(before, after):
        return "Both rest on the same price, so the saving moves with it."
    return (
        "The two prices are not the same quotes, so each may lie anywhere in its band, and "
        "the saving has the range of both."
    )


def _together(old: Band, new: Band) -> Band:
    """Return what is saved where both costs move with one price."""
    ends = (old.low - new.low, old.high - new.high)
    return Band(min(ends), old.mid - new.mid, max(ends))


def _apart(old: Band, new: Band) -> Band:
    """Return what is saved where each cost may lie anywhere in its band."""
    return Band(old.low - new.high, old.mid - new.mid, old.high - new.low)


def worth_in_words(saving: Saving | None, price: str, is_before: bool, evidence: Evidence) -> str:
    """Return what a saving is worth: of the costs that were given, else of the run's GPUs."""
    if saving is None or saving.high_ns is None:
        return UNKNOWN
    lines = {line.name: line.before if is_before else line.after for line in money_in(evidence)}
    known = {name: band for name, band in lines.items() if band is not None}
    if known:
        name = next((one for one in (MONTH, KEPT) if one in known), next(iter(known)))
        told = format_worth(worth_of(saving, Band.known(known[name].mid)))
        of_what = "" if name in (MONTH, KEPT) else "of "
        return f"{told} {of_what}{name[:1].lower()}{name[1:]}, at the middle price"
    if saving.worth is None:
        return price or "not known: no step is marked, or no price list has this GPU"
    return f"{format_worth(saving.worth)} a month{OF_PRICES}{price}"
