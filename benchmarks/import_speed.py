"""How long `kprof open` takes on a large trace, and how much memory, beside HolisticTraceAnalysis.

    python benchmarks/import_speed.py --peer-python /path/to/venv/bin/python

The trace is made by repeating a recorded one, so that names, layout and the mix of events are
real. The peer, and `json.loads` of the same bytes, are measured by the same clock and the same
reading of memory, in turn with `kprof open`. CPU time counts all processes of a command; unlike
wall time it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evidence import row, write_evidence

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "import_speed_cpu_2026-11.json"
# What the figures depend on.
SOURCES = (
    "benchmarks/import_speed.py",
    "benchmarks/evidence.py",
    "kprof/opened.py",
    "kprof/storage.py",
    "kprof/analyze/**/*.py",
    "kprof/collect/readers/kineto/reader.py",
    "kprof/collect/readers/kineto/*.py",
    "kprof/report/html.py",
)
PEER = "HolisticTraceAnalysis"
PEER_PROGRAM = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
print(analysis.get_temporal_breakdown(visualize=False))
print(analysis.get_gpu_kernel_breakdown(visualize=False))
"""
JSON_PROGRAM = """
import json, sys
with open(sys.argv[1], "rb") as file:
    json.loads(file.read())
"""
PHASES_PROGRAM = """
import json, resource, sys, time
from pathlib import Path
from kprof.opened import open_run
def cpu_s():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
moments = [("starting", 0.0)]
run = open_run([Path(sys.argv[1])], Path(sys.argv[2]), force=True,
               progress=lambda stage: moments.append((stage, cpu_s())))
ends = [*(at for _, at in moments[1:]), cpu_s()]
print(json.dumps({stage: round(end - at, 2) for (stage, at), end in zip(moments, ends)}))
"""
# At least so many times as fast as the peer, in at most this part of its memory.
TIMES_FASTER = 10
PART_OF_MEMORY = 0.2
# At most so many times the CPU time of `json.loads` of the same bytes.
TIMES_JSON = 1.0
# What to reach where no peer is at hand.
TIME_REACH_S = 5.0
MEMORY_REACH_MB = 1500.0
POLL_S = 0.05
_NUMBER = re.compile(
    r'("(?:ts|id|correlation|External id|Sequence number|Python id|Python parent id|Ev Idx)": ?'
    r"|(?:kprof\.step|ProfilerStep)#)(\d+)(?:\.(\d{1,3}))?(?=[,\s}\"])"
)


def tile(recorded: Path, target: Path, size_bytes: float) -> int:
    """Write `recorded` again and again, later and with new ids; return how many times."""
    text = gzip.decompress(recorded.read_bytes()).decode()
    begin = re.search(r'"traceEvents":\s*\[', text).end()
    end = text.rindex("]", begin)
    events = text[begin:end].rstrip()
    parts = _NUMBER.split(events)  # text, key, number, decimals, text, key, …
    keys, numbers = parts[1::4], [int(number) for number in parts[2::4]]
    fractions = [fraction and int(fraction.ljust(3, "0")) for fraction in parts[3::4]]
    stride = {key: _span(keys, numbers, key) for key in set(keys)}
    number_of_tiles = max(1, round(size_bytes / len(events)))
    with target.open("w") as file:
        file.write(text[:begin])
        for number in range(number_of_tiles):
            file.write("," if number else "")
            file.write("".join(_shifted(parts, keys, numbers, fractions, stride, number)))
        file.write("\n  " + text[end:])
    return number_of_tiles


def _span(keys: list[str], numbers: list[int], key: str) -> int:
    found = [number for k, number in zip(keys, numbers, strict=True) if k == key and number]
    gap = 1_000 if key.startswith('"ts"') else 1
    return max(found) - min(found) + gap if found else 0


def _shifted(parts, keys, numbers, fractions, stride, tile_number) -> Iterator[str]:
    shift = {key: span * tile_number for key, span in stride.items()}
    rows = zip(parts[0::4], keys, numbers, fractions, strict=False)
    for text, key, number, fraction in rows:
        tail = "" if fraction is None else f".{fraction:03}"
        yield f"{text}{key}{number + shift[key]}{tail}"
    yield parts[-1]


@dataclass(frozen=True)
class Cost:
    """Least wall and CPU time of several runs, and the most memory of any, with its children."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def cost_of(command: list[str], repetitions: int) -> Cost:
    """Run `command` several times and return its cost."""
    return _least([_run(command) for _ in range(repetitions)])


def costs_in_turn(commands: list[list[str]], repetitions: int) -> list[Cost]:
    """Run commands in turn, several times, and return the cost of each."""
    turns = [[_run(command) for command in commands] for _ in range(repetitions)]
    return [_least(list(runs)) for runs in zip(*turns, strict=True)]


def _least(runs: list[Cost]) -> Cost:
    return Cost(
        min(run.wall_s for run in runs),
        min(run.cpu_s for run in runs),
        max(run.peak_mb for run in runs),
    )


def _cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: list[str]) -> Cost:
    cpu_s = _cpu_s_of_children()
    with tempfile.TemporaryFile() as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        peak_mb = 0.0
        while True:
            try:
                process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                peak_mb = max(peak_mb, sum(map(_memory_mb, _tree(process.pid))))
        wall_s = time.perf_counter() - begin
        if process.returncode:
            log.seek(0)
            sys.exit(f"{command} failed:\n{log.read().decode()[-2000:]}")
    return Cost(wall_s, _cpu_s_of_children() - cpu_s, peak_mb)


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:  # grows while it is read
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            pids += [int(c) for t in tasks for c in (t / "children").read_text().split()]
        except OSError:
            continue
    return pids


def _memory_mb(pid: int) -> float:
    """Return the proportional share of memory, so that shared pages count once."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1e3 if found else 0.0


def measure(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Return the rows: a second open, growth, and beside the peer the time and the memory."""
    whole, half = folder / "whole.json", folder / "half.json"
    tile(options.trace, whole, options.mb * 1e6)
    tile(options.trace, half, options.mb * 1e6 / 2)
    size, run = f"{whole.stat().st_size / 1e6:.0f} MB", folder / "run.kprof"
    opening = [sys.executable, "-m", "kprof", "open", "--json"]
    to_run = ["--out", str(run), "--force"]
    half_cost = cost_of([*opening, str(half), *to_run], options.repeat)
    commands = [
        [*opening, str(whole), *to_run],
        [sys.executable, "-c", JSON_PROGRAM, str(whole)],
    ]
    if options.peer_python:
        commands.append([str(options.peer_python), "-c", PEER_PROGRAM, str(whole)])
    cost, decoded, *peers = costs_in_turn(commands, options.repeat)
    again = cost_of([sys.executable, "-m", "kprof", "open", str(run)], options.repeat)
    kept = cost_of([*opening, str(run)], options.repeat)
    kept_row = lower(f"wall time of kprof open --json, saved run of {size}", kept.wall_s, "s", 0.5)
    growth = cost.wall_s / half_cost.wall_s
    help_cost = cost_of([sys.executable, "-m", "kprof", "--help"], options.repeat)
    times_json = cost.cpu_s / decoded.cpu_s
    rows = [
        lower(f"CPU time of kprof open over json.loads, {size}", times_json, "ratio", TIMES_JSON),
        lower(f"CPU time of json.loads, {size}", decoded.cpu_s, "s"),
        lower(f"wall time of kprof open, {size} over half of it", growth, "ratio", 2.2),
        lower(f"wall time of kprof open on the saved run of {size}", again.wall_s, "s", 1.0),
        lower("wall time of kprof --help", help_cost.wall_s, "s", 0.4),
    ]
    time_name, memory_name = (
        f"{what} of kprof open, {size}" for what in ("wall time", "peak memory")
    )
    if not peers:
        return [
            lower(time_name, cost.wall_s, "s", TIME_REACH_S),
            lower(memory_name, cost.peak_mb, "MB", MEMORY_REACH_MB),
            *rows,
            kept_row,
        ]
    peer = peers[0]
    cpu_reach_s = peer.cpu_s / TIMES_FASTER
    return [
        lower(time_name, cost.wall_s, "s", peer.wall_s / TIMES_FASTER, peer.wall_s),
        lower(memory_name, cost.peak_mb, "MB", peer.peak_mb * PART_OF_MEMORY, peer.peak_mb),
        *rows,
        lower(f"CPU time of kprof open, {size}", cost.cpu_s, "s", cpu_reach_s, peer.cpu_s),
        kept_row,
    ]


def phases_of(folder: Path) -> dict[str, float]:
    """Return the CPU time of each stage of one opening, in s, with that of its processes."""
    paths = str(folder / "whole.json"), str(folder / "phases.kprof")
    return json.loads(_output(sys.executable, "-c", PHASES_PROGRAM, *paths) or "{}")


def lower(
    name: str, value: float, unit: str, reach: float | None = None, peer_value: float | None = None
) -> dict[str, object]:
    """Return one row; every figure here is better when lower."""
    peer = None if peer_value is None else PEER
    return row(name, value, unit, "lower", reach=reach, peer=peer, peer_value=peer_value)


def peer_versions(peer_python: Path | None) -> dict[str, str]:
    """Return the versions of the peer and of its pandas."""
    if not peer_python:
        return {}
    ask = f"import importlib.metadata as m; print(m.version({PEER!r}), m.version('pandas'))"
    peer, pandas = (_output(peer_python, "-c", ask) or "? ?").split()
    return {PEER: peer, "pandas of the peer": pandas}


def _output(*command: object) -> str | None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def _largest_recorded_trace() -> Path | None:
    found = (ROOT / "tests" / "data").glob("**/*.json.gz")
    return max(found, key=lambda path: path.stat().st_size, default=None)


def main() -> None:
    """Measure, write the result, and say what was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=_largest_recorded_trace())
    parser.add_argument("--mb", type=float, default=580, help="size of the trace in MB")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, the best counts")
    parser.add_argument("--peer-python", type=Path, help=f"an interpreter that has {PEER}")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("no recorded trace in tests/data; name one with --trace")
    with tempfile.TemporaryDirectory(prefix="kprof-import-") as folder:
        rows = measure(options, Path(folder))
        phases = phases_of(Path(folder))
    write_evidence(
        options.result,
        "import of a large trace by kprof open, to Parquet and report",
        rows,
        SOURCES,
        versions=peer_versions(options.peer_python),
        phases_cpu_s=phases,
        trace={"tiled": options.trace.name, "mb": options.mb, "best_of": options.repeat},
    )
    for entry in rows:
        verdict = {True: "met", False: "NOT met", None: "context"}[entry["met"]]
        print(
            f"{entry['name']}: {entry['value']} {entry['unit']}, reach {entry['reach']}: {verdict}"
        )


if __name__ == "__main__":
    main()
