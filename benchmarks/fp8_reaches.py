"""What FP8 products and layers have to reach, and the rows of a result that say whether they do.

*Own* is our provider alone, what a user without peers gets. *Routed* is the provider that
`kprof kernels bench` would choose on the same times: the fastest who passes the gate. Where nobody
ran the gate for one who is chosen, the row says for whom, and nothing counts as reached. The
product alone is in nobody's place: nobody is chosen for it, and its ratios have nothing to reach.
"""

import json
import math
from collections import Counter

from evidence import row

from kprof.kernels import OURS
from kprof.kernels.bench.choice import FALLBACK, ranking
from kprof.kernels.bench.measure import Timed

# Of the fastest provider's speed, on any shape; of the better peer's, over all shapes.
NEVER_BELOW, OF_PEERS = 0.98, 1.25
# Of bf16, for many rows; and the share of shapes with few rows where our own kernel is fastest.
OF_BF16, MANY_ROWS = 1.6, 2_048
FASTEST_SHARE, FEW_ROWS = 0.5, 128
PEERS = ("deep-gemm", "torchao")
# What takes another's place.
ROUTED = "fp8_linear"
OWN = (OURS, f"{OURS}-wide", f"{OURS}-tiles")


def gates_of(name, paths):
    """Return whether each provider passed the gate, as `kprof kernels check --json` told.

    A report on the calls that are measured, in bfloat16 and without gradients, decides. Without
    one, who passes for more calls passes for these, too; who fails is not taken.
    """
    reports = [report for path in paths for report in json.loads(path.read_text())]
    about = [(*report["subject"].split(" by "), report["passed"]) for report in reports]
    gates = {}
    for calls, provider, passed in about:
        if calls in (name, f"{name} forward", f"{name} in bfloat16"):
            gates[provider] = gates.get(provider, False) or passed
    exact = f"{name} forward in bfloat16"
    return gates | {provider: passed for calls, provider, passed in about if calls == exact}


def measured_in(rows):
    """Return what each provider took, by shape, of a result's rows; its summary is none of it."""
    measured = {}
    for one in rows:
        text, _, provider = one["name"].partition("-")
        if one["unit"] == "ns":
            shape = tuple(map(int, text.split("x")))
            about = ("", provider, shape, "bfloat16", "forward")
            told = {"host_ns": one["host_ns"], "problem": one["problem"]}
            measured.setdefault(shape, []).append(Timed(*about, gpu_ns=one["value"], **told))
    return measured


def rows_of_reach(name, rows, gates):
    """Return how far ours and the routed one are from what they have to reach.

    Over the shapes where ours was measured.

    Args:
        name: Of the kernel.
        rows: Of the measurements.
        gates: Whether a provider passed the gate; who is missing was not judged.
    """
    times, chosen = {}, {}
    for shape, measured in measured_in(rows).items():
        here = {one.provider: one.gpu_ns for one in ranking(measured)}
        if OURS in here:
            times[shape], chosen[shape] = here, _routed(measured, gates)
    if not times:
        return []
    own = dict.fromkeys(times, OURS)
    found = _rows_of("own", name, times, own)
    few = [here for shape, here in times.items() if shape[0] <= FEW_ROWS]
    if few:
        share = sum(min(here, key=here.get) in OWN for here in few) / len(few)
        found.append(row("own-fastest", share, "of shapes", "higher", FASTEST_SHARE))
    if name != ROUTED:
        return found
    # What is replaced need not be judged against itself.
    judged = {FALLBACK, *gates}
    unjudged = sorted(set(chosen.values()) - judged)
    about = {"routed_to": dict(Counter(chosen.values())), "not_judged": unjudged}
    return found + _rows_of("routed", name, times, chosen, **about)


def _routed(measured, gates):
    """Return who is fastest of those whom the gate did not reject."""
    return next(one.provider for one in ranking(measured) if gates.get(one.provider, True))


def _rows_of(who, name, times, chosen, **about):
    """Return the rows of one provider for each shape."""
    took = {shape: here[chosen[shape]] for shape, here in times.items()}
    to_best = {shape: min(here.values()) / took[shape] for shape, here in times.items()}
    worst = min(to_best, key=to_best.get)
    peers = {
        shape: min(here[one] for one in PEERS if one in here) / took[shape]
        for shape, here in times.items()
        if any(one in here for one in PEERS)
    }
    many = [shape for shape in times if shape[0] >= MANY_ROWS and "eager" in times[shape]]

    def reached(what, value, reach, **more):
        reach = None if about.get("not_judged") or name != ROUTED else reach
        return row(f"{who}-{what}", value, "x", "higher", reach, **more, **about)

    found = [reached("to-best", to_best[worst], NEVER_BELOW, shape="x".join(map(str, worst)))]
    if peers:
        mean = math.exp(sum(map(math.log, peers.values())) / len(peers))
        found.append(reached("to-peers", mean, OF_PEERS, peers=PEERS, num_shapes=len(peers)))
    if many and name == ROUTED:
        slowest = min(times[shape]["eager"] / took[shape] for shape in many)
        found.append(reached("to-bf16", slowest, OF_BF16))
    return found
