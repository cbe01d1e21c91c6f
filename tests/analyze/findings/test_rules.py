"""Each rule fires on its fault, and is silent on the clean twin and on a near miss."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from kprof.analyze.findings.diagnose import RULES, diagnose, name_of, why_not
from kprof.analyze.findings.patterns import rows_of_logits
from kprof.analyze.findings.savings import find_pricer
from kprof.analyze.passes import analyze
from kprof.collect.readers.nsys.reader import read
from kprof.errors import modules_in
from kprof.findings import DryRun, DryRunRow, Fix
from kprof.trace import Gpu
from tests.analyze.findings.rule_cases import CASES
from tests.analyze.findings.rule_faults import (
    GATE,
    RMS_NORM,
    attention,
    compiling,
    explained,
    joined,
    loss_of,
    migrating,
    moved_between_kernels,
    updated,
)
from tests.analyze.findings.rule_traces import (
    MS,
    US,
    X,
    product,
    ran,
    repeated,
    rest,
    trace_of_work,
    work,
)
from tests.collect import nsys_files
from tests.planted.machine import Machine
from tests.planted.workloads import forward
from tests.quantities import quantities_in
from tests.traces import ROUND_DEVICE, measured, trace_of

# Rules that weigh what they find by its share of the device time, or of the window.
WEIGHED = (
    *("channels_last", "elementwise_chains", "exposed_collectives", "fp32_products"),
    *("fp8_opportunity", "gemm_shapes", "kv_cache_layout", "low_dram_bandwidth"),
    *("low_occupancy", "math_attention", "needless_checkpointing", "tf32_products"),
    *("tiny_kernels",),
    *("unfused_activation", "unfused_loss", "unfused_norm", "unfused_rope"),
)
MODULES = {name_of(module): module for module in modules_in(RULES)}


def findings(rule, trace):
    """Return what a rule says of a trace that it can be asked of."""
    module = MODULES[rule]
    assert why_not(module, trace) is None
    return module.check(trace)


def test_every_rule_has_a_case():
    assert CASES.keys() == MODULES.keys()


def test_a_rule_fires_on_its_fault():
    told = {rule: [f.rule for f in findings(rule, one.faulty())] for rule, one in CASES.items()}
    assert told == {rule: [rule] for rule in CASES}


def test_a_rule_is_silent_without_its_fault():
    told = {rule: findings(rule, case.clean()) for rule, case in CASES.items()}
    assert {rule: found for rule, found in told.items() if found} == {}


def test_a_rule_is_silent_on_a_near_miss():
    told = {rule: findings(rule, case.near()) for rule, case in CASES.items()}
    assert {rule: found for rule, found in told.items() if found} == {}


PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
SWAPS = {
    rule: re.findall(r"kprof ab --swap (\S+)", (PLAYBOOKS / f"{rule}.md").read_text())
    for rule in CASES
}


def test_what_a_swap_would_mend_comes_with_the_command_that_proves_it():
    # Whether a model is one that `decode` knows, only its process can tell.
    rules = {rule for rule, swaps in SWAPS.items() if swaps} - {"no_cuda_graph_in_decode"}
    told = {rule: findings(rule, CASES[rule].faulty()) for rule in rules}
    commands = {rule: found.command for rule, (found,) in told.items()}
    proofs = {rule: tuple(f"kprof ab --swap {one} " for one in SWAPS[rule]) for rule in commands}
    assert len(proofs) > 5
    assert {r: one for r, one in commands.items() if not one.startswith(proofs[r])} == {}


def test_products_in_fp8_are_not_among_all_swaps():
    # Whether a model's quality allows them nobody knows before.
    (found,) = findings("fp8_opportunity", CASES["fp8_opportunity"].faulty())
    assert found.swap is None


def outweighed(trace):
    """Return the trace with ten seconds more of work that nothing is wrong with."""
    kernels = trace.kernels
    is_rest = (kernels["name"] == "aten::_scaled_mm_kernel").to_numpy(bool)
    assert is_rest.any()
    longer = kernels["duration_ns"] + 10**10 * is_rest
    return trace.with_kernels(duration_ns=longer)


def test_a_rule_is_silent_on_a_fault_that_costs_next_to_nothing():
    told = {rule: findings(rule, outweighed(CASES[rule].faulty())) for rule in WEIGHED}
    assert {rule: found for rule, found in told.items() if found} == {}


def test_an_optimizer_of_a_few_long_launches_is_found_as_well():
    rows = repeated([rest(10 * US)], 20)
    trace = trace_of_work(*rows, *updated("aten::_foreach_addcdiv_", 100 * US, number=2))
    assert [found.swap for found in findings("unfused_optimizer", trace)] == ["adamw"]


@pytest.mark.parametrize(
    ("op", "share", "best", "modest"),
    [
        # Of its 19 accesses a fused Adam makes 7, of its 8 a fused SGD 5: at nine tenths of the
        # memory's bandwidth at best, and no less than it is used today.
        ("aten::_foreach_addcdiv_", 0.45, 7 / 19 / 2, 13 / 19),
        ("aten::_foreach_addcdiv_", 0.99, 7 / 19, 13 / 19),
        ("aten::_foreach_add_", 0.45, 5 / 8 / 2, 13 / 16),
        ("aten::_foreach_add_", 0.99, 5 / 8, 13 / 16),
    ],
)
def test_a_fused_optimizer_takes_as_long_as_its_accesses(op, share, best, modest):
    rows = [work(op, 50 * US, "elementwise", share, phase="optimizer")] * 30
    (found,) = findings("unfused_optimizer", trace_of_work(rest(), *rows))
    took_ns = 30 * 50 * US
    assert found.fix.best_ns == pytest.approx(best * took_ns, rel=1e-3)
    assert found.fix.modest_ns == pytest.approx(modest * took_ns, rel=1e-3)


def test_an_optimizer_without_second_moments_is_no_adam():
    trace = trace_of_work(rest(), *updated("aten::_foreach_add_", 50 * US))
    assert [found.swap for found in findings("unfused_optimizer", trace)] == [None]


def test_logits_of_a_gibibyte_count_where_the_memory_size_is_unknown():
    gpus = (Gpu(0, "Unknown GPU"),)
    small = trace_of_work(rest(), *loss_of([4096, 64000]), gpus=gpus)
    large = trace_of_work(rest(), *loss_of([4096, 66000]), gpus=gpus)
    assert findings("logits_materialised", small) == []
    assert len(findings("logits_materialised", large)) == 1


def test_three_compiled_versions_of_one_region_are_many():
    names = [f"Torch-Compiled Region: 7/{version}" for version in range(3)]
    (found,) = findings("recompilation", compiling(*names))
    assert quantities_in(found.claim)[:2] == ["7", "3"]


def test_a_layer_norm_is_told_from_an_rms_norm():
    rows = [
        work("aten::mean", 12 * US, "reduction", 0.6, shapes=[X, []]),
        work("aten::sub", 25 * US, "elementwise", 0.5, shapes=[X, []]),
        work("aten::mean", 12 * US, "reduction", 0.6, shapes=[X, []]),
        ran("aten::rsqrt", 1 * US, shapes=[[4, 1024, 1]]),
        work("aten::mul", 25 * US, "elementwise", 0.5, shapes=[X, []]),
    ]
    (found,) = findings("unfused_norm", trace_of_work(*rows, rest()))
    assert (found.swap, found.num_rows, len(found.rows)) == ("layernorm", 0, 5)


def test_the_backward_pass_of_a_norm_belongs_to_it():
    back = [{**row, "phase": "backward"} for row in RMS_NORM[:4]]
    (found,) = findings("unfused_norm", trace_of_work(*RMS_NORM, rest(), *back))
    assert len(found.rows) == len(RMS_NORM) + 4


def test_geglu_has_a_kernel_of_its_own():
    trace = trace_of_work(
        work("aten::gelu", 40 * US, "elementwise", 0.8, shapes=[GATE]),
        work("aten::mul", 60 * US, "elementwise", 0.8, shapes=[GATE, GATE]),
        rest(),
    )
    assert [found.swap for found in findings("unfused_activation", trace)] == ["geglu"]


def passes(*ops, phase="forward", size=GATE):
    """Return operators that each pass over a whole tensor."""
    row = {"shapes": [size, size], "phase": phase, "module": "h.0.mlp.act"}
    return [work(f"aten::{op}", 40 * US, "elementwise", 0.8, **row) for op in ops]


# Under autocast, which computes the power in float32.
GELU_OF_GPT2 = [
    *passes(*("mul", "copy_", "pow", "mul", "add", "mul", "tanh", "add", "mul")),
    *passes(*("mul", "mul", "tanh_backward", "mul", "mul", "pow", "mul", "mul"), phase="backward"),
    *passes(*("copy_", "add_", "mul", "add_"), phase="backward"),
]
GELU_OF_BERT = [
    *passes("mul", "div", "erf", "add", "mul"),
    *passes(*("mul", "mul", "pow", "neg", "exp", "mul", "mul", "div"), phase="backward"),
    *passes("mul", "add_", phase="backward"),
]
GELU_OF_CLIP = [
    *passes("mul", "sigmoid", "mul"),
    *passes("mul", "mul", "sigmoid_backward", "mul", "add_", phase="backward"),
]
RELU_SQUARED = [
    *passes("clamp_min", "pow"),
    *passes("pow", "mul", "mul", "threshold_backward", phase="backward"),
]


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [
        *((rows, "gelu") for rows in (GELU_OF_GPT2, GELU_OF_BERT, GELU_OF_CLIP)),
        (RELU_SQUARED, "relu_squared"),
    ],
)
def test_an_activation_that_is_written_out_is_found_as_a_whole(rows, kernel):
    (found,) = findings("unfused_activation", trace_of_work(rest(), *rows, rest()))
    assert (found.swap, found.rows) == (kernel, tuple(range(1, len(rows) + 1)))
    assert found.fix.launches == 2


@pytest.mark.parametrize(
    "rows",
    [
        # A cap of logits, also with a mask behind it.
        passes("div", "tanh", "mul"),
        passes("div", "tanh", "mul", "add"),
        # What is squared is of another size than the ReLU.
        [*passes("clamp_min"), *passes("pow", size=[4, 1024, 1024])],
        # A gate, and the SiLU of a layer's result.
        passes("tanh", "sigmoid", "mul"),
        passes("sigmoid", "mul"),
    ],
)
def test_an_operator_of_a_gelu_alone_is_none(rows):
    assert findings("unfused_activation", trace_of_work(rest(), *rows, rest())) == []


def test_a_gelus_gradient_that_is_summed_up_for_a_bias_is_found():
    products = [{**product(200 * US), "phase": "backward"}] * 2
    back = [*passes("gelu_backward", phase="backward"), *products]
    flat = [4 * 1024, 8192]
    summed = trace_of_work(rest(), *back, *passes("sum", phase="backward", size=flat))
    (found,) = findings("unfused_activation", summed)
    assert (found.swap, found.rows) == ("bias_gelu", (1, 4))
    # A second sum is none of a bias.
    twice = trace_of_work(rest(), *back, *passes("sum", "sum", phase="backward", size=flat))
    assert [one.rows for one in findings("unfused_activation", twice)] == [(1, 4)]
    # That of another layer.
    other = trace_of_work(rest(), *back, *passes("sum", phase="backward", size=[4096, 2048]))
    assert findings("unfused_activation", other) == []


@pytest.mark.parametrize(("provider", "swap"), [("kprof", "gelu"), (None, None)])
def test_a_gelu_is_swapped_where_the_dry_run_says_that_it_fits(provider, swap):
    rows = (DryRunRow("gelu", provider, "" if provider else "it has hooks", 12, 12),)
    trace = trace_of_work(rest(), *GELU_OF_GPT2, rest(), dry_run=DryRun(("gelu",), rows))
    (found,) = findings("unfused_activation", trace)
    assert (found.swap, bool(found.command)) == (swap, swap is not None)


def test_tiles_that_fill_a_wave_and_a_bit_are_found_and_whole_waves_are_not():
    # 12 x 12 tiles of 128 are 144 on 132 SMs: two waves, of which the second is nearly empty.
    name = "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT"
    partial = product(200 * US, m=1536, n=1536, share=0.4, name=name)
    whole = product(200 * US, m=1408, n=1536, share=0.4, name=name)
    (found,) = findings("gemm_shapes", trace_of_work(rest(), partial))
    assert "55 %" in quantities_in(found.claim)
    assert findings("gemm_shapes", trace_of_work(rest(), whole)) == []


def test_a_weights_gradient_with_odd_rows_in_memory_is_unaligned_and_a_plain_left_matrix_is_not():
    # Of an odd vocabulary: the gradients of the logits, transposed, have rows of 50,257 elements.
    gradient = product(400 * US, m=50257, n=4096, k=4096, share=0.3)
    turned_left = {**gradient, "strides": [[1, 50257], [4096, 1]]}
    plain_left = {**gradient, "strides": [[4096, 1], [4096, 1]]}
    (found,) = findings("gemm_shapes", trace_of_work(rest(), turned_left))
    assert found.rows == (1,)
    assert findings("gemm_shapes", trace_of_work(rest(), plain_left)) == []
    assert findings("gemm_shapes", trace_of_work(rest(), gradient)) == []


def test_norms_between_turned_convolutions_gain_up_to_their_least_traffic():
    turning = ran("aten::convolution", 20 * US, "copy", name="cudnn::ops::nchwToNhwcKernel<half>")
    norm = work("aten::native_batch_norm", 90 * US, "norm", 0.3, shapes=[X])
    convolution = ran("aten::cudnn_convolution", 100 * US, "convolution")
    (found,) = findings("channels_last", trace_of_work(*[turning] * 4, norm, convolution, rest()))
    assert found.rows == (0, 1, 2, 3, 4)
    # At nine tenths of the bandwidth its 27 µs take 30; modestly as long as now.
    assert found.fix == Fix(best_ns=30 * US, modest_ns=130 * US)


def test_what_is_written_to_its_place_by_another_kernel_costs_a_growing_cache_nothing():
    (found,) = findings("kv_cache_layout", trace_of_work(*joined([128, 129, 130])))
    # Modestly three of the shortest kernels write them.
    assert found.fix == Fix(best_ns=0, modest_ns=3 * 860, launches=0)


def test_attention_inside_torchs_fallback_is_found_by_its_name():
    math = {
        "name": "aten::_scaled_dot_product_attention_math",
        "duration_ns": 5_000,
        "start_ns": 501_000,
    }
    trace = trace_of_work(rest(), ran("aten::bmm", 200 * US, "gemm"), ranges=[math])
    number = len(trace.ranges)
    parents = [None] * number
    parents[1] = number - 1
    inside = trace.with_ranges(parent=pd.array(parents, dtype="Int64"))
    (found,) = findings("math_attention", inside)
    assert found.rows == (1,)
    assert findings("math_attention", trace) == []


def test_the_backward_of_what_torchs_fallback_did_is_its_own_too():
    math = {"name": "aten::_scaled_dot_product_attention_math", "duration_ns": 5_000}
    node = {"name": "MulBackward0", "start_ns": 10 * MS, "duration_ns": 5_000}
    rows = [rest(), ran("aten::mul", 100 * US), ran("aten::mul", 100 * US, phase="backward")]
    trace = trace_of_work(*rows, ran("aten::mul", 100 * US), ranges=[math, node])
    number = len(trace.ranges)
    parents, numbers, threads = [None] * number, [None] * number, [None] * number
    parents[1], parents[2] = number - 2, number - 1
    numbers[1], numbers[-1], threads[-1] = 7, 7, 1
    columns = {"parent": parents, "sequence": numbers, "forward_thread": threads}
    linked = trace.with_ranges(**{c: pd.array(v, dtype="Int64") for c, v in columns.items()})
    (found,) = findings("math_attention", linked)
    assert found.rows == (1, 2)


def test_shapes_that_are_damaged_are_no_error():
    hostile = ["x", None, [["a", 2]], [[-1, 10**40]], [[[1]]], {"a": 1}, [[10**40, 4], [4, 10**40]]]
    for op in ("aten::mm", "aten::cat", "aten::silu", "aten::_softmax", "aten::mul"):
        rows = [ran(op, 100 * US, "gemm", shapes=shapes) for shapes in hostile]
        assert diagnose(trace_of_work(*rows)) is not None


def test_a_prompt_that_is_appended_to_a_cache_is_no_growing_cache():
    assert findings("kv_cache_layout", trace_of_work(*joined([128, 256, 384], new=64))) == []


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_few_kernels_are_launched_late_where_steps_are_marked(is_marked):
    machine = Machine(1)
    for number in range(3):
        with machine.step(number) if is_marked else nullcontext():
            forward(machine, 12, 3 * US)
    assert bool(findings("launch_bound_host", explained(machine))) is is_marked


@pytest.mark.parametrize(("num_steps", "confidence"), [(0, "medium"), (1, "medium"), (2, "high")])
def test_late_launches_of_what_may_be_a_first_use_are_less_certain(num_steps, confidence):
    machine = Machine(1)
    for number in range(max(num_steps, 1)):
        with machine.step(number) if num_steps else nullcontext():
            forward(machine, 60, 3 * US)
    (found,) = findings("launch_bound_host", explained(machine))
    assert found.confidence == confidence


@pytest.mark.parametrize(
    ("starts_ms", "confidence"),
    [(range(2, 98, 4), "high"), (range(2, 48, 2), "medium"), ((2, 50), "medium")],
    ids=["throughout", "at its beginning", "twice"],
)
def test_copies_are_as_certain_as_in_a_loop_where_they_go_on_through_the_window(
    starts_ms, confidence
):
    copy = {"name": "Memcpy HtoD (Pageable -> Device)", "activity": "memcpy", "kind": "copy"}
    copy |= {"duration_ns": MS, "copied_bytes": 4 << 20}
    rows = [copy | {"start_ns": start * MS} for start in starts_ms]
    ends = [{"start_ns": at * MS, "duration_ns": MS} for at in (0, 99)]
    found = diagnose(measured(trace_of(ends[0], *rows, ends[1]))).findings
    assert [one.confidence for one in found if one.rule == "pageable_copies"] == [confidence]


@pytest.mark.parametrize("share", [0.2, 0.8])
@pytest.mark.parametrize(("tf32", "rule"), [(60e12, "tf32_products"), (120e12, "fp32_products")])
def test_float32_gemms_go_to_the_next_faster_type_of_the_gpu(tf32, rule, share):
    rates = {"fp32": 60e12, "tf32": tf32, "bf16": 240e12}
    gemm = product(3 * MS, dtype="fp32", share=share)
    trace = trace_of_work(gemm, device=replace(ROUND_DEVICE, flops_per_s=rates))
    found = {one.rule: one.saving.high_ns for one in diagnose(trace).findings}
    assert found[rule] > 0
    assert {"tf32_products", "fp32_products"} & set(found) == {rule}


@pytest.mark.parametrize(
    ("options", "number"),
    [({}, 8), ({"times": 2}, 0), ({"num_bytes": (1 << 20, 2 << 20)}, 0), ({"times": 3}, 6)],
    ids=["four times", "too few", "another size", "three times"],
)
def test_a_round_trip_is_of_one_size_and_recurs(options, number):
    found = findings("round_trips", moved_between_kernels("DtoH", "HtoD", **options))
    assert sum(len(one.rows) for one in found) == number
    assert all(one.fix.modest_ns == number * 100 * US for one in found)


def test_copies_beside_a_kernel_are_no_round_trip_between_kernels():
    """An offload and a prefetch that the computation hides."""
    whole = moved_between_kernels("DtoH", "HtoD")
    is_kernel = whole.kernels["activity"] == "kernel"
    longer_ns = whole.kernels["duration_ns"].mask(is_kernel, 10 * MS)
    assert findings("round_trips", whole)
    assert not findings("round_trips", whole.with_kernels(duration_ns=longer_ns))


def test_without_ceilings_a_fused_chain_moves_its_bytes_as_fast_as_its_fastest_operator():
    rows = [work("aten::mul", ns, "elementwise", 1, shapes=[[10**7]]) for ns in (40 * US, 60 * US)]
    rows[0]["bytes"] = rows[1]["bytes"] = 120_000_000
    (found,) = findings("elementwise_chains", trace_of_work(*rows, rest(100 * US), device=None))
    assert found.fix.best_ns == 40 * US


def test_without_ceilings_fused_attention_multiplies_as_fast_as_the_fastest_gemm():
    fast = product(100 * US, flops=4 * 10**10)
    (found,) = findings("math_attention", trace_of_work(fast, *attention(), device=None))
    # 2e10 FLOPs at 4e14 FLOPs a second.
    assert (found.fix.best_ns, found.fix.modest_ns) == (50 * US, 340 * US)


def test_operators_of_unknown_size_are_no_chain():
    row = {**work("aten::mul", 60 * US, "elementwise", 0.8), "shapes": None}
    trace = trace_of_work(*repeated([row], 3), rest(100 * US))
    assert findings("elementwise_chains", trace) == []


def on_gpu(capability, *rows, name="NVIDIA H100 80GB HBM3"):
    gpu = Gpu(0, name, compute_capability=capability)
    trace = trace_of_work(*rows)
    return replace(trace, meta=replace(trace.meta, gpus=(gpu,)))


def copied(ns, num_bytes, name="Memcpy HtoD (Pageable -> Device)", **more):
    copy = {"name": name, "activity": "memcpy", "kind": "copy", "copied_bytes": num_bytes}
    return {**ran("aten::copy_", ns), **copy, **more}


BYTES = 64 << 20
# Over PCIe 5.0, and over a shared link of PCIe 3.0.
FASTEST_NS, SLOWEST_NS = 1_220_161, 12_905_551


def test_a_copy_that_the_device_waits_in_counts_though_the_device_is_never_idle():
    # On an H100: 64 MiB in 8.76 ms, 1.22 from pinned memory; a step was 37.6 ms, and 31.8 then.
    trace = on_gpu("9.0", copied(8_760 * US, BYTES), rest(28 * MS))
    (found,) = findings("pageable_copies", trace)
    told = quantities_in(found.claim)
    assert told[told.index("8.76 ms") :][:3] == ["8.76 ms", "1.22 ms", "3.05 ms"]
    assert (found.fix.best_ns, found.fix.modest_ns) == (FASTEST_NS, 3_050_403)
    assert found.rows == (0,)


@pytest.mark.parametrize(
    ("capability", "name", "fastest_ns"),
    [
        ("8.6", "NVIDIA A10", 2_485_513),
        ("7.5", "Tesla T4", 5_162_220),
        ("9.0", "AMD Instinct MI250X", FASTEST_NS),
        (None, "anything", FASTEST_NS),
    ],
)
def test_the_link_is_as_fast_as_its_generation(capability, name, fastest_ns):
    trace = on_gpu(capability, copied(40 * MS, BYTES), rest(), name=name)
    (found,) = findings("pageable_copies", trace)
    is_known = fastest_ns != FASTEST_NS
    slowest_ns = round(fastest_ns / 0.4) if is_known else SLOWEST_NS
    assert found.fix.best_ns == fastest_ns
    assert found.fix.modest_ns == pytest.approx(slowest_ns, abs=2)


@pytest.mark.parametrize(
    ("capability", "name"),
    [("9.0", "NVIDIA H100"), ("8.0", "A100"), ("7.0", "V100"), ("9.0", "AMD"), (None, "anything")],
)
@pytest.mark.parametrize("slower", [1.1, 2.0, 30.0])
def test_what_a_slow_link_explains_saves_nothing_at_least(capability, name, slower):
    (slowest,) = findings("pageable_copies", on_gpu(capability, copied(90 * MS, BYTES), name=name))
    took = round(slowest.fix.best_ns * slower)
    trace = on_gpu(capability, copied(took, BYTES), rest(took), name=name)
    (found,) = findings("pageable_copies", trace)
    assert found.fix.best_ns == slowest.fix.best_ns
    assert found.fix.modest_ns == min(took, slowest.fix.modest_ns)


def test_pinned_copies_of_the_recording_tell_how_fast_others_would_be():
    pinned = [copied(ns, BYTES, "Memcpy HtoD (Pinned -> Device)") for ns in (3 * MS, 4 * MS)]
    trace = on_gpu("9.0", copied(20 * MS, BYTES), rest(28 * MS), *pinned)
    (found,) = findings("pageable_copies", trace)
    assert (found.fix.best_ns, found.fix.modest_ns) == (3 * MS, 4 * MS)


def test_results_are_copied_to_pinned_memory_as_fast_as_batches_from_it():
    up, down = (
        findings("pageable_copies", on_gpu("9.0", copied(9 * MS, BYTES, name), rest(28 * MS)))[0]
        for name in ("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)")
    )
    assert (down.fix.best_ns, down.fix.modest_ns) == (up.fix.best_ns, up.fix.modest_ns)


@pytest.mark.parametrize("num_bytes", [4, 64 << 10])
@pytest.mark.parametrize("way", ["HtoD (Pageable -> Device)", "DtoH (Device -> Pageable)"])
def test_a_small_copy_takes_as_long_from_pinned_memory(way, num_bytes):
    rows = repeated([copied(20 * US, num_bytes, f"Memcpy {way}"), rest(20 * US)], 50)
    assert findings("pageable_copies", on_gpu("9.0", *rows)) == []


def test_a_copy_that_pinned_memory_would_not_make_faster_is_none():
    fast = copied(FASTEST_NS, BYTES), rest()
    assert findings("pageable_copies", trace_of_work(*fast)) == []
    pinned = copied(8_760 * US, BYTES, "Memcpy HtoD (Pinned -> Device)"), rest()
    assert findings("pageable_copies", trace_of_work(*pinned)) == []


def test_a_copy_behind_other_work_costs_the_device_nothing():
    behind = copied(8 * MS, BYTES, start_ns=10 * US, stream=9)
    assert findings("pageable_copies", trace_of_work(rest(30 * MS), behind)) == []


def test_only_copies_that_pinned_memory_makes_faster_are_part_of_what_is_saved():
    rows = [
        copied(FASTEST_NS, BYTES),
        copied(20 * MS, BYTES),
        rest(30 * MS),
        copied(9 * MS, BYTES, start_ns=25 * MS, stream=9),
    ]
    (found,) = findings("pageable_copies", trace_of_work(*rows))
    assert found.rows == (1,)
    assert found.fix.modest_ns == SLOWEST_NS
    assert quantities_in(found.claim)[:2] == ["3", "192 MiB"]
    assert "20 ms" in quantities_in(found.claim)


def test_only_the_idle_time_of_copies_of_unknown_size_counts():
    assert findings("pageable_copies", trace_of_work(copied(8 * MS, None), rest())) == []


def test_a_model_in_float32_gains_its_products_and_its_attention():
    rows = [
        product(500 * US, dtype="tf32"),
        ran("aten::_efficient_attention_forward", 400 * US, "attention", dtype="fp32", flops=7e10),
        ran("aten::add", 60 * US, dtype="fp32"),
        ran("aten::mul_", 80 * US, dtype="fp32", phase="optimizer"),
        ran("aten::copy_", 90 * US, "copy", dtype="fp32", activity="memcpy"),
    ]
    (found,) = findings("tf32_products", trace_of_work(*rows))
    # At 70 % of 1,000 Tflop/s.
    best = round(2 * 4096**3 / 700e12 * 1e9) + 100 * US
    # What only moves bytes takes half at best, and as long as now where it stays in float32.
    assert found.fix.best_ns == pytest.approx(best + 30 * US, abs=2)
    assert found.fix.modest_ns == pytest.approx((2 * best + 900 * US) / 3 + 60 * US, abs=2)
    assert found.rows == (0, 1, 2)
    assert "60 µs" in quantities_in(found.claim)


def test_what_autocast_leaves_in_float32_would_not_move_half():
    rows = [product(600 * US), product(110 * US, dtype="tf32"), ran("aten::sum", 90 * US)]
    (found,) = findings("tf32_products", trace_of_work(*rows, ran("aten::add", 60 * US)))
    assert "would move half" not in found.claim


def test_unfused_attention_in_float32_is_held_against_the_models_own_type():
    # Torch's fallback computes in float32 what comes in bf16.
    casts = [ran("aten::_to_copy", 10 * US, "copy", dtype="bf16", shapes=[X]) for _ in range(2)]
    wide = [{**one, "dtype": "fp32"} for one in attention()]
    inside = [wide[0], *casts, *wide[1:]]
    (found,) = findings("math_attention", trace_of_work(rest(), *inside))
    assert found.fix.best_ns == pytest.approx(2e10 / 700e12 * 1e9, abs=1)


def test_what_torchs_fallback_for_attention_does_in_float32_makes_no_model_of_float32():
    wide = [{**one, "dtype": "tf32"} for one in attention()]
    assert findings("tf32_products", trace_of_work(*wide, rest())) == []
    assert len(findings("tf32_products", trace_of_work(wide[0], rest()))) == 1


def sleeping(amid, *, is_training=False, stacks=True):
    """Return steps of two passes whose host sleeps between these, or else between the steps."""
    machine = Machine(1, stacks=stacks)

    def sleep():
        with machine.python("<built-in function sleep>"):
            machine.run(8 * MS)

    for number in range(4):
        with machine.step(number):
            with machine.phase("forward"):
                for part in range(40):
                    machine.kernel("aten::mm", 40 * US)
                    if amid and part == 20:
                        sleep()
            if is_training:
                with machine.phase("backward"):
                    machine.kernel("aten::mm", 400 * US)
        if not amid:
            sleep()
    return explained(machine)


def test_a_host_that_sleeps_amid_a_pass_is_found_in_inference_and_between_steps_in_training():
    (found,) = findings("host_sleeps", sleeping(amid=True))
    assert "<built-in function sleep>" in found.details[0]
    assert findings("host_sleeps", sleeping(amid=False)) == []
    assert len(findings("host_sleeps", sleeping(amid=False, is_training=True))) == 1


def test_a_host_that_shows_nothing_is_not_said_to_sleep():
    assert findings("host_sleeps", sleeping(False, is_training=True, stacks=False)) == []


def test_sleep_saves_at_most_what_the_device_waits():
    trace = sleeping(amid=True)
    (found,) = findings("host_sleeps", trace)
    pricer = find_pricer(trace)
    alone = pricer.price([found])
    lost_ns = trace.idle["duration_ns"].iloc[list(found.idle_rows)].sum() / 4
    assert (alone.low_ns, alone.high_ns) == (0, pytest.approx(lost_ns, abs=1))


def repeated_rounds(folder, *, kernel_name, rounds=60):
    """Return the analyzed export of a program that allocates and launches again and again."""
    rows = []
    for number in range(rounds):
        at, call = number * 100 * US, {"correlationId": number + 1}
        rows += [
            nsys_files.launch("cuMemAlloc_v2", start=at, end=at + 40 * US, correlationId=0),
            nsys_files.launch("cuLaunchKernel", start=at + 80 * US, end=at + 84 * US, **call),
            nsys_files.kernel(
                start=at + 88 * US, end=at + 92 * US, demangledName=kernel_name, **call
            ),
        ]
    return analyze(read(nsys_files.write(folder, *rows)))


@pytest.mark.parametrize(
    ("kernel_name", "rule", "proves"),
    [
        ("fill_42_gpu", "repeated_allocations", False),
        ("at::native::fill_kernel", "memory_fragmentation", True),
    ],
)
def test_a_change_of_torch_is_proposed_for_a_program_that_uses_it(
    tmp_path, kernel_name, rule, proves
):
    found = diagnose(repeated_rounds(tmp_path, kernel_name=kernel_name)).findings
    commands = {one.rule: one.command for one in found}
    assert rule in commands
    assert len({"repeated_allocations", "memory_fragmentation"} & set(commands)) == 1
    assert [bool(commands[name]) for name in (rule, "launch_bound_host")] == [proves, proves]


def test_a_known_cause_comes_before_a_smaller_cost_that_no_rule_explains():
    rules = {
        ns: [one.rule for one in diagnose(migrating(40, kernel_ns=ns)).findings]
        for ns in (2 * MS, 20 * MS)
    }
    assert rules[2 * MS] == ["unified_memory", "unexplained_time"]
    assert rules[20 * MS][0] == "unexplained_time"


def test_a_kernel_is_not_as_long_as_the_migrations_that_its_faults_cause():
    kernel = {"name": "add", "kind": "elementwise", "duration_ns": 20 * MS}
    faults = [
        {"name": "Memcpy UVM HtoD (Managed -> Managed)", "activity": "memcpy", "stream": 9}
        | {"kind": "copy", "start_ns": at * MS + 500 * US, "duration_ns": 20 * US}
        for at in range(1, 19)
    ]
    launched = kernel | {"grid": "1,1,1", "block": "1,1,1", "start_ns": 0}
    trace = trace_of_work(launched, *faults)
    found = {one.rule: one.saving for one in diagnose(trace).findings}
    assert found["low_occupancy"].high_ns > 0.9 * 20 * MS


@pytest.mark.parametrize(("columns", "is_large"), [(1_999, False), (2_000, True)])
def test_logits_count_from_four_million_elements_on(columns, is_large):
    trace = trace_of_work(rest(), *loss_of([2_000, columns]))
    rows, number, largest = rows_of_logits(trace)
    assert (len(rows) > 0, largest) == (is_large, 2_000 * columns * is_large)
    assert number == 2 * is_large
