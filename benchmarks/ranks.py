"""What `kprof open` of many ranks costs: CPU time, wall time and memory.

    python benchmarks/ranks.py                     8, 32 and 128 ranks of 5,582 events
    python benchmarks/ranks.py --many              and once 1,024 ranks of 22,619 events
    python benchmarks/ranks.py --ranks 8 --whole   the whole recorded step on each rank
    python benchmarks/ranks.py --peer-python P     and HolisticTraceAnalysis and TraceLens of a
                                                   Python that has them, on 8 and 64 whole steps
    python benchmarks/ranks.py --cluster           and a local Dask cluster of one and two workers

A rank is the beginning of a recorded training step of one GPU, or all of it, with all-reduces that
end on all ranks together; one rank is late to them. Apart from its number and its all-reduces, a
rank's events are those of all others. CPU time counts all processes. With one core, `taskset`
leaves one to kprof, which then reads all ranks in one process.

Of the peers, HolisticTraceAnalysis tells busy times, kernels and overlap of every rank; TraceLens
its report of collectives alone. kprof makes all of its report.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence import RESULTS, ROOT, row, write_evidence
from import_speed import costs_in_turn

RECORDED = ROOT / "tests" / "data" / "h200" / "llama_train.json.gz"
RESULT = RESULTS / "ranks_cpu_2026-11.json"
SOURCES = (
    "benchmarks/ranks.py",
    "kprof/collect/ranks.py",
    "kprof/collect/many_ranks.py",
    "kprof/collect/merge.py",
    "kprof/analyze/**/*.py",
    "kprof/collect/readers/kineto/*.py",
)
# So many ranks of so many events are to be opened within this.
REACH_RANKS, REACH_CPU_S, REACH_MB = 128, 20.0, 400.0
# And so many whole steps within this; the memory is that of each process.
MANY, MANY_WALL_S, MANY_MB = 1_024, 600.0, 2_000.0
EVENTS_PER_RANK = 5_500
PEERS_RANKS, TIMES_FASTER, PART_OF_MEMORY = (8, 64), 8, 0.5
CLUSTER_RANKS, SPEED_UP = 256, 1.8
HTA_PROGRAM = """
import json, re, sys
from pathlib import Path
from hta.trace_analysis import TraceAnalysis
paths = Path(sys.argv[1]).iterdir()
files = {int(re.search(r"rank([0-9]+)", path.name)[1]): str(path) for path in paths}
analysis = TraceAnalysis(trace_files=files, trace_dir="")
busy = analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
print(json.dumps(float((busy["compute_time(us)"] + busy["non_compute_time(us)"]).sum())))
"""
TRACELENS_PROGRAM = """
import sys
from pathlib import Path
from TraceLens.Reporting.generate_multi_rank_collective_report_pytorch import (
    generate_collective_report as report,
)
folder = Path(sys.argv[1])
report(
    trace_pattern=f"{folder}/rank*.json.gz",
    world_size=len(list(folder.iterdir())),
    output_csvs_dir=sys.argv[2],
)
"""
# An all-reduce for so many kernels, on a stream of its own.
KERNELS_PER_COLLECTIVE = 50
COLLECTIVE_US = 200.0
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
LATE_RANK, LATE_US = 3, 120.0


def write_ranks(folder: Path, num_ranks: int, *, num_events: int | None = None) -> int:
    """Write a file for each rank and return the number of events of each.

    `num_events` keeps the first events of the recorded step; None keeps all.
    """
    document = json.loads(gzip.decompress(RECORDED.read_bytes()))
    events = _first(document.pop("traceEvents"), num_events)
    body = gzip.compress(json.dumps(events)[1:-1].encode())
    starts = sorted(e["ts"] for e in events if e.get("cat") == "kernel")[::KERNELS_PER_COLLECTIVE]
    for rank in range(num_ranks):
        around = {**document, "distributedInfo": {"rank": rank, "world_size": num_ranks}}
        head = json.dumps(around)[:-1] + ', "traceEvents": ['
        own = json.dumps(_collectives(starts, rank, num_ranks))[1:-1]
        parts = (gzip.compress(head.encode()), body, gzip.compress(f", {own}]}}".encode()))
        (folder / f"rank{rank}.json.gz").write_bytes(b"".join(parts))
    return len(events) + 2 * len(starts)


def _first(events: list[dict], number: int | None) -> list[dict]:
    """Return the events that begin first and those without a time, as names of threads."""
    timed = sorted(e["ts"] for e in events if "ts" in e and e.get("ph") != "M")
    last = timed[-1 if number is None else min(number, len(timed)) - 1]
    return [e for e in events if e.get("ph") == "M" or e.get("ts", 0) <= last]


def _collectives(starts: list[float], rank: int, num_ranks: int) -> list[dict]:
    """Return the all-reduces of a rank, each with its launch; they end on all ranks together."""
    group = {
        "Collective name": "allreduce",
        "Process Group Name": "0",
        "Process Group Ranks": str([*range(num_ranks)]),
        "Group size": num_ranks,
        "In msg nelems": 4_194_304,
        "Out msg nelems": 4_194_304,
        "dtype": "BFloat16",
    }
    events = []
    for sequence, start in enumerate(starts):
        begin = start + rank % 7 + (LATE_US if rank == LATE_RANK else 0.0)
        joint = {"correlation": 10_000_000 + sequence}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": 1}
        launch |= {"tid": 2, "ts": begin - 9.0, "dur": 4.0, "args": joint | {"cbid": 430}}
        place = {"device": 0, "stream": 30, "grid": [24, 1, 1], "block": [640, 1, 1]}
        kernel = {"ph": "X", "cat": "kernel", "name": NCCL, "pid": 0, "tid": 30, "ts": begin}
        kernel |= {"dur": start + COLLECTIVE_US - begin}
        kernel |= {"args": joint | place | group | {"Seq": sequence}}
        events += [launch, kernel]
    return events


def measure(folder: Path, num_ranks: int, num_events: int | None, repeat: int) -> list[dict]:
    """Return the rows of so many ranks: CPU and wall time and memory, on all cores and on one."""
    ranks = folder / f"ranks{num_ranks}"
    ranks.mkdir()
    events = write_ranks(ranks, num_ranks, num_events=num_events)
    opening = [sys.executable, "-m", "kprof", "open", str(ranks)]
    opening += ["--out", str(folder / "run.kprof"), "--force"]
    cores = sorted(os.sched_getaffinity(0))
    alone = ["taskset", "-c", str(cores[0]), *opening]
    every, one = costs_in_turn([opening, alone], repeat)
    shutil.rmtree(ranks)
    is_aim = num_ranks == REACH_RANKS and num_events == EVENTS_PER_RANK
    cpu_s, mb = (REACH_CPU_S, REACH_MB) if is_aim else (None, None)
    size = f"{num_ranks} ranks of {events:,} events"
    return [
        row(f"CPU time, {size}", every.cpu_s, "s", "lower", cpu_s),
        row(f"CPU time on one core, {size}", one.cpu_s, "s", "lower", cpu_s),
        row(f"wall time, {size}", every.wall_s, "s", "lower"),
        row(f"wall time on one core, {size}", one.wall_s, "s", "lower"),
        row(f"memory of all processes, {size}", every.peak_mb, "MB", "lower", mb),
        row(f"memory on one core, {size}", one.peak_mb, "MB", "lower", mb),
        row(f"speed-up by {len(cores)} cores, {size}", one.wall_s / every.wall_s, "x", "higher"),
    ]


def measure_many(folder: Path) -> list[dict]:
    """Return the rows of a thousand ranks, opened once; the memory is of all processes together."""
    ranks = folder / "many"
    ranks.mkdir()
    events = write_ranks(ranks, MANY)
    opening = [sys.executable, "-m", "kprof", "open", str(ranks)]
    (cost,) = costs_in_turn([[*opening, "--out", str(folder / "many.kprof")]], 1)
    page_mb = (folder / "many.kprof" / "report.html").stat().st_size / 1e6
    shutil.rmtree(ranks)
    size = f"{MANY:,} ranks of {events:,} events"
    return [
        row(f"wall time, {size}", cost.wall_s, "s", "lower", MANY_WALL_S),
        row(f"CPU time, {size}", cost.cpu_s, "s", "lower"),
        row(f"memory of all processes, {size}", cost.peak_mb, "MB", "lower", MANY_MB),
        row(f"report, {size}", page_mb, "MB", "lower", 3.0),
    ]


def measure_peers(folder: Path, num_ranks: int, peer_python: Path) -> list[dict]:
    """Return the rows of so many whole ranks beside the peers: time, memory, busy time kept."""
    ranks = folder / f"beside{num_ranks}"
    ranks.mkdir()
    events = write_ranks(ranks, num_ranks)
    run = folder / "beside.kprof"
    opening = [sys.executable, "-m", "kprof", "open", str(ranks)]
    programs = {"HolisticTraceAnalysis": HTA_PROGRAM, "TraceLens": TRACELENS_PROGRAM}
    of_peers = [
        [str(peer_python), "-c", program, str(ranks), str(folder / "tables")]
        for program in programs.values()
    ]
    own, *peers = costs_in_turn([[*opening, "--out", str(run), "--force"], *of_peers], 1)
    of_ranks = json.loads(_output([*opening[:-1], "--json", str(run)]))["ranks"]
    truth_ns = sum(_busy_ns(path) for path in ranks.iterdir())
    kept = {
        "kprof": sum(one["busy_ns"] for one in of_ranks) / truth_ns,
        "HolisticTraceAnalysis": 1e3 * json.loads(_output(of_peers[0]).splitlines()[-1]) / truth_ns,
    }
    shutil.rmtree(ranks)
    size = f"{num_ranks} ranks of {events:,} events"
    rows = [
        row(f"busy time kept by {tool}, {size}", share, "of the truth", "higher", 1.0)
        for tool, share in kept.items()
    ]
    for tool, cost in zip(programs, peers, strict=True):
        reach = (cost.wall_s / TIMES_FASTER, cost.peak_mb * PART_OF_MEMORY)
        rows += [
            row(
                f"{what} beside {tool}, {size}",
                value,
                unit,
                "lower",
                most,
                peer=tool,
                peer_value=of_peer,
            )
            for what, value, unit, most, of_peer in (
                ("wall time", own.wall_s, "s", reach[0], cost.wall_s),
                ("memory", own.peak_mb, "MB", reach[1], cost.peak_mb),
            )
        ]
    return rows


def _busy_ns(path: Path) -> int:
    """Return the time in which a rank's device does anything, from its file alone.

    In whole ns, in which recorders take times, though files hold them as fractions of µs.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = ((round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in events if e.get("cat") in kinds)
    busy, end = 0, 0
    for begin, duration in sorted(spans):
        busy += max(begin + duration - max(begin, end), 0)
        end = max(end, begin + duration)
    return busy


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def measure_cluster(folder: Path) -> list[dict]:
    """Return the rows of many ranks that one and two workers of a Dask cluster read."""
    from distributed import LocalCluster

    ranks = folder / "cluster"
    ranks.mkdir()
    events = write_ranks(ranks, CLUSTER_RANKS)
    wall_s = {}
    for workers in (1, 2):
        with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as on:
            opening = [sys.executable, "-m", "kprof", "open", str(ranks), "--force"]
            opening += ["--out", str(folder / "run.kprof"), "--scheduler", on.scheduler_address]
            (cost,) = costs_in_turn([opening], 1)
            wall_s[workers] = cost.wall_s
    shutil.rmtree(ranks)
    size = f"{CLUSTER_RANKS} ranks of {events:,} events"
    times = [row(f"wall time by workers: {n}, {size}", s, "s", "lower") for n, s in wall_s.items()]
    ratio = wall_s[1] / wall_s[2]
    return [*times, row(f"speed-up by a second worker, {size}", ratio, "x", "higher", SPEED_UP)]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, REACH_RANKS])
    parser.add_argument("--whole", action="store_true", help="keep the whole step of each rank")
    parser.add_argument("--many", action="store_true", help=f"measure {MANY:,} ranks, too")
    parser.add_argument("--peer-python", type=Path, help="a Python that has the peers")
    parser.add_argument("--cluster", action="store_true", help="measure workers of Dask, too")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each, the best counts")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    number, rows = None if options.whole else EVENTS_PER_RANK, []
    begin_load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kprof-ranks-") as folder:
        for num_ranks in options.ranks:
            rows += measure(Path(folder), num_ranks, number, options.repeat)
        if options.many:
            rows += measure_many(Path(folder))
        if options.peer_python:
            for num_ranks in PEERS_RANKS:
                rows += measure_peers(Path(folder), num_ranks, options.peer_python)
        if options.cluster:
            rows += measure_cluster(Path(folder))
    what = "kprof open of many ranks"
    load = {"begin": begin_load, "end": os.getloadavg()[0]}
    write_evidence(options.result, what, rows, SOURCES, load=load, best_of=options.repeat)
    for entry in rows:
        print(f"{entry['name']}: {entry['value']} {entry['unit']}, reach {entry['reach']}")


if __name__ == "__main__":
    main()
