"""`kprof kernels`: what it says of checks and measurements, on stand-ins for both."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kprof.commands import kernels as library
from kprof.commands.kernels import kernels
from kprof.errors import KprofError
from kprof.kernels.bench import measure
from kprof.kernels.bench.measure import Timed
from kprof.kernels.correctness import GateReport, Measure
from kprof.kernels.correctness.levels import LEVELS, judge, not_run
from kprof.report.terminal import print_summary
from tests.quantities import quantities_in


def report(*, is_right):
    fault = Measure("right", 0 if is_right else 2, 0, None, "faults", where="raises")
    done = [judge("L0", [fault], "4 cases"), judge("L1", [], "9 cases", is_bit_exact=True)]
    others = [not_run(name, "not asked for") for name in LEVELS[2:]]
    return GateReport("rmsnorm by kprof", (*done, *others), ("L0", "L1"))


@pytest.mark.parametrize(
    ("is_right", "reached", "exit_code"), [(True, "BIT-EXACT", 0), (False, "REJECT", 1)]
)
def test_a_check_as_json_tells_the_class_that_was_reached(
    monkeypatch, is_right, reached, exit_code
):
    found = [report(is_right=is_right)]
    monkeypatch.setattr(library, "check_kernels", lambda *words, **options: found)
    answer = kernels("check", ["rmsnorm"], json=True)
    (told,) = json.loads(answer.json)
    assert (told["reached"], told["passed"]) == (reached, is_right)
    assert [one["name"] for one in told["levels"]] == list(LEVELS)
    assert answer.exit_code == exit_code


@pytest.mark.parametrize(
    ("action", "option", "given"),
    [
        ("check", "--shape", {"shape": "axb"}),
        ("bench", "--forward", {"forward": True}),
        ("bench", "--provider", {"provider": "liger"}),
        ("list", "--sanitizer", {"sanitizer": True}),
        ("explain", "--dtype", {"dtype": ["bfloat16"]}),
    ],
)
def test_an_option_that_the_action_does_not_use_is_refused_before_anything_runs(
    action, option, given
):
    with pytest.raises(KprofError, match=rf"{action} .*{option}\b"):
        kernels(action, **given)


@pytest.mark.parametrize(
    ("given", "name", "differentiable", "dtypes"),
    [
        ({}, "relu_squared by eager", (0,), ("float16", "float32")),
        ({"forward": True}, "relu_squared forward by eager", (), ("float16", "float32")),
        (
            {"forward": True, "dtype": ["float16"]},
            "relu_squared forward in float16 by eager",
            (),
            ("float16",),
        ),
    ],
    ids=["all", "forward", "forward in float16"],
)
def test_a_check_judges_the_calls_that_are_asked_for_and_names_them(
    monkeypatch, given, name, differentiable, dtypes
):
    subjects = []

    def check(subject, levels):
        subjects.append(subject)
        return replace(report(is_right=True), subject=subject.name)

    monkeypatch.setattr(library, "device_to_check_on", lambda: "cpu")
    monkeypatch.setattr("kprof.kernels.correctness.check", check)
    answer = kernels("check", ["relu_squared"], provider="eager", json=True, **given)
    assert json.loads(answer.json)[0]["subject"] == name
    assert (subjects[0].differentiable, subjects[0].dtypes) == (differentiable, dtypes)


def test_what_the_interpreter_does_not_compute_as_a_gpu_is_not_run(monkeypatch):
    monkeypatch.setattr(library, "device_to_check_on", lambda: "cpu")
    answer = kernels("check", ["relu_squared"], dtype=["bfloat16"], json=True)
    (told,) = json.loads(answer.json)
    assert {one["state"] for one in told["levels"]} == {"not run"}
    assert "bfloat16" in told["levels"][0]["why"]
    assert answer.exit_code == 3


def test_a_dtype_that_a_kernel_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(library, "device_to_check_on", lambda: "cpu")
    with pytest.raises(KprofError, match=r"relu_squared .*float64"):
        kernels("check", ["relu_squared"], dtype=["float64"])


@pytest.mark.parametrize("given", [{"forward": True}, {"dtype": ["float16"]}], ids=str)
def test_the_sanitizer_watches_all_calls_or_none(monkeypatch, given):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(KprofError) as error:
        kernels("check", ["relu_squared"], sanitizer=True, **given)
    assert "--sanitizer" in error.value.fix and "--dtype" in error.value.fix


def test_a_list_of_named_kernels_is_refused_and_their_choices_pointed_to():
    with pytest.raises(KprofError, match="'rmsnorm'") as error:
        kernels("list", ["rmsnorm"])
    assert "kprof kernels explain rmsnorm" in error.value.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to watch")
def test_the_sanitizer_is_refused_where_nothing_runs_on_a_gpu():
    with pytest.raises(KprofError, match="compute-sanitizer"):
        kernels("check", ["relu_squared"], sanitizer=True)


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """Pretend that there is a GPU, on which nothing was measured yet; measure with what it takes.

    It is given times by pass and provider, and who fails the gate in which pass. It returns what
    the gate will have judged.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")

    def measuring(times_ns, rejected=()):
        def bench(kernel, shape, dtype, direction):
            for name, gpu_ns in times_ns[direction].items():
                yield Timed(kernel.name, name, shape, dtype, direction, gpu_ns=gpu_ns)

        def check(subject, levels):
            judged.append(subject)
            direction = "training" if subject.differentiable else "forward"
            provider = subject.name.rpartition(" ")[2]
            return report(is_right=(provider, direction) not in rejected)

        judged = []
        monkeypatch.setattr(measure, "bench", bench)
        monkeypatch.setattr("kprof.kernels.correctness.check", check)
        return judged

    return measuring


def told_of(answer):
    return [(one["direction"], one["provider"]) for one in json.loads(answer.json)]


def test_a_gradient_made_beside_the_result_counts_in_the_pass_that_is_paid_for(h200):
    h200({"forward": {"kprof": 2e4, "eager": 1e4}, "training": {"kprof": 3e4, "eager": 5e4}})
    answer = kernels("bench", ["relu_squared"], shape="8x8", json=True)
    assert told_of(answer) == [("forward", "eager"), ("training", "kprof")]
    assert told_of(kernels("explain", json=True)) == told_of(answer)


def test_a_choice_is_explained_with_its_pass(h200):
    h200({"forward": {"kprof": 2e4, "eager": 1e4}, "training": {"kprof": 3e4, "eager": 6e4}})
    kernels("bench", ["relu_squared"], shape="8x8")
    forward, training = kernels("explain", ["relu_squared"]).sections
    assert forward.title == "relu_squared forward, 8x8 bfloat16"
    lead = forward.parts[0].text
    assert "without gradients" in lead and "NVIDIA H200: eager" in lead
    assert quantities_in(lead)[0] == "2.00"
    assert training.title == "relu_squared training, 8x8 bfloat16"
    lead = training.parts[0].text
    assert "with gradients" in lead and "NVIDIA H200: kprof" in lead
    assert "backward" in training.parts[1].caption
    assert "backward" not in forward.parts[1].caption


def test_what_takes_long_says_what_it_is_at(h200):
    h200({"forward": {"kprof": 2e4}, "training": {"kprof": 3e4}})
    stages = []
    library.bench_kernels(["relu_squared"], (8, 8), [], stages.append)
    at = [stage.partition(": ")[0] for stage in stages]
    passes = ("forward", "forward", "training", "training")
    assert at == [f"relu_squared {direction}, 8x8 bfloat16" for direction in passes]
    assert len(set(stages)) == 4


def test_without_a_terminal_each_step_is_a_line(h200, capsys):
    h200({"forward": {"kprof": 2e4}, "training": {"kprof": 3e4}})
    kernels("bench", ["relu_squared"], shape="8x8")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("kprof: relu_squared forward, 8x8")


def test_the_list_and_the_page_name_the_kernels_that_no_swap_puts_into_a_model():
    text = kernels("list").sections[0].parts[-1].text
    told = json.loads(kernels("list", json=True).json)
    without = [one["name"] for one in told if not one["has_sites"]]
    assert text.partition(": ")[2] == f"{', '.join(without)}."
    page = (Path(__file__).parents[2] / "docs" / "swap.md").read_text()
    (line,) = re.findall(r"^- (`[^-]*) have no sites", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", line)) == without


@pytest.mark.parametrize(
    ("has_gpu", "last"),
    [
        (True, "next: kprof kernels bench"),
        (False, "next: kprof kernels bench, on a machine with a GPU"),
    ],
)
def test_after_a_check_the_next_command_is_one_that_works_here(monkeypatch, has_gpu, last):
    monkeypatch.setattr(library, "check_kernels", lambda *_, **__: [report(is_right=True)])
    monkeypatch.setattr(library, "has_gpu", lambda: has_gpu)
    assert kernels("check", ["rmsnorm"]).last == last


def test_80_columns_hold_what_each_kernel_takes_the_place_of(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_summary("kernels", kernels("list").sections, Console())
    shown = capsys.readouterr().out
    assert "scaled_dot_product_attention," in shown
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_what_has_no_backward_pass_is_measured_without_gradients_only(h200):
    h200({"forward": {"kprof": 2e4}})
    answer = kernels("bench", ["quantize_fp8"], shape="8x128", json=True)
    assert told_of(answer) == [("forward", "kprof")]


def test_a_provider_that_fails_the_gate_in_a_pass_is_not_chosen_for_it_however_fast(h200):
    times_ns = {"eager": 1e4, "kprof": 2e4}
    h200({"forward": times_ns, "training": times_ns}, {("eager", "training")})
    answer = kernels("bench", ["relu_squared"], shape="8x8", json=True)
    assert told_of(answer) == [("forward", "eager"), ("training", "kprof")]
    eager, _ = json.loads(answer.json)[1]["measured"]
    failed = report(is_right=False).levels[0]
    assert eager["problem"].endswith(f"{failed.name}: {failed.why}")


def test_who_has_no_backward_pass_may_run_calls_without_gradients(h200):
    judged = h200({"forward": {"eager": 2e4}, "training": {"eager": 3e4}})
    answer = kernels("bench", ["relu_squared"], shape="8x8", dtype=["float16"], json=True)
    assert told_of(answer) == [("forward", "eager"), ("training", "eager")]
    assert [subject.differentiable for subject in judged] == [(), (0,)]
    assert {subject.dtypes for subject in judged} == {("float16",)}


def test_a_provider_that_breaks_the_gpu_ends_the_measuring_with_its_name(h200, monkeypatch):
    h200({"forward": {"eager": 2e4}, "training": {"eager": 3e4}})
    why = "misaligned address"
    broken = not_run("L1", why)
    levels = (
        judge("L0", [], "4 cases"),
        broken,
        *(not_run(n, "not asked for") for n in LEVELS[2:]),
    )
    found = GateReport("relu_squared by eager", levels, ("L0", "L1"), is_gpu_broken=True)
    monkeypatch.setattr("kprof.kernels.correctness.check", lambda *words: found)
    with pytest.raises(KprofError, match=f"relu_squared by eager: .*{why}"):
        kernels("bench", ["relu_squared"], shape="8x8", dtype=["float16"])


def test_a_provider_that_cannot_run_here_is_a_clear_error(monkeypatch):
    def missing(*words):
        raise ImportError("No module named 'quack'")

    monkeypatch.setattr(library, "device_to_check_on", lambda: "cpu")
    monkeypatch.setattr("kprof.kernels.bench.measure.subject_of", missing)
    with pytest.raises(KprofError, match=r"rmsnorm by quack .*No module named 'quack'"):
        library.check_kernels(["rmsnorm"], "quack")


def test_without_a_gpu_stored_choices_are_explained_and_who_runs_the_others(h200, monkeypatch):
    h200({"forward": {"kprof": 2e4}, "training": {"kprof": 3e4}})
    kernels("bench", ["relu_squared"], shape="8x8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forward, training, others = kernels("explain", ["relu_squared", "rmsnorm"]).sections
    assert "NVIDIA H200" in forward.parts[0].text and "NVIDIA H200" in training.parts[0].text
    assert [row[:2] for row in others.parts[1].rows] == [("rmsnorm", "kprof")]
