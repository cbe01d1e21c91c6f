"""The persistent decode kernel on one GPU: its values, its waits, and the rate of its loads.

python benchmarks/decode_persistent.py [--only PART ...]

Parts: `tiny` compares every buffer of small models of each family with the executor in torch;
`values` does so for Llama-3.2-1B; `ring` times the loads alone, the chain of instructions alone and
both, and splits the time of each operator; `stage1` is the same token by CUDA graphs.
"""

import argparse
import random
import time

import torch
from decode import TINY, build, model_of, prompts, read_rate

from kprof.errors import KprofError
from kprof.kernels.decode._engine import CALL, SLOT, STATE_SIZE, STEPS_OF_GRAPH, Engine
from kprof.kernels.decode._model import decoder_of
from kprof.kernels.decode.persistent.executor import Executor
from kprof.kernels.decode.persistent.launch import Persistent, sizes_of
from kprof.kernels.decode.persistent.schedule import Op, schedule_of

TOKEN, LENGTH, STEPS, REPEATS = 6, 512, 64, 5
# Teams of a CTA, stages in flight, and the rates of SMs that the schedule knows.
VARIANTS = (
    *((1, 12, "equal"), (1, 12, "measured"), (1, 4, "measured"), (1, 4, "equal")),
    *((1, 6, "measured"), (2, 12, "measured"), (2, 4, "measured"), (2, 12, "equal")),
)
PATIENCE_S = 0.1
FIELDS = ("qkv", "partial", "lse", "middle", "gated", "output", "logits")


class Case:
    """A model, its cache behind a prompt, and the state that the kernel continues from."""

    def __init__(self, model, prompt, length=LENGTH):
        self.decoder = decoder_of(model)
        self.engine = Engine(self.decoder, 1, length)
        self.prompt = prompt
        self.keys, self.values = self.engine.keys[:, 0], self.engine.values[:, 0]
        self.begin()

    def begin(self):
        """Read the prompt, all but its last token; other slots hold NaN."""
        self.engine.keys.fill_(float("nan"))
        self.engine.values.fill_(float("nan"))
        with self.engine.on_stream():
            self.engine.begin(self.prompt, None, [], 0)
        self.engine.wait()
        self.rewind()

    def rewind(self):
        """Set the state to the end of the prompt."""
        state = torch.zeros(STATE_SIZE, dtype=torch.int32)
        state[SLOT], state[CALL] = self.prompt.shape[1] - 1, 1
        state[TOKEN] = int(self.prompt[0, -1])
        self.engine.state[0].copy_(state)
        self.engine.tokens.zero_()

    def persistent(self, **others):
        """Return the kernel."""
        return Persistent(self.decoder, self.engine.sequence(), patience_s=PATIENCE_S, **others)

    def tokens(self, count):
        """Return the tokens of the kernel."""
        return (self.engine.tokens[0, :count] & 0xFFFFFFFF).tolist()


def finish(kernel):
    """Wait for the kernel, and raise its fault."""
    torch.cuda.synchronize()
    kernel.check()


def relative_error(found, expected):
    """Return the relative error of the values that are known."""
    known = ~expected.isnan()
    return float((found[known] - expected[known]).norm() / expected[known].norm())


def compare(name, case, steps):
    """Compare each buffer of several steps, and the tokens, with the executor's."""
    kernel = case.persistent()
    decoder = case.decoder
    schedule = schedule_of(sizes_of(decoder, len(kernel.schedule.queues)), [1.0])
    slot = case.prompt.shape[1] - 1
    executor = Executor(
        decoder, schedule, case.keys.clone(), case.values.clone(), int(case.prompt[0, -1]), slot
    )
    case.rewind()
    for step in range(steps):
        expected = executor.step(random.Random(0))
        kernel.logits()
        finish(kernel)
        found = case.tokens(step + 1)[-1]
        worst = []
        for field in FIELDS:
            a, b = (getattr(one, field).float() for one in (kernel.memory, executor.memory))
            layers = zip(a, b, strict=True) if a.dim() > 1 else [(a, b)]
            errors = [relative_error(*pair) for pair in layers]
            worst.append(f"{field} {errors[0]:.0e} to {errors[-1]:.0e}")
        print(
            f"{name:14} step {step}: {'same' if found == expected else f'{found} not {expected}'}"
            f" token; relative errors, first to last layer: {', '.join(worst)}",
            flush=True,
        )
    cache = [
        float((a[:, :, : slot + steps].float() - b[:, :, : slot + steps].float()).norm())
        for a, b in ((case.keys, executor.keys), (case.values, executor.values))
    ]
    print(f"{name:14} cache differs by {cache[0]:.2e}, {cache[1]:.2e}")
    case.rewind()
    kernel.run(steps)
    finish(kernel)
    print(f"{name:14} {steps} steps in one launch: {case.tokens(steps)}", flush=True)


def tiny():
    """Compare small models."""
    for family in ("Llama", "Qwen2", "Qwen3", "Gemma"):
        model = build(family, torch.bfloat16, **TINY)
        for one in model.parameters():
            if one.dim() == 2:
                one.data.mul_(4)
        compare(f"tiny {family}", Case(model, prompts(model, 1, 300)), 3)


def values(model):
    """Compare Llama-3.2-1B with the executor, and logits with the model's."""
    case = Case(model, prompts(model))
    compare("llama-3.2-1b", case, 2)
    kernel = case.persistent()
    case.rewind()
    kernel.logits()
    finish(kernel)
    with torch.no_grad():
        expected = model(input_ids=case.prompt, use_cache=False).logits[0, -1].float()
    error = (kernel.memory.logits - expected).norm() / expected.norm()
    print(f"llama-3.2-1b logits against the model's: relative error {float(error):.2e}")


def us_per_token(kernel, case, steps=STEPS):
    """Return the times of a token, of several launches."""
    found = []
    for _ in range(REPEATS):
        case.rewind()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel.run(steps)
        end.record()
        finish(kernel)
        found.append(1e3 * begin.elapsed_time(end) / steps)
    return sorted(found)


def sm_times(kernel):
    """Return the cycles of each SM, relative to their mean."""
    cycles = kernel.profile[:, 0, -1].double().cpu()
    return cycles / cycles.mean()


def speeds_of(case, ahead):
    """Return the speeds with which all SMs end their loads together."""
    speeds = torch.ones(torch.cuda.get_device_properties(0).multi_processor_count).double()
    for number in range(3):
        kernel = case.persistent(SKIP_MATH=1, PROFILE=1, ahead=ahead, speeds=speeds.tolist())
        us = us_per_token(kernel, case)
        times = sm_times(kernel)
        ordered = times.sort().values
        print(
            f"loads alone, {ahead} ahead, speeds {number}: {us[2]:.1f} us a token; time of SMs "
            f"relative to the mean: {' '.join(f'{float(one):.3f}' for one in ordered[::13])}",
            flush=True,
        )
        if number == 0:
            print("  by SM:", " ".join(f"{float(one):.2f}" for one in times), flush=True)
        speeds = speeds / times
    return speeds.tolist()


def ring(model, rate):
    """Time the kernel whole, without its math, and without its loads."""
    case = Case(model, prompts(model))
    num_bytes = case.decoder.bytes_per_token(0)

    def show(name, **others):
        kernel = case.persistent(**others)
        times = us_per_token(kernel, case)
        share = num_bytes / (times[2] * 1e-6) / rate
        print(
            f"{name:44} {times[0]:8.1f} {times[2]:8.1f} {times[-1]:8.1f} us a token, "
            f"{share:.3f} of read, {kernel.stages} stages",
            flush=True,
        )
        return times[2]

    speeds = {"equal": None, "measured": speeds_of(case, 12)}
    found = []
    for teams, ahead, of in VARIANTS:
        others = {"GROUPS": teams, "ahead": ahead, "speeds": speeds[of]}
        us = show(f"whole, {teams} teams, {ahead} ahead, speeds {of}", **others)
        found.append((us, others))
    us, others = min(found, key=lambda one: one[0])
    print(f"fastest: {us:.1f} us a token")
    waits(case, **others)
    waits(case, SKIP_LOADS=1, **others)
    kernel = case.persistent(**others)
    print(f"8 tokens a launch: {us_per_token(kernel, case, 8)[2]:.1f} us a token", flush=True)
    show("loads alone, 3 ahead", SKIP_MATH=1, PROFILE=1, ahead=3)
    show("chain alone, the other teams", SKIP_LOADS=1, GROUPS=3 - others["GROUPS"])


def waits(case, **others):
    """Split the time of each operator by the marks of the kernel."""
    kernel = case.persistent(PROFILE=1, **others)
    us = us_per_token(kernel, case)
    per_cycle = us[-1] * STEPS / float(kernel.profile[:, 0, -1].double().mean())
    totals = (kernel.profile.double() * per_cycle / STEPS).cpu()
    skips = " without loads" if others.get("SKIP_LOADS") else ""
    print(f"with clocks{skips}: {us[2]:.1f} us a token; us a token, mean (least, most) of the SMs")
    labels = ("wait", "inputs", "tiles", "sync", "store", "signal", "starved")
    for op in Op:
        text = []
        for i, label in enumerate(labels):
            one = totals[:, op, i]
            text.append(f"{label} {one.mean():.1f} ({one.min():.1f}, {one.max():.1f})")
        print(f"  {op.name:7} {'  '.join(text)}", flush=True)


def stage1(model, rate):
    """Time the same token by CUDA graphs."""
    engine = Engine(decoder_of(model), 1, LENGTH)
    tokens = prompts(model)
    found = []
    with engine.on_stream():
        for _ in range(REPEATS):
            engine.begin(tokens, None, [], 0)
            engine.run(STEPS_OF_GRAPH)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            engine.run(STEPS)
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / STEPS)
    share = engine.decoder.bytes_per_token(0) / (sorted(found)[2] * 1e-6) / rate
    print(f"stage 1: {sorted(found)[2]:.1f} us a token, {share:.3f} of read", flush=True)


def main():
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("tiny", "values", "ring", "stage1")
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    only = parser.parse_args().only
    begin = time.monotonic()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    rate = read_rate()
    print(f"torch reads {rate / 1e12:.3f} TB/s")
    model = None if list(only) == ["tiny"] else model_of("llama-3.2-1b")
    torch.set_grad_enabled(False)
    parts = {
        "tiny": tiny,
        "values": lambda: values(model),
        "ring": lambda: ring(model, rate),
        "stage1": lambda: stage1(model, rate),
    }
    for name in only:
        try:
            parts[name]()
        except KprofError as error:
            print(f"{name}: {error}", flush=True)
        print(f"-- {name}: {time.monotonic() - begin:.1f} s since the start", flush=True)


if __name__ == "__main__":
    main()
