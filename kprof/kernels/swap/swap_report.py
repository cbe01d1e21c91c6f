"""The report of a swap: the outcome of every call site, as plain data, also as JSON.

The workload writes it; commands read it without torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from kprof.errors import KprofError

# Name of the file in the folder of a run or a comparison.
SWAP_REPORT = "swap.json"


class SwapError(KprofError):
    """A swap that cannot be entered or left."""


@dataclass(frozen=True)
class Calls:
    """The count of calls with one outcome."""

    num_calls: int
    provider: str | None
    """The provider that ran; None: the original."""
    why: str | None = None
    """Why the original ran; None: the kernel ran."""
    is_compiled: bool = False
    """Whether calls were traced for a compiled graph, whose runs are not counted."""
    num_joined: int = 0
    """Of these, calls of FP8 layers whose input had an FP8 copy."""


@dataclass(frozen=True)
class SiteReport:
    """The outcome of one call site."""

    name: str
    """Qualified name of the module; a root has the name of its class."""
    kernel: str
    what: str
    """The class of the module, or the function that it calls."""
    skipped: str | None = None
    """Why it was not swapped; None: it was."""
    calls: tuple[Calls, ...] = ()

    @property
    def num_replaced(self) -> int:
        """Calls of the kernel, without compiled graphs."""
        return sum(one.num_calls for one in self._counted if one.provider is not None)

    @property
    def num_fallen_back(self) -> int:
        """Calls of the original, without compiled graphs."""
        return sum(one.num_calls for one in self._counted if one.provider is None)

    @property
    def has_fallen_back(self) -> bool:
        """Whether all calls so far ran the original, compiled graphs included."""
        is_called = self.skipped is None and bool(self.calls)
        return is_called and all(one.provider is None for one in self.calls)

    @property
    def _counted(self) -> list[Calls]:
        return [one for one in self.calls if not one.is_compiled]


@dataclass(frozen=True)
class SwapReport:
    """The outcome of a swap."""

    kernels: tuple[str, ...]
    sites: tuple[SiteReport, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Remarks for the reader."""

    @property
    def replaced(self) -> tuple[SiteReport, ...]:
        """Sites where a kernel runs, or will run when they are called."""
        return tuple(
            site for site in self.sites if site.skipped is None and not site.has_fallen_back
        )

    @property
    def fallen_back(self) -> tuple[SiteReport, ...]:
        """Sites of which all calls so far ran the original."""
        return tuple(site for site in self.sites if site.has_fallen_back)

    @property
    def skipped(self) -> tuple[SiteReport, ...]:
        """Sites that were not swapped."""
        return tuple(site for site in self.sites if site.skipped is not None)


def write_report(report: SwapReport, path: Path) -> None:
    """Write a report as JSON, atomically."""
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
