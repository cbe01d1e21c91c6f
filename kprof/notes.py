"""What a workload's own libraries noted of what it ran: the compiler of code, torch of graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompiledLaunch:
    """A kernel or an operator that generated code launches."""

    name: str
    stacks: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """For each operator in it the modules around it, outermost first: once for each module that the
    code may serve, as one piece does for all layers of a class. Empty where nothing was noted."""


@dataclass(frozen=True)
class CompiledCode:
    """What a compiler generated of one graph; ranges around its calls name it by a key."""

    keys: tuple[str, ...]
    launches: tuple[CompiledLaunch, ...]
    is_in_order: bool
    """Whether a call launches all of them, one after another as listed."""


@dataclass(frozen=True)
class NodeNote:
    """What torch noted of a node of a CUDA graph while that was captured (`mark_kernels`)."""

    rank: int
    node: int
    """Its number, as in `graph_node`."""
    range: str | None = None
    """Innermost range that the workload marked around it."""
    module: str | None = None
