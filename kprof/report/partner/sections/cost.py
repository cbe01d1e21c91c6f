"""Cost with its price, the source of the price, its date."""

from __future__ import annotations

from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.cost.price import Price
from kprof.analyze.cost.sheet import Costs
from kprof.analyze.energy import StepEnergy, measure_step_energy
from kprof.report.partner.drawings import Range, both, ranges
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.money import (
    is_credited,
    load_in_words,
    money_in,
    prices_in_words,
    written,
)
from kprof.report.partner.parts import Block, Chapter, Folded, Missing, Picture
from kprof.report.partner.sections.summary import format_joules
from kprof.report.partner.sections.time import stages_of
from kprof.report.partner.wording import gained, within
from kprof.report.section import Column, Facts, Table, Text
from kprof.report.units import format_count
from kprof.trace import Trace

TITLE = "Cost and energy"

HOW = "kprof cost RUN --gpu H100 --tokens-per-step 4096 --json > cost.json, then name cost.json"
NO_CREDIT = "The difference between before and after is not proven, so no saving is credited."
GAP = "missing"
ENERGY_IS_PAID = "The price of a GPU-hour includes energy: do not add it."


def render(evidence: Evidence) -> Chapter | Missing:
    """Render money before and after, what it stands on, what moves it, and the energy."""
    energy = _energy(evidence)
    is_measured = any(value != GAP for _, value, _ in energy)
    if not evidence.costs and not is_measured:
        return Missing("What it costs and saves", HOW)
    blocks = _money(evidence)
    if energy:
        blocks.append(Facts(tuple(energy)))
    if is_measured:
        blocks.append(Text(ENERGY_IS_PAID, "muted"))
    return Chapter(TITLE, tuple(blocks))


def _money(evidence: Evidence) -> list[Block]:
    blocks: list[Block] = []
    for costs in evidence.costs:
        blocks += [Text(warning, "warning") for warning in costs.warnings]
    if evidence.costs and not is_credited(evidence):
        blocks.append(Text(NO_CREDIT, "warning"))
    if money_in(evidence):
        blocks.append(_table(evidence))
        if picture := _picture(evidence):
            blocks.append(picture)
    if evidence.costs:
        blocks += _basis(evidence.costs[-1])
    return blocks


def _table(evidence: Evidence) -> Table:
    columns = (
        Column("What"),
        Column("Before"),
        Column("After"),
        Column("Saved"),
    )
    is_proven = is_credited(evidence)
    rows = []
    for line in money_in(evidence):
        before, after, saved = line.written()
        rows.append((line.name, before, after, saved if is_proven else "not proven"))
    caption = "In US dollars: the middle, and in brackets the lowest and the highest."
    if load := load_in_words(evidence.costs[-1]):
        caption += f" {load}"
    if prices := prices_in_words(evidence):
        caption += f" {prices}"
    return Table(columns, tuple(rows), caption)


def _picture(evidence: Evidence) -> Picture | None:
    line = next((one for one in money_in(evidence) if one.after is not None), None)
    if line is None or line.after is None or (line.after.is_known and line.before is None):
        return None
    rows = []
    for name, band, style in (("Before", line.before, "k7"), ("After", line.after, "k0")):
        if band is not None and is_credited(evidence):
            low, middle, high = float(band.low), float(band.mid), float(band.high)
            symbol = "circle" if name == "After" else "diamond"
            rows.append(Range(name, written(band), middle, low, high, style, symbol))  # type: ignore[arg-type]
    if not rows:
        return None
    wide, narrow = both(lambda width: ranges(rows, width, "$"))
    table = Table(
        (Column("When"), Column(line.name, "right")), tuple((r.name, r.value) for r in rows)
    )
    caption = "The mark is the middle price, the band reaches from the lowest to the highest."
    return Picture(f"{line.name}, in US dollars", wide, narrow, caption, table)


def _basis(costs: Costs) -> list[Block]:
    blocks: list[Block] = []
    if costs.price is not None:
        blocks.append(Text(_price_in_words(costs.price)))
        sources = Table(
            (Column("Price list and source", "prose"),),
            tuple((source,) for source in costs.price.sources),
        )
        blocks.append(Folded("Where the price is from", sources))
    blocks.append(Folded("Every figure, with its formula", _figures(costs)))
    blocks += [Text(note, "muted") for note in costs.notes]
    if costs.missing:
        topics = "; ".join(f"{m.topic}: {', '.join(m.give)}" for m in costs.missing)
        blocks.append(Text(f"Not computed, for lack of inputs: {topics}.", "muted"))
    return blocks


def _price_in_words(price: Price) -> str:
    band = price.usd_per_gpu_hour
    dates = f"{price.oldest}"
    if price.oldest != price.newest:
        dates = f"{price.oldest} to {price.newest}"
    # Prices are read off lists, not measured: they keep their cents.
    low, middle, high = (f"${float(usd):,.2f}" for usd in (band.low, band.mid, band.high))
    spread = "" if band.is_known else f" (from {low} to {high})"
    return f"Price of a GPU-hour: {middle}{spread}, {price.name}, of {dates}."


def _figures(costs: Costs) -> Table:
    columns = (
        Column("Topic"),
        Column("What", "prose"),
        Column("Low", "right"),
        Column("Middle", "right"),
        Column("High", "right"),
        Column("Unit"),
        Column("Oldest price"),
        Column("How", "prose"),
    )
    rows = []
    units = [figure.unit for figure in costs.figures]
    for figure in costs.figures:
        band = figure.values
        low, middle, high = within(float(band.low), float(band.mid), float(band.high), 4)
        ends = ("", "") if band.is_known else (low, high)
        oldest = min((price.oldest for price in figure.prices), default=None)
        day = oldest.isoformat() if oldest else ""
        named = (gained(figure.topic, units), gained(figure.name, units))
        what = (*named, ends[0], middle, ends[1], figure.unit, day)
        rows.append((*what, figure.formula))
    return Table(columns, tuple(rows), f"Computed for {costs.as_of}.")


def _energy(evidence: Evidence) -> list[tuple[str, str, str]]:
    facts = []
    for name, run in stages_of(evidence):
        if run.is_host_only:
            continue
        energy = measure_step_energy(run)
        label = (
            "Energy of a recorded step"
            if len(evidence.runs) == 1
            else f"Energy of a recorded step, {name.lower()}"
        )
        if energy.joules is None:
            facts.append((label, GAP, energy.why))
            continue
        how = energy_in_words(run, energy)
        facts.append((label, f"{format_joules(energy.joules)} J", how))
    if evidence.costs:
        for figure in evidence.costs[-1].figures:
            if figure.topic == "Energy" and figure.unit == "J/token":
                amount = f"{float(figure.values.mid):.3g} J"
                facts.append((f"Energy of a token, {figure.name}", amount, figure.formula))
    return facts


def energy_in_words(run: Trace, energy: StepEnergy) -> str:
    """Say how the energy of a step was measured, and whether recording added to it."""
    how = f"by the energy counter, over {format_count(energy.num_steps, 'step')}"
    cost = measure_cost(run)
    if cost is None or not cost.is_noticeable:
        return how
    return f"{how}, which recording made {cost.difference}: it takes less otherwise"
