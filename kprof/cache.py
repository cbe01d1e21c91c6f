"""Where kprof keeps what it can make again: a folder of the user's own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the user's own folder; None for a user without a home, as in some containers."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / "kprof"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    return home / ".cache" / "kprof" if home.is_absolute() else None
