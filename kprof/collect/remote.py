"""Recordings in object stores and on other file systems, which fsspec copies here to be read."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kprof.collect.cluster import Scheduler
from kprof.errors import KprofError, TraceError

# s3://bucket/ranks. As a path of this machine it has one slash less.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
# Protocols whose paths begin at the root of this machine.
HERE = ("file", "local")
# Where to find the package of a store.
INSTALL = "pip install 'kprof[remote]', and the package of the store: s3fs, gcsfs, adlfs"


def is_remote(path: Path) -> bool:
    """Tell whether a path is the address of another file system, as s3://bucket/ranks."""
    return _ADDRESS.fullmatch(str(path)) is not None and not path.exists()


@contextmanager
def copied_here(paths: list[Path], scheduler: Scheduler = None) -> Iterator[list[Path]]:
    """Give paths on this machine with the same names; copies are deleted afterwards.

    Raises:
        KprofError: a package is missing, or the workers of a `scheduler` do not see the copies.
        TraceError: nothing is there, or it cannot be read.
    """
    if not any(map(is_remote, paths)):
        yield paths
        return
    if scheduler is not None:
        raise KprofError(
            "the workers of --scheduler do not see what is copied from a store to this machine",
            fix="open without --scheduler, or copy the files to a folder that all workers see",
        )
    with tempfile.TemporaryDirectory(prefix="kprof-") as folder:
        yield [
            _copied(path, Path(folder, str(number))) if is_remote(path) else path
            for number, path in enumerate(paths)
        ]


def _copied(path: Path, folder: Path) -> Path:
    match = _ADDRESS.fullmatch(str(path))
    assert match is not None, "only addresses are copied"
    address = f"{match[1]}://{'/' * (match[1] in HERE)}{match[2]}"
    files, inside = _file_system(address)
    here = folder / (path.name or "ranks")
    folder.mkdir()
    # Each store has errors of its own.
    try:
        if not files.exists(inside):
            raise TraceError(f"{address} does not exist", fix="check the address")
        files.get(inside.rstrip("/"), str(here), recursive=files.isdir(inside))
    except (TraceError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _unreadable(address, error) from error
    return here


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise KprofError(f"{address} needs the package fsspec", fix=INSTALL) from error
    try:
        files, inside = url_to_fs(address)
    except ImportError as error:
        raise KprofError(f"{address} cannot be read: {error}", fix=INSTALL) from error
    except ValueError as error:
        raise TraceError(f"{address} cannot be read: {error}", fix="check the address") from error
    return files, inside


def _unreadable(address: str, error: Exception) -> TraceError:
    words = str(error) or type(error).__name__
    return TraceError(
        f"{address} cannot be read: {words}", fix="check the address and your credentials"
    )
