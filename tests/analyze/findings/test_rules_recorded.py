"""What the rules say of real recordings: everything that is true and useful, and nothing else."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.analyze.passes import analyze
from kprof.device import find_device
from kprof.opened import read
from tests.quantities import quantities_in

RECORDED = Path(__file__).parents[2] / "data" / "h200"
SHARED = Path(__file__).parents[4] / "shared" / "traces"
OTHERS = sorted(path for path in SHARED.rglob("*.gz")) if SHARED.is_dir() else []


@cache
def diagnosed(path):
    trace = read([path])
    device = find_device(trace.gpus[0].name) if trace.gpus else None
    return analyze(replace(trace, meta=replace(trace.meta, device=device)))


def every_finding(name):
    return diagnosed(RECORDED / f"{name}.json.gz").diagnosis.findings


def findings(name):
    """Return what rules find, without large parts that no rule explains."""
    return {one.rule: one for one in every_finding(name) if one.rule != UNEXPLAINED}


def unexplained(name):
    return [one.claim for one in every_finding(name) if one.rule == UNEXPLAINED]


def test_a_llama_in_eager_mode_is_told_to_fuse_its_norms_first():
    found = findings("llama_train")
    assert list(found) == [
        *("unfused_norm", "unfused_rope", "fp8_opportunity", "unfused_loss"),
        *("unfused_activation", "sync_in_loop"),
    ]
    # Two norms in each of 8 layers, and the last.
    claim = found["unfused_norm"].claim
    assert (claim.split()[0], quantities_in(claim)[0]) == ("RMSNorm", "17")
    assert (found["unfused_norm"].swap, found["unfused_norm"].num_rows) == ("rmsnorm", 882)


def test_the_saving_of_the_llamas_norms_is_what_their_bytes_allow():
    # 17 norms over 4 x 1024 x 2048 values of 2 bytes, read or written 5 times: 0.30 ms of 6.5 at
    # 4.8 TB/s. 25 of 26 launches of each are gone, too, and with them 424 pauses of 1.6 µs, and
    # what the host took for them where it is late: less than the 2.1 ms for which the device waits.
    # So at most 6.5 - 0.3 + 2.1 ms.
    saving = findings("llama_train")["unfused_norm"].saving
    assert 5.0e6 < saving.low_ns < 6.5e6 < saving.high_ns < 8.3e6


def test_generating_is_told_to_use_a_graph_before_anything_else():
    found = findings("hf_generate")
    assert next(iter(found)) == "no_cuda_graph_in_decode"
    assert "launch_bound_host" not in found
    assert found["no_cuda_graph_in_decode"].saving.high_ns > 0.8 * 117_700_000


def test_a_convolutional_net_is_launch_bound_and_its_loader_and_layout_are_fine():
    found = findings("convnet_dataloader")
    assert next(iter(found)) == "launch_bound_host"
    assert not found.keys() & {"data_loading", "channels_last", "pageable_copies"}


def test_of_a_compiled_model_the_loss_that_was_not_compiled_is_left():
    # The other is the copy of a slice of the logits, which the loss takes in.
    assert list(findings("compiled")) == ["unfused_loss", "low_dram_bandwidth"]


def test_of_a_replayed_graph_of_unknown_operators_the_largest_part_is_named_and_no_fix_claimed():
    assert findings("cudagraph") == {}
    (claim,) = unexplained("cudagraph")
    assert ("kind gemm" in claim, quantities_in(claim)[:2]) == (True, ["1.98 ms", "36 %"])


def test_a_large_part_that_no_rule_explains_is_named_first():
    first = every_finding("compiled")[0]
    assert (first.rule, first.saving.high_ns) == (UNEXPLAINED, None)
    assert first.details[-1].startswith("To learn more: ")
    assert unexplained("hf_generate") == []


@pytest.mark.parametrize("name", ["llama_train", "hf_generate"])
def test_all_together_save_less_than_the_sum_of_each(name):
    told = diagnosed(RECORDED / f"{name}.json.gz").diagnosis
    highs = [one.saving.high_ns for one in told.findings]
    assert max(highs) <= told.together.high_ns < sum(highs)
    assert told.differs_by == "overlap"


def test_without_the_hosts_limit_other_remedies_save_more_than_alone():
    told = diagnosed(RECORDED / "convnet_dataloader.json.gz").diagnosis
    assert told.together.high_ns > sum(one.saving.high_ns or 0 for one in told.findings)
    assert told.differs_by == "shared limit"


@pytest.mark.slow
@pytest.mark.skipif(not OTHERS, reason="the collection of public traces is not here")
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_of_any_trace_a_finding_saves_at_most_the_step(path):
    trace = diagnosed(path)
    for one in trace.diagnosis.findings:
        if one.saving.high_ns is not None:
            assert 0 <= one.saving.low_ns <= one.saving.high_ns <= one.saving.step_ns
        assert max(one.rows, default=0) < len(trace.kernels)
