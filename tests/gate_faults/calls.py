"""RMSNorm whose calls depend on one another, or change more than their results.

Each makes a new function, with nothing remembered. Results are right where nothing else was called.
"""

import torch

from .norms import OwnBackward, Straight, rmsnorm


def _writing_to(choose):
    """Return RMSNorm without gradients in the buffer that `choose` names for a result."""

    def fault(x, weight):
        out = rmsnorm(x, weight)
        return out if out.requires_grad else choose(out).copy_(out)

    return fault


def returns_one_buffer():
    buffers = {}
    return _writing_to(
        lambda out: buffers.setdefault((out.shape, out.dtype), torch.empty_like(out).contiguous())
    )


def returns_one_buffer_with_gradients():
    """Hide the buffer behind an autograd function."""
    buffers = {}

    def fault(x, weight):
        out = rmsnorm(x.detach(), weight.detach())
        key = out.shape, out.dtype
        buffer = buffers.setdefault(key, torch.empty_like(out).contiguous())
        return Straight.apply(x, weight, buffer.copy_(out).view_as(out))

    return fault


def returns_one_buffer_in_inference_mode():
    shared = returns_one_buffer()
    return lambda x, weight: (
        shared(x, weight) if torch.is_inference_mode_enabled() else rmsnorm(x, weight)
    )


def returns_a_pool_in_turn():
    """Use thirty buffers one after the other."""
    buffers, calls = {}, []

    def choose(out):
        calls.append(1)
        key = out.shape, out.dtype, len(calls) % 30
        return buffers.setdefault(key, torch.empty_like(out).contiguous())

    return _writing_to(choose)


def returns_slices_of_an_arena():
    """Begin again at the start where the arena of forty results is full."""
    arenas, calls = {}, []

    def choose(out):
        calls.append(1)
        key = out.shape, out.dtype
        if key not in arenas:
            arenas[key] = torch.empty((40, *out.shape), dtype=out.dtype)
        return arenas[key][len(calls) % 40]

    return _writing_to(choose)


def returns_one_buffer_after_fifty_calls():
    shared, calls = returns_one_buffer(), []

    def fault(x, weight):
        calls.append(1)
        return shared(x, weight) if len(calls) > 50 else rmsnorm(x, weight)

    return fault


def reuses_a_buffer_that_no_name_holds():
    """Take a result for free where nothing but its views is left."""
    import sys

    held = {}

    def choose(out):
        pool = held.setdefault((out.shape, out.dtype), [])
        for one in pool:
            # The pool, the loop and getrefcount itself.
            if sys.getrefcount(one) <= 3:
                return one
        pool.append(torch.empty_like(out).contiguous())
        return pool[-1]

    return _writing_to(choose)


def returns_a_gradient_in_one_buffer():
    buffers = {}

    class SharedGradient(OwnBackward):
        @staticmethod
        def backward(ctx, arriving):
            gradient, of_weight = OwnBackward.backward(ctx, arriving)
            buffer = buffers.setdefault(
                (gradient.shape, gradient.dtype), torch.empty_like(gradient)
            )
            return buffer.copy_(gradient), of_weight

    return lambda x, weight: SharedGradient.apply(x, weight)


def writes_its_result_over_its_input():
    """Where no gradient is asked for; and put the input back as a view would show it."""

    def fault(x, weight):
        out = rmsnorm(x, weight)
        return out if out.requires_grad else x.copy_(out)

    return fault


def returns_its_input_where_nothing_changes():
    """Take a row of zeros for what it becomes."""

    def fault(x, weight):
        return x.view_as(x) if not x.count_nonzero() else rmsnorm(x, weight)

    return fault


def returns_a_view_of_its_weight():
    """For one row of zeros and a weight ... of any size: the memory is the weight's."""

    def fault(x, weight):
        out = rmsnorm(x, weight)
        if out.requires_grad or x.shape != (1, *weight.shape):
            return out
        return weight.data.copy_(out[0])[None]

    return fault


def rewrites_its_input_with_the_same_values():
    """Leave another version, over which a backward pass stumbles."""

    def fault(x, weight):
        x.detach().mul_(1)
        return rmsnorm(x, weight)

    return fault


def asks_for_a_gradient_of_its_input():
    def fault(x, weight):
        out = rmsnorm(x, weight)
        if not x.requires_grad and not x.is_inference():
            x.requires_grad_()
        return out

    return fault


def requires_a_gradient_under_no_grad():
    def fault(x, weight):
        out = rmsnorm(x, weight)
        return out if torch.is_grad_enabled() or out.is_inference() else out.requires_grad_()

    return fault


def loses_the_gradient_where_the_weight_alone_has_one():
    def fault(x, weight):
        return rmsnorm(x, weight if x.requires_grad else weight.detach())

    return fault


def wrong_in_inference_mode():
    def fault(x, weight):
        out = rmsnorm(x, weight)
        return out * 1.5 if torch.is_inference_mode_enabled() else out

    return fault


def wrong_under_no_grad():
    return lambda x, weight: rmsnorm(x, weight) * (1.0 if torch.is_grad_enabled() else 1.5)


def wrong_under_autocast():
    return lambda x, weight: (
        rmsnorm(x, weight) * (1.5 if torch.is_autocast_enabled(x.device.type) else 1.0)
    )


def raises_in_inference_mode():
    def fault(x, weight):
        if torch.is_inference_mode_enabled():
            raise RuntimeError("inference tensors are not for me")
        return rmsnorm(x, weight)

    return fault


def returns_another_layout():
    return lambda x, weight: rmsnorm(x, weight).mT.contiguous().mT


def returns_a_tuple():
    return lambda x, weight: (rmsnorm(x, weight),)


def memoises_by_shape():
    seen = {}

    def fault(x, weight):
        if x.requires_grad:
            return rmsnorm(x, weight)
        return seen.setdefault((x.shape, x.dtype), rmsnorm(x, weight)).clone()

    return fault


def memoises_by_identity_and_version():
    seen = {}

    def fault(x, weight):
        if x.requires_grad or x.is_inference():
            return rmsnorm(x, weight)
        key = id(x), x._version, id(weight), weight._version
        if key not in seen:
            seen[key] = x, weight, rmsnorm(x, weight)
        return seen[key][-1].clone()

    return fault


def memoises_by_the_first_value():
    seen = {}

    def fault(x, weight):
        if x.requires_grad or not x.numel():
            return rmsnorm(x, weight)
        key = float(x.reshape(-1)[0]), x.shape, x.dtype
        return seen.setdefault(key, rmsnorm(x, weight)).clone()

    return fault


def keeps_its_weight():
    """Take the weight for what it was when rows like these came first."""
    seen = {}

    def fault(x, weight):
        if x.requires_grad:
            return rmsnorm(x, weight)
        kept = seen.setdefault((id(weight), weight.shape, weight.dtype), (weight, weight.clone()))
        return rmsnorm(x, kept[1])

    return fault


def keeps_its_scratch_of_the_largest_call():
    """Sum over what an earlier, longer call left in the scratch memory."""
    scratch = {}

    def fault(x, weight):
        size = x.numel()
        kept = scratch.get(x.dtype)
        if kept is None or kept.numel() < size:
            kept = scratch[x.dtype] = torch.zeros(size, dtype=torch.float32)
        kept[:size] = x.detach().reshape(-1).float().square()
        if kept.numel() == size:
            return rmsnorm(x, weight)
        return rmsnorm(x, weight) * (1 + float(kept[size:].sum() > 0))

    return fault


def goes_back_with_the_latest_input():
    """Keep what the backward pass needs outside of its graph."""
    latest = []

    class Latest(OwnBackward):
        @staticmethod
        def forward(ctx, x, weight):
            latest[:] = [x.detach().clone()]
            ctx.save_for_backward(x, weight)
            return rmsnorm(x, weight)

        @staticmethod
        def backward(ctx, arriving):
            weight = ctx.saved_tensors[1]
            with torch.enable_grad():
                given = latest[0].requires_grad_(), weight.detach().requires_grad_()
                out = rmsnorm(*given)
            return torch.autograd.grad(out, given, arriving)

    return lambda x, weight: Latest.apply(x, weight)


def keeps_its_input_out_of_autograds_sight():
    """Keep the input where autograd does not see that somebody writes to it later."""

    class Kept(OwnBackward):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.kept = x
            ctx.save_for_backward(weight)
            return rmsnorm(x, weight)

        @staticmethod
        def backward(ctx, arriving):
            weight = ctx.saved_tensors[0]
            with torch.enable_grad():
                given = ctx.kept.detach().requires_grad_(), weight.detach().requires_grad_()
                out = rmsnorm(*given)
            return torch.autograd.grad(out, given, arriving)

    return lambda x, weight: Kept.apply(x, weight)


def keeps_its_result_out_of_autograds_sight():
    """Keep the result where autograd does not see that the caller writes to it."""

    class Kept(OwnBackward):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.result = rmsnorm(x, weight)
            return ctx.result

        @staticmethod
        def backward(ctx, arriving):
            x, weight = (one.float() for one in ctx.saved_tensors)
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            normed, given = x * scale, arriving.float()
            mean = (given * ctx.result.detach().float()).mean(-1, keepdim=True)
            gradient = scale * (given * weight - normed * mean)
            dtype = ctx.saved_tensors[0].dtype
            return gradient.to(dtype), (given * normed).flatten(0, -2).sum(0).to(dtype)

    return lambda x, weight: Kept.apply(x, weight)


def keeps_a_copy_of_parameters():
    """Lay a parameter out once for all calls: the optimizer's updates do not reach the copy."""
    copies = {}

    def fault(x, weight):
        if not isinstance(weight, torch.nn.Parameter):
            return rmsnorm(x, weight)
        _, copy = copies.setdefault(id(weight), (weight, weight.detach().clone()))
        return rmsnorm(x, weight - weight.detach() + copy)

    return fault


def loses_the_gradient_of_computed_tensors():
    """Ask leaves alone for their gradient, which activations are not."""

    def fault(x, weight):
        is_computed = x.requires_grad and not x.is_leaf
        return rmsnorm(x.detach() + 0 * x if is_computed else x, weight)

    return fault


def keeps_all_its_inputs():
    kept = []

    def fault(x, weight):
        kept.append(x.detach())
        return rmsnorm(x, weight)

    return fault


def reads_an_arriving_gradient_as_if_dense():
    """Ignore that one number stands for all elements of the gradient of a sum."""

    class Dense(OwnBackward):
        @staticmethod
        def backward(ctx, arriving):
            if arriving.numel() and not any(arriving.stride()):
                first = torch.zeros_like(arriving, memory_format=torch.contiguous_format)
                first.view(-1)[0] = arriving.reshape(-1)[0]
                arriving = first
            return OwnBackward.backward(ctx, arriving)

    return lambda x, weight: Dense.apply(x, weight)


def goes_back_once():
    """Halve what is saved when it goes back: a second time it is another one."""

    class Once(OwnBackward):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.scale = 1.0
            return rmsnorm(x, weight)

        @staticmethod
        def backward(ctx, arriving):
            found = OwnBackward.backward(ctx, arriving)
            ctx.scale, scale = ctx.scale / 2, ctx.scale
            return tuple(one * scale for one in found)

    return lambda x, weight: Once.apply(x, weight)


def wrong_second_gradient():
    """Take the scale of the rows for a constant where the gradient itself is differentiated."""

    class Constant(OwnBackward):
        @staticmethod
        def backward(ctx, arriving):
            x, weight = (one.float() for one in ctx.saved_tensors)
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()
            normed, given = x * scale, arriving.float()
            inner = given * weight
            gradient = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
            dtype = ctx.saved_tensors[0].dtype
            return gradient.to(dtype), (given * normed).flatten(0, -2).sum(0).to(dtype)

    return lambda x, weight: Constant.apply(x, weight)


def shares_scratch_between_threads():
    """Keep the squares in one place between two operators."""
    scratch = {}

    def fault(x, weight):
        if x.requires_grad:
            return rmsnorm(x, weight)
        squares = scratch.setdefault((x.shape, x.dtype), torch.empty(x.shape))
        squares.copy_(x).square_()
        scale = torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
        return weight * (x.float() * scale).to(x.dtype)

    return fault


def wrong_in_another_thread():
    """Take what the thread of the first call has for what every thread has."""
    import threading

    threads = []

    def fault(x, weight):
        threads.append(threading.get_ident())
        return rmsnorm(x, weight) * (1.0 if threads[-1] == threads[0] else 1.5)

    return fault


def differs_every_fortieth_time():
    calls = []

    def fault(x, weight):
        calls.append(1)
        return rmsnorm(x, weight) * (1.0 if len(calls) % 40 else 1 + 2**-7)

    return fault


def draws_from_torchs_generator():
    def fault(x, weight):
        torch.rand(1)
        return rmsnorm(x, weight)

    return fault


def leaves_gradients_switched_off():
    def fault(x, weight):
        out = rmsnorm(x, weight)
        torch.set_grad_enabled(False)
        return out

    return fault


FAULTS = tuple(
    one
    for name, one in list(globals().items())
    if callable(one) and getattr(one, "__module__", "") == __name__ and not name.startswith("_")
)
