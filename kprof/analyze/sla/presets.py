"""Sets of targets that others publish, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from kprof.analyze.sla.targets import Target, TargetError, parse_target

_MLPERF = "MLPerf Inference, Server scenario: latency constraints of {}, 99th percentile"
_INTERACTIVE = "MLPerf Inference, Interactive scenario: latency constraints of {}, 99th percentile"


@dataclass(frozen=True)
class Preset:
    """Targets as text, and their source."""

    targets: tuple[str, ...]
    source: str


def _mlperf(model: str, ttft_ms: int, tpot_ms: int, source: str = _MLPERF) -> Preset:
    limits = (f"ttft_p99<={ttft_ms}ms", f"tpot_p99<={tpot_ms}ms")
    return Preset(limits, source.format(model))


PRESETS = {
    "voice": Preset(
        ("ttf64_p99<=100ms",),
        "published target of a voice agent: the first 64 tokens, a clause to speak, in 100 ms",
    ),
    "chat": Preset(
        ("ttft_p99<=200ms", "itl_p99<=50ms"), "GuideLLM, guide to service level objectives: chat"
    ),
    "rag": Preset(
        ("ttft_p99<=300ms", "itl_p99<=100ms"), "GuideLLM, guide to service level objectives: RAG"
    ),
    "mlperf-llama2-70b": _mlperf("llama2-70b", 2000, 200),
    "mlperf-llama2-70b-interactive": _mlperf("llama2-70b", 450, 40, _INTERACTIVE),
    "mlperf-llama3.1-8b": _mlperf("llama3.1-8b", 2000, 100),
    "mlperf-llama3.1-8b-interactive": _mlperf("llama3.1-8b", 500, 30, _INTERACTIVE),
    "mlperf-llama3.1-405b": _mlperf("llama3.1-405b", 6000, 175),
    "mlperf-llama3.1-405b-interactive": _mlperf("llama3.1-405b", 4500, 80, _INTERACTIVE),
    "mlperf-deepseek-r1": _mlperf("deepseek-r1", 2000, 80),
    "mlperf-gpt-oss-120b": _mlperf("gpt-oss-120b", 3000, 80),
}


def targets_of(name: str) -> tuple[Target, ...]:
    """Return the targets of a preset.

    Raises:
        TargetError: there is no such preset.
    """
    if name not in PRESETS:
        raise TargetError(f"there is no preset {name!r}", fix=f"presets: {', '.join(PRESETS)}")
    return tuple(parse_target(text) for text in PRESETS[name].targets)
