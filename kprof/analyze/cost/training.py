"""The cost of training, and the share of the GPUs' arithmetic that a model uses."""

from __future__ import annotations

from kprof.analyze.cost.facts import Facts
from kprof.analyze.cost.fleet import SECONDS_PER_HOUR
from kprof.analyze.cost.sheet import Sheet

TOPIC = "Training"
FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""Two forward and four backward, per active parameter; attention's own are not counted."""


def model_flops_per_s(active_parameters: float, tokens_per_s_per_gpu: float) -> float:
    """Return the useful FLOP/s of a GPU in training: 6 * N_active * T."""
    return FLOPS_PER_PARAMETER_AND_TOKEN * active_parameters * tokens_per_s_per_gpu


def training_rate(facts: Facts) -> tuple[float, str] | None:
    """Return the tokens per second of a GPU and their formula: given, or of its hours."""
    if facts.training_tokens is not None and facts.gpu_hours is not None:
        rate = facts.training_tokens / (facts.gpu_hours * SECONDS_PER_HOUR)
        return rate, "tokens / GPU-hours / 3,600"
    return None if facts.tokens_per_s is None else (facts.tokens_per_s.mid, "as given")


def _rate_by_mfu(sheet: Sheet) -> tuple[float, str] | None:
    parameters, training = sheet.facts.active_parameters, sheet.assumed.training
    if sheet.facts.gpu_hours is not None and parameters is None:
        return None
    if not sheet.has(TOPIC, "active_parameters", "training.mfu", "training.peak_tflops"):
        return None
    assert parameters and training.mfu and training.peak_tflops
    flops_per_s = training.mfu * training.peak_tflops * 1e12
    return flops_per_s / model_flops_per_s(parameters, 1), "MFU * peak / (6 * active parameters)"


def add_training(sheet: Sheet) -> None:
    """Add what training costs, and MFU where the model's size is known."""
    facts, hours, ov = sheet.facts, sheet.facts.gpu_hours, sheet.assumed.overhead
    if not sheet.is_asked("active_parameters", "training_tokens", "gpu_hours"):
        return
    rate, formula = training_rate(facts) or _rate_by_mfu(sheet) or (None, "")
    if rate is not None:
        sheet.add(TOPIC, "tokens per second of a GPU", "tokens/s", rate, formula)
        _add_mfu(sheet, rate)
        if hours is None and facts.training_tokens is not None:
            hours = facts.training_tokens / rate / SECONDS_PER_HOUR
            sheet.add(TOPIC, "GPU-hours", "h", hours, "tokens / T / 3,600")
    if not sheet.has(TOPIC, "price"):
        return
    if rate is not None:
        hours_of_billion, formula = ov * 1e9 / (rate * 3_600), "P * overhead * 10^9 / (T * 3,600)"
        sheet.add_usd(TOPIC, "a billion tokens", "$/B tokens", hours_of_billion, formula)
    if hours is not None:
        sheet.add_usd(TOPIC, "the whole run", "$", ov * hours, "P * overhead * GPU-hours")


def _add_mfu(sheet: Sheet, rate: float) -> None:
    parameters, training = sheet.facts.active_parameters, sheet.assumed.training
    if parameters is None or training.mfu is not None:
        return
    flops, formula = model_flops_per_s(parameters, rate), "6 * active parameters * T"
    sheet.add(TOPIC, "model TFLOP/s of a GPU", "TFLOP/s", flops / 1e12, formula)
    if sheet.has("MFU", "training.peak_tflops"):
        assert training.peak_tflops is not None
        share = flops / (training.peak_tflops * 1e12)
        sheet.add(TOPIC, "MFU", "share", share, "that over the dense peak of the type")
