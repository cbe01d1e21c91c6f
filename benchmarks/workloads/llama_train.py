"""Train a Llama of about 1 billion parameters (8 layers of 2048) on random tokens, in bf16."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FULL = {"layers": 8, "width": 2048, "heads": 32, "kv_heads": 8, "tokens": 1024}
TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "tokens": 32, "batch": 2}


def build_model(size, device):
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=size["width"],
        intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


class StepTimes:
    """Marks the ends of steps on the GPU's timeline, which makes nobody wait; without one, now."""

    def __init__(self, device):
        self.is_on_gpu = device == "cuda"
        self.marks = []

    def mark(self):
        mark = torch.cuda.Event(enable_timing=True) if self.is_on_gpu else time.perf_counter()
        if self.is_on_gpu:
            mark.record()
        self.marks.append(mark)

    def in_ms(self):
        if self.is_on_gpu:
            torch.cuda.synchronize()
        return [
            a.elapsed_time(b) if self.is_on_gpu else 1e3 * (b - a)
            for a, b in zip(self.marks, self.marks[1:], strict=False)
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--times", type=Path, help="write the time of each step here, in ms")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else {**FULL, "batch": args.batch}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_model(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = StepTimes(device)
    times.mark()
    for _ in range(args.steps):
        tokens = torch.randint(32_000, (size["batch"], size["tokens"]), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.mark()
    if args.times:
        args.times.write_text(json.dumps(times.in_ms()))
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
