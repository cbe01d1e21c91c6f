"""AdamW over all parameters of a model, in one launch for each group of dtypes.

Numbers come out as from `torch.optim.AdamW(fused=True)`; states are those that torch keeps.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels._adamw import GRADIENT, TRITON_TYPES, Numbers, launch
from kprof.kernels._operator import define

PLAIN = (Tensor, torch.nn.Parameter)


class OptimizerError(KprofError):
    """An optimizer whose step cannot be replaced."""


@Optimizer.profile_hook_step
@torch.no_grad()
def adamw_step(optimizer: torch.optim.AdamW, *, is_known_to_fit: bool = False) -> None:
    """Do what `optimizer.step()` does, its hooks included.

    Its state is made and kept as torch makes and keeps it, so that it saves and loads as before.

    Args:
        optimizer: Whose.
        is_known_to_fit: `refuses_step` has just returned None.

    Raises:
        OptimizerError: it asks for what this does not do.
    """
    reason = None if is_known_to_fit else refuses_step(optimizer)
    if reason:
        raise OptimizerError(f"AdamW with {reason}", fix="leave its step as it is")
    for group in optimizer.param_groups:
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        params, gradients, averages, squares, _, steps = lists
        optimizer._init_group(group, *lists)
        if not params:
            continue
        beta1, beta2 = group["betas"]
        adamw(
            params,
            gradients,
            averages,
            squares,
            steps,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["maximize"],
            grad_scale=getattr(optimizer, "grad_scale", None),
            found_inf=getattr(optimizer, "found_inf", None),
        )


def refuses_step(optimizer: torch.optim.AdamW) -> str | None:
    """Return why the next step of an optimizer cannot be made here; None: it can.

    Looks at every parameter, gradient and state, so that no step ends half way.
    """
    has_scale, states = getattr(optimizer, "grad_scale", None) is not None, optimizer.state
    for group in optimizer.param_groups:
        reason = _refuses_options(group)
        if reason:
            return reason
        for param in group["params"]:
            gradient = param.grad
            reason = _refuses_tensor(param)
            if gradient is not None:
                reason = reason or _refuses_gradient(param, gradient, has_scale)
                reason = reason or _refuses_state(param, states.get(param))
            if reason:
                return reason
    return None


def _refuses_options(group: dict[str, Any]) -> str | None:
    if group["amsgrad"]:
        return "amsgrad, whose maxima are not kept"
    if group["differentiable"]:
        return "differentiable=True"
    numbers = (*group["betas"], group["eps"], group["weight_decay"])
    if any(type(one) not in (float, int) for one in numbers):
        return "options that are no plain numbers"
    lr = group["lr"]
    is_tensor = isinstance(lr, Tensor)
    if is_tensor and (lr.numel() != 1 or lr.requires_grad or group["foreach"]):
        return (
            "a learning rate that is a tensor of several numbers, has gradients or is for foreach"
        )
    is_on_host = group["capturable"] and not all(one.is_cuda for one in group["params"])
    return "capturable=True on the host" if is_on_host else None


def _refuses_gradient(param: Tensor, gradient: Tensor, has_scale: bool) -> str | None:
    if type(gradient) not in PLAIN or gradient.layout is not torch.strided:
        return "a gradient that is no plain, dense tensor"
    if gradient.dtype is not param.dtype or gradient.get_device() != param.get_device():
        return f"a gradient in {gradient.dtype} for a parameter in {param.dtype}"
    # A scale is divided out in place.
    if _overlaps(param) or (has_scale and _overlaps(gradient)):
        return "a parameter or scaled gradient whose elements share memory"
    return None


def _refuses_state(param: Tensor, state: dict[str, Any] | None) -> str | None:
    if not state:
        return None
    dtype, size, place = param.dtype, param.numel(), param.get_device()
    for one in (state.get("exp_avg"), state.get("exp_avg_sq")):
        if (
            one is None
            or type(one) not in PLAIN
            or one.layout is not torch.strided
            or _overlaps(one)
        ):
            return "a state that is no plain, dense tensor"
        if one.dtype is not dtype or one.numel() != size or one.get_device() != place:
            return "a state of another dtype, size or device than its parameter"
    step = state.get("step")
    if not isinstance(step, Tensor) or step.numel() != 1 or step.dtype is not torch.float32:
        return "steps that are not counted in float32"
    return None


def _overlaps(tensor: Tensor) -> bool:
    """Tell whether elements share memory, or may do so."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0


def _refuses_tensor(param: Tensor) -> str | None:
    if type(param) not in PLAIN:
        return f"a parameter that is a {type(param).__name__}, no plain tensor"
    if param.dtype not in TRITON_TYPES:
        return f"parameters of {param.dtype}: none of float32, float16 and bfloat16"
    return None


def adamw(
    params: Tensor | list[Tensor],
    gradients: Tensor | list[Tensor],
    averages: Tensor | list[Tensor],
    squares: Tensor | list[Tensor],
    steps: Tensor | list[Tensor],
    lr: float | Tensor = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and states in place, and count the steps.

    Args:
        params: Of one device; they and all others may be lists.
        gradients: Shaped like the parameters; written only where there is a scale.
        averages: Of gradients.
        squares: Averages of squared gradients, of the averages' dtype.
        steps: One float32 each, before this step; on the device or on the host.
        lr: May be a tensor, which is then read on the device.
        beta1: Of the averages.
        beta2: Of the squares.
        eps: Added to the root of the squares.
        weight_decay: Decoupled from the gradient.
        maximize: Whether to go up.
        grad_scale: What the gradients are divided by first, in place.
        found_inf: One where nothing may change.
    """
    lists = [[x] if isinstance(x, Tensor) else x for x in (params, gradients, averages, squares)]
    counts = [steps] if isinstance(steps, Tensor) else steps
    lr_1 = lr if isinstance(lr, Tensor) and lr.device == lists[0][0].device else None
    number = 0.0 if lr_1 is not None else float(lr)
    numbers = float(beta1), float(beta2), float(weight_decay), float(eps), bool(maximize)
    _operator(*lists, counts, grad_scale, found_inf, lr_1, number, *numbers)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([*lists[0], *lists[2], *lists[3]])


def _run(
    params: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    lr_1: Tensor | None,
    lr: float,
    *numbers: Any,
) -> None:
    """Launch once for each combination of dtypes and place of the step."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, (param, gradient, average, step) in enumerate(
        zip(params, gradients, averages, steps, strict=True)
    ):
        if param.numel():
            groups[param.dtype, gradient.dtype, average.dtype, step.device].append(i)
        else:
            step += 1
    settings = Numbers(lr if lr_1 is None else lr_1, *numbers)
    for chosen in groups.values():
        sets = [(params[i], gradients[i], averages[i], squares[i]) for i in chosen]
        dense = [one if _lie_alike(one) else _densely(one) for one in sets]
        columns = [list(column) for column in zip(*dense, strict=True)]
        launch([*columns, [steps[i] for i in chosen]], settings, grad_scale, found_inf)
        for one, copies in zip(sets, dense, strict=True):
            if one is not copies:
                _copy_back(one, copies, has_scale=grad_scale is not None)


def _copy_back(tensors: Quadruple, copies: Quadruple, *, has_scale: bool) -> None:
    """Write the results; to gradients only where a scale was divided out of them."""
    for number, (tensor, copied) in enumerate(zip(tensors, copies, strict=True)):
        if number != GRADIENT or has_scale:
            tensor.copy_(copied)


Quadruple = tuple[Tensor, Tensor, Tensor, Tensor]


def _lie_alike(tensors: Quadruple) -> bool:
    """Tell whether the n-th elements in memory belong together, without gaps."""
    param = tensors[0]
    strides = param.stride()
    if any(one.stride() != strides for one in tensors[1:]):
        return all(one.is_contiguous() for one in tensors)
    return param.is_contiguous() or (
        param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last)
    )


def _densely(tensors: Quadruple) -> Quadruple:
    param, gradient, average, square = (
        one.clone(memory_format=torch.contiguous_format) for one in tensors
    )
    return param, gradient, average, square


_operator = define(
    "adamw_(Tensor(a!)[] params, Tensor(b!)[] gradients, Tensor(c!)[] averages,"
    " Tensor(d!)[] squares, Tensor(e!)[] steps,"
    " Tensor? grad_scale, Tensor? found_inf, Tensor? lr_1, float lr, float beta1, float beta2,"
    " float weight_decay, float eps, bool maximize) -> ()",
    _run,
    lambda *inputs: None,
)


def _reference(
    param: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor
) -> None:
    """Do what torch's fused optimizer does, with its default numbers.

    Of tensors with gaps it gets copies: on the host it writes to the gaps, on GPUs it refuses them.
    """
    step += 1
    states = param, gradient, average, square
    dense = [one.contiguous() for one in states]
    torch._fused_adamw_(
        *(*([one] for one in dense), [], [step]),
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=1e-2,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    for state, copy in zip(states, dense, strict=True):
        if copy is not state and state is not gradient:
            state.copy_(copy)


def _eager(param: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor) -> None:
    """Do what torch's optimizer does one operation at a time."""
    _truth(param, gradient, average, square, step)


def _truth(param: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor) -> None:
    step += 1
    param.mul_(1 - 1e-3 * 1e-2)
    average.lerp_(gradient, 1 - 0.9)
    square.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
    size = 1e-3 / (1 - 0.9**step)
    denominator = (square.sqrt() / (1 - 0.999**step).sqrt()).add_(1e-8)
    param.sub_(size * average / denominator)


def _refuses(
    param: Tensor | list[Tensor],
    gradient: Tensor | list[Tensor],
    average: Tensor | list[Tensor],
    square: Tensor | list[Tensor],
    step: Tensor | list[Tensor],
    *numbers: Any,
) -> str | None:
    for one in (param, gradient, average, square):
        for tensor in [one] if isinstance(one, Tensor) else one:
            reason = _refuses_tensor(tensor)
            if reason:
                return reason
    steps = [step] if isinstance(step, Tensor) else step
    if any(one.dtype != torch.float32 for one in steps):
        return f"a step of {steps[0].dtype}, not float32"
    return None


def _work(param: Tensor, gradient: Tensor, average: Tensor, *others: Any) -> Work:
    """Count four reads and three writes; 14 FLOPs an element."""
    each = 2 * param.element_size() + gradient.element_size() + 4 * average.element_size()
    return Work(14 * param.numel(), each * param.numel())


def _inputs(shape: tuple[int, ...], draw: Any) -> tuple[Any, ...]:
    average, square = draw.plain(*shape, scale=0.01), draw.plain(*shape, scale=0.01).square()
    step = torch.full((), 3.0, device=average.device)
    return draw(*shape), draw(*shape), average, square, step


KERNEL = Kernel(
    name="adamw",
    replaces="the step of torch.optim.AdamW",
    reference=_reference,
    truth=_truth,
    providers=(
        Provider(OURS, lambda: adamw, "kprof"),
        Provider("aten", lambda: _reference),
        Provider("eager", lambda: _eager),
        Provider("inductor", lambda: torch.compile(_eager, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=((2**28,), (1_235_814_400,)),
    edges=((37,), (40_003,)),
    writes=(0, 2, 3, 4),
    sources=(
        "Loshchilov and Hutter, Decoupled weight decay regularization, arXiv 1711.05101",
        "torch, fused AdamW: the order of operations, and which of them are in float64",
    ),
)
