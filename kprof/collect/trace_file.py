"""The content of a trace file, unpacked, as something that can be read at any offset."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gzip
import importlib
import io
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

from kprof.errors import TraceError


class _ZstdError(ValueError):
    """Data packed by zstd that is damaged or cut off."""


try:  # three times as fast where it is installed
    _GZIP: ModuleType = importlib.import_module("isal.igzip")
    _DAMAGED: tuple[type[Exception], ...] = (
        gzip.BadGzipFile,
        importlib.import_module("isal.isal_zlib").error,
        zlib.error,
        EOFError,
        _ZstdError,
    )
except ImportError:
    _GZIP, _DAMAGED = gzip, (gzip.BadGzipFile, zlib.error, EOFError, _ZstdError)

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# The suffixes of packed files; what lies in them is named by the suffix before.
PACKED = (".gz", ".zst")
# The environment variable that sets how many GB a packed file may grow to.
LIMIT_VARIABLE = "KPROF_MAX_UNPACKED_GB"
# Traces pack 10 to 50 times; what packs better than this, beyond this size, is no trace.
MOST_TIMES = 100
FREE_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
_COPY_AGAIN = (
    "copy the file again in full, in binary mode; if it is being recorded, wait until that has "
    "ended"
)
# So little is decoded at a time where the data is damaged, so that little is lost before it.
_SMALL_CHUNK_BYTES = 1 << 12
# A mark of UTF-32 begins with one of UTF-16, so the longer ones come first.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (b"{\0", "utf-16-le"),
    (b"[\0", "utf-16-le"),
    (b"\0{", "utf-16-be"),
    (b"\0[", "utf-16-be"),
)


class _Slow(io.FileIO):
    """A file that gives little at a time, so that what is decoded before damage is handed on."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(_SMALL_CHUNK_BYTES if size is None or size < 0 else min(size, 512))


@contextmanager
def json_text_of(path: Path, losses: list[str] | None = None) -> Iterator[IO[bytes]]:
    """Open the text of `path`, plain or unpacked, as UTF-8 without a byte order mark.

    What has to be unpacked or converted goes to a temporary file without a name. See
    `content_of` for `losses`.

    Raises:
        TraceError: the file cannot be read, is empty, or its compression is damaged or missing.
    """
    with ExitStack() as stack:
        text = stack.enter_context(content_of(path, losses=losses))
        try:
            if encoding := _encoding_of(os.pread(text.fileno(), 4, 0)):
                text = _as_utf_8(text, encoding, stack.enter_context(_temporary_file()))
            if size_of(text) == 0:
                raise _empty(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        yield text


@contextmanager
def content_of(
    path: Path, *, is_named: bool = False, losses: list[str] | None = None
) -> Iterator[IO[bytes]]:
    """Open what `path` holds, plain or unpacked.

    What has to be unpacked goes to a temporary file; it has no name unless `is_named`, so that
    nothing is left of it whatever happens. With a list of `losses`, damaged packed data gives
    what comes before the damage, and a sentence about it is added to the list.

    Raises:
        TraceError: the file cannot be read, is empty, unpacks to more than the limit, or its
            compression is damaged, missing or one inside another.
    """
    with ExitStack() as stack:
        try:
            text: IO[bytes] = stack.enter_context(path.open("rb"))
            head = os.pread(text.fileno(), 4, 0)
            if unpack := _unpacker_of(head):
                target = stack.enter_context(_temporary_file(is_named=is_named))
                text = _unpacked(path, target, unpack, losses)
                if _unpacker_of(os.pread(text.fileno(), 4, 0)):
                    raise _packed_twice(path)
            elif path.suffix in PACKED and size_of(text):
                raise _not_compressed(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        yield text


def _unpacker_of(head: bytes) -> Callable[[Path], Iterator[bytes]] | None:
    """Return what unpacks a file that begins like this; None where it is not packed."""
    if head.startswith(GZIP_MAGIC):
        return _fast_gzip_parts
    return _zstd_parts if head.startswith(ZSTD_MAGIC) else None


def _fast_gzip_parts(path: Path) -> Iterator[bytes]:
    with _GZIP.open(path, "rb") as packed:
        while part := packed.read(_CHUNK_BYTES):
            yield part


def _zstd_parts(
    path: Path, chunk_bytes: int = _CHUNK_BYTES, kind: type[io.FileIO] = io.FileIO
) -> Iterator[bytes]:
    import pyarrow as pa

    # The file, not its name: pyarrow wants names in UTF-8.
    with kind(path) as file, pa.CompressedInputStream(pa.PythonFile(file), "zstd") as packed:
        while True:
            try:
                part = packed.read(chunk_bytes)
            except OSError as error:
                if error.errno is None:
                    raise _ZstdError(str(error).lower()) from error
                raise
            if not part:
                return
            yield part


def _temporary_file(*, is_named: bool = False) -> IO[bytes]:
    kind = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
    return kind(prefix="kprof-")


def _unpacked(
    path: Path,
    target: IO[bytes],
    unpack: Callable[[Path], Iterator[bytes]],
    losses: list[str] | None,
) -> IO[bytes]:
    """Unpack a file into `target`; see `content_of`."""
    limit_bytes = _limit_bytes(path)
    try:
        _write(path, unpack(path), target, limit_bytes)
    except _DAMAGED as error:
        is_cut = isinstance(error, EOFError) or "truncated" in str(error)
        if losses is not None:
            target.seek(0)
            target.truncate()
            _write(path, _parts_before_damage(path), target, limit_bytes)
        told = "is cut off: its packed data ends" if is_cut else f"is damaged: {error}"
        problem = f"{path.name} {told} after {target.tell():,} bytes of text"
        if losses is None or not target.tell():
            raise TraceError(problem, fix=_COPY_AGAIN) from None
        losses.append(problem)
    target.flush()
    target.seek(0)
    return target


def _limit_bytes(path: Path) -> int:
    """Return how much a packed file may grow to."""
    told = os.environ.get(LIMIT_VARIABLE)
    if told is None:
        return max(FREE_BYTES, MOST_TIMES * path.stat().st_size)
    try:
        limit_gb = float(told)
    except ValueError:
        limit_gb = 0.0
    if not 0 < limit_gb < math.inf:
        raise TraceError(
            f"{LIMIT_VARIABLE} is {told!r}, which is no number of GB",
            fix=f"set it to a number above 0, such as {LIMIT_VARIABLE}=20, or unset it",
        )
    return int(limit_gb * 1e9)


def _write(path: Path, parts: Iterator[bytes], target: IO[bytes], limit_bytes: int) -> None:
    for part in parts:
        target.write(part)
        if target.tell() > limit_bytes:
            raise TraceError(
                f"{path.name}, a file of {path.stat().st_size:,} bytes, unpacks to more than "
                f"{limit_bytes:,} bytes",
                fix=f"if it is a trace, set {LIMIT_VARIABLE} to as many GB as it may unpack to",
            )


def _parts_before_damage(path: Path) -> Iterator[bytes]:
    """Yield what a damaged file holds before the damage."""
    with path.open("rb") as file:
        if os.pread(file.fileno(), 2, 0) == GZIP_MAGIC:
            yield from _gzip_parts(file)
            return
    with contextlib.suppress(_ZstdError):
        yield from _zstd_parts(path, _SMALL_CHUNK_BYTES, _Slow)


def _gzip_parts(packed: IO[bytes]) -> Iterator[bytes]:
    """Yield what gzip data holds, up to the byte at which it is damaged or cut off."""
    inflater = zlib.decompressobj(wbits=31)
    while data := packed.read(_SMALL_CHUNK_BYTES):
        while data:
            before = inflater.copy()
            try:
                part = inflater.decompress(data)
            except zlib.error:
                for i in range(len(data)):
                    with contextlib.suppress(zlib.error):
                        yield before.decompress(data[i : i + 1])
                        continue
                    return
                return
            yield part
            data = inflater.unused_data
            if inflater.eof:
                inflater = zlib.decompressobj(wbits=31)
                # A file may end with zeros, or in another file that was appended to it.
                data = data if data.startswith(GZIP_MAGIC[: len(data)]) else b""


def _packed_twice(path: Path) -> TraceError:
    return TraceError(
        f"{path.name} is compressed twice",
        fix="unpack it once (`gzip -dc` or `zstd -dc`), and open the result",
    )


def size_of(text: IO[bytes]) -> int:
    """Return the length of the text in bytes."""
    return os.fstat(text.fileno()).st_size


def _not_compressed(path: Path) -> TraceError:
    return TraceError(
        f"{path.name} is not compressed although its name ends in {path.suffix}",
        fix=f"rename it without {path.suffix} if it is plain JSON; otherwise copy or record it "
        "again",
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


def _encoding_of(head: bytes) -> str | None:
    """Return the encoding that the first bytes of JSON tell, where it is not plain UTF-8."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)


def _as_utf_8(text: IO[bytes], encoding: str, target: IO[bytes]) -> IO[bytes]:
    text.seek(0)
    if encoding == "utf-8-sig":
        # Bytes that are no UTF-8 stay, for the decoder to count.
        text.seek(len(codecs.BOM_UTF8))
        shutil.copyfileobj(text, target, _CHUNK_BYTES)
    else:
        decoded = io.TextIOWrapper(text, encoding, errors="replace", newline="")
        while part := decoded.read(_CHUNK_BYTES):
            target.write(part.encode("utf-8", "replace"))
        decoded.detach()
    target.flush()
    target.seek(0)
    return target


def _empty(path: Path) -> TraceError:
    return TraceError(
        f"{path.name} is empty",
        fix="record it again; the workload may have ended before the trace was written",
    )


def unpacked_head(path: Path, num_bytes: int) -> bytes:
    """Return the beginning of a file, unpacked as far as it can be."""
    with path.open("rb") as file:
        head = file.read(num_bytes)
    try:
        if head.startswith(GZIP_MAGIC):
            return b"".join(_gzip_parts(io.BytesIO(head)))[:num_bytes]
        if head.startswith(ZSTD_MAGIC):
            return next(_zstd_parts(path), b"")[:num_bytes]
    except _DAMAGED:
        return b""
    return head


def mapped(text: IO[bytes]) -> mmap.mmap:
    """Map the text into memory, for as long as something refers to it."""
    return mmap.mmap(text.fileno(), 0, access=mmap.ACCESS_READ)
