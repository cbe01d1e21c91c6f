"""`kprof ab`: the main path. Two variants of a workload → pairs of samples → verdict → report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kprof.alternate import alternate
from kprof.analyze.calibration.result import Calibration
from kprof.analyze.cost.answer import Costs
from kprof.analyze.cycles import find_power_effect
from kprof.analyze.per_token import per_token
from kprof.analyze.sla.judge import Assessment
from kprof.analyze.verdict.plausibility import (
    CALL_NS,
    LAUNCH_NS,
    doubt_ratio,
    reason_below_floor,
)
from kprof.calibrations import (
    describe_calibration,
    doubt_resolution,
    last_calibration,
    parts_of_calibration,
)
from kprof.collect.launch import write_description
from kprof.collect.trials import LOG, TrialError, Variant
from kprof.comparison import PAIRS_FILE, Claim, Comparison, encode, save
from kprof.errors import KprofError
from kprof.flip import flip
from kprof.redaction import redacted
from kprof.report.comparison import sections_of_comparison
from kprof.report.costs import result_of_costs
from kprof.report.html import write_html
from kprof.report.section import Section
from kprof.report.sla import Judged, result_of_sla
from kprof.report.swap import sections_of_swap
from kprof.run import name_of
from kprof.runfolder import make_folder
from kprof.sites._saved import SWAP_REPORT, read_report
from kprof.sla import read_targets
from kprof.variants import AbOptions, Tell, run_options, variants_of
from kprof.worth import (
    assess,
    check_worth,
    is_asked_for_costs,
    no_price,
    price,
    section_of_costs,
    section_of_targets,
    tokens_per_step,
)

EXIT_CODES = {"FASTER": 0, "SAME": 0, "INCONCLUSIVE": 3, "INVALID": 3}


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


@dataclass(frozen=True)
class Compared:
    """The comparison, what it means to whoever pays, and where it is kept."""

    comparison: Comparison
    folder: Path
    calibration: Calibration | None
    """How often such verdicts err on this machine, where that was measured."""
    assessed: Mapping[str, Assessment] = field(default_factory=dict)
    """How A and B keep the targets, where some were given."""
    costs: Costs | None = None
    is_priced: bool = False
    """Whether costs were asked for."""

    @property
    def report(self) -> Path:
        """The page."""
        return self.folder / "report.html"

    @property
    def sections(self) -> list[Section]:
        """All that is shown, in its order."""
        said = parts_of_calibration(self.calibration)
        found = sections_of_comparison(self.comparison, said)
        if self.assessed:
            found.append(section_of_targets(self.assessed))
        swapped = self.folder / SWAP_REPORT
        if swapped.exists():
            swap = sections_of_swap(read_report(swapped))
            found += [replace(one, order=15) for one in swap]
        if self.costs is not None:
            found.append(section_of_costs(self.costs))
        elif self.is_priced:
            found.append(no_price(self.comparison))
        return sorted(found, key=lambda section: section.order)

    @property
    def exit_code(self) -> int:
        """0: faster, or the same; 1: slower by what matters, or B misses a target; 3: unknown."""
        of_b = self.assessed.get("B")
        is_missed = of_b is not None and of_b.verdict == "MISSED"
        compared = self.comparison
        return 1 if is_missed else exit_code_of(compared.headline, compared.plan.smallest_effect)

    @property
    def besides(self) -> dict[str, object]:
        """What the comparison means, as plain data: it is kept and printed with it."""
        told: dict[str, object] = {"calibration": describe_calibration(self.calibration)}
        if self.calibration is not None:
            told["calibrated"] = msgspec.to_builtins(self.calibration)
        if derived := per_token(self.comparison):
            told["per_token"] = msgspec.to_builtins(derived)
        if self.assessed:
            judged = {arm: Judged(arm, found) for arm, found in self.assessed.items()}
            told["targets"] = {arm: result_of_sla(one) for arm, one in judged.items()}
        if self.is_priced:
            told["costs"] = None if self.costs is None else result_of_costs(self.costs)
        return told

    @property
    def json(self) -> bytes:
        """Everything, as indented JSON: what the folder holds as well."""
        return encode(self.comparison, self.besides)


def compare(options: AbOptions, tell: Tell = lambda message: None) -> Compared:
    """Compare two variants of a workload; `tell` hears of every pair.

    Raises:
        KprofError: a variant cannot be started, crashed, or took no steps that can be compared.
    """
    targets = read_targets(options.targets) if options.targets else ()
    check_worth(targets, options.facts)
    if options.swap:
        # Not without need: it imports torch and Triton.
        from kprof.swap import Swap

        Swap((), options.swap.split(","))
    a, b = variants_of(options)
    folder = make_folder(f"{name_of(run_options(options))}-ab", options.out, force=options.force)
    (folder / "raw").mkdir(exist_ok=True)
    write_description(folder / "raw", a.command, (time.time_ns(), None), None)
    taken = _take(a, b, options, folder, tell)
    calibration = last_calibration()
    more = (
        find_power_effect(taken.plan, taken.pairs),
        doubt_resolution(calibration, taken.plan),
        doubt_ratio(taken.headline),
    )
    comparison = replace(
        taken,
        claims=_plausible(taken),
        doubts=(*taken.doubts, *(doubt for doubt in more if doubt)),
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
    write_html(f"{comparison.name}: A against B", compared.sections, compared.report)
    return compared


def _plausible(taken: Comparison) -> tuple[Claim, ...]:
    """Return the claims; where steps are too short to be steps, none about their time."""
    first = taken.headline
    on_gpu = "GPU" in taken.facts
    floor = (LAUNCH_NS, "a step that launches a kernel") if on_gpu else (CALL_NS, "a step")
    reason = reason_below_floor(taken.pairs, *floor) if first.metric.unit == "ns" else ""
    if not reason:
        return taken.claims
    return (Claim(first.metric, "INVALID", first.num_pairs, why=reason), *taken.claims[1:])


def _take(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Comparison:
    """Return what was taken and judged; where there is no verdict, clean up."""
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
    elif not isinstance(stop, KprofError):
        tell(f"stopped before the first pair; what was printed is in {folder / 'raw'}")
    elif isinstance(stop, TrialError) and str(stop.trial.log) not in str(stop):
        if stop.trial.windows or any(log.stat().st_size for log in folder.rglob(LOG)):
            tell(f"what was timed and printed until then is kept in {folder}")
        else:
            shutil.rmtree(folder)
