"""What racecheck makes of two warpgroups that take turns, and of the same without turns.

python benchmarks/racecheck_turns.py

Both kernels have three groups of warps. Each stores a number of its own in memory, and none
stores anything in shared memory; Triton does, to tell warps what to do. Needs a Hopper GPU and
compute-sanitizer. What it reports of the second kernel, and not of the first, is the tool's.
"""

import subprocess
import sys

import torch

from kprof.kernels.tiles.gluon import gl, gluon, named_barrier_arrive, named_barrier_sync

BARRIER, THREADS, TURNS = gl.constexpr(9), gl.constexpr(256), gl.constexpr(4)
PROGRAMS = 264


def main():
    """Let the tool look at both kernels, and print what it says."""
    for name in KERNELS:
        command = ["compute-sanitizer", "--tool", "racecheck", sys.executable, __file__, name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [one for one in told.splitlines() if "access at" in one or "SUMMARY" in one]
        print(name, *lines, sep="\n    ")


@gluon.jit
def _put(out, WHO: gl.constexpr):
    gl.store(out + gl.program_id(0) * 3 + WHO, WHO + 1)


@gluon.jit
def _put_in_turns(out, WHO: gl.constexpr):
    if WHO == 1:
        named_barrier_arrive(BARRIER, THREADS)
    for _ in range(TURNS):
        named_barrier_sync(BARRIER + WHO, THREADS)
        named_barrier_arrive(BARRIER + 1 - WHO, THREADS)
    _put(out, WHO)
    if WHO == 0:
        named_barrier_sync(BARRIER, THREADS)


@gluon.jit
def apart(out) -> None:
    """Store, each group by itself."""
    gl.warp_specialize([(_put, (out, 0)), (_put, (out, 1)), (_put, (out, 2))], [4, 1], [240, 24])


@gluon.jit
def in_turns(out) -> None:
    """Store, the first two after they have taken turns."""
    gl.warp_specialize(
        [(_put_in_turns, (out, 0)), (_put_in_turns, (out, 1)), (_put, (out, 2))],
        [4, 1],
        [240, 24],
    )


KERNELS = {"apart": apart, "in_turns": in_turns}


def run(kernel):
    """Run a kernel once, and see that all was stored."""
    out = torch.zeros(PROGRAMS, 3, dtype=torch.int32, device="cuda")
    kernel[(PROGRAMS,)](out, num_warps=4, maxnreg=168)
    assert out.tolist() == PROGRAMS * [[1, 2, 3]]


if __name__ == "__main__":
    run(KERNELS[sys.argv[1]]) if sys.argv[1:] else main()
