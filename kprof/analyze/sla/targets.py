"""SLA targets as text, as `ttf64_p99<=100ms`, with published sets of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kprof.analyze.sla.percentiles import is_provable
from kprof.errors import KprofError

Kind = Literal["time", "rate", "share"]
Relation = Literal["<=", ">="]

TIME_NS = {
    "ns": Fraction(1),
    "us": Fraction(10**3),
    "ms": Fraction(10**6),
    "s": Fraction(10**9),
    "min": Fraction(60 * 10**9),
}


@dataclass(frozen=True)
class Metric:
    """A metric of targets: its unit, and which direction is better."""

    name: str
    kind: Kind
    means: str
    example: str
    counts: str = ""
    """The unit that a rate counts, `tok` or `req`."""
    is_pooled: bool = False
    """Whether one answer has several values."""

    @property
    def relation(self) -> Relation:
        """The relation of a target on this metric, <= or >=."""
        return "<=" if self.kind == "time" or self.name == "errors" else ">="


METRICS = {
    metric.name: metric
    for metric in (
        Metric("ttft", "time", "time to the first chunk with content", "ttft_p95<=200ms"),
        Metric("ttf", "time", "time to the first N tokens, any N", "ttf64_p99<=100ms"),
        Metric("tpot", "time", "time per output token after the first", "tpot_p50<=10ms"),
        Metric("itl", "time", "time per token after the first chunk", "itl_p99<=20ms"),
        Metric(
            "gap", "time", "gap between chunks, of all answers", "gap_p99<=50ms", is_pooled=True
        ),
        Metric("stall", "time", "longest gap between chunks of an answer", "stall_p99<=500ms"),
        Metric("e2e", "time", "time to the whole answer", "e2e_p99<=2s"),
        Metric("step", "time", "time of a step of a recorded run", "step_p50<=60ms"),
        Metric("throughput", "rate", "output tokens", "throughput>=2000tok/s/gpu", "tok"),
        Metric("requests", "rate", "requests answered", "requests>=10req/s", "req"),
        Metric("goodput", "rate", "requests within every time limit", "goodput>=10req/s", "req"),
        Metric("attainment", "share", "requests within every time limit", "attainment>=99%"),
        Metric("errors", "share", "requests without a whole answer", "errors<=0.1%"),
    )
}

MOST_DIGITS, MOST_ZEROS = 30, 18
"""Maximum number of digits and of zeros of a number in a target."""

_FORM = re.compile(
    r"(?P<name>[a-z0-9]*[a-z][a-z0-9]*)(?:_(?P<statistic>[a-z0-9.]+))?"
    r"\s*(?P<relation><=|>=)\s*"
    r"(?P<number>[0-9][0-9,_]*(?:\.[0-9]+)?(?:e[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z%][a-z/]*)?"
)
_TIME_TO_N = re.compile(r"ttf([0-9]{1,18})")
_PERCENTILE = re.compile(r"p([0-9]+(?:\.[0-9]+)?)")
_RATE_UNIT = re.compile(r"(?P<counts>tok|req)(?:/(?P<per>s|min))(?P<gpu>/gpu)?")


class TargetError(KprofError):
    """A target that cannot be judged, because its expression is invalid."""


@dataclass(frozen=True)
class Target:
    """A promise: a metric, of times a percentile, and the limit that it keeps to.

    `limit` is in ns, per second, or a share of one.
    """

    text: str
    metric: Metric
    limit: float
    quantile: Fraction | None = None
    num_tokens: int | None = None
    """N, of the time to the first N tokens."""
    is_per_gpu: bool = False


def read_targets(texts: Sequence[str], preset: str | None = None) -> tuple[Target, ...]:
    """Return the targets of a preset and those given as text.

    Raises:
        KprofError: there is none, or one is malformed.
    """
    targets = targets_of(preset) if preset is not None else ()
    targets += tuple(parse_target(text) for text in texts)
    if not targets:
        fix = f"give --target 'ttft_p95<=200ms' or --preset ({', '.join(PRESETS)}); "
        raise KprofError("there is no target to judge", fix=fix + list_metrics())
    return targets


def parse_target(text: str) -> Target:
    """Read a target.

    Raises:
        TargetError: it is malformed; the message has the nearest valid spelling.
    """
    form = _FORM.fullmatch(_plain(text))
    if form is None:
        raise _malformed(text)
    metric, num_tokens = _metric_of(form["name"], text)
    if form["relation"] != metric.relation:
        problem = f"{text!r}: a target on {metric.means} takes {metric.relation}"
        raise _instead(problem, _with_relation(text, metric.relation))
    quantile = _quantile_of(metric, form["statistic"], text)
    number = _number_of(form["number"], metric, text)
    limit, is_per_gpu = _limit_of(metric, number, form["unit"] or "", text)
    return Target(text.strip(), metric, float(limit), quantile, num_tokens, is_per_gpu)


def _plain(text: str) -> str:
    for fancy, plain in (("≤", "<="), ("≥", ">="), ("µ", "u"), ("μ", "u")):
        text = text.replace(fancy, plain)
    return text.strip().lower()


def _metric_of(name: str, text: str) -> tuple[Metric, int | None]:
    if (to_n := _TIME_TO_N.fullmatch(name)) and 0 < int(to_n[1]) < 10**9:
        return METRICS["ttf"], int(to_n[1])
    if name in METRICS and name != "ttf":
        return METRICS[name], None
    if name == "ttf" or to_n:
        raise TargetError(f"{text!r} lacks a number of tokens", fix="write it as in 'ttf64_p99'")
    known = [metric for metric in METRICS if metric != "ttf"] + ["ttf64"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise TargetError(f"{text!r}: unknown metric {name!r}", fix=f"{hint}{list_metrics()}")


def _quantile_of(metric: Metric, statistic: str | None, text: str) -> Fraction | None:
    if metric.kind != "time":
        if statistic is not None:
            problem = f"{text!r}: {metric.name} is one number per run and has no {statistic}"
            raise TargetError(problem, fix=f"write it as in {metric.example!r}")
        return None
    percentile = _PERCENTILE.fullmatch(statistic or "")
    is_short = percentile is not None and len(percentile[1]) <= MOST_DIGITS
    if percentile is None or not is_short or not 0 < Fraction(percentile[1]) < 100:
        found = f"has {statistic!r} in place of a percentile" if statistic else "has no percentile"
        raise TargetError(f"{text!r} {found}", fix=f"write it as in {metric.example!r} (or p99.9)")
    quantile = Fraction(percentile[1]) / 100
    if not is_provable(quantile):
        problem = f"{text!r}: {statistic} takes more samples than a load has"
        raise TargetError(problem, fix="write a percentile from p0.00001 to p99.99999")
    return quantile


def _number_of(written: str, metric: Metric, text: str) -> Fraction:
    digits, _, zeros = written.replace(",", "").replace("_", "").partition("e")
    if len(digits) > MOST_DIGITS or len(zeros) > 2 or int(zeros or 0) > MOST_ZEROS:
        problem = f"{text!r}: the limit has too many digits"
        raise TargetError(problem, fix=f"write it as in {metric.example!r}")
    return Fraction(digits) * Fraction(10) ** int(zeros or 0)


def _limit_of(metric: Metric, number: Fraction, unit: str, text: str) -> tuple[Fraction, bool]:
    fix = f"write it as in {metric.example!r}"
    if metric.kind == "time":
        if unit not in TIME_NS or not number:
            units = ", ".join(TIME_NS)
            raise TargetError(f"{text!r}: the limit must be a time in {units}", fix=fix)
        return number * TIME_NS[unit], False
    if metric.kind == "share":
        share = number / 100 if unit == "%" else number
        if unit not in ("%", "") or not 0 <= share <= 1:
            raise TargetError(f"{text!r}: the limit must be between 0 % and 100 %", fix=fix)
        return share, False
    rate = _RATE_UNIT.fullmatch(unit)
    if rate is None or rate["counts"] != metric.counts:
        units = ", ".join(f"{metric.counts}/{per}" for per in ("s", "min", "s/gpu"))
        raise TargetError(f"{text!r}: the limit must be a rate in {units}", fix=fix)
    return number / (60 if rate["per"] == "min" else 1), rate["gpu"] is not None


def _instead(problem: str, spelling: str) -> TargetError:
    """Advise a spelling, or what it takes besides where that alone makes no target either."""
    try:
        parse_target(spelling)
    except TargetError as error:
        return TargetError(problem, fix=error.fix)
    return TargetError(problem, fix=f"write {spelling!r}")


def _with_relation(text: str, relation: str) -> str:
    return re.sub(r"<=|>=|≤|≥", relation, text.strip())


def _malformed(text: str) -> TargetError:
    """Say what a target looks like, with this one's own name where that is a metric's."""
    word = re.match(r"[a-z0-9]*", _plain(text))
    name = re.sub(r"[0-9]+$", "", word[0]) if word else ""
    near = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.5) if name != "e" else ["e2e"]
    example = METRICS[near[0]].example if near else METRICS["ttf"].example
    with_equality = re.sub(r"([<>])(?!=)", r"\1=", _plain(text))
    if with_equality != _plain(text) and _FORM.fullmatch(with_equality):
        return _instead(f"{text!r} is not a target", with_equality)
    fix = f"write it as in {example!r}: metric, percentile, <= or >=, limit, unit; {list_metrics()}"
    return TargetError(f"{text!r} is not a target", fix=fix)


def list_metrics() -> str:
    """Return a line that names every metric by an example."""
    return "metrics: " + ", ".join(metric.example for metric in METRICS.values())


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
