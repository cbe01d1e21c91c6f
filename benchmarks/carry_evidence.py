"""Carry committed results over to another name of what they ran.

python benchmarks/carry_evidence.py OLD NEW

OLD and NEW are labels as results hold them under `ran`, such as code/kprof/timing.py. Where a
result holds OLD with the digest that NEW has today, it holds NEW from then on. A result whose
digest differs stays as it is, and stale.
"""

import argparse
import json

from evidence import RESULTS, digest_today


def main():
    """Rewrite each result that can be carried over; print which."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    args = parser.parse_args()
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if carried(result, args.old, args.new):
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
            print(path.name)


def carried(result, old, new):
    """Rename a label of a result where the digest is the same; return whether it was."""
    digest = result["ran"].get(old)
    if digest is None or digest != digest_today(new):
        return False
    del result["ran"][old]
    result["ran"] = dict(sorted({**result["ran"], new: digest}.items()))
    return True


if __name__ == "__main__":
    main()
