"""The report of a swap: the outcome of every call site, as plain data, also as JSON.

The workload writes it; commands read it without torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kprof.errors import KprofError

# Name of the file in the folder of a run or a comparison.
SWAP_REPORT = "swap.json"
# In the place of kernels: those that make the workload faster.
AUTO = "auto"
# Why a call runs the original where a kernel would take it on a GPU.
NEEDS_GPU = "its tensors are not on a GPU"
# Why it runs the original unless a provider is named.
UNMEASURED = "no provider was measured on such calls: kprof kernels bench"
# Name of the file with what `--swap auto` tried.
CHOICE = "choice.json"
# Ending of the file, beside the log of candidates, with those that need windows.
PLAN = ".plan"
# Ending of the file, beside it, with what rank 0 swaps in at each entry.
TURNS = ".turns"
# Why a kernel has no calls.
NO_SITE = "no call site in this workload"
# Windows of a candidate at its first look; each later look has twice as many.
FIRST_LOOK = 8


# Outcomes of the correctness gate for a candidate; others say what it fails.
GATE_PASSED = "passed"
GATE_UNFINISHED = "was not judged by the correctness gate in time: --budget gives more"


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


@dataclass(frozen=True)
class CallSort:
    """Calls of a kernel of one sort, as the correctness gate counts shapes and names layouts."""

    shape: tuple[int, ...]
    dtype: str
    has_gradients: bool
    layout: str = "contiguous"
    """Of the first tensor."""


@dataclass(frozen=True)
class Ran:
    """How a kernel ran in the first entry of a candidate."""

    provider: str
    """Of most of its calls."""
    num_calls: int = 0
    """Calls that it replaced, without compiled graphs."""
    num_compiled: int = 0
    """Sites in compiled graphs."""
    sorts: tuple[CallSort, ...] = ()


@dataclass(frozen=True)
class Checked:
    """What the correctness gate says of a candidate."""

    outcome: str
    """GATE_PASSED, or what speaks against it."""
    report: dict[str, Any] | None = None
    """The gate's report as plain data; None: it came to none."""


# A kernel that makes a step shorter by at most this share does not pay.
NEUTRAL = 0.005


@dataclass(frozen=True)
class Tried:
    """A candidate of `--swap auto`: what it did to the workload's steps."""

    name: str
    """KERNEL=PROVIDER."""
    num_calls: int = 0
    """Calls that it replaced, without compiled graphs."""
    num_compiled: int = 0
    """Sites in compiled graphs."""
    num_windows: int = 0
    """Windows that were compared with those around them."""
    ratio: float | None = None
    """Step time with it over step time without; None: it has too few windows."""
    low: float | None = None
    high: float | None = None
    """Interval of the ratio, of 90 %."""
    why: str = ""
    """Why it does not run here; empty: it does."""
    sorts: tuple[CallSort, ...] = ()
    """The calls that it replaced in its first entry."""
    gate: str = ""
    """The outcome of the correctness gate for these calls; empty: it was not judged."""
    gate_report: dict[str, Any] | None = None
    """The gate's report behind the outcome."""
    is_joined: bool = False
    """Whether it was in the joint swap, which is faster for sure: its ratio is that of the joint
    swap to one without it."""
    instead_of: str = ""
    """The provider of its kernel in the joint swap, if its ratio is to that one; empty: it is
    not."""

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high is not None and self.high < 1

    @property
    def pays(self) -> bool:
        """Whether it is faster for sure; in the joint swap: unless that is as fast without it.

        As fast for sure: windows under a noisy host would leave out one neutral kernel in two, and
        without all of them the gain of the joint swap is gone.
        """
        if self.is_joined:
            return self.low is None or self.low <= 1 - NEUTRAL
        return self.is_faster

    @property
    def may_be_chosen(self) -> bool:
        """Whether it pays, and the gate does not speak against it."""
        return self.pays and self.gate in ("", GATE_PASSED)

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1


def is_of_one_kernel(one: Tried, other: Tried) -> bool:
    """Return whether two candidates are providers of one kernel."""
    return one.name.partition("=")[0] == other.name.partition("=")[0]


@dataclass(frozen=True)
class Predicted:
    """Step time with a kernel over step time without, as a finding predicts it."""

    kernel: str
    low: float | None
    high: float | None
    """None: the finding does not know its saving."""

    def holds(self, ratio: float) -> bool | None:
        """Return whether a ratio lies between both, as far as they are known."""
        if self.low is None or self.high is None:
            return None
        return self.low <= ratio <= self.high


@dataclass(frozen=True)
class Choice:
    """What `--swap auto` tried, the fastest first."""

    tried: tuple[Tried, ...]
    findings: tuple[Predicted, ...] = ()
    """What findings predicted before any was tried, the best first."""
    why_no_findings: str = ""
    """Why there are no findings; empty: a window was recorded for them."""
    made: str = ""
    """The date of a choice that was kept, and is used again; empty: it was made now."""

    joint: Tried | None = None
    """All kernels in one swap, against the workload as it is; None: none was tried."""

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen ones: of each kernel the fastest that pays and is right."""
        best: dict[str, str] = {}
        # What is faster than the joint swap's own provider comes first.
        for one in sorted(self.tried, key=lambda one: not one.instead_of):
            if one.may_be_chosen or self._may_stand_in(one):
                best.setdefault(one.name.partition("=")[0], one.name)
        return tuple(best.values())

    @property
    def gate_reports(self) -> tuple[dict[str, Any], ...]:
        """The gate's reports of the chosen ones, as plain data."""
        reports = {one.name: one.gate_report for one in self.tried}
        return tuple(report for name in self.names if (report := reports[name]) is not None)

    def _may_stand_in(self, one: Tried) -> bool:
        """Return whether a candidate pays for one of the joint swap that the gate is against."""
        if not one.instead_of or one.ratio is None or one.gate not in ("", GATE_PASSED):
            return False
        own = next((t for t in self.tried if t.is_joined and is_of_one_kernel(t, one)), None)
        if own is None or own.gate in ("", GATE_PASSED):
            return False
        return one.ratio * (own.ratio or 1.0) < 1

    @property
    def is_unjudged(self) -> bool:
        """Whether the correctness gate had no time for one that is faster."""
        return any(one.gate == GATE_UNFINISHED for one in self.tried)

    @property
    def predicted(self) -> float:
        """Step time with all that was chosen over step time without, if gains multiply."""
        names = self.names
        ratio = 1.0
        if self.joint is not None and self.joint.is_faster:
            ratio = self.joint.ratio or 1.0
        replaced = {one.name.partition("=")[0] for one in self.tried if one.name in names}
        for one in self.tried:
            if not one.is_joined:
                ratio *= (one.ratio or 1.0) if one.name in names else 1.0
            elif one.name.partition("=")[0] not in replaced:
                ratio /= one.ratio or 1.0
        return ratio

    def predicted_by_findings(self) -> tuple[float, float] | None:
        """Return the same by the findings, whose savings are added; None: not of all chosen."""
        kernels = {name.partition("=")[0] for name in self.names}
        found = {one.kernel: one for one in self.findings if one.kernel in kernels}
        ends = [(one.low, one.high) for one in found.values()]
        known = [(low, high) for low, high in ends if low is not None and high is not None]
        if len(known) < len(kernels) or not kernels:
            return None
        return 1 - sum(1 - low for low, _ in known), 1 - sum(1 - high for _, high in known)

    def best_of(self, kernel: str) -> Tried | None:
        """Return the fastest provider of a kernel that was timed; None: none was."""
        of_kernel = (one for one in self.tried if one.name.partition("=")[0] == kernel)
        timed = (one for one in of_kernel if not one.instead_of)
        return next((one for one in timed if one.ratio is not None), None)


def write_choice(choice: Choice, path: Path) -> None:
    """Write a choice as JSON."""
    path.write_text(json.dumps(asdict(choice), indent=2))


def read_choice(path: Path) -> Choice:
    """Read a choice that `write_choice` wrote."""
    choice: Choice = msgspec.json.decode(path.read_bytes(), type=Choice)
    return choice


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
