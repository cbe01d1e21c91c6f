"""The report of a swap: what became of every call site, as plain data and as a JSON file.

The workload writes it; commands read it without torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from kprof.errors import KprofError

# In the folder of a run, or of a comparison.
SWAP_REPORT = "swap.json"


class SwapError(KprofError):
    """A swap that cannot be made or taken back in this way."""


@dataclass(frozen=True)
class Calls:
    """So many calls that went one way."""

    num_calls: int
    provider: str | None
    """Whose code ran; None: the original."""
    why: str | None = None
    """Why it was the original; None where the kernel ran."""
    is_compiled: bool = False
    """Whether calls were traced for a compiled graph, whose runs nobody counts."""
    num_joined: int = 0
    """Of a layer in FP8: those whose input came with its rows in FP8, from what made it."""


@dataclass(frozen=True)
class SiteReport:
    """What became of one place of a model."""

    name: str
    """The qualified name of the module; a root's own is that of its class."""
    kernel: str
    what: str
    """The class that is there, or the function that is called there."""
    skipped: str | None = None
    """Why nothing was replaced; None: it was."""
    calls: tuple[Calls, ...] = ()

    @property
    def num_replaced(self) -> int:
        """Calls that the kernel ran, without those of compiled graphs."""
        return sum(one.num_calls for one in self._counted if one.provider is not None)

    @property
    def num_fallen_back(self) -> int:
        """Calls that the original had to run, without those of compiled graphs."""
        return sum(one.num_calls for one in self._counted if one.provider is None)

    @property
    def has_fallen_back(self) -> bool:
        """Whether every call so far ran the original, or was compiled into a graph as it is."""
        is_called = self.skipped is None and bool(self.calls)
        return is_called and all(one.provider is None for one in self.calls)

    @property
    def _counted(self) -> list[Calls]:
        return [one for one in self.calls if not one.is_compiled]


@dataclass(frozen=True)
class SwapReport:
    """What became of everything that a swap was asked for."""

    kernels: tuple[str, ...]
    sites: tuple[SiteReport, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Sentences that a reader has to know."""

    @property
    def replaced(self) -> tuple[SiteReport, ...]:
        """The sites where a kernel runs, or will run when they are called."""
        return tuple(
            site for site in self.sites if site.skipped is None and not site.has_fallen_back
        )

    @property
    def fallen_back(self) -> tuple[SiteReport, ...]:
        """The sites all of whose calls so far ran the original."""
        return tuple(site for site in self.sites if site.has_fallen_back)

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """The sites that are left as they were."""
        return tuple(site for site in self.sites if site.skipped is not None)


def write_report(report: SwapReport, path: Path) -> None:
    """Write a report as JSON, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(report), indent=2))
    partial.replace(path)


def read_report(path: Path) -> SwapReport:
    """Read a report.

    Raises:
        SwapError: there is none, or the file is damaged.
    """
    try:
        report: SwapReport = msgspec.json.decode(path.read_bytes(), type=SwapReport)
        return report
    except (OSError, msgspec.MsgspecError) as error:
        raise SwapError(
            f"{path} is no report of a swap: {error}", fix="see whether the workload was swapped"
        ) from error
