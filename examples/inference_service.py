"""Serve requests in batches, and say how many met their deadline.

Requests arrive at random; a batch takes what waits, up to a limit. Each batch is one call of the
model, which is what kprof takes for a step when no optimizer is there.

Profile it:  kprof run examples/inference_service.py
"""

import argparse
import random
import time

import torch
from torch import nn


def build_ranker(width):
    """Return a net that scores one request, given as a bag of words."""
    return nn.Sequential(
        nn.EmbeddingBag(10_000, width),
        nn.Linear(width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 1),
    )


def arrivals(num_requests, per_second, seed=0):
    """Return when each request arrives, in seconds from the start."""
    dice, moment, moments = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        moment += dice.expovariate(per_second)
        moments.append(moment)
    return moments


@torch.inference_mode()
def serve(model, moments, largest_batch, device):
    """Answer every request and return its latency in seconds."""
    latencies, first, opened = [], 0, time.perf_counter()
    while first < len(moments):
        now = time.perf_counter() - opened
        if moments[first] > now:
            time.sleep(moments[first] - now)
            continue
        waiting = [m for m in moments[first : first + largest_batch] if m <= now]
        words = torch.randint(10_000, (len(waiting), 32)).to(device)
        model(words).tolist()
        answered = time.perf_counter() - opened
        latencies += [answered - moment for moment in waiting]
        first += len(waiting)
    return latencies


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--deadline", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--batch", type=int, default=16, help="most requests in a batch")
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_ranker(args.width).to(device).eval()
    latencies = sorted(serve(model, arrivals(args.requests, args.rate), args.batch, device))
    in_time = sum(latency <= args.deadline / 1e3 for latency in latencies)
    tail = latencies[int(0.99 * (len(latencies) - 1))]
    print(f"{in_time} of {args.requests} within {args.deadline:g} ms; 99 % in {tail * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
