"""Facts that cannot be true together, or hardly are: refused, or warned of."""

from __future__ import annotations

from fractions import Fraction

from kprof.analyze.cost.facts import Facts
from kprof.analyze.cost.fleet import replicas_of, size_fleet
from kprof.analyze.cost.price import HOURS_PER_MONTH, Price
from kprof.analyze.cost.sheet import Sheet
from kprof.analyze.cost.tokens import SECONDS_PER_HOUR
from kprof.analyze.cost.training import model_flops_per_s, training_rate
from kprof.errors import KprofError

LEAST_MFU = Fraction(1, 1_000)
"""A training with less has a slip in its facts: published ones reach 0.2 to 0.6."""
MOST_TOKENS_PER_S = 10**6
"""Of one GPU: published records of small models are ten times lower."""
MOST_WATTS = 20_000
"""Of one GPU with its share of the server and its cooling."""
LEAST_WATTS = 10
"""Of one GPU: idle ones draw 20 to 100."""
MOST_KW = 4
"""Of one GPU, all in: a GB200's is 2.1, and that of a server with 8 H100s is 10."""
MOST_RENT_USD = 20
"""Of one GPU's hour: the dearest in `prices.json` is below 15."""
MOST_CAPEX_USD = 150_000
"""Of one GPU with its share of the server: a server with 8 H100s costs about 280,000."""
MOST_LIFE_YEARS = 15
LEAST_KWH_USD = Fraction(5, 1_000)
LEAST_TOKENS_PER_MONTH = 10**6
MOST_SPEEDUP = 20
LEAST_OWNED_USD = Fraction(5, 100)
"""Of an own GPU's hour: $ 1,750 over four years, without current."""
CLOSE = Fraction(1, 20)
"""Two statements of one quantity may differ by this share before they contradict each other."""


def check_facts(sheet: Sheet) -> list[str]:
    """Return a warning for everything that is hardly true.

    Raises:
        KprofError: facts contradict each other, or the laws of arithmetic of a GPU.
    """
    facts = sheet.facts
    _refuse_power(facts)
    return [
        *_of_mfu(facts),
        *_of_utilisation(facts),
        *_of_capacity(facts),
        *_of_single_facts(facts, sheet.price),
    ]


def _of_mfu(facts: Facts) -> list[str]:
    """Judge the MFU that follows from tokens per second and the model's size."""
    rate = training_rate(facts)
    if facts.active_parameters is None or facts.peak_tflops is None or rate is None:
        return []
    mfu = model_flops_per_s(facts.active_parameters, rate) / (facts.peak_tflops * 10**12)
    if mfu > 1:
        raise KprofError(
            f"an MFU of {_plain(mfu)} follows from these facts: {_plain(rate)} tokens/s of "
            f"{_plain(facts.active_parameters)} active parameters take more FLOP/s than the GPU's "
            f"peak of {_plain(facts.peak_tflops)} TFLOP/s",
            fix="check that --tokens-per-s is of one GPU and --active-parameters is no count of "
            "bytes; give --peak-tflops of a smaller type; leave --active-parameters out to price "
            "serving alone",
        )
    if facts.mfu is not None and abs(mfu - facts.mfu) > CLOSE * facts.mfu:
        raise KprofError(
            f"--mfu {_plain(facts.mfu)} contradicts the MFU of {_plain(mfu)} that follows from "
            "the tokens per second and the model's size",
            fix="leave --mfu out, or --tokens-per-s and --gpu-hours",
        )
    if mfu < LEAST_MFU:
        return [
            f"An MFU of {_plain(mfu)} follows from these facts, which no training has: look for a "
            "slip in --active-parameters, --training-tokens, --gpu-hours or --tokens-per-s."
        ]
    return []


def _of_utilisation(facts: Facts) -> list[str]:
    """Compare a given utilisation with that of the demand."""
    if facts.utilisation is None or facts.demand is None or facts.tokens_per_s is None:
        return []
    fleet = size_fleet(facts.demand, facts.tokens_per_s.mid, replicas_of(facts))
    low, high = fleet.steady_utilisation, fleet.scaled_utilisation
    if (1 - CLOSE) * low <= facts.utilisation.mid <= (1 + CLOSE) * high:
        return []
    between = f"between {_plain(low)} and {_plain(high)}" if low < high else f"of {_plain(low)}"
    return [
        f"--utilisation {_plain(facts.utilisation.mid)} contradicts --demand, from which a "
        f"utilisation {between} follows: serving is priced by the one, the fleet by the other. "
        "Leave one of them out."
    ]


def _of_capacity(facts: Facts) -> list[str]:
    """Compare what GPUs are asked for with what they can serve."""
    rate, gpus = facts.tokens_per_s, facts.gpus
    if rate is None or gpus is None:
        return []
    warnings, most = [], rate.high * gpus
    if facts.demand is not None and max(facts.demand) > most:
        warnings.append(
            f"The demand reaches {_plain(max(facts.demand))} tokens/s, and --gpus {gpus} serve "
            f"{_plain(most)} at most."
        )
    monthly = most * HOURS_PER_MONTH * SECONDS_PER_HOUR
    if facts.tokens_per_month is not None and facts.tokens_per_month > monthly:
        warnings.append(
            f"--tokens-per-month {_plain(facts.tokens_per_month)} is more than --gpus {gpus} serve "
            f"in a month, {_plain(monthly)}."
        )
    return warnings


def _refuse_power(facts: Facts) -> None:
    """Refuse energies that no GPU draws in their time."""
    watts = _watts(facts)
    if watts is not None and watts > MOST_WATTS:
        raise KprofError(
            f"a GPU would draw {_plain(watts / 1_000)} kW to use so many joules in the time given",
            fix="check the unit of the energy (J, of all GPUs for a step) and of the time (s)",
        )


def _watts(facts: Facts) -> Fraction | None:
    """Return the power of one GPU that follows from the energy of a step or a token."""
    if facts.joules_per_step is not None and facts.step_s is not None and facts.gpus is not None:
        return facts.joules_per_step / facts.step_s / facts.gpus
    if facts.joules_per_token is not None and facts.tokens_per_s is not None:
        return facts.joules_per_token * facts.tokens_per_s.mid
    return None


def _of_single_facts(facts: Facts, price: Price | None) -> list[str]:
    """Name each fact that is true of another unit, or of a server instead of a GPU."""
    warnings, watts = [], _watts(facts)
    if facts.tokens_per_s is not None and facts.tokens_per_s.high > MOST_TOKENS_PER_S:
        warnings.append(
            f"--tokens-per-s {_plain(facts.tokens_per_s.high)} is more than one GPU serves: give "
            "the rate of one GPU, not of the service."
        )
    if facts.tokens_per_month is not None and facts.tokens_per_month < LEAST_TOKENS_PER_MONTH:
        warnings.append(
            f"--tokens-per-month {_plain(facts.tokens_per_month)} are few: 2T are 2 * 10^12."
        )
    if watts is not None and watts < LEAST_WATTS:
        warnings.append(
            f"A GPU would draw {_plain(watts)} W, less than an idle one: check the unit of the "
            "energy (J, of all GPUs for a step)."
        )
    if watts is not None and facts.kw is not None and watts > (1 + CLOSE) * facts.kw * 1_000:
        warnings.append(
            f"The measured energy is {_plain(watts / 1_000)} kW of a GPU, more than --kw "
            f"{_plain(facts.kw)} provides."
        )
    return [*warnings, *_of_speedup(facts), *_of_rent(facts), *_of_owned(facts, price)]


def _of_speedup(facts: Facts) -> list[str]:
    if facts.speedup is None:
        return []
    if facts.speedup.high > MOST_SPEEDUP:
        return [
            f"--speedup {_plain(facts.speedup.high)} means so many times as fast; 30 % faster is "
            "1.3."
        ]
    if facts.speedup.mid < 1:
        return [
            f"--speedup {_plain(facts.speedup.mid)} is a slowdown: give the old time over the new."
        ]
    return []


def _of_rent(facts: Facts) -> list[str]:
    warnings = []
    if facts.price is not None and facts.price.mid > MOST_RENT_USD:
        warnings.append(
            f"--price {_plain(facts.price.mid)} is above every list price of a GPU: divide the "
            "price of a server by its GPUs."
        )
    if facts.interruptions is not None and facts.restart is not None:
        lost = facts.interruptions * facts.restart
        if lost > 1:
            warnings.append(
                f"Interruptions would cost {_plain(lost)} hours of work an hour: give "
                "--interruptions per hour and --restart in hours."
            )
    return warnings


def _of_owned(facts: Facts, price: Price | None) -> list[str]:
    warnings = []
    if facts.capex is not None:
        if price is not None and price.usd_per_gpu_hour.mid < LEAST_OWNED_USD:
            warnings.append(
                "A GPU-hour of less than 5 cents follows from --capex: give the $ paid for one GPU "
                "with its share of the server."
            )
        if facts.capex > MOST_CAPEX_USD:
            warnings.append(
                f"--capex {_plain(facts.capex)} is the price of a server: divide it by its GPUs."
            )
    if facts.life is not None and facts.life > MOST_LIFE_YEARS:
        warnings.append(f"--life {_plain(facts.life)} is in years: 48 months are 4.")
    if facts.kw is not None and facts.kw > MOST_KW:
        warnings.append(f"--kw {_plain(facts.kw)} is the power of a server: divide it by its GPUs.")
    if facts.kwh_price is not None and 0 < facts.kwh_price < LEAST_KWH_USD:
        warnings.append(
            f"--kwh-price {_plain(facts.kwh_price)} is below any tariff: give $ per kWh, not per "
            "Wh."
        )
    return warnings


def _plain(value: Fraction) -> str:
    return f"{float(value):,.4g}" if value < 10**15 else f"{float(value):.3g}"
