"""How many secrets and identities redaction hides, and how many harmless commands it alters.

python benchmarks/redaction.py [--each N]

The texts are drawn from seeds by tests/secrets_drawn.py. The harmless commands are those of
tests/data/harmless_commands.tsv, from public repositories.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kprof.report.redaction import without_identities, without_secrets
from tests.secrets_drawn import (
    HELD_OUT_IDENTITIES,
    HELD_OUT_SECRETS,
    IDENTITIES,
    SECRETS,
    drawn,
)

HARMLESS = Path(__file__).resolve().parent.parent / "tests" / "data" / "harmless_commands.tsv"
GROUPS = (
    ("secrets, known kinds", SECRETS, without_secrets),
    ("secrets, kinds held out", HELD_OUT_SECRETS, without_secrets),
    ("identities, known kinds", IDENTITIES, without_identities),
    ("identities, kinds held out", HELD_OUT_IDENTITIES, without_identities),
)


def main():
    """Print the share of texts that show nothing hidden, and of harmless lines that change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="texts of each kind [3]")
    args = parser.parse_args()
    for title, kinds, clean in GROUPS:
        texts = drawn(kinds, args.each)
        leaks = [one.kind for one in texts if any(h in clean(one.text) for h in one.hidden)]
        share = 1 - len(leaks) / len(texts)
        print(f"{title:27} {share:7.1%} hidden of {len(texts):,} texts, {len(kinds)} kinds")
        for kind in sorted(set(leaks)):
            print(f"  {kind}: {leaks.count(kind)} of {args.each} shown")
    lines = [line.split("\t", 1)[1] for line in HARMLESS.read_text().splitlines()]
    altered = [line for line in lines if without_secrets(line) != line]
    print(f"{'harmless commands':27} {len(altered) / len(lines):7.1%} altered of {len(lines)}")


if __name__ == "__main__":
    main()
