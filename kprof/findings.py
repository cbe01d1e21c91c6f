"""Findings as data: a claim, its evidence, its fix, its saving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Grade = Literal["low", "medium", "high"]


@dataclass(frozen=True)
class Caveat:
    """One thing that is missing, dropped or uncertain in a recording."""

    id: str
    """What it is about, the same in every version; the text may change."""
    text: str
    """A sentence for the report."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def read(cls, saved: str | Mapping[str, str]) -> Caveat:
        """Read a caveat from JSON; older versions saved the text alone."""
        return cls("saved", saved) if isinstance(saved, str) else cls(saved["id"], saved["text"])


def with_ids(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a saved JSON whose caveats of this name have ids; older versions saved texts alone."""
    told = content.get(name)
    if not isinstance(told, list):
        return dict(content)
    return {**content, name: [Caveat.read(one) if isinstance(one, str) else one for one in told]}


@dataclass(frozen=True)
class Fix:
    """The change that a fix makes to the recording; replaying it predicts the saving.

    A fix of work says how long the finding's `rows` would still take together, with full and with
    modest success. A fix of waiting removes a cause of idle time, or puts launches into CUDA
    graphs; its modest success is half of that where the recording does not show more.
    """

    best_ns: int | None = None
    modest_ns: int | None = None
    launches: int | None = None
    """Number of launches that replace those of the rows; None: as many as now."""
    idle_cause: str | None = None
    graphs: bool = False
    waited_ns: int | None = None
    """The time per step that other ranks wait for those of the finding: a step of all ranks gets
    shorter by as much, which no replay of one rank shows; modestly, by half."""


@dataclass(frozen=True)
class Worth:
    """Dollars a month: the least saving at the least price, the middle ones, the most of both."""

    low_usd: float
    middle_usd: float
    high_usd: float


@dataclass(frozen=True)
class Saving:
    """How much shorter a step would get, in ns, between `low_ns` and `high_ns`; None: unknown."""

    step_ns: int
    low_ns: int | None
    high_ns: int | None
    basis: str
    """How the interval was found, or why it is unknown."""
    worth: Worth | None = None
    """$ a month if the run's GPUs do nothing else; None: unknown, or no price was given."""

    @property
    def middle_ns(self) -> int | None:
        """The middle of the interval; None where it is not known."""
        if self.low_ns is None or self.high_ns is None:
            return None
        return (self.low_ns + self.high_ns) // 2


# Why a call site of a dry run has no decision.
NOT_CALLED = "it was not called in the step after the recording"


@dataclass(frozen=True)
class DryRunRow:
    """Call sites of a kernel with one outcome."""

    kernel: str
    provider: str | None
    """The provider that a swap would call; None: the original would run."""
    why: str
    """Why the original would run; empty: it would not."""
    num_sites: int
    num_calls: int
    """Their calls in the step after the recording."""


@dataclass(frozen=True)
class DryRun:
    """The calls that kernels would take in the recorded workload, found without swapping any."""

    kernels: tuple[str, ...] = ()
    """The kernels that were asked for."""
    rows: tuple[DryRunRow, ...] = ()
    why_not: str = ""
    """Why there was no dry run; empty: there was one."""
    took_ns: int = 0
    """How long it held up the workload between two steps."""
    why_others: str = ""
    """Why other kernels were not looked for to the end; empty: they were."""


@dataclass(frozen=True)
class Finding:
    """One thing that costs time or memory: a claim, the evidence, the fix."""

    rule: str
    """The rule that found it; its playbook has the same name."""
    claim: str
    """One plain sentence with numbers and units."""
    confidence: Grade
    """How surely the claim is true and the fix applies."""
    effort: Grade
    """low: a setting; medium: some lines; high: a project with a quality gate of its own."""
    rows: tuple[int, ...] = field(default=(), repr=False)
    """Rows of `kernels` that prove it; of very many those that took longest."""
    idle_rows: tuple[int, ...] = field(default=(), repr=False)
    """Rows of `idle` that prove it; of very many the longest."""
    range_rows: tuple[int, ...] = field(default=(), repr=False)
    """Rows of `ranges` that prove it."""
    details: tuple[str, ...] = ()
    """Where to look, largest first; what else was seen."""
    fix: Fix = Fix()
    saving: Saving | None = None
    cause_ns: int | None = None
    """The cost in a step, or in the window: the device's time in the rows, and the idle time of
    them and of their launches. An upper limit of the saving; None: not a matter of time."""
    swap: str | None = None
    """The kernel of the library that can replace the rows; None: none can."""
    dry_run: str = ""
    """Where the kernel would run, or what prevents it, by the dry run; empty: it has no kernel."""
    command: str = ""
    """The command that proves the gain; empty where kprof has none."""
    num_rows: int = 0
    """How many rows of `kernels` there were, `num_idle_rows` of `idle`."""
    num_idle_rows: int = 0

    @property
    def playbook(self) -> str:
        """Name of the page that says how to confirm and fix it."""
        return self.rule


@dataclass(frozen=True)
class NotApplicable:
    """A rule that lacks data of the recording, and how to record it."""

    rule: str
    because: str
    fix: str


@dataclass(frozen=True)
class StartUp:
    """Idle time of all GPUs that happened once in the window: in no saving, and no money."""

    what: str
    """Module loading, memory allocation, graph capture, compilation, or a cause of idle time."""
    place: str | None
    time_ns: int
    num_pieces: int


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a run: unexplained time first, then by expected saving."""

    findings: tuple[Finding, ...] = ()
    together: Saving | None = None
    """All fixes in one replay."""
    differs_by: Literal["", "overlap", "shared limit"] = ""
    """Why `together` is not the sum: less where savings overlap, more where one alone leaves a
    limit that others lift."""
    start_up: tuple[StartUp, ...] = ()
    swapped: Saving | None = None
    """The same of those that are swaps, where there are several."""
    not_applicable: tuple[NotApplicable, ...] = ()
    whole: str = "a step"
    """The denominator of savings and shares: a step, or the window of a run without steps."""
    whole_ns: int = 0
    """How long that is, as recorded."""
    price: str = ""
    """The basis of the savings' worth: GPUs, price, dates of its lists; empty without a price."""
