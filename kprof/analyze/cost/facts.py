"""What is known of a workload and its prices: every fact with its unit, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from kprof.analyze.cost.price import ON_DEMAND, Band
from kprof.errors import KprofError

ONE, ZERO = Fraction(1), Fraction(0)
# An exponent of more digits would be a number that no memory holds.
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?(?:/[0-9]+)?")
MOST_CHARACTERS = 60
SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Facts:
    """Everything that a cost can follow from; what is None is not known.

    The names are those of the options of `kprof cost`, and so are the units. `tokens_per_s` is
    what one GPU serves at the largest load that meets the targets, not its peak.
    """

    gpu: str | None = None
    term: str = ON_DEMAND
    price_list: str | None = None
    price: Band | None = None
    baseline_gpu: str | None = None
    baseline_price: Band | None = None
    overhead: Fraction = ONE
    capex: Fraction | None = None
    life: Fraction | None = None
    interest: Fraction = ZERO
    opex: Fraction = ZERO
    availability: Fraction = ONE
    kw: Fraction | None = None
    kwh_price: Fraction | None = None
    pue: Fraction = ONE
    interruptions: Fraction | None = None
    restart: Fraction | None = None
    tokens_per_s: Band | None = None
    tokens_per_step: Fraction | None = None
    step_s: Fraction | None = None
    joules_per_step: Fraction | None = None
    utilisation: Band | None = None
    input_tokens: Fraction | None = None
    output_tokens: Fraction | None = None
    prefill_gpu_s: Fraction | None = None
    decode_gpu_s: Fraction | None = None
    cached_share: Fraction = ZERO
    cached_weight: Fraction = ZERO
    demand: tuple[Fraction, ...] | None = None
    headroom: Fraction = ONE
    replica_gpus: Fraction = ONE
    min_replicas: Fraction = ONE
    cold_start: Fraction = ZERO
    gpus: Fraction | None = None
    api_price: Fraction | None = None
    active_parameters: Fraction | None = None
    mfu: Fraction | None = None
    peak_tflops: Fraction | None = None
    training_tokens: Fraction | None = None
    gpu_hours: Fraction | None = None
    joules_per_token: Fraction | None = None
    speedup: Band | None = None
    tokens_per_month: Fraction | None = None
    fee: Fraction | None = None


@dataclass(frozen=True)
class Limits:
    """Between which values a fact can be true, in words and with an example."""

    words: str
    example: str
    least: int | Fraction = 0
    most: int | None = None
    may_be_least: bool = True
    is_whole: bool = False

    def hold(self, value: Fraction) -> bool:
        """Tell whether a value lies within."""
        above = value >= self.least if self.may_be_least else value > self.least
        below = self.most is None or value <= self.most
        return above and below and (not self.is_whole or value.denominator == 1)


CENT = Fraction(1, 100)
POSITIVE = Limits("a number above 0", "2.5", may_be_least=False)
NOT_NEGATIVE = Limits("a number of at least 0", "0.1")
DEMAND = Limits("a rate of at least 0 in tokens/s", "2000,5000,3000")
USED_SHARE = Limits("a share above 0 and at most 1", "0.6", most=1, may_be_least=False)
SHARE = Limits("a share from 0 to 1", "0.4", most=1)
WHOLE = Limits("a whole number of at least 1", "8", least=1, is_whole=True)
YEARS = Limits("a number of years above 0 and at most 100", "4", most=100, may_be_least=False)
PRICE = Limits(
    "$ for one GPU and one hour, from 0.01 to 100 (a price per month: divide it by 730; of a "
    "server: by its GPUs)",
    "3.99",
    CENT,
    100,
)
KW = Limits("the kW of one GPU, all in, from 0.01 to 20 (W: divide by 1,000)", "1.3", CENT, 20)
KWH_PRICE = Limits("$ per kWh, from 0 to 2 (cents: divide by 100)", "0.08", most=2)
POWER_FACTOR = Limits("a factor from 1 to 5", "1.25", least=1, most=5)
SMALL_FACTOR = Limits("a factor from 1 to 10 (30 % more is 1.3)", "1.3", least=1, most=10)
PARAMETERS = Limits("a model's parameters, from 10,000 to 10^14", "7B", 10_000, 10**14)
TRAINED = Limits("a training's tokens, at least 1,000", "15.6T", 1_000)
TFLOPS = Limits("the dense TFLOP/s of one GPU, from 0.1 to 100,000", "989", Fraction(1, 10), 10**5)
API_PRICE = Limits("$ per million tokens, from 0.0001 to 10,000", "0.6", Fraction(1, 10**4), 10**4)
COUNT = Limits("a whole number of at least 0", "1", is_whole=True)

TEXTS = ("gpu", "term", "price_list", "baseline_gpu")
BANDS = ("price", "baseline_price", "tokens_per_s", "utilisation", "speedup")
LISTS = ("demand",)
LIMITS: dict[str, Limits] = {
    **dict.fromkeys(("utilisation", "availability", "mfu"), USED_SHARE),
    **dict.fromkeys(("interest", "cached_share", "cached_weight"), SHARE),
    **dict.fromkeys(("price", "baseline_price"), PRICE),
    **dict.fromkeys(("overhead", "headroom"), SMALL_FACTOR),
    **dict.fromkeys(("gpus", "replica_gpus"), WHOLE),
    **dict.fromkeys(("opex", "cold_start", "decode_gpu_s"), NOT_NEGATIVE),
    "kw": KW,
    "kwh_price": KWH_PRICE,
    "pue": POWER_FACTOR,
    "active_parameters": PARAMETERS,
    "training_tokens": TRAINED,
    "peak_tflops": TFLOPS,
    "api_price": API_PRICE,
    **dict.fromkeys(("interruptions", "restart"), NOT_NEGATIVE),
    "demand": DEMAND,
    "min_replicas": COUNT,
    "life": YEARS,
}
PRICED = ("gpu", "price", "capex")
SERVED = ("tokens_per_s", "tokens_per_step")
# What a fact needs beside it to matter: one of these at least.
COMPANIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("term", "price_list"), ("gpu",)),
    **dict.fromkeys(("overhead", "interruptions", "restart"), PRICED),
    **dict.fromkeys(("life", "interest", "opex", "availability"), ("capex",)),
    **dict.fromkeys(("kw", "joules_per_token"), ("capex", "kwh_price", *SERVED)),
    "pue": ("kwh_price",),
    "utilisation": (*SERVED, "prefill_gpu_s"),
    **dict.fromkeys(("cached_share", "cached_weight"), ("prefill_gpu_s",)),
    **dict.fromkeys(("headroom", "replica_gpus", "min_replicas", "cold_start"), ("demand",)),
    "gpus": (*SERVED, "step_s", "api_price"),
    **dict.fromkeys(("mfu", "peak_tflops"), ("active_parameters",)),
    **dict.fromkeys(("baseline_gpu", "baseline_price", "tokens_per_month", "fee"), ("speedup",)),
}


def without_companion(facts: Facts) -> list[str]:
    """Return the facts that were given and change nothing, as none stands beside them to use."""
    defaults = {one.name: one.default for one in fields(Facts)}
    given = {name for name, default in defaults.items() if getattr(facts, name) != default}
    return [name for name in COMPANIONS if name in given and not given & {*COMPANIONS[name]}]


def option_of(name: str) -> str:
    """Return the option of `kprof cost` that gives a fact."""
    return "--" + name.replace("_", "-")


def facts_of(given: Mapping[str, object]) -> Facts:
    """Read facts from numbers or text: `3.99`, `281/77`, `15.6T`, `LOW,MID,HIGH`; None is unknown.

    Raises:
        KprofError: one is no number, or cannot be true, or there is no such fact.
    """
    names = {one.name for one in fields(Facts)}
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            raise KprofError(f"unknown fact {name!r}", fix="see docs/cost.md")
        if value is not None:
            known[name] = str(value) if name in TEXTS else _quantity(name, value)
    facts = Facts(**known)
    _check_together(facts)
    return facts


def _quantity(name: str, value: object) -> Fraction | Band | tuple[Fraction, ...]:
    if isinstance(value, Band):
        parts: list[object] = [value.low, value.mid, value.high]
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(value.split(",")) if isinstance(value, str) else [value]
    numbers = [_number(name, part) for part in parts]
    if name in LISTS:
        return tuple(numbers)
    if name in BANDS and len(numbers) == 3:
        if numbers != sorted(numbers):
            raise _refused(name, value, "LOW,MID,HIGH in this order", "2.69,3.99,6.88")
        return Band(*numbers)
    if len(numbers) != 1:
        words = "one number or LOW,MID,HIGH" if name in BANDS else "one number"
        raise _refused(name, value, words, "2.5")
    return Band.known(numbers[0]) if name in BANDS else numbers[0]


def _number(name: str, value: object) -> Fraction:
    """Return a number exactly as it is written; a float as its shortest decimals."""
    limits = LIMITS.get(name, POSITIVE)
    text = str(value).strip()
    factor = SUFFIXES.get(text[-1:], 1)
    plain = text[:-1] if factor > 1 else text
    if len(plain) > MOST_CHARACTERS or not NUMBER.fullmatch(plain):
        raise _refused(name, value, limits.words, limits.example)
    try:
        number = Fraction(plain) * factor
    except (ValueError, ZeroDivisionError):
        raise _refused(name, value, limits.words, limits.example) from None
    if not limits.hold(number):
        raise _refused(name, value, limits.words, limits.example)
    return number


def _refused(name: str, value: object, words: str, example: str) -> KprofError:
    return KprofError(
        f"{option_of(name)} {value}: must be {words}", fix=f"as in {option_of(name)} {example}"
    )


def _check_together(facts: Facts) -> None:
    """Refuse facts that contradict each other."""
    if facts.price is not None and facts.capex is not None:
        raise KprofError(
            "--price and --capex are two prices of the same hour",
            fix="give --price for GPUs that are rented, --capex and --life for your own",
        )
    if facts.demand is not None and not any(facts.demand):
        raise KprofError("--demand is 0 in every hour", fix=f"as in --demand {DEMAND.example}")
    if facts.cached_share == 1 and not facts.cached_weight:
        raise KprofError(
            "all input comes from the cache and looking it up costs nothing, yet prefill took time",
            fix="give --cached-weight, the cost of a cached token over that of a computed one",
        )
