"""The time of a step, judged on a recorded run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kprof.analyze.overhead import measure_cost
from kprof.analyze.sla.judge import Assessment
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.targets import Target
from kprof.analyze.sla.verdict import Judgement, judge_times, not_measured
from kprof.analyze.steps import StepTimes, time_steps
from kprof.trace import Trace

OTHER_METRICS = "a recorded run has steps, and no requests: give a result file of a load generator"


def judge_steps(trace: Trace, targets: Sequence[Target]) -> Assessment:
    """Judge the targets on steps of the run that were not recorded, else on recorded ones."""
    times = time_steps(trace)
    sample, doubts = _sample(trace, times)
    return Assessment(tuple(_judge(target, sample) for target in targets), doubts)


def _judge(target: Target, sample: Sample) -> Judgement:
    if target.metric.name != "step":
        return not_measured(target, OTHER_METRICS)
    if not len(sample.high):
        return not_measured(target, "the run has no step that is marked")
    return judge_times(target, [sample])


def _sample(trace: Trace, times: StepTimes) -> tuple[Sample, tuple[str, ...]]:
    by_whom = f"steps are timed by {times.clock}"
    if times.unrecorded_ns:
        values = np.array(times.unrecorded_ns, np.float64)
        cost = measure_cost(trace)
        slower = f", each {cost.difference}" if cost and cost.is_known else ""
        recorded = f"left out: {len(times.recorded_ns)} steps that were recorded{slower}"
        return Sample(values, values), (by_whom, recorded)
    values = np.array(times.recorded_ns, np.float64)
    doubt = (
        "every step here was recorded, which slows a step down by a share that this run does not "
        "tell: met is met, but none counts as missed. Let the workload go on after the recording, "
        "then later steps are timed as well"
    )
    return Sample(np.zeros_like(values), values), (by_whom, doubt)
