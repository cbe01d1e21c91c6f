"""One number for every thread, whatever the file calls it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def thread_table(pids: list[str], tids: list[str], is_used: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return a distinct number for each (process, thread) pair in `is_used`.

    A thread id that one process alone uses stays as it is; where several share it, the process
    id stands in its upper half. A name that is no number gets a negative one.
    """
    table = np.zeros(is_used.shape, dtype=np.int64)
    numbers = [_number_of(tid) for tid in tids]
    taken = {n for n in numbers if n is not None}
    lowest = min(taken | {0})
    for pid, tid in np.argwhere(is_used).tolist():
        number = numbers[tid]
        if number is not None and is_used[:, tid].sum() > 1:
            number = _joined(_number_of(pids[pid]), number)
            number = None if number in taken else number
        if number is None:
            lowest -= 1
            number = lowest
        taken.add(number)
        table[pid, tid] = number
    return table


def _number_of(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if -(2**62) < number < 2**62 else None


def _joined(pid: int | None, tid: int) -> int | None:
    if pid is None or not (0 <= pid < 2**31 and 0 <= tid < 2**32):
        return None
    return pid << 32 | tid
