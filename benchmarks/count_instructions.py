"""Count the instructions of PyTorch's kernels that address every element by itself.

    python benchmarks/count_instructions.py

compiles loops as PyTorch's `gpu_kernel` makes them, around the headers of the installed PyTorch
(OffsetCalculator.cuh, DynamicCast.h, Float8_e4m3fn.h), for compute capability 9.0, and walks
through the machine code for 1 to 4 dimensions: no GPU is needed, but nvcc, the headers of the CUDA
runtime and CCCL, and nvdisasm (of CUDA, or the one that comes with Triton). What is written to
`benchmarks/results/instructions_sm90_<yyyy-mm>.json` is what `kprof/analyze/roofline/bound.py` says
at least; a test compares the two.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence

INCLUDE = Path(torch.__file__).parent / "include"
OPTIONS = (
    *("-std=c++20", "-arch=sm_90", "-cubin", "--expt-relaxed-constexpr", "-w"),
    # CCCL may be of another release than nvcc.
    "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK",
)
DIMENSIONS = (1, 2, 3, 4)
MOST_LOADS = 8
# As in c10/core/ScalarType.h: what a cast is looked up for.
FLOAT, BFLOAT16 = 6, 15
FRAME = """
#include <ATen/cuda/detail/OffsetCalculator.cuh>
#include <c10/core/DynamicCast.h>
#include <c10/util/Float8_e4m3fn.h>
using c10::BFloat16;

template <int threads, int unrolled, class Body>
__launch_bounds__(threads, 4) __global__ void by_itself(int size, Body body) {
  int place = threads * unrolled * blockIdx.x + threadIdx.x;
#pragma unroll
  for (int turn = 0; turn < unrolled; ++turn) {
    if (place < size) {
      body(place);
      place += threads;
    }
  }
}
"""
BODY = """
struct %(name)s {
  %(types)s
  OffsetCalculator<%(operands)d> offsets;
  char* data[%(operands)d];
  %(number)s
  __device__ void operator()(int place) const {
    auto at = offsets.get(place);
    %(body)s
  }
};
template __global__ void by_itself<128, %(unrolled)d, %(name)s>(int, %(name)s);
"""
FP8 = """
template <class T> struct alignas(4 * sizeof(T)) Four { T values[4]; };

template <class From>
__launch_bounds__(128) __global__ void to_fp8(int size, char* to, char* from) {
  if (size < 1024 * ((int)blockIdx.x + 1)) return;
  auto source = (const Four<From>*)((From*)from + 1024 * (int)blockIdx.x);
  auto target = (Four<c10::Float8_e4m3fn>*)((c10::Float8_e4m3fn*)to + 1024 * (int)blockIdx.x);
  Four<From> read[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) read[i] = source[threadIdx.x + 128 * i];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Four<c10::Float8_e4m3fn> made;
#pragma unroll
    for (int j = 0; j < 4; ++j) made.values[j] = c10::Float8_e4m3fn(float(read[i].values[j]));
    target[threadIdx.x + 128 * i] = made;
  }
}
template __global__ void to_fp8<float>(int, char*, char*);
template __global__ void to_fp8<BFloat16>(int, char*, char*);
"""


def sources():
    """Return the program, and for each of its kernels operands, unrolling and a label."""
    kernels, texts = {}, [FRAME, FP8]
    for unrolled, kind in ((4, "uint16_t"), (2, "uint32_t")):
        for operands in range(1, 6):
            read = " ^ ".join(f"*({kind}*)(data[{i}] + at[{i}])" for i in range(1, operands))
            body = f"*({kind}*)(data[0] + at[0]) = {read or '7'};"
            name = f"Moves{operands}By{unrolled}"
            kernels[name] = (operands, unrolled, "moved")
            texts.append(filled(name, operands, unrolled, body))
    read = [f"c10::fetch_and_cast<BFloat16>(types[{i}], data[{i}] + at[{i}])" for i in (1, 2)]
    store = "c10::cast_and_store<BFloat16>(types[0], data[0] + at[0], %s);"
    plain = [f"float(*(BFloat16*)(data[{i}] + at[{i}]))" for i in (1, 2)]
    other = "*(BFloat16*)(data[2] + at[2])"
    target = "*(BFloat16*)(data[0] + at[0]) = %s;"
    chosen = "*(bool*)(data[1] + at[1]) ? *(float*)(data[2] + at[2]) : *(float*)(data[3] + at[3]);"
    bodies = {
        "Scales": (2, target % f"{plain[0]} * number", "scaled"),
        "Holds": (
            3,
            target % f"{plain[0]} <= number ? BFloat16(0.0f) : {other}",
            "held at a threshold",
        ),
        "Adds": (3, target % f"{plain[0]} + number * {plain[1]}", "added"),
        "Chooses": (4, f"*(float*)(data[0] + at[0]) = {chosen}", "chosen"),
        "Casts": (2, store % read[0], "cast"),
        "Divides": (3, target % f"{plain[0]} / {plain[1]}", "divided"),
        "CastsAndDivides": (3, store % f"float({read[0]}) / float({read[1]})", "cast and divided"),
    }
    for name, (operands, body, label) in bodies.items():
        # As PyTorch does: results of four bytes two by two.
        unrolled = 2 if "(float*)(data[0]" in body else 4
        kernels[name] = (operands, unrolled, label)
        texts.append(filled(name, operands, unrolled, body))
    return "".join(texts), kernels


def filled(name, operands, unrolled, body):
    """Return the text of one kernel."""
    types = f"c10::ScalarType types[{operands}];" if "types" in body else ""
    number = "float number;" if "number" in body else ""
    known = {"name": name, "operands": operands, "unrolled": unrolled, "body": body}
    return BODY % {**known, "types": types, "number": number}


def machine_code(program, nvcc, nvdisasm, include):
    """Return each kernel's machine code: labels and instructions, in order."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "program.cu", Path(folder) / "program.cubin"
        source.write_text(program)
        paths = [f"-I{path}" for path in (*include, INCLUDE)]
        subprocess.run([nvcc, *OPTIONS, *paths, "-o", str(binary), str(source)], check=True)
        told = subprocess.run(
            [nvdisasm, "-c", str(binary)], check=True, capture_output=True, text=True
        )
    kernels, current = {}, []
    for line in told.stdout.splitlines():
        if found := re.match(r"\.text\.(\S+):", line):
            current = kernels.setdefault(found[1], [])
        elif found := re.match(r"(\.L_x_\d+):", line) or re.match(
            r"\s+/\*\w+\*/\s+(.*?)\s*;", line
        ):
            current.append(found[1])
    return kernels


class Walk:
    """One thread's way through a kernel: all is in bounds, every value a normal number."""

    def __init__(self, code, dimensions, types):
        self.code = code
        self.labels = {line: place for place, line in enumerate(code) if line.startswith(".")}
        # What is compared, in turn: dimensions, then the type of each operand, the result last.
        self.compared = (dimensions, *types)
        self.turn = 0
        self.predicates = {}

    def count(self):
        """Return how many instructions are issued before the thread ends."""
        place = number = 0
        while True:
            line = self.code[place]
            place += 1
            if line.startswith("."):
                continue
            number += 1
            guard, name, rest = re.match(r"(?:@(!?U?P\w+) )?\s*(\S+)\s*(.*)", line).groups()
            is_done = guard is None or self.holds(guard)
            if name.startswith("ISETP") and is_done:
                self.compare(name, [part.strip() for part in rest.split(",")])
            elif name.startswith("LDG"):
                self.turn = max(self.turn, 1) + 1
            elif name.startswith("STG"):
                self.turn = 0
            elif name.startswith("BRA") and is_done:
                place = self.labels[re.search(r"`\((\S+?)\)", line)[1]]
            elif name.startswith("EXIT") and is_done:
                return number

    def holds(self, guard):
        """Tell whether a predicate is true; one that nothing here sets is a rare case's."""
        known = self.predicates.get(guard.lstrip("!"))
        return False if known is None else known != guard.startswith("!")

    def compare(self, name, operands):
        """Set a predicate from the comparison of what is known with a constant."""
        constant = operands[3].replace("RZ", "0x0")
        if not re.fullmatch(r"0x[0-9a-f]+", constant):
            self.predicates[operands[0]] = False
            return
        how = name.split(".")[1]
        # Nobody asks whether there are more dimensions: here a type is looked up.
        if how == "GT":
            self.turn = max(self.turn, 1)
        known, other = self.compared[self.turn], int(constant, 16)
        self.predicates[operands[0]] = {
            "NE": known != other,
            "EQ": known == other,
            "GT": known > other,
            "GE": known >= other,
        }[how]


def counted(code, kernels):
    """Return the rows of the result."""
    rows = []
    for name, (operands, unrolled, label) in kernels.items():
        (its,) = (lines for told, lines in code.items() if re.search(rf"\d{name}E", told))
        types = (BFLOAT16, *[FLOAT] * (operands - 2), BFLOAT16)
        for dimensions in DIMENSIONS:
            number = Walk(its, dimensions, types).count() / unrolled
            known = {"operands": operands, "dimensions": dimensions, "unrolled": unrolled}
            rows.append(
                row(
                    f"{label}: operands {operands}, dimensions {dimensions}, unrolled {unrolled}",
                    number,
                    "instructions per element",
                    "lower",
                    **known,
                    kernel=label,
                )
            )
    return rows


def of_fp8(code):
    """Return the rows of conversions: overflow, and what is no number, are branches not taken."""
    return [
        row(
            f"to FP8 from {'float' if 'IfE' in name else 'bfloat16'}",
            Walk([line for line in lines if "@P0 BRA" not in line], 0, [0] * MOST_LOADS).count()
            / 8,
            "instructions per element",
            "lower",
            kernel="to FP8",
        )
        for name, lines in code.items()
        if "to_fp8" in name
    ]


def main():
    """Compile, count and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    parser.add_argument("--include", type=Path, action="append", default=[])
    parser.add_argument("--result", type=Path, help="the file to write")
    chosen = parser.parse_args()
    program, kernels = sources()
    code = machine_code(program, chosen.nvcc, chosen.nvdisasm, chosen.include)
    rows = [*counted(code, kernels), *of_fp8(code)]
    for one in rows:
        print(f"{one['name']:60s} {one['value']}")
    release = subprocess.run([chosen.nvcc, "--version"], check=True, capture_output=True, text=True)
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    write_evidence(
        chosen.result or RESULTS / f"instructions_sm90_{month}.json",
        "instructions of kernels that address every element by itself, in machine code",
        rows,
        ("kprof/analyze/roofline/bound.py", "benchmarks/count_instructions.py"),
        versions={"nvcc": re.search(r"V([\d.]+)", release.stdout)[1]},
    )


if __name__ == "__main__":
    main()
