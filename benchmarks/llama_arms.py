"""The arms of a Llama's training: what each changes, and the process that trains it."""

import importlib
import time
from contextlib import suppress

import torch
from workers import questions, say

import kprof

KERNELS = ("rmsnorm", "add_rmsnorm", "swiglu", "rope", "cross_entropy")
# Without logits, and without the products that layers of MLPs keep for gradients.
LEAN = ("rmsnorm", "add_rmsnorm", "swiglu=kprof-lean", "rope", "adamw")
PLAIN = "huggingface"
SWAPS = {
    "swap": KERNELS,
    "swap-adamw": (*KERNELS, "adamw"),
    "swap-linear": (*LEAN, "linear_cross_entropy"),
    "swap-lean": (*LEAN, "linear_cross_entropy=kprof-lean"),
}
LIGERS = {
    "liger": {},
    "liger-logits": {"cross_entropy": True, "fused_linear_cross_entropy": False},
}
FIRST_STEPS = 3


def work_off(name, size):
    """Be one arm: train, and tell how long steps took and how much memory they needed."""
    with suppress(ImportError):
        importlib.import_module("liger_kernel.transformers" if name in LIGERS else "transformers")
    say({"ready": True})
    asked = questions()
    next(asked, None)
    try:
        step, told = set_up(name, size)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        say({"problem": f"{type(error).__name__}: {str(error)[:300]}"})
        return
    give_back()
    say(told)
    for request in asked:
        # After the others' turn: a step that does not count.
        step()
        synchronize()
        began_ns = time.perf_counter_ns()
        for _ in range(request["steps"]):
            loss = step()
        synchronize()
        step_ns = (time.perf_counter_ns() - began_ns) / request["steps"]
        found = {"step_ns": step_ns, "start_ns": time.time_ns(), "loss": loss.item()}
        if torch.cuda.is_available():
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        give_back()
        say(found)


def set_up(name, size):
    """Return what takes a step of this arm, and what its first steps showed."""
    if name in LIGERS:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(**LIGERS[name])
    model, optimizer, tokens = build(**size)

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    synchronize()
    told = {}
    began_s = time.perf_counter()
    if name in SWAPS:
        swap = kprof.swapped([model, optimizer], *SWAPS[name])
        # For good: this process ends with it on.
        swap.__enter__()
        told["swapping_s"] = time.perf_counter() - began_s
    losses = [step().item()]
    # What Triton compiles, all of it in the first step, is within this.
    told["first_step_s"] = time.perf_counter() - began_s
    losses += [step().item() for _ in range(FIRST_STEPS - 1)]
    told["first_losses"] = losses
    if name in SWAPS:
        told["replaced"] = len(swap.replaced)
        told["skipped"] = [f"{one.name}: {one.skipped}" for one in swap.skipped]
        calls = [call for one in swap.sites for call in one.calls]
        told["fallen_back"] = sorted({call.why for call in calls if call.why})
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return step, told


def build(layers, width, tokens, vocabulary):
    """Return model, optimizer and a batch, as examples/train_llama.py makes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    return model, optimizer, torch.randint(vocabulary, (4, tokens), device=device)


def give_back():
    """Give what is free back, so that the arm whose turn it is has room."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize():
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
