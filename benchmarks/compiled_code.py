"""The compiled code of every measured kernel configuration, as digests that renaming keeps.

python benchmarks/compiled_code.py [KERNEL ...] [--check] [--at-once 2]

Each of our providers is compiled for sm_90a, without a GPU, on each shape that its kernel measures,
forward and with gradients. A digest is of the PTX, without names, comments and debug information,
and of the launch: grid, arguments that are no tensors, and Triton's options. Each configuration is
compiled in a process of its own. On a host without a GPU, switches that ask the GPU (such as
programmatic dependent launch) have the value of the host.

Writes tests/golden/compiled_code.json; with --check it writes nothing and names what differs.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tests" / "golden" / "compiled_code.json"
DTYPE = "bfloat16"
# A Gluon kernel of attention takes a minute on one slow core.
LONGEST_S = 600


def main():
    """Compile the kernels named, or all, and write or compare the digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    parser.add_argument("--at-once", type=int, default=2, help="processes that compile")
    args = parser.parse_args()
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"configurations": {}}
    made = digests_of(args.kernels, args.at_once)
    before = {
        name: one
        for name, one in stored["configurations"].items()
        if not args.kernels or name.split("/")[0] in args.kernels
    }
    differing = sorted(name for name in {*made, *before} if made.get(name) != before.get(name))
    for name in differing:
        print(f"{name}: {before.get(name)} -> {made.get(name)}")
    if args.check:
        sys.exit(int(bool(differing)))
    kept = {name: one for name, one in stored["configurations"].items() if name not in before}
    told = {"triton": triton_version(), "target": "sm_90a", "configurations": {**kept, **made}}
    STORED.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


def digests_of(kernels, at_once):
    """Return the digest of each configuration of these kernels, or of all; a failure's reason."""
    # Importing torch and hashing Triton once serves all processes, which are forked.
    configurations = configurations_of(kernels)
    context = get_context("fork")

    def compiled(configuration):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_compile, args=(configuration, sender))
        process.start()
        sender.close()
        try:
            told = receiver.recv() if receiver.poll(LONGEST_S) else "it did not end in time"
        except EOFError:
            process.join()
            told = f"its process ended with {process.exitcode}"
        process.kill()
        return name_of(configuration), told

    with ThreadPoolExecutor(at_once) as pool:
        return dict(pool.map(compiled, configurations))


def configurations_of(kernels):
    """Return kernel, provider, shape and pass of all that is measured of our providers."""
    from kprof.kernels import OURS, all_kernels

    found = []
    for name, kernel in all_kernels().items():
        if kernels and name not in kernels:
            continue
        passes = ("forward", "training") if kernel.differentiable else ("forward",)
        ours = [one.name for one in kernel.providers if one.name.startswith(OURS)]
        found += [
            (name, provider, shape, direction)
            for provider in ours
            for shape in kernel.shapes
            for direction in passes
        ]
    return found


def name_of(configuration):
    """Return a configuration as KERNEL/PROVIDER/SHAPE/PASS."""
    name, provider, shape, direction = configuration
    return f"{name}/{provider}/{'x'.join(map(str, shape))}/{direction}"


def _compile(configuration, sender):
    """Send the digest of one configuration's kernels; a failure ends the process with its trace."""
    binaries = binaries_of(*configuration)
    sender.send(digest_of(binaries) if binaries else "it launches no kernel of Triton")
    # Threads of Triton's must not keep the process.
    os._exit(0)


def binaries_of(name, provider, shape, direction):
    """Return what one pass of a provider on tensors of this shape launches, compiled."""
    import torch

    from kprof.kernels import kernel_named
    from kprof.kernels.bench.ahead import compile_ahead
    from kprof.kernels.bench.measure import subject_of
    from kprof.kernels.correctness.subject import Case

    kernel = kernel_named(name)
    function = kernel.provider(provider).load()
    draw = _undrawn()(Case(shape, DTYPE), subject_of(kernel))
    given = kernel.inputs(shape, draw)

    def run():
        if direction == "forward":
            with torch.no_grad():
                return function(*given)
        inputs = [given[i].requires_grad_() for i in kernel.differentiable]
        results = function(*given)
        results = results if isinstance(results, tuple | list) else [results]
        results = [one for one in results if one.requires_grad]
        gradients = [torch.empty_like(one) for one in results]
        return torch.autograd.grad(results, inputs, gradients, allow_unused=True)

    return compile_ahead(run)


def _undrawn():
    """Return what makes tensors of the right shape whose memory is never touched."""
    import torch

    from kprof.kernels.correctness.inputs import Draw

    class Undrawn(Draw):
        def _normal(self, shape):
            return torch.empty(shape, dtype=self.dtype)

        def __call__(self, *shape):
            return self._normal(shape)

        def plain(self, *shape, scale=1.0, shift=0.0):
            return self._normal(shape)

    return Undrawn


def digest_of(binaries):
    """Return one digest of all kernels of a pass, in the order in which they are launched."""
    found = hashlib.sha256(triton_version().encode())
    for one in binaries:
        launch = (one.launch.grid, one.launch.scalars, one.launch.options)
        found.update(repr(launch).encode() + normalised(one.ptx).encode())
    return found.hexdigest()[:16]


def normalised(ptx):
    """Return PTX that does not depend on names, files, lines and comments."""
    code = ptx.partition("\t.section\t.debug")[0]
    code = re.sub(r"//[^\n]*", "", code)
    code = re.sub(r"(?m)^\s*\.(loc|file)\b.*$", "", code)
    functions = re.findall(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$.]+)\s*\(", code)
    for number, name in enumerate(dict.fromkeys(functions)):
        code = re.sub(rf"(?<![\w$.]){re.escape(name)}(?=_param_\d|_|\b)", f"function{number}", code)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def triton_version():
    """Return the version that compiles."""
    import triton

    return triton.__version__


if __name__ == "__main__":
    main()
