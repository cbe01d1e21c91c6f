"""What serving a token costs: in dollars, split by prefill and decode, and in joules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MILLION = 1_000_000
SECONDS_PER_HOUR = 3_600
JOULES_PER_KWH = 3_600_000


def usd_per_million_tokens(
    usd_per_gpu_hour: Fraction,
    tokens_per_s_per_gpu: Fraction,
    utilisation: Fraction = Fraction(1),
    overhead_factor: Fraction = Fraction(1),
) -> Fraction:
    """Return $ for a million tokens: P * ov / (T * 3,600 / 10^6 * u).

    `tokens_per_s_per_gpu` is what a GPU serves at the largest load that still meets the targets,
    not its peak; `utilisation` is what is served over that. With u = 1 it is the cost of use,
    with the measured u that of the reservation, which is what is paid.
    """
    tokens_per_hour = tokens_per_s_per_gpu * SECONDS_PER_HOUR * utilisation
    return usd_per_gpu_hour * overhead_factor * MILLION / tokens_per_hour


@dataclass(frozen=True)
class Served:
    """What a window of serving handled, and the GPU seconds measured for prefill and for decode.

    `cached_share` of the input tokens came from the prefix cache. Looking one up costs
    `cached_weight` of what computing one costs, and the prefill seconds hold both.
    """

    input_tokens: Fraction
    output_tokens: Fraction
    prefill_gpu_s: Fraction
    decode_gpu_s: Fraction
    cached_share: Fraction = Fraction(0)
    cached_weight: Fraction = Fraction(0)

    @property
    def cached_tokens(self) -> Fraction:
        """Input tokens that the cache had."""
        return self.input_tokens * self.cached_share

    @property
    def computed_tokens(self) -> Fraction:
        """Input tokens that had to be computed."""
        return self.input_tokens - self.cached_tokens


@dataclass(frozen=True)
class Bill:
    """What a window of serving costs and for what: the three parts are the whole, exactly."""

    computed_usd: Fraction
    """For input tokens that were computed."""
    cached_usd: Fraction
    """For input tokens from the cache."""
    output_usd: Fraction

    @property
    def input_usd(self) -> Fraction:
        """For all input tokens."""
        return self.computed_usd + self.cached_usd

    @property
    def total_usd(self) -> Fraction:
        """The whole bill."""
        return self.input_usd + self.output_usd


def split_bill(
    served: Served,
    usd_per_gpu_hour: Fraction,
    utilisation: Fraction = Fraction(1),
    overhead_factor: Fraction = Fraction(1),
) -> Bill:
    """Split the bill for the GPUs of a window by the seconds that prefill and decode took.

    The bill is P * ov / u * (prefill + decode GPU seconds) / 3,600: hours that were paid and not
    used are borne in proportion. Within prefill a cached token weighs `cached_weight`, a computed
    one 1. Charging the whole GPU-hour to input and again to output, as some tables do, counts it
    twice.
    """
    usd_per_s = usd_per_gpu_hour * overhead_factor / utilisation / SECONDS_PER_HOUR
    prefill_usd = usd_per_s * served.prefill_gpu_s
    cached = served.cached_tokens * served.cached_weight
    weight = served.computed_tokens + cached
    cached_usd = prefill_usd * cached / weight if weight else Fraction(0)
    return Bill(prefill_usd - cached_usd, cached_usd, usd_per_s * served.decode_gpu_s)


def in_micro_dollars(parts_usd: Sequence[Fraction]) -> list[int]:
    """Round parts to whole millionths of a dollar that add up to their rounded sum."""
    exact = [part * MILLION for part in parts_usd]
    whole = [int(part // 1) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: round(sum(exact)) - sum(whole)]:
        whole[i] += 1
    return whole


def usd_at_api_prices(tokens: Sequence[Fraction], usd_per_million: Sequence[Fraction]) -> Fraction:
    """Return what an API charges for tokens of several kinds, each at its own $ for a million."""
    pairs = zip(tokens, usd_per_million, strict=True)
    return sum((count * usd for count, usd in pairs), Fraction(0)) / MILLION


def provisioned_joules_per_token(kw_per_gpu: Fraction, tokens_per_s_per_gpu: Fraction) -> Fraction:
    """Return the joules that stand ready for a token: kW * 1,000 / T, not what it used."""
    return kw_per_gpu * 1_000 / tokens_per_s_per_gpu


def energy_usd_per_million_tokens(
    joules_per_token: Fraction, usd_per_kwh: Fraction, pue: Fraction = Fraction(1)
) -> Fraction:
    """Return $ of current for a million tokens: J/token / 3.6 * $/kWh * PUE.

    Who rents GPUs has paid for it already: it is no saving on top of the rent.
    """
    return joules_per_token * MILLION / JOULES_PER_KWH * usd_per_kwh * pue
