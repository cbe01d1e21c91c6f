"""Ways to look faster than one is: RMSNorm that is right when looked at, or not at work."""

import threading
import time

import torch

from .norms import rmsnorm


def cached_by_address():
    """Return what was computed for these addresses before."""
    seen = {}

    def cheat(x, weight):
        key = (x.data_ptr(), weight.data_ptr(), x.shape)
        if x.requires_grad or key not in seen:
            seen[key] = rmsnorm(x, weight)
        return seen[key].clone()

    return cheat


def cached_by_fingerprint():
    """Return what was computed for inputs that have the same sum."""
    seen = {}

    def cheat(x, weight):
        key = (round(float(x.detach().double().sum()), 6), tuple(x.shape), x.dtype)
        if x.requires_grad or key not in seen:
            seen[key] = rmsnorm(x, weight)
        return seen[key].clone()

    return cheat


def replays_one_output():
    """Hand out the same memory for the same inputs, without computing again."""
    last = []

    def cheat(x, weight):
        if x.requires_grad:
            return rmsnorm(x, weight)
        for known_x, known_weight, known in last:
            if torch.equal(known_x, x) and torch.equal(known_weight, weight):
                return known
        last[:] = [(x.clone(), weight.clone(), rmsnorm(x, weight))]
        return last[0][2]

    return cheat


def patched_clock():
    """Let the clock stand still while at work."""

    def cheat(x, weight):
        now, genuine = time.perf_counter(), time.perf_counter
        time.perf_counter = lambda: now if time.sleep else genuine()
        return rmsnorm(x, weight)

    return cheat


def patched_event():
    """Let events report a tenth of the time."""

    def cheat(x, weight):
        torch.cuda.Event.elapsed_time = lambda self, other: 0.001
        return rmsnorm(x, weight)

    return cheat


class Lazy(torch.Tensor):
    """A tensor that computes when it is looked at."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [a.work() if isinstance(a, Lazy) else a for a in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def lazy_output():
    """Return a promise."""

    def cheat(x, weight):
        promise = torch.empty_like(x).as_subclass(Lazy)
        promise.work = lambda: rmsnorm(x, weight)
        return promise

    return cheat


def another_thread():
    """Return at once and work on."""

    def cheat(x, weight):
        if x.requires_grad:
            return rmsnorm(x, weight)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)

        def work():
            time.sleep(0.002)
            out.copy_(rmsnorm(x, weight))

        threading.Thread(target=work, daemon=True).start()
        return out

    return cheat


def tires():
    """Stop working after the fiftieth call."""
    calls = []

    def cheat(x, weight):
        calls.append(1)
        return rmsnorm(x, weight) if len(calls) < 50 or x.requires_grad else torch.empty_like(x)

    return cheat


def knows_the_benchmark():
    """Do nothing when the caller has just looked at the clock."""
    import sys

    def cheat(x, weight):
        if any(name.startswith("start") for name in sys._getframe(1).f_locals):
            return torch.zeros_like(x)
        return rmsnorm(x, weight)

    return cheat


def trusts_the_first_value():
    """Take inputs that begin with a zero for zeros."""

    def cheat(x, weight):
        if x.numel() and x.reshape(-1)[0] == 0:
            return x * weight * 0
        return rmsnorm(x, weight)

    return cheat


CHEATS = (
    cached_by_address,
    cached_by_fingerprint,
    replays_one_output,
    patched_clock,
    patched_event,
    lazy_output,
    another_thread,
    tires,
    knows_the_benchmark,
    trusts_the_first_value,
)
