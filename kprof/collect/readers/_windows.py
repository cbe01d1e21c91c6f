"""Which window of each process of a run is read."""

from __future__ import annotations

import re
from pathlib import Path

_WINDOW = re.compile(r"window-([0-9]{1,9})\.json(?:\.gz)?")


def newest_windows(raw: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return each process's folder with its window, and the names of other windows.

    The newest one that all processes have, so that they were recorded together; else of each its
    own newest. Windows of one process are no ranks, and the time between them is not idle time.
    """
    parts = sorted(path.parent for path in raw.glob("rank*-pid*/recorder.json"))
    numbered = {part: own for part in parts if (own := _windows_of(part))}
    shared = set.intersection(*map(set, numbered.values())) if numbered else set()
    chosen = [(part, own[max(shared or own)]) for part, own in numbered.items()]
    left = {window for own in numbered.values() for window in own.values()}
    left -= {window for _, window in chosen}
    return chosen, sorted(window.relative_to(raw).as_posix() for window in left)


def _windows_of(part: Path) -> dict[int, Path]:
    """Return a process's windows by their numbers, which grow with time."""
    found = ((_WINDOW.fullmatch(path.name), path) for path in sorted(part.iterdir()))
    return {int(match[1]): path for match, path in found if match}
