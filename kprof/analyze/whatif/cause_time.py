"""The time of a step that a cause holds: no finding and no prediction saves more.

It is the time of the device in activities, and the idle time that goes away with the cause, on the
GPU on which both together are longest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from kprof.analyze.findings.queries import count_steps
from kprof.analyze.findings.recoverable import recoverable_ns
from kprof.analyze.idle.causes import BETWEEN_KERNELS, LAUNCH_BOUND
from kprof.analyze.intervals import NOTHING
from kprof.analyze.whatif.changes import emptied, spans_by_program
from kprof.analyze.whatif.host_program import find_program
from kprof.trace import Trace

NO_ROWS = np.zeros(0, dtype=np.int64)


class Held(NamedTuple):
    """The time that a cause holds of a step, and the other idle time that waited for launches."""

    ns: int
    late_ns: int


class _Devices(NamedTuple):
    """The devices that ran something, numbered from 0 on by rank and index."""

    keys: np.ndarray
    """For each device, in ascending order; see `_device_keys`."""
    of_row: np.ndarray
    """The number of each row of `kernels`."""


@dataclass(frozen=True)
class CauseTime:
    """Adds up what causes hold of a step of one analyzed trace."""

    trace: Trace
    _known: dict[tuple[bytes, bytes], dict[int, int]] = field(default_factory=dict, repr=False)
    _of_causes: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict, repr=False)

    def held(
        self, busy_ns: np.ndarray, idle_ns: np.ndarray, launches: np.ndarray = NO_ROWS
    ) -> Held:
        """Return what a cause holds of a step, on the GPU on which it holds most.

        Args:
            busy_ns: for each row of `kernels`, how much of its time belongs to the cause.
            idle_ns: the same for each row of `idle`.
            launches: rows of `kernels` whose launches belong to it, with the idle time that these
                explain.
        """
        devices = self._devices
        spent = np.zeros(max(len(devices.keys), 1), dtype=np.int64)
        np.add.at(spent, devices.of_row, busy_ns)
        counted = np.flatnonzero(idle_ns)
        for part in (self._by_device(idle_ns), self._launching_ns(launches, counted)):
            for at, lost_ns in part.items():
                spent[at] += lost_ns
        is_late = self._is(LAUNCH_BOUND).copy()
        is_late[counted] = False
        late = self._by_device(np.where(is_late, self._idle_took, 0))
        scale, steps = len(spent), count_steps(self.trace)
        late_ns = late.get(int(spent.argmax()), 0) * scale // steps
        return Held(int(spent.max()) * scale // steps, late_ns)

    def recoverable(self, chosen: np.ndarray) -> np.ndarray:
        """Return for each row of `idle` what is recoverable of it, where `chosen`; unknown is 0."""
        known = self._recoverable
        found = np.zeros_like(known)
        found[chosen] = known[chosen]
        return found

    def of_causes(self, *causes: str) -> np.ndarray:
        """Return for each row of `idle` what is recoverable of it, if it has one of the causes."""
        return self.recoverable(self._is(*causes))

    def late_launches_ns(self) -> np.ndarray:
        """Return for each row of `idle` what launches in graphs may give back.

        That is the recoverable time of late launches, and the device's own time from one activity
        to the next, which is shorter within a graph.
        """
        between = np.where(self._is(BETWEEN_KERNELS), self._idle_took, 0)
        return np.asarray(self.of_causes(LAUNCH_BOUND) + between)

    def _is(self, *causes: str) -> np.ndarray:
        if causes not in self._of_causes:
            self._of_causes[causes] = self.trace.idle["cause"].isin(causes).to_numpy(bool)
        return self._of_causes[causes]

    def _launching_ns(self, rows: np.ndarray, counted: np.ndarray) -> dict[int, int]:
        """Return by device the idle time that launches of these rows explain.

        That which they ended, or as much of all that waited for launches as the host spent on
        these; without the pieces that are counted already.
        """
        if not len(rows) or self.trace.idle.empty:
            return {}
        key = rows.tobytes(), counted.tobytes()
        if key not in self._known:
            self._known[key] = self._find_launching_ns(rows, counted)
        return self._known[key]

    def _find_launching_ns(self, rows: np.ndarray, counted: np.ndarray) -> dict[int, int]:
        idle, took = self.trace.idle, self._idle_took
        is_free = np.ones(len(idle), dtype=bool)
        is_free[counted] = False
        is_mine = np.isin(idle["kernel_row"].to_numpy(np.int64, na_value=-1), rows) & is_free
        is_late = self._is(LAUNCH_BOUND) & is_free
        is_own = is_mine & (is_late | self._is(BETWEEN_KERNELS))
        ended, late = (self._by_device(np.where(one, took, 0)) for one in (is_own, is_late))
        chosen = np.zeros(len(self.trace.kernels), dtype=bool)
        chosen[rows] = True
        spans = spans_by_program(emptied(chosen, self.trace), find_program(self.trace), self.trace)
        host_ns = max((int((one.end - one.start).sum()) for one in spans.values()), default=0)
        return {at: max(ended.get(at, 0), min(late.get(at, 0), host_ns)) for at in {*ended, *late}}

    def _by_device(self, idle_ns: np.ndarray) -> dict[int, int]:
        """Add up a time for each row of `idle` by the number of its device."""
        at = self._idle_devices
        known = (at != NOTHING) & (idle_ns != 0)
        sums = np.zeros(len(self._devices.keys), dtype=np.int64)
        np.add.at(sums, at[known], idle_ns[known])
        present = np.flatnonzero(sums)
        return dict(zip(present.tolist(), sums[present].tolist(), strict=True))

    @cached_property
    def _idle_took(self) -> np.ndarray:
        return self.trace.idle["duration_ns"].to_numpy(np.int64)

    @cached_property
    def _recoverable(self) -> np.ndarray:
        return recoverable_ns(self.trace).to_numpy(np.int64, na_value=0)

    @cached_property
    def _devices(self) -> _Devices:
        """The devices of all ranks, and which each row of `kernels` ran on."""
        keys, of_row = np.unique(_device_keys(self.trace.kernels), return_inverse=True)
        return _Devices(keys, of_row)

    @cached_property
    def _idle_devices(self) -> np.ndarray:
        """The number of each row's device in `idle`; `NOTHING` where nothing ran on it."""
        keys, asked = self._devices.keys, _device_keys(self.trace.idle)
        at = np.searchsorted(keys, asked)
        is_known = np.append(keys, NOTHING)[at] == asked
        return np.asarray(np.where(is_known, at, NOTHING))


def _device_keys(table: pd.DataFrame) -> np.ndarray:
    """Return rank and device of each row as one number; both have 32 bits."""
    rank, device = (table[column].to_numpy(np.int64) for column in ("rank", "device"))
    return np.asarray((rank << 32) + device)
