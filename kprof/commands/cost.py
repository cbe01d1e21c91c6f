"""`kprof cost`: the cost of tokens, fleets, training; each option is a fact with its unit."""

from __future__ import annotations

import inspect
from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kprof.analyze.cost.facts import FIELDS, TEXTS, Facts, described, documented
from kprof.commands import Answer


def cost(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Run or trace, for step time, GPUs and energy."),
    ] = None,
    assumptions: Annotated[
        Path | None, Option(metavar="FILE", help="TOML file: owning, energy, spot, replicas.")
    ] = None,
    show_assumptions: Annotated[
        bool, Option("--show-assumptions", help="Print such a file with its defaults.")
    ] = False,
    prices: Annotated[
        Path | None, Option(metavar="FILE", help="JSON file with prices of your own.")
    ] = None,
    as_of: Annotated[
        datetime | None,
        Option(metavar="DATE", formats=["%Y-%m-%d"], help="Day of the prices [default: today]."),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
    **given: str | None,
) -> Answer | None:
    """Compute the cost of tokens, fleets and training.

    Without options it lists the known prices. Give the facts that you know: kprof shows each
    figure that follows, with its band, and names the facts that other figures need. Numbers may be
    written as 15.6T, 281/77, or, for price, rate, utilisation and speed-up, as LOW,MID,HIGH.
    """
    from kprof.ab.pricing import calculate, json_of, read_prices
    from kprof.report.costs import section_of_quotes, sections_of_costs

    if show_assumptions:
        typer.echo(documented())
        return None
    if run is None and assumptions is None and not any(given.values()):
        listed = [section_of_quotes(read_prices(prices))]
        next_one = "next: kprof cost --gpu H100 --tokens-per-s 5000"
        return Answer("prices", listed, None, next_one)
    today = as_of.date() if as_of else date.today()
    costs = calculate(given, today, run, prices, assumptions=assumptions)
    last = "prices: kprof cost; assumptions: kprof cost --show-assumptions"
    return Answer("cost", sections_of_costs(costs), json_of(costs) if json else None, last)


def _options() -> list[inspect.Parameter]:
    """Return an option for every fact, with the meaning and range of its declaration as help."""
    facts = {name: one.type for name, one in FIELDS.items() if name in Facts.__struct_fields__}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                Option(metavar="NAME" if name in TEXTS else "X", help=f"{described(hint)}."),
            ],
        )
        for name, hint in facts.items()
    ]


_signature = inspect.signature(cost, eval_str=True)
_own = [one for one in _signature.parameters.values() if one.name != "given"]
cost.__signature__ = _signature.replace(parameters=[*_own, *_options()])  # type: ignore[attr-defined]
