"""Folders on disk: runs with their Parquet tables, or the user's cache."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kprof.errors import KprofError, LaunchError, TraceError
from kprof.findings import Diagnosis, with_ids

if TYPE_CHECKING:
    import pandas as pd

    from kprof.trace import Meta, Table, Trace

# pandas and pyarrow are imported where tables are read or written: `kprof run` makes its folder
# without them, so that they share no memory with the workload.

# Changes when a column changes its meaning; a saved run of another version is read again from raw.
FORMAT = 3
META_FILE = "meta.json"
FINDINGS_FILE = "findings.json"
# The result, as `kprof open --json` prints it.
RESULT_FILE = "summary.json"
REPORT_FILE = "report.html"
# What the terminal shows of a run.
SUMMARY_FILE = "terminal.json"
# The folder of a trace that has the collectives and steps of all ranks, not all columns.
ALL_RANKS = "all_ranks"
# Earlier keys of that file, which a run saved before still has.
_RENAMED = {"remedy": "fix", "way_out": "fix", "unasked": "not_applicable"}
# Columns that hold rows of a table.
ROWS_OF: dict[tuple[Table, str], Table] = {
    ("kernels", "launch_row"): "ranges",
    ("kernels", "op_row"): "ranges",
    ("ranges", "parent"): "ranges",
    ("idle", "kernel_row"): "kernels",
    ("idle", "evidence_row"): "ranges",
}

SUFFIX = ".kprof"
# Only kprof writes these into a folder: one of them is in every run and every comparison.
OURS = ("raw/launch.json", "kernels.parquet")


def make_folder(workload: str, out: Path | None, *, force: bool) -> Path:
    """Make the run folder: as named, else the workload's name, with a number if that is taken.

    With `force` a former run of that name is replaced.

    Raises:
        LaunchError: something is there that may not be replaced, or nothing can be made there.
    """
    try:
        if out is None and not force:
            return _numbered(Path.cwd(), workload)
        return _named(out or Path.cwd() / f"{workload}{SUFFIX}", force=force)
    except OSError as error:
        raise LaunchError(
            f"{error.filename}: no run folder can be made there ({error.strerror})",
            fix="name one with --out, in a folder that you may write to",
        ) from error


def _numbered(parent: Path, name: str, first: int = 1) -> Path:
    for number in itertools.count(first):
        folder = parent / (f"{name}{SUFFIX}" if number == 1 else f"{name}-{number}{SUFFIX}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _named(folder: Path, *, force: bool) -> Path:
    if folder.exists() and any(folder.iterdir()):
        if not force:
            raise LaunchError(f"{folder} exists already", fix="name another --out, or pass --force")
        _remove_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_run(folder: Path) -> None:
    """Remove a former run; anything else in the way is not ours to delete."""
    # Data lies in folders called `raw` as well, so what only kprof writes has to be there.
    if not is_run(folder):
        raise LaunchError(
            f"{folder} is not a run folder, so --force does not empty it",
            fix="name another --out",
        )
    shutil.rmtree(folder)


def make_next(folder: Path) -> Path:
    """Make a folder for another recording beside `folder`, with the next number that is free."""
    return _numbered(folder.absolute().parent, folder.name.removesuffix(SUFFIX), first=2)


def is_run(folder: Path) -> bool:
    """Tell whether kprof keeps a run or a comparison in this folder, whole or not."""
    return any((folder / name).is_file() for name in OURS)


def remove_empty(folder: Path) -> None:
    """Remove the folder of a workload that recorded nothing; other files there stay."""
    raw = folder / "raw"
    if not any(raw.glob("rank*-pid*")):
        for name in ("launch.json", "nvml.jsonl", "nsys.log"):
            (raw / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            raw.rmdir()
            folder.rmdir()


@dataclass(frozen=True)
class _Saved:
    format: int
    meta: msgspec.Raw
    kprof: str = ""


def own_version() -> str:
    """Return the version of kprof, as it is installed."""
    try:
        return version("kprof")
    except PackageNotFoundError:
        return "not installed"


def save(trace: Trace, folder: Path) -> None:
    """Write the tables as Parquet and `meta.json` into `folder`, which exists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from kprof.trace import SCHEMA

    for name in SCHEMA:
        frame = getattr(trace, name)
        texts = [c.name for c in SCHEMA[name] if c.dtype == "category" and c.name in frame]
        # A file, not its name: pyarrow takes some names for addresses, and wants them in UTF-8.
        with (folder / f"{name}.parquet").open("wb") as file:
            pq.write_table(
                pa.Table.from_pandas(frame, preserve_index=False),
                file,
                compression="lz4",
                use_dictionary=texts,
                write_statistics=False,
            )
    if trace.diagnosis is not None:
        content = msgspec.json.encode(trace.diagnosis)
        (folder / FINDINGS_FILE).write_bytes(msgspec.json.format(content))
    save_meta(trace.meta, folder / META_FILE)
    if trace.all_ranks is not None:
        (folder / ALL_RANKS).mkdir(exist_ok=True)
        save(trace.all_ranks, folder / ALL_RANKS)


def save_meta(meta: Meta, path: Path) -> None:
    """Write what a trace says of itself; the tables beside it stay as they are."""
    content = msgspec.json.encode({"format": FORMAT, "kprof": own_version(), "meta": meta})
    path.write_bytes(msgspec.json.format(content))


def load(folder: str | os.PathLike[str]) -> Trace:
    """Read a trace that `save` wrote.

    Raises:
        TraceError: a file is missing or damaged, a table lacks a column, or the files do not belong
            together.
    """
    folder = Path(folder)
    try:
        trace = _trace_in(folder)
        _require_references(trace)
        if (folder / ALL_RANKS).exists():
            trace = replace(trace, all_ranks=_trace_in(folder / ALL_RANKS, is_whole=False))
    except (OSError, ValueError, TypeError, msgspec.DecodeError) as error:
        raise TraceError(
            f"{folder.name} is not a complete saved run: {error}",
            fix="open the trace it was made from again, with --force",
        ) from error
    return trace


def _trace_in(folder: Path, *, is_whole: bool = True) -> Trace:
    """Read the tables of a folder, which have every column if they are whole."""
    from kprof.trace import SCHEMA, Meta, Trace

    saved = msgspec.json.decode((folder / META_FILE).read_bytes(), type=_Saved)
    content = msgspec.json.decode(saved.meta, type=dict[str, Any])
    meta = msgspec.convert(with_ids(content, "caveats"), type=Meta)
    tables = {name: _as_declared(folder, name, is_whole=is_whole) for name in SCHEMA}
    return Trace(**tables, meta=meta, diagnosis=_diagnosis_in(folder))  # type: ignore[arg-type]


def _as_declared(folder: Path, name: Table, *, is_whole: bool) -> pd.DataFrame:
    """Read one table; a column in which everything is missing forgets its dtype in Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from kprof.trace import SCHEMA

    # Not a file of Python's: threads of pyarrow that let go of it while Python ends would abort.
    with pa.OSFile(os.fsencode(folder / f"{name}.parquet")) as file:
        try:
            table = pq.read_table(file)
        except pa.ArrowException as error:
            raise ValueError(f"{name}.parquet is damaged: {error}") from error
    # A million ranges are not copied once more only to lie side by side.
    frame: pd.DataFrame = table.to_pandas(split_blocks=True, self_destruct=True)
    lacking = [c.name for c in SCHEMA[name] if c.name not in frame]
    # Those of condensed ranks no whole table has.
    needed = [c.name for c in SCHEMA[name] if c.name in lacking and c.added_by != "condense"]
    if needed and is_whole:
        raise ValueError(f"{name}.parquet has no column {needed[0]}")
    there = [c for c in SCHEMA[name] if c.name not in lacking]
    lost = {c.name: c.dtype for c in there if str(frame[c.name].dtype) != c.dtype}
    return frame.astype(lost) if lost else frame


def _diagnosis_in(folder: Path) -> Diagnosis | None:
    """Read what the rules found; a run of before there were rules has no such file."""
    path = folder / FINDINGS_FILE
    if not path.exists():
        return None
    return msgspec.convert(_renamed(msgspec.json.decode(path.read_bytes())), type=Diagnosis)


def _renamed(content: object) -> object:
    """Return the content of a JSON file with the keys of today."""
    if isinstance(content, dict):
        return {_RENAMED.get(key, key): _renamed(value) for key, value in content.items()}
    return [_renamed(one) for one in content] if isinstance(content, list) else content


def _require_references(trace: Trace) -> None:
    """Refuse tables of which one refers to rows that another does not have."""
    for (table, column), other in ROWS_OF.items():
        rows = getattr(trace, table)[column].dropna().to_numpy("int64")
        number = len(getattr(trace, other))
        if len(rows) and (rows.min() < 0 or rows.max() >= number):
            raise ValueError(
                f"{table}.parquet and {other}.parquet do not belong together: {column} names row "
                f"{max(rows.max(), -rows.min()):,} of {number:,}"
            )
    ranges, diagnosis = trace.ranges, trace.diagnosis
    parent = ranges["parent"].dropna()
    start_ns, child = ranges["start_ns"].to_numpy(), parent.index.to_numpy()
    parents = parent.to_numpy("int64")
    if ((parents == child) | (start_ns[parents] > start_ns[child])).any():
        raise ValueError("ranges.parquet has a parent that begins after its range")
    if diagnosis is None:
        return
    for finding in diagnosis.findings:
        named: dict[Table, tuple[int, ...]] = {
            "kernels": finding.rows,
            "idle": finding.idle_rows,
            "ranges": finding.range_rows,
        }
        for name, proofs in named.items():
            if proofs and (min(proofs) < 0 or max(proofs) >= len(getattr(trace, name))):
                raise ValueError(f"{FINDINGS_FILE} and {name}.parquet do not belong together")


def is_saved(folder: Path) -> bool:
    """Tell whether `folder` holds a saved trace of the current format."""
    try:
        head = msgspec.json.decode((folder / META_FILE).read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def saved_result(folder: Path) -> bytes | None:
    """Return the JSON result that this version of kprof saved with a whole run, or None."""
    if not is_saved(folder) or not (folder / REPORT_FILE).exists():
        return None
    try:
        saved = msgspec.json.decode((folder / META_FILE).read_bytes(), type=_Saved)
        content = (folder / RESULT_FILE).read_bytes()
        msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return content if saved.kprof == own_version() else None


@contextmanager
def whole_or_not_at_all(folder: Path) -> Iterator[Path]:
    """Give an empty folder, whose files are moved into `folder` once all of them are written.

    `meta.json` comes last: where it stands, the files beside it are complete. When something
    goes wrong before, `folder` is as it was.

    Raises:
        KprofError: there is no room, or no permission, to write there.
    """
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as unfinished:
                yield Path(unfinished)
                _move_all(Path(unfinished), folder)
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise KprofError(
            f"{folder} cannot be written: {error.strerror or error}",
            fix="free some space or fix the permissions, or name another folder with --out",
        ) from error


def _move_all(source: Path, target: Path) -> None:
    if (source / META_FILE).exists():
        (target / META_FILE).unlink(missing_ok=True)
    if (source / "kernels.parquet").exists():
        # A run takes another one's place, of which nothing that it may lack itself is to stay.
        (target / FINDINGS_FILE).unlink(missing_ok=True)
        shutil.rmtree(target / ALL_RANKS, ignore_errors=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == META_FILE):
        path.replace(target / path.name)


def cache_folder() -> Path | None:
    """Return the user's own folder; None for a user without a home, as in some containers."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen) / "kprof"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    return home / ".cache" / "kprof" if home.is_absolute() else None
