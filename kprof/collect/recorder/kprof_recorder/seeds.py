"""Seeds of a training run that can be repeated: random numbers begin from a seed, and go on so.

A workload that sets seeds gets others for another seed, one that sets none begins from it.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import torch

from . import when_imported


def start_from(seed: int) -> None:
    """Let this process's random numbers depend on a seed from here on, whatever it sets itself."""
    _shift(random, "seed", seed)
    random.seed(0)
    for owner, name in (
        (torch, "manual_seed"),
        (torch.random, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"),
    ):
        _shift(owner, name, seed)
    torch.manual_seed(0)
    when_imported("numpy.random", lambda numpy_random: _start_numpy(numpy_random, seed))


def _start_numpy(numpy_random: ModuleType, seed: int) -> None:
    for name in ("seed", "default_rng"):
        _shift(numpy_random, name, seed)
    numpy_random.seed(0)


def _shift(owner: Any, name: str, by: int) -> None:  # noqa: ANN401 - a module
    original = getattr(owner, name)

    def shifted(seed: Any = None, *others: Any, **named: Any) -> Any:  # noqa: ANN401 - its own
        if seed is None or isinstance(seed, int):
            seed = (seed or 0) + by
        return original(seed, *others, **named)

    shifted.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, shifted)
