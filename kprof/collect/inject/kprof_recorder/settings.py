"""What the recorder is asked to do, as environment variables carry it into the workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Where to write and what to record; `skip` and `steps` count steps of the workload."""

    raw: Path
    skip: int = 5
    steps: int = 3
    shapes: bool = True
    stacks: bool = False
    memory: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings | None:
        """Return the settings in `environment`, or None where nobody asks for a recording."""
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
        )

    def to_environment(self) -> dict[str, str]:
        """Return the variables from which `from_environment` makes these settings again."""
        return {
            "KPROF_RAW": str(self.raw),
            "KPROF_SKIP": str(self.skip),
            "KPROF_STEPS": str(self.steps),
            "KPROF_SHAPES": str(int(self.shapes)),
            "KPROF_STACKS": str(int(self.stacks)),
            "KPROF_MEMORY": str(int(self.memory)),
        }
