"""`kprof playbook`: the page that confirms a finding."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from kprof.commands import Answer


def playbook(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of a finding [default: list all].")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print it as JSON.")] = False,
) -> Answer:
    """Show how to confirm and fix a finding, or list all playbooks.

    Each has the symptom, its cause, how to confirm and fix it, the expected gain, and the limits.
    """
    import msgspec

    from kprof.report.playbooks import (
        all_playbooks,
        find_playbook,
        section_of_list,
        sections_of_page,
    )

    def encoded(value: object) -> bytes | None:
        return msgspec.json.format(msgspec.json.encode(value)) if json else None

    if name is None:
        pages = all_playbooks()
        listed = [section_of_list([(page.name, page.title) for page in pages])]
        return Answer("playbooks", listed, encoded(pages), "next: kprof playbook NAME")
    page = find_playbook(name)
    last = "next: kprof run, then kprof ab to prove the gain"
    return Answer(page.title, sections_of_page(page), encoded(page), last)
