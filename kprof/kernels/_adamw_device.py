"""What runs on the GPU for AdamW: counting steps, and updating a chunk of a tensor.

T is tensors, C chunks, N the elements of a tensor. Arithmetic is that of torch's fused optimizer:
for parameters in float32 it is in float64 where a number of Python meets one of the tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
        # Within this branch it takes 63 registers, without it 72: four programs on an SM, or three.
        if first < even:
            _update(elements, elements < even, *common)
        if (length > even) & (first + CHUNK >= length):
            last = even + tl.arange(0, 16)
            _update(last, last < length, *common)
