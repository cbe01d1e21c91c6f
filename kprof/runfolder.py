"""Where a run is kept: its folder is made before the workload starts."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path

from kprof.errors import LaunchError

SUFFIX = ".kprof"
# What only kprof writes into a folder: one of them stands in every run and every comparison.
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


def make_next(folder: Path) -> Path:
    """Make a folder for another recording beside `folder`, with the next number that is free."""
    return _numbered(folder.absolute().parent, folder.name.removesuffix(SUFFIX), first=2)


def is_run(folder: Path) -> bool:
    """Tell whether kprof keeps a run or a comparison in this folder, whole or not."""
    return any((folder / name).is_file() for name in OURS)


def remove_empty(folder: Path) -> None:
    """Remove the folder of a workload that recorded nothing; whatever else lies there stays."""
    raw = folder / "raw"
    if not any(raw.glob("rank*-pid*")):
        for name in ("launch.json", "nvml.jsonl", "nsys.log"):
            (raw / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            raw.rmdir()
            folder.rmdir()


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
