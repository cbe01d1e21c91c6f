"""Which provider of a kernel runs in which pass, and how that is remembered."""

import json
import math
from dataclasses import replace

import pytest

from kprof.kernels import Provider, kernel_named
from kprof.kernels.bench.choice import (
    bucket_of,
    choose,
    file_of,
    find_choice,
    keep,
    load_choices,
    passes_of,
    ranking,
    without_rejected,
)
from kprof.kernels.bench.measure import Timed
from kprof.kernels.norm import RMSNORM
from tests.quantities import quantities_in


def timed(provider, gpu_ns, host_ns=5_000.0, problem="", direction="forward"):
    about = {"kernel": "rmsnorm", "shape": (8192, 4096), "dtype": "bfloat16"}
    return Timed(
        provider=provider,
        gpu_ns=gpu_ns,
        host_ns=host_ns,
        problem=problem,
        direction=direction,
        **about,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def choice_of(*measured):
    return choose(RMSNORM, measured, "NVIDIA H200", "2026-11-20")


def test_the_fastest_runs_of_any_provider():
    assert choice_of(timed("kprof", 40_000.0), timed("quack", 35_000.0)).provider == "quack"


def test_among_equals_the_one_that_costs_the_host_less_runs():
    measured = (timed("quack", 40_000.0, host_ns=30_000.0), timed("kprof", 40_200.0, 6_000.0))
    assert choice_of(*measured).provider == "kprof"


def test_the_fastest_runs_among_equals_of_unknown_host_cost():
    assert choice_of(timed("kprof", 40_200.0, None), timed("quack", 40_000.0, None)).provider == (
        "quack"
    )


def test_who_could_not_be_measured_does_not_run():
    assert choice_of(timed("kprof", 40_000.0), timed("liger", None)).provider == "kprof"
    wrong = timed("liger", 10_000.0, problem="failed the gate")
    assert choice_of(timed("kprof", 40_000.0), wrong).provider == "kprof"


def test_the_reference_runs_where_no_provider_could_be_measured():
    assert choice_of(timed("kprof", None)).provider == "eager"
    assert ranking([]) == []


def test_the_fastest_that_fails_the_gate_does_not_run_and_the_reason_is_kept():
    measured = [timed("quack", 10_000.0), timed("kprof", 40_000.0), timed("eager", 90_000.0)]
    reasons = {("quack", "bfloat16", "forward"): "L1: output, bfloat16"}
    left = without_rejected(measured, lambda *asked: reasons.get(asked, ""))
    assert choice_of(*left).provider == "kprof"
    assert reasons["quack", "bfloat16", "forward"] in left[0].problem
    assert left[0].gpu_ns == 10_000.0


def test_where_all_fail_the_gate_the_replaced_code_stays():
    left = without_rejected([timed("kprof", 40_000.0)], lambda *asked: "L0: writes")
    assert choice_of(*left).provider == "eager"


def test_only_who_would_win_is_judged():
    measured = [timed("quack", 10.0), timed("kprof", 20.0), timed("liger", 30.0)]
    judged = []

    def judge(name, dtype, direction):
        judged.append(name)
        return "L0: writes" if name == "quack" else ""

    without_rejected(measured, judge)
    assert judged == ["quack", "kprof"]


def test_calls_without_gradients_and_with_them_are_chosen_for_apart():
    forward = [timed("liger", 10.0), timed("kprof", 20.0)]
    training = [timed("liger", 50.0), timed("kprof", 40.0)]
    keep(choice_of(*forward))
    keep(choice_of(*[replace(one, direction="training") for one in training]))
    asked = (RMSNORM, "NVIDIA H200", "bfloat16", (8192, 4096))
    assert find_choice(*asked, "forward").provider == "liger"
    assert find_choice(*asked, "training").provider == "kprof"


def test_what_has_no_backward_pass_is_chosen_for_without_gradients_only():
    assert passes_of(kernel_named("cross_entropy")) == ("forward", "training")
    assert passes_of(kernel_named("decode_attention")) == ("forward",)


def test_who_has_no_backward_pass_is_not_chosen_for_calls_with_gradients():
    measured = [timed("liger", None, problem="no backward pass"), timed("kprof", 40.0)]
    measured = [replace(one, direction="training") for one in measured]
    assert choice_of(*measured).provider == "kprof"


def test_choices_for_a_backward_pass_alone_count_as_none_and_the_others_stay():
    keep(choice_of(timed("kprof", 40_000.0)))
    path = file_of("NVIDIA H200")
    (forward,) = json.loads(path.read_text())
    backward = {**forward, "direction": "backward"}
    backward["measured"] = [{**one, "direction": "backward"} for one in forward["measured"]]
    path.write_text(json.dumps([forward, backward]))
    assert [one.direction for one in load_choices("NVIDIA H200")] == ["forward"]
    assert find_choice(RMSNORM, "NVIDIA H200", "bfloat16", (8192, 4096), "training") is None
    keep(choice_of(timed("liger", 30_000.0, direction="training")))
    assert [one["direction"] for one in json.loads(path.read_text())] == ["forward", "training"]


def test_a_choice_says_by_how_much_it_won():
    why = choice_of(timed("liger", 80_000.0), timed("kprof", 40_000.0)).why
    assert (quantities_in(why)[0], "liger" in why) == ("2.00", True)
    assert "no other provider" in choice_of(timed("kprof", 40_000.0)).why


def test_rows_are_measured_by_powers_of_two_and_columns_exactly():
    expected = {
        (8192, 4096): (8192, 4096),
        (4, 2000, 4096): (8192, 4096),
        (1, 7): (1, 7),
        (7,): (1, 7),
    }
    assert {shape: bucket_of(RMSNORM, shape) for shape in expected} == expected


@pytest.mark.parametrize(
    ("kernel", "measured", "alike", "other"),
    [
        # Of decoding: many sequences over few keys are as many keys as one over many.
        (
            "decode_attention",
            (128, 32, 8, 1, 2048, 128),
            (100, 32, 8, 1, 1500, 128),
            (1, 32, 8, 1, 262_144, 128),
        ),
        (
            "attention_forward",
            (32, 16, 16, 512, 512, 1, 128),
            (30, 16, 16, 500, 512, 1, 128),
            (1, 16, 16, 16_384, 512, 1, 128),
        ),
        ("linear_cross_entropy", (8192, 4096, 32_000), (5000, 4096, 32_000), (4096, 8192, 32_000)),
    ],
)
def test_what_a_kernels_shapes_tell_apart_stays_apart(kernel, measured, alike, other):
    kernel = kernel_named(kernel)
    assert bucket_of(kernel, alike) == bucket_of(kernel, measured)
    assert bucket_of(kernel, other) != bucket_of(kernel, measured)
    assert math.prod(other) == pytest.approx(math.prod(measured), rel=0.01)


def decode_choice():
    measured = timed("flash-attn-3", 40_000.0)
    measured = replace(measured, kernel="decode_attention", shape=(128, 32, 8, 1, 2048, 128))
    return choose(kernel_named("decode_attention"), [measured], "NVIDIA H200", "2026-11-23")


@pytest.mark.parametrize(
    ("shape", "provider"),
    [
        ((100, 32, 8, 1, 1500, 128), "flash-attn-3"),
        ((64, 32, 8, 1, 2048, 128), None),
        ((128, 32, 8, 1, 2049, 128), None),
        ((1, 32, 8, 1, 262_144, 128), None),
        ((128, 32, 8, 1, 2048, 64), None),
    ],
)
def test_a_choice_decides_for_no_batch_or_context_of_another_power_of_two(shape, provider):
    keep(decode_choice())
    found = find_choice(kernel_named("decode_attention"), "NVIDIA H200", "bfloat16", shape)
    assert getattr(found, "provider", None) == provider


def test_a_choice_that_an_older_kprof_kept_for_all_of_a_shape_at_once_decides_nothing():
    keep(replace(decode_choice(), bucket=(1 << 26, 128)))
    asked = (kernel_named("decode_attention"), "NVIDIA H200", "bfloat16")
    assert find_choice(*asked, (128, 32, 8, 1, 2048, 128)) is None


def test_all_of_the_numbers_that_decide_are_told_apart():
    gemm, attention = kernel_named("fp8_gemm"), kernel_named("attention_forward")
    assert bucket_of(gemm, (5, 48, 80)) == (8, 48, 80)
    causal, whole = (2, 16, 16, 2048, 2048, 1, 128), (2, 16, 16, 2048, 2048, 0, 128)
    window = (2, 16, 16, 2048, 2048, 100, 128)
    assert len({bucket_of(attention, shape) for shape in (causal, whole, window)}) == 3


def test_a_choice_is_found_again_for_calls_like_those_measured():
    keep(choice_of(timed("kprof", 40_000.0)))
    found = find_choice(RMSNORM, "NVIDIA H200", "bfloat16", (2, 4000, 4096))
    assert found.provider == "kprof"
    assert find_choice(RMSNORM, "NVIDIA H200", "bfloat16", (8192, 2048)) is None
    assert find_choice(RMSNORM, "NVIDIA H200", "float16", (8192, 4096)) is None
    assert find_choice(RMSNORM, "NVIDIA B200", "bfloat16", (8192, 4096)) is None


def test_a_new_choice_takes_the_place_of_the_former():
    keep(choice_of(timed("liger", 40_000.0)))
    keep(choice_of(timed("kprof", 30_000.0)))
    assert [one.provider for one in load_choices("NVIDIA H200")] == ["kprof"]


def test_other_versions_are_not_those_that_were_measured():
    keep(choice_of(timed("kprof", 40_000.0)))
    providers = (*RMSNORM.providers, Provider("other", lambda: None, "numpy"))
    other = replace(RMSNORM, providers=providers)
    assert find_choice(other, "NVIDIA H200", "bfloat16", (8192, 4096)) is None


def test_a_damaged_file_of_choices_counts_as_none():
    keep(choice_of(timed("kprof", 40_000.0)))
    file_of("NVIDIA H200").write_text("[{")
    assert load_choices("NVIDIA H200") == []
