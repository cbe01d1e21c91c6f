"""A disturbing process: `python -m kprof.ab.disturbance gpu|host FROM TO PERIOD_S`.

It works for a share of its time that goes from FROM to TO within each period, and ends when its
standard input is closed: at the latest with the process that started it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kprof.errors import KprofError

# On a GPU two processes take turns, of a millisecond or more while both have work. Bursts far
# shorter than that come in between without making every sample wait for a turn of the other.
SLICE_S = 0.002
SIDE, BURST = 2048, 4
LONGEST_END_S = 20.0
DATA = bytes(64 << 10)


@contextmanager
def disturbance(kind: str, duty: tuple[float, float], period_s: float) -> Iterator[None]:
    """Have others work beside the caller: one process on the GPU, or one for each core."""
    count = 1 if kind == "gpu" else len(os.sched_getaffinity(0))
    words = [sys.executable, "-m", __name__, kind, *(str(x) for x in (*duty, period_s))]
    others = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)
    ]
    try:
        for other in others:
            _wait_for_start(other)
        yield
    finally:
        for other in others:
            _end(other)


def _wait_for_start(other: subprocess.Popen[bytes]) -> None:
    assert other.stdout is not None
    if not other.stdout.readline():
        raise KprofError(
            "the process that disturbs the measurement did not start",
            fix="see its output above; on a GPU it needs torch and 100 MB of GPU memory",
        )


def _end(other: subprocess.Popen[bytes]) -> None:
    try:
        other.communicate(timeout=LONGEST_END_S)
    except subprocess.TimeoutExpired:
        other.kill()
        other.communicate()


def share_at(elapsed_s: float, duty: tuple[float, float], period_s: float) -> float:
    """Return the share of time to work, rising or falling within each period."""
    begin, end = duty
    return begin + (end - begin) * (elapsed_s % period_s) / period_s


def _disturb(kind: str, duty: tuple[float, float], period_s: float) -> None:
    work = _gpu_work() if kind == "gpu" else _host_work
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), daemon=True).start()
    sys.stdout.write("working\n")
    sys.stdout.flush()
    start_s = time.monotonic()
    while not ended.is_set():
        now_s = time.monotonic()
        busy_s = SLICE_S * share_at(now_s - start_s, duty, period_s)
        while time.monotonic() - now_s < busy_s:
            work()
        ended.wait(now_s + SLICE_S - time.monotonic())


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _host_work() -> None:
    hashlib.sha256(DATA)


def _gpu_work() -> Callable[[], None]:
    import torch

    matrix: Any = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(BURST):
            matrix @ matrix
        torch.cuda.synchronize()

    work()
    return work


if __name__ == "__main__":
    _disturb(sys.argv[1], (float(sys.argv[2]), float(sys.argv[3])), float(sys.argv[4]))
