"""The commands, one file each: a function named after its verb, its options, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from kprof.errors import KprofError

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
