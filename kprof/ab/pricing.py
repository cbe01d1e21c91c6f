"""`kprof cost`: the facts of a question collected from the user, a run, price lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

import msgspec
from msgspec import structs

from kprof.analyze.cost.answer import costs_of
from kprof.analyze.cost.facts import SHOWN, Assumptions, Facts, assumptions_of, facts_of
from kprof.analyze.cost.price import Quote
from kprof.analyze.cost.sheet import Costs
from kprof.device import CATALOGUE, listed_name
from kprof.errors import KprofError

TABLE = Path(__file__).with_name("prices.json")


class _File(msgspec.Struct):
    quotes: list[Quote]


def calculate(
    given: Mapping[str, object],
    today: date,
    run: Path | None = None,
    prices: Path | None = None,
    *,
    assumptions: Path | None = None,
    ran_on: str | None = None,
) -> Costs:
    """Compute every figure that follows from what is given, and from what the run measured.

    `given` has the names of `kprof.analyze.cost.facts.Facts`, with numbers or text; what is given
    goes before what a run knows. `prices` is a file of own prices, `assumptions` one of
    `kprof.analyze.cost.facts.Assumptions`. `ran_on` is the GPU that took the given times, as its
    driver names it; with a run, it is the run's.

    Raises:
        KprofError: a fact cannot be true, nothing follows from them, or a file cannot be read.
    """
    quotes = read_prices(prices)
    known = {name: value for name, value in given.items() if value is not None}
    notes: tuple[str, ...] = ()
    if run is not None:
        from_run, notes, ran_on = _measured(run)
        known = {**from_run, **known}
        if not known.keys() - {"term"}:
            raise KprofError(notes[0], fix="give --step-s, --gpus and --price yourself")
    ran_on = ran_on and listed_name(ran_on)
    if ran_on and "gpu" not in known:
        if ran_on.casefold() in {quote.gpu.casefold() for quote in quotes}:
            known["gpu"] = ran_on
        else:
            notes += (f"No price list has the GPU, {ran_on}: give its price with --price.",)
    if assumptions is not None:
        known["assumptions"] = read_assumptions(assumptions)
    facts = facts_of(known)
    assumed = facts.assumptions
    if assumed.training.peak_tflops is None and facts.active_parameters is not None and facts.gpu:
        peak = _peak_tflops(facts.gpu)
        if peak is not None:
            training = structs.replace(assumed.training, peak_tflops=peak)
            facts = structs.replace(facts, assumptions=structs.replace(assumed, training=training))
            notes += (f"Peak of {facts.gpu}: {peak:g} dense TFLOP/s in bf16, datasheet.",)
    costs = costs_of(facts, quotes, today)
    is_measured = run is None or given.get("step_s") is None
    others = _of_another(facts, ran_on if is_measured else None)
    return replace(costs, notes=(*notes, *costs.notes), warnings=(*others, *costs.warnings))


def read_assumptions(path: Path) -> Assumptions:
    """Read a TOML file of assumptions.

    Raises:
        KprofError: it cannot be read, or holds a field that is unknown or outside of its range.
    """
    try:
        return assumptions_of(path.read_bytes(), str(path))
    except OSError as error:
        raise KprofError(f"{path} cannot be read: {error.strerror}", fix=SHOWN) from error


def read_prices(path: Path | None = None) -> list[Quote]:
    """Return kprof's table of prices; a GPU that is in the file `path` has only that file's.

    Raises:
        KprofError: the file cannot be read, or is not a table of prices.
    """
    table = _read(TABLE)
    if path is None:
        return table
    own = _read(path)
    theirs = {quote.gpu.casefold() for quote in own}
    return [*own, *(quote for quote in table if quote.gpu.casefold() not in theirs)]


def _read(path: Path) -> list[Quote]:
    fix = "see docs/cost.md for the format of a file of prices"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).quotes
    except OSError as error:
        raise KprofError(
            f"{path} cannot be read: {error.strerror}",
            fix="name a file of prices that exists, or none for kprof's own table",
        ) from error
    except msgspec.MsgspecError as error:
        raise KprofError(f"{path} is not a table of prices: {error}", fix=fix) from error


def _measured(run: Path) -> tuple[dict[str, object], tuple[str, ...], str | None]:
    """Return what a run knows, as facts and in words, and the GPU that it ran on."""
    # The tables of a run need pandas, and figures alone do not.
    from kprof.analyze.cost.of_runs import measured_in
    from kprof.opened import open_trace

    found = measured_in(open_trace(run))
    facts = {name: getattr(found, name) for name in ("gpus", "step_s", "joules_per_step")}
    known = {name: value for name, value in facts.items() if value is not None}
    return known, found.notes, found.gpu


def _peak_tflops(gpu: str) -> float | None:
    for _, device in CATALOGUE:
        if device.listed_name.casefold() == gpu.casefold() and "bf16" in device.flops_per_s:
            return device.flops_per_s["bf16"] / 1e12
    return None


def _of_another(facts: Facts, ran_on: str | None) -> tuple[str, ...]:
    """Say so where the price is of another GPU than the times."""
    is_listed = facts.price is None and facts.assumptions.owning is None
    if not (is_listed and facts.gpu and ran_on) or facts.gpu.casefold() == ran_on.casefold():
        return ()
    return (
        f"The price is that of {facts.gpu}, as --gpu says, and the times were measured on "
        f"{ran_on}: these dollars are of neither. Leave --gpu out, or measure on {facts.gpu}.",
    )


def json_of(costs: Costs) -> bytes:
    """Return the costs as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(costs))
