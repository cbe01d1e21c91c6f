"""Proton's tree of call paths: its nodes one by one, each with its path and what was added up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kprof.collect.trace_file import content_of
from kprof.errors import TraceError

RECORD = "record with Proton's hatchet output (data='tree'), or with `kprof run`"
# In what Proton launches itself to ask a kernel for its metadata.
OWN_SCOPE = "__proton_launch_metadata"
MSGPACK_HEAD = b"\x92\x83\xa5frame"
_PYTHON_FRAME = re.compile(r".+:.*@\d+")


class Frame(msgspec.Struct):
    """The name of a node."""

    name: str = ""


class Node(msgspec.Struct):
    """A node as the file has it: a frame, its own metrics, what it called."""

    frame: Frame = msgspec.field(default_factory=Frame)
    metrics: dict[str, object] = {}
    children: list[Node] = []


Devices = dict[str, dict[str, dict[str, object]]]


@dataclass(frozen=True)
class Visit:
    """A node on the way through the tree; `is_end`: everything in it has been visited."""

    node: Node
    scopes: tuple[str, ...]
    """Names of the scopes around it and its own, outermost first; frames of Python left out."""
    is_end: bool
    is_own: bool
    """Whether Proton launched it for itself."""


def read_tree(path: Path) -> tuple[Node, Devices]:
    """Read the tree and the devices of a profile, whether JSON or MessagePack.

    Raises:
        TraceError: the file is damaged, or no profile of Proton.
    """
    with content_of(path) as file:
        content = file.read()
    is_packed = content.startswith(MSGPACK_HEAD)
    decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
    try:
        parts = decode(content, type=list[msgspec.Raw])
        root = decode(parts[0], type=Node)
        devices = decode(parts[1], type=Devices) if len(parts) > 1 else {}
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise TraceError(
            f"{path.name} is no whole profile of Proton: {error}",
            fix="copy the file again in full, or let the workload end, so that Proton writes all",
        ) from error
    except RecursionError as error:
        raise TraceError(
            f"{path.name}: its call paths are too deep to be read",
            fix='record with proton.start(context="shadow"), whose paths are scopes alone',
        ) from error
    return root, devices


def walk(root: Node) -> Iterator[Visit]:
    """Visit every node below the root twice: before what it called, and after."""
    waiting = [Visit(child, (), False, False) for child in reversed(root.children)]
    while waiting:
        visit = waiting.pop()
        if visit.is_end:
            yield visit
            continue
        name = visit.node.frame.name
        own = (*visit.scopes, name) if not is_python(name) else visit.scopes
        entered = Visit(visit.node, own, False, visit.is_own or name == OWN_SCOPE)
        yield entered
        waiting.append(Visit(entered.node, own, True, entered.is_own))
        waiting += [
            Visit(child, own, False, entered.is_own) for child in reversed(visit.node.children)
        ]


def is_python(name: str) -> bool:
    """Tell a frame of Python, `file.py:function@12`, from a scope or a kernel."""
    return _PYTHON_FRAME.fullmatch(name) is not None


def number_of(metrics: Mapping[str, object], name: str) -> int | None:
    """Return a metric as a whole number, by its name in any version; None where there is none."""
    for key, value in metrics.items():
        if _plain(key) != _plain(name):
            continue
        if isinstance(value, str):
            return int(value) if value.isdecimal() else None
        return round(value) if isinstance(value, int | float) else None
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
