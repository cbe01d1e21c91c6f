"""Outcomes as JUnit XML, which every CI server shows as tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree

from kprof.report.redaction import redacted

Outcome = Literal["passed", "failed", "skipped"]

# Characters that XML 1.0 does not allow.
FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
    parent = ElementTree.SubElement(root, "testsuite", {"name": _legal(suite), **told})
    for case in cases:
        names = {"classname": _legal(case.group), "name": _legal(case.name)}
        child = ElementTree.SubElement(parent, "testcase", names)
        if case.outcome != "passed":
            tag = "failure" if case.outcome == "failed" else "skipped"
            ElementTree.SubElement(child, tag, {"message": _legal(case.why)})
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _legal(text: str) -> str:
    return FORBIDDEN.sub("�", text)
