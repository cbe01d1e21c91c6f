"""What a command has to show, and how it speaks meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import typer

from kprof.redaction import without_secrets

if TYPE_CHECKING:
    from kprof.report.section import Section


class Answer(NamedTuple):
    """A title, sections and a last line (the next useful command), or JSON instead of them."""

    title: str
    sections: list[Section]
    json: bytes | None = None
    last: str = ""
    exit_code: int = 0
    if_unwritten: str | None = "see where it goes"
    """What to do when the output cannot be written; None: that is no error."""
    shows_secrets: bool = False
    """The reader asked to see passwords, keys and tokens."""


def say(message: str) -> None:
    """Tell the user something, on stderr, without the secrets of a command line in it."""
    typer.echo(f"kprof: {without_secrets(message)}", err=True)
