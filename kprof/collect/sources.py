"""The files of a path with their readers; files of unsupported tools are refused with a fix."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kprof.collect.nsys import REPORT_SUFFIX
from kprof.collect.trace_file import PACKED, unpacked_head
from kprof.errors import TraceError, modules_in
from kprof.storage import META_FILE, is_saved
from kprof.trace import Trace


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

# Enough of a file to see who wrote it.
HEAD_BYTES = 1 << 16
# What Git holds in the place of a large file.
GIT_LFS = b"version https://git-lfs.github.com/spec/"
SUFFIXES = (
    *(f"{suffix}{packed}" for suffix in (".json", ".sqlite") for packed in ("", *PACKED)),
    REPORT_SUFFIX,
)


@dataclass(frozen=True)
class Source:
    """A file to read; `named` is itself or the folder that was named in its stead."""

    path: Path
    named: Path


def sources_of(paths: list[Path]) -> list[Source]:
    """Return the files that `paths` stand for, those of a folder in the order of their numbers."""
    found = [Source(file, path) for path in paths for file in _files_of(path)]
    _refuse_repeated([source.path for source in found])
    return found


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir() or any(reader.knows(path, b"") for reader in readers()):
        return [path]
    if any((path / name).exists() for name in (META_FILE, "kernels.parquet")):
        raise _without_recording(path)
    try:
        files = [p for p in path.iterdir() if p.name.endswith(SUFFIXES) and p.is_file()]
    except OSError as error:
        raise _unreadable(path, error) from error
    files = [p for p in files if not p.name.startswith(".") and not _is_exported(p)]
    if not files:
        raise TraceError(
            f"{path} holds no trace: no *.json, no *.json.gz, no *.sqlite, no recorded run",
            fix="name the trace files, or the folder that kprof run made",
        )
    return sorted(files, key=_by_number)


def readers() -> Iterator[ModuleType]:
    """Yield the readers; that of a package is its module `reader`, imported in its turn."""
    found = modules_in("kprof.collect.readers")
    yield from (module for module in found if hasattr(module, "knows"))
    packages = [module for module in found if hasattr(module, "__path__")]
    yield from (import_module(f"{package.__name__}.reader") for package in packages)


def _without_recording(folder: Path) -> TraceError:
    problem = f"{folder} holds a saved run without the recording it was made from"
    if is_saved(folder):
        return TraceError(
            problem, fix="open it alone and without --force, or open that recording with --force"
        )
    return TraceError(
        f"{problem}, written by another version of kprof or not to its end",
        fix="open that recording again, with --force",
    )


def _unreadable(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"{path} cannot be read: {error.strerror or error}", fix="check that you may read it"
    )


def _is_exported(path: Path) -> bool:
    """Tell a report of Nsight Systems beside which its own export lies: it would count twice."""
    exports = (path.with_suffix(f".sqlite{packed}") for packed in ("", *PACKED))
    return path.suffix == REPORT_SUFFIX and any(export.exists() for export in exports)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sort rank2 before rank10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), part) if part.isdecimal() else (0, part) for part in parts]


def _refuse_repeated(files: list[Path]) -> None:
    seen: dict[Path, Path] = {}
    for file in files:
        same = file.resolve()
        if same in seen:
            raise TraceError(
                f"{file} would count twice: it is the same file as {seen[same]}", fix="name it once"
            )
        seen[same] = file


def read_source(source: Source) -> Trace:
    """Read a file with the reader that knows it."""
    path, named = source.path, source.named
    head = b"" if path.is_dir() else head_of(path)
    try:
        for reader in readers():
            if reader.knows(path, head):
                return reader.read(path)  # type: ignore[no-any-return]
    except TraceError as error:
        if path == named:
            raise
        fix = f"{error.fix}; or, to leave {path.name} out, name the traces in {named} themselves"
        raise TraceError(error.problem, fix=fix) from error
    raise refusal(path, head)


def head_of(path: Path) -> bytes:
    """Return the beginning of a file, unpacked as far as it can be."""
    try:
        head = unpacked_head(path, HEAD_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    if head.startswith(GIT_LFS):
        raise TraceError(
            f"{path.name} is not the file itself, but Git LFS's note of where it is",
            fix=f"fetch it: git lfs pull --include {path.name}",
        )
    return head


def refusal(path: Path, head: bytes) -> TraceError:
    """Return the error for a file that no reader knows, naming its kind where that can be told."""
    for kind in FOREIGN:
        if kind.matches(path, head):
            return TraceError(f"{path.name} is {kind.name}, which kprof cannot open", fix=kind.fix)
    opens = [one.OPENS for one in readers() if hasattr(one, "OPENS")]
    return TraceError(
        f"{path.name} is not a trace that kprof can read",
        fix=f"open {', '.join(opens)}, or a *.kprof folder",
    )


def require_file_or_folder(path: Path) -> None:
    """Refuse a path where nothing is, and a pipe, which would be waited for without end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise TraceError(f"{path} does not exist", fix="check the path") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise TraceError(
            f"{path} is a pipe or a device, not a file",
            fix="write the trace to a file first, and open that",
        )
