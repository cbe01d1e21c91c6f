"""Responses: what a load generator saw of every request that it sent, success or not.

Times are nanoseconds on one clock of the client; where zero lies is of no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kprof.trace import Caveat

Times = npt.NDArray[np.int64]
Outcome = Literal["answered", "failed", "cancelled"]
LoadKind = Literal["open", "closed", "unknown"]

NO_TIMES: Times = np.empty(0, np.int64)


@dataclass(frozen=True)
class Response:
    """One request and what came back for it."""

    sent_ns: int
    outcome: Outcome = "answered"
    """`failed`: an error or a time-out. `cancelled`: the client stopped waiting for it."""
    scheduled_ns: int | None = None
    """When it was due; missing in a closed loop, where a request is due when it is sent."""
    chunk_ns: Times = field(default_factory=lambda: NO_TIMES)
    """Arrival of every chunk with content; else of the first chunk, and when the last one had
    come."""
    has_every_chunk: bool = True
    """Whether `chunk_ns` lists the arrival of every chunk."""
    num_chunks: int | None = None
    """How many chunks there were, where `chunk_ns` does not list all; missing: not recorded."""
    tokens: Times | None = None
    """Output tokens that had come with each chunk and those before it; missing: not recorded."""
    is_due_known: bool = True
    """Whether the file tells when it was due; else it may have waited in the client for any time
    before it was sent."""
    end_ns: int | None = None
    """When its last content came; of one that failed or was cancelled, when that was noticed."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""

    @property
    def due_ns(self) -> int:
        """When the user began to wait."""
        return self.sent_ns if self.scheduled_ns is None else min(self.scheduled_ns, self.sent_ns)


@dataclass(frozen=True)
class Load:
    """How requests were sent: `open` by a schedule, `closed` as soon as answers came back."""

    kind: LoadKind
    name: str
    """In words, such as `10 requests/s, Poisson`."""
    why: str = ""
    """Limits of the load, beyond those that its kind implies."""


@dataclass(frozen=True)
class Responses:
    """All requests of one measurement at one load."""

    source: str
    tool: str
    load: Load
    rows: tuple[Response, ...]
    doubts: tuple[Caveat, ...] = ()
    """Questions that the file leaves open."""
