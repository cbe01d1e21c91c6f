"""`kprof ab`, the main path: two variants → pairs of samples → verdict → targets, costs, report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np

from kprof.ab.calibrate import (
    describe_calibration,
    doubt_resolution,
    last_calibration,
    parts_of_calibration,
)
from kprof.ab.choose import chosen
from kprof.ab.functions import LARGE_GAIN
from kprof.ab.in_process import flip
from kprof.ab.pricing import calculate
from kprof.ab.processes import alternate
from kprof.ab.variants import AbOptions, Tell, run_options, variants_of
from kprof.analyze.calibration.error_rates import Calibration
from kprof.analyze.cost.facts import facts_of
from kprof.analyze.cost.sheet import Costs
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.samples import Sample
from kprof.analyze.sla.target_verdict import judge_times, not_measured
from kprof.analyze.sla.targets import Target, read_targets
from kprof.analyze.verdict.per_token import per_token
from kprof.analyze.verdict.plausibility import (
    CALL_NS,
    LAUNCH_NS,
    doubt_ratio,
    find_power_effect,
    reason_below_floor,
)
from kprof.collect.launch import write_description
from kprof.collect.trials import LOG, TrialError, Variant
from kprof.comparison import CHOSEN, PAIRS_FILE, Claim, Comparison, encode, save
from kprof.errors import KprofError
from kprof.findings import Caveat
from kprof.kernels.correctness.levels import GateReport, result_of_gate
from kprof.kernels.swap.swap_report import (
    AUTO,
    CHOICE,
    SWAP_REPORT,
    Choice,
    read_choice,
    read_report,
)
from kprof.report.comparison_sections import sections_of_comparison
from kprof.report.costs import MISSING_FACTS, sections_of_costs
from kprof.report.html import write_html
from kprof.report.kernel_library import sections_of_gate
from kprof.report.redaction import redacted
from kprof.report.section import Part, Section, Table, Text
from kprof.report.sla_verdict import METHOD, NOTES, Judged, result_of_sla, sections_of_sla
from kprof.report.sla_verdict import TITLE as TARGETS
from kprof.report.swap import section_of_choice, sections_of_swap
from kprof.run import name_of
from kprof.storage import make_folder

EXIT_CODES = {"FASTER": 0, "SAME": 0, "INCONCLUSIVE": 3, "INVALID": 3}


@dataclass(frozen=True)
class Compared:
    """A comparison with its targets, costs and folder."""

    comparison: Comparison
    folder: Path
    calibration: Calibration | None
    """How often such verdicts err on this machine, where that was measured."""
    assessed: Mapping[str, Assessment] = field(default_factory=dict)
    """How A and B keep the targets, where some were given."""
    costs: Costs | None = None
    is_priced: bool = False
    """Whether costs were asked for."""
    training: GateReport | None = None
    """Whether the workload trains as well with B, where that was asked for."""

    @property
    def report(self) -> Path:
        """The page."""
        return self.folder / "report.html"

    @property
    def sections(self) -> list[Section]:
        """The sections of the report, in their order."""
        said = parts_of_calibration(self.calibration)
        found = sections_of_comparison(self.comparison, said)
        if self.assessed:
            found.append(section_of_targets(self.assessed))
        swapped = self.folder / SWAP_REPORT
        if swapped.exists():
            swap = sections_of_swap(read_report(swapped))
            found += [replace(one, order=15) for one in swap]
        if self._choice is not None:
            claim = self.comparison.headline
            measured = None if claim.interval is None else claim.interval.ratio
            found.append(replace(section_of_choice(self._choice, measured), order=14))
        if self.training is not None:
            found += [replace(one, order=25) for one in sections_of_gate(self.training)]
        if self.costs is not None:
            found.append(section_of_costs(self.costs))
        elif self.is_priced:
            found.append(no_price(self.comparison))
        return sorted(found, key=lambda section: section.order)

    @property
    def _choice(self) -> Choice | None:
        """What `--swap auto` has chosen."""
        path = self.folder / CHOICE
        return read_choice(path) if path.exists() else None

    @property
    def exit_code(self) -> int:
        """0: faster, or the same; 1: slower by what matters, misses a target or trains worse."""
        of_b = self.assessed.get("B")
        is_missed = of_b is not None and of_b.verdict == "MISSED"
        is_missed |= self.training is not None and self.training["L6"].state == "failed"
        compared = self.comparison
        return 1 if is_missed else exit_code_of(compared.headline, compared.plan.smallest_effect)

    @property
    def besides(self) -> dict[str, object]:
        """Targets, costs and calibration as plain data, saved and printed with the comparison."""
        told: dict[str, object] = {"calibration": describe_calibration(self.calibration)}
        if self.calibration is not None:
            told["calibrated"] = msgspec.to_builtins(self.calibration)
        if derived := per_token(self.comparison):
            told["per_token"] = msgspec.to_builtins(derived)
        if self.assessed:
            judged = {arm: Judged(arm, found) for arm, found in self.assessed.items()}
            told["targets"] = {arm: result_of_sla(one) for arm, one in judged.items()}
        gates = [*self._choice.gate_reports] if self._choice is not None else []
        gates += [result_of_gate(self.training)] if self.training is not None else []
        if gates:
            told["gates"] = gates
        if self.is_priced:
            told["costs"] = msgspec.to_builtins(self.costs)
        return told

    @property
    def json(self) -> bytes:
        """Everything, as indented JSON: what the folder holds as well."""
        return encode(self.comparison, self.besides)


HOW_JUDGED = Text(METHOD, "muted")
OF_B = "The cost of steps as long as B's mean, and the saving against A's."
ONLY_STEPS = "a comparison has steps, and no requests: give a result file to kprof sla"

PROVEN = ("FASTER", "SLOWER")


def compare(options: AbOptions, tell: Tell = lambda message: None) -> Compared:
    """Compare two variants of a workload; `tell` gets a message for every pair.

    Raises:
        KprofError: a variant cannot be started, crashed, or took no steps that can be compared.
    """
    targets = read_targets(options.targets) if options.targets else ()
    check_worth(targets, options.facts)
    if options.swap not in ("", AUTO):
        # Imported only where needed: it imports torch and Triton.
        from kprof.kernels.swap.swapping import Swap

        Swap((), options.swap.split(","))
    a, b = variants_of(options)
    folder = make_folder(f"{name_of(run_options(options))}-ab", options.out, force=options.force)
    (folder / "raw").mkdir(exist_ok=True)
    write_description(folder / "raw", a.command, (time.time_ns(), None), None)
    if options.swap == AUTO:
        try:
            choice = chosen(a, options, folder, folder / "raw", tell)
        except (KprofError, KeyboardInterrupt, SystemExit) as stop:
            _clean_up(stop, folder, tell)
            raise
        options = replace(options, swap=",".join(choice.names))
        b = replace(b, difference=f"--swap {options.swap}{CHOSEN}")
    taken = _take(a, b, options, folder, tell)
    calibration = last_calibration()
    more = {
        "clocks_differ": find_power_effect(taken.plan, taken.pairs),
        "resolution": doubt_resolution(calibration, taken.plan),
        LARGE_GAIN: doubt_ratio(taken.headline),
    }
    comparison = replace(
        taken,
        claims=_plausible(taken),
        doubts=(*taken.doubts, *(Caveat(about, text) for about, text in more.items() if text)),
        facts=redacted({**({"made by": options.line} if options.line else {}), **taken.facts}),
        tokens_per_step=tokens_per_step(options.facts),
    )
    is_priced = is_asked_for_costs(options)
    compared = Compared(
        comparison,
        folder,
        calibration,
        assess(comparison, targets) if targets else {},
        price(comparison, options.facts) if is_priced else None,
        is_priced,
    )
    save(comparison, folder, compared.besides)
    if options.losses:
        compared = replace(compared, training=_training(a, b, options, folder, tell))
        save(comparison, folder, compared.besides)
    write_html(f"{comparison.name}: A against B", compared.sections, compared.report)
    return compared


def _training(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> GateReport:
    # Imported where it is asked for: it needs torch.
    from kprof.ab.training import report_of, trained_alike

    level = trained_alike(a, b, options, folder / "raw" / "training", tell)
    return report_of(options.swap or b.difference, level)


def check_worth(targets: Sequence[Target], given: Mapping[str, str | None]) -> None:
    """See that targets can be judged and costs be computed, before hours are spent on samples.

    Raises:
        KprofError: a target is not one of steps, or a fact of the costs cannot be true.
    """
    for target in targets:
        if target.metric.name != "step":
            raise KprofError(
                f"{target.text!r}: kprof ab times steps, not requests",
                fix="give a target such as step_p50<=60ms; of requests, a result file to kprof sla",
            )
    if any(given.values()):
        _costs({**given, "step_s": "1", "speedup": "1"})


def _costs(given: Mapping[str, str | None], gpu: str | None = None) -> Costs:
    known = {name: value for name, value in given.items() if value is not None}
    return calculate({"gpus": "1", **known}, date.today(), ran_on=gpu)


def _take(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Comparison:
    """Return the measured comparison; without a verdict, clean up."""
    protocol = flip if options.patch or options.swap else alternate
    try:
        return protocol(a, b, options, folder, tell)
    except (KprofError, KeyboardInterrupt, SystemExit) as stop:
        _clean_up(stop, folder, tell)
        raise


def _clean_up(stop: BaseException, folder: Path, tell: Tell) -> None:
    """Say what a comparison without a verdict has kept; remove its folder where that is nothing."""
    if (folder / PAIRS_FILE).exists():
        tell(f"the pairs taken before are kept in {folder / PAIRS_FILE}")
    elif (folder / CHOICE).exists():
        tell(f"what was tried, and why not, is in {folder / CHOICE}")
    elif not isinstance(stop, KprofError):
        tell(f"stopped before the first pair; its output is in {folder / 'raw'}")
    elif isinstance(stop, TrialError) and str(stop.trial.log) not in str(stop):
        if stop.trial.windows or any(log.stat().st_size for log in folder.rglob(LOG)):
            tell(f"the times and output until then are in {folder}")
        else:
            shutil.rmtree(folder)


def _plausible(taken: Comparison) -> tuple[Claim, ...]:
    """Return the claims; where steps are too short to be steps, none about their time."""
    first = taken.headline
    on_gpu = "GPU" in taken.facts
    floor = (LAUNCH_NS, "a step that launches a kernel") if on_gpu else (CALL_NS, "a step")
    reason = reason_below_floor(taken.pairs, *floor) if first.metric.unit == "ns" else ""
    if not reason:
        return taken.claims
    return (Claim(first.metric, "INVALID", first.num_pairs, why=reason), *taken.claims[1:])


def tokens_per_step(given: Mapping[str, str | None]) -> float | None:
    """Return how many tokens a step has, if that was told.

    Raises:
        KprofError: it is no number above 0.
    """
    return facts_of({"tokens_per_step": given.get("tokens_per_step")}).tokens_per_step


def is_asked_for_costs(options: AbOptions) -> bool:
    """Tell whether costs are wanted; tokens of a step may be told for the energy of a token."""
    told = {name for name, value in options.facts.items() if value is not None}
    return bool(told - {"tokens_per_step"} if options.energy else told)


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


def exit_code_of(claim: Claim, smallest_effect: float) -> int:
    """Return the exit code of a verdict: 1 only where B is slower by more than what matters.

    SLOWER by a difference that may or may not matter is 3, and 0 where it certainly does not.
    """
    if claim.verdict != "SLOWER":
        return EXIT_CODES[claim.verdict]
    if claim.is_material or claim.interval is None:
        return 1
    most = 1 + smallest_effect
    return 0 if 1 / most <= claim.interval.low and claim.interval.high <= most else 3


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
        # The caption of every table is printed once, above the first.
        parts += [
            replace(part, caption="") if isinstance(part, Table) and not is_first else part
            for part in section.parts
        ]
    return Section(first.title, 30, tuple(parts))


def no_price(comparison: Comparison) -> Section:
    """Say why nothing is saved."""
    why = f"The verdict is {comparison.headline.verdict}, so B is not credited with any saving."
    return Section("Cost", 30, (Text(why),))
