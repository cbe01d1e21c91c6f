"""Workloads with one planted fault that makes a GPU wait, each also without it.

    python benchmarks/planted_faults.py item_every_step --faulty

Nothing here knows of kprof; `idle_causes.py` runs each twice under it. Without its fault each
keeps a large GPU busy: two dozen square products a step, launched far ahead.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

STEPS = 14
HAS_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Sizes:
    """How large everything is: for a large GPU, or small enough to try the way without one."""

    width: int
    rows: int
    layers: int
    slow_s: float
    numbers: int
    """How many rounds of Python's own, or elements to sort, take about `slow_s`."""


LARGE = Sizes(width=4096, rows=8192, layers=24, slow_s=0.06, numbers=1_000_000)
TINY = Sizes(width=32, rows=16, layers=2, slow_s=0.002, numbers=1_000)


class Model(torch.nn.Module):
    """Square layers; `amid` runs in the middle of them."""

    def __init__(self, sizes, amid=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(sizes.layers)
        )
        self.amid = amid

    def forward(self, x):
        """Run the layers, and `amid` before the second half of them."""
        for i, layer in enumerate(self.layers):
            if self.amid and i == len(self.layers) // 2:
                x = self.amid(x)
            x = torch.nn.functional.gelu(layer(x))
        return x


class Batches(Dataset):
    """Batches that take a while to make, where `slow_s` says so; in pinned memory if asked for."""

    def __init__(self, sizes, slow_s=0.0, *, pinned=True):
        self.batch = torch.randn(sizes.rows, sizes.width, dtype=torch.bfloat16)
        if pinned and HAS_GPU:
            self.batch = self.batch.pin_memory()
        self.slow_s = slow_s

    def __len__(self):
        """Enough for every step."""
        return 4 * STEPS

    def __getitem__(self, index):
        """Return the batch, late where it is slow."""
        if self.slow_s:
            time.sleep(self.slow_s)
        return self.batch


@dataclass
class Training:
    """A training loop whose places `before`, `amid` and `after` a fault may use."""

    sizes: Sizes
    before: object = None
    amid: object = None
    after: object = None
    batches: object = None
    width: int | None = None
    steps: int = STEPS

    def run(self):
        """Train; without batches the same one stays on the device."""
        device = "cuda" if HAS_GPU else "cpu"
        model = Model(self.sizes, self.amid).to(device, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        resident = torch.randn(
            self.sizes.rows, self.sizes.width, dtype=torch.bfloat16, device=device
        )
        batches = iter(self.batches) if self.batches else None
        for _ in range(self.steps):
            x = next(batches).to(device, non_blocking=True) if batches else resident
            if self.before:
                x = self.before(x)
            loss = model(x).float().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if self.after:
                self.after(loss)


def item_every_step(sizes, faulty):
    """Print the loss of every step."""
    Training(sizes, after=torch.Tensor.item if faulty else None).run()


def item_amid_the_forward(sizes, faulty):
    """Ask for a value amid the forward pass."""

    def check(x):
        if faulty and not x.isfinite().all().item():
            raise ValueError("not finite")
        return x

    Training(sizes, amid=check).run()


def mask_by_index(sizes, faulty):
    """Pick rows by a mask, which makes the host ask how many there are."""

    def mask(x):
        keep = x[:, 0] > -1e9
        return x[keep] if faulty else torch.where(keep[:, None], x, 0)

    Training(sizes, amid=mask).run()


def explicit_synchronize(sizes, faulty):
    """Wait for the GPU at the end of every step, as for a timer."""

    def stop_the_clock(loss):
        if faulty and HAS_GPU:
            torch.cuda.synchronize()

    Training(sizes, after=stop_the_clock).run()


def result_to_the_host(sizes, faulty):
    """Fetch a result in every step: at once, or into pinned memory without waiting."""
    pinned = torch.empty(1, dtype=torch.float32, pin_memory=HAS_GPU)

    def fetch(loss):
        if faulty:
            loss.detach().cpu()
        else:
            pinned.copy_(loss.detach().reshape(1), non_blocking=True)

    Training(sizes, after=fetch).run()


def slow_loader(sizes, faulty):
    """Make batches in the main process."""
    data = Batches(sizes, sizes.slow_s if faulty else 0.0)
    Training(sizes, batches=DataLoader(data, batch_size=None)).run()


def slow_workers(sizes, faulty):
    """Make batches in one worker that is too slow; the loss is logged, as everywhere."""
    data = Batches(sizes, 3 * sizes.slow_s if faulty else 0.0, pinned=False)
    loader = DataLoader(data, batch_size=None, num_workers=1, pin_memory=HAS_GPU)
    Training(sizes, batches=loader).run()


def pageable_batches(sizes, faulty):
    """Copy batches to the GPU from memory that is not pinned."""
    data = Batches(sizes, pinned=not faulty)
    Training(sizes, batches=DataLoader(data, batch_size=None)).run()


def empties_the_cache(sizes, faulty):
    """Give the allocator's memory back in every step and ask for it again."""

    def empty(loss):
        if faulty and HAS_GPU:
            torch.cuda.empty_cache()

    Training(sizes, after=empty).run()


def pins_memory_every_step(sizes, faulty):
    """Pin a buffer of another size in every step."""
    numbers = iter(range(1, 1000))
    kept = []

    def pin(x):
        if faulty and HAS_GPU:
            num_bytes = 64 * 2**20 + next(numbers) * 16 * 2**20
            kept.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
        return x

    Training(sizes, before=pin).run()


def kernels_too_short(sizes, faulty):
    """Use layers so narrow that their kernels are shorter than their launches."""
    small = Sizes(64, 64, 8 * sizes.layers, 0, 0)
    Training(small if faulty else sizes).run()


def python_amid_the_forward(sizes, faulty):
    """Compute in Python between two layers."""

    def think(x):
        if faulty:
            sum(i * i for i in range(sizes.numbers))
        return x

    Training(sizes, amid=think).run()


def operator_of_the_host(sizes, faulty):
    """Sort on the host between two layers."""
    values = torch.randn(4 * sizes.numbers)

    def sort(x):
        if faulty:
            values.sort()
        return x

    Training(sizes, amid=sort).run()


def sleeps_in_a_step(sizes, faulty):
    """Sleep amid the forward pass, as for a rate limit; stacks tell it from Python."""

    def throttle(x):
        if faulty:
            time.sleep(sizes.slow_s)
        return x

    Training(sizes, amid=throttle).run()


def waits_for_requests(sizes, faulty):
    """Answer requests one by one, which come slowly or are there already."""
    device = "cuda" if HAS_GPU else "cpu"
    model = Model(sizes).to(device, torch.bfloat16).eval()
    requests = queue.Queue()

    def ask():
        for _ in range(STEPS):
            if faulty:
                time.sleep(3 * sizes.slow_s)
            requests.put(torch.randn(sizes.rows, sizes.width, dtype=torch.bfloat16, device=device))

    client = threading.Thread(target=ask)
    client.start()
    if not faulty:
        client.join()
    with torch.no_grad():
        for _ in range(STEPS):
            model(requests.get())
    client.join()


def barrier_every_step(sizes, faulty):
    """Wait for the other ranks at the end of every step; one rank is enough to see the wait."""
    backend, store = "nccl" if HAS_GPU else "gloo", torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)

    def barrier(loss):
        if faulty:
            torch.distributed.barrier()

    Training(sizes, after=barrier).run()
    torch.distributed.destroy_process_group()


# Each workload and the cause of its fault; the second value: whether stacks are recorded.
CAUSES = {
    item_every_step: ("synchronization", False),
    item_amid_the_forward: ("synchronization", False),
    mask_by_index: ("synchronization", False),
    explicit_synchronize: ("synchronization", False),
    result_to_the_host: ("synchronization", False),
    slow_loader: ("data loading", False),
    slow_workers: ("data loading", False),
    pageable_batches: ("pageable copy", False),
    empties_the_cache: ("allocator", False),
    pins_memory_every_step: ("allocator", False),
    kernels_too_short: ("launch-bound", False),
    python_amid_the_forward: ("launch-bound", False),
    operator_of_the_host: ("launch-bound", False),
    sleeps_in_a_step: ("no work", True),
    waits_for_requests: ("no work", False),
    barrier_every_step: ("collective wait", False),
}
WORKLOADS = {workload.__name__: workload for workload in CAUSES}


def main():
    """Run one workload."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=WORKLOADS)
    parser.add_argument("--faulty", action="store_true", help="with its fault")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    torch.manual_seed(0)
    WORKLOADS[args.name](TINY if args.tiny else LARGE, args.faulty)


if __name__ == "__main__":
    main()
