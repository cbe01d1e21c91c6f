"""What the quality gate says of fused attention in a Llama that has learnt, or that learns.

python benchmarks/attention_gate.py training=PROVIDER prefill=PROVIDER fp8=PROVIDER [--tiny]

L0 and L1 are those of the kernel in bfloat16, with gradients where it trains, from processes beside
this one. Two layers of the size of Llama-3.1-8B's, which have read the Python standard library byte
by byte (benchmarks/llama_gate.py), read files that were held out: L2 compares what each layer
passes on, L3 the logits, and L5 whether the likeliest byte is the right one. L6 compares the
losses of narrower layers that read the same bytes from the start. In FP8, layers pass on something
else, so L2 is not asked.
`benchmarks/attention_ab.py` keeps what is printed.
"""

import argparse
import copy
import json
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import llama_gate
import torch
from torch.nn import functional

import kprof
from kprof.commands import kernels
from kprof.kernels.correctness import Curve, Model, check
from kprof.kernels.correctness.levels import not_run, result_of_gate

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

KERNELS = {
    "training": "attention_forward",
    "prefill": "attention_forward",
    "fp8": "attention_fp8",
}
OF_KERNEL = ("L0", "L1")
LEVELS = {
    "training": (*OF_KERNEL, "L2", "L3", "L5", "L6"),
    "prefill": (*OF_KERNEL, "L2", "L3", "L5"),
    "fp8": (*OF_KERNEL, "L3", "L5"),
}
# Sequences and their bytes: read for L2, L3 and L5, and learnt from for L6 in so many steps.
TEXTS, TINY_TEXTS = (16, 1_024), (16, 80)
LESSONS, TINY_LESSONS = (16, 1_024), (2, 16)
STEPS, TINY_STEPS = 100, 32
PUPIL = {"layers": 2, "width": 2_048, "vocabulary": 256}
TINY_PUPIL = {"layers": 2, "width": 64, "vocabulary": 256}
RATE, FIRST_STEPS = 3e-4, 20


def main():
    """Judge what is asked for, and print it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", metavar="WHAT=PROVIDER")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()
    asked = dict(one.split("=") for one in args.what)
    with ProcessPoolExecutor(len(asked), mp_context=get_context("spawn")) as pool:
        alone = {what: pool.submit(judged_alone, what, by) for what, by in asked.items()}
        seen, held_out = llama_gate.texts_of(Path(sysconfig.get_paths()["stdlib"]))
        model, loss = llama_gate.taught(seen, args.tiny)
        told = {}
        for what, by in asked.items():
            judged = in_a_model(what, by, model, (seen, held_out), args.tiny)
            told[what] = {"gate": with_kernel(judged, alone[what].result())}
    print(json.dumps({what: {**one, "learnt": {"loss": loss}} for what, one in told.items()}))


def judged_alone(what, by):
    """Return the kernel's levels, for calls as a model that trains makes, or one that reads."""
    if not torch.cuda.is_available():
        return {name: not_run(name, "there is no GPU") for name in OF_KERNEL}
    calls = kernels.Calls(("bfloat16",), are_forward=what != "training")
    (report,) = kernels.check_kernels([KERNELS[what]], by, calls=calls)
    return {name: report[name] for name in OF_KERNEL}


def in_a_model(what, by, model, texts, is_tiny):
    """Return what the gate says of the model with and without the kernel, and of its calls."""
    calls = []

    def run(arm, subject, work):
        """Do the work in one arm, and keep what became of attention's calls."""
        with swapped(arm, subject, f"{KERNELS[what]}={by}") as swap:
            found = work()
            # An arm without a kernel has no calls to tell of.
            calls.extend(() if swap is None else (c for site in swap.sites for c in site.calls))
        return found

    batch, length = TINY_TEXTS if is_tiny else TEXTS
    pieces = llama_gate.drawn(texts[1], batch, length + 1, torch.Generator().manual_seed(2))
    given, right = pieces[:, :-1].to(model.device), pieces[:, 1:].flatten().to(model.device)
    read = {arm: run(arm, model, lambda arm=arm: reading(model, given, arm)) for arm in ARMS}
    asked = Model(
        f"Llama, {what}",
        hidden=lambda arm: read[arm][0],
        hidden_truth=lambda: reading(copy.deepcopy(model).float(), given, "replaced")[0],
        logits=lambda arm: read[arm][1],
        answers=lambda arm: (read[arm][1].argmax(-1) == right).tolist(),
        train=lambda arm, seed: learning(texts[0], arm, seed, run, is_tiny),
        precision="lower" if what == "fp8" else "same",
    )
    report = check(model=asked, levels=LEVELS[what][len(OF_KERNEL) :])
    answers = asked.answers("replaced")
    return report, {"right": sum(answers) / len(answers), **calls_of(calls)}


ARMS = ("replaced", "again", "new")


def swapped(arm, model, kernel):
    """Return what puts the kernel into a model, for the arm that has it."""
    return kprof.swapped(model, kernel) if arm == "new" else nullcontext()


@torch.no_grad()
def reading(model, given, arm):
    """Return what each layer passes on, and the logits behind every byte.

    Those who read `again` do so in other batches.
    """
    parts = given.split(len(given) // 2 if arm == "again" else len(given))
    found = [model(one, output_hidden_states=True, use_cache=False) for one in parts]
    streams = zip(*(one.hidden_states for one in found), strict=True)
    logits = torch.cat([one.logits for one in found]).flatten(0, 1)
    return [torch.cat(stream) for stream in streams][1:], logits


def learning(text, arm, seed, run, is_tiny):
    """Return the losses of a model that learns from its first weights on, with gradients' norms.

    Those who learn `again` take each batch in two halves.
    """
    import serve_llama

    # In bfloat16 as it is: autocast calls attention in float32, which the swap leaves to torch.
    model = serve_llama.built(**(TINY_PUPIL if is_tiny else PUPIL)).train()
    torch.manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=model.config.initializer_range)
    steps, (batch, length) = (TINY_STEPS, TINY_LESSONS) if is_tiny else (STEPS, LESSONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    losses, norms = [], []

    def learn():
        for step in range(steps):
            pieces = llama_gate.drawn(text, batch, length + 1, generator).to(model.device)
            parts = pieces.split(batch // 2 if arm == "again" else batch)
            losses.append(sum(step_of(model, part, len(parts)) for part in parts))
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step + 1) / FIRST_STEPS)
            optimizer.step()
            optimizer.zero_grad()

    run(arm, model, learn)
    return Curve(losses, norms)


def step_of(model, pieces, num_parts):
    """Add a part's gradients up, and return its share of the loss, in nats."""
    logits = model(pieces[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.float().flatten(0, 1), pieces[:, 1:].flatten())
    (loss / num_parts).backward()
    return loss.item() / num_parts


def calls_of(calls):
    """Return how many calls went to kernels, and why others did not."""
    return {
        "num_taken": sum(one.num_calls for one in calls if one.provider is not None),
        "fallen_back": sorted({one.why for one in calls if one.why}),
    }


def with_kernel(judged, of_kernel):
    """Return the class that is reached with the kernel's levels, with all that it rests on.

    A model that never called the kernel says nothing of it.
    """
    report, about = judged
    if not about["num_taken"]:
        return {"problem": f"no call went to the kernel: {'; '.join(about['fallen_back'])}"}
    levels = tuple(of_kernel.get(one.name, one) for one in report.levels)
    asked = (*OF_KERNEL, *report.asked)
    told = result_of_gate(replace(report, levels=levels, asked=asked))
    return {
        **{key: told[key] for key in ("reached", "passed", "missing")},
        "levels": [one for one in told["levels"] if one["name"] in asked],
        **about,
    }


if __name__ == "__main__":
    main()
