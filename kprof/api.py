"""kprof in Python: record a block, name a range, open a run, and read what it says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from kprof.errors import KprofError, LaunchError

if TYPE_CHECKING:
    import pandas as pd

    from kprof.collect.cluster import Scheduler
    from kprof.collect.recorder.kprof_recorder.settings import Settings
    from kprof.collect.recorder.kprof_recorder.start import Session
    from kprof.collect.recorder.kprof_recorder.trial import TrialSession
    from kprof.findings import Finding
    from kprof.opened import Opened
    from kprof.report.section import Section
    from kprof.report.summary import Summary
    from kprof.trace import Trace

PACKAGE = "kprof_recorder"
# Columns of a printed summary.
_WIDTH = 80
# Held while a block is recorded: a process has one profiler.
_BLOCK = threading.Lock()


class NotYet(NamedTuple):
    """Why a run cannot be analyzed yet, and what to do."""

    why: str
    fix: str


RECORDING = NotYet("is being recorded", "use it after the block")
REPORTED_LATER = NotYet("is recorded by kprof run", "read it when the script has ended")


class Run:
    """A recording or a trace; it is analyzed when it is first asked for anything.

    As the last line of a notebook's cell it shows its report. It stands for its path as well:
    `Path(run)` is the folder or the file.
    """

    def __init__(self, path: Path, opened: Opened | None = None) -> None:
        self.path = path
        self._given = opened
        self._not_yet: NotYet | None = None

    @cached_property
    def _opened(self) -> Opened:
        if self._given is not None:
            return self._given
        if self._not_yet is not None:
            raise KprofError(f"{self.path} {self._not_yet.why}", fix=self._not_yet.fix)
        from kprof.opened import open_run

        return open_run([self.path], None, force=False)

    @property
    def trace(self) -> Trace:
        """All tables: kernels, ranges, samples, idle, and meta."""
        return self._opened.trace

    @property
    def summary(self) -> Summary:
        """Step time, where it goes, what limits it, the best changes, and data quality."""
        from kprof.report.redaction import redacted
        from kprof.report.summary import summarize

        return redacted(summarize(self.trace))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What costs time, with evidence and the saving of a fix; the best first."""
        diagnosis = self.trace.diagnosis
        return diagnosis.findings if diagnosis is not None else ()

    @property
    def kernels(self) -> pd.DataFrame:
        """A row for each activity of the GPU; docs/formats.md has the columns."""
        return self.trace.kernels

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the HTML report and return its path; a file of that name is replaced.

        By default it is report.html in the run's folder, or NAME.html in the current folder for
        a trace that is no run.
        """
        from kprof.report.html import write_html

        meta = self.trace.meta
        is_run = (self.path / "meta.json").exists() or (self.path / "raw").is_dir()
        beside = self.path / "report.html" if is_run else Path(f"{self.path.name}.html")
        target = Path(path) if path is not None else beside
        write_html(meta.source, self._opened.sections, target, meta.command_line)
        return target

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        named = f"{type(self).__name__}({str(self.path)!r})"
        if self._given is None and "_opened" not in vars(self):
            return f"{named}: {self._not_yet.why if self._not_yet else 'not analyzed yet'}"
        from kprof.report.units import format_count, format_time

        summary, number = self.summary, format_count(len(self.findings), "finding")
        return f"{named}: {summary.whole} of {format_time(summary.whole_ns)}, {number}"

    def __str__(self) -> str:
        """Return the summary of the report as text."""
        if self._not_yet is not None:
            return repr(self)
        import io

        from rich.console import Console

        from kprof.report.terminal import print_summary

        text = io.StringIO()
        print_summary(self.path.name, self._opened.summary[:1], Console(file=text, width=_WIDTH))
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return the report for a notebook, without figures; why, where there is none."""
        from markupsafe import escape

        from kprof.report.html import render_frame

        if self._not_yet is not None:
            return str(escape(repr(self)))
        try:
            meta = self.trace.meta
        except KprofError as error:
            return f"<pre>{escape(str(error))}</pre>"
        sections: list[Section] = self._opened.summary
        return render_frame(meta.source, sections, meta.command_line)


def open(
    *paths: str | os.PathLike[str],
    ranks: Collection[int] | None = None,
    scheduler: Scheduler = None,
) -> Run:
    """Open a trace, several traces of one job, or a run; nothing is written.

    Args:
        paths: Traces, folders of traces, or one saved run.
        ranks: Ranks to read in detail; the others count in the sums by rank, and in who waits for
            whom. None: all, or of more than fit into memory those that tell most.
        scheduler: A client of `dask.distributed`, or a scheduler's address: its workers, which see
            the files under the same paths, read them. None: this machine does.

    Raises:
        KprofError: a path cannot be read, or holds nothing to analyze.
    """
    from kprof.opened import open_unwritten

    if not paths:
        raise KprofError("no trace to open", fix='name one: kprof.open("trace.json.gz")')
    named = [Path(path) for path in paths]
    return Run(named[0], open_unwritten(named, ranks, scheduler))


def profile(
    out: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
) -> AbstractContextManager[Run]:
    """Record the block: `with kprof.profile() as run:`; after it, `run` has the analysis.

    Under `kprof run`, which has a folder already, the block becomes that recording's window, and
    `kprof run` reports on it.

    Args:
        out: The run folder; None: profile.kprof, or profile-2.kprof and so on where it exists.
        force: Replace an earlier recording in `out`.
        shapes: Record the input shapes of operators, without which no work is known.
        stacks: Record Python stacks, which is slow.
        memory: Record every allocation.

    Raises:
        LaunchError: `out` holds a recording already, a block is being recorded, or this Python
            has no torch.
    """
    from kprof.collect.recorder.kprof_recorder.settings import Settings

    settings = Settings(Path(), skip=0, shapes=shapes, stacks=stacks, memory=memory)
    return _recorded(out, settings, force=force)


@contextlib.contextmanager
def _recorded(
    out: str | os.PathLike[str] | None, settings: Settings, *, force: bool
) -> Iterator[Run]:
    running = _recorder_of_this_process()
    if running is not None and running.session.is_following:
        run = Run(running.session.recorder.settings.raw.parent)
        run._not_yet = REPORTED_LATER
        with _block(running.session):
            yield run
        return
    if not _BLOCK.acquire(blocking=False):
        raise LaunchError(
            "a block is being recorded, and a second one would end its recording",
            fix="profile one block at a time; name a part of it with kprof.range",
        )
    try:
        run = Run(_prepared(out, force=force))
        run._not_yet = RECORDING
        raw = run.path / "raw"
        settings = replace(settings, raw=raw.resolve())
        session = _load_recorder().start(settings)
        session.restart(settings)
        try:
            with _launched(raw), _block(session):
                yield run
        finally:
            run._not_yet = None
    finally:
        _BLOCK.release()


def range(name: str) -> AbstractContextManager[None]:
    """Name what happens inside: a range in the trace; "step" delimits the steps.

    It is also an NVTX range of the domain `kprof`, where a tool such as Nsight Systems listens.
    Without torch and such a tool it does nothing.

    Raises:
        KprofError: the name is not a text.
    """
    if not isinstance(name, str):
        raise KprofError(f"kprof.range({name!r}): a name is a text", fix=f'kprof.range("{name}")')
    if "torch" not in sys.modules and _nvtx_domain() is None:
        return contextlib.nullcontext()
    return _named(name)


# One of these is set in every process that a tool of NVIDIA's listens to.
LISTENERS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


@cache
def _nvtx_domain() -> Any:  # noqa: ANN401 - nvtx has no types
    """Return the NVTX domain of kprof; None where no tool listens, and the import would cost."""
    if not any(name in os.environ for name in LISTENERS):
        return None
    import nvtx

    return nvtx.get_domain("kprof")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    running = _recorder_of_this_process() if name == "step" else None
    domain = _nvtx_domain()
    if running is not None:
        running.session.recorder.range_begins()
    if domain is not None:
        domain.push_range(domain.get_event_attributes(message=name))
    try:
        with _torch_range(name):
            yield
    finally:
        if domain is not None:
            domain.pop_range()
        if running is not None:
            running.session.recorder.range_ends()


def _torch_range(name: str) -> AbstractContextManager[object]:
    """Return a range for torch's profiler; none where Nsight Systems records, in its stead."""
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    # The recorder's own knows what to do where a recording begins or ends inside.
    recorders = sys.modules.get(f"{PACKAGE}.named_ranges")
    make: Callable[[str], AbstractContextManager[object]]
    if recorders is None:
        make = torch._C._profiler._RecordFunctionFast
    elif recorders.Range is recorders.PlainNvtxRange:
        make = contextlib.nullcontext
    else:
        make = recorders.TorchRange
    if not (name.isascii() and name.isprintable()):
        # Torch's trace calls all other names "unknown", and some of them are an error.
        name = name.encode("unicode_escape").decode()
    return make(name)


@contextlib.contextmanager
def _block(session: Session | TrialSession) -> Iterator[None]:
    session.block_begins()
    try:
        yield
    finally:
        session.block_ends()


@contextlib.contextmanager
def _launched(raw: Path) -> Iterator[None]:
    """Do around the block what the launcher does around a whole workload."""
    from kprof.collect.launch import write_description
    from kprof.collect.nvml import Sampler
    from kprof.collect.process_folders import compress_parts

    sampler = Sampler(raw / "nvml.jsonl")
    started_ns = time.time_ns()
    sampler.start()
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        sampler.stop()
        # A notebook and a prompt have no script that could run again.
        is_script = hasattr(sys.modules["__main__"], "__file__")
        command = (sys.executable, *sys.argv) if is_script else ()
        write_description(raw, command, (started_ns, time.time_ns()), exit_code)
        compress_parts(raw)


def _prepared(out: str | os.PathLike[str] | None, *, force: bool) -> Path:
    """Make the folder of a recording.

    Raises:
        LaunchError: it holds a recording already, or this Python has no torch.
    """
    from kprof.storage import make_folder

    if importlib.util.find_spec("torch") is None:
        raise LaunchError("this Python has no torch to record", fix="pip install torch")
    if out is None:
        folder = make_folder("profile", None, force=False)
    else:
        folder = Path(out)
        raw = folder / "raw"
        if raw.exists() and any(raw.iterdir()):
            if not force:
                raise LaunchError(
                    f"{folder}: holds a recording already",
                    fix="choose another folder with out=, or replace it with force=True",
                )
            make_folder("profile", folder, force=True)
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    return folder


def _recorder_of_this_process() -> ModuleType | None:
    for name in (f"{PACKAGE}.start", f"{PACKAGE}.trial"):
        module = sys.modules.get(name)
        if module is not None and module.session is not None:
            return module
    return None


def _load_recorder() -> ModuleType:
    """Import the recorder under the name that it has inside every recorded process."""
    if PACKAGE not in sys.modules:
        from kprof.collect.launch import RECORDER

        folder = RECORDER / PACKAGE
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACKAGE}.start")
