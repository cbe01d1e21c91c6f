"""Facts that contradict each other, or the limits of a GPU: refused, or warned of."""

from __future__ import annotations

from kprof.analyze.cost.facts import Facts, unusual
from kprof.analyze.cost.fleet import SECONDS_PER_HOUR, size_fleet
from kprof.analyze.cost.price import HOURS_PER_MONTH
from kprof.analyze.cost.sheet import Sheet
from kprof.analyze.cost.training import model_flops_per_s, training_rate
from kprof.errors import KprofError

LEAST_MFU = 1e-3
"""A training with less has a slip in its facts: published ones reach 0.2 to 0.6."""
MOST_WATTS = 20_000
"""Of one GPU with its share of the server and its cooling."""
LEAST_WATTS = 10
"""Of one GPU: idle ones draw 20 to 100."""
CLOSE = 0.05
"""Two statements of one quantity may differ by this share before they contradict each other."""


def check_facts(sheet: Sheet) -> list[str]:
    """Return a warning for everything that is hardly true.

    Raises:
        KprofError: facts contradict each other, or the laws of arithmetic of a GPU.
    """
    facts = sheet.facts
    return [*_of_power(facts), *_of_mfu(facts), *_of_capacity(facts), *unusual(facts)]


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
    if facts.active_parameters is None or training.peak_tflops is None or known is None:
        return []
    rate, _ = known
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
