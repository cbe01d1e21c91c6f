"""Outcomes as JUnit XML, which every CI server shows as tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from kprof.report.redaction import redacted
from kprof.report.section import displayable

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Case:
    """One check: passed, failed, or skipped where it is undecided."""

    group: str
    name: str
    outcome: Outcome
    why: str = ""


def render_junit(suite: str, cases: Sequence[Case]) -> bytes:
    """Return the outcomes as a document with one suite; the same outcomes give the same bytes."""
    suite, cases = redacted((suite, tuple(cases)))
    counts = {name: sum(case.outcome == name for case in cases) for name in ("failed", "skipped")}
    root = ElementTree.Element("testsuites")
    told = {"tests": str(len(cases)), "failures": str(counts["failed"]), "errors": "0"}
    told |= {"skipped": str(counts["skipped"])}
    parent = ElementTree.SubElement(root, "testsuite", {"name": displayable(suite), **told})
    for case in cases:
        names = {"classname": displayable(case.group), "name": displayable(case.name)}
        child = ElementTree.SubElement(parent, "testcase", names)
        if case.outcome != "passed":
            tag = "failure" if case.outcome == "failed" else "skipped"
            ElementTree.SubElement(child, tag, {"message": displayable(case.why)})
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"
