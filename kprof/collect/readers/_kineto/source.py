"""The JSON text of a trace file, decompressed, as something that can be read at any offset."""

from __future__ import annotations

import gzip
import importlib
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

from kprof.errors import TraceError

try:  # three times as fast where it is installed
    _GZIP: ModuleType = importlib.import_module("isal.igzip")
    _DAMAGED: tuple[type[Exception], ...] = (
        gzip.BadGzipFile,
        importlib.import_module("isal.isal_zlib").error,
    )
except ImportError:
    _GZIP, _DAMAGED = gzip, (gzip.BadGzipFile, zlib.error)

GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def json_text_of(path: Path) -> Iterator[IO[bytes]]:
    """Open the text of `path`; a compressed one is unpacked to a nameless temporary file.

    Raises:
        TraceError: the file is empty, or its compression is damaged or missing.
    """
    with path.open("rb") as file:
        magic = file.read(2)
        file.seek(0)
        if magic == GZIP_MAGIC:
            with tempfile.TemporaryFile(prefix="kprof-") as text:
                _decompress(path, text)
                yield _not_empty(path, text)
        elif path.suffix == ".gz":
            raise TraceError(
                f"{path.name} is not compressed although its name ends in .gz",
                fix="rename it without .gz if it is plain JSON; otherwise copy or record it again",
            )
        else:
            yield _not_empty(path, file)


def _not_empty(path: Path, text: IO[bytes]) -> IO[bytes]:
    if size_of(text) == 0:
        raise TraceError(
            f"{path.name} is empty",
            fix="record it again; the workload may have ended before the trace was written",
        )
    return text


def _decompress(path: Path, text: IO[bytes]) -> None:
    try:
        with _GZIP.open(path, "rb") as packed:
            shutil.copyfileobj(packed, text, 1 << 20)
        text.seek(0)
    except EOFError:
        raise TraceError(
            f"{path.name} is cut off: its gzip data ends after {text.tell():,} bytes of text",
            fix="copy the file again in full; if it is being recorded, wait until that has ended",
        ) from None
    except _DAMAGED as error:
        raise TraceError(
            f"{path.name} is damaged: {error} after {text.tell():,} bytes of text",
            fix="copy the file again, in binary mode, or record it again",
        ) from None


def size_of(text: IO[bytes]) -> int:
    """Return the length of the text in bytes."""
    return os.fstat(text.fileno()).st_size


def mapped(text: IO[bytes]) -> mmap.mmap:
    """Map the text into memory, for as long as something refers to it."""
    return mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ)
