"""The appendix: environment, commands, hashes of the files, glossary."""

from __future__ import annotations

from collections.abc import Sequence

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Block, Chapter
from kprof.report.section import Column, Table, Text
from kprof.report.units import format_memory

TITLE = "Appendix"

WORDS = (
    ("A/B, before and after", "The same work without (A) and with the change (B), in pairs."),
    (
        "Bound, 99 %",
        "The worst value that the measurements still allow, with 99 % confidence; of a broken "
        "promise the best one.",
    ),
    ("Calibration", "A test of the instrument itself: how often it sees what is not there."),
    ("Confidence", "How often a range found in this way holds the truth: 95 % is 19 in 20."),
    ("FLOP", "One floating-point operation, such as an addition."),
    ("GPU", "The processor that does the arithmetic, and that is paid by the hour."),
    ("Idle", "Time in which the GPU did nothing and was paid all the same."),
    ("Interval, range", "Where the true value lies, with the confidence that is named."),
    ("Kernel", "One piece of work that the GPU does without a break."),
    ("Median", "The value in the middle: half are smaller, half are larger."),
    ("p-value", "How likely a difference as clear as this is if there were none."),
    ("Pair", "One measurement before and one after, close together in time."),
    ("Percentile, p99", "The value that 99 of 100 measurements do not exceed."),
    ("Quality gate", "Checks that results stay right when a part is replaced."),
    ("Roofline", "The time that work takes at the full speed of memory and arithmetic."),
    ("Service level, SLA", "What is promised to users, such as a longest time to the first word."),
    ("Step", "One round of the work: of training one update, of a model one call."),
    ("Token", "A piece of a word, the unit in which language models are paid."),
)


def render(evidence: Evidence) -> Chapter:
    """Render what it takes to do it again, what was read, and the glossary."""
    blocks: list[Block] = []
    if environment := _environment(evidence):
        blocks.append(_table("Environment", environment, "What it ran on."))
    if commands := _commands(evidence):
        blocks.append(_table("What", commands, "To do it again."))
    if evidence.sources:
        columns = (Column("File"), Column("Holds"), Column("SHA-256", "prose"))
        rows = tuple((one.name, one.what, one.sha256) for one in evidence.sources)
        blocks.append(Table(columns, rows, "What this report was made from."))
    blocks.append(Text("Glossary", "heading"))
    blocks.append(_table("Word", WORDS, "The words of this report."))
    return Chapter(TITLE, tuple(blocks))


def _table(header: str, rows: Sequence[tuple[str, str]], caption: str) -> Table:
    return Table((Column(header), Column("Value", "prose")), tuple(rows), caption)


def _environment(evidence: Evidence) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for run in evidence.runs:
        for gpu in run.gpus:
            memory = f", {format_memory(gpu.memory_bytes)}" if gpu.memory_bytes else ""
            rows.append(("GPU", f"{gpu.name}{memory}"))
        rows += sorted(run.meta.versions.items())
        if run.meta.host:
            rows.append(("host", run.meta.host))
        if run.meta.clocks:
            rows.append(("clocks", run.meta.clocks))
        if run.meta.device is not None:
            device = run.meta.device
            how = "measured: " if device.is_measured else "datasheet: "
            how = "" if device.source.startswith("measured") else how
            rows.append(("ceilings", f"{device.name}, {how}{device.source}"))
    gpus = [text for name, text in rows if name == "GPU"]
    for comparison in evidence.comparisons:
        facts = comparison.facts.items()
        # The GPU of a run stands there already, with its memory.
        rows += [one for one in facts if one[0] != "GPU" or not any(one[1] in g for g in gpus)]
    return list(dict.fromkeys(rows))


def _commands(evidence: Evidence) -> list[tuple[str, str]]:
    rows = [("Recorded", run.meta.command_line) for run in evidence.runs if run.meta.command]
    rows += [(f"Compared: {c.name}", f"{c.a} against {c.b}") for c in evidence.comparisons]
    rows += [("Plan, SHA-256", f"{c.name}: {c.plan.digest}") for c in evidence.comparisons]
    return list(dict.fromkeys(rows))
