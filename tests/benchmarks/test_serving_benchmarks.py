"""`benchmarks/fp8.py` and `benchmarks/llama_serve.py`: what counts, and what of it is kept."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kprof.kernels.bench.measure import Timed
from kprof.kernels.correctness import GateReport
from kprof.kernels.correctness.levels import LEVELS, Level, not_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FEW, MANY = (8, 4_096, 4_096), (4_096, 4_096, 4_096)
JUDGED = dict.fromkeys(("kprof", "scaled-mm", "deep-gemm", "torchao"), True)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def timed(name, shape, gpu_ns, problem=""):
    about = ("fp8_linear", name, shape, "bfloat16", "forward")
    return Timed(*about, gpu_ns=gpu_ns, problem=problem)


def rows_by_name(benchmark, times, gates=JUDGED):
    done = {(shape, name): timed(name, shape, ns) for (shape, name), ns in times.items()}
    rows = benchmark("fp8").rows_of("fp8_linear", done, gates)
    return {one["name"]: one for one in rows}


def test_ours_is_held_against_the_fastest_of_each_shape(benchmark):
    times = {(FEW, "kprof"): 10.0, (FEW, "scaled-mm"): 9.0, (MANY, "kprof"): 10.0}
    found = rows_by_name(benchmark, times)["own-to-best"]
    assert (found["value"], found["met"], found["shape"]) == (0.9, False, "8x4096x4096")


def test_the_routed_one_is_the_fastest_that_passes_the_gate(benchmark):
    times = {(FEW, "kprof"): 10.0, (FEW, "scaled-mm"): 9.0, (MANY, "kprof"): 10.0}
    found = rows_by_name(benchmark, times)["routed-to-best"]
    assert (found["value"], found["met"]) == (1.0, True)
    assert found["routed_to"] == {"scaled-mm": 1, "kprof": 1}
    rejected = rows_by_name(benchmark, times, {"kprof": True, "scaled-mm": False})
    assert rejected["routed-to-best"]["value"] == 0.9
    assert rejected["routed-to-best"]["routed_to"] == {"kprof": 2}


def test_who_is_chosen_without_a_gate_reaches_nothing(benchmark):
    times = {(FEW, "kprof"): 10.0, (FEW, "scaled-mm"): 9.0}
    found = rows_by_name(benchmark, times, {"kprof": True})["routed-to-best"]
    assert (found["value"], found["reach"], found["met"]) == (1.0, None, None)
    assert found["not_judged"] == ["scaled-mm"]


@pytest.mark.parametrize(
    ("told", "passed"),
    [
        ({"": True}, True),
        ({"": False}, False),
        ({"": False, " forward in bfloat16": True}, True),
        ({" forward in bfloat16": False, "": True}, False),
        ({" in bfloat16": True, " forward": False}, True),
        ({" in float16": True, " forward in float16": True}, None),
    ],
    ids=str,
)
def test_the_gate_counts_for_calls_without_gradients_in_bfloat16(benchmark, tmp_path, told, passed):
    reports = [{"subject": f"fp8_linear{c} by torchao", "passed": p} for c, p in told.items()]
    reports.append({"subject": "fp8_gemm by torchao", "passed": True})
    path = tmp_path / "gates.json"
    path.write_text(json.dumps(reports))
    found = benchmark("fp8_reaches").gates_of("fp8_linear", [path])
    assert found == ({} if passed is None else {"torchao": passed})


def test_peers_count_by_the_better_one_where_it_was_measured(benchmark):
    times = {
        (FEW, "kprof"): 10.0,
        (FEW, "deep-gemm"): 20.0,
        (FEW, "torchao"): 30.0,
        (MANY, "kprof"): 10.0,
        (MANY, "deep-gemm"): None,
        (MANY, "torchao"): 12.5,
    }
    found = rows_by_name(benchmark, times)["own-to-peers"]
    assert (found["value"], found["num_shapes"]) == (pytest.approx((2 * 1.25) ** 0.5, rel=1e-3), 2)


def test_the_product_alone_is_compared_and_no_provider_is_chosen_for_it(benchmark):
    done = {(FEW, name): timed(name, FEW, ns) for name, ns in (("kprof", 10.0), ("deep-gemm", 9.0))}
    rows = benchmark("fp8").rows_of("fp8_gemm", done, JUDGED)
    found = {one["name"]: (one["value"], one["reach"]) for one in rows if one["unit"] != "ns"}
    assert found == {
        "own-to-best": (0.9, None),
        "own-to-peers": (0.9, None),
        "own-fastest": (0.0, 0.5),
    }


def test_bf16_is_the_standard_for_many_rows_alone(benchmark):
    times = {(FEW, "kprof"): 10.0, (FEW, "eager"): 10.0, (MANY, "kprof"): 10.0}
    found = rows_by_name(benchmark, {**times, (MANY, "eager"): 17.0})
    assert (found["own-to-bf16"]["value"], found["own-to-bf16"]["met"]) == (1.7, True)
    assert found["own-fastest"]["value"] == 1.0


def test_a_result_is_summed_up_anew_from_what_was_measured(benchmark, tmp_path, capsys):
    done = {(FEW, "kprof"): timed("kprof", FEW, 10.0), (FEW, "torchao"): timed("torchao", FEW, 8.0)}
    rows = benchmark("fp8").rows_of("fp8_linear", done, {})
    path, report = tmp_path / "result.json", tmp_path / "gate.json"
    ran = {"compiled/fp8_linear/kprof/1x6144x4096/forward": "as measured"}
    path.write_text(json.dumps({"what": "fp8_linear", "ran": ran, "rows": rows}))
    report.write_text(json.dumps([{"subject": "fp8_linear by torchao", "passed": False}]))
    benchmark("fp8").sum_up(path, [report])
    found = json.loads(path.read_text())
    assert found["rows"][:2] == rows[:2]
    assert len(found["rows"]) == len(rows)
    routed = next(one for one in found["rows"] if one["name"] == "routed-to-peers")
    assert (routed["routed_to"], routed["value"]) == ({"kprof": 1}, 0.8)
    assert found["ran"].items() >= ran.items()
    assert "code/benchmarks/fp8_reaches.py" in found["ran"]
    assert "routed-to-peers: 0.8 x" in capsys.readouterr().out


def test_a_process_that_said_nothing_leaves_a_time_that_is_missing(benchmark):
    one = benchmark("fp8").timed_of(None, "fp8_gemm", "deep-gemm", FEW)
    assert one.gpu_ns is None
    assert "ended early" in one.problem


def test_products_are_measured_with_both_sorts_of_scales(benchmark):
    of_linear, of_product = (benchmark("fp8").shapes_of(n) for n in ("fp8_linear", "fp8_gemm"))
    assert [*of_linear, *((*one, 1) for one in of_linear)] == of_product


COMPARED = {
    "a": "as it is",
    "b": "inside /somewhere/serve_llama.py:kernels",
    "plan": {},
    "claims": [
        {
            "metric": {"name": "step time"},
            "verdict": "FASTER",
            "num_pairs": 9,
            "interval": {"ratio": 0.5, "low": 0.45, "high": 0.55},
        }
    ],
    "protocol": "",
    "doubts": [],
    "pairs": [{"a": [2.0], "b": [1.0], "problem": ""}],
    "per_token": [
        {
            "claim": {"metric": {"name": "throughput", "unit": "tok/s", "better": "higher"}},
            "a": 1_000.0,
            "b": 2_000.0,
        }
    ],
    "targets": {
        "B": {
            "targets": [
                {"target": "step_p50<=5ms", "estimate": 4e6, "verdict": "MET", "by_run": [4e6]}
            ]
        }
    },
    "costs": None,
    "facts": {
        "GPU": "NVIDIA H100 80GB HBM3",
        "step": "a call",
        "command of A": "python /somewhere/serve_llama.py",
    },
}


def test_a_comparison_is_kept_without_single_steps_and_places(benchmark, tmp_path):
    found = benchmark("llama_serve").kept(json.loads(json.dumps(COMPARED)), tmp_path)
    assert "/somewhere" not in json.dumps(found)
    assert "by_run" not in found["targets"]["B"]["targets"][0]


def test_a_comparison_becomes_ratio_rate_cost_and_target(benchmark):
    rows = benchmark("llama_serve").rows_of("graphs", COMPARED)
    found = {one["name"]: one for one in rows}
    assert found["graphs-step-time"]["interval"] == [0.45, 0.55]
    assert found["graphs-throughput-b"]["value"] == 2_000
    cost_a, cost_b = (found[f"graphs-cost-{arm}"]["value"] for arm in "ab")
    assert cost_a == pytest.approx(2 * cost_b, rel=1e-3)
    assert found["graphs-cost-a"]["price"] == "H100, on-demand"
    assert found["graphs-target-B"]["verdict"] == "MET"


def test_a_gpu_that_no_price_list_has_an_unknown_cost(benchmark):
    for gpu, problem in (("NVIDIA L1", ["no price of NVIDIA L1 is known"] * 2), (None, [])):
        facts = {"GPU": gpu} if gpu else {}
        rows = benchmark("llama_serve").rows_of("graphs", {**COMPARED, "facts": facts})
        costs = [one for one in rows if one["unit"] == "$/M tokens"]
        assert [one["problem"] for one in costs] == problem
        assert all(one["value"] is None for one in costs)


def test_the_gates_class_is_told_with_the_levels_it_rests_on(benchmark):
    levels = [{"name": "L3", "state": "failed"}, {"name": "L5", "state": "passed"}]
    told = {"reached": "TASK-EQUIVALENT", "levels": levels}
    (one,) = benchmark("llama_serve").rows_of("gate", told)
    assert (one["verdict"], one["L3"], one["L5"]) == ("TASK-EQUIVALENT", "failed", "passed")


def test_a_gate_without_an_answer_is_a_problem_of_each_part(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark("llama_serve"), "GATE", "nowhere.py")
    found = benchmark("llama_serve").gated(SimpleNamespace(what=["decode"], tiny=True), 20)
    assert "nowhere.py" in found["decode"]["gate"]["problem"]


def test_a_gate_out_of_time_has_judged_what_it_has_told(benchmark, monkeypatch, tmp_path):
    gate = tmp_path / "gate.py"
    told = "import time; print('{\"prefill\": {}}', flush=True); time.sleep(9)"
    gate.write_text(told)
    monkeypatch.setattr(benchmark("llama_serve"), "GATE", gate)
    what = ["prefill", "decode", "decode_energy"]
    found = benchmark("llama_serve").gated(SimpleNamespace(what=what, tiny=True), 2)
    assert found == {"prefill": {}, "decode": {"gate": {"problem": "out of time"}}}


def sheet_of(*events):
    about = {"turn": ("arm", "time_ns"), "begin": ("host",)}
    times = ("arm", "start_ns", "end_ns")
    return "\n".join(
        json.dumps({"kind": kind, **dict(zip(about.get(kind, times), values, strict=True))})
        for kind, *values in events
    )


def test_where_the_time_of_a_comparison_went_is_told(benchmark, tmp_path):
    second = 1_000_000_000
    raw = tmp_path / "ab.kprof" / "raw" / "raw" / "process"
    raw.mkdir(parents=True)
    (raw / "windows.jsonl").write_text(
        sheet_of(
            ("begin", "host"),
            ("turn", "B", 10 * second),
            ("warm-up", "B", 14 * second, 15 * second),
            ("turn", "A", 15 * second),
            ("warm-up", "A", 16 * second, 18 * second),
            ("turn", "B", 18 * second),
            ("window", "B", 20 * second, 23 * second),
            ("turn", "A", 23 * second),
        )
        + '\n{"kind": "wind'
    )
    spent_s = benchmark("llama_serve").spent_s(tmp_path, 2 * second, 30.0)
    begin = "until the first step"
    assert spent_s == {
        "whole": 30.0,
        begin: 8.0,
        "first step of B": 4.0,
        "first step of A": 1.0,
        "warm-up": 10.0,
        "windows": 3.0,
    }


def test_of_a_comparison_without_a_step_the_whole_time_is_told(benchmark, tmp_path):
    assert benchmark("llama_serve").spent_s(tmp_path, 0, 30.0) == {"whole": 30.0}


def test_a_tenth_of_the_files_is_held_out(benchmark, tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_text(chr(ord("a") + number))
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("!")
    seen, held_out = benchmark("llama_gate").texts_of(tmp_path)
    assert bytes(held_out.tolist()) == b"ak"
    assert sorted(seen.tolist()) == sorted(b"bcdefghijlmnopqrst")


def level(name, state):
    return Level(name, state, "said so")


@pytest.mark.parametrize("state", ["passed", "failed"])
def test_a_kernel_that_fails_alone_fails_in_its_model(benchmark, monkeypatch, state):
    others = [not_run(name, "not asked for") for name in LEVELS[2:]]
    reports = [
        GateReport(str(one), (level("L0", one), level("L1", "passed"), *others), ("L0", "L1"))
        for one in ("passed", state)
    ]
    module = benchmark("llama_gate")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.library, "check_kernels", lambda *words, **options: reports)
    found = module.judged_alone()
    assert (found["L0"].state, found["L1"].state) == (state, "passed")


def test_what_went_wrong_is_told_in_the_place_of_a_figure(benchmark):
    (one,) = benchmark("llama_serve").rows_of("eager", {"problem": "no GPU"})
    assert (one["value"], one["problem"]) == (None, "no GPU")


def test_calls_that_fell_back_are_counted_with_their_reasons(benchmark):
    sites = [
        {"skipped": "", "calls": [{"why": "", "num_joined": 3}, {"why": "dropout"}]},
        {"skipped": "a head", "calls": []},
    ]
    assert benchmark("llama_serve").summary_of_swap({"sites": sites}) == {
        "sites": 2,
        "replaced": 1,
        "joined": 3,
        "fallen_back": ["dropout"],
        "skipped": ["a head"],
    }
