"""Score the savings of findings on real changes of a GPU's workload.

    python benchmarks/savings_gpu.py --out savings-runs

records the slow form of each change in `workloads/real_changes.py` with `kprof run`, takes the
interval of the saving from the finding, measures both forms in the same process once the recorder
is done, in blocks of random order, and compares: `benchmarks/results/savings_<gpu>_<yyyy-mm>.json`.
Imports and analysis of one change run beside another's use of the GPU, which a lock gives to one
process at a time. The result is written anew after every change. What is in `--out` already is not
measured again, and after `--minutes` no further change is begun. `--smoke` runs two small ones on a
CPU; `--again RESULT` analyzes and scores the runs in `--out` again, which that result is of.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from evidence import RESULTS, describe_gpu, measured_by, row, write_evidence
from savings import MS, SLACK, asked, compared, rows_of
from scipy import stats

import kprof
from kprof.analyze.whatif.baseline import find_baseline
from kprof.analyze.whatif.changes import REMOVED, Change, Target
from kprof.errors import KprofError

WORKLOAD = Path(__file__).resolve().parent / "workloads" / "real_changes.py"
MEASURED = (
    "kprof/analyze/**/*.py",
    "kprof/collect/**/*.py",
    "benchmarks/savings_gpu.py",
    "benchmarks/workloads/real_changes.py",
)
OPTIONS = ("--skip", "8", "--steps", "6", "--force")
MOST_SECONDS = 150
CONFIDENCE = 0.95
SORTED = (Change(REMOVED, Target("op", "aten::sort")),)


@dataclass(frozen=True)
class Case:
    """A change, and who is asked what it saves."""

    name: str
    rule: str = ""
    """The rule whose finding is asked; empty: what-if is, the question."""
    question: tuple[Change, ...] = ()
    is_recorded: bool = True
    """Whether the recording holds the answer: no use of a result, and no kernel that is not in it.
    """


# One of every sort comes first, for time may be short.
CASES = (
    Case("item_each_step", "sync_in_loop", is_recorded=False),
    Case("slow_loader", "data_loading"),
    Case("pageable_batch", "pageable_copies"),
    Case("graph_of_small_layers", "launch_bound_host"),
    Case("host_sleeps", "host_stalls", is_recorded=False),
    Case("fp32_to_tf32", "fp32_products", is_recorded=False),
    Case("optimizer_foreach", "unfused_optimizer", is_recorded=False),
    Case("math_attention", "math_attention", is_recorded=False),
    Case("synchronize_each_layer", "sync_in_loop"),
    Case("empty_cache", "memory_fragmentation"),
    Case("images", "channels_last", is_recorded=False),
    Case("graph_of_decoding", "no_cuda_graph_in_decode"),
    Case("unfused_norm", "unfused_norm", is_recorded=False),
    Case("blocking_copy", "sync_in_loop"),
    Case("tf32_to_bf16", "tf32_products", is_recorded=False),
    Case("host_computes", "host_stalls", is_recorded=False),
    Case("norms_to_host", "sync_in_loop", is_recorded=False),
    Case("unfused_activation", "unfused_activation", is_recorded=False),
    Case("checkpointing", "needless_checkpointing"),
    Case("duplicate_work", question=SORTED),
    Case("synchronize_each_step", "sync_in_loop"),
    Case("loader_nearly_in_time", "data_loading"),
    Case("optimizer_by_parameter", "unfused_optimizer", is_recorded=False),
    Case("growing_cache", "kv_cache_layout", is_recorded=False),
    Case("loss_to_host", "sync_in_loop", is_recorded=False),
    Case("unfused_loss", "unfused_loss", is_recorded=False),
    Case("graph_of_training", "launch_bound_host"),
    Case("mask_by_index", "sync_in_loop", is_recorded=False),
    Case("odd_vocabulary", "gemm_shapes", is_recorded=False),
    Case("compiled_function", "elementwise_chains", is_recorded=False),
)
SMOKE = ("slow_loader", "duplicate_work")


def run(words, chosen):
    """Run a command; raise where it fails, with the end of what it said."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [str(word) for word in words]
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=chosen.most_seconds)
        except subprocess.TimeoutExpired:
            # With all its children: one of them may hold the GPU's lock.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise KprofError(said[-2_000:], fix=f"run it by hand: {shlex.join(command)}")


def recorded(case, chosen):
    """Return the run of the slow form and the steps' seconds of both forms, pair by pair.

    Of an earlier call, or recorded and measured now.
    """
    folder, result = (chosen.out / f"{case.name}{end}" for end in (".kprof", ".json"))
    program = shutil.which("kprof") or str(Path(sys.executable).parent / "kprof")
    if chosen.again:
        run([program, "open", "--force", folder], chosen)
    elif not folder.is_dir() or not result.exists():
        words = [WORKLOAD, case.name, "--result", result, "--lock", chosen.out / "gpu.lock"]
        tiny = ["--tiny"] if chosen.smoke else []
        run([program, "run", *OPTIONS, "--out", folder, *words, *tiny], chosen)
    if not result.exists():
        raise KprofError(f"{result.name} is missing", fix="record and measure this change anew")
    return kprof.load(folder), json.loads(result.read_text())["pairs_s"]


def score(case, chosen):
    """Return how the interval of a change's saving compares with what it saves.

    Both are shares of a step, each of its own: a shared host is up to twice as fast some seconds
    later. The truth is the median difference of two neighbouring blocks; half the width of its own
    interval, and `SLACK` of the step, are allowed for.
    """
    trace, pairs = recorded(case, chosen)
    saved = [1e9 * (slow - fast) for slow, fast in pairs]
    step_ns = 1e9 * statistics.median(slow for slow, _ in pairs)
    truth_ns = statistics.median(saved)
    error_ns = stats.t.ppf((1 + CONFIDENCE) / 2, len(saved) - 1) * stats.sem(saved)
    found = [one for one in trace.diagnosis.findings if one.saving is not None]
    is_told = not case.rule or any(one.rule == case.rule for one in found)
    low, high = asked(case.rule, case.question, trace) if is_told else (None, None)
    told_ns = found[0].saving.step_ns if found else find_baseline(trace).step_ns
    if low is not None:
        low, high = low * step_ns / told_ns, high * step_ns / told_ns
    return {
        "case": case.name,
        "asked": case.rule or "what-if",
        "is_recorded": case.is_recorded,
        "is_told": is_told,
        "step_ms": step_ns / MS,
        "after_ms": 1e3 * statistics.median(fast for _, fast in pairs),
        "truth_ms": truth_ns / MS,
        "truth_error_ms": error_ns / MS,
        "told_step_ms": told_ns / MS,
        **compared(low, high, truth_ns, step_ns, max(SLACK * step_ns, error_ns)),
        "basis": next((one.saving.basis for one in found if one.rule == case.rule), None),
        "others": {
            one.rule: [one.saving.low_ns, one.saving.high_ns]
            for one in found
            if one.rule != case.rule
        },
    }


def scores_of(chosen):
    """Yield the score of each change that was asked for; what fails is told and left out."""
    began = time.monotonic()

    def scored(case):
        if time.monotonic() - began > 60 * chosen.minutes:
            return case, "no time was left for it"
        try:
            return case, score(case, chosen)
        except (KprofError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
            return case, str(error)

    names = chosen.only or (SMOKE if chosen.smoke else [case.name for case in CASES])
    cases = [case for case in CASES if case.name in names]
    with ThreadPoolExecutor(chosen.workers) as pool:
        for done in as_completed([pool.submit(scored, case) for case in cases]):
            case, found = done.result()
            if isinstance(found, str):
                print(f"{case.name}: {found}", flush=True)
            else:
                yield found


def main():
    """Record, measure, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("savings-runs"))
    parser.add_argument("--smoke", action="store_true", help="two small changes; nothing is kept")
    parser.add_argument("--only", action="append", help="take this change only")
    parser.add_argument("--again", type=Path, help="an earlier result of the runs in --out")
    parser.add_argument("--minutes", type=float, default=6.0, help="after which none is begun")
    parser.add_argument("--most-seconds", type=float, default=MOST_SECONDS, help="of one command")
    parser.add_argument("--workers", type=int, default=3, help="of which one has the GPU")
    parser.add_argument("--result", type=Path, help="the file to write")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    before = measured_by(chosen.again)
    gpu = {**describe_gpu(), **before}["gpu"]
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    short = re.sub(r"nvidia|\W|80gb|hbm3", "", (gpu or "cpu").lower())
    folder = chosen.out if chosen.smoke or gpu is None else RESULTS
    path = chosen.result or folder / f"savings_{short}_{month}.json"
    scores = []
    for one in scores_of(chosen):
        scores.append(one)
        interval = "unknown"
        if one["low_ms"] is not None:
            interval = f"{one['low_ms']:.3f} to {one['high_ms']:.3f}"
        print(
            f"{one['case']:24s} {one['step_ms']:8.3f} -> {one['after_ms']:8.3f} ms; saves "
            f"{one['truth_ms']:.3f} ± {one['truth_error_ms']:.3f}; told {interval}; "
            f"inside: {one['is_inside']}",
            flush=True,
        )
        rows = all_rows(scores)
        what = "Intervals of findings' savings against real changes"
        write_evidence(path, what, rows, MEASURED, commit=chosen.commit, scores=scores, **before)
    for one in all_rows(scores):
        print(one["name"], one["value"], "reach", one["reach"])
    return 0 if scores else 1


def all_rows(scores):
    """Return the figures of the scores so far: those that need an interval once there is one."""
    told = statistics.fmean(one["is_told"] for one in scores) if scores else None
    found = row("changes of which the rule tells", told, "share", "higher", None)
    has_widths = any(one["is_recorded"] and one["low_ms"] is not None for one in scores)
    return [*(rows_of(scores) if has_widths else []), found]


if __name__ == "__main__":
    sys.exit(main())
