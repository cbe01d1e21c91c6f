"""Optimizers: the step of torch's AdamW."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from kprof.kernels import OURS
from kprof.kernels.swap.dispatch import Dispatcher
from kprof.kernels.swap.patches import MARK
from kprof.kernels.swap.site import Request, Site, Skip, Switch
from kprof.kernels.swap.sites import Family

KERNEL = "adamw"
# Torch 2.11 has another name for it; some versions have both, of which this one is deprecated.
HEALTH_CHECK = next(
    name
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
    if hasattr(AdamW, name)
)
# Attribute that torch's schedulers set on a step that they count.
COUNTED = "_wrapped_by_lr_sched"


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield an AdamW."""
    if not isinstance(root, AdamW):
        return
    cls = type(root)
    why = _why_foreign(root)
    provider = request.providers.name(KERNEL)
    if why is None and provider != OURS:
        why = f"{provider} can be measured, but takes no whole optimizer"
    if why is not None:
        yield Skip(cls.__name__, KERNEL, cls.__name__, why)
        return
    dispatcher = Dispatcher(request.kernels[KERNEL], request.providers, frozenset())
    switch = Switch()
    yield Site(
        cls.__name__,
        root,
        lambda owner: types.MethodType(_step(owner, dispatcher, switch), owner),
        dispatcher,
        attribute="step",
        switch=switch,
        may_stand=lambda own: hasattr(own, COUNTED),
    )


def _why_foreign(optimizer: AdamW) -> str | None:
    own = optimizer.__dict__.get("step")
    if hasattr(getattr(own, "__func__", own), MARK):
        return "it is swapped already"
    if own is not None and not hasattr(own, COUNTED):
        return f"its step was replaced by {getattr(own, '__module__', type(own).__name__)}"
    if type(optimizer).step is not AdamW.step:
        return f"{type(optimizer).__name__} has a step of its own"
    return None


def _step(optimizer: AdamW, dispatcher: Dispatcher, switch: Switch) -> Callable[..., Any]:
    from kprof.kernels.adamw import adamw_step, refuses_step

    # Whether a scheduler has wrapped the step to count it; this step replaces the wrapper.
    is_counted = "step" in optimizer.__dict__

    def step(self: Any, closure: Any = None) -> Any:
        if switch.owner is not self:
            return type(self).step(self, closure)
        if is_counted:
            self._opt_called = True
        params = [one for group in self.param_groups for one in group["params"]]
        if closure is not None or not params:
            dispatcher.leave_out(
                "its step computes the loss anew" if params else "it has no parameters"
            )
            return type(self).step(self, closure)
        if torch.cuda.is_available():
            # As torch's step does: raises during a graph capture that would count no steps.
            getattr(self, HEALTH_CHECK)()
        why = refuses_step(self) or _refuses(self, params)
        sizes = tuple(len(group["params"]) for group in self.param_groups)
        key = (why, sizes, params[0].device, params[0].dtype)
        decision = dispatcher.known.get(key)
        if decision is None:
            size = sum(one.numel() for one in params)
            decision = dispatcher.settle(key, why, params[0], (size,), False)
        decision.num_calls += 1
        return (
            type(self).step(self)
            if decision.function is None
            else adamw_step(self, is_known_to_fit=True)
        )

    setattr(step, MARK, switch)
    if is_counted:
        setattr(step, COUNTED, True)
    return step


def _refuses(optimizer: AdamW, params: list[Tensor]) -> str | None:
    """Return why the groups of an optimizer are not supported; None: they are."""
    if len({one.device for one in params}) > 1:
        return "its parameters are on several devices"
    if not all(group.get("decoupled_weight_decay", True) for group in optimizer.param_groups):
        return "weights decay by their gradients"
    # New states count steps in the default dtype.
    is_new = any(one.grad is not None and not optimizer.state.get(one) for one in params)
    if is_new and torch.get_default_dtype() == torch.float64:
        return "its steps are counted in float64"
    return None


FAMILY = Family(kernels=(KERNEL,), find=find)
