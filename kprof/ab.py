"""`kprof ab`: the main path. Two variants of a workload → pairs of samples → verdict → report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kprof.alternate import alternate
from kprof.analyze.cost.answer import Costs
from kprof.analyze.cycles import find_power_effect
from kprof.analyze.sla.judge import Assessment
from kprof.calibrations import describe_calibration
from kprof.collect.launch import write_description
from kprof.comparison import PAIRS_FILE, Comparison, save
from kprof.errors import KprofError
from kprof.flip import flip
from kprof.report.comparison import sections_of_comparison
from kprof.report.costs import result_of_costs, sections_of_costs
from kprof.report.html import write_html
from kprof.report.section import Section
from kprof.report.sla import Judged, result_of_sla
from kprof.report.swap import sections_of_swap
from kprof.run import name_of
from kprof.runfolder import make_folder
from kprof.sites._saved import SWAP_REPORT, read_report
from kprof.sla import read_targets
from kprof.swap import Swap
from kprof.variants import AbOptions, Tell, run_options, variants_of
from kprof.worth import assess, check_worth, no_price, price, sections_of_targets

EXIT_CODES = {"FASTER": 0, "SAME": 0, "SLOWER": 1, "INCONCLUSIVE": 3, "INVALID": 3}


@dataclass(frozen=True)
class Compared:
    """The comparison, what it means to whoever pays, and where it is kept."""

    comparison: Comparison
    folder: Path
    calibration: str
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
        found = sections_of_comparison(self.comparison, self.calibration)
        found += sections_of_targets(self.assessed)
        swapped = self.folder / SWAP_REPORT
        if swapped.exists():
            swap = sections_of_swap(read_report(swapped))
            found += [replace(one, order=15) for one in swap]
        if self.costs is not None:
            found += [replace(one, order=30) for one in sections_of_costs(self.costs)]
        elif self.is_priced:
            found.append(no_price(self.comparison))
        return sorted(found, key=lambda section: section.order)

    @property
    def exit_code(self) -> int:
        """0: faster, or the same; 1: slower, or B misses a target; 3: cannot tell."""
        of_b = self.assessed.get("B")
        is_missed = of_b is not None and of_b.verdict == "MISSED"
        return 1 if is_missed else EXIT_CODES[self.comparison.headline.verdict]

    @property
    def json(self) -> bytes:
        """Everything, as indented JSON."""
        content = msgspec.to_builtins(self.comparison)
        content["calibration"] = self.calibration
        if self.assessed:
            judged = {arm: Judged(arm, found) for arm, found in self.assessed.items()}
            content["targets"] = {arm: result_of_sla(one) for arm, one in judged.items()}
        if self.is_priced:
            content["costs"] = None if self.costs is None else result_of_costs(self.costs)
        return msgspec.json.format(msgspec.json.encode(content))


def compare(options: AbOptions, tell: Tell = lambda message: None) -> Compared:
    """Compare two variants of a workload; `tell` hears of every pair.

    Raises:
        KprofError: a variant cannot be started, crashed, or took no steps that can be compared.
    """
    targets = read_targets(options.targets) if options.targets else ()
    check_worth(targets, options.facts)
    if options.swap:
        Swap((), options.swap.split(","))
    a, b = variants_of(options)
    folder = make_folder(f"{name_of(run_options(options))}-ab", options.out, force=options.force)
    (folder / "raw").mkdir(exist_ok=True)
    write_description(folder / "raw", a.command, (time.time_ns(), None), None)
    protocol = flip if options.patch or options.swap else alternate
    try:
        taken = protocol(a, b, options, folder, tell)
    except (KprofError, KeyboardInterrupt):
        if (folder / PAIRS_FILE).exists():
            tell(f"the pairs taken before are kept in {folder / PAIRS_FILE}")
        raise
    power = find_power_effect(taken.plan, taken.pairs)
    comparison = replace(taken, doubts=(*taken.doubts, *([power] if power else [])))
    save(comparison, folder)
    is_priced = any(options.facts.values())
    compared = Compared(
        comparison,
        folder,
        describe_calibration(),
        assess(comparison, targets) if targets else {},
        price(comparison, options.facts) if is_priced else None,
        is_priced,
    )
    write_html(f"{comparison.name}: A against B", compared.sections, compared.report)
    return compared
