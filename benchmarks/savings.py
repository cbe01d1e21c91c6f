"""Score the savings of findings and of what-if on changes whose truth is known.

    python benchmarks/savings.py

simulates programs before and after a change, opens the recording of the former, and compares the
interval of the saving with the truth: `benchmarks/results/savings_cpu_<yyyy-mm>.json`.
"""

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, row, write_evidence

from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import FASTER, GRAPHED, REMOVED, WITHOUT, Change, Target
from kprof.analyze.whatif.predict import predict
from kprof.opened import open_trace

MEASURED = ("kprof/analyze/**/*.py", "benchmarks/savings.py")
# What to reach.
CONTAINED, WIDTH_OF_STEP, WIDTH_OF_SAVING, UNKNOWN_OR_WIDER = 0.9, 0.02, 0.5, 0.3
# Times of Kineto are rounded to a ns, and the simulator's pauses are not the replay's.
SLACK = 0.002
US, MS = 1_000, 1_000_000
# A steady program does each recorded step so often.
STEPS, ROUNDS = 5, 8
# The steps that the truth is of: the recorded ones repeated, or others.
RECORDED, OTHERS = "recorded", "others"
TRUTHS = (RECORDED, OTHERS)
# As measured on an H200 under CUPTI, see kprof/analyze/idle/gaps.py.
CALL_NS, LATENCY_NS, BETWEEN_NS, RETURN_NS = 4_400, 6_900, 1_100, 5 * US
IN_GRAPH_NS, GRAPH_CALL_NS, GRAPH_LATENCY_NS = 220, 12 * US, 17 * US
QUEUE = 1_000
GPU = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "totalGlobalMem": 80 << 30}
MAIN, BACKWARD, COMPUTE, SIDE = 100, 101, 7, 20


class Machine:
    """A host of two threads and a GPU of several streams, which records what happens as Kineto.

    Work of the host takes its time give or take a tenth, by a number that its place in the program
    alone decides: both sides of a change draw the same.
    """

    def __init__(self, seed):
        self.seed, self.step, self.place = seed, 0, 0
        self.now, self.thread, self.number = 1_000 * MS, MAIN, 0
        self.free, self.starts, self.events = {}, [], []
        self.first_ns = None

    def spend(self, name, ns):
        """Let the host work on something that has a name, so that both sides draw the same."""
        chance = random.Random(f"{self.seed} {self.step} {name}")
        self.now += round(ns * chance.uniform(0.9, 1.1))

    def op(self, name, ns, *, stream=COMPUTE, host_ns=4 * US, after=(), kernel=None, **inputs):
        """Launch a kernel from an operator; `after`: streams that it waits for through events."""
        self.place += 1
        begin = self.now
        self.number += 1
        external = self.number
        self.spend(f"{name} {self.place}", host_ns)
        self._launch(kernel or f"{name}_kernel", ns, stream, after, external)
        self.spend(f"{name} {self.place} end", US)
        args = {"External id": external, **inputs}
        self._add("cpu_op", name, begin, self.now, self.thread, args)

    def graph(self, nodes):
        """Launch nodes, each a stream, a time and the streams that it waits for, as one graph."""
        self.number += 1
        begin = self.now
        self.now += GRAPH_CALL_NS
        self._add("cuda_runtime", "cudaGraphLaunch", begin, self.now, self.thread, self._ids())
        ready = begin + GRAPH_LATENCY_NS
        for stream, ns, after in nodes:
            ends = [self.free.get(one, 0) + IN_GRAPH_NS for one in (stream, *after)]
            self._run("kernel", "node_kernel", stream, max(ready, *ends), ns)

    def fetch(self, *, waits=True):
        """Copy a value to the host, and wait for it."""
        self.number += 1
        begin = self.now
        self.now += CALL_NS
        self._add("cuda_runtime", "cudaMemcpyAsync", begin, self.now, self.thread, self._ids())
        start = max(begin + LATENCY_NS, self.free.get(COMPUTE, 0) + BETWEEN_NS)
        self._run("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", COMPUTE, start, US)
        if waits:
            self.synchronize("cudaStreamSynchronize")

    def synchronize(self, call="cudaDeviceSynchronize"):
        """Wait for all streams."""
        begin = self.now
        self.now = max(self.now, *self.free.values(), 0) + RETURN_NS
        self._add("cuda_runtime", call, begin, self.now, self.thread, {"correlation": 0})

    def upload(self, num_bytes, *, bytes_per_s, pinned):
        """Copy a batch to the GPU; from pageable memory the host stages it and waits."""
        self.number += 1
        begin, took = self.now, round(num_bytes / bytes_per_s * 1e9)
        kind = "Pinned" if pinned else "Pageable"
        start = max(begin + LATENCY_NS, self.free.get(COMPUTE, 0) + BETWEEN_NS)
        end = self._run(
            "gpu_memcpy", f"Memcpy HtoD ({kind} -> Device)", COMPUTE, start, took, bytes=num_bytes
        )
        self.now = begin + CALL_NS if pinned else end - US
        self._add("cuda_runtime", "cudaMemcpyAsync", begin, self.now, self.thread, self._ids())

    def load(self, ns):
        """Wait for the next batch."""
        begin = self.now
        self.spend("load", ns)
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        self._add("user_annotation", name, begin, self.now, self.thread, {})

    def call(self, name, ns):
        """Make a call of the runtime that holds the host."""
        begin = self.now
        self.spend(name, ns)
        self._add("cuda_runtime", name, begin, self.now, self.thread, {"correlation": 0})

    def record(self, program, steps=STEPS):
        """Run the steps, and one before that no one records."""
        program(self)
        del self.events[:]
        # The recording begins with an idle device, as after a drain.
        self.now = max(self.now, *self.free.values(), 0)
        self.first_ns = self.now
        for self.step in range(steps):
            self.place = 0
            begin = self.now
            program(self)
            name = f"ProfilerStep#{self.step}"
            self._add("user_annotation", name, begin, self.now, MAIN, {})
        return self

    def steady_step_ns(self, program, *, others=False):
        """Return a step's time when the program has run for long: no recorder has drained it.

        Its steps are the recorded ones but for the first, over and over; or `others`, whose host's
        times are drawn anew.
        """
        ends, num = [], STEPS - 1
        for at in range(num * ROUNDS):
            self.step, self.place = (STEPS + at if others else 1 + at % num), 0
            program(self)
            ends.append(max(self.now, *self.free.values(), 0))
        half = num * (ROUNDS // 2)
        return (ends[-1] - ends[-1 - half]) / half

    def write(self, path):
        """Write the recording."""
        document = {"schemaVersion": 1, "deviceProperties": [GPU], "traceEvents": self.events}
        path.write_text(json.dumps(document))
        return path

    def _launch(self, name, ns, stream, after, external):
        begin = self.now
        # A full queue holds the call until one of those before has begun.
        room = sorted(self.starts)[-QUEUE] if len(self.starts) >= QUEUE else 0
        self.now = max(begin + CALL_NS, room + RETURN_NS if room > begin else 0)
        ids = {**self._ids(), "External id": external}
        self._add("cuda_runtime", "cudaLaunchKernel", begin, self.now, self.thread, ids)
        ends = [self.free.get(one, 0) + BETWEEN_NS for one in (stream, *after)]
        ready = max(begin, room) + LATENCY_NS
        self._run("kernel", name, stream, max(ready, *ends), ns)

    def _ids(self):
        return {"correlation": self.number}

    def _run(self, category, name, stream, start, ns, **more):
        args = {"device": 0, "stream": stream, **self._ids(), **more}
        self._add(category, name, start, start + ns, stream, args)
        self.free[stream] = start + ns
        self.starts.append(start)
        return start + ns

    def _add(self, category, name, start, end, thread, args):
        times = {"ts": start / US, "dur": (end - start) / US}
        pid = 0 if category in ("kernel", "gpu_memcpy") else 10
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread}
        self.events.append({**event, **times, "args": args})


@dataclass(frozen=True)
class Case:
    """A change: programs of a step before and after it, and who is asked what it saves."""

    name: str
    before: Callable
    after: Callable
    rule: str = ""
    """The rule whose finding is asked; empty: what-if is, the question."""
    question: tuple[Change, ...] = ()
    is_recorded: bool = True
    """Whether the recording holds the answer."""


def layers(machine, number=40, ns=60 * US, **more):
    """Run so many kernels one after another."""
    for _ in range(number):
        machine.op("aten::mm", ns, **more)


def step_of(*parts):
    """Return the program of a step that does these parts in order."""

    def program(machine):
        for part in parts:
            part(machine)

    return program


def backward(machine, number=20, ns=60 * US, **more):
    """Launch from autograd's thread, while the main one waits in it."""
    machine.thread = BACKWARD
    begin = machine.now
    layers(machine, number, ns, **more)
    name = "autograd::engine::evaluate_function: MmBackward0"
    machine._add("cpu_op", name, begin, machine.now, BACKWARD, {"External id": machine.number})
    machine.thread = MAIN


def of(part, **more):
    """Return a part with its options."""
    return lambda machine: part(machine, **more)


def both_streams(machine, number=20, ns=30 * US, host_ns=4 * US):
    """Work on two streams in turns, where each waits for the other through events."""
    for _ in range(number):
        machine.op("aten::mm", ns, host_ns=host_ns, after=(SIDE,))
        machine.op("aten::add", ns, stream=SIDE, host_ns=host_ns, after=(COMPUTE,))


def reduced(machine, *, exposed, number=8):
    """Reduce gradients on a side stream; the computation waits for each, or for none."""
    for _ in range(number):
        machine.op("aten::mm", 200 * US)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        machine.op("c10d::allreduce_", 150 * US, stream=SIDE, after=(COMPUTE,), kernel=name)
        machine.op("aten::mm", 200 * US, after=(SIDE,) if exposed else ())


def products(machine, ns, number=6):
    """Multiply matrices of 4,096 a side in float32."""
    inputs = {"Input Dims": [[4096, 4096]] * 2, "Input type": ["float"] * 2}
    for _ in range(number):
        machine.op("aten::mm", ns, kernel="ampere_sgemm_128x128_nn", **inputs)


def graphed(number, ns, stream_of=lambda at: (COMPUTE, ())):
    """Launch as one graph what was launched kernel by kernel."""

    def part(machine):
        machine.graph([(stream_of(at)[0], ns, stream_of(at)[1]) for at in range(number)])

    return part


def in_turns(at):
    """Return the stream of a node, and the one that it waits for."""
    return (COMPUTE, (SIDE,)) if at % 2 == 0 else (SIDE, (COMPUTE,))


def kernel(name):
    """Return all kernels of a name."""
    return Target("kernel", name)


TWICE = (Change(FASTER, kernel("aten::mm_kernel"), 2.0),)
SHORT = of(layers, number=120, ns=3 * US, host_ns=9 * US)
# 137 GFLOP at 15 TFLOP/s of the A100's 19.5 in float32, and at 100 of 156 in TF32.
FP32_NS, TF32_NS = 9_160 * US, 1_370 * US


def pause(ns):
    """Let the host do something that launches nothing and is not recorded."""
    return lambda machine: machine.spend("pause", ns)


def loading(ns):
    """Return the part that loads a batch."""
    return lambda machine: machine.load(ns)


def uploading(*, bytes_per_s, pinned):
    """Return the part that brings 40 MB to the GPU."""
    return lambda m: m.upload(40_000_000, bytes_per_s=bytes_per_s, pinned=pinned)


def only_first(part):
    """Do a part in the first recorded step alone."""
    return lambda m: part(m) if m.step == 0 and m.first_ns is not None else None


FETCH, SYNCHRONIZE = Machine.fetch, Machine.synchronize
LATER = of(layers, number=30, ns=4 * US, host_ns=9 * US)


def mallocs(machine):
    """Ask the driver for memory."""
    for _ in range(3):
        machine.call("cudaMalloc", 300 * US)
        machine.op("aten::mm", 20 * US)


def allocated(machine):
    """Take memory from the cache."""
    for _ in range(3):
        machine.op("aten::mm", 20 * US)


CASES = (
    Case(
        "slow loader", step_of(loading(5 * MS), layers), step_of(loading(0), layers), "data_loading"
    ),
    Case(
        "loader that is nearly in time",
        step_of(loading(4 * MS), layers, backward),
        step_of(loading(0), layers, backward),
        "data_loading",
    ),
    Case(
        "needless item",
        step_of(layers, FETCH, SHORT),
        step_of(layers, of(FETCH, waits=False), SHORT),
        "sync_in_loop",
        is_recorded=False,
    ),
    Case(
        "item that the host needs",
        step_of(layers, FETCH, pause(200 * US), SHORT),
        step_of(layers, FETCH, pause(200 * US), SHORT),
        "sync_in_loop",
        is_recorded=False,
    ),
    Case(
        "needless synchronize",
        step_of(layers, SYNCHRONIZE, SHORT),
        step_of(layers, SHORT),
        "sync_in_loop",
    ),
    Case(
        "allocations in every step",
        step_of(mallocs, LATER),
        step_of(allocated, LATER),
        "memory_fragmentation",
    ),
    Case(
        "pageable batch",
        step_of(uploading(bytes_per_s=6e9, pinned=False), layers),
        step_of(uploading(bytes_per_s=25e9, pinned=True), layers),
        "pageable_copies",
    ),
    Case(
        "pageable batch, slow link",
        step_of(uploading(bytes_per_s=4e9, pinned=False), layers),
        step_of(uploading(bytes_per_s=13e9, pinned=True), layers),
        "pageable_copies",
    ),
    Case("short kernels", SHORT, graphed(120, 3 * US), "launch_bound_host"),
    Case(
        "short kernels on two streams",
        of(both_streams, number=60, ns=3 * US, host_ns=9 * US),
        graphed(120, 3 * US, in_turns),
        "launch_bound_host",
        is_recorded=False,
    ),
    Case(
        "pause in every step",
        step_of(layers, pause(9 * MS), layers),
        step_of(layers, layers),
        "host_stalls",
        is_recorded=False,
    ),
    Case(
        "pause once",
        step_of(only_first(pause(400 * MS)), layers),
        step_of(only_first(pause(400 * MS)), layers),
        "host_stalls",
    ),
    Case(
        "products in float32", of(products, ns=FP32_NS), of(products, ns=TF32_NS), "fp32_products"
    ),
    Case(
        "exposed collectives",
        of(reduced, exposed=True),
        of(reduced, exposed=False),
        "exposed_collectives",
        is_recorded=False,
    ),
    Case("faster kernels, busy device", layers, of(layers, ns=30 * US), question=TWICE),
    Case(
        "faster kernels, slow host",
        SHORT,
        of(layers, number=120, ns=1_500, host_ns=9 * US),
        question=TWICE,
    ),
    Case(
        "faster kernels between items",
        step_of(layers, FETCH, layers, FETCH),
        step_of(of(layers, ns=30 * US), FETCH, of(layers, ns=30 * US), FETCH),
        question=TWICE,
    ),
    Case(
        "faster kernels behind a loader",
        step_of(loading(3 * MS), layers),
        step_of(loading(3 * MS), of(layers, ns=30 * US)),
        question=TWICE,
    ),
    Case(
        "faster kernels, long queue",
        of(layers, number=1_200, ns=12 * US, host_ns=2 * US),
        of(layers, number=1_200, ns=6 * US, host_ns=2 * US),
        question=TWICE,
    ),
    Case(
        "faster kernels of autograd",
        step_of(layers, backward),
        step_of(of(layers, ns=30 * US), of(backward, ns=30 * US)),
        question=TWICE,
    ),
    Case(
        "data ready",
        step_of(loading(5 * MS), layers),
        step_of(loading(0), layers),
        question=(Change(WITHOUT, cause="data loading"),),
    ),
    Case(
        "no synchronization",
        step_of(layers, SYNCHRONIZE, SHORT),
        step_of(layers, SHORT),
        question=(Change(WITHOUT, cause="synchronization"),),
    ),
    Case("graphs", SHORT, graphed(120, 3 * US), question=(Change(GRAPHED),)),
    Case(
        "graphs on two streams",
        of(both_streams, number=60, ns=3 * US, host_ns=9 * US),
        graphed(120, 3 * US, in_turns),
        question=(Change(GRAPHED),),
        is_recorded=False,
    ),
    Case(
        "kernels gone",
        step_of(layers, lambda m: m.op("aten::copy", 900 * US)),
        layers,
        question=(Change(REMOVED, Target("op", "aten::copy")),),
    ),
    Case(
        "kernels twice as long",
        layers,
        of(layers, ns=120 * US),
        question=(Change(FASTER, kernel("aten::mm_kernel"), 0.5),),
    ),
)


def scores_of(case, seed, folder):
    """Return how a case's interval compares with what it saves: in like steps, and in others."""
    recorded = Machine(seed).record(case.before)
    trace = open_trace(recorded.write(folder / f"{case.name}-{seed}.json"))
    low, high = asked(case.rule, case.question, trace)
    scores = []
    for steps in TRUTHS:
        before_ns, after_ns = (
            Machine(seed).steady_step_ns(program, others=steps == OTHERS)
            for program in (case.before, case.after)
        )
        told = {
            "case": case.name,
            "seed": seed,
            "steps": steps,
            "asked": case.rule or "what-if",
            "step_ms": before_ns / MS,
            "truth_ms": (before_ns - after_ns) / MS,
            "is_recorded": case.is_recorded,
        }
        truth_ns, slack_ns = before_ns - after_ns, SLACK * before_ns
        scores.append({**told, **compared(low, high, truth_ns, before_ns, slack_ns)})
    return scores


def _scores_at(asked_of):
    """Score one case by its place: its programs are functions that no other process can be sent."""
    at, seed, folder = asked_of
    return scores_of(CASES[at], seed, folder)


def compared(low, high, truth_ns, step_ns, slack_ns):
    """Return how an interval of a saving, which may be unknown, compares with the truth."""
    if low is None:
        return {"low_ms": None, "high_ms": None, "is_inside": None, "is_narrow": False}
    width = high - low
    return {
        "low_ms": low / MS,
        "high_ms": high / MS,
        "is_inside": bool(low - slack_ns <= truth_ns <= high + slack_ns),
        "width_of_step": width / step_ns,
        "width_of_saving": width / high if high > 0 else 0.0,
        "is_narrow": bool(
            width <= max(WIDTH_OF_STEP * step_ns, WIDTH_OF_SAVING * high + SLACK * step_ns)
        ),
    }


def asked(rule, question, trace):
    """Return the interval of the saving that is predicted; None where it is unknown.

    A rule that finds nothing says that nothing can be saved.
    """
    if not rule:
        told = predict(question, find_baseline(trace))
        if told.predicted_step_ns is None:
            return None, None
        return told.step_ns - told.longest_step_ns, told.step_ns - told.shortest_step_ns
    found = [one for one in trace.diagnosis.findings if one.rule == rule]
    if not found:
        return 0, 0
    return found[0].saving.low_ns, found[0].saving.high_ns


def rows_of(scores):
    """Return the figures of a result, and each score."""
    known = [one for one in scores if one["is_inside"] is not None]
    held = [one for one in known if one["is_recorded"]]
    kinds = sorted({one["steps"] for one in scores if "steps" in one}) or [None]
    inside = {
        f", {kind} steps" if kind else "": statistics.fmean(
            one["is_inside"] for one in known if one.get("steps") == kind
        )
        for kind in kinds
    }
    wide = statistics.fmean(not one["is_narrow"] for one in scores)
    # Of each interval whichever measure of its width is the more lenient.
    widths = [
        min(one["width_of_step"] / WIDTH_OF_STEP, one["width_of_saving"] / WIDTH_OF_SAVING)
        for one in held
    ]
    return [
        row("changes with known truth", len({one["case"] for one in scores}), "", "higher", 20),
        *(
            row(f"intervals that contain the truth{of}", share, "share", "higher", CONTAINED)
            for of, share in inside.items()
        ),
        row("median width, of what is allowed", statistics.median(widths), "share", "lower", 1.0),
        row("unknown or wider", wide, "share", "lower", UNKNOWN_OR_WIDER),
    ]


def main():
    """Score, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4, help="of the host's times, for each change")
    parser.add_argument("--only", action="append", help="take this change only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    chosen = parser.parse_args()
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    with tempfile.TemporaryDirectory() as folder:
        names = chosen.only or [case.name for case in CASES]
        asked_of = [
            (at, seed, Path(folder))
            for at, case in enumerate(CASES)
            for seed in range(chosen.seeds)
            if case.name in names
        ]
        with ProcessPoolExecutor(chosen.workers) as pool:
            scores = [one for found in pool.map(_scores_at, asked_of) for one in found]
    for one in scores:
        print({key: round(v, 4) if isinstance(v, float) else v for key, v in one.items()})
    rows = rows_of(scores)
    for one in rows:
        print(one["name"], one["value"], "reach", one["reach"], "met" if one["met"] else "MISSED")
    write_evidence(
        chosen.result or RESULTS / f"savings_cpu_{month}.json",
        "Intervals of savings against known truth",
        rows,
        MEASURED,
        commit=chosen.commit,
        scores=scores,
    )
    return 0 if all(one["met"] for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
