"""For each rule a trace with its fault, a clean twin without, and near misses that are no fault."""

from __future__ import annotations

from dataclasses import dataclass

from tests.analyze.findings.rule_faults import (
    GATE,
    HALF,
    HEADS,
    LARGE_LOGITS,
    LOGITS,
    RMS_NORM,
    Build,
    attention,
    chained,
    checkpointed,
    clocked,
    communicating,
    compiling,
    decoding,
    joined,
    loss_of,
    migrating,
    moved_between_kernels,
    planted,
    tiny,
    trained,
    turned,
    updated,
    uploads,
    waiting,
)
from tests.analyze.findings.rule_traces import (
    GPU,
    US,
    X,
    product,
    ran,
    repeated,
    rest,
    trace_of_work,
    work,
)


@dataclass(frozen=True)
class Case:
    """Traces that a rule fires on, and those that it is silent on."""

    faulty: Build
    clean: Build
    near: Build


def of_planted(name: str, near: Build) -> Case:
    """Return the case of a planted workload and its clean twin."""
    return Case(lambda: planted(name, is_faulty=True), lambda: planted(name, is_faulty=False), near)


CASES: dict[str, Case] = {
    "launch_bound_host": of_planted("kernels_too_short", lambda: decoding(1)),
    "host_stalls": of_planted(
        "python_between_launches", lambda: planted("kernels_too_short", is_faulty=True)
    ),
    # A service that waits for requests has no work.
    "host_sleeps": of_planted(
        "sleeps_in_a_step", lambda: planted("waits_for_requests_with_stacks", is_faulty=True)
    ),
    "no_cuda_graph_in_decode": Case(
        lambda: decoding(1), lambda: decoding(1, 60 * US), lambda: decoding(4096)
    ),
    # One wait in a step of many milliseconds costs less than a hundredth of it.
    "sync_in_loop": of_planted(
        "item_after_every_graph", lambda: planted("item_every_step", is_faulty=True)
    ),
    "data_loading": of_planted(
        "slow_loader", trained(before=lambda machine: machine.run(600 * US))
    ),
    "pageable_copies": Case(
        trained(before=uploads(pinned=False)),
        trained(before=uploads(pinned=True)),
        lambda: planted("pageable_batches", is_faulty=True),
    ),
    "memory_fragmentation": of_planted(
        "allocates_every_step",
        trained(amid=lambda machine: machine.call("cudaMalloc", 100 * US)),
    ),
    # No allocator that keeps memory of the GPU pins any.
    "repeated_allocations": of_planted(
        "pins_memory_every_step", lambda: planted("allocates_every_step", is_faulty=True)
    ),
    "unified_memory": Case(
        lambda: migrating(40), lambda: migrating(2), lambda: migrating(40, name="HtoD")
    ),
    "round_trips": Case(
        lambda: moved_between_kernels("DtoH", "HtoD"),
        lambda: moved_between_kernels(),
        # An upload and then a download: the kernel between two others gets new data.
        lambda: moved_between_kernels("HtoD", "DtoH"),
    ),
    "exposed_collectives": Case(
        lambda: communicating(beside=0),
        lambda: communicating(beside=1),
        lambda: communicating(beside=0.9),
    ),
    "stragglers": Case(
        lambda: waiting([0, 0, 500 * US]),
        lambda: waiting([0, 0, 0]),
        # One comes early: the others do not keep each other waiting.
        lambda: waiting([0, 300 * US, 320 * US]),
    ),
    "tiny_kernels": Case(
        lambda: tiny(2 * US), lambda: tiny(60 * US), lambda: tiny(2 * US, late=True)
    ),
    "elementwise_chains": Case(
        lambda: chained(10**7, 10**7, 10**7),
        lambda: chained(10**7),
        lambda: chained(10**7, 10**6, 10**5),
    ),
    "unfused_norm": Case(
        lambda: trace_of_work(*repeated([*RMS_NORM, rest()], 2)),
        lambda: trace_of_work(
            *repeated([work("aten::_fused_rms_norm", 20 * US, "norm", 0.8, shapes=[X]), rest()], 2)
        ),
        # A reciprocal root without a mean is no norm.
        lambda: trace_of_work(RMS_NORM[0], RMS_NORM[1], *RMS_NORM[3:], rest()),
    ),
    "unfused_activation": Case(
        lambda: trace_of_work(
            work("aten::silu", 40 * US, "elementwise", 0.8, shapes=[GATE]),
            product(200 * US),
            work("aten::mul", 60 * US, "elementwise", 0.8, shapes=[GATE, GATE]),
            rest(),
        ),
        lambda: trace_of_work(
            work("swiglu", 60 * US, "elementwise", 0.8, shapes=[GATE, GATE]), product(200 * US)
        ),
        # A gate for each channel is multiplied in elsewhere.
        lambda: trace_of_work(
            work("aten::silu", 40 * US, "elementwise", 0.8, shapes=[GATE]),
            product(200 * US),
            work("aten::mul", 60 * US, "elementwise", 0.8, shapes=[[4, 1, 8192]]),
        ),
    ),
    "unfused_rope": Case(
        lambda: trace_of_work(
            work("aten::mul", 30 * US, "elementwise", 0.3, shapes=[HEADS]),
            work("aten::neg", 10 * US, "elementwise", 0.3, shapes=[HALF]),
            work("aten::cat", 35 * US, "copy", 0.3, shapes=[[HALF, HALF], []]),
            work("aten::mul", 20 * US, "elementwise", 0.3, shapes=[HEADS]),
            work("aten::add", 30 * US, "elementwise", 0.3, shapes=[HEADS, HEADS]),
            rest(),
        ),
        lambda: trace_of_work(work("rope", 20 * US, "elementwise", 0.8, shapes=[HEADS]), rest()),
        lambda: trace_of_work(
            # What is negated is not joined again.
            work("aten::mul", 30 * US, "elementwise", 0.8, shapes=[HEADS]),
            work("aten::neg", 30 * US, "elementwise", 0.8, shapes=[HEADS]),
            work("aten::add", 30 * US, "elementwise", 0.8, shapes=[HEADS]),
            rest(),
        ),
    ),
    "unfused_loss": Case(
        lambda: trace_of_work(rest(), *loss_of(LOGITS)),
        lambda: trace_of_work(
            rest(), work("cross_entropy", 100 * US, "loss", 0.8, shapes=[LOGITS])
        ),
        lambda: trace_of_work(rest(), *loss_of([256, 1000])),
    ),
    "logits_materialised": Case(
        lambda: trace_of_work(rest(), *loss_of(LARGE_LOGITS)),
        lambda: trace_of_work(rest(), *loss_of(LOGITS)),
        lambda: trace_of_work(rest(), *loss_of(LARGE_LOGITS, backward=False)),
    ),
    "unfused_optimizer": Case(
        lambda: trace_of_work(
            rest(), *updated("aten::_foreach_addcdiv_", 20 * US), *updated("aten::_foreach_mul_", 9)
        ),
        lambda: trace_of_work(rest(), *updated("aten::_fused_adamw_", 20 * US)),
        lambda: trace_of_work(
            *repeated([rest()], 20), *updated("aten::_foreach_addcdiv_", 20 * US, number=2)
        ),
    ),
    "math_attention": Case(
        lambda: trace_of_work(rest(), *attention()),
        lambda: trace_of_work(rest(), ran("aten::_flash_attention_forward", 60 * US, "attention")),
        # A classifier: the softmax of a layer's result.
        lambda: trace_of_work(rest(), *attention(first="aten::mm")[:3]),
    ),
    "fp32_products": Case(
        lambda: trace_of_work(product(500 * US, dtype="fp32"), rest(100 * US)),
        lambda: trace_of_work(product(100 * US, dtype="tf32")),
        lambda: trace_of_work(*repeated([rest()], 20), product(100 * US, dtype="fp32")),
    ),
    "tf32_products": Case(
        lambda: trace_of_work(product(500 * US, dtype="tf32"), rest(100 * US)),
        lambda: trace_of_work(product(250 * US, dtype="bf16"), ran("aten::add", 50 * US)),
        lambda: trace_of_work(*repeated([rest()], 20), product(500 * US, dtype="tf32")),
    ),
    "gemm_shapes": Case(
        lambda: trace_of_work(rest(), product(400 * US, n=50257, share=0.3)),
        lambda: trace_of_work(rest(), product(150 * US, n=50304, share=0.8)),
        lambda: trace_of_work(rest(), product(150 * US, n=50257, share=0.8)),
    ),
    "fp8_opportunity": Case(
        lambda: trace_of_work(product(500 * US), rest(100 * US)),
        lambda: trace_of_work(product(300 * US, dtype="fp8")),
        lambda: trace_of_work(product(500 * US, k=1024)),
    ),
    "low_dram_bandwidth": Case(
        lambda: trace_of_work(rest(), work("aten::copy_", 100 * US, "copy", 0.2, shapes=[X])),
        lambda: trace_of_work(rest(), work("aten::copy_", 25 * US, "copy", 0.8, shapes=[X])),
        lambda: trace_of_work(
            rest(), *repeated([work("aten::copy_", 5 * US, "copy", 0.2, shapes=[X])], 9)
        ),
    ),
    "channels_last": Case(lambda: turned(8), lambda: turned(0), lambda: turned(1)),
    "recompilation": Case(
        lambda: compiling("entire_frame_compile (dynamo_timed)"),
        lambda: compiling("Torch-Compiled Region: 0/0"),
        lambda: compiling("Torch-Compiled Region: 0/0", "Torch-Compiled Region: 0/1"),
    ),
    "kv_cache_layout": Case(
        lambda: trace_of_work(*joined([128, 129, 130])),
        lambda: trace_of_work(*joined([128, 129, 130], op="aten::index_copy_")),
        # Halves that are joined, as in a rotary embedding, do not grow.
        lambda: trace_of_work(*joined([32, 32, 32], new=32)),
    ),
    "throttling": Case(lambda: clocked(0x40), lambda: clocked(0x0), lambda: clocked(0x4)),
    "power_cap": Case(
        lambda: clocked(0x4), lambda: clocked(0x0), lambda: clocked(0x4, clock_mhz=1960.0)
    ),
    "small_blocks": Case(
        lambda: trace_of_work(rest(), ran("Fan2", 100 * US, block="4,4,1", grid="9999,1,1")),
        lambda: trace_of_work(rest(), ran("Fan2", 100 * US, block="16,16,1", grid="999,1,1")),
        lambda: trace_of_work(rest(), ran("Fan2", 100 * US, block="32,1,1", grid="9999,1,1")),
    ),
    "low_occupancy": Case(
        lambda: trace_of_work(rest(), ran("aten::cumsum", 100 * US, "reduction", grid="4,1,1")),
        lambda: trace_of_work(rest(), ran("aten::cumsum", 20 * US, "reduction", grid="528,1,1")),
        # Few blocks leave room for what runs beside them.
        lambda: trace_of_work(
            rest(),
            ran("aten::cumsum", 100 * US, "reduction", grid="4,1,1", start_ns=50 * US, stream=20),
        ),
    ),
    "needless_checkpointing": Case(
        lambda: checkpointed(20 << 30),
        lambda: checkpointed(20 << 30, recomputed=False),
        lambda: checkpointed(70 << 30),
    ),
}
assert GPU.memory_bytes == 80 << 30
