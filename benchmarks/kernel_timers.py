"""Providers of a kernel, each in a process of its own, which compiles, then measures when told."""

import dataclasses
import gc
import time
from contextlib import suppress

import torch
from kernel_reaches import wanted_of
from workers import Worker, questions, say

from kprof.kernels import OURS, kernel_named
from kprof.kernels.bench.measure import Timed, bench, run_once
from kprof.timing import time_on_gpu

# These fill the GPU's memory, and so do not compile beside others.
LARGE = ("linear_cross_entropy", "adamw")
# How often a process that ended is started anew.
MOST_STARTS = 4
# Should time run out, then for those that are known to be slow.
LAST = ("inductor", "eager")
# What others are held against is no peer that can be left out.
STANDARD = {"linear_cross_entropy": "eager"}


class Timer(Worker):
    """One provider of a kernel in a process of its own."""

    def __init__(self, kernel, provider, wanted):
        self.kernel, self.provider = kernel, provider
        self.is_in_graph = True
        self._num_ended = 0
        wanted = [] if kernel in LARGE else wanted
        super().__init__({"name": kernel, "provider": provider, "wanted": wanted})

    def measure(self, direction, shape, copy_ns, ends_s):
        """Return what it measured; a process that can go on no more is started anew."""
        asked = {"direction": direction, "shape": shape, "copy_ns": copy_ns}
        told = self.ask({**asked, "is_in_graph": self.is_in_graph}, ends_s)
        if told is None:
            problem = "out of time" if time.monotonic() >= ends_s else "the process ended early"
            self._num_ended += 1
            if self.work["wanted"]:
                # One shape that ends it takes no other along: each is compiled when its turn comes.
                self.work["wanted"] = []
                self._renew(ends_s)
                return self.measure(direction, shape, copy_ns, ends_s)
            self._renew(ends_s)
            return Timed(self.kernel, self.provider, shape, "bfloat16", direction, problem=problem)
        one = Timed(**{**told, "shape": tuple(told["shape"])})
        if "captur" in one.problem and self.is_in_graph:
            # Nothing more can be drawn at random in that process.
            self.is_in_graph = False
            self._renew(ends_s)
            return self.measure(direction, shape, copy_ns, ends_s)
        if "CUDA error" in one.problem:
            self._renew(ends_s)
        return one

    def _renew(self, ends_s):
        self.stop()
        if time.monotonic() < ends_s and self._num_ended <= MOST_STARTS:
            self.start(ends_s)


def timers_of(kernel):
    """Return a timer for each provider, ours first."""

    def place(provider):
        if provider.name == STANDARD.get(kernel.name):
            return 0.5
        if provider.name in LAST:
            return 2 + LAST.index(provider.name)
        return float(not provider.name.startswith(OURS))

    wanted = wanted_of(kernel)
    order = sorted(kernel.providers, key=place)
    return {one.name: Timer(kernel.name, one.name, wanted) for one in order}


def work_off(name, provider, wanted):
    """Compile what is wanted of one provider, then measure what is asked for, a line each."""
    kernel = kernel_named(name)
    who = kernel.provider(provider)
    for direction, shape in wanted:
        # What it cannot do is told when it is measured.
        with suppress(Exception):
            run_once(kernel, who, tuple(shape), "bfloat16", direction)
    # What is there by now stays, and need not be searched for garbage after every measurement.
    gc.collect()
    gc.freeze()
    say({"ready": True})
    for asked in questions():
        if "product" in asked:
            say({"product": rate_of_product()})
            continue
        shape, direction = tuple(asked.pop("shape")), asked.pop("direction")
        (one,) = bench(kernel, shape, "bfloat16", direction, [who], **asked)
        say(dataclasses.asdict(one))


def rate_of_product(size=8_192):
    """Return what a square product of random bf16 matrices reaches in this run, in FLOP/s."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    took = time_on_gpu(lambda: torch.mm(a, b, out=out), sample_ns=2e7)
    return 2 * size**3 / took.median_ns * 1e9
