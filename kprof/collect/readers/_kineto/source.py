"""The JSON text of a trace file, decompressed, as something that can be read at any offset."""

from __future__ import annotations

import codecs
import errno
import gzip
import importlib
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """Open the text of `path`, plain or unpacked, without a byte order mark.

    What has to be unpacked or moved goes to a temporary file without a name.

    Raises:
        TraceError: the file cannot be read, is empty, or its compression is damaged or missing.
    """
    with ExitStack() as stack:
        text = stack.enter_context(content_of(path))
        try:
            if _begins_with(text, codecs.BOM_UTF8):
                text = _without_mark(text, stack.enter_context(_temporary_file()))
            if size_of(text) == 0:
                raise _empty(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        yield text


@contextmanager
def content_of(path: Path, *, is_named: bool = False) -> Iterator[IO[bytes]]:
    """Open what `path` holds, plain or unpacked.

    What has to be unpacked goes to a temporary file; it has no name unless `is_named`, so that
    nothing is left of it whatever happens.

    Raises:
        TraceError: the file cannot be read, is empty, or its compression is damaged or missing.
    """
    with ExitStack() as stack:
        try:
            text: IO[bytes] = stack.enter_context(path.open("rb"))
            if _begins_with(text, GZIP_MAGIC):
                target = stack.enter_context(_temporary_file(is_named=is_named))
                text = _decompressed(path, target)
            elif path.suffix == ".gz" and size_of(text):
                raise _not_compressed(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        yield text


def _temporary_file(*, is_named: bool = False) -> IO[bytes]:
    kind = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
    return kind(prefix="kprof-")


def _begins_with(text: IO[bytes], magic: bytes) -> bool:
    return os.pread(text.fileno(), len(magic), 0) == magic


def _without_mark(text: IO[bytes], target: IO[bytes]) -> IO[bytes]:
    text.seek(len(codecs.BOM_UTF8))
    return _copied(text, target)


def _copied(source: IO[bytes], target: IO[bytes]) -> IO[bytes]:
    shutil.copyfileobj(source, target, 1 << 20)
    target.flush()
    target.seek(0)
    return target


def _decompressed(path: Path, target: IO[bytes]) -> IO[bytes]:
    try:
        with _GZIP.open(path, "rb") as packed:
            return _copied(packed, target)
    except EOFError:
        raise TraceError(
            f"{path.name} is cut off: its gzip data ends after {target.tell():,} bytes of text",
            fix="copy the file again in full; if it is being recorded, wait until that has ended",
        ) from None
    except _DAMAGED as error:
        raise TraceError(
            f"{path.name} is damaged: {error} after {target.tell():,} bytes of text",
            fix="copy the file again, in binary mode, or record it again",
        ) from None


def _empty(path: Path) -> TraceError:
    return TraceError(
        f"{path.name} is empty",
        fix="record it again; the workload may have ended before the trace was written",
    )


def _not_compressed(path: Path) -> TraceError:
    return TraceError(
        f"{path.name} is not compressed although its name ends in .gz",
        fix="rename it without .gz if it is plain JSON; otherwise copy or record it again",
    )


def _unreadable(path: Path, error: OSError) -> TraceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TraceError(
            f"no room to unpack {path.name} in {tempfile.gettempdir()}: {error.strerror}",
            fix="free some space there, or set TMPDIR to a folder with more",
        )
    return TraceError(
        f"{path} cannot be read: {error.strerror or error}",
        fix="check that it is there and that you may read it",
    )


def size_of(text: IO[bytes]) -> int:
    """Return the length of the text in bytes."""
    return os.fstat(text.fileno()).st_size


def mapped(text: IO[bytes]) -> mmap.mmap:
    """Map the text into memory, for as long as something refers to it."""
    return mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ)
