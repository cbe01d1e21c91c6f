"""The outcome of the evidence in one sentence, with the next step."""

from __future__ import annotations

import math
from statistics import median

from kprof.comparison import CHOSEN, Claim, Comparison
from kprof.errors import counted
from kprof.kernels.correctness.levels import REJECT
from kprof.report.comparison_sections import format_value
from kprof.report.partner.evidence import Evidence, first_and_last, kernels_in
from kprof.report.partner.money import (
    MILLION,
    MONTH,
    STEPS,
    is_cheaper,
    is_credited,
    money_in,
    negated,
    written,
)
from kprof.report.partner.parts import Verdict
from kprof.report.partner.wording import (
    VERDICTS,
    change_in_words,
    gain_range,
    is_many_times_as_fast,
    time_within,
)

UNCHECKED = "Adopt the change once the quality gate has shown that the results stay correct"
KEPT_NOW = "every SLA target of the service is met now, and was not before"
UNPROVEN = "whether the service meets its SLA targets is not proven"
# Levels that a gate runs on the whole model, with all that was swapped in.
OF_MODELS = ("L2", "L3", "L4", "L5")
QUALITY, TARGETS = "quality of the results", "SLA targets"
SAVINGS = (
    (MONTH, "a month"),
    (MILLION, "per million tokens"),
    (STEPS, "per thousand steps"),
)
"""The units of a saving in the verdict, the most telling first."""
NOTHING = "There is nothing to report on: no run, no comparison, no service level and no cost."


def outcome_of(evidence: Evidence) -> Verdict:
    """Return the verdict: of the comparison if there is one, else of the run, else of the SLA."""
    comparison = evidence.headline
    if comparison is not None:
        return _of_comparison(evidence, comparison)
    if evidence.runs:
        return _of_run(evidence)
    _, level = first_and_last(evidence.service_levels)
    if level is not None:
        words = {
            "MET": ("Met, proven", "The service meets every SLA target; this is proven.", "good"),
            "MISSED": ("Missed, proven", "The service misses at least one SLA target.", "warning"),
        }
        unproven = "The measurement does not prove whether the service meets its SLA targets."
        return Verdict(*words.get(level.assessment.verdict, ("Not proven", unproven, "plain")))
    if lines := money_in(evidence):
        return Verdict("Cost", f"{lines[0].name} costs {written(lines[0].after)}.", "plain")
    return Verdict("No data", NOTHING, "plain")


def _of_comparison(evidence: Evidence, comparison: Comparison) -> Verdict:
    claim = comparison.headline
    word, tone = VERDICTS[claim.verdict], "plain"
    if claim.interval is None:
        return Verdict(word, f"{word}: {claim.why or 'no pair could be used.'}", tone)
    change = change_in_words(claim.interval, claim.metric)
    timed = claim.metric.name.removesuffix(" time").removeprefix("time per ")
    what = f"one {timed}" if claim.metric.unit == "ns" else "it"
    if claim.verdict == "FASTER":
        verb = "is" if is_many_times_as_fast(claim.interval, claim.metric) else "takes"
        sentence = f"With the change, {what} {verb} {change}"
    elif claim.verdict == "SLOWER":
        sentence, tone = f"With the change, {what} takes {change}: it is slower", "warning"
    elif claim.verdict == "SAME":
        effect = 100 * comparison.plan.smallest_effect
        sentence = f"The change makes no difference of {effect:g} % or more: {change}"
    elif claim.verdict == "INVALID":
        sentence = f"The comparison is not valid, so nothing is claimed: {claim.why}"
    else:
        sentence = f"The measurement does not show yet whether the change helps: {change}"
    if claim.verdict == "FASTER":
        return _of_faster(evidence, word, sentence)
    if claim.verdict == "SLOWER":
        sentence = "; ".join([sentence, *_besides(evidence)])
    return Verdict(word, f"{sentence.rstrip('.')}.", tone)


def _of_faster(evidence: Evidence, word: str, sentence: str) -> Verdict:
    """Return the verdict on a proven gain: good only where nothing else is open."""
    if bad := _rejected(evidence):
        return Verdict("Faster, but rejected", f"{sentence}; but {bad}.", "warning")
    sentence = "; ".join([sentence, *_besides(evidence)])
    if unproven := _open_claims(evidence):
        word = f"{word}; open: {' and '.join(unproven)}"
    return Verdict(word, f"{sentence.rstrip('.')}.", "open" if unproven else "good")


def _besides(evidence: Evidence) -> list[str]:
    """Return what a proven difference means for SLA targets and for money."""
    told = [KEPT_NOW] if _is_kept_now(evidence) else []
    told += [UNPROVEN] if _is_unproven(evidence) else []
    saved = _saving(evidence)
    return [*told, saved] if saved else told


def _open_claims(evidence: Evidence) -> list[str]:
    """Return what a faster change has not proven: that results stay correct, targets are met."""
    told = [] if _is_quality_shown(evidence) else [QUALITY]
    return [*told, TARGETS] if _is_unproven(evidence) else told


def _is_quality_shown(evidence: Evidence) -> bool:
    """Tell whether the gate has shown equivalent results of everything that was swapped in."""
    gates = evidence.gates
    return bool(gates) and all(gate.reached for gate in gates) and not _unchecked(evidence)


def _unchecked(evidence: Evidence) -> list[str]:
    """Return the swapped kernels that no check is of; a check of a whole model is of all."""
    if any(gate[name].state == "passed" for gate in evidence.gates for name in OF_MODELS):
        return []
    checked = {name for gate in evidence.gates for name in kernels_in(gate.subject)}
    return [name for name in _swapped(evidence) if name not in checked]


def _rejected(evidence: Evidence) -> str:
    """Return what forbids a faster change: a failed quality gate or a broken target."""
    if any(gate.reached == REJECT for gate in evidence.gates):
        return "its results are not good enough: the quality gate rejects it"
    _, level = first_and_last(evidence.service_levels)
    if level is not None and level.assessment.verdict == "MISSED":
        return "an SLA target is still missed"
    return ""


def _is_kept_now(evidence: Evidence) -> bool:
    """Tell whether a service level is proven kept that was proven broken before."""
    before, after = first_and_last(evidence.service_levels)
    if before is None or after is None:
        return False
    return (before.assessment.verdict, after.assessment.verdict) == ("MISSED", "MET")


def _is_unproven(evidence: Evidence) -> bool:
    """Tell whether the newest service level is proven neither kept nor broken."""
    _, level = first_and_last(evidence.service_levels)
    return level is not None and level.assessment.verdict == "NOT PROVEN"


def _saving(evidence: Evidence) -> str:
    if not is_credited(evidence):
        return ""
    lines = {line.name: line for line in money_in(evidence) if line.saved}
    for name, words in SAVINGS:
        if (line := lines.get(name)) and line.saved and line.saved.mid:
            if is_cheaper(line.saved) is None:
                return f"whether it saves money is not known: {written(line.saved)} {words}"
            if line.saved.mid >= 0:
                return f"it saves {written(line.saved)} {words}"
            return f"it costs another {written(negated(line.saved))} {words}"
    return ""


def _of_run(evidence: Evidence) -> Verdict:
    run = evidence.runs[-1]
    diagnosis = run.diagnosis
    is_alone = len(evidence.runs) == 1
    state = "Nothing was changed" if is_alone else "No comparison proves what changed"
    if diagnosis is None or not diagnosis.findings:
        nothing = f"{state}, and no rule found a change that would save time."
        return Verdict("Measured", nothing, "plain")
    best = diagnosis.findings[0]
    together = diagnosis.together
    if together is None or not together.high_ns:
        return Verdict("Measured", f"{state} yet. The first finding: {best.claim}.", "plain")
    step = max(together.step_ns, 1)
    saving = gain_range((together.low_ns or 0) / step, together.high_ns / step)
    sentence = f"{state} yet. Fixes are predicted to save {saving} of the time."
    return Verdict("Predicted, not proven", sentence, "plain")


def medians_of(comparison: Comparison, claim: Claim) -> tuple[float, float] | None:
    """Return the median of A and of B over the pairs that count."""
    place = comparison.plan.metrics.index(claim.metric)
    values = [(p.a[place], p.b[place]) for p in comparison.pairs if not p.problem]
    good = [pair for pair in values if all(map(math.isfinite, pair))]
    if not good:
        return None
    return median(a for a, _ in good), median(b for _, b in good)


def medians_in_words(comparison: Comparison, claim: Claim) -> tuple[str, str] | None:
    """Write the median of A and of B with the digits that the interval of the claim allows."""
    medians = medians_of(comparison, claim)
    if medians is None or claim.verdict == "INVALID":
        return None
    if claim.metric.unit != "ns":
        return format_value(medians[0], claim.metric), format_value(medians[1], claim.metric)
    interval = claim.interval
    share = (interval.high - interval.low) / 2 / interval.ratio if interval else 0.05
    return time_within(medians[0], min(share, 0.5)), time_within(medians[1], min(share, 0.5))


def next_steps(evidence: Evidence) -> list[str]:
    """Return what to do next, the most urgent first, at most five things."""
    steps = [*_about_comparison(evidence), *_about_gaps(evidence), *_about_findings(evidence)]
    if steps:
        return steps[:5]
    if evidence.runs:
        return ["No change is proposed. To predict the gain of one: kprof whatif RUN."]
    return ["This evidence alone proposes no next step; record a run: kprof run SCRIPT."]


def _about_comparison(evidence: Evidence) -> list[str]:
    comparison = evidence.headline
    if comparison is None:
        return []
    claim = comparison.headline
    if claim.verdict == "FASTER":
        if bad := _rejected(evidence):
            return [f"Do not adopt the change as it is: {bad}."]
        if _is_quality_shown(evidence):
            return ["Adopt the change."]
        return [f"{UNCHECKED}{_checked_so_far(evidence)}."]
    if claim.verdict == "SLOWER":
        return ["Drop the change: it is proven slower."]
    if claim.verdict == "SAME":
        return ["Do not spend more on this change: it makes no difference that matters."]
    more = (
        f"about {counted(claim.pairs_needed, 'more pair')}" if claim.pairs_needed else "more pairs"
    )
    if claim.verdict == "INCONCLUSIVE":
        return [f"Measure longer before deciding: {more} would probably decide."]
    return ["Measure again: this comparison is not valid."]


def _checked_so_far(evidence: Evidence) -> str:
    """Say which levels of the gate everything that was swapped in has passed."""
    passed = [
        {level.name for level in gate.levels if level.state == "passed"} for gate in evidence.gates
    ]
    by_all = sorted(set.intersection(*passed)) if passed else []
    return f"; so far {' and '.join(by_all)} passed" if by_all else ""


def _about_gaps(evidence: Evidence) -> list[str]:
    steps = []
    if _is_unproven(evidence):
        steps.append(f"Measure the service longer, as {UNPROVEN}{_enough_to_prove(evidence)}.")
    comparison = evidence.headline
    verdict = comparison.headline.verdict if comparison else None
    if verdict == "FASTER" and (unchecked := _unchecked(evidence)):
        names = " ".join(unchecked)
        steps.append(f"Check that they do: kprof kernels check {names} --json > gate.json")
    if comparison is not None and evidence.calibration is None and not evidence.calibration_text:
        steps.append(
            "Measure the error rate of such verdicts on this machine: kprof selftest --json > "
            "selftest.json"
        )
    return steps


def _enough_to_prove(evidence: Evidence) -> str:
    """Say how many measurements the hardest SLA target needs for a proof, and how many exist."""
    judgements = evidence.service_levels[-1].assessment.judgements
    most = max(judgements, key=lambda one: one.samples_needed or 0, default=None)
    if most is None or not most.samples_needed:
        return ""
    enough = f": about {counted(most.samples_needed, 'measurement')} like these would prove it"
    return f"{enough}, instead of {most.num_samples:,}" if most.num_samples else enough


def _swapped(evidence: Evidence) -> list[str]:
    """Return the kernels that were swapped in to be compared."""
    comparison = evidence.headline
    _, is_swap, kernels = (comparison.b if comparison else "").partition("--swap ")
    return kernels_in(kernels.removesuffix(CHOSEN)) if is_swap else []


def _about_findings(evidence: Evidence) -> list[str]:
    if not evidence.runs or evidence.runs[-1].diagnosis is None:
        return []
    findings = evidence.runs[-1].diagnosis.findings
    found = [one for one in findings if one.saving is not None and one.saving.high_ns]
    # A single run was recorded before the change that it is compared with.
    tried = _swapped(evidence) if len(evidence.runs) == 1 else []
    found = [one for one in found if one.swap not in tried]
    steps = []
    for one in found[:2]:
        assert one.saving is not None
        step = max(one.saving.step_ns, 1)
        gain = gain_range((one.saving.low_ns or 0) / step, (one.saving.high_ns or 0) / step)
        proof = f"; to prove it: {one.command}" if one.command else ""
        how = f" of the time{proof or f'; how: kprof playbook {one.playbook}'}"
        advice = evidence.advice.get(one.rule)
        title = advice.title if advice else one.rule.replace("_", " ")
        steps.append(f"{title}: a fix may save {gain}{how}")
    return steps
