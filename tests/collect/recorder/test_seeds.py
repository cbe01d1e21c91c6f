"""Random numbers of a workload that depend on a given seed, whatever it sets itself."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

# Each seed in a process of its own, forked after what takes long in each: importing torch.
DRAWN = """
import os, sys
from kprof.collect.recorder.kprof_recorder.seeds import start_from
for seed in sys.argv[1:]:
    if not (child := os.fork()):
        start_from(int(seed))
        break
    os.waitpid(child, 0)
else:
    sys.exit()
import random
import numpy
import torch

def drawn():
    several = torch.rand(1).item(), random.random(), numpy.random.rand()
    return (*several, numpy.random.default_rng(5).random())

def set_seeds(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)

print(drawn())
for seed in (7, 7, 8):
    set_seeds(seed)
    print(drawn())
random.seed("a name")
print(random.random())
"""


def lines_for(*seeds):
    command = [sys.executable, "-c", DRAWN, *map(str, seeds)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [lines[at : at + 5] for at in range(0, 5 * len(seeds), 5)]


def test_the_same_seed_gives_the_same_numbers_and_another_one_others():
    first, again, other = lines_for(0, 0, 1)
    assert first == again
    assert all(one != two for one, two in zip(first[:4], other[:4], strict=True))
    # What the workload sets twice is the same twice, and not the next seed's.
    assert (first[1] == first[2], first[2] == first[3]) == (True, False)
    # A seed that is no number is the workload's own.
    assert first[4] == other[4]
