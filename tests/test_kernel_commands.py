"""`kprof kernels`: what it says of checks and measurements, on stand-ins for both."""

import json

import pytest
import torch

from kprof import library
from kprof.commands.kernels import kernels
from kprof.errors import KprofError
from kprof.gate import GateReport, Measure
from kprof.gate.result import LEVELS, judge, not_run
from kprof.kernels import _bench
from kprof.kernels._bench import Timed


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
        ("check", "--backward", {"backward": True}),
        ("bench", "--provider", {"provider": "liger"}),
        ("list", "--sanitizer", {"sanitizer": True}),
        ("explain", "--dtype", {"dtype": ["bfloat16"]}),
    ],
)
def test_an_option_that_the_action_does_not_use_is_refused_before_anything_runs(
    action, option, given
):
    with pytest.raises(KprofError, match=f"{action} takes no {option}"):
        kernels(action, **given)


def test_a_list_of_named_kernels_is_refused_and_their_choices_pointed_to():
    with pytest.raises(KprofError, match="kprof kernels explain rmsnorm"):
        kernels("list", ["rmsnorm"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to watch")
def test_the_sanitizer_is_refused_where_nothing_runs_on_a_gpu():
    with pytest.raises(KprofError, match="compute-sanitizer"):
        kernels("check", ["relu_squared"], sanitizer=True)


def test_whoever_fails_the_gate_is_not_chosen_however_fast(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")

    def bench(kernel, shape, dtype, direction):
        for name, gpu_ns in (("inductor", 10_000.0), ("kprof", 20_000.0)):
            yield Timed(kernel.name, name, shape, dtype, direction, gpu_ns=gpu_ns)

    def reject(kernel, known, provider, dtype):
        return "L1: output" if provider == "inductor" else ""

    monkeypatch.setattr(_bench, "bench", bench)
    monkeypatch.setattr(library, "_why_rejected", reject)
    answer = kernels("bench", ["relu_squared"], shape="8x8", backward=True, json=True)
    told = json.loads(answer.json)
    assert [(one["direction"], one["provider"]) for one in told] == [
        ("forward", "kprof"),
        ("backward", "kprof"),
    ]
    assert "fails the quality gate, L1: output" in told[0]["measured"][0]["problem"]


def test_a_provider_that_breaks_the_gpu_ends_the_measuring_with_its_name(monkeypatch):
    broken = not_run("L1", "the replaced code broke the GPU (8x8): misaligned address")
    levels = (
        judge("L0", [], "4 cases"),
        broken,
        *(not_run(n, "not asked for") for n in LEVELS[2:]),
    )
    found = GateReport("relu_squared by eager", levels, ("L0", "L1"), is_gpu_broken=True)
    monkeypatch.setattr("kprof.gate.check", lambda *words: found)
    (kernel,) = library._named(["relu_squared"])
    with pytest.raises(KprofError, match="relu_squared by eager: the replaced code broke the GPU"):
        library._why_rejected(kernel, {}, "eager", "float16")


def test_a_provider_that_cannot_run_here_is_a_clear_error(monkeypatch):
    def missing(*words):
        raise ImportError("No module named 'quack'")

    monkeypatch.setattr(library, "_device_to_check_on", lambda: "cpu")
    monkeypatch.setattr("kprof.kernels._subject.subject_of", missing)
    with pytest.raises(KprofError, match="rmsnorm by quack cannot run here"):
        library.check_kernels(["rmsnorm"], "quack")
