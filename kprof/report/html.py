"""The HTML page: one offline file, whose figures the Plotly script inside it draws."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from kprof.errors import KprofError
from kprof.report.kernel_names import readable
from kprof.report.redaction import redacted
from kprof.report.section import (
    Bar,
    Column,
    Facts,
    Figure,
    Part,
    Section,
    Table,
    Text,
    displayable,
    is_in_terminal,
)
from kprof.storage import cache_folder

# Characters of one cell of a table: more than names of templates have.
LONGEST_CELL = 4_000


@dataclass(frozen=True)
class PackedScript:
    """A script as gzip in base64, and the hash of its text for a content security policy."""

    packed: str
    content_hash: str


def pack_plotly() -> PackedScript:
    """Pack the script of the installed plotly, or take what an earlier call packed.

    Packing takes longer than the rest of a page, so it is kept in the user's cache folder.
    """
    folder = cache_folder()
    if folder is None:
        return _pack(_find_script())
    kept = folder / f"plotly-{version('plotly')}.b64"
    packed = _read_cache(kept)
    if packed is None:
        packed = _pack(_find_script())
        _write_cache(kept, packed)
    return packed


def _find_script() -> Path:
    """Return where the installed plotly keeps its script; importing plotly would be slow."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    return Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


def _pack(script: Path) -> PackedScript:
    content = script.read_bytes()
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    # A time inside the gzip header would make two equal pages differ.
    packed = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
    return PackedScript(packed, f"sha256-{digest}")


def _read_cache(path: Path) -> PackedScript | None:
    """Return what was kept, or None where there is nothing or the file is damaged."""
    try:
        seal, content_hash, packed = path.read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):
        return None
    kept = PackedScript(packed, content_hash)
    return kept if _seal(kept) == seal else None


def _write_cache(path: Path, packed: PackedScript) -> None:
    """Keep it for the next report; a cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
            partial.write("\n".join([_seal(packed), packed.content_hash, packed.packed]))
        Path(partial.name).replace(path)
    except OSError:
        return


def _seal(packed: PackedScript) -> str:
    return hashlib.sha256(f"{packed.content_hash}\n{packed.packed}".encode()).hexdigest()


# The page shows so many rows of a table (page.css), and the rest on demand; hiding fewer than
# these would save no room.
ROWS_SHOWN = 12
ROWS_SPARED = 4

# Of the report in a notebook, which scrolls inside.
FRAME_HEIGHT = "40em"

_FOLDER = Path(__file__).parent


def write_html(title: str, sections: list[Section], path: Path, subtitle: str = "") -> None:
    """Write the report as one offline HTML file; the same data give the same bytes.

    Passwords, keys and tokens are left out.
    """
    title, sections, subtitle = redacted((title, sections, subtitle))
    page = render_page(title, sections, subtitle).encode()
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(page)
    partial.replace(path)


def write_page(title: str, sections: list[Section], path: Path, *, force: bool) -> None:
    """Write the page where a user asked for it.

    Raises:
        KprofError: something is there already and `force` is not given, or it cannot be written.
    """
    another = "name another file with --out"
    if path.is_dir():
        raise KprofError(f"{path} is a folder, so the page cannot be written there", fix=another)
    if path.exists() and not force:
        raise KprofError(f"{path} exists already", fix=f"{another}, or pass --force")
    try:
        write_html(title, sections, path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix=another) from error


def render_page(
    title: str, sections: list[Section], subtitle: str = "", *, with_scripts: bool = True
) -> str:
    """Return the text of the page; without scripts, tables don't sort and figures are missing."""
    plotly = pack_plotly()
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    page = _template().render(
        title=title,
        subtitle=subtitle,
        script_hashes=Markup(f"'{_hash_of(script)}' '{plotly.content_hash}'"),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        plotly=Markup(plotly.packed),
        sections=[
            {"title": section.title, "anchor": anchor, "parts": list(_parts(section, anchor))}
            for section in sections
            for anchor in [re.sub(r"\W+", "-", section.title.lower()).strip("-")]
        ],
        has_figures=with_scripts
        and any(isinstance(part, Figure) for s in sections for part in s.parts),
        has_tables=with_scripts
        and any(isinstance(part, Table) for s in sections for part in s.parts),
    )
    return displayable(page)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True
    )
    environment.filters["readable"] = readable
    environment.filters["with_code"] = _with_code
    return environment.get_template("page.html.jinja")


def render_frame(title: str, sections: list[Section], subtitle: str = "") -> str:
    """Return an element for a notebook with the sections that a terminal shows, without scripts.

    Passwords, keys and tokens are left out.
    """
    shown = [
        replace(one, parts=tuple(map(_cut, filter(is_in_terminal, one.parts))))
        for one in sections
        if one.in_terminal
    ]
    page = render_page(*redacted((title, shown, subtitle)), with_scripts=False)
    style = f"width:100%;height:{FRAME_HEIGHT};border:0"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}"></iframe>'


def _cut(part: Part) -> Part:
    """Return a part with as many rows as a terminal shows."""
    if not isinstance(part, Table):
        return part
    number = part.terminal_rows
    return replace(part, rows=part.rows[:number], share=part.share[:number])


def embed_json(value: object) -> str:
    """Return compact JSON that can stand inside a script element, with any names."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = displayable(text)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash_of(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()


def _parts(section: Section, anchor: str) -> Iterator[dict[str, Any]]:
    """Yield each part of a section as the template wants it."""
    for number, part in enumerate(section.parts):
        here = f"{anchor}-{number}"
        if isinstance(part, Text):
            yield {"is_text": True, "text": part.text, "tone": part.tone}
        elif isinstance(part, Facts):
            columns = 3 if len(part.items) % 3 == 0 else 4
            yield {"is_facts": True, "facts": part.items, "columns": columns}
        elif isinstance(part, Table):
            yield {"is_table": True, "anchor": here, **_table(part)}
        elif isinstance(part, Bar):
            yield {"is_bar": True, "caption": part.caption, "segments": part.segments}
        else:
            yield {"is_figure": True, "anchor": here, **_figure(part)}


def _with_code(text: str) -> Markup:
    """Set what stands between backticks as code; all else is escaped, with numbers at units."""
    pieces = re.split(r"`([^`]+)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if is_code else _keep_units(piece)
        for piece, is_code in zip(pieces, itertools.cycle((False, True)))
    )


def _keep_units(text: str) -> str:
    """Bind a number to its unit, so that no line ends between them."""
    return re.sub(r"(?<=\d) (?=(?:%|[mµn]?s)(?:\W|$))", "\N{NO-BREAK SPACE}", text)


def _table(table: Table) -> dict[str, Any]:
    longest = max(map(abs, table.share), default=0.0) or 1.0
    percents = [f"{100 * abs(share) / longest:.1f}" for share in table.share]
    rows = [
        {
            "cells": _cells(table.columns, row),
            "percent": percents[i] if percents else "",
            "change": _change_of(table.share[i]) if table.has_signed_share else "",
        }
        for i, row in enumerate(table.rows)
    ]
    return {
        "folded": table.folded,
        "columns": table.columns,
        "caption": table.caption,
        "bars": bool(table.share),
        "is_long": len(table.rows) > ROWS_SHOWN + ROWS_SPARED,
        "rows": rows[:-1] if table.has_total else rows,
        "total": rows[-1:] if table.has_total else [],
    }


def _change_of(share: float) -> str:
    """Return how a bar of a change is drawn."""
    return "more" if share > 0 else "less" if share < 0 else ""


def _cells(columns: tuple[Column, ...], row: tuple[str, ...]) -> list[tuple[Column, str]]:
    return [(column, _short(cell)) for column, cell in zip(columns, row, strict=True)]


def _short(cell: str) -> str:
    return cell if len(cell) <= LONGEST_CELL else f"{cell[:LONGEST_CELL]}…"


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "caption": figure.caption,
        "height_px": figure.height_px,
        "json": Markup(embed_json({"data": figure.data, "layout": figure.layout})),
    }
