"""Which provider of a kernel runs, and how that is remembered."""

from dataclasses import replace

import pytest

from kprof.kernels import Provider
from kprof.kernels._bench import Timed
from kprof.kernels._choice import (
    bucket_of,
    choose,
    file_of,
    find_choice,
    keep,
    load_choices,
    ranking,
    without_rejected,
)
from kprof.kernels.rmsnorm import KERNEL


def timed(provider, gpu_ns, host_ns=5_000.0, problem=""):
    about = {"kernel": "rmsnorm", "shape": (8192, 4096), "dtype": "bfloat16"}
    return Timed(
        provider=provider,
        gpu_ns=gpu_ns,
        host_ns=host_ns,
        problem=problem,
        direction="forward",
        **about,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def choice_of(*measured):
    return choose(KERNEL, measured, "NVIDIA H200", "2026-11-20")


def test_the_fastest_runs_whoever_made_it():
    assert choice_of(timed("kprof", 40_000.0), timed("quack", 35_000.0)).provider == "quack"


def test_among_equals_the_one_that_costs_the_host_less_runs():
    measured = (timed("quack", 40_000.0, host_ns=30_000.0), timed("kprof", 40_200.0, 6_000.0))
    assert choice_of(*measured).provider == "kprof"


def test_who_could_not_be_measured_does_not_run():
    assert choice_of(timed("kprof", 40_000.0), timed("liger", None)).provider == "kprof"
    wrong = timed("liger", 10_000.0, problem="failed the gate")
    assert choice_of(timed("kprof", 40_000.0), wrong).provider == "kprof"


def test_where_nobody_could_be_measured_the_reference_runs():
    assert choice_of(timed("kprof", None)).provider == "eager"
    assert ranking([]) == []


def test_the_fastest_that_fails_the_gate_does_not_run_and_the_reason_is_kept():
    measured = [timed("quack", 10_000.0), timed("kprof", 40_000.0), timed("eager", 90_000.0)]
    reasons = {"quack": "L1: output, bfloat16"}
    (left,) = without_rejected([measured], lambda name, dtype: reasons.get(name, ""))
    assert choice_of(*left).provider == "kprof"
    assert "fails the quality gate, L1: output" in left[0].problem
    assert left[0].gpu_ns == 10_000.0


def test_where_all_fail_the_gate_the_replaced_code_stays():
    (left,) = without_rejected([[timed("kprof", 40_000.0)]], lambda name, dtype: "L0: writes")
    assert choice_of(*left).provider == "eager"


def test_only_who_might_win_a_pass_or_all_of_them_is_judged():
    forward = [timed("quack", 10.0), timed("kprof", 20.0), timed("liger", 30.0)]
    backward = [timed("quack", 90.0), timed("kprof", 50.0), timed("liger", 40.0)]
    forward.append(timed("eager", 300.0))
    backward.append(timed("eager", 300.0))
    judged = []
    without_rejected([forward, backward], lambda name, dtype: judged.append((name, dtype)) or "")
    # The fastest forward, the fastest backward, and the fastest of both together.
    everyone = ("kprof", "liger", "quack")
    assert sorted(judged) == [(name, "bfloat16") for name in everyone]


def test_a_choice_says_by_how_much_it_won():
    assert (
        "2.00 times as fast as liger"
        in choice_of(timed("liger", 80_000.0), timed("kprof", 40_000.0)).why
    )
    assert "no other provider" in choice_of(timed("kprof", 40_000.0)).why


@pytest.mark.parametrize(
    ("shape", "bucket"),
    [
        ((8192, 4096), (8192, 4096)),
        ((4, 2000, 4096), (8192, 4096)),
        ((1, 7), (1, 7)),
        ((7,), (1, 7)),
    ],
)
def test_rows_are_measured_by_powers_of_two_and_columns_exactly(shape, bucket):
    assert bucket_of(shape) == bucket


def test_a_choice_is_found_again_for_calls_like_those_measured():
    keep(choice_of(timed("kprof", 40_000.0)))
    found = find_choice(KERNEL, "NVIDIA H200", "bfloat16", (2, 4000, 4096))
    assert found.provider == "kprof"
    assert find_choice(KERNEL, "NVIDIA H200", "bfloat16", (8192, 2048)) is None
    assert find_choice(KERNEL, "NVIDIA H200", "float16", (8192, 4096)) is None
    assert find_choice(KERNEL, "NVIDIA B200", "bfloat16", (8192, 4096)) is None


def test_a_new_choice_takes_the_place_of_the_former():
    keep(choice_of(timed("liger", 40_000.0)))
    keep(choice_of(timed("kprof", 30_000.0)))
    assert [one.provider for one in load_choices("NVIDIA H200")] == ["kprof"]


def test_other_versions_are_not_those_that_were_measured():
    keep(choice_of(timed("kprof", 40_000.0)))
    providers = (*KERNEL.providers, Provider("other", lambda: None, "numpy"))
    other = replace(KERNEL, providers=providers)
    assert find_choice(other, "NVIDIA H200", "bfloat16", (8192, 4096)) is None


def test_a_damaged_file_of_choices_counts_as_none():
    keep(choice_of(timed("kprof", 40_000.0)))
    file_of("NVIDIA H200").write_text("[{")
    assert load_choices("NVIDIA H200") == []
