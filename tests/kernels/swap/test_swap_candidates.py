"""Candidates of `--swap auto`: whose turn it is, and what the log says of each."""

import json

import pytest
import torch
from torch import nn

from kprof.errors import KprofError
from kprof.kernels.swap import swapping
from kprof.kernels.swap.candidates import candidate_names, next_candidate
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Norm


def events(log):
    return [(one["event"], one["name"]) for one in map(json.loads, log.read_text().splitlines())]


@pytest.fixture(autouse=True)
def roots(monkeypatch):
    """Return the models of this process: those that a test names, and none of earlier tests."""
    found = []
    monkeypatch.setattr(swapping, "all_roots", lambda: found)
    return found


def turn(names, log, model):
    swapping.all_roots()[:] = [model]
    with next_candidate(",".join(names), str(log)):
        model(torch.ones(2, 16))


def test_each_candidate_has_its_turn_and_one_that_replaces_no_call_none_after_it(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    names = ["rmsnorm=eager", "swiglu=eager", "layernorm=aten"]
    for _ in range(3):
        turn(names, log, model)
    assert [one for one in events(log) if one[0] != "leave"] == [
        ("enter", "rmsnorm=eager"),
        ("enter", "swiglu=eager"),
        ("drop", "swiglu=eager"),
        ("enter", "layernorm=aten"),
        ("enter", "rmsnorm=eager"),
    ]
    calls = [one.get("num_calls") for one in map(json.loads, log.read_text().splitlines())]
    assert calls == [None, 1, None, None, None, 1, None, 2]


def test_a_candidate_that_is_decided_has_no_more_turns(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    for _ in range(3):
        turn(["rmsnorm=eager", "layernorm=aten"], log, model)
        log.with_suffix(".decided").write_text("rmsnorm=eager\nrope=kprof")
    assert [one[1] for one in events(log) if one[0] == "enter"] == [
        "rmsnorm=eager",
        *["layernorm=aten"] * 2,
    ]
    log.with_suffix(".decided").write_text("rmsnorm=eager\nlayernorm=aten")
    turn(["rmsnorm=eager", "layernorm=aten"], log, model)
    assert len(events(log)) == 6


def test_behind_each_turn_the_model_is_as_it_was(tmp_path):
    model = nn.Sequential(Norm(16))
    for _ in range(2):
        turn(["rmsnorm=eager"], tmp_path / "log", model)
        with swapped(model, "rmsnorm=eager") as swap:
            assert len(swap.replaced) == 1
    assert "forward" not in vars(model[0])


def test_an_error_of_the_workload_leaves_the_candidate(tmp_path, roots):
    model = nn.Sequential(Norm(16))
    roots.append(model)
    with pytest.raises(ZeroDivisionError), next_candidate("rmsnorm=eager", str(tmp_path / "log")):
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_with_no_candidate_left_the_workload_runs_as_it_is(tmp_path):
    for _ in range(2):
        turn(["swiglu=eager"], tmp_path / "log", nn.Sequential(Norm(16)))
    assert events(tmp_path / "log") == [("enter", "swiglu=eager"), ("drop", "swiglu=eager")]


def test_candidates_keep_the_precision_and_repeat_their_bits():
    names = candidate_names()
    assert {"rmsnorm=kprof", "cross_entropy=kprof", "layernorm=aten"} <= set(names)
    assert not {"fp8_linear=kprof", "attention_fp8=kprof"} & set(names)
    assert "attention_forward=kprof-hopper-unordered" not in names
    assert not [one for one in names if one.endswith(("=eager", "=inductor"))]


def test_only_a_comparison_can_choose():
    with pytest.raises(KprofError) as error:
        swapped(nn.Sequential(Norm(16)), "auto")
    assert "kprof ab --swap auto" in error.value.fix
