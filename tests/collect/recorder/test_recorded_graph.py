"""A training step that one CUDA graph replays, recorded on a GPU together with its capture."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.passes import analyze
from kprof.collect.readers.recorded import reader as recorded
from kprof.device import find_device
from kprof.report.result import result_of

FOLDER = Path(__file__).parents[2] / "data" / "h200" / "whole_step"


@cache
def opened():
    trace = recorded.read(FOLDER)
    return analyze(replace(trace, meta=replace(trace.meta, device=find_device("NVIDIA H200"))))


def share(is_told):
    duration_ns = opened().kernels["duration_ns"].to_numpy()
    return duration_ns[is_told.to_numpy(bool)].sum() / duration_ns.sum()


def test_a_replayed_step_is_named_by_its_capture():
    kernels = opened().kernels
    assert share(kernels["attributed_by"] == "capture") > 0.9
    assert share(kernels["op"].notna()) > 0.99


def test_the_work_of_a_replayed_step_is_that_of_the_operators_that_were_captured():
    trace = opened()
    coverage = result_of(trace, balance(trace))["coverage"]
    assert coverage["modelled_share"] > 0.99
    assert coverage["share_by_source"]["shapes"] > 0.85


def test_every_replay_does_the_same_work():
    kernels = opened().kernels
    replayed = kernels[kernels["attributed_by"] == "capture"]
    flops = replayed.groupby("launch_row")["flops"].sum()
    assert len(flops) == 5
    assert flops.nunique() == 1
