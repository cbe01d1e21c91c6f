"""The inputs of a cost: the facts of one question, and the assumptions of a TOML file.

Every number is declared once, with its range, its meaning and, in `extra`, the range in which it
usually lies. Validation, help texts, warnings and the documented TOML follow from that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo, fields

from kprof.analyze.cost.price import ON_DEMAND, Spread
from kprof.errors import KprofError

SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
TEXTS = ("gpu", "term", "baseline_gpu")
BANDS = ("price", "baseline_price", "tokens_per_s", "utilisation", "speedup")
SHOWN = "kprof cost --show-assumptions prints such a file, with the meaning of each field"
# What msgspec says of a value, in the words of a reader.
REASONS = (
    (rf"^Expected `(?:float|int)` >= {1e-9}$", "must be above 0"),
    (r"^Expected `(?:float|int)` >= (\S+?)(?:\.0)?$", r"must be at least \1"),
    (r"^Expected `(?:float|int)` <= (\S+?)(?:\.0)?$", r"must be at most \1"),
    (r"^Expected `int.*", "must be a whole number"),
    (r"^Expected `float.*", "must be a number"),
    (r"^Expected `str.*", "must be a text"),
    (r"^Expected `object.*", "must be a section"),
    (r"^Object missing required field `\w+`", "is required"),
    (r"^Object contains unknown field `(\w+)`", r"there is no field \1"),
    (r"^'utf-8' codec.*", "is not a text in UTF-8"),
    (r"^Invalid value.*|^Cannot overwrite.*", r"is no TOML: \g<0>"),
)
WIDEST_BAND = 30
"""HIGH over LOW beyond which a band is more likely one number with separators: 1,200,900."""
# No figure that follows from numbers within these limits overflows.
LEAST, MOST = 1e-9, 1e18


def told(
    text: str,
    least: float | None = None,
    most: float | None = None,
    example: object = None,
    usual: tuple[float, float] | None = None,
) -> Meta:
    """Declare a field: its meaning, its range, an example, and the range in which it usually is."""
    examples = None if example is None else [example]
    extra = {"usual": usual} if usual else None
    return Meta(description=text, ge=least, le=most, examples=examples, extra=extra)


Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
UsedShare = Annotated[float, Meta(ge=LEAST, le=1)]
Factor = Annotated[float, Meta(ge=1, le=10)]
Usd = Annotated[float, Meta(ge=0.01, le=100)]


class Owning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An own GPU: the price of a GPU-hour where --price is not given."""

    capex_usd_per_gpu: Annotated[
        Positive,
        told("$ for one GPU with its share of the server", None, None, 35_000, (1e3, 1.5e5)),
    ]
    life_years: Annotated[float, told("years of use", 0.01, 100, 4, (0, 15))]
    interest_per_year: Annotated[Share, told("interest, a share of one")] = 0
    opex_usd_per_gpu_year: Annotated[Amount, told("$ a year to run it, without electricity")] = 0
    availability: Annotated[UsedShare, told("share of the year in which it can work")] = 1


class Energy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Electricity; it is part of the price of an own GPU."""

    kw_per_gpu: (
        Annotated[float, told("kW of one GPU with its share of the server", 0.01, 20, 1.3, (0, 4))]
        | None
    ) = None
    usd_per_kwh: (
        Annotated[float, told("$ per kWh, not cents, not per Wh", 0, 2, 0.08, (0.005, 2))] | None
    ) = None
    pue: Annotated[float, told("power of the data center over that of its IT", 1, 5)] = 1


class Spot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interruptions of spot GPUs: they raise the price of an hour of work."""

    interruptions_per_hour: Annotated[float, told("interruptions per hour", 0, 60, 0.02)]
    restart_hours: Annotated[float, told("hours of work lost by each", 0, 1e3, 0.5, (0, 24))]


class Replicas(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a fleet is made: GPUs come in whole replicas."""

    gpus_per_replica: Annotated[int, told("GPUs of a replica", 1, 10**6)] = 1
    min_replicas: Annotated[int, told("replicas that are always on", 0, 10**6)] = 1
    headroom: Annotated[Factor, told("capacity over demand")] = 1
    cold_start_s: Annotated[float, told("seconds paid before a replica serves", 0, 1e6)] = 0


class Served(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A window of serving with its GPU seconds: it splits the bill into input and output."""

    input_tokens: Annotated[Positive, told("input tokens", example=40e6)]
    output_tokens: Annotated[Positive, told("output tokens", example=8e6)]
    prefill_gpu_s: Annotated[Positive, told("GPU seconds of prefill", example=2400)]
    decode_gpu_s: Annotated[Amount, told("GPU seconds of decode", example=9600)]
    cached_share: Annotated[float, told("share of the input from the prefix cache", 0, 0.9999)] = 0
    cached_weight: Annotated[Share, told("cost of a cached input token over a computed one")] = 0

    @property
    def cached_tokens(self) -> float:
        """Input tokens from the cache."""
        return self.input_tokens * self.cached_share

    @property
    def computed_tokens(self) -> float:
        """Input tokens that had to be computed."""
        return self.input_tokens - self.cached_tokens


class Training(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast one GPU trains, where no rate is given."""

    mfu: Annotated[UsedShare | None, told("model FLOPs utilisation", example=0.4)] = None
    peak_tflops: (
        Annotated[float, told("dense peak of one GPU in TFLOP/s, else that in bf16", 0.1, 1e5, 989)]
        | None
    ) = None


class Assumptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assumptions of `kprof cost`, with their defaults; remove the # of a line to set it."""

    overhead: Annotated[Factor, told("the whole bill over that of the GPUs")] = 1
    price_list: Annotated[str | None, told("only the prices of this list", example="AWS")] = None
    owning: Owning | None = None
    energy: Energy = Energy()
    spot: Spot | None = None
    replicas: Replicas = Replicas()
    served: Served | None = None
    training: Training = Training()


class Facts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of one question, each an option of `kprof cost`; None is unknown.

    `tokens_per_s` is what one GPU serves at the largest load that meets the targets, not its peak.
    """

    gpu: Annotated[str | None, told("GPU, as price lists name it")] = None
    term: Annotated[str, told("on-demand, spot, reserved-3y or owned")] = ON_DEMAND
    price: Annotated[
        Spread[Usd] | None,
        told("$ per GPU-hour (of a server: divide it by its GPUs)", usual=(0, 20)),
    ] = None
    tokens_per_s: Annotated[
        Spread[Positive] | None,
        told("tokens/s of one GPU at the SLA, not its peak", usual=(0, 1e6)),
    ] = None
    utilisation: Annotated[Spread[UsedShare] | None, told("share served of the SLA's capacity")] = (
        None
    )
    tokens_per_step: Annotated[Positive | None, told("tokens of a step on all GPUs")] = None
    step_s: Annotated[Positive | None, told("seconds of a step")] = None
    joules_per_step: Annotated[Positive | None, told("measured J of a step on all GPUs")] = None
    joules_per_token: Annotated[Positive | None, told("measured J per token")] = None
    gpus: Annotated[int, told("number of GPUs in use", 1, 10**7)] | None = None
    demand: Annotated[list[Amount] | None, told("tokens/s of all users, one for each hour")] = None
    api_price: Annotated[float, told("$ per million tokens of an API", 1e-4, 1e4)] | None = None
    active_parameters: Annotated[float, told("active parameters, as 37B", 1e4, 1e14)] | None = None
    training_tokens: Annotated[float, told("tokens to train on, as 15.6T", 1e3, MOST)] | None = None
    gpu_hours: Annotated[Positive | None, told("GPU-hours of the training")] = None
    speedup: Annotated[
        Spread[Positive] | None,
        told("old time over new, as 281/77: 30 % faster is 1.3, a slowdown below 1", usual=(1, 20)),
    ] = None
    baseline_gpu: Annotated[str | None, told("GPU before the change")] = None
    baseline_price: Annotated[Spread[Usd] | None, told("$ per hour of that GPU")] = None
    tokens_per_month: Annotated[
        Positive | None, told("tokens per month, as 2T", usual=(1e6, MOST))
    ] = None
    fee: Annotated[Positive | None, told("$ that the speed-up costs once")] = None
    assumptions: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        """Check what a range cannot say; msgspec makes its own error of a ValueError."""
        for name in BANDS:
            band = getattr(self, name)
            if band is not None and not band.low <= band.mid <= band.high:
                raise ValueError(f"{name} must be LOW,MID,HIGH in this order")
        if self.demand is not None and not any(self.demand):
            raise ValueError("demand must be above 0 in one hour at least")
        if self.demand is not None and any(0 < one < LEAST for one in self.demand):
            raise ValueError(f"demand of an hour must be 0, or at least {LEAST:g}")


def _declared(kind: type[Struct], section: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for one in fields(kind):
        if (inner := _struct_in(one.type)) is None:
            yield section + one.name, one
        else:
            yield from _declared(inner, f"{one.name}." if kind is Assumptions else "")


def _struct_in(hint: object) -> type[Struct] | None:
    kinds = (hint, *get_args(hint))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Struct)), None)


FIELDS = dict(_declared(Facts))
"""Every fact and assumption by its name, `section.name` where it is in a section."""


def option_of(name: str) -> str:
    """Return how a reader gives a fact: an option, or a field of the assumptions."""
    section, _, field = name.rpartition(".")
    if name in Facts.__struct_fields__:
        return "--" + name.replace("_", "-")
    return f"{field} in [{section}]" if section else name


def detail(hint: object, name: str) -> Any:  # noqa: ANN401 - as Meta declares it
    """Return what the declaration of a field says of `name`, such as its `description`."""
    for part in get_args(hint):
        found = getattr(part, name) if isinstance(part, Meta) else detail(part, name)
        if found is not None:
            return found
    return None


def _range(least: float, most: float) -> str:
    low, high = f"from {least:,.9g}", f" to {most:,.9g}"
    return f"{'above 0' if least == LEAST else low}{'' if most == MOST else high}"


def described(hint: object) -> str:
    """Return the meaning of a field with its range."""
    least, most, text = (detail(hint, what) for what in ("ge", "le", "description"))
    written = ", as 0.5 or 50%" if most == 1 else ""
    return str(text) if least is None else f"{text} ({_range(least, most)}{written})"


def facts_of(given: Mapping[str, object]) -> Facts:
    """Read facts from numbers or text: `3.99`, `281/77`, `15.6T`, `LOW,MID,HIGH`; None is unknown.

    Raises:
        KprofError: a fact is outside of its range, or there is no such fact.
    """
    known = {name: _parsed(name, value) for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(known, Facts)
    except msgspec.ValidationError as error:
        raise _refused(error, given) from None


def assumptions_of(toml: bytes, source: str) -> Assumptions:
    """Read assumptions from TOML, which `source` names in errors.

    Raises:
        KprofError: it is no TOML, or holds a field that is unknown or outside of its range.
    """
    try:
        return msgspec.toml.decode(toml, type=Assumptions)
    except ValueError as error:  # Of msgspec, and of bytes that are no text.
        raise _refused(error, {}, f"{source}: ") from None


def _parsed(name: str, value: object) -> object:
    if name in TEXTS or not isinstance(value, (str, int, float)):
        return value
    is_share = name in FIELDS and detail(FIELDS[name].type, "le") == 1
    parts = str(value).split(",")
    numbers = [_share(part) if is_share and part.endswith("%") else _number(part) for part in parts]
    if name in BANDS and len(numbers) in (1, 3):
        return {"low": numbers[0], "mid": numbers[len(numbers) // 2], "high": numbers[-1]}
    return numbers[0] if len(numbers) == 1 and name != "demand" else numbers


def _share(text: str) -> object:
    """Return the share that `50%` is; any other text as it is."""
    number = _number(text[:-1].strip())
    return number / 100 if isinstance(number, (int, float)) else text


def _number(text: str) -> object:
    """Return the number that `15.6T` or `281/77` is; any other text as it is, to be refused."""
    factor = SUFFIXES.get(text[-1:], 1)
    over, _, under = (text if factor == 1 else text[:-1]).partition("/")
    try:
        number = float(over) / float(under or 1) * factor
    except (ValueError, ZeroDivisionError):
        return text
    return int(number) if number.is_integer() else number


def _refused(error: Exception, given: Mapping[str, object], where: str = "") -> KprofError:
    """Return msgspec's error with the value as given, and the field's meaning and range."""
    words = re.findall(r"\w+", str(error))
    name = next((one for one in FIELDS if one.rpartition(".")[2] in words), None)
    said, _, place = str(error).partition(" - at `$.")
    for pattern, words_of in REASONS:
        said = re.sub(pattern, words_of, said)
    if name in BANDS and said == "must be a section":
        said = "must be one number, or LOW,MID,HIGH"
    if name is None:
        section = f"[{place.rstrip('`')}]: " if place else ""
        return KprofError(f"{where}{section}{said}", fix=SHOWN)
    told = f"{option_of(name)} {given[name]}" if name in given else f"{where}{option_of(name)}"
    return KprofError(
        f"{told}: {said}", fix=f"give {option_of(name)}, {described(FIELDS[name].type)}"
    )


def unusual(facts: Facts) -> list[str]:
    """Return a warning for every fact outside of the range in which it usually lies."""
    warnings = []
    for name, one in FIELDS.items():
        holder = getattr(facts.assumptions, name.partition(".")[0]) if "." in name else facts
        value = getattr(holder, one.name, None)
        numbers = (value.low, value.mid, value.high) if isinstance(value, Spread) else (value,)
        low, high = (detail(one.type, "extra") or {}).get("usual", (None, None))
        is_told = low is not None and high is not None
        outside = [of for of in numbers if is_told and of and not low <= of <= high]
        if isinstance(value, Spread) and value.high > WIDEST_BAND * value.low:
            warnings.append(
                f"{option_of(name)} is a band of LOW,MID,HIGH from {value.low:,.4g} to "
                f"{value.high:,.4g}: write one number without separators."
            )
        for number in outside[:1]:
            warnings.append(
                f"{option_of(name)} is {number:,.4g}, and usually {_range(low, high)}: "
                f"{detail(one.type, 'description')}."
            )
    return warnings


def documented(kind: type[Struct] = Assumptions, *, is_set: bool = True) -> str:
    """Return the assumptions as TOML: defaults, or examples behind a #, with meaning and range."""
    lines = [f"# {kind.__doc__}"]
    for one in fields(kind):
        is_known = one.default not in (None, msgspec.NODEFAULT)
        if (inner := _struct_in(one.type)) is not None:
            header = f"[{one.name}]" if is_known else f"# [{one.name}]"
            lines += ["", header, documented(inner, is_set=is_known)]
            continue
        value = one.default if is_known else detail(one.type, "examples")[0]
        text = f"{value:.12g}" if isinstance(value, (int, float)) else f'"{value}"'
        off = "" if is_set and is_known else "# "
        lines.append(f"{off}{one.name} = {text}  # {described(one.type)}")
    return "\n".join(lines)
