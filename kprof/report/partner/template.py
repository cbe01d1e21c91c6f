"""Templates: which sections a partner report has, in which order, under which titles."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import msgspec

from kprof.discover import modules_in
from kprof.errors import KprofError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "templates"
SECTIONS = "kprof.report.partner.sections"


@dataclass(frozen=True)
class Template:
    """The sections by their names, in order; `titles` renames some of them."""

    sections: tuple[str, ...]
    titles: dict[str, str] = field(default_factory=dict)


def all_sections() -> dict[str, ModuleType]:
    """Return every section by its name: the file that holds it."""
    return {module.__name__.rpartition(".")[2]: module for module in modules_in(SECTIONS)}


def list_templates() -> list[str]:
    """Return the names of the templates that kprof brings."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_template(name: str) -> Template:
    """Read a template of kprof's by its name, or one's own by its file.

    Raises:
        KprofError: there is none of that name, it is no template, or names an unknown section.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        template = msgspec.convert(content, Template)
        if unknown := sorted(content.keys() - {"sections", "titles"}):
            raise ValueError(f"it sets {unknown[0]}, which means nothing")
    except OSError as error:
        fix = f"take {' or '.join(list_templates())}, or name a file that ends in .toml"
        raise KprofError(f"there is no template {name}", fix=fix) from error
    except (ValueError, msgspec.ValidationError) as error:
        fix = "it needs a line such as sections = ['cover', 'summary']; see docs/partner_report.md"
        raise KprofError(f"{name} is no template: {error}", fix=fix) from error
    known = all_sections()
    named = [*template.sections, *template.titles]
    if unknown := [one for one in named if one not in known]:
        problem = f"{name}: there is no section {unknown[0]!r}"
        raise KprofError(problem, fix=f"sections: {', '.join(known)}")
    if len(set(template.sections)) < len(template.sections) or not template.sections:
        raise KprofError(f"{name} names a section twice, or none", fix="name each once")
    return template
