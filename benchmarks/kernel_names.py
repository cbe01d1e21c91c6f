"""How many kernel names are of the kind that a reader gave them: by library.

python benchmarks/kernel_names.py [--developed]

The names are those of tests/data/kernel_names.tsv. All were labelled before the rules changed;
the rules were written with those whose part is "developed" (--developed). Each library has the
same weight.
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from kprof.analyze.classify import find_kind

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "data" / "kernel_names.tsv"


class Labelled(NamedTuple):
    """A kernel's name and the kind that a reader gave it."""

    library: str
    kind: str
    name: str
    source: str
    """The repository, "profile" for a published profile, empty where it was not noted."""
    part: str
    """"developed" where the rules were written with the name, else "held out"."""


def corpus(part):
    """Return the labelled names of one part."""
    with CORPUS.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [label for row in rows if (label := Labelled(**row)).part == part]


def score(labels):
    """Return the right share of each library, and the wrong labels with the kind found."""
    found, wrong = defaultdict(list), []
    for label in labels:
        kind = find_kind(label.name, "kernel", None, None)
        found[label.library].append(kind == label.kind)
        if kind != label.kind:
            wrong.append((label, kind))
    return {library: sum(right) / len(right) for library, right in found.items()}, wrong


def main():
    """Print the score of one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--developed", action="store_true", help="the part that rules know")
    args = parser.parse_args()
    labels = corpus("developed" if args.developed else "held out")
    shares, wrong = score(labels)
    for library, share in sorted(shares.items()):
        print(f"{library:28} {share:7.1%}")
    mean = sum(shares.values()) / len(shares)
    print(f"{'all, of equal weight':28} {mean:7.1%}  {len(labels)} names, {len(shares)} libraries")
    if args.developed:
        for label, kind in wrong:
            print(f"{label.library}: {label.kind}, not {kind}: {label.name[:150]}")


if __name__ == "__main__":
    main()
