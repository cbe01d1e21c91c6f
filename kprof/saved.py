"""A trace on disk: one Parquet file a table and `meta.json`, readable without kprof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kprof.errors import TraceError
from kprof.trace import SCHEMA, Meta, Table, Trace

# Changes when a column changes its meaning; a saved run of another version is read again from raw.
FORMAT = 1


def save(trace: Trace, folder: Path) -> None:
    """Write the tables as Parquet and `meta.json` into `folder`, each moved into place whole.

    `meta.json` comes last: where it stands, the tables beside it are complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    for name in SCHEMA:
        frame = getattr(trace, name)
        texts = [c.name for c in SCHEMA[name] if c.dtype == "category" and c.name in frame]
        partial = folder / f".{name}.parquet.partial"
        pq.write_table(
            pa.Table.from_pandas(frame, preserve_index=False),
            partial,
            compression="lz4",
            use_dictionary=texts,
            write_statistics=False,
        )
        partial.replace(folder / f"{name}.parquet")
    content = msgspec.json.encode({"format": FORMAT, "meta": trace.meta})
    partial = folder / ".meta.json.partial"
    partial.write_bytes(msgspec.json.format(content))
    partial.replace(folder / "meta.json")


def is_saved(folder: Path) -> bool:
    """Tell whether `folder` holds a saved trace of the current format."""
    try:
        head = msgspec.json.decode((folder / "meta.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def load(folder: Path) -> Trace:
    """Read a trace that `save` wrote."""
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=_Saved).meta
        kernels, ranges, samples = (_as_declared(folder, name) for name in SCHEMA)
    except (OSError, msgspec.DecodeError, pa.ArrowException) as error:
        raise TraceError(
            f"{folder.name} is not a complete saved run: {error}",
            fix="open the trace it was made from again, with --force",
        ) from error
    return Trace(kernels, ranges, samples, meta)


def _as_declared(folder: Path, name: Table) -> pd.DataFrame:
    """Read one table; a column in which everything is missing forgets its dtype in Parquet."""
    frame: pd.DataFrame = pq.read_table(folder / f"{name}.parquet").to_pandas()
    columns = {c.name: c for c in SCHEMA[name] if c.name in frame}
    lost = {n: c.dtype for n, c in columns.items() if str(frame[n].dtype) != c.dtype}
    return frame.astype(lost) if lost else frame


@dataclass(frozen=True)
class _Saved:
    format: int
    meta: Meta
