"""How many kernel names are of the kind that somebody who read them says: by library.

python benchmarks/kernel_names.py [--developed]

The names are those of tests/data/kernel_names.tsv. A hash of the name holds one half out; the
rules were written with the other half (--developed). Each library has the same weight.
"""

import argparse
import csv
import hashlib
from collections import defaultdict
from pathlib import Path

from kprof.analyze.classify import find_kind

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "data" / "kernel_names.tsv"


def is_held_out(name):
    """Tell whether the rules were written without a look at this name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 1


def corpus():
    """Return library, kind and name of every kernel."""
    with CORPUS.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["library"], row["kind"], row["name"]) for row in rows]


def score(rows):
    """Return of each library the share that is right, and the rows that are not."""
    found, wrong = defaultdict(list), []
    for library, kind, name in rows:
        told = find_kind(name, "kernel", None, None)
        found[library].append(told == kind)
        if told != kind:
            wrong.append((library, kind, told, name))
    return {library: sum(right) / len(right) for library, right in found.items()}, wrong


def main():
    """Print the score of one half."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--developed", action="store_true", help="the half that rules know")
    args = parser.parse_args()
    rows = [row for row in corpus() if is_held_out(row[2]) != args.developed]
    shares, wrong = score(rows)
    for library, share in sorted(shares.items()):
        print(f"{library:24} {share:7.1%}")
    mean = sum(shares.values()) / len(shares)
    print(f"{'all, of equal weight':24} {mean:7.1%}  {len(rows)} names, {len(shares)} libraries")
    if args.developed:
        for library, kind, told, name in wrong:
            print(f"{library}: {kind}, not {told}: {name[:150]}")


if __name__ == "__main__":
    main()
