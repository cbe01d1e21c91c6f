"""Bring the numbers that README and docs quote of results up to date, each as precisely as before.

    python benchmarks/quote.py

rewrites those before a marker `<!-- result: FILE.json#ROW.FIELD -->` that differ from the result,
and lists them, and what is not known any more. What a sentence makes of a number is for a person
to read again.
"""

import json
import re

from evidence import RESULTS, ROOT

CLAIM = re.compile(
    r"(?P<number>-?\d[\d,]*(?:\.\d+)?)(?P<between>[^\d\n]*?"
    r"<!-- result: (?P<file>[\w.-]+\.json)#(?P<row>[\w-]+)\.(?P<field>\w+) -->)"
)


def value_of(claim):
    """Return what the result says now."""
    rows = json.loads((RESULTS / claim["file"]).read_text())["rows"]
    if claim["row"].isdigit():
        return rows[int(claim["row"])][claim["field"]]
    (found,) = [row for row in rows if row.get("name") == claim["row"]]
    return found[claim["field"]]


def as_written(number, value):
    """Return `value` with as many decimals as `number`, and commas where that had them."""
    decimals = len(number.partition(".")[2])
    group = "," if "," in number or len(number.partition(".")[0]) < 4 else ""
    # Rounded first, and 0 added: no 0 has a sign.
    return f"{round(value, decimals) + 0:{group}.{decimals}f}"


def main():
    """Rewrite every document."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:

        def renewed(claim, path=path):
            value = value_of(claim)
            if value is None:
                print(f"{path.name}: {claim['number']} is not known any more: {claim['row']}")
                return claim.group()
            now = as_written(claim["number"], value)
            if now != claim["number"]:
                print(f"{path.name}: {claim['number']} -> {now}  {claim['row']}.{claim['field']}")
            return now + claim["between"]

        text = path.read_text()
        path.write_text(CLAIM.sub(renewed, text))


if __name__ == "__main__":
    main()
