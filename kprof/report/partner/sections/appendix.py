"""The appendix: environment, commands, hashes of the input files, and a glossary."""

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
        "The worst value that the measurements allow with 99 % confidence; for a missed target, "
        "the best value.",
    ),
    ("Calibration", "A test of the measurement itself: how often it reports a false difference."),
    ("Confidence", "How often such a range contains the true value: 95 % is 19 in 20."),
    ("FLOP", "One floating-point operation, such as an addition."),
    ("GPU", "The processor that does the arithmetic. It is paid by the hour."),
    ("Idle", "Time in which the GPU did nothing but was paid for."),
    ("Interval, range", "Where the true value lies, with the stated confidence."),
    ("Kernel", "A program that runs on the GPU, such as one matrix multiplication."),
    ("Median", "The value in the middle: half are smaller, half are larger."),
    ("p-value", "How likely a difference as clear as this is if there were none."),
    ("Pair", "One measurement before and one after, close together in time."),
    ("Percentile, p99", "The value that 99 of 100 measurements do not exceed."),
    ("Quality gate", "Checks that results stay right when a part is replaced."),
    ("Roofline", "The time that the work takes at the full speed of memory and arithmetic."),
    ("Service level, SLA", "Targets agreed with users, such as a maximum time to the first token."),
    ("Step", "One iteration: one update in training, one model call in inference."),
    ("Token", "A part of a word; language models are priced per token."),
)


def render(evidence: Evidence) -> Chapter:
    """Render the commands to repeat the measurements, the input files, and the glossary."""
    blocks: list[Block] = []
    if environment := _environment(evidence):
        blocks.append(_table("Environment", environment, "Hardware and software of the runs."))
    if commands := _commands(evidence):
        blocks.append(_table("Measurement", commands, "Commands to repeat the measurements."))
    if evidence.sources:
        columns = (Column("File"), Column("Holds"), Column("SHA-256", "prose"))
        rows = tuple((one.name, one.what, one.sha256) for one in evidence.sources)
        blocks.append(Table(columns, rows, "Files that this report was made from."))
    blocks.append(Text("Glossary", "heading"))
    blocks.append(_table("Term", WORDS, "Terms in this report."))
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
            how = "" if device.source.startswith("measured") else f"{device.origin}: "
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
