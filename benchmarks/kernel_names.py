"""How many kernel names are of the kind that a reader gave them: by library.

python benchmarks/kernel_names.py [--developed] [--write]

The names are those of tests/data/kernel_names.tsv. All were labelled before the rules changed;
the rules were written with those whose part is "developed" (--developed). The rest are held out,
by the round that collected them. Each library has the same weight. --write keeps the score of the
names that are held out, with the names that a second without caches classifies: score a round
once, before a rule is written with it.
"""

import argparse
import csv
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from kprof.analyze.attribution import kinds
from kprof.analyze.attribution.kinds import OTHER, find_kind, parse

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "data" / "kernel_names.tsv"
RESULT = ROOT / "benchmarks" / "results" / "kernel_names_cpu_2026-11.json"
SOURCES = tuple(
    f"code/{path}" for path in ("benchmarks/kernel_names.py", "kprof/analyze/attribution/kinds.py")
)
REACH = 97  # %
ROUNDS = 7


class Labelled(NamedTuple):
    """A kernel's name and the kind that a reader gave it."""

    library: str
    kind: str
    name: str
    source: str
    """The repository, "profile" for a published profile, empty where it was not noted."""
    part: str
    """"developed" where the rules were written with the name, else "held out" and its round."""


def corpus(part):
    """Return the labelled names of one part: "developed", "held out", or of one round of these."""
    with CORPUS.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [label for row in rows if (label := Labelled(**row)).part.startswith(part)]


def score(labels):
    """Return the right share of each library, and the wrong labels with the kind found."""
    found, wrong = defaultdict(list), []
    for label in labels:
        kind = find_kind(label.name, "kernel", None, None)
        found[label.library].append(kind == label.kind)
        if kind != label.kind:
            wrong.append((label, kind))
    return {library: sum(right) / len(right) for library, right in found.items()}, wrong


def wrong_share(labels, wrong):
    """Return the share of names with a wrong kind, `other` not counted, libraries of equal weight.

    A name that is `other` by mistake misleads nobody: a wrong kind does.
    """
    names, misled = defaultdict(int), defaultdict(int)
    for label in labels:
        names[label.library] += 1
    for label, kind in wrong:
        misled[label.library] += kind != OTHER
    return sum(misled[library] / names[library] for library in names) / len(names)


def by_round(labels):
    """Return the right share of each round, libraries of equal weight, and its names."""
    rounds = defaultdict(list)
    for label in labels:
        rounds[label.part].append(label)
    shares = {part: score(names)[0].values() for part, names in sorted(rounds.items())}
    return {part: (sum(right) / len(right), len(rounds[part])) for part, right in shares.items()}


def names_per_second(labels):
    """Return how many names a second of this process classifies: the best round, caches empty."""
    seconds = []
    for _ in range(ROUNDS):
        for cached in (kinds._match, kinds._of_words, kinds._row, kinds._split, parse):
            cached.cache_clear()
        begin = time.process_time()
        for label in labels:
            find_kind(label.name, "kernel", None, None)
        seconds.append(time.process_time() - begin)
    return len(labels) / min(seconds)


def write(labels, shares, mean, misled):
    """Keep the score of the part that is held out: a row each library, all of them first."""
    from evidence import row, write_evidence

    everything = [label for part in ("developed", "held out") for label in corpus(part)]
    count = defaultdict(int)
    for label in labels:
        count[label.library] += 1
    rows = [
        row(
            "all",
            100 * mean,
            "%",
            "higher",
            REACH,
            num_names=len(labels),
            num_libraries=len(shares),
        ),
        *(
            row(part, 100 * share, "%", "higher", num_names=names)
            for part, (share, names) in by_round(labels).items()
        ),
        row("wrong kind, other not counted", 100 * misled, "%", "lower"),
        *(
            row(library, 100 * share, "%", "higher", num_names=count[library])
            for library, share in sorted(shares.items())
        ),
    ]
    speed = round(names_per_second(everything))
    what = "Kinds of kernel names that were held out, each library of equal weight"
    write_evidence(RESULT, what, rows, SOURCES, names_per_second=speed)


def main():
    """Print the score of one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--developed", action="store_true", help="the part that rules know")
    parser.add_argument("--write", action="store_true", help="keep the held-out part's score")
    args = parser.parse_args()
    labels = corpus("developed" if args.developed else "held out")
    shares, wrong = score(labels)
    for library, share in sorted(shares.items()):
        print(f"{library:28} {share:7.1%}")
    mean = sum(shares.values()) / len(shares)
    print(f"{'all, of equal weight':28} {mean:7.1%}  {len(labels)} names, {len(shares)} libraries")
    misled = wrong_share(labels, wrong)
    for part, (share, names) in by_round(labels).items():
        print(f"{part:28} {share:7.1%}  {names} names")
    print(f"{'wrong, other not counted':28} {misled:7.1%}")
    if args.write and not args.developed:
        write(labels, shares, mean, misled)
    if args.developed:
        for label, kind in wrong:
            print(f"{label.library}: {label.kind}, not {kind}: {label.name[:150]}")


if __name__ == "__main__":
    main()
