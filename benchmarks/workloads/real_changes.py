"""Loops with a slow and a fast form of the same step, for `benchmarks/savings_gpu.py`.

    kprof run --skip 8 --steps 6 benchmarks/workloads/real_changes.py CHANGE --result FILE

runs steps of the slow form for the recorder, and then measures both forms in the same process, in
blocks of steps in random order: a host's speed differs between processes by more than most changes
save. `--tiny` makes everything small enough for a CPU, and `--lock` names a file that gives the GPU
to one process at a time.
"""

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import kprof


@dataclass(frozen=True)
class Size:
    """How large the models, batches and pauses are, and how long both forms are measured."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    tokens: int = 1024
    batch: int = 8
    vocabulary: int = 8_192
    small_layers: int = 60
    image: int = 224
    copied: int = 24 << 20
    pause_s: float = 0.012
    block_s: float = 0.15
    blocks: int = 12


TINY = Size(2, 64, 4, 16, 2, 128, 4, 32, 1 << 10, 0.002, 0.01, 2)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Steps before the recorded window, in it, and after it: the last are timed unrecorded.
SKIP, RECORDED, AFTER = 8, 6, 20
LEAD = 3


def wait():
    """Wait for the device, where there is one."""
    if GPU:
        torch.cuda.synchronize()


class UnfusedNorm(nn.Module):
    """RMSNorm in one operator for each operation of its formula."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class Block(nn.Module):
    """A layer of a transformer with a gated activation."""

    def __init__(self, size, norm=nn.RMSNorm):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attention_norm, self.feed_norm = norm(width), norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def activation(self, x):
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(self.activation(self.feed_norm(x)))


class SwiGlu(Block):
    """A layer whose gated activation is one kernel."""

    def activation(self, x):
        from kprof.kernels.gated import swiglu

        return swiglu(self.gate(x), self.up(x))


class Waiting(Block):
    """A layer that waits for the device."""

    def forward(self, x):
        x = super().forward(x)
        wait()
        return x


class Checkpointed(Block):
    """A layer whose forward pass is computed again in the backward pass."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Language(nn.Module):
    """A language model of such layers."""

    def __init__(self, size, block=Block, norm=nn.RMSNorm, vocabulary=None):
        super().__init__()
        vocabulary = vocabulary or size.vocabulary
        options = {} if norm is nn.RMSNorm else {"norm": norm}
        self.embedding = nn.Embedding(vocabulary, size.width)
        self.layers = nn.ModuleList(block(size, **options) for _ in range(size.layers))
        self.norm = norm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cross_entropy(logits, targets):
    """Return the loss in float32, as torch computes it."""
    return F.cross_entropy(logits.float(), targets)


@dataclass
class Training:
    """A training step; the fields are what a change exchanges."""

    size: Size
    block: type = Block
    norm: type = nn.RMSNorm
    vocabulary: int | None = None
    dtype: torch.dtype = torch.bfloat16
    precision: str = "high"
    optimizer: str = "fused"
    loss: object = cross_entropy
    attention: object = None
    before: object = None
    graded: object = None
    after: object = None

    def __post_init__(self):
        size = self.size
        model = Language(size, self.block, self.norm, self.vocabulary)
        self.model = model.to(DEVICE, self.dtype)
        options = {self.optimizer: True} if self.optimizer != "single" else {"foreach": False}
        if not GPU and self.optimizer == "fused":
            options = {"foreach": True}
        self.updates = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **options)
        shape = size.batch, size.tokens
        self.tokens = torch.randint(size.vocabulary, shape, device=DEVICE)

    def __call__(self):
        torch.set_float32_matmul_precision(self.precision)
        if self.before:
            self.before()
        with sdpa_kernel(self.attention) if self.attention else contextlib.nullcontext():
            logits = self.model(self.tokens)
            loss = self.loss(logits.flatten(0, 1), self.tokens.flatten())
            self.updates.zero_grad(set_to_none=True)
            loss.backward()
        if self.graded:
            self.graded(self.model)
        self.updates.step()
        if self.after:
            self.after(loss)


def training(size, *changes, **more):
    """Return what builds a training step."""
    return functools.partial(Training, size, *changes, **more)


def item_each_step(size):
    return training(size, after=lambda loss: loss.item()), training(size)


def synchronize_each_step(size):
    return training(size, after=lambda loss: wait()), training(size)


def synchronize_each_layer(size):
    return training(size, Waiting), training(size)


def norms_to_host(size):
    """Fetch each gradient's norm, or stack them on the device."""

    def fetched(model):
        return [p.grad.norm().item() for p in model.parameters()]

    def kept(model):
        return [p.grad.norm() for p in model.parameters()]

    return training(size, graded=fetched), training(size, graded=kept)


def loss_to_host(size):
    """Fetch a copy of the loss amid the step, before the optimizer, or in none."""
    found = []

    def loss(logits, targets):
        value = cross_entropy(logits, targets)
        found[:] = [value.detach().cpu()]
        return value

    return training(size, loss=loss), training(size)


def uploading(size, *, pinned, non_blocking):
    """Return what copies a batch to the device before a step."""
    source = torch.zeros(size.copied)
    source = source.pin_memory() if pinned and GPU else source
    return lambda: source.to(DEVICE, non_blocking=non_blocking)


def pageable_batch(size):
    slow = uploading(size, pinned=False, non_blocking=True)
    fast = uploading(size, pinned=True, non_blocking=True)
    return training(size, before=slow), training(size, before=fast)


def blocking_copy(size):
    slow = uploading(size, pinned=True, non_blocking=False)
    fast = uploading(size, pinned=True, non_blocking=True)
    return training(size, before=slow), training(size, before=fast)


class Batches(Dataset):
    """Batches that take so long to make."""

    def __init__(self, size, seconds):
        self.batch, self.seconds = torch.zeros(size.batch, size.tokens), seconds

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.batch


def loading(size, seconds):
    """Return what takes the next batch of a loader before a step."""
    batches = iter(DataLoader(Batches(size, seconds), batch_size=None))
    return lambda: next(batches)


def slow_loader(size):
    slow, fast = (loading(size, s) for s in (2 * size.pause_s, 0))
    return training(size, before=slow), training(size, before=fast)


def loader_nearly_in_time(size):
    slow, fast = (loading(size, s) for s in (size.pause_s, 0))
    return training(size, before=slow), training(size, before=fast)


def host_sleeps(size):
    return training(size, after=lambda loss: time.sleep(2 * size.pause_s)), training(size)


def host_computes(size):
    """Let Python compute between two steps."""

    def compute(loss):
        until, number = time.perf_counter() + 2 * size.pause_s, 0
        while time.perf_counter() < until:
            number += 1

    return training(size, after=compute), training(size)


def empty_cache(size):
    def empty(loss):
        if GPU:
            torch.cuda.empty_cache()

    return training(size, after=empty), training(size)


def fp32_to_tf32(size):
    wide = {"dtype": torch.float32}
    return training(size, precision="highest", **wide), training(size, precision="high", **wide)


def tf32_to_bf16(size):
    return training(size, dtype=torch.float32, precision="high"), training(size)


def math_attention(size):
    return training(size, attention=SDPBackend.MATH), training(size)


def unfused_norm(size):
    return training(size, norm=UnfusedNorm), training(size)


def unfused_activation(size):
    return training(size), training(size, SwiGlu if GPU else Block)


def unfused_loss(size):
    """Compute the loss of many logits by torch, or in one kernel."""
    from kprof.kernels.cross_entropy.cross_entropy import cross_entropy as in_one

    many = {"vocabulary": 4 * size.vocabulary}
    return training(size, **many), training(size, loss=in_one if GPU else cross_entropy, **many)


def optimizer_by_parameter(size):
    return training(size, optimizer="single"), training(size)


def optimizer_foreach(size):
    return training(size, optimizer="foreach"), training(size)


def odd_vocabulary(size):
    """Multiply by matrices whose rows begin at no multiple of 16 bytes, or at such."""
    even = 4 * size.vocabulary
    return training(size, vocabulary=even - 15), training(size, vocabulary=even)


def checkpointing(size):
    return training(size, Checkpointed), training(size)


def images(size):
    """Train convolutions in either layout of memory."""

    def stage(inner, outer):
        convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU())

    def form(layout):
        widths = [size.width // 8] * 6
        stages = [stage(a, b) for a, b in itertools.pairwise(widths)]
        model = nn.Sequential(nn.Conv2d(3, widths[0], 7, stride=4), *stages)
        dtype = torch.bfloat16 if GPU else torch.float32
        model = model.to(DEVICE, dtype).to(memory_format=layout)
        updates = torch.optim.SGD(model.parameters(), lr=1e-6)
        x = torch.randn(4 * size.batch, 3, size.image, size.image, device=DEVICE, dtype=dtype)
        x = x.to(memory_format=layout)

        def step():
            updates.zero_grad()
            model(x).float().square().mean().backward()
            updates.step()

        return step

    return lambda: form(torch.contiguous_format), lambda: form(torch.channels_last)


def chain(x, y):
    """Compute pointwise, one operator after the other."""
    for _ in range(3):
        x = torch.tanh(x * y + 0.5) - x.sigmoid() * 0.1
    return x


def compiled_function(size):
    """Compute a chain of pointwise operators, or the same compiled."""
    x, y = (torch.randn(size.tokens * size.width * 16, device=DEVICE) for _ in range(2))

    def form(function):
        return torch.no_grad()(lambda: function(x, y))

    return lambda: form(chain), lambda: form(torch.compile(chain) if GPU else chain)


def graphed(step):
    """Return a step's replay as a CUDA graph; without a GPU the step.

    The replay keeps the step: the graph reads tensors that the step alone may hold.
    """
    if not GPU:
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_kept=step):
        graph.replay()

    return replay


def inference(model, x):
    """Return a step that calls a model without gradients."""
    model = model.to(DEVICE, torch.bfloat16).eval()
    return torch.no_grad()(lambda: model(x))


def graph_of_small_layers(size):
    """Launch many small layers one by one, or as a graph."""
    width = size.width // 2
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(size.small_layers)]
    x = torch.randn(256, width, device=DEVICE, dtype=torch.bfloat16)
    step = inference(nn.Sequential(*layers), x)
    return lambda: step, lambda: graphed(step)


def graph_of_decoding(size):
    """Decode a few tokens at once launch by launch, or as a graph."""
    tokens = torch.randint(size.vocabulary, (4, 1), device=DEVICE)
    step = inference(Language(size), tokens)
    return lambda: step, lambda: graphed(step)


def graph_of_training(size):
    """Train on small batches launch by launch, or as a graph."""
    small = Size(size.layers, size.width // 4, 4, 64, 2, 1_024)

    def form():
        model = Language(small).to(DEVICE, torch.bfloat16)
        capturable = {"capturable": True} if GPU else {}
        updates = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True, **capturable)
        tokens = torch.randint(1_024, (2, 64), device=DEVICE)

        def step():
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            updates.zero_grad(set_to_none=False)
            loss.backward()
            updates.step()

        step()
        return step

    return form, lambda: graphed(form())


def growing_cache(size):
    """Append keys and values by copying the whole cache, or in place."""
    heads, head, length, new = size.heads, size.width // size.heads, 4 * size.tokens, 8
    shape = 2 * size.batch, heads, length, head
    kinds = {"device": DEVICE, "dtype": torch.bfloat16}
    first = [torch.randn(shape, **kinds) for _ in range(2)]
    token = torch.randn(*shape[:2], 1, head, **kinds)
    room = [torch.cat([t, torch.zeros(*shape[:2], new, head, **kinds)], dim=2) for t in first]

    def copying():
        keys, values = first
        for _ in range(new):
            keys, values = (torch.cat([t, token], dim=2) for t in (keys, values))
            F.scaled_dot_product_attention(token, keys, values)

    def in_place():
        keys, values = room
        for at in range(length, length + new):
            for one in room:
                one[:, :, at : at + 1].copy_(token)
            F.scaled_dot_product_attention(token, keys[:, :, : at + 1], values[:, :, : at + 1])

    return lambda: torch.no_grad()(copying), lambda: torch.no_grad()(in_place)


def duplicate_work(size):
    """Sort a result that is not read in every step, or do not."""
    x = torch.randn(1 << 22 if GPU else 1 << 10, device=DEVICE)
    return training(size, before=lambda: torch.sort(x)), training(size)


def mask_by_index(size):
    """Count what a mask keeps by picking it, which the host waits for, or by a sum."""
    x = torch.randn(1 << 20 if GPU else 1 << 10, device=DEVICE)
    picks, sums = (lambda: x[x > 0]), (lambda: torch.where(x > 0, x, 0))
    return training(size, before=picks), training(size, before=sums)


CHANGES = {
    one.__name__: one
    for one in (
        *(item_each_step, slow_loader, pageable_batch, graph_of_small_layers, host_sleeps),
        *(fp32_to_tf32, optimizer_foreach, math_attention, synchronize_each_layer, empty_cache),
        *(compiled_function, images, graph_of_decoding, unfused_norm, blocking_copy),
        *(tf32_to_bf16, host_computes, norms_to_host, unfused_activation, checkpointing),
        *(synchronize_each_step, loader_nearly_in_time, optimizer_by_parameter, growing_cache),
        *(loss_to_host, duplicate_work, unfused_loss, mask_by_index, odd_vocabulary),
        *(graph_of_training,),
    )
}


def run_steps(step, number):
    """Run steps without a name, which a recorder does not count."""
    for _ in range(number):
        step()


def seconds_of(step, number):
    """Return the mean time of so many steps, once a few have run before: the host has its lead.

    On a device it is the time between two of its own events, so that no wait is part of it.
    """
    run_steps(step, LEAD)
    if not GPU:
        begin = time.perf_counter()
        run_steps(step, number)
        return (time.perf_counter() - begin) / number
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run_steps(step, number)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / number


def measure(size, forms):
    """Return the step's seconds of both forms in pairs of blocks, in random order."""
    for step in forms:
        run_steps(step, LEAD + 1)
        wait()
    numbers = [max(round(size.block_s / seconds_of(step, 5)), 5) for step in forms]
    pairs, chance = [], random.Random(0)
    for _ in range(size.blocks):
        order = chance.sample((0, 1), 2)
        times = {at: seconds_of(forms[at], numbers[at]) for at in order}
        pairs.append((times[0], times[1]))
    return pairs


def main():
    """Run the slow form for a recorder, then measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("change", choices=CHANGES)
    parser.add_argument("--result", type=Path, required=True, help="the file for what was measured")
    parser.add_argument("--lock", type=Path, help="held as long as the GPU is used")
    parser.add_argument("--tiny", action="store_true", help="small, for a CPU")
    chosen = parser.parse_args()
    if chosen.lock:
        # Never closed: the GPU is this process's until it has ended.
        fcntl.flock(os.open(chosen.lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
    torch.manual_seed(0)
    size = TINY if chosen.tiny else Size()
    slow, fast = CHANGES[chosen.change](size)
    step = slow()
    for _ in range(SKIP + RECORDED + AFTER):
        with kprof.range("step"):
            step()
    wait()
    pairs = measure(size, (step, fast()))
    chosen.result.write_text(json.dumps({"pairs_s": pairs}))
    wait()


if __name__ == "__main__":
    main()
