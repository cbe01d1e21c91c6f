"""A small training or inference loop before and after one change: what `whatif.py` measures.

    python benchmarks/workloads/changes/loop.py CHANGE before|after [--tiny]

Everything else is the same on both sides; without a GPU it runs on the CPU, to try the way.
"""

import argparse
import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kprof

FULL = {"layers": 8, "width": 1024, "heads": 16, "tokens": 1024, "batch": 8, "image": 224}
TINY = {"layers": 2, "width": 64, "heads": 4, "tokens": 16, "batch": 2, "image": 32}
VOCABULARY, CLASSES = 8_192, 100


class WrittenOutNorm(nn.Module):
    """RMSNorm as models write it: one kernel for each arrow of the formula."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x32 * scale).to(x.dtype) * self.weight


class WrittenOutGelu(nn.Module):
    """GELU (tanh) term by term."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


class Attend(nn.Module):
    """Causal attention, as a module of its own so that it has a name."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """A transformer layer whose parts the changes exchange."""

    def __init__(self, size, change, is_after):
        super().__init__()
        width = size["width"]
        self.heads = size["heads"]
        written_out = change == "fused_norm" and not is_after
        norm = WrittenOutNorm if written_out else nn.RMSNorm
        self.attention_norm, self.feed_norm = norm(width), norm(width)
        self.is_joined = change != "joined_projections" or is_after
        parts = 1 if self.is_joined else 3
        self.qkv = nn.ModuleList(
            nn.Linear(width, 3 * width // parts, bias=False) for _ in range(parts)
        )
        self.attend = Attend()
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        unfused = change == "fused_activation" and not is_after
        self.activation = WrittenOutGelu() if unfused else nn.GELU(approximate="tanh")
        keeps = change == "no_dropout" and not is_after
        self.dropout = nn.Dropout(0.1) if keeps else nn.Identity()

    def forward(self, x):
        batch, length, width = x.shape
        h = self.attention_norm(x)
        parts = [one(h) for one in self.qkv]
        q, k, v = parts[0].chunk(3, dim=-1) if self.is_joined else parts
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        mixed = self.attend(q, k, v)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(self.activation(self.up(self.feed_norm(x)))))


def build_language_model(size, change, is_after):
    return nn.Sequential(
        nn.Embedding(VOCABULARY, size["width"]),
        *(Block(size, change, is_after) for _ in range(size["layers"])),
        nn.RMSNorm(size["width"]),
        nn.Linear(size["width"], VOCABULARY, bias=False),
    )


def build_image_model(size):
    def stage(inner, outer):
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        )

    base = max(size["width"] // 16, 8)
    widths = [base, 2 * base, 4 * base, 8 * base]
    stages = [stage(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * base, 100))


def optimizer_for(model, change, is_after):
    options = {"foreach": True}
    if change == "fused_optimizer" and is_after:
        options = {"fused": True}
    if change == "foreach_optimizer" and not is_after:
        options = {"foreach": False}
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **options)


def train_language_model(size, change, is_after, device, steps):
    torch.set_float32_matmul_precision("high" if change != "tf32" or is_after else "highest")
    dtype = torch.bfloat16 if change not in ("tf32", "bf16") or is_after else torch.float32
    dtype = torch.float32 if change == "tf32" else dtype
    model = build_language_model(size, change, is_after).to(device, dtype)
    if change == "compiled" and is_after:
        model = torch.compile(model)
    optimizer = optimizer_for(model, change, is_after)
    shape = size["batch"], size["tokens"]
    pinned = change == "pinned_copy" and is_after and device == "cuda"
    batches = [torch.randint(VOCABULARY, shape) for _ in range(4)]
    # Padding that travels along makes the copy long enough to matter.
    extras = [torch.zeros(size["batch"], 1 << 20 if device == "cuda" else 16) for _ in range(4)]
    if pinned:
        batches, extras = ([t.pin_memory() for t in ts] for ts in (batches, extras))
    math = change == "attention" and not is_after
    backend = sdpa_kernel(SDPBackend.MATH) if math else contextlib.nullcontext()
    fills = change == "zero_grad" and not is_after
    with backend:
        for step in range(steps):
            tokens = batches[step % 4].to(device, non_blocking=True)
            if change == "pinned_copy":
                extras[step % 4].to(device, non_blocking=True)
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            optimizer.zero_grad(set_to_none=not fills)
            loss.backward()
            if change == "no_item" and not is_after:
                [p.grad.norm().item() for p in model.parameters()]
            optimizer.step()


def train_image_model(size, change, is_after, device, steps):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build_image_model(size).to(device, dtype)
    layout = torch.channels_last if is_after else torch.contiguous_format
    model = model.to(memory_format=layout)
    optimizer = optimizer_for(model, change, is_after)
    images = torch.randn(4 * size["batch"], 3, size["image"], size["image"], device=device)
    images = images.to(dtype).to(memory_format=layout)
    labels = torch.randint(CLASSES, (4 * size["batch"],), device=device)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()


@torch.no_grad()
def decode(size, change, is_after, device, steps):
    """Run small forward passes, launched one by one or replayed as a graph."""
    model = build_language_model(size, change, is_after).to(device, torch.bfloat16).eval()
    tokens = torch.randint(VOCABULARY, (1, 8), device=device)
    run = lambda: model(tokens)  # noqa: E731
    if is_after and device == "cuda":
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for _ in range(steps):
        with kprof.range("step"):
            for _ in range(4):
                run()


LOOPS = {"channels_last": train_image_model, "graphs": decode}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("change")
    parser.add_argument("side", choices=["before", "after"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = TINY if chosen.tiny else FULL
    loop = LOOPS.get(chosen.change, train_language_model)
    loop(size, chosen.change, chosen.side == "after", device, chosen.steps)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
