"""AdamW over all parameters of a model, in one launch per group of dtypes.

    average = lerp(average, gradient, 1 - beta1);  square = lerp(square, gradient², 1 - beta2)
    param = param * (1 - lr * decay) - lr / c1 * average / (sqrt(square) / c2 + eps)

c1 and c2 are the bias corrections. Results equal those of `torch.optim.AdamW(fused=True)`, whose
states are used. Arithmetic is that of torch's fused optimizer: for float32 parameters, float64
where a Python number meets an element.

On the GPU a table holds the addresses of all tensors, cut into chunks; each CTA updates one chunk,
so the number of tensors costs no launches. A first kernel counts the steps.

Entered by `adamw`, and by `adamw_step` for a whole optimizer. T is tensors, C chunks, N the
elements of a tensor.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.optim import Optimizer

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, Work
from kprof.kernels.runtime import ALIGNMENT, Launcher, alignments, define

# Elements of a CTA, in one pass: CTAs that run one after another access neighbouring memory.
CHUNK = 4_096
NUM_WARPS = 8
# Tensors whose steps one CTA counts.
TENSORS_PER_CTA = 64
# Bits of the largest step that float32 represents exactly.
STEP_BITS = 24
# Fields of a row of the table.
PARAM, GRADIENT, AVERAGE, SQUARE, STEP, LENGTH = range(6)
NUM_FIELDS = 6
TABLES_KEPT = 32
TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Host tensors that a captured graph copies at each replay: they must stay alive.
_captured: list[Tensor] = []
PLAIN = (Tensor, torch.nn.Parameter)
Quadruple = tuple[Tensor, Tensor, Tensor, Tensor]


class Numbers(NamedTuple):
    """The hyperparameters of a group."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool


class Table(NamedTuple):
    """Addresses of the tensors, and the chunks that CTAs update."""

    tensors_T6: Tensor
    """Addresses of parameter, gradient, average, square and step; number of elements."""
    corrections_T2: Tensor
    """Both bias corrections of the current step, in float64."""
    chunks_C: Tensor
    """Number of the tensor times 2^32, plus that of the chunk in it."""
    is_aligned: bool


@Optimizer.profile_hook_step
@torch.no_grad()
def adamw_step(optimizer: torch.optim.AdamW, *, is_known_to_fit: bool = False) -> None:
    """Run a step of an optimizer as `optimizer.step()` does, with its hooks.

    Its state has torch's form, so that it saves and loads as before.

    Args:
        optimizer: Its parameters and states change.
        is_known_to_fit: Whether `refuses_step` has just returned None.

    Raises:
        OptimizerError: it has options that are not supported.
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
        gradients: Shaped like the parameters; written only if there is a scale.
        averages: Of gradients.
        squares: Averages of squared gradients, of the averages' dtype.
        steps: One float32 each, before this step; on the device or on the host.
        lr: A tensor is read on the device.
        beta1: Decay of the averages.
        beta2: Decay of the squares.
        eps: Added to the root of the squares.
        weight_decay: Decoupled from the gradient.
        maximize: Whether the parameters follow the gradient upwards.
        grad_scale: Divides the gradients first, in place.
        found_inf: 1: nothing changes.
    """
    lists = [[x] if isinstance(x, Tensor) else x for x in (params, gradients, averages, squares)]
    counts = [steps] if isinstance(steps, Tensor) else steps
    lr_1 = lr if isinstance(lr, Tensor) and lr.device == lists[0][0].device else None
    number = 0.0 if lr_1 is not None else float(lr)
    numbers = float(beta1), float(beta2), float(weight_decay), float(eps), bool(maximize)
    _operator(*lists, counts, grad_scale, found_inf, lr_1, number, *numbers)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([*lists[0], *lists[2], *lists[3]])


def refuses_step(optimizer: torch.optim.AdamW) -> str | None:
    """Return why the next step of an optimizer is not supported; None: it is.

    It checks every parameter, gradient and state, so that no step fails half way.
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


def _refuses_tensor(param: Tensor) -> str | None:
    if type(param) not in PLAIN:
        return f"a parameter that is a {type(param).__name__}, no plain tensor"
    if param.dtype not in TRITON_TYPES:
        return f"parameters of {param.dtype}: none of float32, float16 and bfloat16"
    return None


def _overlaps(tensor: Tensor) -> bool:
    """Return whether elements share memory, or may do so."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0


def _reference(
    param: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor
) -> None:
    """Run torch's fused optimizer, with its default hyperparameters.

    Tensors with gaps are copied: torch writes to the gaps on the host, and refuses them on GPUs.
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
    """Compute the step one operation at a time, as torch's optimizer without `fused` does."""
    _truth(param, gradient, average, square, step)


def _truth(param: Tensor, gradient: Tensor, average: Tensor, square: Tensor, step: Tensor) -> None:
    step += 1
    param.mul_(1 - 1e-3 * 1e-2)
    average.lerp_(gradient, 1 - 0.9)
    square.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
    size = 1e-3 / (1 - 0.9**step)
    denominator = (square.sqrt() / (1 - 0.999**step).sqrt()).add_(1e-8)
    param.sub_(size * average / denominator)


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
    """Launch once for each combination of dtypes and device of the step."""
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


def _lie_alike(tensors: Quadruple) -> bool:
    """Return whether all four are dense, with the same order of elements in memory."""
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


def _copy_back(tensors: Quadruple, copies: Quadruple, *, has_scale: bool) -> None:
    """Copy the results back; gradients only if a scale divided them."""
    for number, (tensor, copied) in enumerate(zip(tensors, copies, strict=True)):
        if number != GRADIENT or has_scale:
            tensor.copy_(copied)


def launch(
    tensors: list[list[Tensor]],
    numbers: Numbers,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update all parameters, which share a device and dtypes, each dense and laid out alike.

    Args:
        tensors: Parameters, gradients, averages, squares and steps. Steps are counted where they
            are, on the device or on the host.
        numbers: Hyperparameters.
        grad_scale: Divides the gradients first.
        found_inf: 1: nothing is updated.
    """
    params, gradients, averages, _, steps = tensors
    table = _table_of(tensors)
    device = params[0].device
    has_found_inf = found_inf is not None
    if steps[0].device == device:
        grid = -(-len(params) // TENSORS_PER_CTA)
        arguments: tuple[Any, ...] = (
            *(table.tensors_T6, table.corrections_T2, found_inf, numbers.beta1, numbers.beta2),
            *(len(params), STEP_BITS, NUM_FIELDS, TENSORS_PER_CTA),
        )
        _launch_step((device, has_found_inf), grid, arguments, {"num_warps": 2})
    else:
        _correct_on_host(steps, numbers, table)
    lr = numbers.lr if isinstance(numbers.lr, Tensor) else None
    dtypes = tuple(TRITON_TYPES[one[0].dtype] for one in (params, gradients, averages))
    alignment = ALIGNMENT if table.is_aligned else 1
    key = (
        *(device, dtypes, alignment, numbers.maximize),
        *(lr is None or lr.dtype, grad_scale is None, has_found_inf),
        alignments(
            (
                lr,
                grad_scale,
                found_inf,
            )
        ),
    )
    arguments = (
        *(*table[:3], lr, grad_scale, found_inf, 0.0 if lr is not None else numbers.lr),
        *(numbers.beta1, numbers.beta2, numbers.weight_decay, numbers.eps, numbers.maximize),
        *(*dtypes, alignment, NUM_FIELDS, CHUNK),
    )
    _launch_update(key, table.chunks_C.numel(), arguments, {"num_warps": NUM_WARPS})


def _correct_on_host(steps: list[Tensor], numbers: Numbers, table: Table) -> None:
    """Count steps on the host, and copy the corrections to the device asynchronously."""
    torch._foreach_add_(steps, 1)
    counts = [float(step) for step in steps]
    rows = [[1 - numbers.beta1**n, (1 - numbers.beta2**n) ** 0.5] for n in counts]
    values = torch.tensor(rows, dtype=torch.float64, device="cpu")
    corrections = _send(values, table.corrections_T2.device)
    table.corrections_T2.copy_(corrections, non_blocking=True)


def _table_of(tensors: list[list[Tensor]]) -> Table:
    """Return the table of these tensors; it is cached until one of them moves."""
    device = tensors[0][0].device
    is_on_device = tensors[STEP][0].device == device
    kept = tensors if is_on_device else tensors[:STEP]
    addresses = tuple(tuple(one.data_ptr() for one in group) for group in kept)
    lengths = tuple(one.numel() for one in tensors[0])
    if _is_captured(device):
        # A captured copy runs only at replay: such a table must not be cached.
        return _make_table(device, addresses, lengths)
    return _keep_table(device, addresses, lengths)


def _make_table(
    device: torch.device, addresses: tuple[tuple[int, ...], ...], lengths: tuple[int, ...]
) -> Table:
    none = (0,) * len(lengths)
    fields = [*addresses, none, lengths] if len(addresses) == STEP else [*addresses, lengths]
    rows = torch.tensor(list(zip(*fields, strict=True)), dtype=torch.int64, device="cpu")
    make_chunks = _make_chunks if _is_captured(device) else _keep_chunks
    return Table(
        _send(rows, device),
        torch.empty(len(rows), 2, dtype=torch.float64, device=device),
        make_chunks(device, lengths, CHUNK),
        all(a % ALIGNMENT == 0 for group in addresses[:STEP] for a in group),
    )


def _make_chunks(device: torch.device, lengths: tuple[int, ...], chunk: int) -> Tensor:
    """Return the number of the tensor times 2^32, plus that of the chunk in it, of every chunk."""
    counts = torch.tensor([-(-length // chunk) for length in lengths], device="cpu")
    firsts = counts.cumsum(0) - counts
    tensors = torch.arange(len(lengths), device="cpu").repeat_interleave(counts)
    places = torch.arange(len(tensors), device="cpu") - firsts[tensors]
    return _send((tensors << 32) + places, device)


def _send(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to the device asynchronously."""
    if device.type != "cuda":
        return values
    on_host = values.pin_memory()
    if _is_captured(device):
        _captured.append(on_host)
    return on_host.to(device, non_blocking=True)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class OptimizerError(KprofError):
    """An optimizer whose step cannot be replaced."""


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


@triton.jit
def _power(base, exponent, BITS: tl.constexpr):
    """Return a float64 to the power of an integer."""
    result = base * 0.0 + 1.0
    for _ in range(BITS):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base *= base
        exponent = exponent // 2
    return result


@triton.jit(do_not_specialize=["num_tensors"])
def step_kernel(
    tensors_T6,
    corrections_T2,
    found_inf_1,
    beta1: tl.float64,
    beta2: tl.float64,
    num_tensors,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the step of every tensor, and write its bias corrections."""
    tensors = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_tensor = tensors < num_tensors
    address = tl.load(tensors_T6 + tensors * FIELDS + 4, is_tensor, other=0)
    step_1 = address.to(tl.pointer_type(tl.float32))
    step = tl.load(step_1, is_tensor, other=0.0) + 1.0
    if found_inf_1 is not None:
        step -= tl.load(found_inf_1).to(tl.float32)
    tl.store(step_1, step, is_tensor)
    number = step.to(tl.int32)
    first = 1.0 - _power(tl.zeros((BLOCK,), tl.float64) + beta1, number, BITS)
    second = 1.0 - _power(tl.zeros((BLOCK,), tl.float64) + beta2, number, BITS)
    tl.store(corrections_T2 + 2 * tensors, first, is_tensor)
    tl.store(corrections_T2 + 2 * tensors + 1, tl.sqrt(second), is_tensor)


@triton.jit
def _update(
    elements,
    is_element,
    tensors,
    numbers,
    IS_SCALED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    param_N, gradient_N, average_N, square_N = tensors
    scale, step_size, second_root, decay, beta1, beta2, eps = numbers
    param = tl.load(param_N + elements, is_element, other=0.0)
    gradient = tl.load(gradient_N + elements, is_element, other=0.0)
    average = tl.load(average_N + elements, is_element, other=0.0)
    square = tl.load(square_N + elements, is_element, other=0.0)
    param32 = param.to(tl.float32)
    gradient32 = gradient.to(tl.float32)
    if IS_SCALED:
        gradient32 = tl.div_rn(gradient32, scale)
        tl.store(gradient_N + elements, gradient32.to(gradient.dtype), is_element)
    if MAXIMIZE:
        gradient32 = -gradient32
    if param.dtype == tl.float32:
        gradient64 = gradient32.to(tl.float64)
        param64 = param32.to(tl.float64)
        param32 = (param64 - decay * param64).to(tl.float32)
        new_average = beta1 * average.to(tl.float64) + (1.0 - beta1) * gradient64
        new_square = beta2 * square.to(tl.float64) + (1.0 - beta2) * gradient64 * gradient64
        average32, square32 = new_average.to(tl.float32), new_square.to(tl.float32)
        root = tl.div_rn(tl.sqrt_rn(square32), second_root)
        denominator = (root.to(tl.float64) + eps).to(tl.float32)
        param32 -= tl.div_rn(step_size * average32, denominator)
    else:
        # Conversions to float64 would take longer than the memory does, and the last bits of
        # float32 are rounded away.
        param32 -= tl.cast(decay, tl.float32) * param32
        average32 = tl.cast(beta1, tl.float32) * average.to(tl.float32)
        average32 += tl.cast(1.0 - beta1, tl.float32) * gradient32
        square32 = tl.cast(beta2, tl.float32) * square.to(tl.float32)
        square32 += tl.cast(1.0 - beta2, tl.float32) * gradient32 * gradient32
        denominator = tl.sqrt(square32) / second_root + tl.cast(eps, tl.float32)
        param32 -= step_size * average32 / denominator
    tl.store(param_N + elements, param32.to(param.dtype), is_element)
    tl.store(average_N + elements, average32.to(average.dtype), is_element)
    tl.store(square_N + elements, square32.to(square.dtype), is_element)


@triton.jit
def update_kernel(
    tensors_T6,
    corrections_T2,
    chunks_C,
    lr_1,
    grad_scale_1,
    found_inf_1,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    weight_decay: tl.float64,
    eps: tl.float64,
    MAXIMIZE: tl.constexpr,
    PARAM: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Update one chunk of one tensor, unless an infinity was found."""
    is_good = True
    if found_inf_1 is not None:
        is_good = tl.load(found_inf_1) == 0.0
    if is_good:
        place = tl.load(chunks_C + tl.program_id(0))
        number, first = place >> 32, (place & 0xFFFFFFFF) * CHUNK
        row_6 = tensors_T6 + number * FIELDS
        param_N = tl.multiple_of(tl.load(row_6).to(tl.pointer_type(PARAM)), ALIGNED)
        gradient_N = tl.multiple_of(tl.load(row_6 + 1).to(tl.pointer_type(GRADIENT)), ALIGNED)
        average_N = tl.multiple_of(tl.load(row_6 + 2).to(tl.pointer_type(STATE)), ALIGNED)
        square_N = tl.multiple_of(tl.load(row_6 + 3).to(tl.pointer_type(STATE)), ALIGNED)
        length = tl.load(row_6 + 5)
        if lr_1 is not None:
            lr = tl.load(lr_1).to(tl.float64)
        step_size = (lr / tl.load(corrections_T2 + 2 * number)).to(tl.float32)
        second_root = tl.load(corrections_T2 + 2 * number + 1).to(tl.float32)
        scale = 1.0
        if grad_scale_1 is not None:
            scale = tl.load(grad_scale_1).to(tl.float32)
        decay = lr * weight_decay
        common = (
            (param_N, gradient_N, average_N, square_N),
            (scale, step_size, second_root, decay, beta1, beta2, eps),
            grad_scale_1 is not None,
            MAXIMIZE,
        )
        # Multiples of 16 are loaded 16 bytes at a time; the few elements after them are not.
        even = length // 16 * 16
        elements = first + tl.arange(0, CHUNK)
        # With this branch it takes 63 registers, without it 72: four CTAs per SM, or three.
        if first < even:
            _update(elements, elements < even, *common)
        if (length > even) & (first + CHUNK >= length):
            last = even + tl.arange(0, 16)
            _update(last, last < length, *common)


_launch_step = Launcher(step_kernel)
_launch_update = Launcher(update_kernel)
# Chunks are cached apart: gradients move, but keep their lengths.
_keep_table = lru_cache(maxsize=TABLES_KEPT)(_make_table)
_keep_chunks = lru_cache(maxsize=TABLES_KEPT)(_make_chunks)
_operator = define(
    "adamw_(Tensor(a!)[] params, Tensor(b!)[] gradients, Tensor(c!)[] averages,"
    " Tensor(d!)[] squares, Tensor(e!)[] steps,"
    " Tensor? grad_scale, Tensor? found_inf, Tensor? lr_1, float lr, float beta1, float beta2,"
    " float weight_decay, float eps, bool maximize) -> ()",
    _run,
    lambda *inputs: None,
)
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
