"""What recording costs a step on a GPU: the light pass and the window, against torch's profiler.

    python benchmarks/recording_cost_gpu.py

Each workload runs in a process of its own, in which its steps are taken unrecorded, under torch's
profiler with shapes, and under kprof's recorder, in turn. A step lasts from one mark on the GPU's
timeline to the next. One process at a time: others beside it lengthen its steps.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

WORKLOADS = ROOT / "benchmarks" / "workloads"
RECORDER = ROOT / "kprof" / "collect" / "recorder"
SOURCES = (
    "benchmarks/recording_cost_gpu.py",
    "benchmarks/workloads/convnet_dataloader.py",
    "benchmarks/workloads/hf_generate.py",
    "benchmarks/workloads/llama_train.py",
    "kprof/collect/recorder/**/*.py",
)
# Steps before each measurement, and in it.
WARM_UP, STEPS = 3, 12
ROUNDS = 2
# The most that a step of the light pass may take longer than an unrecorded one.
REACH_LIGHT = {"generate": 0.12, "gpt2": 0.02, "resnet50": 0.05, "llama": 0.02}
# Of a step in the window, as a multiple of one under torch's profiler; of the longest, of a median.
REACH_WINDOW, REACH_LONGEST = 1.05, 1.3


def script(name):
    """Return a script of `benchmarks/workloads/` as a module."""
    spec = importlib.util.spec_from_file_location(name, WORKLOADS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt2(device, tiny):
    """Train GPT-2 of 124 million parameters as nanoGPT does: eager, autocast, batches of 12."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 512} if tiny else {}
    config = GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (2, 32) if tiny else (12, 1024)

    def step():
        tokens = torch.randint(config.vocab_size, shape, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def generate(device, tiny):
    """Answer a prompt with 32 tokens through `generate` of transformers, eager."""
    import torch

    module = script("hf_generate")
    size = module.TINY if tiny else module.FULL
    model = module.build_model(size, device)
    prompt = torch.randint(1, 32_000, (1, size["prompt"]), device=device)
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": size["new"], "do_sample": False}
    return lambda: model.generate(prompt, attention_mask=mask, **options)


def resnet50(device, tiny):
    """Train a ResNet-50 in mixed precision on images that worker processes make."""
    import torch
    from torchvision.models import resnet50

    module = script("convnet_dataloader")
    size = module.TINY if tiny else module.FULL
    net = resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = torch.utils.data.DataLoader(
        module.RandomImages(1_000 * size["batch"], size["side"]),
        batch_size=size["batch"],
        num_workers=size["workers"],
        pin_memory=device == "cuda",
    )
    batches = iter(loader)

    def step():
        pixels, labels = next(batches)
        pixels = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16):
            answer = net(pixels)
            loss = torch.nn.functional.cross_entropy(answer, labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def llama(device, tiny):
    """Train a Llama of 0.6 billion parameters in bf16."""
    import torch

    module = script("llama_train")
    size = module.TINY if tiny else {**module.FULL, "batch": 4}
    model = module.build_model(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        tokens = torch.randint(32_000, (size["batch"], size["tokens"]), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


BUILDERS = {"generate": generate, "gpt2": gpt2, "resnet50": resnet50, "llama": llama}


class Steps:
    """Takes steps of a workload in this process, and tells the time of each in ms."""

    def __init__(self, workload, tiny):
        sys.path.insert(0, str(RECORDER))
        import torch
        from kprof_recorder import capture, start
        from kprof_recorder.settings import Settings

        self.torch, self.capture, self.settings = torch, capture, Settings
        self.folder = Path(tempfile.mkdtemp())
        self.session = start.start(Settings(self.folder))
        self.is_on_gpu = torch.cuda.is_available()
        torch.manual_seed(0)
        self.step = BUILDERS[workload]("cuda" if self.is_on_gpu else "cpu", tiny)
        self.take(WARM_UP)

    def take(self, number):
        """Take steps unrecorded, or while something else records them."""
        marks = [self._mark()]
        for _ in range(number):
            self.step()
            marks.append(self._mark())
        self.capture.synchronize()
        if self.is_on_gpu:
            return [a.elapsed_time(b) for a, b in pairwise(marks)]
        return [1e3 * (b - a) for a, b in pairwise(marks)]

    def _mark(self):
        if not self.is_on_gpu:
            return time.perf_counter()
        mark = self.torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def under_torch(self):
        """Take steps under torch's profiler with shapes, which lets go of CUPTI after them."""
        activity = self.torch.profiler.ProfilerActivity
        activities = [activity.CPU] + [activity.CUDA] * self.is_on_gpu
        recording = self.torch.profiler.profile(activities=activities, record_shapes=True)
        with self.capture.Ours(), self.capture._detaching():
            recording.prepare_trace()
            self.take(1)
            recording.start_trace()
            times = self.take(STEPS)
            recording.stop_trace()
        self.take(1)
        return times

    def under_kprof(self):
        """Take steps under the recorder; return those of its window and of its light pass."""
        recorder = self.session.recorder
        self.session.outcome.restart()
        settings = self.settings(self.folder, WARM_UP, STEPS, light=self.is_on_gpu)
        self.session.restart(settings)
        recorder.on_finished = recorder.on_light = lambda recording: None
        # One to find the rule of steps; between both passes two; and one after them.
        self.take(1 + WARM_UP + STEPS + 2 + STEPS + 1)
        if recorder.problems:
            raise SystemExit("; ".join(recorder.problems))
        device_ns = recorder.device_clock.durations_ns()
        host_ns = {step.index: step.end_ns - step.start_ns for step in recorder.counter.steps}
        times_ns = {**host_ns, **device_ns}
        window, light = (
            [times_ns[index] / 1e6 for index in steps]
            for steps in (recorder.kept.steps, recorder.light_steps)
        )
        recorder.rest()
        return window, light


def measure_here(workload, tiny):
    """Return the times of the steps of a workload by how they were taken."""
    steps = Steps(workload, tiny)
    found = {"unrecorded": [], "torch": [], "window": [], "light": []}
    for _ in range(ROUNDS):
        found["unrecorded"] += steps.take(STEPS)
        found["torch"] += steps.under_torch()
        window, light = steps.under_kprof()
        found["window"] += window
        found["light"] += light
    return found


def measure(workload, tiny):
    """Return what `measure_here` does, of a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        command = [sys.executable, __file__, "--here", workload, "--result", str(path)]
        subprocess.run([*command, *(["--tiny"] if tiny else [])], check=True)
        return json.loads(path.read_text())


def rows_of(workload, times):
    """Return the rows of a workload: what each pass adds to a step."""
    middle = {name: statistics.median(found) for name, found in times.items() if found}
    unrecorded_ms, torch_ms = middle["unrecorded"], middle["torch"]
    longest = max(times["window"]) / middle["window"]
    rows = [
        row(f"{workload}-unrecorded", unrecorded_ms, "ms", "lower"),
        row(f"{workload}-torch", torch_ms / unrecorded_ms - 1, "share longer", "lower"),
        row(
            f"{workload}-window",
            middle["window"] / torch_ms,
            "of a step under torch's profiler with shapes",
            "lower",
            REACH_WINDOW,
        ),
        row(f"{workload}-longest", longest, "of the median", "lower", REACH_LONGEST),
    ]
    if "light" in middle:
        share = middle["light"] / unrecorded_ms - 1
        rows.append(row(f"{workload}-light", share, "share longer", "lower", REACH_LIGHT[workload]))
    return rows


def main():
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--result", type=Path, default=RESULTS / "recording_cost_h200_2026-11.json")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    parser.add_argument("--here", choices=BUILDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        args.result.write_text(json.dumps(measure_here(args.here, args.tiny)))
        return
    rows = [row for name in args.workloads for row in rows_of(name, measure(name, args.tiny))]
    for one in rows:
        print(f"{one['name']:20} {one['value']:8.3f} {one['unit']}, met: {one['met']}")
    what = "what recording costs a step on a GPU"
    write_evidence(args.result, what, rows, SOURCES, commit=args.commit)


if __name__ == "__main__":
    main()
