"""How often `kprof sla` says "met" of a service that is slow in spells, and misses its target.

    python benchmarks/sla_spells.py [simulations per row]

A service is fast, but for slow spells of which none lasts longer than the assumption (`--spell`,
here 10 s). Slow answers are a hair more than the target allows, so that every "met" is false.
`none` is the share of false "met" without the assumption, as `--spell 0` gives it. `true met` is
how often kprof proves the target of the same service where it has no slow spell.

Writes `results/sla_spells_cpu_<yyyy-mm>.json`, whose value is the share of false "met".
"""

import argparse
import datetime
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence

from kprof.analyze.sla.evaluate import judge
from kprof.analyze.sla.responses import Load, Response, Responses
from kprof.analyze.sla.targets import parse_target

SOURCES = (
    "benchmarks/sla_spells.py",
    *(
        f"kprof/analyze/sla/{name}.py"
        for name in ("bounds", "independence", "judge", "rates", "samples", "verdict", "wandering")
    ),
)
SPELL_S = 10.0
MOST_WRONG_PERCENT = 1.0
HAIR = 1.001
FAST_NS, SLOW_NS = 10**8, 10**9
LENGTHS = {
    "longest": lambda rng, num: np.full(num, SPELL_S),
    "any": lambda rng, num: rng.uniform(0, SPELL_S, num),
    "short": lambda rng, num: np.full(num, SPELL_S / 10),
}
TARGETS = {
    "p50": ("ttft_p50<=200ms", 0.5),
    "p95": ("ttft_p95<=200ms", 0.05),
    "p99": ("ttft_p99<=200ms", 0.01),
    "errors-5": ("errors<=5%", 0.05),
    "rate-80": ("requests>=0.8req/s", 0.2),
    "rate-95": ("requests>=0.95req/s", 0.05),
}
LOADS = {
    "p50": (5, 10, 30, 100),
    "p95": (10, 30, 100, 300),
    "p99": (30, 100, 500, 1000),
    "errors-5": (30, 100, 300),
    "rate-80": (10, 30, 100, 300),
    "rate-95": (30, 100, 300),
}
"""In longest spells."""


def is_slow(rng, at_s, share, length):
    """Tell of points in time whether a spell is on, of a service that has run for long."""
    mean, warm_up = length(rng, 1000).mean(), 20 * SPELL_S / max(share, 0.05)
    cycles = int(2 * (at_s[-1] + warm_up) * share / mean) + 50
    lengths = length(rng, cycles)
    gaps = rng.exponential(mean * (1 - share) / share, cycles)
    edges = np.cumsum(np.column_stack([gaps, lengths]).ravel()) - warm_up * rng.uniform(1, 2)
    return np.searchsorted(edges, at_s) % 2 == 1


def run_of(rng, name, num_spells, share, length):
    """Return a run at one request a second; in a spell answers are late, lost or not there."""
    at_s = np.arange(round(num_spells * SPELL_S)) + rng.uniform(0, 0.5, round(num_spells * SPELL_S))
    slow = is_slow(rng, at_s, share, length) if share else np.zeros(len(at_s), bool)
    rows = []
    for sent, is_late in zip((at_s * 1e9).astype(np.int64).tolist(), slow.tolist(), strict=True):
        if is_late and name.startswith("rate"):
            continue
        end = sent + (SLOW_NS if is_late else FAST_NS)
        outcome = "failed" if is_late and name.startswith("errors") else "answered"
        rows.append(Response(sent, outcome, sent, np.array([end]), end_ns=end, output_tokens=1))
    return Responses("simulated", "none", Load("open", "1 request/s"), tuple(rows))


def shares(name, num_spells, length, repeats, rng):
    """Return in how many percent of the loads each rule says "met", wrongly and rightly."""
    text, allowed = TARGETS[name]
    target, counts = parse_target(text), np.zeros(3)
    for _ in range(repeats):
        bad = run_of(rng, name, num_spells, allowed * HAIR, LENGTHS[length])
        counts[0] += judge([bad], [target], spell_s=0)[0].verdict == "MET"
        counts[1] += judge([bad], [target], spell_s=SPELL_S)[0].verdict == "MET"
    good = run_of(rng, name, num_spells, 0.0, LENGTHS[length])
    met = judge([good], [target], spell_s=SPELL_S)[0].verdict == "MET"
    return [*(100 * counts[:2] / repeats).tolist(), 100.0 * met]


def main():
    """Print a row for every target, load and length of spells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", type=int, nargs="?", default=20)
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    rng, rows = np.random.default_rng(0), []
    print(f"{'target, load, spells':28} {'none':>7} {'kprof':>7} {'true met':>9}")
    for name, loads in LOADS.items():
        for num_spells in loads:
            for length in LENGTHS:
                none, kprof, true = shares(name, num_spells, length, args.repeats, rng)
                label = f"{name}-{num_spells}-{length}"
                print(f"{label:28} {none:6.1f}% {kprof:6.1f}% {true:8.1f}%", flush=True)
                others = {"none": round(none, 2), "true_met": round(true, 2)}
                rows.append(row(label, round(kprof, 2), "%", "lower", MOST_WRONG_PERCENT, **others))
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.result or RESULTS / f"sla_spells_cpu_{month}.json"
    what = "how often kprof sla calls a target met that slow spells break"
    write_evidence(path, what, rows, SOURCES)


if __name__ == "__main__":
    main()
