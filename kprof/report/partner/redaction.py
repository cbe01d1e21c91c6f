"""Redaction: what a reader of a report may not see, taken out of every text before it is drawn."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Iterable
from typing import Literal, TypeVar

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.settings import without_hosts, without_secrets
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
LEFT_OUT = "[left out]"
HOST = "[host]"

# An option, or a name with a value; both are bounded, so that they take no longer than a text.
_NAMED = (
    r"(?i)((?:(?<![\w-])--?[\w-]{0,40}(?:%s)[\w-]{0,40}(?:\s*[=:]\s*|\s+))"
    r"|(?:(?:%s)[\w-]{0,40}\s*[=:]\s*))"
)
_PROMPTS = "prompt|system[_-]message|instruction|input[_-]text|question"
_PROMPT = re.compile(
    _NAMED % (_PROMPTS, _PROMPTS)
    + r"(\"(?:\\.|[^\"])*\"|'(?:\\.|[^'])*'|(?:(?!\s-{1,2}[a-zA-Z]).)+)"
)
_WORD = re.compile(
    r"[a-zA-Z][a-zA-Z0-9+.-]{1,15}://(?:\[left out\]|[^\s\"'`<>|;,])+"
    r"|[^\s\"'`<>|;,()\[\]{}=]+"
)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_EXTENSION = re.compile(r"\.[A-Za-z]\w{0,7}$")
_ADDRESS = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}")
_NETWORKS = (".internal", ".local", ".lan", ".corp", ".intra", ".localdomain")
_MONEY = re.compile(
    r"(?:US)?[$€£]\s?[\d.,]+(?:\s?(?:k|M|B|T|million|billion)\b)?"
    r"|(?i:--?(?:baseline-|api-|kwh-)?price|--capex|--opex|--fee)[\s=]+[\d.,]+"
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
    kept = dataclasses.replace(diagnosis, findings=findings, price=LEFT_OUT)
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
        text = without_secrets("".join(map(_visible, text)), LEFT_OUT)
        if self._level != "internal":
            text = _PROMPT.sub(rf"\1{LEFT_OUT}", text)
            text = without_hosts(text, HOST)
            keeps = is_source and self._level == "partner"
            text = _WORD.sub(lambda found: _public_part(found[0], keeps_address=keeps), text)
            if self._hosts:
                text = self._hosts.sub(HOST, text)
        if self._level == "public":
            text = _MONEY.sub(LEFT_OUT, text)
        return shorten(text, LONGEST_TEXT)

    def apply(self, thing: T) -> T:
        """Return plain data with every text in it cleaned."""
        if isinstance(thing, str):
            return self.clean(thing)  # type: ignore[return-value]
        if isinstance(thing, tuple):
            return tuple(self.apply(one) for one in thing)  # type: ignore[return-value]
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            changed = {
                f.name: self.apply(getattr(thing, f.name)) for f in dataclasses.fields(thing)
            }
            return dataclasses.replace(thing, **changed)
        return thing


def _public_part(word: str, *, keeps_address: bool) -> str:
    """Return a word without the folders above a file, and without an address."""
    if "://" in word:
        is_kept = keeps_address and word.startswith(("https://", "http://"))
        return _without_query(word) if is_kept else LEFT_OUT
    if _DRIVE.match(word) or word.startswith("\\\\"):
        return re.split(r"[\\/]+", word)[-1] or LEFT_OUT
    return ":".join(_without_place(piece) for piece in word.split(":"))


def _without_query(address: str) -> str:
    """Return an address on the web as far as it is public."""
    scheme, _, rest = address.partition("?")[0].partition("://")
    if "@" in rest.partition("/")[0]:
        return LEFT_OUT
    host = rest.partition("/")[0].partition(":")[0]
    return f"{scheme}://{HOST}" if _without_place(host) == HOST else f"{scheme}://{rest}"


def _without_place(word: str) -> str:
    """Return the last part of a path, and a mark in place of an address of the network."""
    if _ADDRESS.fullmatch(word) or word.lower().endswith(_NETWORKS):
        return HOST
    parts = [part for part in re.split(r"[\\/]+", word) if part not in ("", ".", "..", "~")]
    is_rooted = word.startswith(("/", "~/", "./", "../"))
    is_deep = len(parts) > 2 and all(len(part) > 1 and not part.isdigit() for part in parts)
    if parts and (is_rooted or is_deep or (len(parts) > 1 and _EXTENSION.search(parts[-1]))):
        return parts[-1]
    return word


def _visible(character: str) -> str:
    """Return a character that cannot hide or turn around its neighbours."""
    kind = unicodedata.category(character)
    if character in "\n\t":
        return " "
    return (
        "\N{REPLACEMENT CHARACTER}" if kind in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else character
    )


def _hosts(evidence: Evidence) -> Iterable[str]:
    for run in evidence.runs:
        if run.meta.host:
            yield run.meta.host
    for comparison in evidence.comparisons:
        for name, text in comparison.facts.items():
            if "host" in name.lower() or "node" in name.lower():
                yield text
