"""The peak of a device's memory, from the allocator's history: every byte has one holder."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from kprof.trace import MemoryHolder, MemoryPeak


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack."""

    filename: str = ""
    line: int = 0
    name: str = ""


@dataclass(frozen=True)
class Event:
    """An action of the allocator, such as alloc, free_requested or segment_alloc."""

    action: str
    address: int = 0
    size: int = 0
    """Bytes that were asked for; of a segment its size."""
    time_ns: int | None = None
    """Wall time; None in files of older versions of torch."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""


@dataclass(frozen=True)
class Block:
    """A block that is allocated at the end of the history."""

    address: int
    requested_bytes: int
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class DeviceHistory:
    """The allocator's history on one device, and how it ended."""

    device: int
    events: tuple[Event, ...]
    blocks: tuple[Block, ...]
    reserved_bytes: int
    """Of all segments at the end."""


@dataclass(frozen=True)
class Note:
    """Addresses of storages at one moment, by kind of owner."""

    time_ns: int
    addresses: Mapping[str, Sequence[int]]


class Range(NamedTuple):
    """A phase or a module of the host, in wall time."""

    kind: str
    name: str
    start_ns: int
    end_ns: int


@dataclass
class Allocation:
    """An allocation, with its begin and end as positions in the history and as times."""

    address: int
    size: int
    frames: tuple[Frame, ...] = ()
    begin: Event | None = None
    """The event; None before the history."""
    begin_at: int = -1
    end_at: float = inf
    end_ns: float = inf

    def lives_at(self, time_ns: int) -> bool:
        """Tell whether it lives at a moment, as far as the times were recorded."""
        began = self.begin is None or (self.begin.time_ns or 0) <= time_ns
        return began and time_ns < self.end_ns


def find_peak(
    history: DeviceHistory, notes: Iterable[Note] = (), ranges: Sequence[Range] = ()
) -> MemoryPeak:
    """Return the moment at which most bytes were asked for, and their holders.

    Bytes are those that tensors asked for. The allocator rounds them up, and reserves more: both
    are told apart. The sizes of all holders add up to the peak.

    Args:
        history: Of one device.
        notes: Whose the memory is, where the recorder noted it.
        ranges: Phases and modules of the host, for allocations whose owner was not noted.
    """
    lives, peak, reserved_bytes = _replay(history)
    owners = _owners(lives, notes)
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    bases: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    phases = _Phases(history)
    for one in peak:
        category, place, basis = _kept(one, _holder_of(one, owners, ranges), phases)
        sizes[category, place].append(one.size)
        bases[category, place][basis] += one.size
    holders = [
        MemoryHolder(*of, sum(found), len(found), bases[of].most_common(1)[0][0])
        for of, found in sizes.items()
    ]
    holders.sort(key=lambda one: (-one.num_bytes, one.category, one.place))
    return MemoryPeak(
        device=history.device,
        requested_bytes=sum(one.size for one in peak),
        reserved_bytes=reserved_bytes,
        holders=tuple(holders),
        rounded_bytes=sum(_rounded(one.size) for one in peak),
        num_events=len(history.events),
    )


def _replay(history: DeviceHistory) -> tuple[list[Allocation], list[Allocation], int]:
    """Return all allocations, those that live at the peak, and what is reserved there.

    What was allocated at the begin is found backwards from the end, which is known.
    """
    live = {
        one.address: Allocation(one.address, one.requested_bytes, one.frames)
        for one in history.blocks
    }
    reserved_bytes = history.reserved_bytes
    for event in reversed(history.events):
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_requested":
            live[event.address] = Allocation(event.address, event.size)
        reserved_bytes -= _reserved(event)
    lives = list(live.values())
    total = most = sum(one.size for one in lives)
    peak_at, at_peak = -1, reserved_bytes
    for position, event in enumerate(history.events):
        reserved_bytes += _reserved(event)
        if event.action == "free_requested" and event.address in live:
            ended = live.pop(event.address)
            ended.end_at, total = position, total - ended.size
            ended.end_ns = inf if event.time_ns is None else event.time_ns
        elif event.action == "alloc":
            one = Allocation(event.address, event.size, event.frames, event, position)
            live[event.address] = one
            lives.append(one)
            total += one.size
        if total > most:
            most, peak_at, at_peak = total, position, reserved_bytes
    return lives, [one for one in lives if one.begin_at <= peak_at < one.end_at], at_peak


GROWS, SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


def _reserved(event: Event) -> int:
    if event.action in GROWS:
        return event.size
    return -event.size if event.action in SHRINKS else 0


# The allocator's smallest block, of which all are multiples (kMinBlockSize of torch).
BLOCK_BYTES = 512


def _rounded(size: int) -> int:
    return max(-(-size // BLOCK_BYTES), 1) * BLOCK_BYTES


# Kinds of owners that are noted, the surest first, and what they are called.
OWNERS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
}


def _owners(lives: Iterable[Allocation], notes: Iterable[Note]) -> dict[int, str]:
    """Return the noted owners of allocations, by identity: who had the address while it lived."""
    at: dict[int, list[Allocation]] = defaultdict(list)
    for one in lives:
        at[one.address].append(one)
    owners: dict[int, str] = {}
    for note in notes:
        for kind, name in OWNERS.items():
            for address in note.addresses.get(kind, ()):
                for one in at.get(address, ()):
                    if one.lives_at(note.time_ns):
                        owners.setdefault(id(one), name)
    return owners


BY_ADDRESS, BY_TIME, BY_STACK, BY_SIZE, UNKNOWN = "address", "time", "stack", "size", "unknown"
ACTIVATIONS, TEMPORARIES, WORKSPACES = "activations", "temporaries of backward", "workspaces"
OF_OPTIMIZER, OUTSIDE = "temporaries of the optimizer", "allocated outside of every phase"
OPTIMIZERS = (OWNERS["optimizer"], OF_OPTIMIZER)
# What an allocation is that outlives its phase.
KEPT = {TEMPORARIES: OWNERS["gradients"], OF_OPTIMIZER: OWNERS["optimizer"]}
# Sizes of cuBLAS's workspaces that torch allocates: on Hopper, and before it
# (getChosenWorkspaceSize in CublasHandlePool.cpp).
WORKSPACE_BYTES = (4096 * 8 * 1024, 4096 * 1024 * 2 + 16 * 1024 * 8)


def _holder_of(
    one: Allocation, owners: Mapping[int, str], ranges: Sequence[Range]
) -> tuple[str, str, str]:
    """Return category and place of an allocation, and what tells it."""
    if id(one) in owners:
        return owners[id(one)], "", BY_ADDRESS
    if one.size in WORKSPACE_BYTES and not _own_frame(one.frames):
        return WORKSPACES, "", BY_SIZE
    if one.begin is not None and one.begin.time_ns is not None and ranges:
        return _by_time(one.begin.time_ns, ranges)
    if one.frames:
        return _by_stack(one.frames)
    if one.begin is None:
        return "allocated before the recording", "", UNKNOWN
    return "without a stack", "", BY_STACK


class _Phases:
    """Which allocations outlive the phase that made them, by the stacks of the later ones."""

    def __init__(self, history: DeviceHistory) -> None:
        self._events = history.events

    @cached_property
    def _of_optimizer(self) -> list[int]:
        return [at for at, category in self._told if category in OPTIMIZERS]

    @cached_property
    def _of_others(self) -> list[int]:
        return [at for at, category in self._told if category not in OPTIMIZERS]

    @cached_property
    def _told(self) -> list[tuple[int, str]]:
        by_stack: dict[tuple[Frame, ...], str] = {}
        found = []
        for at, event in enumerate(self._events):
            if event.action == "alloc" and event.frames:
                if event.frames not in by_stack:
                    by_stack[event.frames] = _by_stack(event.frames)[0]
                found.append((at, by_stack[event.frames]))
        return found

    @cached_property
    def _failed_at(self) -> int:
        """The last allocation that failed: a snapshot may then be of the middle of a phase."""
        failed = [at for at, event in enumerate(self._events) if event.action == "oom"]
        return failed[-1] if failed else -1

    def has_outlived(self, one: Allocation, category: str) -> bool:
        """Tell whether an allocation of backward or of the optimizer lived after it."""
        later = self._of_others if category == OF_OPTIMIZER else self._of_optimizer
        place = bisect_right(later, one.begin_at)
        if place < len(later) and later[place] < one.end_at:
            return True
        return one.end_at == inf and self._failed_at < one.begin_at


def _kept(one: Allocation, holder: tuple[str, str, str], phases: _Phases) -> tuple[str, str, str]:
    """Return the holder of an allocation, which is no temporary if its stack and life say so."""
    category, _, basis = holder
    if basis != BY_STACK or category not in KEPT or not phases.has_outlived(one, category):
        return holder
    return KEPT[category], "", basis


def _by_time(time_ns: int, ranges: Sequence[Range]) -> tuple[str, str, str]:
    around = [one for one in ranges if one.start_ns <= time_ns < one.end_ns]
    modules = [one for one in around if one.kind == "module"]
    phases = {one.name for one in around if one.kind == "phase"}
    if modules:
        innermost = max(modules, key=lambda one: (one.start_ns, -one.end_ns))
        return ACTIVATIONS, innermost.name, BY_TIME
    if "backward" in phases:
        return TEMPORARIES, "", BY_TIME
    if "optimizer" in phases:
        return OF_OPTIMIZER, "", BY_TIME
    if "forward" in phases:
        return ACTIVATIONS, "", BY_TIME
    return OUTSIDE, "", BY_TIME


_LIBRARY = re.compile(r"[/\\](torch|site-packages|dist-packages)[/\\]|^<frozen")
_IN_OPTIM, _IN_MODULES = (
    re.compile(rf"torch[/\\]{of}") for of in (r"optim[/\\]", r"nn[/\\]modules")
)
_MAKES_PARAMETERS = {"__init__", "reset_parameters", "_apply", "convert", "to", "cuda"}
# Functions of torch in C++, which a history with all stacks has.
_OF_TORCH = (
    (re.compile("getNewWorkspace|Blas(Lt)?Workspace|CurrentCUDABlas(Lt)?Handle"), WORKSPACES),
    (re.compile("AccumulateGrad"), OWNERS["gradients"]),
    (re.compile("autograd::Engine|evaluate_function"), TEMPORARIES),
)


def _by_stack(frames: Sequence[Frame]) -> tuple[str, str, str]:
    """Return what the stack of an allocation says: the innermost frame that tells decides."""
    said: Iterator[str] = (category for frame in frames if (category := _said_by(frame)))
    category = next(said, "other")
    own = _own_frame(frames)
    if own is None or category in _WITHOUT_PLACE:
        return category, "", BY_STACK
    place = f"{own.filename.rpartition('/')[2]}:{own.line} {own.name}"
    return category, place, BY_STACK


_WITHOUT_PLACE = (OWNERS["optimizer"], OF_OPTIMIZER, WORKSPACES)


def _said_by(frame: Frame) -> str:
    """Return the category that a frame tells; empty where it tells none."""
    if _IN_OPTIM.search(frame.filename):
        return OWNERS["optimizer"] if "init" in frame.name else OF_OPTIMIZER
    if frame.name in ("backward", "_engine_run_backward"):
        return TEMPORARIES
    if frame.name == "forward":
        return ACTIVATIONS
    if _IN_MODULES.search(frame.filename) and frame.name in _MAKES_PARAMETERS:
        return OWNERS["parameters"]
    return next((told for pattern, told in _OF_TORCH if pattern.search(frame.name)), "")


def _own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of Python that is of no library; None where there is none."""
    own: Iterator[Frame] = (
        one for one in frames if one.filename.endswith(".py") and not _LIBRARY.search(one.filename)
    )
    return next(own, None)
