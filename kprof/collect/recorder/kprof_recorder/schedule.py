"""The schedule of a trial: which arm runs in which block of steps."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

# The file in a process's folder, with a line for everything that it timed.
SHEET = "windows.jsonl"
# An arm whose last block was faster than the best before by no more than this is warm.
STABLE = 0.05
MOST_ROUNDS = 8


@dataclass(frozen=True)
class Schedule:
    """Windows to time, one for each letter: of steps of this process, after its warm-up.

    Every window has as many steps as take `window_s` in the faster arm, at least `min_steps`.
    """

    letters: str
    skip: int = 5
    """Steps of warm-up, at least, in each arm."""
    window_s: float = 0.25
    min_steps: int = 2
    settle_steps: int = 1
    """Steps before every window that belong to none."""
    patch: str | None = None
    """FILE.py:NAME or MODULE:NAME, which returns a context manager: arm B runs inside it."""
    patch_arguments: tuple[str, ...] = ()
    seed: int | None = None
    """Of all random numbers of the process; None: as the workload sets them."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that take turns in one process, in the order in which they appear."""
        return tuple(dict.fromkeys(self.letters))

    def write(self, path: Path) -> None:
        """Write it for a process to follow."""
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls, path: Path) -> Schedule:
        """Return the schedule that `write` wrote."""
        told = json.loads(path.read_text())
        return cls(**{**told, "patch_arguments": tuple(told["patch_arguments"])})


@dataclass(frozen=True)
class Block:
    """So many steps of one arm, timed as a whole, after some that are not."""

    arm: str
    settle_steps: int
    num_steps: int
    is_window: bool = False
    """Whether it counts; what does not is warm-up."""
    is_unsteady: bool = False
    """Whether steps still got faster when the warm-up of a window reached its bound."""


def blocks_of(schedule: Schedule) -> Generator[Block, float, None]:
    """Yield one block after the other; each wants to know how many ns a step of it took."""
    num_steps, is_steady = yield from _warm_up(schedule)
    for letter in schedule.letters:
        yield Block(letter, schedule.settle_steps, num_steps, True, not is_steady)


def _warm_up(schedule: Schedule) -> Generator[Block, float, tuple[int, bool]]:
    """Yield blocks until every arm is warm; return the number of steps in a window."""
    window_ns = schedule.window_s * 1e9
    half = max(1, schedule.skip // 2)
    spans: dict[str, list[tuple[int, float]]] = {arm: [] for arm in schedule.arms}
    for arm in schedule.arms:
        for settle_steps in (max(0, schedule.skip - 2 * half), 0):
            spans[arm].append((half, (yield Block(arm, settle_steps, half))))
    for _ in range(MOST_ROUNDS):
        if all(_is_warm(timed, window_ns) for timed in spans.values()):
            break
        for arm, timed in spans.items():
            num_steps = max(half, math.ceil(window_ns / 2 / timed[-1][1]))
            timed.append((num_steps, (yield Block(arm, schedule.settle_steps, num_steps))))
    fastest_ns = min(time_ns for timed in spans.values() for _, time_ns in timed[-2:])
    num_steps = max(schedule.min_steps, math.ceil(window_ns / fastest_ns))
    return num_steps, all(_is_warm(timed, window_ns) for timed in spans.values())


def _is_warm(timed: list[tuple[int, float]], window_ns: float) -> bool:
    """Whether an arm has run for as long as a window, and lately got no faster."""
    *before, last = (time_ns for _, time_ns in timed)
    spent_ns = sum(num_steps * time_ns for num_steps, time_ns in timed)
    return spent_ns >= window_ns and last >= (1 - STABLE) * min(before)
