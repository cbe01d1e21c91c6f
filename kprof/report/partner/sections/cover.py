"""The cover: the verdict in one sentence, its subject, and the error rate of the measurement."""

from __future__ import annotations

from kprof.analyze.calibration.error_rates import Calibration
from kprof.report.calibration import most_false
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.mixed import gpu_of
from kprof.report.partner.outcome import outcome_of
from kprof.report.partner.parts import Block, Chapter
from kprof.report.partner.wording import changed_in_words, share_in_words
from kprof.report.section import Facts, Text

TITLE = "Verdict"
UNCHANGED = {"as it is": "unchanged"}

UNCALIBRATED = (
    "The error rate of such verdicts was not measured on this machine. To measure it: kprof "
    "selftest --json > selftest.json, and name that file as well."
)


def render(evidence: Evidence) -> Chapter:
    """Render the verdict, the change and GPU that it is about, and the calibration."""
    blocks: list[Block] = [outcome_of(evidence)]
    if facts := _about(evidence):
        blocks.append(Facts(tuple(facts)))
    if evidence.comparisons:
        blocks += _badge(evidence)
    return Chapter(TITLE, tuple(blocks))


def _about(evidence: Evidence) -> list[tuple[str, str, str]]:
    facts = []
    comparison = evidence.headline
    if comparison is not None:
        facts.append(
            (
                "Change",
                changed_in_words(comparison.b),
                f"before: {UNCHANGED.get(comparison.a, comparison.a)}",
            )
        )
    gpu = _gpu(evidence)
    if gpu:
        facts.append(("Measured on", gpu, ""))
    elif evidence.runs and all(run.is_host_only for run in evidence.runs):
        facts.append(("Measured on", "host CPU", "no GPU took part"))
    if comparison is not None and comparison.headline.interval is not None:
        claim = comparison.headline
        assert claim.interval is not None
        level = f"{100 * claim.interval.level:.3g} %"
        why = f"of the range in the verdict, from {claim.num_pairs} pairs of measurements"
        facts.append(("Confidence", level, why))
    return facts


def _gpu(evidence: Evidence) -> str:
    """Return the GPU of the verdict: the comparison's, which may differ from a run's."""
    if evidence.headline is not None:
        return gpu_of(evidence.headline)
    names = [gpu.name for run in evidence.runs for gpu in run.gpus if not run.is_host_only]
    return ", ".join(dict.fromkeys(names))


def _badge(evidence: Evidence) -> list[Block]:
    calibration = evidence.calibration
    if calibration is None:
        text = evidence.calibration_text
        return [
            Text(
                f"Accuracy of kprof ab: {text}" if text else UNCALIBRATED,
                "plain" if text else "warning",
            )
        ]
    blocks: list[Block] = [Facts(tuple(_figures(calibration)))]
    if doubt := _doubt(calibration, evidence):
        blocks.append(Text(doubt, "warning"))
    return blocks


def _figures(calibration: Calibration) -> list[tuple[str, str, str]]:
    worst = most_false(calibration)
    least = calibration.least_found
    where = {
        "simulated": "on simulated noise",
        "gpu": f"on {calibration.device}",
        "host": "on the clock of the host",
    }[calibration.kind]
    rate = share_in_words(worst.share) if worst else "not known"
    of = f"in {worst.of:,} comparisons without a difference, in the worst noise" if worst else ""
    finds = share_in_words(least) if least and least < 1 else "not known"
    met = {True: "✓ Meets its targets", False: "✗ Misses targets", None: "? Not all measured"}
    return [
        ("Accuracy of kprof ab", met[calibration.is_met], f"{where}, {calibration.date}"),
        ("False-positive rate", rate, of),
        (
            "Minimum detectable effect",
            finds,
            f"detected in 80 % of comparisons of {calibration.num_pairs} pairs",
        ),
    ]


def _doubt(calibration: Calibration, evidence: Evidence) -> str:
    if calibration.kind == "simulated":
        return "This calibration used simulated noise; the noise of the machine may be larger."
    gpu = _gpu(evidence)
    if calibration.kind == "gpu" and gpu and calibration.device not in gpu:
        return f"kprof ab was calibrated on {calibration.device}, not on {gpu}."
    return ""
