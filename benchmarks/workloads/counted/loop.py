"""One step of everything whose verdicts are checked against counters, each part in a named range.

Training, decoding, convolutions, attention, FP8 and compiled fusions, over several sizes each, so
that a step holds hundreds of distinct launches, from such that fill the device to the smallest,
and few of them twice. Nsight Compute saves and restores all memory of the process around every
launch, so parts leave none behind that they do not need.
Once the moment in COUNTED_UNTIL (seconds since 1970) has come, no further part is begun.
"""

import argparse
import os
import time

# Under Nsight Compute every process is watched: none is started for compiling.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kprof

DTYPE = torch.bfloat16
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Block(nn.Module):
    """A layer of a Llama: attention and a gated MLP, normalised before each."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, past=None):
        q, k, v = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        if past is not None:
            k, v = torch.cat([past, k], dim=2), torch.cat([past, v], dim=2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Training:
    """Forward, backward and optimizer of a small language model; sizes are (tokens, width)."""

    def __init__(self, device, tiny):
        sizes = [(16, 32)] if tiny else [(4096, 2048), (512, 1024)]
        self.models = []
        for tokens, width in sizes:
            layers = Block(width, 8).to(device, DTYPE)
            embed = nn.Embedding(4096, width).to(device, DTYPE)
            head = nn.Linear(width, 4096, bias=False).to(device, DTYPE)
            parts = nn.ModuleList([embed, layers, head])
            optimizer = torch.optim.AdamW(
                parts.parameters(), fused=width > 1024, foreach=width <= 1024
            )
            batch = torch.randint(4096, (2, tokens // 2), device=device)
            self.models.append((embed, layers, head, optimizer, batch))

    def __call__(self):
        for embed, layers, head, optimizer, batch in self.models:
            logits = head(layers(embed(batch)))
            F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


class Decoding:
    """One token of each of so many sequences through a layer with a filled cache."""

    def __init__(self, device, tiny):
        width, cached = (32, 8) if tiny else (4096, 2048)
        self.block = Block(width, 32 if not tiny else 4).to(device, DTYPE).eval()
        self.head = nn.Linear(width, 8 * width, bias=False).to(device, DTYPE)
        heads = self.block.heads
        self.inputs = [
            (
                torch.randn(batch, 1, width, device=device, dtype=DTYPE),
                torch.randn(batch, heads, cached, width // heads, device=device, dtype=DTYPE),
            )
            for batch in ((2,) if tiny else (1, 8, 32))
        ]

    @torch.no_grad()
    def __call__(self):
        for x, past in self.inputs:
            self.head(self.block(x, past)).argmax(dim=-1)


class Convolution:
    """Convolutions with batch norm, forward and backward, in both layouts."""

    def __init__(self, device, tiny):
        # Channels in, channels out, kernel, stride, size of the image.
        shapes = [(3, 64, 7, 2, 224), (64, 256, 1, 1, 56), (128, 128, 3, 1, 28)]
        shapes += [(512, 512, 3, 1, 7)]
        shapes = [(3, 8, 3, 1, 8)] if tiny else shapes
        self.layers = []
        for layout in (torch.contiguous_format, torch.channels_last):
            for before, after, kernel, stride, size in shapes:
                conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
                layer = nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU()).to(device)
                layer = layer.to(memory_format=layout)
                image = torch.randn(2 if tiny else 64, before, size, size, device=device)
                image = image.to(memory_format=layout).requires_grad_(before > 3)
                self.layers.append((layer, image))

    def __call__(self):
        for layer, image in self.layers:
            with torch.autocast(image.device.type, dtype=DTYPE):
                F.adaptive_avg_pool2d(layer(image), 1).sum().backward()


class Attention:
    """Attention by every back-end, forward and backward; sizes are (batch, heads, tokens, head)."""

    def __init__(self, device, tiny):
        sizes = [(1, 2, 8, 8)] if tiny else [(4, 16, 2048, 128), (2, 32, 512, 64), (1, 8, 128, 64)]
        self.backends = BACKENDS[-1:] if tiny else BACKENDS
        self.inputs = [
            [torch.randn(size, device=device, dtype=DTYPE, requires_grad=True) for _ in "qkv"]
            for size in sizes
        ]

    def __call__(self):
        for q, k, v in self.inputs:
            for backend in self.backends:
                with sdpa_kernel(backend):
                    F.scaled_dot_product_attention(q, k, v).sum().backward()


class Float8:
    """Products of FP8 with their quantisation; sizes are (rows, columns, inner length)."""

    def __init__(self, device, tiny):
        sizes = [(8192, 8192, 4096), (4096, 4096, 4096), (512, 4096, 4096), (16, 8192, 8192)]
        self.inputs = [
            (
                torch.randn(rows, inner, device=device, dtype=DTYPE),
                torch.randn(columns, inner, device=device, dtype=DTYPE),
            )
            for rows, columns, inner in ([] if tiny else sizes)
        ]

    @torch.no_grad()
    def __call__(self):
        for x, weight in self.inputs:
            (a, scale_a), (b, scale_b) = self.quantised(x), self.quantised(weight)
            torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=DTYPE)

    @staticmethod
    def quantised(x):
        scale = x.abs().amax().float() / 448.0
        return (x / scale).to(torch.float8_e4m3fn), scale


def norm_of_sum(x, y, weight):
    return F.rms_norm(x + y, weight.shape, weight)


def gated(x, y, weight):
    return F.silu(x) * y * weight


def softmax_of_sum(x, y, weight):
    return torch.softmax(x.float() + y, dim=-1).to(x.dtype)


def row_sums(x, y, weight):
    return (x * y).sum(dim=0), (x - y).square().mean(dim=-1)


class Fused:
    """What a compiler makes of chains of operators, and the same chains as they are."""

    def __init__(self, device, tiny):
        chains = (norm_of_sum, gated, softmax_of_sum, row_sums)
        # Each size by itself: code for any size would be the same kernels over again.
        compiled = () if tiny else tuple(torch.compile(one, dynamic=False) for one in chains)
        self.chains = (*chains, *compiled)
        sizes = [(8, 16)] if tiny else [(16384, 4096), (4096, 1024), (64, 8192), (8, 512)]
        self.inputs = [
            (
                *(torch.randn(size, device=device, dtype=DTYPE) for _ in "xy"),
                torch.randn(size[-1], device=device, dtype=DTYPE),
            )
            for size in sizes
        ]

    @torch.no_grad()
    def __call__(self):
        for inputs in self.inputs:
            for chain in self.chains:
                chain(*inputs)


class Moving:
    """Copies, gathers, reductions and scans from a cache line to hundreds of megabytes."""

    def __init__(self, device, tiny):
        sizes = (64,) if tiny else (1 << 12, 1 << 20, 1 << 24, 1 << 27)
        self.inputs = [torch.randn(size, device=device, dtype=DTYPE) for size in sizes]

    @torch.no_grad()
    def __call__(self):
        for x in self.inputs:
            table = x.view(-1, 64)
            rows = torch.arange(0, len(table), 2, device=x.device)
            table[rows], table.index_select(0, rows), table.t().contiguous()
            x.float(), x + x, x.sum(), x.amax(), table.cumsum(dim=0), torch.cat([x, x])


# Those with the most launches come last: for them time may be short.
PARTS = {
    "decode": Decoding,
    "attention": Attention,
    "fp8": Float8,
    "fused": Fused,
    "moving": Moving,
    "training": Training,
    "convolution": Convolution,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = {name: PARTS[name](device, args.tiny) for name in args.parts}
    until = float(os.environ.get("COUNTED_UNTIL", "inf"))
    for _ in range(args.steps):
        with kprof.range("step"):
            for name, part in parts.items():
                if time.time() > until:
                    continue
                with kprof.range(name):
                    part()
                if device == "cuda":
                    torch.cuda.empty_cache()
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
