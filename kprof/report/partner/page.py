"""The page of a partner report: one HTML file without scripts or links to load.

Drawings become SVG inside the page, styled by classes alone, because the policy forbids more.
"""

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

from kprof.report.kernel_names import readable
from kprof.report.partner import parts as nouns
from kprof.report.partner.parts import Box, Drawing, Mark, Shape, Stroke
from kprof.report.section import Facts, Table, Text
from kprof.report.units import MISSING, shorten


def to_svg(drawing: Drawing, style: str, label: str) -> Markup:
    """Return a drawing as an SVG element; `label` is what is read out in its place."""
    body = Markup("").join(_element(shape) for shape in drawing.shapes)
    return Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        style, _number(drawing.width), _number(drawing.height), label, body
    )


def bar_svg(share: float) -> Markup:
    """Return a plain bar of a table: so much of 100 units."""
    length = _number(100 * min(max(share, 0.0), 1.0))
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="k0" x="0" y="0" width="{}" height="8"/></svg>'
    ).format(length)


def swatch_svg(style: str) -> Markup:
    """Return what stands before a name in a legend: the fill, or the symbol where one is named."""
    fill, _, symbol = style.partition(" ")
    shape: Shape = Box(1, 1, 14, 14, fill)
    if symbol:
        shape = Mark(8, 8, 12, symbol, fill)  # type: ignore[arg-type]
    return Markup('<svg class="swatch" viewBox="0 0 16 16" aria-hidden="true">{}</svg>').format(
        _element(shape)
    )


def _element(shape: Shape) -> Markup:
    if isinstance(shape, Box):
        return _with_tip(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"').format(
                shape.style, *map(_number, (shape.x, shape.y, shape.width, shape.height))
            ),
            "rect",
            shape.tip,
        )
    if isinstance(shape, Stroke):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        return Markup('<polyline class="{}" points="{}"/>').format(shape.style, points)
    if isinstance(shape, Mark):
        return _with_tip(_symbol(shape), "path", shape.tip)
    anchor = "" if shape.anchor == "start" else Markup(' text-anchor="{}"').format(shape.anchor)
    style = Markup(' class="{}"').format(shape.style) if shape.style else ""
    return Markup('<text x="{}" y="{}"{}{}>{}</text>').format(
        _number(shape.x), _number(shape.y), anchor, style, shape.text
    )


def _with_tip(opening: Markup, name: str, tip: str) -> Markup:
    if not tip:
        return opening + Markup("/>")
    return opening + Markup("><title>{}</title></{}>").format(tip, name)


def _symbol(mark: Mark) -> Markup:
    x, y, r = mark.x, mark.y, mark.size / 2
    half = f"a{_number(r)} {_number(r)} 0 1 0"
    paths = {
        "circle": f"M{_number(x - r)} {_number(y)}"
        f"{half} {_number(2 * r)} 0{half} {_number(-2 * r)} 0z",
        "square": _polygon(x, y, r * 0.9, ((-1, -1), (1, -1), (1, 1), (-1, 1))),
        "triangle": _polygon(x, y, r * 1.1, ((0, -1), (0.95, 0.8), (-0.95, 0.8))),
        "diamond": _polygon(x, y, r * 1.1, ((0, -1), (1, 0), (0, 1), (-1, 0))),
        "cross": f"M{_number(x - r)} {_number(y - r)}L{_number(x + r)} {_number(y + r)}"
        f"M{_number(x - r)} {_number(y + r)}L{_number(x + r)} {_number(y - r)}",
    }
    style = f"{mark.style} stroke" if mark.symbol == "cross" else f"{mark.style} mark"
    return Markup('<path class="{}" d="{}"').format(style, paths[mark.symbol])


def _polygon(x: float, y: float, r: float, corners: tuple[tuple[float, float], ...]) -> str:
    return "M" + "L".join(f"{_number(x + r * a)} {_number(y + r * b)}" for a, b in corners) + "z"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


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
    """Return the text of the page; every text is escaped here."""
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
