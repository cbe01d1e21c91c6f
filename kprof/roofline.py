"""`kprof roofline`: measure what the GPU at hand can do, for every later run on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from kprof.collect.ceilings import Ceilings, keep_gpu_ceilings
from kprof.collect.gpu_ceilings import measure_gpu


@dataclass(frozen=True)
class Measured:
    """What was measured, and where it is kept; nowhere for a user without a home."""

    ceilings: Ceilings
    path: Path | None

    def json(self) -> bytes:
        """Return the ceilings as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.ceilings))


def measure_roofline() -> Measured:
    """Measure the GPU and keep the figures."""
    ceilings = measure_gpu()
    return Measured(ceilings, keep_gpu_ceilings(ceilings))
