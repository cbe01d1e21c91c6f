"""Evidence in miniature: a comparison, a run, a service level, costs, a gate, a calibration."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from kprof.analyze.calibration.error_rates import Calibration, Judged, Rate, Scenario
from kprof.analyze.calibration.error_rates import Target as Aim
from kprof.analyze.cost.price import Band, Price
from kprof.analyze.cost.sheet import Costs, Figure
from kprof.analyze.kernel_times import Benched, Timing
from kprof.analyze.sla.curves import Curves, TokenCurve
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.sla.target_verdict import Judgement
from kprof.analyze.sla.targets import parse_target
from kprof.comparison import Claim, Comparison, Interval, Metric, Pair, Plan
from kprof.findings import Diagnosis, Finding, Saving
from kprof.kernels.correctness.levels import GateReport, Level, Measure, not_run
from kprof.report.partner.evidence import Evidence
from kprof.report.sla_verdict import Judged as JudgedLevel
from kprof.trace import Caveat
from tests.traces import analyzed_trace_of

STEP = Metric("step time", "ns")
MEASURED_NS = 1_795_190_400_000_000_000  # 2026-11-20, 16:00 UTC


def comparison_of(verdict="FASTER", low=0.79, ratio=0.80, high=0.81, **more):
    """Build a comparison of 8 pairs with this verdict; without an interval where low is None."""
    interval = None if low is None else Interval(ratio, low, high, 0.95, "fixed")
    pairs = tuple(
        Pair((40e6,), (40e6 * (ratio + 0.001 * (i % 3 - 1)),), i % 2 == 0, MEASURED_NS + i * 10**9)
        for i in range(8)
    )
    claim = Claim(STEP, verdict, 8, interval, 0.004, why=more.pop("why", "It is so."))
    return Comparison(
        **{
            "name": "train.py",
            "a": "as it is",
            "b": "--swap rmsnorm",
            "plan": Plan((STEP,), seed=0),
            "pairs": pairs,
            "claims": (claim,),
            "protocol": "In one process, in random order.",
            "facts": {"GPU": "Round GPU"},
            **more,
        }
    )


def finding_of(rule="unfused_norm", low_ns=50, high_ns=100, **more):
    """Build a finding that saves 5 to 10 % of a step of 1,000 ns."""
    saving = Saving(1000, low_ns, high_ns, "replayed")
    return Finding(
        **{"rule": rule, "claim": "17 norms in a step are unfused", "confidence": "high"}
        | {
            "effort": "low",
            "rows": (0,),
            "saving": saving,
            "command": "kprof ab --swap rmsnorm t.py",
        }
        | more
    )


def run_of(*findings, kernel="gemm_kernel", **meta):
    """Build a run of 1,000 ns: 600 of a product, 300 idle, 100 of a norm."""
    trace = analyzed_trace_of(
        {"name": kernel, "kind": "gemm", "op": "aten::mm", "module": "model.mlp"}
        | {"duration_ns": 600, "flops": 3_000_000, "bytes": 60_000, "limit_ns": 300}
        | {"bound": "memory", "dtype": "bf16", "bucket": "attributed", "phase": "forward"},
        {"name": "norm_kernel", "kind": "norm", "op": "aten::mean", "start_ns": 900}
        | {"gap_before_ns": 300, "gap_cause": "data loading", "bucket": "attributed"},
        idle=[{"start_ns": 600, "duration_ns": 300, "cause": "data loading", "kernel_row": 1}],
        **{"command": ("python", "train.py"), "base_time_ns": MEASURED_NS, **meta},
    )
    together = Saving(1000, 50, 100, "replayed") if findings else None
    return replace(trace, diagnosis=Diagnosis(tuple(findings), together))


def level_of(verdict="MET", text="ttf64_p99<=100ms", high=95e6, **more):
    """Build a service level of one target, measured at 90 ms."""
    judgement = Judgement(parse_target(text), verdict, "so it is", 90e6, 85e6, high, 1200, 1200)
    assessment = Assessment((judgement,), tuple(map(Caveat.read, more.get("doubts", ()))))
    return JudgedLevel("result.json", assessment, curves=curves_of(text))


def curves_of(text):
    """Build the curves of 64 tokens, the last of which come after 90 ms."""
    places = (1, 16, 32, 64)
    times = (10e6, 30e6, 50e6, 90e6)
    by_level = dict.fromkeys(("p50", "p95", "p99"), times)
    tokens = TokenCurve(places, by_level, (11e6, 33e6, 55e6, None), (0.0,) * 4)
    return Curves(tokens, {text: tuple(zip(times, (0.25, 0.5, 0.75, 1.0), strict=True))})


def price_of(usd="4.29"):
    """Build a price with a band from two lists."""
    middle = float(usd)
    band = Band(middle / 2, middle, middle * 2)
    return Price(
        "H100, on-demand", band, date(2026, 8, 26), date(2026, 11, 9), ("Cloud: price list",)
    )


def figure_of(topic, name, unit, band, formula="", prices=()):
    """Build a figure from its band."""
    return Figure(topic, name, unit, band.low, band.mid, band.high, formula, prices)


def costs_of(per_million="0.40", usd="4.29", **more):
    """Build costs of so many dollars for a million tokens, in the middle of the price."""
    middle, price = float(per_million), price_of(usd)
    figure = figure_of(
        "Serving",
        "as paid",
        "$/M tokens",
        Band(middle / 2, middle, middle * 2),
        "P / T",
        (price,),
    )
    figures = (figure, *more.pop("figures", ()))
    fields = {"missing": (), "warnings": (), "notes": (), **more}
    return Costs(date(2026, 11, 20), price, figures, **fields)


def gate_of(state="passed", is_bit_exact=True):
    """Build a report of the quality gate: L0 and L1 were run, nothing else."""
    measure = Measure("relative error", 0.5 if state == "passed" else 2.0, 1.0, 0.4)
    names = ("L2", "L3", "L4", "L5", "L6")
    levels = (
        Level("L0", "passed", "all is well", (measure,)),
        Level("L1", state, "see there", (measure,), is_bit_exact=is_bit_exact),
        *(not_run(name, "not asked for") for name in names),
    )
    return GateReport("rmsnorm by kprof", levels, ("L0", "L1"))


def bench_of(kernel="rmsnorm"):
    """Build a kernel that is half as fast again as the best of its peers."""
    shape = (8192, 4096)
    timings = (Timing("kprof", shape, 20e3, 0.9), Timing("liger", shape, 30e3, 0.6))
    return Benched(kernel, "bfloat16", "forward", "kprof", "Round GPU", "2026-11-20", timings)


def calibration_of(**more):
    """Build a calibration: 4 of 100 comparisons without a difference saw one."""
    rate = Rate(4, 100)
    good = Rate(96, 100)
    judged = Judged(rate, rate, good, {"0.01": good}, {"0.01": rate}, Rate(0, 100), good, {})
    scenario = Scenario("quiet", "nothing else runs", judged, judged, 0.008)
    target = Aim("false positives", 0.04, "lower", 0.07, "quiet")
    fields = {"kind": "gpu", "device": "Round GPU", "driver": "580", "date": "2026-11-20"}
    fields |= {"num_pairs": 40, "num_comparisons": 100, "seed": 0, "smallest_effect": 0.01}
    fields |= {"alpha": 0.05, "scenarios": (scenario,), "targets": (target,), "took_s": 1.0, **more}
    return Calibration(**fields)


def everything(**more):
    """Build evidence of every kind."""
    return Evidence(
        **{
            "title": "Training of a small model",
            "runs": (run_of(finding_of()),),
            "comparisons": (comparison_of(),),
            "service_levels": (level_of("MISSED", high=120e6), level_of()),
            "costs": (costs_of("0.50"), costs_of("0.40")),
            "gates": (gate_of(),),
            "calibration": calibration_of(),
            "benches": (bench_of(),),
            **more,
        }
    )
