"""A tiny machine: a host program runs against streams, and leaves the trace of what happened."""

from dataclasses import dataclass, field, replace

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.whatif.changes import SHORTEST_KERNEL_NS
from tests.traces import trace_of

LATENCY_NS, BETWEEN_NS, WAIT_NS, CALL_NS = 7_000, 1_400, 5_000, 3_000
MAIN, BACKWARD = 1, 2
QUEUE = 1_016


@dataclass(frozen=True)
class Do:
    """One thing the host does, after `host_ns` of its own time."""

    what: str
    name: str = ""
    ns: int = 0
    host_ns: int = 2_000
    stream: int = 7
    after: int | None = None
    """Another stream whose last kernel this one waits for, as through an event."""
    thread: int = MAIN


def kernel(name, ns, **more):
    return Do("launch", name, ns, **more)


def item(**more):
    """Fetch a value: a copy that blocks."""
    return Do("fetch", "Memcpy DtoH (Device -> Pageable)", 2_000, **more)


def upload(ns, **more):
    """Copy from memory that is not pinned: the call returns just before the copy has ended."""
    return Do("stage", "Memcpy HtoD (Pageable -> Device)", ns, **more)


def synchronize(what="Device", **more):
    """Wait for the device, or with Stream or Event for what was launched into `stream`."""
    return Do("synchronize", f"cuda{what}Synchronize", **more)


END_OF_STEP = Do("end_step", host_ns=0)


@dataclass
class Machine:
    clock: int = 0
    kernels: list = field(default_factory=list)
    ranges: list = field(default_factory=list)
    ended: dict = field(default_factory=dict)
    steps: list = field(default_factory=lambda: [0])

    def run(self, program):
        for number, do in enumerate((*program, END_OF_STEP), start=1):
            self.clock += do.host_ns
            getattr(self, do.what)(do, number)
        return trace_of(*self.kernels, ranges=self.ranges)

    def end_step(self, do, number):
        begin, name = self.steps[-1], str(len(self.steps) - 1)
        step = {"kind": "step", "name": name, "thread": MAIN, "start_ns": begin}
        self.ranges.append({**step, "duration_ns": self.clock - begin})
        self.steps.append(self.clock)

    def launch(self, do, number):
        """Launch a kernel, once there is room for it in the queue."""
        at = len(self.kernels)
        full = self.kernels[at - QUEUE] if at >= QUEUE else None
        room = full["start_ns"] + full["duration_ns"] if full else 0
        held = room > self.clock
        self._start(do, number, "kernel")
        end = max(room + WAIT_NS if held else 0, self.clock + CALL_NS)
        self._call("cudaLaunchKernel", do, number, end)

    def fetch(self, do, number):
        end = self._start(do, number, "memcpy")
        self._call("cudaMemcpyAsync", do, number, max(end, self.clock) + WAIT_NS)

    def stage(self, do, number):
        end = self._start(do, number, "memcpy")
        self._call("cudaMemcpyAsync", do, number, end - 1_000)

    def synchronize(self, do, number):
        is_all = do.name == "cudaDeviceSynchronize"
        last = max(self.ended.values(), default=0) if is_all else self.ended.get(do.stream, 0)
        self._call(do.name, do, None, max(self.clock, last) + WAIT_NS)

    def allocate(self, do, number):
        self._call("cudaMalloc", do, None, self.clock + do.ns)

    def load(self, do, number):
        data = {"kind": "phase", "name": "data", "start_ns": self.clock, "duration_ns": do.ns}
        self.ranges.append({**data, "thread": do.thread})
        if do.name:
            self.ranges.append({**data, "kind": "op", "name": do.name, "thread": do.thread})
        self.clock += do.ns

    def sleep(self, do, number):
        sleep = {"kind": "python", "name": "<built-in function sleep>", "start_ns": self.clock}
        self.ranges.append({**sleep, "duration_ns": do.ns, "thread": do.thread})
        self.clock += do.ns

    def think(self, do, number):
        pass

    def _start(self, do, number, activity):
        before = self.ended.get(do.stream, -BETWEEN_NS) + BETWEEN_NS
        start = max(self.clock + LATENCY_NS, before)
        if do.after is not None:
            start = max(start, self.ended.get(do.after, 0) + BETWEEN_NS)
        self.ended[do.stream] = start + do.ns
        row = {"name": do.name, "activity": activity, "stream": do.stream, "start_ns": start}
        self.kernels.append({**row, "duration_ns": do.ns, "correlation": number})
        return start + do.ns

    def _call(self, name, do, number, end):
        if do.thread == BACKWARD:
            node = {"name": "autograd::engine::evaluate_function: B", "thread": BACKWARD}
            self.ranges.append({**node, "start_ns": self.clock, "duration_ns": end - self.clock})
        row = {"kind": "runtime", "name": name, "thread": do.thread, "correlation": number}
        self.ranges.append({**row, "start_ns": self.clock, "duration_ns": end - self.clock})
        self.clock = end


def record(program):
    """Return the attributed trace of a program."""
    return add_attribution(Machine().run(program))


def step_ns(program):
    """Return how long the program's one step takes: till the last of host and devices is done."""
    machine = Machine()
    machine.run(program)
    return max(machine.clock, *machine.ended.values())


def faster(program, name, factor):
    return [
        replace(do, ns=max(round(do.ns / factor), min(do.ns, SHORTEST_KERNEL_NS)))
        if do.name == name
        else do
        for do in program
    ]
