"""Inference engines whose steps have a place of their own, which says more than a model's call."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .steps import Source

if TYPE_CHECKING:
    from .hooks import Hooks

# Module, class and method that each worker process calls once for every batch of a schedule.
ENGINES = (
    ("vllm.v1.worker.gpu_worker", "Worker", "execute_model"),
    ("sglang.srt.managers.scheduler", "Scheduler", "run_batch"),
)


def listen_to_engines(hooks: Hooks) -> None:
    """Take the steps of an engine that this process has imported for the workload's steps."""
    for module_name, class_name, method_name in ENGINES:
        owner = getattr(sys.modules.get(module_name), class_name, None)
        original = vars(owner).get(method_name) if isinstance(owner, type) else None
        if callable(original):
            name = f"engine step ({class_name}.{method_name})"
            source = Source(module_name, name, size=sys.maxsize)
            setattr(owner, method_name, hooks.as_step(source, original))
