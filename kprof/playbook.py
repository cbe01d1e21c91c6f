"""`kprof playbook`: for each rule the page that says how to confirm and mend what it finds."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from kprof.errors import KprofError

# In an installed package they lie inside it, in a checkout beside it.
_PLACES = (Path(__file__).parent / "playbooks", Path(__file__).parent.parent / "playbooks")
HEADINGS = ("Symptom", "Why", "Confirm", "Fix", "Expected gain", "Limits", "Sources")


@dataclass(frozen=True)
class Playbook:
    """One page: its name is that of the rule, its title says it in words."""

    name: str
    title: str
    text: str
    """The whole page, as Markdown."""

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """The page's parts: each heading, and the text below it."""
        pieces = re.split(r"^## (.+)$", self.text, flags=re.MULTILINE)[1:]
        return tuple(
            (head.strip(), body.strip())
            for head, body in zip(pieces[::2], pieces[1::2], strict=True)
        )


def all_playbooks() -> list[Playbook]:
    """Return every page, in the order of their names.

    Raises:
        KprofError: kprof was installed without them.
    """
    folder = next((place for place in _PLACES if place.is_dir()), None)
    if folder is None:
        raise KprofError("kprof was installed without its playbooks", fix="install it again")
    paths = sorted(path for path in folder.glob("*.md") if path.stem != "README")
    return [_read(path) for path in paths]


def find_playbook(name: str) -> Playbook:
    """Return the page of a rule.

    Raises:
        KprofError: no rule has that name.
    """
    pages = {page.name: page for page in all_playbooks()}
    wanted = name.replace("-", "_").removesuffix(".md")
    if wanted not in pages:
        near = ", ".join(difflib.get_close_matches(wanted, pages, 3, cutoff=0.0))
        raise KprofError(
            f"there is no playbook {name}", fix=f"the nearest: {near}; kprof playbook lists all"
        )
    return pages[wanted]


def _read(path: Path) -> Playbook:
    text = path.read_text(encoding="utf-8")
    title = next((line[2:].strip() for line in text.splitlines() if line.startswith("# ")), "")
    return Playbook(path.stem, title, text)
