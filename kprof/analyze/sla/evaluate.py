"""The judgement of SLA targets on service runs, or on the steps of a recorded run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kprof.analyze.attribution.steps import StepTimes, time_steps
from kprof.analyze.capture_quality.overhead import measure_cost
from kprof.analyze.sla.independence import (
    Independent,
    Marks,
    Spells,
    count_independent,
    fewest,
)
from kprof.analyze.sla.percentiles import bound_share, ranks_of
from kprof.analyze.sla.rates import (
    LEAST_SLICES,
    Counted,
    answers_counted,
    bound_rate,
    find_window,
    tokens_counted,
)
from kprof.analyze.sla.responses import Response, Responses, Times
from kprof.analyze.sla.samples import (
    NEVER,
    Range,
    Sample,
    Values,
    in_order,
    independent_at,
    measure_of,
    samples_of,
    spells_in,
    time_to_end,
    total_tokens,
)
from kprof.analyze.sla.target_verdict import (
    Judgement,
    Verdict,
    judge_rate,
    judge_share,
    judge_times,
    not_measured,
)
from kprof.analyze.sla.targets import Target, TargetError
from kprof.errors import counted
from kprof.trace import Caveat, Trace

LONGEST_SPELL_S = 10.0
"""The longest slow spell of a service that is assumed where nothing else is told."""
PER_REQUEST = ("ttft", "ttf", "tpot", "itl", "stall", "e2e")
"""Times that one request has one of, so that it can keep or break their limit."""
NO_STEADY_STATE = (
    f"no steady state of {LEAST_SLICES} answers' time or more between the first answer and the "
    "last request"
)


@dataclass(frozen=True)
class Assessment:
    """A target and its verdict, with the measurement."""

    judgements: tuple[Judgement, ...]
    doubts: tuple[Caveat, ...] = ()
    num_gpus: int | None = None
    spell_s: float | None = None
    """The longest slow spell on which "met" rests; missing: none is assumed."""

    @property
    def verdict(self) -> Verdict:
        """Met if all targets are, missed if one is."""
        verdicts = {judgement.verdict for judgement in self.judgements}
        if "MISSED" in verdicts:
            return "MISSED"
        return "MET" if verdicts == {"MET"} else "NOT PROVEN"

    @property
    def exit_code(self) -> int:
        """0 all proven met, 1 one proven missed, 2 one cannot be judged on this, 3 neither."""
        if any(judgement.verdict == "NOT MEASURED" for judgement in self.judgements):
            return 1 if self.verdict == "MISSED" else 2
        return {"MET": 0, "MISSED": 1}.get(self.verdict, 3)


def judge(
    runs: Sequence[Responses],
    targets: Sequence[Target],
    num_gpus: int | None = None,
    spell_s: float = LONGEST_SPELL_S,
) -> tuple[Judgement, ...]:
    """Judge every target on the requests of all runs.

    "Met" rests on slow spells that last no longer than `spell_s`; with 0, on none at all.

    Raises:
        TargetError: one counts requests within limits, and no target has a limit for a request.
    """
    if not 0 <= spell_s < np.inf:
        problem = f"the longest slow spell must be 0 s or more and finite, not {spell_s:g} s"
        raise TargetError(problem, fix="give the longest slow spell in s, as --spell 10; 0: none")
    limits = [target for target in targets if target.metric.name in PER_REQUEST]
    for target in targets:
        if target.metric.name in ("attainment", "goodput") and not limits:
            problem = f"{target.text!r} counts requests within time limits, and none is given"
            raise TargetError(problem, fix="add such a limit, as --target 'ttft_p95<=200ms'")
    every = spells_in(runs, [_all_of(run) for run in runs], spell_s)
    return tuple(_judge_one(target, runs, limits, num_gpus, every) for target in targets)


def _all_of(run: Responses) -> Sample:
    """Return a sample of all requests, without times."""
    due_ns = np.array([row.due_ns for row in run.rows], np.int64)
    return Sample(np.zeros(len(due_ns)), np.zeros(len(due_ns)), due_ns=due_ns)


def _judge_one(
    target: Target,
    runs: Sequence[Responses],
    limits: list[Target],
    num_gpus: int | None,
    every: Spells | None,
) -> Judgement:
    name = target.metric.name
    if name == "step":
        return not_measured(target, "steps are those of a recorded run, this is a result file")
    if target.metric.kind == "time":
        samples = samples_of(target, runs)
        # Answers that are left out tell nothing of the spells in which they were due.
        spells = every and spells_in(runs, samples, every.longest_s)
        return judge_times(target, samples, spells)
    if name == "errors":
        return _judge_errors(target, runs, every)
    if name == "attainment":
        return _judge_attainment(target, runs, limits, every)
    return _judge_rate(target, runs, limits, num_gpus, every)


def _judge_errors(target: Target, runs: Sequence[Responses], spells: Spells | None) -> Judgement:
    outcomes = [np.array([row.outcome for row in in_order(run)], str) for run in runs]
    failed, lost = (
        [each == "failed" for each in outcomes],
        [each != "answered" for each in outcomes],
    )
    independent = fewest([count_independent(_one_each(marked)) for marked in (failed, lost)])
    num, limited = sum(len(each) for each in outcomes), _limited(independent, spells)
    at_least, at_most = (
        bound_share(sum(int(run.sum()) for run in marked), num, counted.num)
        for marked, counted in ((failed, independent), (lost, limited))
    )
    # One that the client cancelled might have been answered.
    return judge_share(target, at_most._replace(low=at_least.low), num, limited, spells)


def _limited(independent: Independent, spells: Spells | None) -> Independent:
    return spells.limit(independent) if spells else independent


def _one_each(runs: Sequence[npt.NDArray[np.bool_]]) -> list[Marks]:
    return [Marks(marked.astype(np.float64), np.ones(len(marked))) for marked in runs]


def _judge_attainment(
    target: Target, runs: Sequence[Responses], limits: list[Target], spells: Spells | None
) -> Judgement:
    tables = [np.array([worst_of(row, limits) for row in in_order(run)]) for run in runs]
    samples = [Sample(*table.reshape(-1, 2).T) for table in tables]
    low = np.concatenate([sample.low for sample in samples])
    high = np.concatenate([sample.high for sample in samples])
    independent = independent_at(samples, [1.0, *_percentile(high, target.limit)])
    limited = _limited(independent, spells)
    surely = bound_share(int((high <= 1).sum()), len(high), limited.num)
    perhaps = bound_share(int((low <= 1).sum()), len(low), independent.num)
    return judge_share(target, surely._replace(high=perhaps.high), len(high), limited, spells)


def _percentile(values: Values, share: float) -> list[float]:
    """Return the time that this share keeps: as many are slower as the target may lose."""
    if not 0 < share < 1:
        return []
    return [float(np.sort(values)[ranks_of(len(values), Fraction(repr(share))).estimate - 1])]


def keeps_limits(row: Response, limits: Sequence[Target]) -> tuple[bool, bool]:
    """Tell whether a request surely kept every limit, and whether it may have."""
    worst = worst_of(row, limits)
    return worst.high <= 1, worst.low <= 1


def worst_of(row: Response, limits: Sequence[Target]) -> Range:
    """Return how many times its limit the worst time of a request took, at least and at most.

    An answer that was complete before N tokens keeps a limit on the time to N tokens if its end
    does; what is undefined for a request is no limit to it.
    """
    times = [(_time_within(row, limit), limit.limit) for limit in limits]
    low = max(time.low / limit for time, limit in times)
    high = max(time.high / limit for time, limit in times)
    return Range(
        NEVER if row.outcome == "failed" else low, high if row.outcome == "answered" else NEVER
    )


def _time_within(row: Response, limit: Target) -> Range:
    time = measure_of(limit)(row)
    if time is None and limit.num_tokens is not None:
        time = time_to_end(row)
    return time or Range(0.0, 0.0)


def _judge_rate(
    target: Target,
    runs: Sequence[Responses],
    limits: list[Target],
    num_gpus: int | None,
    spells: Spells | None,
) -> Judgement:
    name = target.metric.name
    if target.is_per_gpu and num_gpus is None:
        return not_measured(target, "the number of GPUs is not known, give --gpus")
    answered = [row for run in runs for row in run.rows if row.outcome == "answered"]
    if name == "throughput" and any(total_tokens(row) is None for row in answered):
        return not_measured(target, "the number of output tokens is not recorded for all answers")
    windows = [find_window(run) for run in runs]
    known = [window for window in windows if window is not None]
    if len(known) < len(windows):
        return not_measured(target, NO_STEADY_STATE)
    rate, by_run = bound_rate(runs, known, _counted(name, limits))
    share = 1 / num_gpus if target.is_per_gpu and num_gpus else 1.0
    shown = rate._replace(
        low=rate.low * share,
        estimate=rate.estimate * share,
        high=rate.high * share,
        fastest=rate.fastest and rate.fastest * share,
    )
    found = judge_rate(target, shown, spells)
    return replace(found, by_run=tuple(r * share for r in by_run) if len(runs) > 1 else ())


def _counted(name: str, limits: list[Target]) -> Counted:
    if name == "throughput":
        return tokens_counted
    if name == "requests":
        return answers_counted

    def good_ones(row: Response, at_ns: Times) -> tuple[Times, Times]:
        there, _ = answers_counted(row, at_ns)
        surely, perhaps = keeps_limits(row, limits)
        return there * surely, there * perhaps

    return good_ones


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


def _sample(trace: Trace, times: StepTimes) -> tuple[Sample, tuple[Caveat, ...]]:
    by_whom = Caveat("step_clock", f"steps are timed by {times.clock}")
    if times.unrecorded_ns:
        values = np.array(times.unrecorded_ns, np.float64)
        cost = measure_cost(trace)
        slower = f", each {cost.difference}" if cost and cost.is_known else ""
        recorded = f"left out: {counted(len(times.recorded_ns), 'recorded step')}{slower}"
        return Sample(values, values), (by_whom, Caveat("recorded_steps_left_out", recorded))
    values = np.array(times.recorded_ns, np.float64)
    doubt = (
        "every step here was recorded, which slows a step down by a share that this run does not "
        "tell: met is met, but none counts as missed. Let the workload go on after the recording, "
        "then later steps are timed as well"
    )
    return Sample(np.zeros_like(values), values), (by_whom, Caveat("all_steps_recorded", doubt))
