"""The way of a recording to its report: read, analyze, write, in this order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec

from kprof.analyze.attribution.ledger import Ledger, balance
from kprof.collect.ceilings import find_gpu_ceilings, keep_ceilings, measure_host
from kprof.collect.cluster import Scheduler
from kprof.collect.many_ranks import fit, read_many
from kprof.collect.merge import merge
from kprof.collect.ranks import read_ranks
from kprof.collect.remote import copied_here, is_remote
from kprof.collect.sources import require_file_or_folder, sources_of
from kprof.device import find_device
from kprof.errors import KprofError, TraceError
from kprof.kernels.swap.swap_report import CHOICE, SWAP_REPORT, read_choice, read_report
from kprof.report.kept_summary import keep_summary
from kprof.report.redaction import redacted
from kprof.report.result import result_of
from kprof.report.section import Section, sections_of
from kprof.report.swap import section_of_choice, sections_of_swap
from kprof.storage import (
    META_FILE,
    REPORT_FILE,
    RESULT_FILE,
    SUMMARY_FILE,
    is_saved,
    load,
    save,
    whole_or_not_at_all,
)
from kprof.trace import Caveat, Trace

Progress = Callable[[str], None]

# The modules that analyze and draw are imported where used: a saved run is shown without them.


@dataclass(frozen=True)
class Opened:
    """An analyzed run: its trace, ledger, report and folder."""

    trace: Trace
    folder: Path

    @cached_property
    def ledger(self) -> Ledger:
        """What the time of the devices adds up to."""
        return balance(self.trace)

    @cached_property
    def sections(self) -> list[Section]:
        """The report's sections, rendered where they are asked for."""
        return self._with_swap(sections_of(self.trace))

    @property
    def summary(self) -> list[Section]:
        """The sections that the terminal shows; all of them where they are rendered already."""
        is_drawn = "sections" in vars(self)
        if is_drawn:
            return self.sections
        return self._with_swap(sections_of(self.trace, for_page=False))

    def _with_swap(self, sections: list[Section]) -> list[Section]:
        """Add the sections on swapped kernels and their choice, if there were any."""
        path, choice = self.folder / SWAP_REPORT, self.folder / CHOICE
        added = sections_of_swap(read_report(path)) if path.exists() else []
        added += [section_of_choice(read_choice(choice), None)] if choice.exists() else []
        return sorted([*sections, *added], key=lambda section: section.order)

    @property
    def report(self) -> Path:
        """Where the HTML report lies."""
        return self.folder / REPORT_FILE

    @cached_property
    def json(self) -> bytes:
        """The machine-readable result as indented JSON, without secrets."""
        result = redacted(result_of(self.trace, self.ledger))
        return msgspec.json.format(msgspec.json.encode(result))


def open_run(
    paths: list[Path],
    out: Path | None,
    *,
    force: bool,
    ranks: Collection[int] | None = None,
    scheduler: Scheduler = None,
    progress: Progress = lambda stage: None,
) -> Opened:
    """Open traces, folders of rank traces or one saved run; write the run folder and its report.

    A saved run is read back, not analyzed again, unless `force`; in place it keeps its files.
    `ranks` are those that are read in detail, of the files of many ranks; the Dask cluster of a
    `scheduler` reads them.
    """
    _require(paths)
    folder = out or _folder_for(paths)
    _refuse_overwriting(folder, paths, force=force)
    progress("reading")
    with copied_here(paths, scheduler) as here:
        opened = _saved(here, folder, ranks, progress) if not force else None
        if opened is not None:
            return opened
        trace = read(here, ranks, scheduler)
    progress("analyzing")
    return _finish(_analyzed(trace), folder, progress=progress)


def _saved(
    paths: list[Path], folder: Path, ranks: Collection[int] | None, progress: Progress
) -> Opened | None:
    """Read back the one saved run of these paths; None where they are something else."""
    if len(paths) != 1 or not is_saved(paths[0]):
        return None
    if ranks is not None:
        raise _saved_already(paths[0])
    is_in_place = folder.resolve() == paths[0].resolve()
    return _finish(load(paths[0]), folder, save_tables=not is_in_place, progress=progress)


def _require(paths: list[Path]) -> None:
    for path in paths:
        if not is_remote(path):
            require_file_or_folder(path)


def open_recorded(folder: Path, progress: Progress = lambda stage: None) -> Opened:
    """Analyze a new recording of `kprof run` in `folder`, on the machine of the workload.

    Ceilings that were measured on this machine stay beside the recording.
    """
    progress("reading")
    trace = read([folder])
    if not len(trace.kernels):
        trace = replace(trace, meta=replace(trace.meta, device=measure_host()))
    trace = _with_device(trace)
    if trace.meta.device is not None and trace.meta.device.is_measured:
        keep_ceilings(folder / "raw", trace.meta.device)
    progress("analyzing")
    return _finish(_analyzed(trace), folder, progress=progress)


def open_trace(path: Path, progress: Progress = lambda stage: None) -> Trace:
    """Return the analyzed trace of one path, saved or not; nothing is written."""
    progress(f"reading {_name_of(path)}")
    return open_unwritten([path]).trace


def open_unwritten(
    paths: list[Path], ranks: Collection[int] | None = None, scheduler: Scheduler = None
) -> Opened:
    """Open traces, folders of rank traces or one saved run; nothing is written.

    `ranks` are those that are read in detail, of the files of many ranks; the Dask cluster of a
    `scheduler` reads them.
    """
    _require(paths)
    with copied_here(paths, scheduler) as here:
        return replace(_open_unwritten(here, ranks, scheduler), folder=paths[0])


def _open_unwritten(
    paths: list[Path], ranks: Collection[int] | None, scheduler: Scheduler
) -> Opened:
    is_run = len(paths) == 1 and is_saved(paths[0])
    if is_run and ranks is not None:
        raise _saved_already(paths[0])
    trace = load(paths[0]) if is_run else _analyzed(read(paths, ranks, scheduler))
    return Opened(trace, paths[0])


def _saved_already(run: Path) -> KprofError:
    return KprofError(
        f"{run} is a saved run, whose ranks are chosen already",
        fix="open the recording with --ranks, or this run with --force if it holds its recording",
    )


# Removed from a file's name, in this order, for the name of its run.
SUFFIXES = (
    ".gz",
    ".zst",
    ".json",
    ".sqlite",
    ".csv",
    ".nsys-rep",
    ".ncu-rep",
    ".hatchet",
    ".hatchet_msgpack",
    ".chrome_trace",
    ".trace",
    ".pt",
    ".kprof",
)


def _folder_for(paths: list[Path]) -> Path:
    """Return the run folder for a trace: a run folder itself, else one in the current folder."""
    first = paths[0]
    if first.suffix == ".kprof" and first.is_dir():
        return first.absolute()
    stem = _name_of(first)
    for suffix in SUFFIXES:
        stem = stem.removesuffix(suffix)
    return Path.cwd() / f"{stem or 'trace'}.kprof"


def _refuse_overwriting(folder: Path, paths: list[Path], *, force: bool) -> None:
    """Refuse to write over anything but a run, and over a run without `force`."""
    another = "name another folder with --out"
    if not folder.exists():
        return
    if not folder.is_dir():
        raise KprofError(f"{folder} is a file, so the run cannot be written there", fix=another)
    if folder.resolve() in [path.resolve() for path in paths] or not any(folder.iterdir()):
        return
    if (folder / "raw").exists():
        raise KprofError(
            f"{folder} holds another recording, which would be overwritten", fix=another
        )
    if not (folder / META_FILE).exists() or not (folder / "kernels.parquet").exists():
        raise KprofError(f"{folder} holds files, and they are not a run of kprof", fix=another)
    if not force:
        raise KprofError(f"{folder} holds a run already", fix=f"{another}, or pass --force")


def read(
    paths: list[Path], ranks: Collection[int] | None = None, scheduler: Scheduler = None
) -> Trace:
    """Read every file with the reader that knows it, and merge them into one trace.

    Of many ranks, or where `ranks` are named, those or some are read in detail. The Dask cluster of
    a `scheduler` reads the files.
    """
    sources = sources_of(paths)
    left_out: list[Caveat] = []
    if ranks is not None or not fit(sources):
        source = _name_of(paths[0]) if len(paths) == 1 else f"{len(sources)} files"
        trace = read_many(sources, source, ranks, scheduler)
    else:
        traces, left_out = read_ranks(sources, scheduler)
        source = _name_of(paths[0]) if len(paths) == 1 else f"{len(traces)} files"
        trace = merge(traces, source)
    _require_activity(trace, source)
    meta = replace(
        trace.meta,
        source=_as_text(source),
        command=tuple(_as_text(word) for word in trace.meta.command),
        caveats=(*trace.meta.caveats, *left_out),
    )
    return replace(trace, meta=meta)


# Half of the range of an int64: sums and differences of times within it cannot overflow.
LONGEST_NS = 2.0**62


def _require_activity(trace: Trace, source: str) -> None:
    """Refuse a trace without any activity, or with times that overflow when added."""
    kernels, ranges = trace.kernels, trace.ranges
    if not len(kernels) and not ((ranges["kind"] == "op") & (ranges["duration_ns"] > 0)).any():
        from kprof.collect.readers.nsys.reader import FAILED, with_messages

        problem = f"{source}: no device activity and no host operator, nothing to analyze"
        told = trace.meta.caveats
        said = [one.text for one in told if one.id == "profiler_message"]
        problem += "".join(f". {one.text.removesuffix('.')}" for one in told if one.id == FAILED)
        raise TraceError(
            with_messages(problem, said),
            fix="record while the workload uses the GPU"
            if trace.meta.tool == "nsys"
            else "record with CPU and CUDA activities, while the workload runs operators",
        )
    for table in (kernels, ranges):
        start_ns, duration_ns = (table[c].to_numpy(float) for c in ("start_ns", "duration_ns"))
        if not len(table):
            continue
        if max((start_ns + duration_ns).max() - start_ns.min(), duration_ns.sum()) > LONGEST_NS:
            raise TraceError(
                f"{source}: its times lie, or add up to, more than a hundred years apart",
                fix="some of them are damaged; record it again",
            )


def _name_of(path: Path) -> str:
    """Return the name of a file or folder, also of `.`."""
    return path.absolute().resolve().name if path.name in ("", "..") else path.name


def _as_text(name: str) -> str:
    """Return a name that can be written as UTF-8; a file's may hold any bytes."""
    return name.encode("utf-8", errors="replace").decode()


def _analyzed(trace: Trace) -> Trace:
    from kprof.analyze.passes import analyze

    return analyze(_with_device(trace))


def _with_device(trace: Trace) -> Trace:
    """Add the GPU's ceilings where the recording has none: measured here, or the datasheet's.

    Those that follow from the GPU's attributes stay where there are no others.
    """
    told = trace.meta.device
    if (told and not told.is_derived) or not trace.gpus or not len(trace.kernels):
        return trace
    name, driver = trace.gpus[0].name, trace.meta.versions.get("driver")
    ceilings = find_gpu_ceilings(name, driver) if driver else None
    device = ceilings.as_device() if ceilings else find_device(name) or told
    return replace(trace, meta=replace(trace.meta, device=device))


def _finish(
    trace: Trace,
    folder: Path,
    *,
    save_tables: bool = True,
    progress: Progress = lambda stage: None,
) -> Opened:
    """Write tables, result and report; a run that is complete already keeps its files."""
    opened = Opened(trace, folder)
    if save_tables or not opened.report.exists():
        from concurrent.futures import ThreadPoolExecutor

        from kprof.report.html import write_html

        # Tables are packed by code that leaves the interpreter free to draw meanwhile.
        with whole_or_not_at_all(folder) as unfinished, ThreadPoolExecutor(1) as beside:
            if save_tables:
                progress("saving")
                saving = beside.submit(save, trace, unfinished)
                (unfinished / RESULT_FILE).write_bytes(opened.json)
            progress("drawing")
            report = unfinished / opened.report.name
            write_html(trace.meta.source, opened.sections, report, trace.meta.command_line)
            if save_tables:
                saving.result()
        with whole_or_not_at_all(folder) as unfinished:
            keep_summary(trace.meta.source, opened.sections, folder, unfinished / SUMMARY_FILE)
    return opened
