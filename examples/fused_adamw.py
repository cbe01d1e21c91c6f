"""A change for `kprof ab --patch examples/fused_adamw.py:fused` to switch on and off."""

import contextlib
import gc

import torch


@contextlib.contextmanager
def fused():
    """Let every AdamW of the process update all parameters in one kernel."""
    optimizers = [found for found in gc.get_objects() if isinstance(found, torch.optim.AdamW)]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [group["fused"] for group in groups]
    for group in groups:
        group["fused"] = True
    move_step_counts(optimizers)
    try:
        yield
    finally:
        for group, was in zip(groups, before, strict=True):
            group["fused"] = was
        move_step_counts(optimizers)


def move_step_counts(optimizers):
    """Put each parameter's count of steps where its group wants it: fused, on the device."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if "step" in state:
                    device = parameter.device if group["fused"] else "cpu"
                    state["step"] = state["step"].to(device)
