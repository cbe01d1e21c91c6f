"""The commands, one file each, with the answer that each gives the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kprof.errors import KprofError
from kprof.report.redaction import without_secrets

if TYPE_CHECKING:
    from kprof.report.section import Section

ShowSecrets = Annotated[
    bool, typer.Option("--show-secrets", help="Show passwords, keys and tokens of command lines.")
]


def refuse_idle_options(action: str, options: Mapping[str, object], known: set[str]) -> None:
    """Refuse what an action would pass over: an option that was given and that it does not know.

    Raises:
        KprofError: there is such an option.
    """
    given = {f"--{name}" for name, value in options.items() if value}
    if unknown := sorted(given - known):
        raise KprofError(f"{action} takes no {unknown[0]}", fix="leave it out")


class Answer(NamedTuple):
    """A title, sections and a last line (the next useful command), or JSON instead of them."""

    title: str
    sections: list[Section]
    json: bytes | None = None
    last: str = ""
    exit_code: int = 0
    if_unwritten: str | None = "see where it goes"
    """The fix when the output cannot be written; None: that is no error."""
    shows_secrets: bool = False
    """The reader asked to see passwords, keys and tokens."""


def say(message: str) -> None:
    """Tell the user something, on stderr, without the secrets of a command line in it.

    A message that begins with a line break stands below a line that another program left open.
    """
    text = message.removeprefix("\n")
    lead = message.removesuffix(text)
    typer.echo(f"{lead}kprof: {without_secrets(text)}", err=True)
