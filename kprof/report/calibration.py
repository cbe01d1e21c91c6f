"""The error rates of verdicts: as sections, as plain data, and as the sentence on each report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kprof.analyze.calibration.error_rates import EFFECTS, Calibration, Judged, Rate, Scenario
from kprof.report.section import Column, Facts, Part, Section, Table, Text

ORDER = 90
IN_TEXT = tuple(f"{effect:g}" for effect in EFFECTS)


def sections_of_calibration(calibration: Calibration) -> list[Section]:
    """Render targets first, then rates by scenario: all pairs, stopping early."""
    scenarios = calibration.scenarios
    sections = [
        _targets(calibration),
        Section("With all pairs of the plan, %", ORDER, _with_all_pairs(scenarios)),
        Section("Stopping early: rates in %, and pairs", ORDER, _stopping(scenarios)),
    ]
    lines = [
        Text(f"{s.name}: {s.says}; {s.fixed.false_positive.of:,} comparisons without a difference.")
        for s in scenarios
    ]
    return [*sections, Section("The noises", ORDER, tuple(lines))]


def most_false(calibration: Calibration) -> Rate | None:
    """Return how often a difference was seen where there is none, in the worst noise.

    Of few comparisons the share may be higher than that of the target, which allows for chance.
    """
    rates = [scenario.fixed.false_positive for scenario in calibration.scenarios]
    return max((rate for rate in rates if rate.of), key=lambda rate: rate.share, default=None)


def badge_of(calibration: Calibration) -> Facts:
    """Return how often verdicts err, from which difference on they find, and when that was seen."""
    items = []
    if false := most_false(calibration):
        noises = f"in the worst of {len(calibration.scenarios)} noises"
        what = f"of {false.of:,} comparisons without a difference, {noises}"
        items.append(("False-positive rate", f"{_percent(false.share)} %", what))
    if calibration.least_found:
        found = f"found by four in five comparisons of {calibration.num_pairs} pairs"
        items.append(("Minimum detectable effect", f"{_least(calibration.least_found)} %", found))
    where = f"{calibration.device}, driver {calibration.driver}"
    items.append(
        ("Calibrated", calibration.date, where if calibration.driver else calibration.device)
    )
    return Facts(tuple(items))


def describe(calibration: Calibration) -> str:
    """Return the sentence that says how often this instrument was wrong, and where."""
    where = {
        "simulated": "On simulated noise",
        "gpu": f"On {calibration.device}, driver {calibration.driver}",
        "host": f"On this host's clock ({calibration.device})",
    }[calibration.kind]
    false = most_false(calibration)
    if false is None:
        return f"{where}, {calibration.date}: kprof selftest could not measure how often they err."
    missed = [target.name for target in calibration.targets if not target.is_met]
    least = calibration.least_found
    return (
        f"{where}, {calibration.date}: of {false.of:,} comparisons without a difference "
        f"{_percent(false.share)} % had an interval that leaves out 1, in the worst of "
        f"{len(calibration.scenarios)} noises, with {calibration.num_pairs} pairs"
        + (f"; four in five found differences from {_least(least)} % on." if least else ".")
        + (f" Not reached: {', '.join(missed)}." if missed else "")
        + (f" Not measured: {'; '.join(calibration.missing)}." if calibration.missing else "")
    )


def _targets(calibration: Calibration) -> Section:
    columns = (
        Column("Target", "name"),
        Column("Worst", "right"),
        Column("To reach", "right"),
        Column("Met"),
        Column("Where", "name"),
    )
    rows = tuple(
        (
            target.name,
            f"{_percent(target.value)} %",
            f"{'≤' if target.better == 'lower' else '≥'} {100 * target.reach:.3g} %",
            "yes" if target.is_met else "NO",
            target.where,
        )
        for target in calibration.targets
    )
    doubts = [Text(doubt.text, "warning") for doubt in calibration.doubts]
    doubts += [Text(f"Not measured: {what}.", "warning") for what in calibration.missing]
    return Section(
        "Targets, each in its worst noise",
        ORDER,
        (*doubts, Table(columns, rows, terminal_rows=len(rows)), Text(_how_many(calibration))),
    )


def _how_many(calibration: Calibration) -> str:
    judged = [scenario.fixed for scenario in calibration.scenarios]
    each = _least_to_most([rate.of for one in judged for rate in one.power.values()])
    return (
        f"In each noise {_least_to_most([one.false_positive.of for one in judged])} comparisons of "
        f"{calibration.num_pairs} pairs without a difference, {each} with each; "
        f"seed {calibration.seed}, in {calibration.took_s:.0f} s."
    )


def _least_to_most(numbers: Sequence[int]) -> str:
    least, most = min(numbers, default=0), max(numbers, default=0)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _with_all_pairs(scenarios: Sequence[Scenario]) -> tuple[Part, ...]:
    columns = (
        Column("Noise", "name"),
        Column("False", "right"),
        *(Column(f"{100 * effect:g} %", "right") for effect in EFFECTS),
        Column("Same", "right"),
        Column("at 1 %", "right"),
        Column("Covers", "right"),
        Column("Wrong", "right"),
        Column("Least", "right"),
    )
    rows = []
    for scenario in scenarios:
        judged = scenario.fixed
        rows.append(
            (
                scenario.name,
                _rate(judged.false_positive),
                *(_rate(judged.power.get(effect)) for effect in IN_TEXT),
                _rate(judged.same),
                _rate(judged.same_at.get("0.01")),
                _rate(judged.coverage),
                str(judged.wrong_direction.count),
                _least(scenario.least_found),
            )
        )
    legend = (
        "False: no difference, but the interval excludes 1. 1, 2, 5 %: share of such differences "
        "found. Same: SAME where there is none, and at 1 %. Wrong: FASTER for SLOWER, or the "
        "reverse. Least: the smallest difference found in 80 % of comparisons."
    )
    return Table(columns, tuple(rows), terminal_rows=len(rows)), Text(legend)


def _stopping(scenarios: Sequence[Scenario]) -> tuple[Part, ...]:
    """Lay out how many pairs were taken, beside the rates that stopping could have spoilt."""
    columns = (
        Column("Noise", "name"),
        Column("False", "right"),
        Column("Covers", "right"),
        Column("1 %", "right"),
        *(Column(f"at {100 * effect:g} %", "right") for effect in (0.0, *EFFECTS)),
    )
    rows = []
    for scenario in scenarios:
        judged = scenario.early
        pairs = [judged.pairs.get(effect) for effect in ("0", *IN_TEXT)]
        rates = (judged.false_positive, judged.coverage, judged.power.get("0.01"))
        taken = ("" if mean is None else f"{mean:.1f}" for mean in pairs)
        rows.append((scenario.name, *(_rate(rate) for rate in rates), *taken))
    legend = "At 0, 1, 2, 5 %: pairs that were taken on average with such a difference."
    return Table(columns, tuple(rows), terminal_rows=len(rows)), Text(legend)


def _rate(rate: Rate | None) -> str:
    return "" if rate is None or not rate.of else _percent(rate.share)


def _least(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.2f}" if share < 1 else f"{100 * share:.0f}"


def _percent(share: float) -> str:
    if share == 1:
        return "100"
    # A partial calibration must not look complete.
    return text if (text := f"{100 * share:.1f}") != "100.0" else "> 99.9"


def result_of_calibration(calibration: Calibration) -> dict[str, object]:
    """Return the calibration as plain data: the worst rates on top, then all of them."""
    scenarios = calibration.scenarios
    planted = [s.fixed for s in scenarios if s.fixed.power]
    coverage = [judged.coverage.share for judged in planted]
    power = {
        effect: [judged.power[effect].share for judged in planted if effect in judged.power]
        for effect in IN_TEXT
    }
    false = most_false(calibration)
    return {
        "schema": calibration.schema,
        "what": (
            "with all pairs of the plan, the worst of the scenarios; of wrong_direction the sum"
        ),
        "false_positive_rate": false.share if false else None,
        "power": {effect: min(shares, default=None) for effect, shares in power.items()},
        # The one furthest from its target, in either direction.
        "coverage": max(coverage, key=lambda c: abs(c - 1 + calibration.alpha), default=None),
        "wrong_direction": sum(j.wrong_direction.count for j in planted) if planted else None,
        "least_found": calibration.least_found,
        "is_met": calibration.is_met,
        "targets": [{**asdict(t), "is_met": t.is_met} for t in calibration.targets],
        **{
            name: getattr(calibration, name)
            for name in ("kind", "device", "driver", "date", "num_pairs", "num_comparisons")
        },
        **{name: getattr(calibration, name) for name in ("seed", "smallest_effect", "alpha")},
        "took_s": round(calibration.took_s, 2),
        "doubts": [asdict(doubt) for doubt in calibration.doubts],
        "missing": list(calibration.missing),
        "scenarios": [_plain(scenario) for scenario in scenarios],
    }


def _plain(value: object) -> object:
    """Return dataclasses as dictionaries, and a rate with its share and its interval."""
    if isinstance(value, Rate):
        low, high = value.interval if value.of else (None, None)
        share = value.share if value.of else None
        return {"count": value.count, "of": value.of, "rate": share, "low": low, "high": high}
    if isinstance(value, Scenario | Judged):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value
