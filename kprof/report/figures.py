"""Shared by figures: colours, and names that plotly must not read as markup."""

from __future__ import annotations

import html
from collections.abc import Iterable

# Mid tones, legible on white and on black.
_KIND_COLOURS = {
    "gemm": "#4c78a8",
    "attention": "#f58518",
    "convolution": "#3fa9a5",
    "norm": "#54a24b",
    "softmax": "#d6b12d",
    "elementwise": "#a56ba0",
    "reduction": "#ee8a90",
    "embedding": "#a67c61",
    "indexing": "#d0598c",
    "copy": "#8c8c94",
    "set": "#b9a58e",
    "optimizer": "#7f6bd0",
    "collective": "#d8443c",
    "loss": "#5fa3d8",
    "sort": "#8bb33d",
    "random": "#c08a3e",
    "other": "#9a9389",
}
_SPARE_COLOURS = ("#1f9e89", "#c2578b", "#6a8f2f", "#b5651d", "#5b6ee1")

BOUND_COLOURS = {"memory": "#4c78a8", "compute": "#f58518", "latency": "#8c8c94"}
UNKNOWN_COLOUR = "#b8b8b8"
IDLE_COLOUR = "#c9c9cf"
CEILING_COLOUR = "#8c8c94"


def literal(name: object) -> str:
    """Return an untrusted name as plotly shows it unchanged: it reads text as a kind of HTML."""
    return html.escape(str(name), quote=False)


def colours_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for each kind: always the same for a known one."""
    strange = sorted(set(kinds) - _KIND_COLOURS.keys())
    spare = {kind: _SPARE_COLOURS[i % len(_SPARE_COLOURS)] for i, kind in enumerate(strange)}
    return {**_KIND_COLOURS, **spare}
