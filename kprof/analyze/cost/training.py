"""What training costs, and how much of the GPUs' arithmetic and bandwidth a model uses."""

from __future__ import annotations

from fractions import Fraction

from kprof.analyze.cost.facts import Facts
from kprof.analyze.cost.sheet import Sheet
from kprof.analyze.cost.tokens import SECONDS_PER_HOUR

BILLION = 1_000_000_000
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Two forward and four backward, per active parameter; attention's own are not counted."""


def training_tokens_per_s(
    active_parameters: Fraction, mfu: Fraction, peak_flops_per_s: Fraction
) -> Fraction:
    """Return the tokens that a GPU trains on in a second: MFU * peak / (6 * N_active)."""
    return mfu * peak_flops_per_s / (FLOPS_PER_PARAMETER_AND_TOKEN * active_parameters)


def model_flops_per_s(active_parameters: Fraction, tokens_per_s_per_gpu: Fraction) -> Fraction:
    """Return the useful FLOP/s of a GPU in training: 6 * N_active * T."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * active_parameters * tokens_per_s_per_gpu


def usd_per_billion_tokens(
    usd_per_gpu_hour: Fraction,
    tokens_per_s_per_gpu: Fraction,
    overhead_factor: Fraction = Fraction(1),
) -> Fraction:
    """Return $ for training on a billion tokens: P * ov * 10^9 / (T * 3,600)."""
    hours = BILLION / (tokens_per_s_per_gpu * SECONDS_PER_HOUR)
    return usd_per_gpu_hour * overhead_factor * hours


def tokens_per_s_of_budget(tokens: Fraction, gpu_hours: Fraction) -> Fraction:
    """Return the tokens per second of a GPU from a run's tokens and its GPU-hours."""
    return tokens / (gpu_hours * SECONDS_PER_HOUR)


def bandwidth_utilisation(
    bytes_read: Fraction, seconds: Fraction, bytes_per_s: Fraction
) -> Fraction:
    """Return MBU of a decode step: the weights and cache it reads, over its time, over the peak."""
    return bytes_read / seconds / bytes_per_s


def add_training(sheet: Sheet) -> None:
    """Add what training costs, and MFU where the model's size is known."""
    topic, facts = "Training", sheet.facts
    asked = ("active_parameters", "mfu", "training_tokens", "gpu_hours")
    if not sheet.is_asked(*asked):
        return
    rate = _training_rate(sheet)
    if rate is not None:
        sheet.add(topic, "tokens per second of a GPU", "tokens/s", rate, _rate_formula(facts))
        _add_mfu(sheet, rate)
    hours = facts.gpu_hours
    if hours is None and rate is not None and facts.training_tokens is not None:
        hours = facts.training_tokens / rate / 3_600
        sheet.add(topic, "GPU-hours", "h", hours, "tokens / T / 3,600")
    if not sheet.has(topic, "price"):
        return
    ov = facts.overhead
    if rate is not None:
        sheet.add_usd(
            topic,
            "a billion tokens",
            "$/B tokens",
            lambda p: usd_per_billion_tokens(p, rate, ov),
            "P * overhead * 10^9 / (T * 3,600)",
        )
    if hours is not None:
        sheet.add_usd(
            topic, "the whole run", "$", lambda p: p * ov * hours, "P * overhead * GPU-hours"
        )


def training_rate(facts: Facts) -> Fraction | None:
    """Return the tokens per second of a GPU that are given, or follow from its hours."""
    if facts.training_tokens is not None and facts.gpu_hours is not None:
        return tokens_per_s_of_budget(facts.training_tokens, facts.gpu_hours)
    return None if facts.tokens_per_s is None else facts.tokens_per_s.mid


def _training_rate(sheet: Sheet) -> Fraction | None:
    """Return the tokens per second of a GPU, from whatever tells them."""
    facts = sheet.facts
    rate = training_rate(facts)
    if rate is not None:
        return rate
    if facts.gpu_hours is not None and facts.active_parameters is None:
        return None
    if not sheet.has("Training", "active_parameters", "mfu", "peak_tflops"):
        return None
    assert facts.active_parameters and facts.mfu and facts.peak_tflops
    return training_tokens_per_s(facts.active_parameters, facts.mfu, facts.peak_tflops * 10**12)


def _rate_formula(facts: Facts) -> str:
    if facts.training_tokens is not None and facts.gpu_hours is not None:
        return "tokens / GPU-hours / 3,600"
    return "as given" if facts.tokens_per_s else "MFU * peak / (6 * active parameters)"


def _add_mfu(sheet: Sheet, rate: Fraction) -> None:
    facts = sheet.facts
    if facts.active_parameters is None or facts.mfu is not None:
        return
    flops = model_flops_per_s(facts.active_parameters, rate)
    sheet.add(
        "Training", "model TFLOP/s of a GPU", "TFLOP/s", flops / 10**12, "6 * active parameters * T"
    )
    if sheet.has("MFU", "peak_tflops") and facts.peak_tflops is not None:
        share = flops / (facts.peak_tflops * 10**12)
        sheet.add("Training", "MFU", "share", share, "that over the dense peak of the type")
