"""Where a run is kept: its folder is made before the workload starts."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path

from kprof.errors import LaunchError


def make_folder(workload: str, out: Path | None, *, force: bool) -> Path:
    """Make the run folder: as named, else the workload's name and a number if that is taken.

    Raises:
        LaunchError: something is there that may not be replaced, or nothing can be made there.
    """
    try:
        return _numbered(Path(workload).stem or "run") if out is None else _named(out, force=force)
    except OSError as error:
        raise LaunchError(
            f"{error.filename}: no run folder can be made there ({error.strerror})",
            fix="name one with --out, in a folder that you may write to",
        ) from error


def _numbered(stem: str) -> Path:
    for number in itertools.count(1):
        folder = Path.cwd() / (f"{stem}.kprof" if number == 1 else f"{stem}-{number}.kprof")
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
    if not (folder / "raw").is_dir() and not (folder / "meta.json").is_file():
        raise LaunchError(
            f"{folder} is not a run folder, so --force does not empty it",
            fix="name another --out",
        )
    shutil.rmtree(folder)
