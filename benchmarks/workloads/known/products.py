"""Multiply the same matrices again and again, `count` times a step."""

import argparse

import torch

import kprof

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--size", type=int, default=4096)
args = parser.parse_args()

torch.manual_seed(0)
on_gpu = torch.cuda.is_available()
where = {"device": "cuda", "dtype": torch.bfloat16} if on_gpu else {}
a, b = (torch.randn(args.size, args.size, **where) for _ in "ab")
count = 50
for _ in range(args.steps):
    with kprof.range("step"):
        for _ in range(count):
            torch.mm(a, b)
