"""What the quality gate says of FP8 layers and decode attention in a Llama that has learnt.

python benchmarks/llama_gate.py [prefill | decode ...] [--tiny]

Random weights will not do: their logits hardly differ from token to token, and no task can be asked
of them. So two layers of the size of Llama-3.1-8B's read the Python standard library, byte by byte.
L0 and L1 are those of the kernels, without gradients in bfloat16: other processes find them out
while the layers learn. L3 compares the logits on files that were held out, and L5 whether the
likeliest byte is the right one: of whole texts, or of bytes decoded one by one; with FP8 in all
layers, and in those between attention alone.
`benchmarks/llama_serve.py` keeps what is printed.
"""

import argparse
import json
import multiprocessing
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

import kprof
from kprof.commands import kernels as library
from kprof.kernels.correctness import Model, check
from kprof.kernels.correctness.levels import not_run, result_of_gate

KERNELS = ("fp8_linear", "rmsnorm", "add_rmsnorm", "swiglu", "decode_attention")
# All layers in FP8, as the comparisons have it; and three quarters of their weights.
SWAPS = {"gate": KERNELS, "gate-mlp": ("fp8_linear@*.mlp.*", *KERNELS[1:])}
# Judged at once, each part in a process.
PARTS = (KERNELS[:1], KERNELS[1:3], KERNELS[3:])
SIZE = {"layers": 2, "width": 4_096, "vocabulary": 256}
TINY = {"layers": 2, "width": 256, "vocabulary": 256}
# Steps of training, and the sequences and bytes of each.
STEPS, BATCH, LENGTH = 300, 16, 512
FIRST_STEPS, RATE = 50, 3e-4
HELD_OUT = 10
# Sequences and their bytes, the last of which are decoded one by one.
TEXTS = {"prefill": (16, 1_024, 0), "decode": (64, 768, 256)}
TINY_TEXTS = {"prefill": (16, 80, 0), "decode": (64, 48, 16)}
# Those of the kernels, then those of the model.
LEVELS = ("L0", "L1", "L3", "L5")


def main():
    """Judge what is asked for, and print it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[*TEXTS])
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()
    began_s, spent_s = time.monotonic(), {}

    def note(what):
        spent_s[what] = round(time.monotonic() - began_s, 2)

    with ProcessPoolExecutor(len(PARTS), multiprocessing.get_context("spawn")) as others:
        alone = [others.submit(judged_alone, part) for part in PARTS]
        seen, held_out = texts_of(Path(sysconfig.get_paths()["stdlib"]))
        model, loss = taught(seen, args.tiny)
        note("until it has learnt")
        of_kernels = worst_of([one.result() for one in alone])
        note("until the kernels are judged")
    told = {}
    for what in args.what:
        told[what] = judged(what, model, held_out, of_kernels, args.tiny)
        note(f"until {what} is judged")
        # Each line holds all that is known by then: the time may be up before the next.
        learnt = {"loss": loss, "spent_s": spent_s}
        print(
            json.dumps({one: {**said, "learnt": learnt} for one, said in told.items()}), flush=True
        )


def judged_alone(kernels=KERNELS):
    """Return the worst of the kernels' levels L0 and L1, for calls as a model that serves makes."""
    if not torch.cuda.is_available():
        return {name: not_run(name, "there is no GPU") for name in LEVELS[:2]}
    calls = library.Calls(("bfloat16",), are_forward=True)
    return worst_of(library.check_kernels(kernels, None, calls=calls))


def worst_of(reports):
    """Return the worst of several reports' levels L0 and L1."""
    return {
        name: min((one[name] for one in reports), key=lambda level: level.state == "passed")
        for name in LEVELS[:2]
    }


def texts_of(folder):
    """Return the bytes of a folder's Python files: those to learn from, and every tenth file's."""
    paths = sorted(one for one in folder.rglob("*.py") if "-packages" not in str(one))
    parts = [
        b"".join(one.read_bytes() for one in paths[place::HELD_OUT]) for place in range(HELD_OUT)
    ]
    return tensor_of(b"".join(parts[1:])), tensor_of(parts[0])


def tensor_of(text):
    """Return bytes as numbers."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def drawn(text, num, length, generator):
    """Return so many pieces of a text, from anywhere in it."""
    places = torch.randint(len(text) - length, (num,), generator=generator)
    return torch.stack([text[place : place + length] for place in places.tolist()]).long()


def taught(text, is_tiny):
    """Return a model that has read pieces of a text, in bfloat16, and its last loss in nats."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import serve_llama

    model = serve_llama.built(**(TINY if is_tiny else SIZE)).float()
    steps, batch, length = (40, 4, 64) if is_tiny else (STEPS, BATCH, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=FIRST_STEPS / STEPS
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        pieces = drawn(text, batch, length + 1, generator).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(pieces[:, :-1]).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.bfloat16().requires_grad_(False), loss.item()


def judged(what, model, text, of_kernels, is_tiny):
    """Return what the gate says of the model with and without the kernels, by swap."""
    batch, length, decoded = (TINY_TEXTS if is_tiny else TEXTS)[what]
    pieces = drawn(text, batch, length + 1, torch.Generator().manual_seed(2)).to(model.device)
    given, right = pieces[:, :-1], pieces[:, 1:][:, -(decoded or length) :].flatten()
    found = {}
    with torch.no_grad():
        replaced = logits_of(model, given, decoded)
        # The same texts in other batches.
        again = [logits_of(model, one, decoded) for one in given.split(batch // 2)]
        for name, kernels in SWAPS.items():
            with kprof.swapped(model, *kernels) as swap:
                # From the second call on, norms and SwiGLU cast for the layers in FP8.
                logits_of(model, given[:1], 0)
                new = logits_of(model, given, decoded)
            arms = {"replaced": replaced, "again": torch.cat(again), "new": new}
            found[name] = {**levels_of(what, arms, right, of_kernels), **calls_of(swap)}
    return found


def levels_of(what, logits, right, of_kernels):
    """Return the class that the arms' logits reach, with the levels it rests on."""

    def answers(arm):
        return (logits[arm].argmax(-1) == right).tolist()

    model = Model(f"Llama, {what}", logits=logits.get, answers=answers, precision="lower")
    report = check(model=model, levels=LEVELS[2:])
    levels = tuple(of_kernels.get(one.name, one) for one in report.levels)
    told = result_of_gate(replace(report, levels=levels, asked=LEVELS))
    return {
        **{key: told[key] for key in ("reached", "passed", "missing")},
        "levels": [one for one in told["levels"] if one["name"] in LEVELS],
        "right": sum(answers("replaced")) / len(right),
    }


def calls_of(swap):
    """Return how many calls went to kernels, and why others did not."""
    calls = [call for site in swap.sites for call in site.calls]
    return {
        "num_taken": sum(call.num_calls for call in calls if not call.why),
        "fallen_back": sorted({call.why for call in calls if call.why}),
    }


def logits_of(model, texts, decoded):
    """Return the logits behind every byte, or behind each of the last, read one by one."""
    if not decoded:
        return model(texts).logits.flatten(0, 1)
    from transformers import DynamicCache

    cache, first = DynamicCache(config=model.config), texts.shape[1] - decoded
    model(texts[:, :first], past_key_values=cache, logits_to_keep=1)
    found = [
        model(texts[:, place : place + 1], past_key_values=cache).logits
        for place in range(first, texts.shape[1])
    ]
    return torch.cat(found, 1).flatten(0, 1)


if __name__ == "__main__":
    main()
