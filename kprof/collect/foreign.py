"""Files of other tools that cannot be opened yet: how to tell them, and the way round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kprof.errors import TraceError


@dataclass(frozen=True)
class Foreign:
    """A kind of file: the bytes it begins with or the suffix it has, and what to do instead."""

    name: str
    fix: str
    magic: bytes = b""
    suffix: str = ""

    def matches(self, path: Path, head: bytes) -> bool:
        """Tell whether a file with this name and beginning is of this kind."""
        begins = bool(self.magic) and b"".join(head[:4096].split()).startswith(self.magic)
        return begins or (bool(self.suffix) and path.name.endswith(self.suffix))


RECORD = "record the workload with `kprof run`, or with torch.profiler and export_chrome_trace"

FOREIGN = (
    Foreign("a Perfetto trace", "export it as JSON (export_chrome_trace)", suffix=".pftrace"),
    Foreign("a zip archive", "unpack it and open the traces in it", magic=b"PK\x03\x04"),
)


def refusal(path: Path, head: bytes) -> TraceError:
    """Return the error for a file that no reader knows, naming its kind where that can be told."""
    for kind in FOREIGN:
        if kind.matches(path, head):
            return TraceError(f"{path.name} is {kind.name}, which kprof cannot open", fix=kind.fix)
    return TraceError(
        f"{path.name} is not a trace that kprof can read",
        fix="open a Kineto (torch.profiler) trace: *.json or *.json.gz, an Nsight Systems export: "
        "*.sqlite, a CSV of Nsight Compute, a profile of Proton, or a *.kprof folder",
    )
