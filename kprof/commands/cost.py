"""`kprof cost`: what tokens, fleets and training cost; each option is a fact with its unit."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kprof.commands import Answer


def cost(
    ctx: typer.Context,
    run: Annotated[Path | None, typer.Argument(help="A run or trace: step, GPUs, energy.")] = None,
    gpu: Annotated[str | None, Option(help="GPU, as price lists name it.")] = None,
    term: Annotated[str, Option(help="on-demand, spot, reserved-3y or owned.")] = "on-demand",
    price_list: Annotated[str | None, Option(help="Only the prices of this list.")] = None,
    price: Annotated[str | None, Option(help="$ per GPU-hour; or LOW,MID,HIGH.")] = None,
    prices: Annotated[Path | None, Option(help="A file of prices of your own (JSON).")] = None,
    overhead: Annotated[str | None, Option(help="Whole bill over that of the GPUs.")] = None,
    capex: Annotated[str | None, Option(help="$ paid for an own GPU with its server.")] = None,
    life: Annotated[str | None, Option(help="Years of use.")] = None,
    interest: Annotated[str | None, Option(help="Interest a year, share of one.")] = None,
    opex: Annotated[str | None, Option(help="$ a year to run a GPU, without electricity.")] = None,
    availability: Annotated[
        str | None, Option(help="Share of the year in which it can work.")
    ] = None,
    kw: Annotated[str | None, Option(help="kW of one GPU with its share of the server.")] = None,
    kwh_price: Annotated[str | None, Option(help="$ per kWh.")] = None,
    pue: Annotated[str | None, Option(help="Power of the data centre over that of IT.")] = None,
    interruptions: Annotated[str | None, Option(help="Interruptions per hour of spot.")] = None,
    restart: Annotated[str | None, Option(help="Hours of work lost by one.")] = None,
    tokens_per_s: Annotated[
        str | None, Option(help="Tokens/s of one GPU at the SLA, not at its peak; or a band.")
    ] = None,
    tokens_per_step: Annotated[str | None, Option(help="Tokens of a step on all GPUs.")] = None,
    step_s: Annotated[str | None, Option(help="Seconds of a step.")] = None,
    joules_per_step: Annotated[str | None, Option(help="J of a step on all GPUs.")] = None,
    utilisation: Annotated[
        str | None, Option(help="Share served of what could be at the SLA; or a band.")
    ] = None,
    input_tokens: Annotated[str | None, Option(help="Input tokens of a window.")] = None,
    output_tokens: Annotated[str | None, Option(help="Output tokens of the window.")] = None,
    prefill_gpu_s: Annotated[str | None, Option(help="GPU seconds that prefill took.")] = None,
    decode_gpu_s: Annotated[str | None, Option(help="GPU seconds that decode took.")] = None,
    cached_share: Annotated[str | None, Option(help="Share of the input from the cache.")] = None,
    cached_weight: Annotated[
        str | None, Option(help="Cost of a cached input token over a computed one.")
    ] = None,
    demand: Annotated[str | None, Option(help="Tokens/s of all users, one for each hour.")] = None,
    headroom: Annotated[str | None, Option(help="Capacity over demand, a factor.")] = None,
    replica_gpus: Annotated[str | None, Option(help="GPUs of a replica.")] = None,
    min_replicas: Annotated[str | None, Option(help="Replicas that are always on.")] = None,
    cold_start: Annotated[str | None, Option(help="Seconds paid before a replica serves.")] = None,
    gpus: Annotated[str | None, Option(help="Number of GPUs in use.")] = None,
    api_price: Annotated[str | None, Option(help="$ per million tokens of an API.")] = None,
    active_parameters: Annotated[str | None, Option(help="Active parameters, as 37B.")] = None,
    mfu: Annotated[str | None, Option(help="MFU, share of one.")] = None,
    peak_tflops: Annotated[str | None, Option(help="Dense peak, TFLOP/s [bf16 of GPU].")] = None,
    training_tokens: Annotated[str | None, Option(help="Tokens to train on, as 15.6T.")] = None,
    gpu_hours: Annotated[str | None, Option(help="GPU-hours of the training.")] = None,
    joules_per_token: Annotated[str | None, Option(help="J per token, as measured.")] = None,
    speedup: Annotated[str | None, Option(help="Old time over new, as 281/77; or a band.")] = None,
    baseline_gpu: Annotated[str | None, Option(help="GPU of the slower one.")] = None,
    baseline_price: Annotated[str | None, Option(help="$ per hour of that; or a band.")] = None,
    tokens_per_month: Annotated[str | None, Option(help="Tokens per month, as 2T.")] = None,
    fee: Annotated[str | None, Option(help="$ that the speed-up costs once.")] = None,
    as_of: Annotated[
        datetime | None, Option(formats=["%Y-%m-%d"], help="Day to judge prices [today].")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> Answer:
    """Compute what tokens, fleets and training cost.

    Without options it lists the known prices. Give the facts that you know: kprof shows each
    figure that follows, with its band, and names the facts that other figures need. Numbers may be
    written as 15.6T, 281/77, or LOW,MID,HIGH where a band is allowed.
    """
    from kprof.ab.pricing import (
        calculate,
        json_of,
        read_prices,
        section_of_quotes,
        sections_of_costs,
    )

    other = {"run", "prices", "as_of", "json"}
    given = {name: value for name, value in ctx.params.items() if name not in other}
    if run is None and not any(value for name, value in given.items() if name != "term"):
        listed = [section_of_quotes(read_prices(prices))]
        next_one = "next: kprof cost --gpu H100 --tokens-per-s 5000"
        return Answer("prices", listed, None, next_one)
    today = as_of.date() if as_of else date.today()
    costs = calculate(given, today, run, prices)
    last = "prices: kprof cost; every fact: kprof cost --help"
    return Answer("cost", sections_of_costs(costs), json_of(costs) if json else None, last)
