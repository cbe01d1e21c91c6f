"""The answer of `kprof cost`: every figure that follows from the facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date

from msgspec.structs import replace

from kprof.analyze.cost.facts import Energy, Facts, Owning, Spot, option_of, unusual
from kprof.analyze.cost.fleet import (
    SECONDS_PER_HOUR,
    add_break_even,
    add_fleet,
    add_kept_gpus,
    size_fleet,
)
from kprof.analyze.cost.gain import add_gain
from kprof.analyze.cost.price import (
    HOURS_PER_MONTH,
    ON_DEMAND,
    STALE_AFTER_DAYS,
    Band,
    Price,
    Quote,
    price_of,
    quotes_of,
    require_list,
)
from kprof.analyze.cost.serving import (
    add_energy,
    add_serving,
    add_split,
    add_steps,
    add_what_moves_it,
)
from kprof.analyze.cost.sheet import Costs, Missing, Sheet
from kprof.analyze.cost.training import add_training, model_flops_per_s, training_rate
from kprof.errors import KprofError

HOURS_PER_YEAR = 8_760
ALL = (
    add_steps,
    add_serving,
    add_what_moves_it,
    add_split,
    add_fleet,
    add_break_even,
    add_training,
    add_energy,
    add_gain,
    add_kept_gpus,
)
RATES = ("tokens_per_s", "tokens_per_step")
# A fact that changes nothing unless one of these is given beside it.
COMPANIONS = {
    "term": ("gpu",),
    "utilisation": RATES,
    "gpus": (*RATES, "step_s", "api_price"),
    **dict.fromkeys(("baseline_gpu", "baseline_price", "tokens_per_month", "fee"), ("speedup",)),
}
LEAST_MFU = 1e-3
"""A training with less has a slip in its facts: published ones reach 0.2 to 0.6."""
MOST_WATTS = 20_000
"""Maximum power of one GPU, in W, with its share of the server and its cooling."""
# $ for a GPU-hour: electricity alone costs more.
LEAST_OWNED_USD = 0.05
LEAST_WATTS = 10
"""Minimum power of one GPU, in W: idle ones draw 20 to 100."""
MOST_TFLOPS = 20_000
"""More than one GPU has in any dtype: a GB300 has 15,000 in dense FP4 (NVIDIA's datasheet)."""
CLOSE = 0.05
"""Two statements of one quantity may differ by this share before they contradict each other."""


def costs_of(facts: Facts, quotes: Sequence[Quote], today: date) -> Costs:
    """Compute every figure that follows from the facts; what does not is named as missing.

    Raises:
        KprofError: the facts tell nothing at all, or name a GPU, term or list without a price.
    """
    _require_names(facts, quotes)
    sheet = Sheet(facts, tuple(quotes))
    sheet.facts = _with_rates(sheet)
    sheet.price = _price(sheet, today)
    warnings = _check_facts(sheet)
    for add in ALL:
        add(sheet)
    _name_idle_facts(sheet)
    if sheet.price is None and not sheet.figures and not sheet.missing:
        raise KprofError(
            "no figure follows from the given facts",
            fix="begin with: kprof cost --gpu H100 --tokens-per-s 5000",
        )
    behind = [price for figure in sheet.figures for price in figure.prices]
    used = dict.fromkeys([*([sheet.price] if sheet.price else []), *behind])
    if stale := [price for price in used if price.is_stale(today)]:
        warnings.append(_stale_warning(stale, today))
    if later := [price for price in used if price.is_of_later(today)]:
        warnings.append(_later_warning(later, today))
    return Costs(
        as_of=today,
        price=sheet.price,
        figures=tuple(sheet.figures),
        missing=tuple(dict.fromkeys(sheet.missing)),
        warnings=tuple(warnings),
        notes=tuple(dict.fromkeys(sheet.notes)),
        bill=sheet.bill,
    )


def _require_names(facts: Facts, quotes: Sequence[Quote]) -> None:
    """Refuse names that no price list has, also where nothing follows from them yet."""
    if facts.assumptions.price_list is not None:
        require_list(quotes, facts.assumptions.price_list)
    if facts.baseline_gpu is not None and facts.baseline_price is None:
        quotes_of(quotes, facts.baseline_gpu, "--baseline-gpu")


def _name_idle_facts(sheet: Sheet) -> None:
    """Name the facts that were given and change nothing."""
    for name, others in COMPANIONS.items():
        is_given = getattr(sheet.facts, name) not in (None, ON_DEMAND)
        is_served = name == "utilisation" and sheet.assumed.served is not None
        is_kept = name in ("gpus", "utilisation") and sheet.price is not None
        if is_given and not (is_served or is_kept) and not sheet.is_asked(*others):
            told = " or ".join(option_of(other) for other in others)
            sheet.missing.append(Missing(f"{option_of(name)} alone changes nothing", (told,)))


def _with_rates(sheet: Sheet) -> Facts:
    """Return the facts with what follows for all: tokens/s and joules from steps, utilisation."""
    facts = sheet.facts
    tokens, joules = facts.tokens_per_step, facts.joules_per_step
    if tokens is not None and joules is not None and facts.joules_per_token is None:
        facts = replace(facts, joules_per_token=joules / tokens)
    is_rate_needed = tokens is not None and facts.tokens_per_s is None
    if is_rate_needed and sheet.has("Tokens per second", "step_s", "gpus"):
        assert tokens and facts.step_s and facts.gpus
        facts = replace(facts, tokens_per_s=Band.known(tokens / facts.step_s / facts.gpus))
    rate, demand = facts.tokens_per_s, facts.demand
    if demand is not None and rate is not None and facts.utilisation is None:
        used = size_fleet(demand, rate.mid, facts.assumptions.replicas).steady_utilisation
        sheet.notes.append("Utilisation follows from the demand on GPUs kept at its peak.")
        facts = replace(facts, utilisation=Band.known(used))
    return facts


def _stale_warning(stale: Sequence[Price], today: date) -> str:
    oldest = min(price.oldest for price in stale)
    return (
        f"Prices older than {STALE_AFTER_DAYS} days say little, and the oldest here is of "
        f"{oldest}, {(today - oldest).days} days ago: {'; '.join(p.name for p in stale)}. Give "
        "today's with --price, or a file of them with --prices."
    )


def _later_warning(later: Sequence[Price], today: date) -> str:
    newest = max(price.newest for price in later)
    return (
        f"The prices are of {newest} and not of {today}, which is earlier: "
        f"{'; '.join(price.name for price in later)}. Give those of that day with --price, or a "
        "file of them with --prices."
    )


def _price(sheet: Sheet, today: date) -> Price | None:
    """Return the price of a GPU-hour: as given, as owned, or from the table."""
    facts, owning = sheet.facts, sheet.assumed.owning
    if facts.price is not None:
        price = Price("as given", facts.price, today, today, ("--price",))
        if owning is not None:
            sheet.notes.append("[owning] changes nothing beside --price.")
    elif owning is not None:
        energy = sheet.assumed.energy
        if energy.kw_per_gpu is None or energy.usd_per_kwh is None:
            sheet.notes.append(
                "The price leaves electricity out; to count it, give kw_per_gpu and usd_per_kwh "
                "in [energy]."
            )
        hourly = Band.known(owned_usd_per_gpu_hour(owning, energy))
        price = Price("owned, as assumed", hourly, today, today, ("[owning]",))
    elif facts.gpu is not None:
        price = price_of(sheet.quotes, facts.gpu, facts.term, sheet.assumed.price_list)
    else:
        return None
    spot = sheet.assumed.spot
    if spot is None:
        return price
    band = price.usd_per_gpu_hour.map(lambda usd: interrupted_usd_per_gpu_hour(usd, spot))
    name = f"{price.name}, with interruptions"
    return Price(name, band, price.oldest, price.newest, price.sources)


def owned_usd_per_gpu_hour(owned: Owning, energy: Energy) -> float:
    """Return what an hour costs an owner: capital, operation and electricity.

    (capex * CRF + opex) / (8,760 * availability) + kW * PUE * $/kWh, where the capital recovery
    factor CRF = r (1 + r)^n / ((1 + r)^n - 1) spreads the capital evenly over n years at interest
    r, and is 1 / n without interest.
    """
    rate, years = owned.interest_per_year, owned.life_years
    recovery = rate / -math.expm1(-years * math.log1p(rate)) if rate else 1 / years
    yearly = owned.capex_usd_per_gpu * recovery + owned.opex_usd_per_gpu_year
    electricity = (energy.kw_per_gpu or 0) * energy.pue * (energy.usd_per_kwh or 0)
    return yearly / (HOURS_PER_YEAR * owned.availability) + electricity


def interrupted_usd_per_gpu_hour(usd_per_gpu_hour: float, spot: Spot) -> float:
    """Return what an hour of work costs on GPUs that are taken away: P * (1 + r * t_restart)."""
    return usd_per_gpu_hour * (1 + spot.interruptions_per_hour * spot.restart_hours)


def _check_facts(sheet: Sheet) -> list[str]:
    """Return a warning for everything that is hardly true.

    Raises:
        KprofError: facts contradict each other, or the laws of arithmetic of a GPU.
    """
    facts = sheet.facts
    of_all = (_of_power, _of_mfu, _of_capacity, _of_steps, unusual)
    warnings = [warning for of in of_all for warning in of(facts)]
    spot = facts.assumptions.spot
    lost = spot.interruptions_per_hour * spot.restart_hours if spot is not None else 0
    if lost > 1:
        warnings.append(
            f"Interruptions would cost {lost:,.4g} hours of work an hour: give "
            "interruptions_per_hour per hour and restart_hours in hours."
        )
    if facts.assumptions.owning is not None and sheet.price is not None:
        usd = sheet.price.usd_per_gpu_hour.mid
        if usd < LEAST_OWNED_USD:
            warnings.append(
                f"A GPU-hour of ${usd:.3g} follows from [owning]: give the $ paid for one GPU with "
                "its share of the server."
            )
    return warnings


def _of_power(facts: Facts) -> list[str]:
    """Judge the power of one GPU that follows from the energy of a step or a token."""
    if facts.joules_per_step is not None and facts.step_s is not None and facts.gpus is not None:
        watts = facts.joules_per_step / facts.step_s / facts.gpus
    elif facts.joules_per_token is not None and facts.tokens_per_s is not None:
        watts = facts.joules_per_token * facts.tokens_per_s.mid
    else:
        return []
    told = f"A GPU would draw {watts / 1_000:,.4g} kW to use so many joules in the time given"
    unit = "check the unit of the energy (J, of all GPUs for a step) and of the time (s)"
    if watts > MOST_WATTS:
        raise KprofError(told, fix=unit)
    kw = facts.assumptions.energy.kw_per_gpu
    if kw is not None and watts > (1 + CLOSE) * kw * 1_000:
        return [f"{told}, more than kw_per_gpu {kw:g} in [energy] provides."]
    return [f"{told}, less than an idle one: {unit}."] if watts < LEAST_WATTS else []


def _of_mfu(facts: Facts) -> list[str]:
    """Judge the MFU that follows from tokens per second and the model's size."""
    known, training = training_rate(facts), facts.assumptions.training
    if facts.active_parameters is None or known is None:
        return []
    rate, _ = known
    if training.peak_tflops is None:
        tflops = model_flops_per_s(facts.active_parameters, rate) / 1e12
        if tflops > MOST_TFLOPS:
            raise KprofError(
                f"{tflops:,.4g} TFLOP/s of one GPU follow from {rate:,.4g} tokens/s of "
                f"{facts.active_parameters:,.4g} active parameters, more than any GPU has",
                fix="check that --tokens-per-s is of one GPU and --active-parameters is no count "
                "of bytes",
            )
        return []
    mfu = model_flops_per_s(facts.active_parameters, rate) / (training.peak_tflops * 1e12)
    if mfu > 1:
        raise KprofError(
            f"an MFU of {mfu:.4g} follows from these facts: {rate:,.4g} tokens/s of "
            f"{facts.active_parameters:,.4g} active parameters take more FLOP/s than the GPU's "
            f"peak of {training.peak_tflops:,.4g} TFLOP/s",
            fix="check that --tokens-per-s is of one GPU and --active-parameters is no count of "
            "bytes; give peak_tflops of a smaller type in [training]; leave --active-parameters "
            "out to price serving alone",
        )
    if training.mfu is not None and abs(mfu - training.mfu) > CLOSE * training.mfu:
        raise KprofError(
            f"mfu {training.mfu:.4g} in [training] contradicts the MFU of {mfu:.4g} that follows "
            "from the tokens per second and the model's size",
            fix="leave mfu out, or --tokens-per-s and --gpu-hours",
        )
    if mfu < LEAST_MFU:
        return [
            f"An MFU of {mfu:.4g} follows from these facts, which no training has: look for a "
            "slip in --active-parameters, --training-tokens, --gpu-hours or --tokens-per-s."
        ]
    return []


def _of_steps(facts: Facts) -> list[str]:
    """Compare what is given for a second or a token with what follows from a step."""
    tokens, rate, warnings = facts.tokens_per_step, facts.tokens_per_s, []
    if tokens is None:
        return []
    if rate is not None and facts.step_s is not None and facts.gpus is not None:
        follows = tokens / facts.step_s / facts.gpus
        if not (1 - CLOSE) * rate.low <= follows <= (1 + CLOSE) * rate.high:
            warnings.append(
                f"--tokens-per-s {rate.mid:,.4g} contradicts --tokens-per-step, --step-s and "
                f"--gpus, from which {follows:,.4g} follow. Leave one of them out."
            )
    joules = facts.joules_per_token
    if joules is not None and facts.joules_per_step is not None:
        follows = facts.joules_per_step / tokens
        if abs(joules - follows) > CLOSE * follows:
            warnings.append(
                f"--joules-per-token {joules:,.4g} contradicts --joules-per-step and "
                f"--tokens-per-step, from which {follows:,.4g} follow. Leave one of them out."
            )
    return warnings


def _of_capacity(facts: Facts) -> list[str]:
    """Compare the load that is asked for with what the GPUs serve."""
    warnings, rate = [], facts.tokens_per_s
    if facts.utilisation is not None and facts.demand is not None and rate is not None:
        fleet = size_fleet(facts.demand, rate.mid, facts.assumptions.replicas)
        low, high = fleet.steady_utilisation, fleet.scaled_utilisation
        if not (1 - CLOSE) * low <= facts.utilisation.mid <= (1 + CLOSE) * high:
            between = f"between {low:.4g} and {high:.4g}" if low < high else f"of {low:.4g}"
            warnings.append(
                f"--utilisation {facts.utilisation.mid:.4g} contradicts --demand, from which a "
                f"utilisation {between} follows: serving is priced by the one, the fleet by the "
                "other. Leave one of them out."
            )
    if rate is None or facts.gpus is None:
        return warnings
    most = rate.high * facts.gpus
    monthly = most * HOURS_PER_MONTH * SECONDS_PER_HOUR
    if facts.demand is not None and max(facts.demand) > most:
        warnings.append(
            f"The demand reaches {max(facts.demand):,.4g} tokens/s, and --gpus {facts.gpus} serve "
            f"{most:,.4g} at most."
        )
    if facts.tokens_per_month is not None and facts.tokens_per_month > monthly:
        warnings.append(
            f"--tokens-per-month {facts.tokens_per_month:,.4g} is more than --gpus {facts.gpus} "
            f"serve in a month, {monthly:,.4g}."
        )
    return warnings
