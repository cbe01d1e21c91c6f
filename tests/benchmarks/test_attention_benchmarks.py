"""`benchmarks/attention_ab.py` and its gate: what is asked of whom, and what the arms differ in."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kprof.kernels.correctness import GateReport, Model, check
from kprof.kernels.correctness.levels import LEVELS, Level, not_run
from kprof.kernels import kernel_named

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


ABOUT = {"right": 0.5, "num_taken": 2, "fallen_back": []}


def args_of(**given):
    return SimpleNamespace(**{"provider": None, "tiny": False, "what": ["prefill"], **given})


def asked_of(benchmark, monkeypatch, args):
    """Return the words of `kprof ab` for a comparison, and what is kept of it."""
    module, asked = benchmark("attention_ab"), []

    def run(command, **options):
        asked.extend(command)
        return SimpleNamespace(stdout="", stderr="no GPU", returncode=1)

    monkeypatch.setattr(module.subprocess, "run", run)
    return asked, module.compared(args.what[0], args, 60)


def test_whose_attention_it_is_is_asked_for_by_name(benchmark, monkeypatch):
    asked, _ = asked_of(benchmark, monkeypatch, args_of())
    assert asked[asked.index("--swap") + 1] == "attention_forward=kprof-hopper"
    assert asked[asked.index("--prompt") + 1] == asked[asked.index("--tokens-per-step") + 1]
    assert "--energy" in asked


def test_everybody_who_is_asked_for_provides_the_kernel(benchmark):
    comparisons = benchmark("attention_ab").COMPARISONS
    assert {what: one.kernel for what, one in comparisons.items()} == benchmark(
        "attention_gate"
    ).KERNELS
    for one in comparisons.values():
        assert one.provider in {known.name for known in kernel_named(one.kernel).providers}


def test_another_provider_is_compared_and_judged(benchmark, monkeypatch):
    args = args_of(what=["training"], provider="kprof")
    asked, told = asked_of(benchmark, monkeypatch, args)
    assert told == {"problem": "no GPU", "swapped": "attention_forward=kprof", "took_s": 0.0}
    asked.clear()
    told = benchmark("attention_ab").gated(args, 20)
    assert "training=kprof" in asked
    assert told == {"training": {"gate": {"problem": "no GPU"}}}


def test_a_provider_of_16_bits_is_not_asked_of_attention_in_fp8(benchmark, monkeypatch):
    asked, _ = asked_of(benchmark, monkeypatch, args_of(what=["fp8"], provider="kprof-hopper"))
    assert asked[asked.index("--swap") + 1] == "attention_fp8=kprof"


@pytest.mark.parametrize(
    ("what", "precision", "levels"),
    [("prefill", "same", ("L2", "L3", "L5")), ("fp8", "lower", ("L3", "L5"))],
)
def test_in_fp8_logits_are_judged_as_of_a_lower_precision(
    benchmark, monkeypatch, what, precision, levels
):
    module, asked = benchmark("attention_gate"), []

    def checked(*, model, levels):
        asked.append((model.precision, levels))

    monkeypatch.setattr(module, "check", checked)
    monkeypatch.setattr(module, "swapped", lambda *words: module.nullcontext())
    monkeypatch.setattr(module, "reading", lambda *words: ([], torch.zeros(16 * 80, 3)))
    model, text = torch.nn.Linear(1, 1), torch.zeros(100, dtype=torch.uint8)
    model.device = torch.device("cpu")
    module.in_a_model(what, "kprof", model, (text, text), True)
    assert asked == [(precision, levels)]


def test_a_gate_without_an_answer_is_a_problem_of_each_part(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark("attention_ab"), "GATE", "nowhere.py")
    found = benchmark("attention_ab").gated(args_of(tiny=True), 20)
    assert "nowhere.py" in found["prefill"]["gate"]["problem"]


def test_a_gate_that_was_ended_ran_out_of_time(benchmark, monkeypatch):
    module = benchmark("attention_ab")
    ended = SimpleNamespace(stdout="", stderr="a warning", returncode=124)
    monkeypatch.setattr(module.subprocess, "run", lambda *words, **options: ended)
    found = module.gated(args_of(), 20)
    assert found["prefill"]["gate"]["problem"] == "out of time"


def test_a_result_holds_class_and_ratio(benchmark, tmp_path, monkeypatch):
    module = benchmark("attention_ab")
    claim = {
        "metric": {"name": "step time"},
        "verdict": "FASTER",
        "num_pairs": 9,
        "interval": {"ratio": 0.9, "low": 0.88, "high": 0.92},
    }
    found = {
        "prefill": {"claims": [claim], "per_token": None, "targets": None},
        "gate": {
            "reached": "NUMERICALLY EQUIVALENT",
            "levels": [{"name": "L2", "state": "passed"}],
        },
    }
    module.write("prefill", found, args_of(out=tmp_path, commit="c"))
    (path,) = tmp_path.glob("ab_attention_prefill_h200_*.json")
    rows = {one["name"]: one for one in json.loads(path.read_text())["rows"]}
    assert rows["prefill-step-time"]["interval"] == [0.88, 0.92]
    assert rows["gate"]["verdict"] == "NUMERICALLY EQUIVALENT"


@pytest.mark.parametrize(
    ("what", "kernel", "are_forward"),
    [
        ("training", "attention_forward", False),
        ("prefill", "attention_forward", True),
        ("fp8", "attention_fp8", True),
    ],
)
def test_the_kernel_is_judged_with_gradients_where_it_trains(
    benchmark, monkeypatch, what, kernel, are_forward
):
    module, asked = benchmark("attention_gate"), []
    levels = tuple(Level(name, "passed", "said so") for name in LEVELS)

    def checked(names, provider, *, calls):
        asked.append((names, provider, calls.dtypes, calls.are_forward))
        return [GateReport("attention", levels, LEVELS[:2])]

    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.kernels, "check_kernels", checked)
    assert module.judged_alone(what, "kprof") == {one.name: one for one in levels[:2]}
    assert asked == [([kernel], "kprof", ("bfloat16",), are_forward)]


@pytest.mark.parametrize(
    ("state", "reached"), [("passed", "NUMERICALLY EQUIVALENT"), ("failed", "REJECT")]
)
def test_a_kernel_that_fails_alone_fails_in_its_model(benchmark, state, reached):
    streams = [torch.ones(4, 8)]
    report = check(model=Model("a model", hidden=lambda arm: streams), levels=("L2",))
    alone = {name: Level(name, state, "said so") for name in LEVELS[:2]}
    told = benchmark("attention_gate").with_kernel((report, ABOUT), alone)
    assert (told["reached"], told["num_taken"]) == (reached, 2)
    assert [one["name"] for one in told["levels"]] == ["L0", "L1", "L2"]


def test_an_unjudged_kernel_reaches_no_class(benchmark):
    report = check(model=Model("a model", hidden=lambda arm: [torch.ones(4, 8)]), levels=("L2",))
    alone = {name: not_run(name, "there is no GPU") for name in LEVELS[:2]}
    told = benchmark("attention_gate").with_kernel((report, ABOUT), alone)
    assert (told["reached"], told["missing"]) == (None, ["L0", "L1"])


def test_a_model_that_never_called_the_kernel_reaches_no_class(benchmark):
    report = check(model=Model("a model", hidden=lambda arm: [torch.ones(4, 8)]), levels=("L2",))
    about = {**ABOUT, "num_taken": 0, "fallen_back": ["dropout"]}
    told = benchmark("attention_gate").with_kernel((report, about), {})
    assert told.keys() == {"problem"}
    assert told["problem"].endswith(": dropout")


class Reader(torch.nn.Module):
    """Passes on what it reads, doubled in each of two layers; says how many it was given."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def forward(self, given, **options):
        self.batches.append(len(given))
        x = given[..., None].float()
        return SimpleNamespace(hidden_states=(x, 2 * x, 4 * x), logits=x)


def test_reading_again_is_in_other_batches_and_gives_the_same(benchmark):
    reader, given = Reader(), torch.arange(8).reshape(4, 2)
    once, again = (benchmark("attention_gate").reading(reader, given, a) for a in ("new", "again"))
    assert reader.batches == [4, 2, 2]
    assert [one.tolist() for one in again[0]] == [one.tolist() for one in once[0]]
    assert [len(one) for one in once[0]] == [4, 4]
    assert again[1].flatten().tolist() == list(range(8))


def test_only_the_new_arm_has_the_kernel(benchmark):
    module = benchmark("attention_gate")
    for arm in ("replaced", "again"):
        with module.swapped(arm, torch.nn.Linear(2, 2), "attention_forward=eager") as swap:
            assert swap is None
    with module.swapped("new", torch.nn.Linear(2, 2), "attention_forward=eager") as swap:
        assert swap.is_on


def test_parts_of_a_batch_add_up_to_its_loss_and_gradient(benchmark):
    torch.manual_seed(0)
    table = torch.nn.Embedding(5, 5)

    class Learner(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, given, **options):
            return SimpleNamespace(logits=table(given))

    step_of = benchmark("attention_gate").step_of
    pieces = torch.tensor([[0, 1, 2], [3, 4, 0]])
    whole = step_of(Learner(), pieces, 1)
    gradient, table.weight.grad = table.weight.grad, None
    assert sum(step_of(Learner(), part, 2) for part in pieces.split(1)) == pytest.approx(whole)
    torch.testing.assert_close(table.weight.grad, gradient)
