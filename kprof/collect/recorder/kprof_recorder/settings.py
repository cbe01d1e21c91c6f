"""The recorder's settings, passed to the workload as environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# The tracer that is not torch's own profiler.
NSIGHT = "nsys"
# The file of a process with what the dry run of a swap found.
DRY_RUN = "dry_run.json"
# Variables that are unset without a recording: a run inside another must not find the other's.
OPTIONAL = ("KPROF_SECONDS", "KPROF_TRIGGER", "KPROF_SCHEDULE", "KPROF_SWAP", "KPROF_RANKS")


@dataclass(frozen=True)
class Settings:
    """Where to write and what to record; `skip` and `steps` count steps of the workload.

    With a `trigger`, a window is recorded whenever that file holds an order, and nothing before.
    """

    raw: Path
    skip: int = 5
    steps: int = 3
    shapes: bool = True
    counters: bool = False
    stacks: bool = False
    memory: bool = False
    light: bool = False
    """Whether a light pass follows the window: of the device's activities and calls into CUDA."""
    seconds: float | None = None
    trigger: Path | None = None
    tracer: str = "torch"
    """The recorder: torch's profiler, or Nsight Systems around this process."""
    leader: str = "0"
    """The local rank that begins and ends a window of Nsight Systems."""
    schedule: Path | None = None
    """The file with windows to time, for which nothing is recorded."""
    swap: str | None = None
    """The kernels to swap in after a step: "KERNEL,KERNEL=PROVIDER,…"."""
    ranks: str | None = None
    """The ranks to record, as 0,8-15, or one of each host; None: all."""

    @property
    def longest_ns(self) -> int | None:
        """How long a window may take; None where its steps alone bound it."""
        return None if self.seconds is None else int(self.seconds * 1e9)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings | None:
        """Return the settings in `environment`, or None without a recording."""
        raw = environment.get("KPROF_RAW")
        if not raw:
            return None
        return cls(
            raw=Path(raw),
            skip=int(environment.get("KPROF_SKIP", cls.skip)),
            steps=int(environment.get("KPROF_STEPS", cls.steps)),
            shapes=environment.get("KPROF_SHAPES", "1") == "1",
            stacks=environment.get("KPROF_STACKS", "0") == "1",
            memory=environment.get("KPROF_MEMORY", "0") == "1",
            counters=environment.get("KPROF_COUNTERS", "0") == "1",
            light=environment.get("KPROF_LIGHT", "0") == "1",
            seconds=float(environment["KPROF_SECONDS"]) if "KPROF_SECONDS" in environment else None,
            trigger=Path(environment["KPROF_TRIGGER"]) if "KPROF_TRIGGER" in environment else None,
            tracer=environment.get("KPROF_TRACER", cls.tracer),
            leader=environment.get("KPROF_LEADER", cls.leader),
            schedule=Path(environment["KPROF_SCHEDULE"])
            if "KPROF_SCHEDULE" in environment
            else None,
            swap=environment.get("KPROF_SWAP"),
            ranks=environment.get("KPROF_RANKS"),
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which `from_environment` makes these settings again."""
        values = (self.seconds, self.trigger, self.schedule, self.swap, self.ranks)
        optional = zip(OPTIONAL, values, strict=True)
        return {
            **{name: str(value) for name, value in optional if value is not None},
            "KPROF_RAW": str(self.raw),
            "KPROF_SKIP": str(self.skip),
            "KPROF_STEPS": str(self.steps),
            "KPROF_SHAPES": str(int(self.shapes)),
            "KPROF_STACKS": str(int(self.stacks)),
            "KPROF_MEMORY": str(int(self.memory)),
            "KPROF_COUNTERS": str(int(self.counters)),
            "KPROF_LIGHT": str(int(self.light)),
            "KPROF_TRACER": self.tracer,
            "KPROF_LEADER": self.leader,
        }
