"""Write the tables of docs/ that follow from the code.

python benchmarks/docs_tables.py [--check]

The table of rules in docs/findings.md holds the front matter of each playbook. With --check it
writes nothing and exits with 1 where a table is not current.
"""

import argparse
import sys
from pathlib import Path

from kprof.report.playbooks import all_playbooks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "findings.md"
START, END = "<!-- rules: written by `make docs` from playbooks/ -->\n", "<!-- end of rules -->\n"


def rules_table():
    """Return the rows of all rules, in the order of their names."""
    rows = [f"| `{page.name}` | {page.fires_on} | {page.threshold} |\n" for page in all_playbooks()]
    return "".join(["| rule | fires on | threshold, and why |\n", "|---|---|---|\n", *rows])


def with_table(text):
    """Return the page with the table of today's rules between its marks."""
    before, rest = text.split(START)
    return f"{before}{START}{rules_table()}{END}{rest.split(END)[1]}"


def main():
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = PAGE.read_text()
    if parser.parse_args().check:
        sys.exit(text != with_table(text))
    PAGE.write_text(with_table(text))


if __name__ == "__main__":
    main()
