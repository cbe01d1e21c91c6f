"""`kprof gate`: fail a CI job on a proven regression."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from typer import Option

from kprof.analyze.engagement import (
    AnyContent,
    ComparisonAdded,
    GateAdded,
    RunAdded,
    ServiceLevelAdded,
    without_folders,
)
from kprof.commands import Answer
from kprof.errors import KprofError
from kprof.report.junit import render_junit
from kprof.report.markdown import render_markdown
from kprof.report.section import Section

if TYPE_CHECKING:
    from kprof.analyze.verdict.regressions import Ruling, Verdict

SCHEMA = 1
SAME_TIMING = "compare both on the same machine, timed in the same way"
SAME_SERVICE = "kprof sla, of both at the same recorded load, GPUs and targets"


@dataclass(frozen=True)
class Ruled:
    """All rulings on a candidate."""

    candidate: str
    baseline: str
    rulings: tuple[Ruling, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on all of them."""
        from kprof.analyze.verdict.regressions import overall

        return overall(self.rulings)

    @property
    def title(self) -> str:
        """The candidate and its baseline."""
        return f"{self.candidate} against {self.baseline}"

    @property
    def sections(self) -> list[Section]:
        """All that is shown."""
        from kprof.report.regression import sections_of_rulings

        return sections_of_rulings(self.verdict, self.rulings)

    @property
    def json(self) -> bytes:
        """Everything, as indented JSON."""
        told = {"candidate": self.candidate, "baseline": self.baseline, "verdict": self.verdict}
        content = {"schema": SCHEMA, **told, "rulings": [asdict(one) for one in self.rulings]}
        return msgspec.json.format(msgspec.json.encode(content))


INCONCLUSIVE = 3


def gate(
    candidate: Annotated[
        Path, typer.Argument(metavar="CANDIDATE", help="Comparison, run, or result as JSON.")
    ],
    against: Annotated[
        Path | None,
        Option(metavar="BASELINE", help="Same kind [default: A of a comparison]."),
    ] = None,
    smallest_effect: Annotated[
        str | None, Option(metavar="SHARE", help="Smallest regression [default: the A/B's].")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 3 if inconclusive.")] = False,
    junit: Annotated[Path | None, Option(metavar="FILE", help="Write JUnit XML as well.")] = None,
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Write Markdown as well.")] = None,
    json: Annotated[bool, Option("--json", help="Print the rulings as JSON.")] = False,
    force: Annotated[bool, Option("--force", help="Replace existing files.")] = False,
) -> Answer:
    """Fail a CI job on a proven regression.

    Takes comparisons of kprof ab, runs, or what kprof sla and kprof kernels check printed with
    --json. Exit code: 1 a regression is proven; 0 none is, INCONCLUSIVE included, unless --strict;
    2 usage.
    """
    from kprof.ab.variants import share_of

    effect = share_of(smallest_effect) if smallest_effect else None
    ruled = hold_against(candidate, against, effect)
    write_beside(ruled, junit, markdown, force=force)
    code = 1 if ruled.verdict == "REGRESSION" else 0
    if strict and ruled.verdict == "INCONCLUSIVE":
        code = INCONCLUSIVE
    last = f"{ruled.verdict}: exit code {code}"
    return Answer(ruled.title, ruled.sections, ruled.json if json else None, last, code)


def hold_against(candidate: Path, baseline: Path | None, smallest: float | None = None) -> Ruled:
    """Rule on a candidate; without a baseline it is a comparison, whose A is the baseline.

    `smallest`: the least relative difference that matters, in place of the comparison's own.

    Raises:
        KprofError: one cannot be read, or the two cannot be held against one another.
    """
    from kprof.ab.engagement_folder import recognise
    from kprof.analyze.verdict.regressions import rule_on_comparison

    found = recognise(candidate, "after")
    if baseline is None:
        if not isinstance(found.content, ComparisonAdded):
            problem = f"{candidate} is no comparison, so there is nothing to hold it against"
            raise KprofError(problem, fix="name a baseline of its kind: --against BASELINE")
        comparison = found.content.comparison
        rulings = rule_on_comparison(comparison, smallest)
        b, a = (without_folders(one) for one in (comparison.b, comparison.a))
        return Ruled(f"B ({b})", f"A ({a})", rulings)
    base = recognise(baseline, "before")
    return Ruled(found.source.name, base.source.name, _rule(base.content, found.content, smallest))


def _rule(
    baseline: AnyContent, candidate: AnyContent, smallest: float | None
) -> tuple[Ruling, ...]:
    from kprof.analyze.verdict.regressions import (
        differing_comparisons,
        differing_limits,
        differing_services,
        rule_on_comparisons,
        rule_on_gates,
        rule_on_levels,
        rule_on_runs,
    )

    if isinstance(candidate, ComparisonAdded) and isinstance(baseline, ComparisonAdded):
        rulings = rule_on_comparisons(baseline.comparison, candidate.comparison, smallest)
        differing = differing_comparisons(baseline.comparison, candidate.comparison)
        return tuple(_opened(one, differing, SAME_TIMING) for one in rulings)
    if isinstance(candidate, RunAdded) and isinstance(baseline, RunAdded):
        return rule_on_runs(baseline, candidate)
    if isinstance(candidate, ServiceLevelAdded) and isinstance(baseline, ServiceLevelAdded):
        differing = differing_services(baseline, candidate)
        return tuple(
            _opened(one, differing or differing_limits(baseline, candidate, one.what), SAME_SERVICE)
            for one in rule_on_levels(baseline, candidate)
        )
    if isinstance(candidate, GateAdded) and isinstance(baseline, GateAdded):
        return rule_on_gates(baseline, candidate)
    raise KprofError(
        "the two are not of a kind that can become worse, or not of the same one",
        fix="name two comparisons, two runs, or two outputs of kprof sla or kprof kernels check "
        "with --json",
    )


def _opened(ruling: Ruling, differing: str, settle: str) -> Ruling:
    """Return the ruling or, where other conditions may be the cause, an open question."""
    from kprof.analyze.verdict.regressions import Ruling

    return Ruling(ruling.what, "INCONCLUSIVE", differing, settle) if differing else ruling


def write_beside(ruled: Ruled, junit: Path | None, markdown: Path | None, *, force: bool) -> None:
    """Write the rulings as JUnit XML and as Markdown, where files are named for them.

    Raises:
        KprofError: a file is there already, or cannot be written.
    """
    from kprof.report.regression import cases_of_rulings

    cases = cases_of_rulings(ruled.rulings)
    wanted = [
        (junit, render_junit("kprof gate", cases)),
        (markdown, render_markdown(ruled.title, ruled.sections).encode()),
    ]
    for path, _ in wanted:
        if path is not None and path.exists() and not force:
            raise KprofError(f"{path} exists already", fix="name another file, or pass --force")
    for path, content in wanted:
        if path is not None:
            _write(path, content)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="name another file") from error
