"""`kprof report`: one page for decision makers, from saved results."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from kprof.ab.pricing import read_prices
from kprof.analyze.kernel_times import Benched, read_benched
from kprof.commands import Answer, say
from kprof.comparison import FILE as COMPARISON_FILE
from kprof.comparison import Comparison, read
from kprof.errors import KprofError
from kprof.report.playbooks import all_playbooks
from kprof.report.section import Part, Section, Table, Text

if TYPE_CHECKING:
    from kprof.opened import Progress
    from kprof.report.partner.disclosure import Level
    from kprof.report.partner.evidence import Advice, Evidence, Kind, Source

FIX = "name runs (*.kprof), comparisons of kprof ab, or the --json output of a command"


@dataclass
class _Found:
    """The files read so far, each kind in the order of the names."""

    runs: list[Any] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    service_levels: list[Any] = field(default_factory=list)
    costs: list[Any] = field(default_factory=list)
    gates: list[Any] = field(default_factory=list)
    benches: list[Benched] = field(default_factory=list)
    calibration: Any = None
    calibration_text: str = ""
    sources: list[Source] = field(default_factory=list)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Runs, comparisons, JSON of kprof sla, cost, selftest, kernels; before first.",
        ),
    ],
    template: Annotated[
        str, typer.Option(metavar="NAME", help="partner, engineer, or your own FILE.toml.")
    ] = "partner",
    redact: Annotated[
        Literal["internal", "partner", "public"],
        typer.Option(
            metavar="LEVEL",
            help="internal: show all; partner: no paths, hosts, prompts; public: nor prices.",
        ),
    ] = "partner",
    title: Annotated[
        str, typer.Option(metavar="TEXT", help="Title [default: the workload's name].")
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> Answer:
    """Write one page for decision makers: verdict, cost and confidence.

    Of two runs, service levels or costs, the first is before the change and the last after it.
    """
    from kprof.errors import KprofError
    from kprof.report.progress import Progress

    if out.exists() and not force:
        raise KprofError(f"{out} exists already", fix="name another --out, or pass --force")
    progress = Progress(say, is_patient=True)
    try:
        evidence = read_evidence(paths, title, progress)
        progress("drawing")
        write_partner_report(evidence, out, template, redact)
    finally:
        progress.close()
    return Answer(evidence.title, sections_of_summary(evidence, redact), None, f"report: {out}")


def read_evidence(
    paths: Sequence[Path], title: str = "", progress: Progress = lambda stage: None
) -> Evidence:
    """Read what was saved, of each kind in the order in which it is named: before first.

    Raises:
        KprofError: a path is none of what kprof saves, or it is damaged.
    """
    from kprof.analyze.cost.of_runs import with_worth
    from kprof.opened import open_trace
    from kprof.report.partner.evidence import Evidence, gates_in
    from kprof.storage import META_FILE

    found = _Found()
    for path in paths:
        if path.is_dir() and (path / COMPARISON_FILE).exists():
            _add(found, _json_in(path / COMPARISON_FILE), path)
            found.sources.append(_source(path.name, "comparison", path / COMPARISON_FILE))
        elif path.is_file() and (content := _json_in(path)) is not None:
            what = _add(found, content, path)
            found.sources.append(_source(path.name, what, path))
        else:
            found.runs.append(with_worth(open_trace(path, progress), read_prices()))
            kept = path / META_FILE
            found.sources.append(_source(path.name, "run", kept if kept.exists() else path))
    named = found.runs[0].meta.source if found.runs else ""
    named = found.comparisons[0].name if found.comparisons else named
    evidence = Evidence(
        title or f"Performance of {named.removesuffix('.kprof') or 'a workload'}",
        tuple(found.runs),
        tuple(found.comparisons),
        tuple(found.service_levels),
        tuple(found.costs),
        gates_in(found.gates),
        found.calibration,
        found.calibration_text,
        sources=tuple(found.sources),
        benches=tuple(found.benches),
    )
    return replace(evidence, advice=_advice_for(evidence))


def _add(found: _Found, content: Any, path: Path) -> str:  # noqa: ANN401 - any JSON
    """Add what a file of JSON holds, and return what that is in words."""
    try:
        return _add_known(found, content, path)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise KprofError(f"{path} is incomplete: {error}", fix=FIX) from error


def _add_known(found: _Found, content: Any, path: Path) -> str:  # noqa: ANN401 - any JSON
    from kprof.report.partner.evidence import (
        calibration_in,
        costs_in,
        parts_of,
        service_level_in,
    )

    parts = parts_of(content)
    if not parts:
        raise KprofError(f"{path} is not a result of kprof", fix=FIX)
    add: dict[Kind, Callable[[Any, str], object]] = {
        "comparison": lambda said, arm: _add_compared(found, said),
        "service level": lambda said, arm: found.service_levels.append(service_level_in(said, arm)),
        "cost": lambda said, arm: found.costs.append(costs_in(said)),
        "calibration": lambda said, arm: setattr(found, "calibration", calibration_in(said)),
        "quality gate": lambda said, arm: found.gates.extend(said),
        "kernels beside their peers": lambda said, arm: found.benches.extend(read_benched(said)),
    }
    for kind, said, arm in parts:
        add[kind](said, arm)
    return parts[0].kind


def _add_compared(found: _Found, said: dict[str, Any]) -> None:
    from kprof.report.partner.evidence import calibration_in

    found.comparisons.append(read(said))
    found.calibration_text = said.get("calibration") or found.calibration_text
    if said.get("calibrated") and found.calibration is None:
        found.calibration = calibration_in(said["calibrated"])


def _json_in(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """Return the content of a file of JSON that a command printed; None: it is a trace."""
    if not path.name.endswith(".json"):
        return None
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise KprofError(f"{path} is not complete JSON: {error}", fix=FIX) from error
    is_trace = isinstance(content, dict) and "traceEvents" in content
    return None if is_trace else content


def _source(name: str, what: str, path: Path) -> Source:
    """Return a source with the hash of its file; of a folder of traces there is none."""
    from kprof.report.partner.evidence import Source

    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
    return Source(name, what, digest)


def _advice_for(evidence: Evidence) -> dict[str, Advice]:
    """Return what the playbooks say of the findings that were made."""
    from kprof.report.partner.evidence import Advice

    found = [f.rule for run in evidence.runs if run.diagnosis for f in run.diagnosis.findings]
    pages = {page.name: page for page in all_playbooks()} if found else {}
    return {
        rule: Advice(pages[rule].title, tuple(_sentences(dict(pages[rule].parts).get("Fix", ""))))
        for rule in found
        if rule in pages
    }


def _sentences(text: str) -> list[str]:
    """Return what a playbook says in words: its commands are left out, they are of other files."""
    words = re.sub(r":\s*```.*?```", ".", text, flags=re.DOTALL)
    words = re.sub(r"```.*?```", "", words, flags=re.DOTALL)
    lines = [re.sub(r"^(?:-|\d+\.)\s+", "", line.strip()) for line in words.splitlines()]
    # A sentence that leads to a list, or an alternative to a command, is not an advice by itself.
    kept = [line.replace("`", "") for line in lines if line and not line.endswith(":")]
    return [re.sub(r"^Or (.)", lambda found: found[1].upper(), line) for line in kept]


def write_partner_report(
    evidence: Evidence, path: Path, template: str = "partner", level: Level = "partner"
) -> None:
    """Write the report as one HTML file; the same evidence gives the same bytes.

    Raises:
        KprofError: there is no such template, or the file cannot be written.
    """
    from kprof.report.partner import render_report
    from kprof.report.partner.parts import read_template

    chosen = read_template(template)
    evidence = replace(evidence, advice=evidence.advice or _advice_for(evidence))
    # A name may hold half a surrogate pair, which no encoding can write.
    page = render_report(evidence, chosen, level).encode("utf-8", "replace")
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(page)
        partial.replace(path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="name another file with --out") from error


def sections_of_summary(evidence: Evidence, level: Level = "partner") -> list[Section]:
    """Return the verdict, the summary's rows and what next, a line each, for the terminal."""
    from kprof.report.partner.disclosure import Redactor, reduced
    from kprof.report.partner.outcome import outcome_of
    from kprof.report.partner.parts import Steps
    from kprof.report.partner.sections import summary

    evidence = reduced(evidence, level)
    outcome = outcome_of(evidence)
    parts: list[Part] = [Text(outcome.sentence, outcome.tone)]
    for block in summary.render(evidence).blocks:
        if isinstance(block, Text):
            parts.append(block)
        elif isinstance(block, Table):
            names = [column.header for column in block.columns]
            parts += [Text(_line_of(row, names)) for row in block.rows]
        elif isinstance(block, Steps):
            parts += [Text(f"{i}. {item}") for i, item in enumerate(block.items, 1)]
    return [
        Section(outcome.word, 0, tuple(Redactor(level, evidence).apply(part) for part in parts))
    ]


def _line_of(row: tuple[str, ...], names: Sequence[str]) -> str:
    """Return a row in a line; which of two figures was before, the column's name says."""
    from kprof.report.units import MISSING

    cells = [
        f"{name.lower()} {cell}" if name in ("Before", "After", "Now") else cell
        for name, cell in zip(names[1:], row[1:], strict=True)
        if cell not in ("", MISSING)
    ]
    return f"{row[0]}: {'; '.join(cells)}"
