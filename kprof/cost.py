"""`kprof cost`: what tokens, fleets and training cost, from what a run and its user know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from fractions import Fraction
from pathlib import Path

import msgspec

from kprof.analyze.cost.answer import Costs, costs_of
from kprof.analyze.cost.facts import facts_of
from kprof.analyze.cost.price import Quote
from kprof.device import CATALOGUE
from kprof.errors import KprofError
from kprof.quotes import read_prices
from kprof.report.costs import result_of_costs, section_of_quotes, sections_of_costs

__all__ = ["calculate", "json_of", "read_prices", "section_of_quotes", "sections_of_costs"]


def calculate(
    given: Mapping[str, object], today: date, run: Path | None = None, prices: Path | None = None
) -> Costs:
    """Compute every figure that follows from what is given, and from what the run measured.

    `given` has the names of `kprof.analyze.cost.facts.Facts`, with numbers or text; what is given
    goes before what a run knows. `prices` is a file of prices of one's own.

    Raises:
        KprofError: a fact cannot be true, nothing follows from them, or a file cannot be read.
    """
    quotes = read_prices(prices)
    known = {name: value for name, value in given.items() if value is not None}
    notes: tuple[str, ...] = ()
    if run is not None:
        from_run, notes = _measured(run, quotes)
        known = {**from_run, **known}
        if not known.keys() - {"term"}:
            raise KprofError(notes[0], fix="give --step-s, --gpus and --price yourself")
    facts = facts_of(known)
    if facts.peak_tflops is None and facts.active_parameters is not None and facts.gpu:
        peak = _peak_tflops(facts.gpu)
        if peak is not None:
            facts = replace(facts, peak_tflops=peak)
            notes += (f"Peak of {facts.gpu}: {float(peak):g} dense TFLOP/s in bf16, datasheet.",)
    costs = costs_of(facts, quotes, today)
    return replace(costs, notes=(*notes, *costs.notes))


def json_of(costs: Costs) -> bytes:
    """Return the costs as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result_of_costs(costs)))


def _measured(run: Path, quotes: Sequence[Quote]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return what a run knows, as facts and in words."""
    # The tables of a run need pandas, and figures alone do not.
    from kprof.analyze.cost.measured import measured_in
    from kprof.open import open_trace

    found = measured_in(open_trace(run))
    notes = found.notes
    facts = {
        "gpu": found.gpu,
        "gpus": found.gpus,
        "step_s": found.step_s,
        "joules_per_step": found.joules_per_step,
    }
    if found.gpu and found.gpu.casefold() not in {quote.gpu.casefold() for quote in quotes}:
        notes += (f"No price list has the run's GPU, {found.gpu}: give its price with --price.",)
        del facts["gpu"]
    return {name: value for name, value in facts.items() if value is not None}, notes


def _peak_tflops(gpu: str) -> Fraction | None:
    from kprof.analyze.cost.measured import listed_name

    for _, device in CATALOGUE:
        if listed_name(device.name).casefold() == gpu.casefold() and "bf16" in device.flops_per_s:
            return Fraction(repr(device.flops_per_s["bf16"])) / 10**12
    return None
