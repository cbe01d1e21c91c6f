"""Whose turn it is: the blocks of a schedule, the same ones in every rank that changes arms."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from .native import monotonic, sleep
from .schedule import Block, Schedule, blocks_of

FILE = "turns.jsonl"
PATIENCE_S = 60.0
LOOK_S = 0.001


class Turns(Protocol):
    """Blocks, one after the other; None after the last."""

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows one whose steps took `time_ns` each."""


def turns_of(schedule: Schedule, raw: Path, rank: int, world_size: int) -> Turns:
    """Return the turns of a process: rank 0 decides, and others follow where arms change."""
    if len(schedule.arms) == 1:
        return OwnTurns(schedule) if rank == 0 else NoTurns()
    if rank == 0:
        return OwnTurns(schedule, raw / FILE if world_size > 1 else None)
    return FollowedTurns(raw / FILE)


class OwnTurns:
    """The turns of a process that decides itself, and tells others in a file if it has any."""

    def __init__(self, schedule: Schedule, told: Path | None = None) -> None:
        self._schedule = schedule
        self._told = told
        self._blocks: Generator[Block, float, None] = blocks_of(schedule)

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""
        self._blocks = blocks_of(self._schedule)
        return self._tell(next(self._blocks, None))

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows one whose steps took `time_ns` each."""
        try:
            return self._tell(self._blocks.send(time_ns))
        except StopIteration:
            return self._tell(None)

    def _tell(self, block: Block | None) -> Block | None:
        if self._told is not None:
            with self._told.open("a") as file:
                file.write(json.dumps(block and asdict(block)) + "\n")
        return block


class NoTurns:
    """The turns of a rank whose own timing would only disturb that of rank 0."""

    def begin(self) -> Block | None:
        """Return that there is nothing to time."""
        return None

    def after(self, time_ns: float) -> Block | None:
        """Return that there is nothing to time."""
        return None


class FollowedTurns:
    """The turns that rank 0 has decided: who comes to the same step first waits for it.

    Rank 0 needs nothing of the others for that step any more: all have begun it.
    """

    def __init__(self, told: Path) -> None:
        self._told = told
        self._num_followed = 0

    def begin(self) -> Block | None:
        """Return the first block of the schedule, also when it begins anew."""
        return self._next()

    def after(self, time_ns: float) -> Block | None:
        """Return the block that follows, whatever this rank's own steps took."""
        return self._next()

    def _next(self) -> Block | None:
        end = monotonic() + PATIENCE_S
        while monotonic() < end:
            lines = self._told.read_text().splitlines(keepends=True) if self._told.exists() else []
            if len(lines) > self._num_followed and lines[self._num_followed].endswith("\n"):
                block = json.loads(lines[self._num_followed])
                self._num_followed += 1
                return Block(**block) if block else None
            sleep(LOOK_S)
        raise TimeoutError(f"rank 0 did not come to the same step within {PATIENCE_S:.0f} s")
