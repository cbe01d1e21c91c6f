"""A Llama-shaped model on several ranks: trained with FSDP2, or run with tensor parallelism.

    torchrun --standalone --nproc-per-node 2 ranks_llama.py --kind train --late 1 --by loader
    torchrun --standalone --nproc-per-node 2 ranks_llama.py --kind curve --said curve.json

Nothing here knows of kprof; `ranks_gpu.py` runs it under it. `--kind curve` measures the bandwidth
of collectives by size instead. Rank 0 writes what it measured to `--said`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
HAS_GPU = torch.cuda.is_available()
HIDDEN, INNER, HEADS, LAYERS, VOCAB = (
    (2048, 5632, 16, 12, 16_384) if HAS_GPU else (32, 64, 4, 2, 64)
)
BATCH, LENGTH = (4, 2048) if HAS_GPU else (2, 16)
STEPS = 32
LATE_S = 0.02
SIZES = [4**place * 65_536 for place in range(7 if HAS_GPU else 3)]
CALLS = 20 if HAS_GPU else 3


class Attention(nn.Module):
    """Causal attention; heads are as many as the projections have room for."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        """Return x of (batch, length, hidden) attended to."""
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x):
        """Return x of (batch, length, hidden) after this layer."""
        x = x + self.attention(self.norm(x))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        """Return logits of tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Tokens(IterableDataset):
    """Batches of drawn tokens; the loader of a late rank takes longer for each."""

    def __init__(self, rank, late_s):
        super().__init__()
        self.rank, self.late_s = rank, late_s

    def __iter__(self):
        """Yield one batch for each step."""
        draw = torch.Generator().manual_seed(self.rank)
        for _ in range(STEPS):
            time.sleep(self.late_s)
            yield torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=draw)


def train(mesh, device, late_s, by):
    """Train with FSDP2; return the losses and the time of each step in ns."""
    with torch.device(device):
        model = Llama()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if HAS_GPU else None
    more = {"mp_policy": policy} if policy else {}
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    of_loader = late_s if by == "loader" else 0.0
    loader = DataLoader(Tokens(dist.get_rank(), of_loader), batch_size=None)
    losses, step_ns = [], []
    begin = time.perf_counter_ns()
    for batch in loader:
        tokens = batch.to(device)
        if by == "sleep":
            time.sleep(late_s)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # As a log of every step does: the host has no head start that would hide its sleep.
        losses.append(loss.item().hex())
        now = time.perf_counter_ns()
        step_ns.append(now - begin)
        begin = now
    return losses, step_ns


@torch.no_grad()
def infer(mesh, device):
    """Run the layers with tensor parallelism; return sums of logits and the time of each step."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    with torch.device(device):
        model = Llama().to(dtype)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
    plan |= {"gate": columns, "up": columns, "down": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    draw = torch.Generator().manual_seed(0)
    sums, step_ns = [], []
    for _ in range(STEPS):
        begin = time.perf_counter_ns()
        tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw).to(device)
        sums.append(model(tokens).float().sum().item().hex())
        step_ns.append(time.perf_counter_ns() - begin)
    return sums, step_ns


def curve(device):
    """Return the bus bandwidth of collectives in bytes/s, as nccl-tests defines it, by bytes."""
    number = dist.get_world_size()
    found = {}
    for size in SIZES:
        whole = torch.zeros(size // 4, device=device)
        part = torch.zeros(size // 4 // number, device=device)
        calls = {
            "all_reduce": (lambda w=whole: dist.all_reduce(w), 2),
            "all_gather": (lambda w=whole, p=part: dist.all_gather_into_tensor(w, p), 1),
            "reduce_scatter": (lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w), 1),
        }
        for name, (call, crossings) in calls.items():
            for _ in range(5):
                call()
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            synchronize()
            took_s = (time.perf_counter() - begin) / CALLS
            rate = size / took_s * crossings * (number - 1) / number
            found.setdefault(name, []).append([size, rate])
    return found


def synchronize():
    """Wait for the GPU, where there is one."""
    if HAS_GPU:
        torch.cuda.synchronize()


def main():
    """Run one kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("train", "tensor", "curve"), default="train")
    parser.add_argument("--late", type=int, default=-1, help="a rank [default: none]")
    parser.add_argument("--by", choices=("sleep", "loader"), default="sleep")
    parser.add_argument("--said", type=Path, help="where rank 0 writes what it measured")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if HAS_GPU else "cpu"
    if HAS_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    name = {"train": "dp_shard", "tensor": "tp", "curve": "dp"}[args.kind]
    mesh = init_device_mesh(
        "cuda" if HAS_GPU else "cpu", (dist.get_world_size(),), mesh_dim_names=(name,)
    )
    if args.kind == "curve":
        said = {"curve": curve(device)}
    else:
        late_s = LATE_S if dist.get_rank() == args.late else 0.0
        of_kind = infer(mesh, device) if args.kind == "tensor" else None
        results, step_ns = of_kind or train(mesh, device, late_s, args.by)
        said = {"results": results, "step_ns": step_ns}
    if args.said and dist.get_rank() == 0:
        args.said.write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
