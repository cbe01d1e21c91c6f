"""Record real workloads on a GPU with `kprof run`: their traces, reports and one result file.

    python benchmarks/record_h200.py --out recorded

runs every script of `benchmarks/workloads/` unmodified, prints one row for each, and leaves in
the folder `recorded` the raw trace and the report of each and `runs_<gpu>_<yyyy-mm>.json`.
The workloads need torch, transformers and torchvision; they load no weights and no data.
`--tiny` makes them small enough for a machine without a GPU, to try the way.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from evidence import describe_gpu, row, what_ran, write_evidence

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = Path(__file__).resolve().parent / "workloads"
NAMES = sorted(path.stem for path in WORKLOADS.glob("*.py"))
# The installed program, as users have it, not this working tree.
KPROF = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
# Two steps keep a trace small enough for a repository.
OPTIONS = ("--skip", "5", "--steps", "2", "--force")
ANALYSIS = ("kprof/analyze/**/*.py",)
MEASURED = (
    *ANALYSIS,
    "kprof/collect/**/*.py",
    "benchmarks/workloads/*.py",
    "benchmarks/record_h200.py",
)

COLUMNS = (
    ("name", "workload", ""),
    ("exit_code", "exit", "d"),
    ("wall_s", "wall s", ".1f"),
    ("recorded_steps", "steps", "d"),
    ("step_ms", "step ms", ".2f"),
    ("overhead_percent", "overhead %", ".1f"),
    ("attributed_percent", "attributed %", ".2f"),
    ("modelled_percent", "modelled %", ".1f"),
    ("mfu_percent", "MFU %", ".1f"),
    ("mbu_percent", "MBU %", ".1f"),
    ("roofline_percent", "roofline %", ".1f"),
    ("busy_percent", "busy %", ".1f"),
    ("report_mib", "report MiB", ".2f"),
)


def record(name, out, tiny):
    """Run one workload under kprof, keep its trace and report, and return its row."""
    folder = out / f"{name}.kprof"
    script = (WORKLOADS / f"{name}.py").relative_to(ROOT)
    workload = [str(script), *(["--tiny"] if tiny else [])]
    started = time.perf_counter()
    done = subprocess.run(
        [KPROF, "run", *OPTIONS, "--out", str(folder), *workload],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    wall_s = time.perf_counter() - started
    (out / f"{name}.txt").write_text(done.stdout + "\n--- stderr ---\n" + done.stderr)
    figures = {"command": shlex.join(["kprof", "run", *OPTIONS, *workload])}
    if (folder / "report.html").is_file():
        keep(folder, name, out)
        figures |= figures_of(opened(folder))
        figures["report_mib"] = (folder / "report.html").stat().st_size / 2**20
    else:
        print(f"{name}: no report, see {out / name}.txt", file=sys.stderr)
    # What kprof promises first is to say where device time goes.
    attributed = figures.get("attributed_percent")
    figures |= {"exit_code": done.returncode, "wall_s": wall_s}
    return row(name, attributed, "% of device time attributed", "higher", **figures)


def analyzed_again(entry, out):
    """Return the row of a run that was recorded before, as today's analysis has it."""
    folder = out / f"{entry['name']}.kprof"
    subprocess.run([KPROF, "open", "--force", str(folder)], check=True, stdout=subprocess.DEVNULL)
    result = opened(folder)
    figures = figures_of(result)
    told = {"value": figures["attributed_percent"], "ceilings": result["ceilings"]["source"]}
    return {**entry, **figures, **told}


def rewrite(path, rows):
    """Put the rows into an earlier result, with the digests of the analysis.

    The recorder keeps the digests that it had then.
    """
    result = json.loads(path.read_text())
    result |= {"rows": rows, "ran": {**result["ran"], **what_ran(ANALYSIS)}}
    result["analyzed_again"] = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def keep(folder, name, out):
    """Copy the report and, packed as tightly as gzip can, the largest raw trace.

    What lies beside the trace, of compiled code and of captured graphs, goes with it.
    """
    shutil.copy(folder / "report.html", out / f"{name}.html")
    traces = sorted(folder.glob("raw/*/window-0.json.gz"), key=lambda path: path.stat().st_size)
    for path in sorted(traces[-1].parent.glob("*.json.gz")):
        kept = f"{name}.json.gz" if path == traces[-1] else f"{name}.{path.name}"
        content = gzip.decompress(path.read_bytes())
        # No name and no time inside: the same trace gives the same bytes.
        (out / kept).write_bytes(gzip.compress(content, compresslevel=9, mtime=0))


def opened(folder):
    """Return what `kprof open --json` says about a run."""
    command = [KPROF, "open", "--json", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def figures_of(result):
    """Return the row's figures; None where the run cannot tell."""
    ledger, recording = result["ledger"], result["recording"]
    shares = {name: share["value"] for name, share in result["utilisation"].items()}
    recorded_ns = recording["recorded_step_ns"]
    return {
        "recorded_steps": len(recording["steps_recorded"]),
        "step_ms": statistics.median(recorded_ns) / 1e6 if recorded_ns else None,
        "overhead_percent": percent(recording["overhead"]),
        "attributed_percent": percent(ledger["attributed_ns"], ledger["sum_ns"]),
        "modelled_percent": percent(result["coverage"]["modelled_share"]),
        "mfu_percent": percent(shares["mfu"]),
        "mbu_percent": percent(shares["mbu"]),
        "roofline_percent": percent(shares["roofline_share"]),
        "busy_percent": percent(shares["busy_share"]),
    }


def percent(part, whole=1):
    """Return a share in percent, None where it is unknown."""
    return 100 * part / whole if part is not None and whole else None


def print_table(rows):
    """Print the rows under their headers, unknown figures as a dash."""
    cells = [[header for _, header, _ in COLUMNS]]
    for entry in rows:
        values = [entry.get(key) for key, _, _ in COLUMNS]
        forms = [form for _, _, form in COLUMNS]
        cells.append(
            ["-" if v is None else format(v, f) for v, f in zip(values, forms, strict=True)]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *padded]))


def main():
    """Record the chosen workloads one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, required=True, help="folder for what is kept")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--again", type=Path, help="a result whose runs in --out to analyze again")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()

    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = json.loads(args.again.read_text())["rows"] if args.again else []
    again = {entry["name"]: entry for entry in known}
    rows = [
        analyzed_again(again[name], out) if args.again else record(name, out, args.tiny)
        for name in args.names
    ]
    print_table(rows)
    if args.again:
        rewrite(args.again, rows)
        return 0
    gpu = re.sub(r"nvidia|\W", "", (describe_gpu()["gpu"] or "cpu").lower())
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    write_evidence(
        out / f"runs_{gpu}_{month}.json",
        "kprof run on unmodified workloads: cost, attribution and utilisation",
        rows,
        MEASURED,
        commit=args.commit,
    )
    return max(entry["exit_code"] for entry in rows)


if __name__ == "__main__":
    sys.exit(main())
