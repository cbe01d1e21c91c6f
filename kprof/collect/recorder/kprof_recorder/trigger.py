"""Orders to record, read from a file while the workload is active."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .native import monotonic
from .settings import Settings

# How often a working process looks; one that does nothing has nothing to record, and never looks.
INTERVAL_S = 0.05


class Trigger:
    """The order to record one window, as the launching process wrote it; None while there is none.

    An order names its own folder, so that every window of a service is a run of its own.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.trigger is not None
        self.order: Settings | None = None
        self._settings = settings
        self._path = settings.trigger
        self._looked_at = 0.0
        self._written: int | None = None

    def has_changed(self) -> bool:
        """Look for an order if it is time to; True if there is a new one, or none any more."""
        now = monotonic()
        if now - self._looked_at < INTERVAL_S:
            return False
        self._looked_at = now
        written = _time_of(self._path)
        if written == self._written:
            return False
        self._written = written
        self.order = None if written is None else self._read()
        return True

    def is_withdrawn(self) -> bool:
        """Whether the order that is being followed lies there no more."""
        return _time_of(self._path) != self._written

    def _read(self) -> Settings | None:
        try:
            order = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return replace(self._settings, raw=Path(order["raw"]), skip=order["skip"])


def write_order(path: Path, raw: Path, skip: int) -> None:
    """Ask for one window into `raw`, after `skip` more steps."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps({"raw": str(raw), "skip": skip}))
    unfinished.replace(path)


def _time_of(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
