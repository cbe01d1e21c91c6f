"""Plotly's JavaScript, packed to travel inside a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from kprof.cache import cache_folder


@dataclass(frozen=True)
class PackedScript:
    """A script as gzip in base64, and the hash of its text for a content security policy."""

    packed: str
    content_hash: str


def pack_plotly() -> PackedScript:
    """Pack the script of the installed plotly, or take what an earlier call packed.

    Packing takes longer than the rest of a page, so it is kept in the user's cache folder.
    """
    folder = cache_folder()
    if folder is None:
        return _pack(_find_script())
    cache = folder / f"plotly-{version('plotly')}.b64"
    packed = _read_cache(cache)
    if packed is None:
        packed = _pack(_find_script())
        _write_cache(cache, packed)
    return packed


def _find_script() -> Path:
    """Return where the installed plotly keeps its script; importing plotly would be slow."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    return Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


def _pack(script: Path) -> PackedScript:
    content = script.read_bytes()
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    # A time inside the gzip header would make two equal pages differ.
    packed = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
    return PackedScript(packed, f"sha256-{digest}")


def _read_cache(path: Path) -> PackedScript | None:
    """Return what was kept, or None where there is nothing or the file is damaged."""
    try:
        seal, content_hash, packed = path.read_text(encoding="ascii").split("\n")
    except (OSError, ValueError):
        return None
    kept = PackedScript(packed, content_hash)
    return kept if _seal(kept) == seal else None


def _write_cache(path: Path, packed: PackedScript) -> None:
    """Keep it for the next report; a cache that cannot be written costs time, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
            partial.write("\n".join([_seal(packed), packed.content_hash, packed.packed]))
        Path(partial.name).replace(path)
    except OSError:
        return


def _seal(packed: PackedScript) -> str:
    return hashlib.sha256(f"{packed.content_hash}\n{packed.packed}".encode()).hexdigest()
