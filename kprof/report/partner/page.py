"""The page of a partner report: one HTML file that needs no script and may load nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from kprof.report.partner import parts as nouns
from kprof.report.partner.svg import bar_svg, swatch_svg, to_svg
from kprof.report.section import Facts, Table, Text
from kprof.report.units import MISSING, readable, shorten

ROWS_SHOWN = 12
LONGEST_NAME = 160
LONGEST_WORD = 28
KINDS: dict[type, str] = {
    Text: "text",
    Facts: "facts",
    Table: "table",
    nouns.Picture: "picture",
    nouns.Verdict: "verdict",
    nouns.Card: "card",
    nouns.Steps: "steps",
    nouns.Folded: "folded",
}

_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_FOLDER = Path(__file__).parent


def render_page(title: str, subtitle: str, mark: str, chapters: Sequence[nouns.Chapter]) -> str:
    """Return the text of the page; every text is escaped here, whatever it says."""
    style, script = (_read(f"page.{kind}") for kind in ("css", "js"))
    return _template().render(
        title=title,
        subtitle=subtitle,
        mark=mark,
        style=Markup(style),
        script=Markup(script),
        style_hash=Markup(_hash_of(style)),
        script_hash=Markup(_hash_of(script)),
        chapters=_numbered(chapters),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(keep=_keep_units, name=_name, has_long_word=_has_long_word)
    environment.globals.update(
        svg=to_svg, bar=bar_svg, swatch=swatch_svg, ROWS=ROWS_SHOWN, MISSING=MISSING
    )
    return environment.get_template("page.html.jinja")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _numbered(chapters: Sequence[nouns.Chapter]) -> list[dict[str, Any]]:
    """Return every chapter with its anchor, and its blocks with their kinds and anchors."""
    shown: list[dict[str, Any]] = []
    for chapter in chapters:
        anchor = re.sub(r"[^a-z0-9]+", "-", chapter.title.lower()).strip("-") or "section"
        anchor = f"{anchor[:60]}-{len(shown) + 1}"
        blocks = [
            {"kind": KINDS[type(block)], "it": block, "anchor": f"{anchor}-{number}"}
            for number, block in enumerate(chapter.blocks, 1)
        ]
        shown.append({"title": chapter.title, "anchor": anchor, "blocks": _grouped(blocks)})
    return shown


def _grouped(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put neighbouring cards together, so that the page can sort them."""
    grouped: list[dict[str, Any]] = []
    for block in blocks:
        if block["kind"] != "card":
            grouped.append(block)
        elif grouped and grouped[-1]["kind"] == "cards":
            grouped[-1]["it"].append(block)
        else:
            grouped.append({"kind": "cards", "it": [block], "anchor": f"{block['anchor']}-cards"})
    return grouped


def _name(text: str) -> str:
    """Return a name without what all kernels' names share, cut in its middle if it is long."""
    return shorten(readable(text), LONGEST_NAME)


def _has_long_word(text: str) -> bool:
    """Tell whether a text has a word that no column is wide enough for."""
    return any(len(word) > LONGEST_WORD for word in text.split())


def _keep_units(text: str) -> Markup:
    """Escape a text, and let no line end inside a date, or between a number and its unit."""
    text = re.sub(r"(?<=\d) (?=(?:%|[mµn]?s|J|GB|W)(?:\W|$))", "\N{NO-BREAK SPACE}", text)
    # A sign stays with its word.
    text = re.sub(r"^([✓✗?]) ", "\\1\N{NO-BREAK SPACE}", text)
    return Markup(_DATE.sub(r'<span class="n">\g<0></span>', str(escape(text))))
