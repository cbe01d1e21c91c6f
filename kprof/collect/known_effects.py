"""Work whose slow-down is known because it was put there: by more bytes, or by a spin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kprof.errors import KprofError
from kprof.stopwatch import GpuStopwatch, Stopwatch, WallStopwatch, Work
from kprof.timing import warm_up

# Large enough that what a call costs beside its bytes is lost in them.
HOST_BYTES = 256 << 10
GPU_BYTES = 256 << 20
VECTOR_BYTES, FLOAT_BYTES = 512, 4
SPIN_CYCLES = (2_000, 100_000)
CALIBRATION_SAMPLES = 200
WARM_UP_S = 1.0
SAMPLE_NS = 1e6


@dataclass(frozen=True)
class Knob:
    """A way to make work slower: `work(effect)` takes 1 + effect times as long as `work(0)`."""

    name: str
    says: str
    work: Callable[[float], Work]


def host_knobs() -> tuple[Knob, ...]:
    """Return the host's: a checksum of so many bytes more."""
    data = memoryview(np.random.default_rng(0).bytes(2 * HOST_BYTES))

    def checksum(num_bytes: int) -> None:
        hashlib.sha256(data[:num_bytes])

    work = _calibrated(checksum, (HOST_BYTES, 2 * HOST_BYTES), WallStopwatch())
    return (Knob("more bytes", "SHA-256 of 256 KiB, and of so much more", work),)


def gpu_knobs() -> tuple[Knob, ...]:
    """Return the GPU's: so many bytes more, and as many followed by a longer spin."""
    import torch

    source: Any = torch.zeros(2 * GPU_BYTES // FLOAT_BYTES, device="cuda")
    target: Any = torch.empty_like(source)

    def negate(num_bytes: int) -> None:
        # Whole vector loads only, and a kernel of torch's: the driver's own copy took 1.8 % more
        # on an H200 as soon as it was any larger than 256 MiB.
        whole = num_bytes // VECTOR_BYTES * VECTOR_BYTES // FLOAT_BYTES
        torch.neg(source[:whole], out=target[:whole])

    def negate_and_spin(num_cycles: int) -> None:
        negate(GPU_BYTES)
        torch.cuda._sleep(num_cycles)

    stopwatch = GpuStopwatch()
    more_bytes = _calibrated(negate, (GPU_BYTES, 2 * GPU_BYTES), stopwatch)
    longer_spin = _calibrated(negate_and_spin, SPIN_CYCLES, stopwatch)
    return (
        Knob("more bytes", "256 MiB read, negated and written, and so much more", more_bytes),
        Knob("longer spin", "256 MiB negated, then a spin so much longer", longer_spin),
    )


def _calibrated(
    run: Callable[[int], None], amounts: tuple[int, int], stopwatch: Stopwatch
) -> Callable[[float], Work]:
    """Return what makes the work of an effect, from the times of two amounts of it.

    A call costs something beside its amount, so time does not grow in proportion to that.
    """
    base, more = amounts
    works = partial(run, base), partial(run, more)
    num_calls = warm_up(works, stopwatch, WARM_UP_S, SAMPLE_NS).num_calls
    # In turns, so that a drifting clock takes part in both.
    times = [
        [stopwatch.time(work, num_calls) for work in works] for _ in range(CALIBRATION_SAMPLES)
    ]
    base_ns, more_ns = (float(value) for value in np.median(np.array(times), axis=0))
    if more_ns <= base_ns:
        raise KprofError(
            f"{more} of the work took no longer than {base}, so no slow-down can be planted",
            fix="let nothing else run, and see that the GPU or the host is not overloaded",
        )
    amount_as_long = base_ns * (more - base) / (more_ns - base_ns)
    return lambda effect: partial(run, base + round(effect * amount_as_long))
