"""A small deterministic host and GPU, which writes what happens as Kineto would.

The host runs one thread after another; it launches, waits, copies and allocates, and every call
costs what it costs on a real one, give or take a jitter. Streams run in order, and what is
launched starts when its launch has come through, its stream is free and its events are there.
"""

import json
import random
from contextlib import contextmanager

US = 1_000
# As measured on an H200 under CUPTI, see kprof/analyze/idle/gaps.py.
CALL_NS, LATENCY_NS, BETWEEN_NS = 4_400, 6_900, 1_100
LONGEST_QUEUE = 1_000


class Machine:
    """A host with one GPU, whose clock is in ns; `own_ns` is what the GPU needs between kernels."""

    def __init__(self, seed, *, stacks=False):
        self.random = random.Random(seed)
        self.now = 1_000_000_000
        self.thread = 100
        self.stacks = stacks
        self.free = {}
        self.ends = []
        self.events = []
        self.number = 0
        self.own_ns = 0

    def jittered(self, ns):
        return round(ns * self.random.uniform(0.85, 1.25))

    def run(self, ns):
        """Let the host compute, or wait for anything but the GPU."""
        self.now += self.jittered(ns)

    @contextmanager
    def span(self, category, name, **args):
        start = self.now
        yield
        self._add(category, name, start, self.now, self.thread, args)

    def op(self, name):
        self.number += 1
        return self.span("cpu_op", name, **{"External id": self.number})

    def step(self, number):
        return self.span("user_annotation", f"kprof.step#{number}")

    def phase(self, name):
        return self.span("user_annotation", f"kprof.phase#{name}")

    def module(self, name):
        return self.span("user_annotation", f"kprof.module#{name}")

    @contextmanager
    def python(self, name):
        """Run a Python function, which shows only where stacks are recorded."""
        start = self.now
        yield
        if self.stacks:
            self._add("python_function", name, start, self.now, self.thread, {"Python id": 1})

    @contextmanager
    def on_thread(self, thread):
        """Go on on another thread, as autograd's engine does, while this one waits."""
        self.thread, before = thread, self.thread
        yield
        self.thread = before

    def kernel(self, name, ns, *, stream=7):
        """Launch a kernel from inside an operator; return when it will have ended."""
        with self.op(name):
            self.run(2 * US)
            end = self.launch(f"{name}_kernel", ns, stream=stream)
            self.run(1 * US)
        self.run(1 * US)
        return end

    def launch(self, name, ns, *, stream=7, call="cudaLaunchKernel", call_ns=CALL_NS, count=1):
        if len(self.ends) >= LONGEST_QUEUE:
            self.now = max(self.now, self.ends[-LONGEST_QUEUE])
        self.number += 1
        ready = self.now + self.jittered(LATENCY_NS) + call_ns - CALL_NS
        with self.span("cuda_runtime", call, correlation=self.number):
            self.run(call_ns)
        for _ in range(count):
            start = self._begin(stream, ready)
            end = self._on_device("kernel", name, stream, start, start + self.jittered(ns))
        return end

    def graph(self, count, ns):
        self.launch("graph_kernel", ns, call="cudaGraphLaunch", call_ns=12 * US, count=count)

    def copy(self, name, ns, *, waits):
        """Copy; one that waits returns when the bytes have arrived, as a pageable one does."""
        start = self.now
        self.number += 1
        ready = start + self.jittered(LATENCY_NS)
        begin = self._begin(7, ready)
        end = self._on_device("gpu_memcpy", name, 7, begin, begin + self.jittered(ns))
        self.now = end + self.jittered(3 * US) if waits else start + self.jittered(CALL_NS)
        self._add(
            "cuda_runtime",
            "cudaMemcpyAsync",
            start,
            self.now,
            self.thread,
            {"correlation": self.number},
        )

    def wait_for_gpu(self, call="cudaStreamSynchronize", *, longer_ns=0):
        """Block the host until all streams are done, and for what others still need."""
        start = self.now
        self.now = max(self.now, *self.free.values()) + self.jittered(5 * US + longer_ns)
        self._add("cuda_runtime", call, start, self.now, self.thread, {"correlation": 0})

    def item(self):
        with self.op("aten::item"), self.op("aten::_local_scalar_dense"):
            self.run(2 * US)
            self.copy("Memcpy DtoH (Device -> Pinned)", 1 * US, waits=False)
            self.wait_for_gpu()

    def upload(self, ns, *, pinned):
        """Bring a batch to the GPU: from pageable memory the host must wait for it."""
        with self.op("aten::to"), self.op("aten::copy_"):
            self.run(3 * US)
            if pinned:
                self.copy("Memcpy HtoD (Pinned -> Device)", ns, waits=False)
            else:
                self.copy("Memcpy HtoD (Pageable -> Device)", ns, waits=True)
                self.wait_for_gpu()
            self.run(1 * US)

    def call(self, name, ns):
        """Make a call of the runtime that holds the host for a while."""
        with self.span("cuda_runtime", name, correlation=0):
            self.run(ns)

    def hold(self, stream, until):
        """Let a stream wait for an event of elsewhere, that comes at a moment."""
        with self.span("cuda_runtime", "cudaStreamWaitEvent", correlation=0):
            self.run(1 * US)
        self.free[stream] = max(self.free.get(stream, 0), until)

    def overhead(self, name, ns):
        """Let the profiler work in the middle of what the host does."""
        start = self.now
        self.run(ns)
        self._add("overhead", name, start, self.now, 0)

    def write(self, path):
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path

    def _begin(self, stream, ready):
        """Return when a stream can begin with what is ready at a moment."""
        free, own_ns = self.free.get(stream, 0), self.jittered(BETWEEN_NS)
        if not free or ready >= free + own_ns:
            return ready
        self.own_ns += min(own_ns, max(free + own_ns - max(self.ends, default=0), 0))
        return free + own_ns

    def _on_device(self, category, name, stream, start, end):
        args = {"device": 0, "stream": stream, "correlation": self.number}
        self._add(category, name, start, end, stream, args)
        self.free[stream] = end
        self.ends.append(end)
        return end

    def _add(self, category, name, start, end, thread, args=None):
        times = {"ts": start / US, "dur": (end - start) / US}
        pid = {"kernel": 0, "gpu_memcpy": 0, "overhead": -1}.get(category, 10)
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread}
        self.events.append({**event, **times, "args": args or {}})
