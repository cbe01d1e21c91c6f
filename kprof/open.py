"""`kprof open`: import a trace, whoever recorded it, analyze it and write its report."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kprof.analyze.ledger import Ledger, balance
from kprof.analyze.passes import analyze
from kprof.collect.ceilings import keep_host_ceilings
from kprof.collect.foreign import refusal
from kprof.collect.merge import merge
from kprof.device import find_device
from kprof.discover import modules_in
from kprof.errors import KprofError, TraceError
from kprof.report import sections_of
from kprof.report.html import write_html
from kprof.report.result import result_of
from kprof.report.section import Section
from kprof.saved import is_saved, load, save
from kprof.trace import Trace

# Enough of a file to see who wrote it.
HEAD_BYTES = 1 << 16

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Opened:
    """An analyzed run: its trace, its books, its report, and where they lie."""

    trace: Trace
    ledger: Ledger
    sections: list[Section]
    folder: Path

    @property
    def report(self) -> Path:
        """Where the HTML report lies."""
        return self.folder / "report.html"

    def result(self) -> dict[str, object]:
        """Return the machine-readable result."""
        return result_of(self.trace, self.ledger)

    def json(self) -> bytes:
        """Return the result as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self.result()))


def open_run(
    paths: list[Path], out: Path | None, *, force: bool, progress: Progress = lambda stage: None
) -> Opened:
    """Open traces, folders of rank traces or one saved run; write the run folder and its report.

    A saved run that is opened in place is read back, not analyzed again, unless `force`.
    """
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path} does not exist", fix="check the path")
    only = paths[0] if len(paths) == 1 else None
    if only is not None and is_saved(only) and not force:
        progress("reading")
        return _finish(load(only), out or only, save_tables=out not in (None, only))
    folder = out or _folder_for(paths)
    _refuse_overwriting(folder, paths, force=force)
    progress("reading")
    trace = read(paths)
    progress("analyzing")
    return _finish(analyze(_with_device(trace)), folder, progress=progress)


def open_recorded(folder: Path, progress: Progress = lambda stage: None) -> Opened:
    """Analyze what `kprof run` has just recorded into `folder`, on the machine it ran on."""
    progress("reading")
    trace = read([folder])
    if not len(trace.kernels):
        trace = replace(trace, meta=replace(trace.meta, device=keep_host_ceilings(folder / "raw")))
    progress("analyzing")
    return _finish(analyze(_with_device(trace)), folder, progress=progress)


def read(paths: list[Path]) -> Trace:
    """Read every file with the reader that knows it, and merge them into one trace."""
    files = [file for path in paths for file in _files_of(path)]
    source = paths[0].name if len(paths) == 1 else f"{len(files)} files"
    trace = merge([_read_one(file) for file in files], source)
    if not len(trace.kernels) and not (trace.ranges["kind"] == "op").any():
        raise TraceError(
            f"{source}: no device activity and no host operator, nothing to analyze",
            fix="record with CPU and CUDA activities, while the workload runs operators",
        )
    return trace


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir() or any(reader.knows(path, b"") for reader in _readers()):
        return [path]
    files = sorted(p for p in path.iterdir() if p.is_file() and ".json" in p.suffixes)
    if not files:
        raise TraceError(
            f"{path} holds no trace: no *.json, no *.json.gz, no recorded run",
            fix="name the trace files, or the folder that kprof run made",
        )
    return files


def _read_one(path: Path) -> Trace:
    head = b"" if path.is_dir() else _head(path)
    for reader in _readers():
        if reader.knows(path, head):
            return reader.read(path)  # type: ignore[no-any-return]
    raise refusal(path, head)


def _readers() -> list:  # type: ignore[type-arg]
    return modules_in("kprof.collect.readers")


def _head(path: Path) -> bytes:
    """Return the beginning of a file, unpacked when it is a gzip file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except (OSError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path.name} cannot be read: {error}", fix="copy the file again"
        ) from error
    return head


def _folder_for(paths: list[Path]) -> Path:
    """Return the run folder for a trace: a run folder itself, else one in the current folder."""
    first = paths[0].resolve()
    if first.suffix == ".kprof":
        return first
    stem = first.name
    for suffix in (".gz", ".json", ".trace", ".pt"):
        stem = stem.removesuffix(suffix)
    return Path.cwd() / f"{stem}.kprof"


def _refuse_overwriting(folder: Path, paths: list[Path], *, force: bool) -> None:
    if force or folder.resolve() in [path.resolve() for path in paths]:
        return
    if (folder / "meta.json").exists():
        raise KprofError(
            f"{folder} holds a run already", fix="name another folder with --out, or pass --force"
        )


def _with_device(trace: Trace) -> Trace:
    """Add the ceilings of the GPU's datasheet where the recording has none of its own."""
    if trace.meta.device is not None or not trace.meta.gpus or not len(trace.kernels):
        return trace
    return replace(trace, meta=replace(trace.meta, device=find_device(trace.meta.gpus[0].name)))


def _finish(
    trace: Trace,
    folder: Path,
    *,
    save_tables: bool = True,
    progress: Progress = lambda stage: None,
) -> Opened:
    """Write tables, result and report; a run that is complete already keeps its files."""
    ledger = balance(trace)
    sections = sections_of(trace)
    opened = Opened(trace, ledger, sections, folder)
    if save_tables:
        progress("saving")
        save(trace, folder)
        (folder / "summary.json").write_bytes(opened.json())
    if save_tables or not opened.report.exists():
        progress("drawing")
        write_html(trace, sections, opened.report)
    return opened
