"""Score what kprof says of twelve patterns of late ranks: which ranks, in turn or always, and why.

    python benchmarks/rank_patterns.py             8, 64 and 1,024 simulated ranks
    python benchmarks/rank_patterns.py --tiny      one case of each pattern; no result

A case is one of `tests/rank_patterns.py`: kernels, launches and collectives of each rank on its own
clock, with or without numbers. A claim is a rank and a cause, or lateness in turn and a cause; of a
job without a late rank no claim is right. Precision: of the claims, the share that is true. Recall:
of the true claims, the share that kprof makes. An inconclusive cause is missed and not wrong.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence

sys.path.insert(0, str(ROOT))
from kprof.analyze.findings.rules.stragglers import LEAST_ROTATING_SHARE, LEAST_SHARE
from kprof.analyze.late_causes import find_late_causes
from kprof.analyze.late_ranks import find_lateness
from tests.rank_patterns import PATTERNS, opened, pattern_of

SOURCES = (
    "benchmarks/rank_patterns.py",
    "tests/rank_patterns.py",
    "kprof/analyze/late_causes.py",
    "kprof/analyze/late_ranks.py",
)
REACH = 0.95
# The tests are of lower seeds.
SEED = 1_000
# Number of ranks: cases of each pattern.
CASES = {8: 8, 64: 2}
MANY_RANKS, OF_MANY = 1_024, ("one", "none")
TURN = "in turn"


def truth_of(pattern):
    """Return the true claims of a case: late ranks with their cause, or lateness in turn."""
    who = [TURN] if pattern.is_in_turn else sorted(pattern.ranks)
    return {(one, pattern.cause) for one in who}


def claims_of(trace):
    """Return what kprof claims where the rule would report it, and when: seconds of analysis."""
    begin = time.perf_counter()
    found, causes = find_lateness(trace), find_late_causes(trace)
    took_s = time.perf_counter() - begin
    is_told = bool(found.stragglers) and found.lost_ns >= LEAST_SHARE * found.unit_ns
    is_told |= not found.stragglers and found.rotating_ns >= LEAST_ROTATING_SHARE * found.unit_ns
    claims = {(TURN if one.rank is None else one.rank, one.cause) for one in causes}
    return claims if is_told else set(), took_s


def counts_of(truth, claims):
    """Return how many claims are right, wrong and missed: of who is late, and of why."""
    known = {one for one in claims if one[1] != "inconclusive"}
    late, told = {who for who, _ in truth}, {who for who, _ in claims}
    return Counter(
        cases=1,
        exact=int(truth == claims),
        late_right=len(late & told),
        late_wrong=len(told - late),
        late_missed=len(late - told),
        why_right=len(truth & known),
        why_wrong=len(known - truth),
        why_missed=len(truth - known),
    )


def share(counts, of, other):
    """Return right over right and `other`; None where there is neither."""
    right = counts[f"{of}_right"]
    return right / (right + counts[other]) if right + counts[other] else None


def score(cases):
    """Return the rows of these cases: pairs of a number of ranks and a case."""
    by_name = {name: Counter() for name in PATTERNS}
    longest = Counter()
    for pattern in cases:
        claims, took_s = claims_of(opened(pattern))
        counts = counts_of(truth_of(pattern), claims)
        by_name[pattern.name] += counts
        longest[pattern.num_ranks] = max(longest[pattern.num_ranks], took_s)
        if not counts["exact"]:
            print(f"{pattern.name}, {pattern.num_ranks} ranks: {sorted(map(str, claims))}")
    total = sum(by_name.values(), Counter())
    rows = []
    for of, words in (("late", "who is late"), ("why", "who is late, and why")):
        precision, recall = share(total, of, f"{of}_wrong"), share(total, of, f"{of}_missed")
        rows.append(row(f"precision: {words}", precision, "of the claims", "higher", REACH))
        rows.append(row(f"recall: {words}", recall, "of true claims", "higher", REACH))
    for name, counts in by_name.items():
        if counts["cases"]:
            exact = counts["exact"] / counts["cases"]
            rows.append(row(name, exact, "of cases exactly right", "higher", REACH, **counts))
    for number, seconds in longest.items():
        rows.append(row(f"analysis of {number} ranks", seconds, "s, the longest", "lower"))
    return rows


def main():
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few cases; no result")
    parser.add_argument("--result", type=Path, help="[default: one in benchmarks/results]")
    args = parser.parse_args()
    sizes = {8: 1} if args.tiny else CASES
    cases = [
        pattern_of(name, number, SEED + seed)
        for number, times in sizes.items()
        for name in PATTERNS
        for seed in range(times)
    ]
    if not args.tiny:
        cases += [pattern_of(name, MANY_RANKS, SEED) for name in OF_MANY]
    rows = score(cases)
    for one in rows:
        print(f"{one['name']:34} {one['value']} {one['unit']}")
    if not args.tiny:
        path = args.result or RESULTS / "rank_patterns_cpu_2026-11.json"
        write_evidence(path, "simulated patterns of late ranks", rows, SOURCES)


if __name__ == "__main__":
    main()
