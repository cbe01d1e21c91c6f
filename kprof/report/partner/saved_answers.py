"""What commands kept or printed with --json, read back as what it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date
from fractions import Fraction
from typing import Any

import msgspec

from kprof.analyze.calibration.result import Calibration
from kprof.analyze.cost.answer import Costs
from kprof.analyze.cost.price import Band, Price
from kprof.analyze.cost.sheet import Figure, Missing
from kprof.analyze.sla.curves import Curves
from kprof.analyze.sla.judge import Assessment
from kprof.analyze.sla.targets import parse_target
from kprof.analyze.sla.verdict import Judgement
from kprof.gate.result import GateReport
from kprof.report.sla import Judged

Plain = Mapping[str, Any]


def service_level_in(content: Plain, source: str = "") -> Judged:
    """Read what `kprof sla --json` printed."""
    judgements = tuple(_judgement(one) for one in content["targets"])
    doubts = tuple(str(doubt) for doubt in content["doubts"])
    # What an older kprof printed has no curves.
    kept = content.get("curves")
    return Judged(
        source or content["source"],
        Assessment(judgements, doubts, content["gpus"], content.get("spell_s")),
        curves=None if kept is None else msgspec.convert(kept, Curves),
    )


def _judgement(content: Plain) -> Judgement:
    return Judgement(
        parse_target(content["target"]),
        content["verdict"],
        content["why"],
        _time(content["estimate"]),
        _time(content["low"]),
        _time(content["high"]),
        content["samples"],
        content["independent_samples"],
        content["left_out"],
        content["why_left_out"],
        content["samples_needed"],
        tuple(value for v in content["by_run"] if (value := _time(v)) is not None),
        load_s_needed=content.get("load_s_needed"),
    )


def _time(value: object) -> float | None:
    """Read a value; one that is never reached is infinite."""
    if value is None:
        return None
    return math.inf if value == "never" else float(value)  # type: ignore[arg-type]


def costs_in(content: Plain) -> Costs:
    """Read what `kprof cost --json` printed; the parts of a bill are not kept."""
    return Costs(
        as_of=_day(content["as_of"]),
        price=_price(content["price"]) if content["price"] else None,
        figures=tuple(_figure(one) for one in content["figures"]),
        missing=tuple(Missing(one["topic"], tuple(one["give"])) for one in content["missing"]),
        warnings=tuple(content["warnings"]),
        notes=tuple(content["notes"]),
    )


def _figure(content: Plain) -> Figure:
    return Figure(
        content["topic"],
        content["name"],
        content["unit"],
        _band(content),
        content["formula"],
        tuple(_price(one) for one in content["prices"]),
    )


def _price(content: Plain) -> Price:
    return Price(
        content["name"],
        _band(content["usd_per_gpu_hour"]),
        _day(content["oldest"]),
        _day(content["newest"]),
        tuple(content["sources"]),
    )


def _band(content: Plain) -> Band:
    low, middle, high = (Fraction(repr(float(content[name]))) for name in ("low", "mid", "high"))
    return Band(low, middle, high)


def _day(text: str) -> date:
    return date.fromisoformat(text)


def gate_in(content: Plain) -> GateReport:
    """Read a report of the quality gate; a number that was not finite is not known."""
    levels = [
        {**level, "measures": [_measure(one) for one in level["measures"]]}
        for level in content["levels"]
    ]
    return msgspec.convert({**content, "levels": levels}, GateReport, strict=False)


def _measure(content: Plain) -> dict[str, Any]:
    known = {name: content[name] for name in ("value", "threshold")}
    return {**content, **{n: math.nan if v is None else v for n, v in known.items()}}


def calibration_in(content: Plain) -> Calibration:
    """Read what `kprof selftest --json` printed, or what it keeps for this machine."""
    return msgspec.convert(content, Calibration)
