"""What a comparison means to whoever pays: targets that A and B keep, and what B saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import mean

import numpy as np

from kprof.ab.pricing import calculate
from kprof.ab.variants import AbOptions
from kprof.analyze.cost.answer import Costs
from kprof.analyze.cost.facts import facts_of
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import judge_times, not_measured
from kprof.analyze.sla.targets import Target
from kprof.comparison import Comparison
from kprof.errors import KprofError
from kprof.report.costs import MISSING_FACTS, sections_of_costs
from kprof.report.section import Part, Section, Table, Text
from kprof.report.sla_verdict import METHOD, NOTES, Judged, sections_of_sla
from kprof.report.sla_verdict import TITLE as TARGETS

HOW_JUDGED = Text(METHOD, "muted")
OF_B = "The cost of steps as long as B's mean, and the saving against A's."
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


def _costs(given: Mapping[str, str | None], gpu: str | None = None) -> Costs:
    known = {name: value for name, value in given.items() if value is not None}
    return calculate({"gpus": "1", **known}, date.today(), ran_on=gpu)


def section_of_targets(assessed: Mapping[str, Assessment]) -> Section:
    """Render the targets of A and of B."""
    parts: list[Part] = []
    for arm, assessment in assessed.items():
        for section in sections_of_sla(Judged(arm, assessment)):
            # A window alone holds too few steps to say more than noise.
            if section.title in (TARGETS, NOTES):
                parts += [_of_arm(part, arm) for part in section.parts if part != HOW_JUDGED]
    return Section("Targets", 20, (*parts, HOW_JUDGED))


def _of_arm(part: Part, arm: str) -> Part:
    """Say whose a part is, where it speaks."""
    return replace(part, text=f"{arm}: {part.text}") if isinstance(part, Text) else part


def section_of_costs(costs: Costs) -> Section:
    """Render what B costs and saves, topic by topic."""
    first, *others = sections_of_costs(costs)
    parts: list[Part] = [Text(OF_B), *first.parts]
    for section in others:
        where = ", for kprof cost to tell" if section.title == MISSING_FACTS else ""
        parts.append(Text(f"{section.title}{where}:"))
        is_first = not any(isinstance(part, Table) for part in parts)
        # What the caption of every table says is said above the first.
        parts += [
            replace(part, caption="") if isinstance(part, Table) and not is_first else part
            for part in section.parts
        ]
    return Section(first.title, 30, tuple(parts))


def price(comparison: Comparison, given: Mapping[str, str | None]) -> Costs | None:
    """Return what B's steps cost and save, or None where no step was timed or no gain proven.

    `given` has the names of `kprof cost`'s facts. Where it has no price, that of the GPU counts
    that the steps ran on. All of it is about means, for a stall costs as much as any other time:
    the band of the speed-up is the interval of the mean, so the money is no surer than the time.
    """
    claim = comparison.headline
    if claim.metric.unit != "ns" or claim.mean is None or claim.verdict not in PROVEN:
        return None
    interval = claim.mean
    speedup = ",".join(repr(1 / ratio) for ratio in (interval.high, interval.ratio, interval.low))
    measured = {"step_s": repr(_mean_of_b(comparison, 0) / 1e9), "speedup": speedup}
    for place, other in enumerate(comparison.claims):
        if other.metric.unit == "J" and other.verdict != "INVALID":
            measured["joules_per_step"] = repr(_mean_of_b(comparison, place))
    return _costs({**given, **measured}, comparison.facts.get("GPU"))


def _mean_of_b(comparison: Comparison, place: int) -> float:
    return mean((pair.mean_b or pair.b)[place] for pair in comparison.pairs if not pair.problem)


PROVEN = ("FASTER", "SLOWER")


def is_asked_for_costs(options: AbOptions) -> bool:
    """Tell whether costs are wanted; tokens of a step may be told for the energy of a token."""
    told = {name for name, value in options.facts.items() if value is not None}
    return bool(told - {"tokens_per_step"} if options.energy else told)


def tokens_per_step(given: Mapping[str, str | None]) -> float | None:
    """Return how many tokens a step has, if that was told.

    Raises:
        KprofError: it is no number above 0.
    """
    tokens = facts_of({"tokens_per_step": given.get("tokens_per_step")}).tokens_per_step
    return None if tokens is None else float(tokens)


def no_price(comparison: Comparison) -> Section:
    """Say why nothing is saved."""
    why = f"The verdict is {comparison.headline.verdict}, so B is not credited with any saving."
    return Section("Cost", 30, (Text(why),))
