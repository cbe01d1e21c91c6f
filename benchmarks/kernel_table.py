"""The table of every kernel beside its peers in docs/kernels.md, made from the results.

python benchmarks/kernel_table.py

A line for each kernel, pass and shape: what share of a copy's rate each provider reached, and the
best peer's time over ours; each number with the marker that a test holds against its result. What
was not measured stays empty. `SHOWN` says which shapes; all others are in the results.
"""

import argparse
import json
import sys

from evidence import RESULTS, ROOT

DOCUMENT = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- kernels beside their peers -->", "<!-- end -->"
PEERS = ("aten", "inductor", "liger", "quack", "eager")
SHOWN = {
    "rmsnorm": ("8192x2048", "8192x4096", "8192x8192", "32768x4096"),
    "add_rmsnorm": ("8192x4096", "32768x4096"),
    "swiglu": ("8192x14336", "4096x28672"),
    "cross_entropy": ("8192x32000", "8192x128256"),
    "adamw": ("1235814400",),
    "layernorm": ("8192x4096",),
    "rope": ("4x2048x32x8x128",),
    "softmax": ("4096x32000",),
    "quantize_fp8": ("8192x14336",),
}
PASSES = ("forward", "backward", "training")


def main(results=RESULTS, document=DOCUMENT):
    """Write the table into the document, between its two marks."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{document} has no {BEGIN} with {END} behind it")
    document.write_text(f"{before}{BEGIN}\n{table_of(results)}\n{END}{after}")


def table_of(results):
    """Return the table of all results that there are, as Markdown."""
    heads = ("kernel", "pass", "shape", "ours", *PEERS, "best peer's time over ours")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for kernel, shapes in SHOWN.items():
        for path in sorted(results.glob(f"{kernel}_h200_*.json"))[-1:]:
            rows = {one["name"]: one for one in json.loads(path.read_text())["rows"]}
            lines += lines_of(path, kernel, shapes, rows)
    return "\n".join(lines)


def lines_of(path, kernel, shapes, rows):
    """Yield a line for each pass and shape of a kernel that was measured."""
    for direction in PASSES:
        for shape in shapes:
            what = f"{kernel}-{direction}-{shape}"
            if what not in rows or rows[what]["value"] is None:
                continue
            names = (what, *(f"{what}-{peer}" for peer in PEERS), f"{what}-to-best")
            numbers = [cell_of(path, rows.get(name)) for name in names]
            yield "| " + " | ".join((f"`{kernel}`", direction, shape, *numbers)) + " |"


def cell_of(path, row):
    """Return a row's value with its marker, nothing where it was not measured."""
    if row is None or row["value"] is None:
        return ""
    launched = "" if row.get("is_in_graph", True) else " ¹"
    return f"{row['value']:.2f} <!-- result: {path.name}#{row['name']}.value -->{launched}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
