"""Redaction: what a reader of a report may not see, taken out of every text before it is drawn."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal, TypeVar

from kprof.analyze.cost.facts import FIELDS, detail
from kprof.report.partner.evidence import Evidence
from kprof.report.redaction import HIDDEN, HOST, redacted, without_identities, without_secrets
from kprof.report.section import displayable
from kprof.report.units import shorten
from kprof.trace import Trace

Level = Literal["internal", "partner", "public"]
LEVELS: tuple[Level, ...] = ("internal", "partner", "public")
MARKS = {
    "internal": "Internal: paths, host names and commands are shown",
    "partner": "Confidential, for the partner: without paths, host names and prompts",
    "public": "Public: without paths, host names, prompts and prices",
}

LONGEST_TEXT = 1_200
_IN_ONE_LINE = str.maketrans("\n\t", "  ")
# Inputs of a cost whose meaning is in $, as options and as fields of a TOML or JSON file; and the
# options of earlier versions, which saved files hold.
_INPUTS = "|".join(
    (
        *(
            re.escape(name.rpartition(".")[2]).replace("_", "[-_]")
            for name, one in FIELDS.items()
            if "$" in detail(one.type, "description")
        ),
        *("kwh-price", "capex", "opex", r"usd_per_\w+"),
    )
)
_MONEY = re.compile(
    r"(?:US)?[$€£]\s?[\d.,]+(?:\s?(?:k|M|B|T|million|billion)\b)?"
    rf"|(?i:--?(?:{_INPUTS}))[\s=]+[\d.,]+"
    rf"|(?i:(?<![\w-])(?:{_INPUTS}))[\"']?\s*[=:]\s*\[?[\d.,]+"
    r"|[\d.,]+\s?(?:USD|EUR|dollars?)\b"
)

T = TypeVar("T")


def reduced(evidence: Evidence, level: Level) -> Evidence:
    """Return the evidence without what a level leaves out as a whole: of the public one, money."""
    if level != "public":
        return evidence
    runs = tuple(map(_without_money, evidence.runs))
    return dataclasses.replace(evidence, costs=(), runs=runs)


def _without_money(run: Trace) -> Trace:
    diagnosis = run.diagnosis
    if diagnosis is None:
        return run
    findings = tuple(
        dataclasses.replace(one, saving=one.saving and dataclasses.replace(one.saving, worth=None))
        for one in diagnosis.findings
    )
    kept = dataclasses.replace(diagnosis, findings=findings, price=HIDDEN)
    return dataclasses.replace(run, diagnosis=kept)


class Redactor:
    """Takes out of texts what a level forbids, and what no reader could read."""

    def __init__(self, level: Level, evidence: Evidence) -> None:
        """Learn the host names that the evidence mentions, and which texts name price lists."""
        self._level = level
        prices = [costs.price for costs in evidence.costs if costs.price]
        self._sources = {source for price in prices for source in price.sources}
        hosts = sorted({name for name in _hosts(evidence) if name}, key=lambda n: (-len(n), n))
        # A host may be called gpu, and then GPU is another word.
        names = "|".join(f"{'(?i:' if len(n) > 4 else '(?:'}{re.escape(n)})" for n in hosts)
        self._hosts = re.compile(rf"(?<![\w-])(?:{names})(?![\w-])") if names else None

    def clean(self, text: str) -> str:
        """Return a text as this level may show it."""
        is_source = text in self._sources
        text = displayable(text.translate(_IN_ONE_LINE), in_one_line=True)
        if self._level == "internal":
            text = without_secrets(text)
        else:
            text = without_identities(text, keeps_web=is_source and self._level == "partner")
            if self._hosts:
                text = self._hosts.sub(HOST, text)
        if self._level == "public":
            text = _MONEY.sub(HIDDEN, text)
        return shorten(text, LONGEST_TEXT)

    def apply(self, thing: T) -> T:
        """Return plain data with every text in it cleaned."""
        return redacted(thing, self.clean)


def _hosts(evidence: Evidence) -> Iterable[str]:
    for run in evidence.runs:
        if run.meta.host:
            yield run.meta.host
    for comparison in evidence.comparisons:
        for name, text in comparison.facts.items():
            if "host" in name.lower() or "node" in name.lower():
                yield text
