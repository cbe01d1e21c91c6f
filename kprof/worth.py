"""What a comparison means to whoever pays: targets that A and B keep, and what B saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import median

import numpy as np

from kprof.analyze.cost.answer import Costs
from kprof.analyze.sla.judge import Assessment
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.verdict import judge_times, not_measured
from kprof.comparison import Comparison
from kprof.cost import calculate
from kprof.errors import KprofError
from kprof.report.section import Section, Text
from kprof.report.sla import Judged, sections_of_sla

ONLY_STEPS = "a comparison has steps, and no requests: give a result file to kprof sla"


def assess(comparison: Comparison, targets: Sequence[Target]) -> dict[str, Assessment]:
    """Return how A and how B keep the targets, by the times of their single steps."""
    assessed = {}
    for arm, runs in comparison.steps_ns.items():
        samples = [Sample(values, values) for values in (np.array(run, float) for run in runs)]
        judged = [
            judge_times(target, samples)
            if target.metric.name == "step" and samples
            else not_measured(target, ONLY_STEPS)
            for target in targets
        ]
        assessed[arm] = Assessment(tuple(judged))
    return assessed


def check_worth(targets: Sequence[Target], given: Mapping[str, str | None]) -> None:
    """See that targets can be judged and costs be computed, before hours are spent on samples.

    Raises:
        KprofError: a target is not one of steps, or a fact of the costs cannot be true.
    """
    for target in targets:
        if target.metric.name != "step":
            raise KprofError(
                f"{target.text!r}: kprof ab times steps, and no requests",
                fix="give a target such as step_p50<=60ms; of requests, a result file to kprof sla",
            )
    if any(given.values()):
        _costs({**given, "step_s": "1", "speedup": "1"})


def _costs(given: Mapping[str, str | None]) -> Costs:
    known = {name: value for name, value in given.items() if value is not None}
    return calculate({"gpus": "1", **known}, date.today())


def sections_of_targets(assessed: Mapping[str, Assessment]) -> list[Section]:
    """Render the targets of each arm."""
    sections = []
    for arm, assessment in assessed.items():
        for section in sections_of_sla(Judged(arm, assessment)):
            sections.append(replace(section, title=f"{section.title} of {arm}", order=20))
    return sections


def price(comparison: Comparison, given: Mapping[str, str | None]) -> Costs | None:
    """Return what B's steps cost and save, or None where no step was timed or no gain proven.

    `given` has the names of `kprof cost`'s facts. The band of the speed-up is the interval of the
    verdict, so that the money is no surer than the time.
    """
    claim = comparison.headline
    if claim.metric.unit != "ns" or claim.interval is None or claim.verdict not in PROVEN:
        return None
    place = comparison.plan.metrics.index(claim.metric)
    step_s = median(pair.b[place] for pair in comparison.pairs if not pair.problem) / 1e9
    interval = claim.interval
    speedup = ",".join(repr(1 / ratio) for ratio in (interval.high, interval.ratio, interval.low))
    return _costs({**given, "step_s": repr(step_s), "speedup": speedup})


PROVEN = ("FASTER", "SLOWER")


def no_price(comparison: Comparison) -> Section:
    """Say why nothing is saved."""
    why = f"The verdict is {comparison.headline.verdict}, so B is not credited with any saving."
    return Section("Cost", 30, (Text(why),))
